"""`LossScaleOptimizer` around the optimizers of Keras and tf_keras: gradients, clipping, hyperparameters, threads."""

from tests.adapters.tensorflow_devices import EACH_MODE  # noqa: I001
from concurrent.futures import ThreadPoolExecutor

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from lossscale_core import DynamicScaling
from lossscale_tf import LossScaleOptimizer, v1

INF = float("inf")
POLICY = DynamicScaling(init_scale=2.0**10, growth_interval=3)

KERAS = tuple(map(int, keras.__version__.split(".")[:2]))
MAKERS = [
    *(
        optimizer
        for name, optimizer in vars(keras.optimizers).items()
        if isinstance(optimizer, type) and not name.startswith(("Loss", "Multi", "Optimizer"))
        if name != "Muon" or KERAS >= (3, 11)  # before, Keras has none that runs
    ),
    tf_keras.optimizers.Adam,
    tf_keras.optimizers.legacy.Adam,
    lambda rate: tf_keras.optimizers.SGD(tf_keras.optimizers.schedules.CosineDecay(rate, 10), momentum=0.5),
]


@pytest.mark.parametrize("make", MAKERS)
def test_every_optimizer(make):
    """With every optimizer, a skipped step between two others changes no bit, and the config makes an equal wrapper."""
    optimizer = LossScaleOptimizer(make(0.5), POLICY, global_clipnorm=1.0)
    again = LossScaleOptimizer.from_config(optimizer.get_config())
    # Some optimizers of Keras 3 and tf_keras have the same name.
    assert type(again.inner_optimizer) is type(optimizer.inner_optimizer)
    assert again.get_config() == optimizer.get_config()
    wrapped, bare = LossScaleOptimizer(make(0.1), POLICY), make(0.1)
    package = keras if isinstance(bare, keras.optimizers.Optimizer) else tf
    variable, expected = (package.Variable([[1.0, 2.0], [3.0, 4.0]]) for _ in range(2))
    for grad in ([[0.5, 0.5], [0.5, 0.5]], [[0.5, 0.5], [INF, 0.5]], [[1.0, 0.0], [0.0, 1.0]]):
        wrapped.minimize(lambda grad=grad: variable * grad, [variable])
        if INF not in grad[1]:
            bare.apply_gradients([(tf.constant(grad), expected)])
    theirs = LossScaleOptimizer(bare, POLICY).weights
    pairs = zip([variable, *wrapped.weights], [expected, *theirs], strict=True)
    assert all(ours.numpy().tobytes() == theirs.numpy().tobytes() for ours, theirs in pairs)


def test_overwriting_values_are_not_gradients():
    """Such values, as for float8 scales, are not unscaled, not clipped and not part of the norm."""
    variables = [keras.Variable([0.0]), keras.Variable([1.0])]
    variables[1].overwrite_with_gradient = True
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(1.0), 8.0, global_clipnorm=1.0)
    optimizer.get_scaled_loss(tf.constant(1.0))
    grads = optimizer.get_unscaled_gradients([tf.constant([4.0]), tf.constant([1e6])])
    optimizer.apply_gradients(zip(grads, variables, strict=True))
    assert [float(variable.value[0]) for variable in variables] == [-0.5, 1e6]


@pytest.mark.parametrize(
    ("inner", "value"),
    [
        (lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=3), 7),
        (lambda: tf_keras.optimizers.legacy.SGD(0.1), tf.Variable(7, dtype=tf.int64)),
    ],
)
def test_iterations_can_be_set(inner, value):
    """Setting `iterations` of the wrapper sets the inner optimizer's count of applied steps."""
    optimizer = LossScaleOptimizer(inner(), POLICY)
    # The count is of applied steps, even if Keras 3 accumulates gradients.
    optimizer.iterations = value
    assert int(optimizer.iterations) == int(optimizer.inner_optimizer.iterations) == 7


