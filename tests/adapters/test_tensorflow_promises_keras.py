"""Promises 48 to 99: the documents of `tf.keras.mixed_precision` about its `LossScaleOptimizer`.

Each is tried eagerly and in `tf.function` where that differs, and around the optimizers of Keras 3 and both generations
of tf_keras where it is about what they do.
"""

from tests.adapters.tensorflow_devices import EACH_MODE, STRATEGY  # noqa: I001

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from lossscale_core import DynamicScaling, FixedScaling
from lossscale_tf import LossScaleOptimizer

INF = float("inf")
OPTIMIZERS = [keras.optimizers, tf_keras.optimizers, tf_keras.optimizers.legacy]


@pytest.fixture(params=OPTIMIZERS, ids=["Keras 3", "tf_keras, new", "tf_keras, legacy"])
def optimizers(request):
    return request.param


def _wrapped(*args, rate=0.25, of=keras.optimizers, **kwargs):
    return LossScaleOptimizer(of.SGD(rate), *args, **kwargs)


@pytest.mark.promise(48, 49, 50, 51, 58, 75, 76, 81, 82, 83)
def test_the_constructor():
    """`(optimizer, loss_scale)`, or `(inner_optimizer, dynamic, initial_scale, dynamic_growth_steps)`, or a policy."""
    inner, policy = keras.optimizers.SGD(), DynamicScaling(growth_interval=7)
    assert LossScaleOptimizer(optimizer=inner, loss_scale=8.0).inner_optimizer is inner
    for number in (8, 8.0, np.float32(8), np.int64(8)):
        assert _wrapped(number).policy == FixedScaling(8.0)
    assert _wrapped(dynamic=False, initial_scale=8.0).policy == FixedScaling(8.0)
    for arguments in ({}, {"loss_scale": "dynamic"}, {"dynamic": True}):
        assert _wrapped(**arguments).policy == DynamicScaling(init_scale=2.0**15, max_scale=2.0**126)
    assert _wrapped(policy="dynamic").policy == DynamicScaling()
    assert _wrapped(policy).policy is _wrapped(policy=policy).policy is policy
    optimizer = _wrapped(True, 8.0, 3)
    assert (optimizer.dynamic, optimizer.initial_scale, optimizer.dynamic_growth_steps) == (True, 8.0, 3)
    assert (optimizer.loss_scale.dtype, optimizer.loss_scale.shape) == (tf.float32, ())


@pytest.mark.promise(52, 69, 90)
@EACH_MODE
def test_the_loss_is_scaled(optimizers, mode):
    """Each method scales the loss, a callable or a tensor, and returns or applies unscaled gradients."""
    optimizer, variable = _wrapped(4.0, of=optimizers), tf.Variable(3.0)

    @tf.custom_gradient
    def loss(x):
        def backward(upstream):
            tf.debugging.assert_equal(upstream, 4.0)
            return upstream

        return tf.identity(x), backward

    def compute_with_tape():
        with tf.GradientTape() as tape:
            value = loss(variable)
        return [grad for grad, _ in optimizer.compute_gradients(value, [variable], tape)]

    mode(lambda: optimizer.minimize(lambda: loss(variable), [variable]))()
    assert variable.numpy() == 2.75
    calls = [compute_with_tape, lambda: optimizer.get_gradients(lambda: loss(variable), [variable])]
    for call in (*map(mode, calls), tf.function(lambda: optimizer.get_gradients(loss(variable), [variable]))):
        assert [float(grad) for grad in call()] == [1.0]


@pytest.mark.promise(54, 55, 77, 78, 79)
@pytest.mark.parametrize("make", [lambda inner: LossScaleOptimizer(inner, "dynamic"), LossScaleOptimizer])
def test_the_examples(optimizers, make):
    """Both documents' examples print 0.5 and 0.25."""
    opt = make(optimizers.SGD(0.25))
    var = tf.Variable(1.0)
    loss_fn = lambda: var**2  # noqa: E731
    opt.minimize(loss_fn, var_list=var)
    assert var.numpy() == 0.5
    with tf.GradientTape() as tape:
        scaled_loss = opt.get_scaled_loss(loss_fn())
    scaled_grad = tape.gradient(scaled_loss, var)
    (grad,) = opt.get_unscaled_gradients([scaled_grad])
    opt.apply_gradients([(grad, var)])
    assert var.numpy() == 0.25


