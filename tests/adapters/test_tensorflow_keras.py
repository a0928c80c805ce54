"""`LossScaleOptimizer` around the optimizers of Keras and tf_keras: gradients, clipping, hyperparameters, threads."""

from tests.adapters.tensorflow_devices import EACH_MODE  # noqa: I001
import threading
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
tf1 = tf.compat.v1


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
    """A skipped step between two other steps changes no bit, and the config makes an equal wrapper.

    Some optimizers of Keras 3 and tf_keras have the same name.
    """
    optimizer = LossScaleOptimizer(make(0.5), POLICY, global_clipnorm=1.0)
    again = LossScaleOptimizer.from_config(optimizer.get_config())
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
    variable, overwritten = keras.Variable([0.0]), keras.Variable([1.0])
    overwritten.overwrite_with_gradient = True
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(1.0), 8.0, global_clipnorm=1.0)
    optimizer.get_scaled_loss(tf.constant(1.0))
    grads = optimizer.get_unscaled_gradients([tf.constant([4.0]), tf.constant([1e6])])
    optimizer.apply_gradients(zip(grads, [variable, overwritten], strict=True))
    assert (float(variable.value[0]), float(overwritten.value[0])) == (-0.5, 1e6)


def test_a_hyperparameter_reaches_the_inner_optimizer():
    """It may be set between eager steps."""
    variable = tf.Variable(0.0)
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(1.0, momentum=0.5), 8.0)
    for momentum, expected in ((0.5, -1.0), (0.0, -2.0)):
        optimizer.momentum = momentum
        optimizer.minimize(lambda: variable, [variable])
        assert float(variable) == expected


@pytest.mark.parametrize(
    ("inner", "value"),
    [
        (lambda: keras.optimizers.SGD(0.1), 7),
        (lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=3), 7),
        (lambda: tf_keras.optimizers.SGD(0.1), tf.Variable(7, dtype=tf.int64)),
        (lambda: tf_keras.optimizers.legacy.SGD(0.1), tf.Variable(7, dtype=tf.int64)),
    ],
)
def test_iterations_can_be_set(inner, value):
    """Setting it sets the inner optimizer's count. It counts applied steps, even if Keras 3 accumulates gradients."""
    optimizer = LossScaleOptimizer(inner(), POLICY)
    optimizer.iterations = value
    assert int(optimizer.iterations) == int(optimizer.inner_optimizer.iterations) == 7


@EACH_MODE
def test_a_custom_gradient_aggregator(mode):
    """The aggregator of a legacy optimizer gets unscaled gradients. Its results are checked and applied."""
    variables = [tf.Variable(0.0), tf.Variable(0.0)]
    aggregate = lambda pairs: [(4.0 * grad, variable) for grad, variable in pairs]  # noqa: E731
    optimizer = LossScaleOptimizer(tf_keras.optimizers.legacy.SGD(1.0, gradient_aggregator=aggregate), 2.0)
    assert optimizer.gradient_aggregator is aggregate
    optimizer.build(variables)

    step = mode(lambda factor: optimizer.minimize(lambda: factor * tf.add_n(variables), variables))
    for factor in (1.0, INF, 1e38):  # the last one is finite until it is aggregated
        step(tf.constant(factor))
    assert [float(variable) for variable in variables] == [-4.0, -4.0]
    assert int(optimizer.metrics()["skipped_steps"]) == 2


@pytest.mark.parametrize("of_v1", [False, True])
def test_eager_steps_of_two_threads(of_v1):
    """The steps run one after another. Each step counts, and changes the weights."""
    inner = tf1.train.GradientDescentOptimizer(1.0) if of_v1 else keras.optimizers.SGD(1.0)
    wrapper = v1.LossScaleOptimizer if of_v1 else LossScaleOptimizer
    optimizer, variable = wrapper(inner, loss_scale=DynamicScaling(growth_interval=7)), tf.Variable(0.0)

    def steps(count=40):
        for _ in range(count):
            optimizer.minimize(lambda: variable * 1.0, var_list=[variable])

    steps(1)
    threads = [threading.Thread(target=steps) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    metrics = optimizer.metrics()
    assert (int(metrics["steps"]), int(metrics["skipped_steps"]), float(variable)) == (81, 0, -81.0)


@pytest.mark.parametrize("of_v1", [False, True])
def test_two_models_step_at_once(of_v1):
    """An eager step of one model runs while a step of another model waits."""
    wrapper, sgd = (
        (v1.LossScaleOptimizer, tf1.train.GradientDescentOptimizer)
        if of_v1
        else (LossScaleOptimizer, keras.optimizers.SGD)
    )
    has_begun, is_done, variable, inner = threading.Event(), threading.Event(), tf.Variable(0.0), sgd(1.0)
    name = "apply_gradients" if of_v1 else "apply"
    step = getattr(inner, name)

    def wait(*args, **kwargs):
        has_begun.set()
        assert is_done.wait(60.0)
        return step(*args, **kwargs)

    setattr(inner, name, wait)
    first, second = wrapper(inner, loss_scale=8.0), wrapper(sgd(1.0), loss_scale=8.0)
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(lambda: first.minimize(lambda: variable * 1.0, var_list=[variable]))
        assert has_begun.wait(60.0)
        second.minimize(lambda: variable * 1.0, var_list=[variable])
        is_done.set()
        waiting.result()
    assert float(variable) == -2.0


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

    def step(*grads):
        optimizer.get_scaled_loss(tf.constant(1.0))
        first, *others = optimizer.get_unscaled_gradients(grads)
        optimizer.apply_gradients([(sum(others, first), variable), (None, other)])

    with pytest.warns(UserWarning, match=f"no gradient exists for {other.name}"):
        mode(lambda: step(8.0, np.float32(4.0), np.array(12.0, "float16")))()
    assert float(variable) == -6.0
    with pytest.raises(TypeError, match="dtype int32"):
        mode(lambda: optimizer.apply_gradients([(tf.constant(1), variable)]))()


@pytest.mark.parametrize("make", [keras.optimizers.SGD, tf_keras.optimizers.SGD, tf_keras.optimizers.legacy.SGD])
def test_the_result_of_a_step(make):
    """`apply_gradients` and `minimize` return the count of applied steps, and a graph can wait for it."""
    optimizer, variable, copied = LossScaleOptimizer(make(1.0), 4.0), tf.Variable(0.0), tf.Variable(0.0)
    optimizer.build([variable])

    @tf.function(autograph=False)
    def step(grad):
        for take in (
            lambda: optimizer.apply_gradients([(grad, variable)]),
            lambda: optimizer.minimize(lambda: variable * 2.0, [variable]),
        ):
            done = take()
            with tf.control_dependencies([done]):
                copied.assign_add(tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=tf.float32))
        return done

    with pytest.warns(UserWarning, match="not called"):
        assert int(step(tf.constant(1.0))) == 2
    assert (float(variable), float(copied)) == (-3.0, -4.0)
    done = optimizer.minimize(lambda: variable * 2.0, [variable])
    assert int(done) == 3