@EACH_MODE
def test_a_custom_gradient_aggregator(mode):
    """The aggregator of a legacy optimizer gets unscaled gradients, and its results are checked and applied."""
    variable = tf.Variable(0.0)
    aggregate = lambda pairs: [(4.0 * grad, variable) for grad, variable in pairs]  # noqa: E731
    optimizer = LossScaleOptimizer(tf_keras.optimizers.legacy.SGD(1.0, gradient_aggregator=aggregate), 2.0)
    optimizer.build([variable])
    step = mode(lambda factor: optimizer.minimize(lambda: factor * variable, [variable]))
    for factor in (1.0, INF, 1e38):  # the last one is finite until it is aggregated
        step(tf.constant(factor))
    assert (float(variable), int(optimizer.metrics()["skipped_steps"])) == (-4.0, 2)


@pytest.mark.parametrize(
    ("wrapper", "sgd"),
    [(LossScaleOptimizer, keras.optimizers.SGD), (v1.LossScaleOptimizer, tf.compat.v1.train.GradientDescentOptimizer)],
)
def test_eager_steps_of_two_threads(wrapper, sgd):
    """If two threads take eager steps, each step counts and changes the weights."""
    optimizer, variable = wrapper(sgd(1.0), loss_scale=DynamicScaling(growth_interval=7)), tf.Variable(0.0)
    step = lambda _=None: optimizer.minimize(lambda: variable * 1.0, var_list=[variable])  # noqa: E731
    step()
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(step, range(80)))
    metrics = optimizer.metrics()
    assert (int(metrics["steps"]), int(metrics["skipped_steps"]), float(variable)) == (81, 0, -81.0)


@pytest.mark.parametrize("make", [keras.optimizers.SGD, tf_keras.optimizers.SGD, tf_keras.optimizers.legacy.SGD])
def test_a_parameter_server(make):
    """Under this strategy a legacy optimizer cannot omit its own sum over replicas."""
    strategy = tf.distribute.experimental.CentralStorageStrategy(["CPU:0"])
    with strategy.scope():
        variable, optimizer = tf.Variable(0.0), LossScaleOptimizer(make(1.0), 8.0)
        optimizer.build([variable])
    strategy.run(lambda: optimizer.minimize(lambda: variable * 3.0, [variable]))
    assert float(variable) == -3.0


@EACH_MODE
def test_gradients_of_other_kinds(mode):
    """Numbers and arrays are accepted, integers are errors, and a warning names a variable without a gradient."""
    optimizer, variable, other = LossScaleOptimizer(keras.optimizers.SGD(1.0), 4.0), tf.Variable(0.0), tf.Variable(0.0)
    optimizer.build([variable, other])

    def step():
        optimizer.get_scaled_loss(tf.constant(1.0))
        grads = optimizer.get_unscaled_gradients([8.0, np.float32(4.0), np.array(12.0, "float16")])
        optimizer.apply_gradients([(sum(grads), variable), (None, other)])

    with pytest.warns(UserWarning, match=f"no gradient exists for {other.name}"):
        mode(step)()
    assert float(variable) == -6.0
    with pytest.raises(TypeError, match="dtype int32"):
        mode(lambda: optimizer.apply_gradients([(tf.constant(1), variable)]))()


@pytest.mark.parametrize("make", [keras.optimizers.SGD, tf_keras.optimizers.SGD, tf_keras.optimizers.legacy.SGD])
def test_the_result_of_a_step(make):
    """A step returns the count of applied steps, and has ended in a graph when this count is ready."""
    optimizer, variable, copied = LossScaleOptimizer(make(1.0), 4.0), tf.Variable(0.0), tf.Variable(0.0)
    optimizer.build([variable])

    @tf.function(autograph=False)
    def step():
        done = optimizer.minimize(lambda: variable * 2.0, [variable])
        with tf.control_dependencies([done]):
            copied.assign(tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=tf.float32))
        return done

    assert (int(step()), float(copied)) == (1, -2.0)
    assert int(optimizer.minimize(lambda: variable * 2.0, [variable])) == 2