@pytest.mark.promise(53, 56, 64, 83, 84, 85, 87, 91)
@EACH_MODE
@pytest.mark.parametrize("bad", [INF, -INF, float("nan")])
def test_the_rule(optimizers, mode, bad):
    """The scale doubles after N finite steps; a bad element skips the step, halves the scale and resets the count."""
    optimizer = LossScaleOptimizer(optimizers.Adam(0.1), initial_scale=4.0, dynamic_growth_steps=2)
    variables = [tf.Variable([1.0, 2.0]), tf.Variable(3.0)]
    optimizer.build(variables)

    def step(factor):
        optimizer.minimize(lambda: tf.reduce_sum(variables[0]) + variables[1] * factor, variables)

    step, seen, after = mode(step), [], None
    for factor in (1.0, 1.0, 1.0, bad, 1.0):
        step(tf.constant(factor))
        before, after = after, [variable.numpy().tobytes() for variable in (*variables, *optimizer.weights)]
        counts = int(optimizer.dynamic_counter), int(optimizer.iterations)
        seen.append((float(optimizer.loss_scale), *counts, after == before))
    # Each row has the loss scale, its count, the applied steps, and whether variables and slots are unchanged.
    assert seen == [(4.0, 1, 1, False), (8.0, 0, 2, False), (8.0, 1, 3, False), (4.0, 0, 3, True), (4.0, 1, 4, False)]


@pytest.mark.promise(91)
def test_a_fixed_scale():
    """A step that overflows is skipped, with a fixed scale, too."""
    optimizer, variable = _wrapped(4.0), tf.Variable(1.0)
    optimizer.minimize(lambda: variable * INF, variable)
    assert (float(variable), float(optimizer.loss_scale), optimizer.dynamic_counter) == (1.0, 4.0, None)


@pytest.mark.promise(90)
def test_methods_of_each_generation():
    """The wrapper has the methods of a tf_keras optimizer only around such an optimizer."""
    legacy = LossScaleOptimizer(tf_keras.optimizers.legacy.SGD(1.0, clipnorm=10.0), 8.0)
    assert (legacy.clipnorm, legacy.use_ema) == (10.0, False)
    assert [*map(id, legacy.variables())] == [*map(id, legacy.variables)]
    with pytest.raises(AttributeError, match=r"has no get_updates; call minimize\(loss, var_list\)"):
        legacy.get_updates(None, [])
    assert legacy.add_weight("mine", shape=(2,), initializer="ones").numpy().tolist() == [1.0, 1.0]
    pairs = [(tf.constant(1.0), tf.Variable(1.0))]
    assert list(LossScaleOptimizer(tf_keras.optimizers.SGD(1.0), 8.0).aggregate_gradients(pairs)) == pairs
    assert not hasattr(_wrapped(8.0), "aggregate_gradients")


@pytest.mark.promise(59, 60, 73, 90)
def test_weights_and_slots(optimizers):
    """The wrapper has the inner optimizer's weights in the order of creation, and finds slots by variable and name."""
    first = (keras if optimizers is keras.optimizers else tf).Variable([1.0, 2.0])
    # Variables may have the same name, and the name of one may begin with the name of another.
    variables = [first, tf.Variable([3.0]), tf.Variable([[4.0]], name="w"), tf.Variable([[[5.0]]], name="w_0_b")]
    optimizer = LossScaleOptimizer(optimizers.SGD(0.25, momentum=0.5))
    optimizer.minimize(lambda: tf.add_n([tf.reduce_sum(variable**2) for variable in variables]), variables)
    inner = optimizer.inner_optimizer
    assert [*map(id, optimizer.weights)] == [*map(id, getattr(inner, "weights", None) or inner.variables)]
    assert {*map(id, optimizer.weights)} < {*map(id, optimizer.variables)}
    (name,) = optimizer.get_slot_names()
    for variable in variables:
        slot = optimizer.get_slot(variable, name)
        assert slot.shape == variable.shape
        assert np.abs(slot.numpy()).tolist() in (variable.numpy().tolist(), (4 * variable).numpy().tolist())
    mine = optimizer.add_slot(variables[1], "mine", initializer="ones")
    assert optimizer.get_slot_names() == [name, "mine"]
    assert optimizer.get_slot(variables[1], "mine") is mine
    optimizer.set_weights([2 * weight for weight in optimizer.get_weights()])
    assert mine.numpy().tolist() == [2.0]


