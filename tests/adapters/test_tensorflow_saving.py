"""A loop that is saved during training and continues in another process ends with the same bits."""

from tests.adapters.tensorflow_devices import OPTIMIZERS_OF_V1, eager, traced  # noqa: I001

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import lossscale_keras
from lossscale_core import DynamicScaling, SpikeGuard
from lossscale_tf import LossScaleOptimizer, v1

POLICY = DynamicScaling(init_scale=2.0**10, growth_interval=3, hysteresis=2)
GUARD = SpikeGuard(warmup=2, memory=4)

WRAPPED = {
    "Keras 3": lambda: LossScaleOptimizer(keras.optimizers.Adam(0.1), POLICY, guard=GUARD),
    "tf_keras, new": lambda: LossScaleOptimizer(tf_keras.optimizers.Adam(0.1), POLICY, guard=GUARD),
    "tf_keras, legacy": lambda: LossScaleOptimizer(tf_keras.optimizers.legacy.Adam(0.1), POLICY, guard=GUARD),
    **{cls.__name__: lambda cls=cls: v1.LossScaleOptimizer(cls(0.1), POLICY) for cls in OPTIMIZERS_OF_V1},
}


@pytest.mark.parametrize("mode", [eager, traced])
@pytest.mark.parametrize("name", WRAPPED)
def test_a_custom_loop_continues(tmp_path, name, mode):
    """A `Checkpoint` is restored before the slots of the optimizer exist, and in a graph after, too."""

    def make_run():
        variable, optimizer = tf.Variable([1.0, 2.0]), WRAPPED[name]()

        def step(factor):
            optimizer.minimize(lambda: tf.reduce_sum(variable**2) * factor, var_list=[variable])

        if mode is traced:
            step(0.0)
        return variable, optimizer, mode(step)

    def bits(variable, optimizer, _):
        variables = getattr(optimizer, "inner_optimizer", optimizer).variables
        variables = variables() if callable(variables) else variables
        state = [*optimizer.scale_state, *(getattr(optimizer, "guard_state", None) or ())]
        return sorted(array.numpy().tobytes() for array in (variable, *variables, *state))

    original, copy = make_run(), make_run()
    checkpoint, other_checkpoint = (tf.train.Checkpoint(variable=run[0], optimizer=run[1]) for run in (original, copy))
    for factor in (1.0, np.inf, 1.0, 1.0):
        original[2](tf.constant(factor))
    status = other_checkpoint.restore(checkpoint.save(tmp_path / "checkpoint"))
    for factor in (1e3, 1.0, np.inf, 1.0, 1.0):
        for _, _, step in (original, copy):
            step(tf.constant(factor))
        assert bits(*copy) == bits(*original)
    status.assert_consumed()


@pytest.mark.parametrize("wrapper", [LossScaleOptimizer, lossscale_keras.LossScaleOptimizer])
def test_a_saved_model_trains_on(tmp_path, wrapper):
    """An exported train step trains on after loading, and skips a step with an infinite gradient."""
    module, variable = tf.Module(), tf.Variable(10.0)
    module.variable, module.optimizer = variable, wrapper(keras.optimizers.SGD(1.0), policy=POLICY)
    module.optimizer.build([variable])

    def step(factor):
        with tf.GradientTape() as tape:
            loss = module.optimizer.scale_loss(variable * factor)
        module.optimizer.apply(tape.gradient(loss, [variable]), [variable])
        return variable.read_value()

    module.step = tf.function(step, input_signature=[tf.TensorSpec(())])
    tf.saved_model.save(module, tmp_path / "module")
    loaded = tf.saved_model.load(tmp_path / "module")
    assert [float(loaded.step(grad)) for grad in (2.0, np.inf, 3.0)] == [8.0, 8.0, 5.0]
    # The scale of the last loss is not saved.
    assert "last_loss_scale" not in str(tf.train.list_variables(tf.train.Checkpoint(module).save(tmp_path / "point")))