@pytest.mark.promise(61, 62, 63)
@pytest.mark.parametrize(
    "own_sum", [{}, {"experimental_aggregate_gradients": False}, {"skip_gradients_aggregation": True}], ids=str
)
def test_over_replicas(optimizers, own_sum):
    """Gradients are summed once over replicas, and an overflow on one replica skips the step on all replicas."""
    with STRATEGY.scope():
        variable, optimizer = tf.Variable(1.0), _wrapped(DynamicScaling(init_scale=8.0), rate=1.0, of=optimizers)

    @tf.function(autograph=False)
    def step(victim):
        def on_replica():
            context = tf.distribute.get_replica_context()
            optimizer.get_scaled_loss(tf.constant(0.0))
            grad = tf.where(context.replica_id_in_sync_group == victim, INF, 8.0)
            (grad,) = optimizer.get_unscaled_gradients([context.all_reduce("sum", grad) if own_sum else grad])
            optimizer.apply_gradients([(grad, variable)], **own_sum)

        STRATEGY.run(on_replica)

    for victim in (2, 0, 1):
        step(tf.constant(victim))
        assert [float(value) for value in STRATEGY.experimental_local_results(variable)] == [-1.0] * 2
    assert optimizer.loss_scale == 2.0


class Custom(keras.optimizers.SGD):
    """An optimizer that Keras knows only by `custom_objects`."""


EXPERIMENTAL = {"initial_loss_scale": 4.0, "increment_period": 3, "multiplier": 2.0}
DYNAMIC = {"initial_scale": 4.0, "dynamic_growth_steps": 3}
WITHOUT_EFFECT = "weight_decay clipnorm global_clipnorm clipvalue ema_overwrite_frequency loss_scale_factor"
OLD_CONFIGS = {
    "experimental, dynamic": {"loss_scale": {"class_name": "DynamicLossScale", "config": EXPERIMENTAL}},
    "experimental, fixed": {"loss_scale": {"class_name": "FixedLossScale", "config": {"loss_scale_value": 4.0}}},
    "tf.keras 2.4, dynamic": {"dynamic": True, **DYNAMIC},
    "tf.keras 2.4, fixed": {"dynamic": False, "initial_scale": 4.0, "dynamic_growth_steps": None},
    "Keras 3.0": {"name": "opt", **DYNAMIC, **dict.fromkeys(WITHOUT_EFFECT.split()), "use_ema": False},
}


@pytest.mark.promise(68)
@pytest.mark.parametrize("name", OLD_CONFIGS)
def test_configs_of_the_originals(name):
    """Configs of all three generations work, with an optimizer of the user, too."""
    inner = {"class_name": "Custom", "config": {"learning_rate": 0.5}}
    config = {"optimizer" if "experimental" in name else "inner_optimizer": inner, **OLD_CONFIGS[name]}
    optimizer = LossScaleOptimizer.from_config(config, {"Custom": Custom})
    dynamic = DynamicScaling(init_scale=4.0, growth_interval=3, max_scale=2.0**126)
    assert optimizer.policy == (FixedScaling(4.0) if "fixed" in name else dynamic)
    assert (type(optimizer.inner_optimizer), float(optimizer.learning_rate)) == (Custom, 0.5)


def test_old_configs_of_tf_keras():
    """An old config, which has no module, makes an optimizer of tf_keras if only tf_keras has one of its settings."""
    for setting in ("decay", "is_legacy_optimizer"):
        inner = {"class_name": "SGD", "config": {"learning_rate": 0.5, setting: False}}
        optimizer = LossScaleOptimizer.from_config({"inner_optimizer": inner, **OLD_CONFIGS["tf.keras 2.4, dynamic"]})
        assert type(optimizer.inner_optimizer).__module__.startswith("tf_keras.")


@pytest.mark.promise(71, 74)
@EACH_MODE
def test_losses_and_gradients_keep_their_kind(mode):
    """Scaled losses and unscaled gradients keep their kind, but float16 becomes float32."""
    scale = 2.0**26  # its reciprocal is zero in float16
    optimizer = _wrapped(scale)
    scaled = mode(lambda: optimizer.get_scaled_loss(tf.constant(2.0, tf.float16)))()
    assert (scaled.dtype, float(scaled)) == (tf.float32, 2.0 * scale)
    assert float(mode(lambda: optimizer.get_scaled_loss(lambda: tf.constant(2.0))())()) == 2.0 * scale
    sparse = tf.IndexedSlices(tf.constant([[4.0]], tf.float16), tf.constant([1]), tf.constant([3, 1]))
    first, none, third = mode(lambda: optimizer.get_unscaled_gradients([tf.constant(8.0), None, sparse]))()
    assert (float(first), none) == (8.0 / scale, None)
    assert third.values.numpy().tolist() == [[4.0 / scale]]


def test_grad_loss_of_a_half_loss():
    """`grad_loss` has the dtype of the loss, although the scaled loss is float32."""
    optimizer, variable = _wrapped(8.0, rate=1.0), tf.Variable([1.0, 2.0])
    grad_loss = tf.constant([1.0, 10.0], tf.float16)
    optimizer.minimize(lambda: tf.cast(variable, tf.float16) * 3.0, [variable], grad_loss=grad_loss)
    assert variable.numpy().tolist() == [-2.0, -28.0]


@pytest.mark.promise(88, 89)
@pytest.mark.parametrize(("limit", "at_the_start"), [(2.0**13, 2), (1.0, 15)])
def test_how_many_steps_are_skipped(limit, at_the_start):
    """2 to 15 steps at the start; then one step in N + 1, if each growth overflows."""
    policy = _wrapped(dynamic_growth_steps=10).policy
    state, skipped = policy.init_state(), []
    for _ in range(at_the_start + 8 * (10 + 1)):
        state = policy.update(state, state.loss_scale <= limit)
        skipped.append(state.skipped_steps)
    assert skipped[at_the_start - 1] == skipped[at_the_start + 10 - 1] == at_the_start
    assert skipped[-1] == at_the_start + 8


@pytest.mark.promise(57, 92, 93, 94, 95, 96, 97, 98, 99)
def test_hyperparameters(optimizers):
    """`learning_rate`, `lr` and `beta_1` of the wrapper are those of the inner optimizer."""
    opt = LossScaleOptimizer(optimizers.Adam(0.25, beta_1=0.8, epsilon=0.5))
    assert float(opt.learning_rate) == float(opt.lr) == 0.25
    opt.lr = 0.5
    assert float(opt.inner_optimizer.learning_rate) == 0.5
    opt.learning_rate = 0.125
    assert float(opt.inner_optimizer.learning_rate) == 0.125
    assert opt.beta_1 == 0.8
    opt.beta_1 = 0.7
    assert opt.beta_1 == opt.inner_optimizer.beta_1 == 0.7
    with pytest.raises(AttributeError, match="'LossScaleOptimizer' object has no attribute 'epsilon'"):
        opt.epsilon  # noqa: B018
    # Setting another hyperparameter on the wrapper warns, and changes nothing.
    with pytest.warns(UserWarning, match="set it on inner_optimizer instead"):
        opt.epsilon = 1e-4
    assert opt.inner_optimizer.epsilon == 0.5
    variable = tf.Variable(0.0)
    opt.minimize(lambda: variable * 1.0, [variable])
    norm = 0.001**0.5  # of the moving average of squares
    np.testing.assert_allclose(variable.numpy(), -0.125 * norm / (norm + 0.5), rtol=1e-4)  # with the old epsilon
