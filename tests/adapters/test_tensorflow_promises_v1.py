"""Promises 1 to 47: the documents of `tf.contrib` and `tf.compat.v1` about their `LossScaleOptimizer`.

Each is tried in a graph with a session and eagerly, where it applies to both.
"""

from tests.adapters.tensorflow_devices import OPTIMIZERS_OF_V1, STRATEGY  # noqa: I001
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

from lossscale_core import DynamicScaling, FixedScaling
from lossscale_core.testing import simulate
from lossscale_tf import v1

tf1 = tf.compat.v1
INF = float("inf")
POLICY = DynamicScaling(init_scale=2.0**10, growth_interval=3)


class World:
    """Runs the same test eagerly, or in a graph with a session."""

    def __init__(self, session=None):
        self.session, self.is_eager = session, session is None
        self.built, self.initialized = {}, set()

    def loss(self, function):
        """Return a loss: a callable, or a tensor in a graph."""
        return function if self.is_eager else function()

    def run(self, make):
        """Take the step that `make` makes; in a graph it is built the first time."""
        if self.is_eager:
            make()
            return
        if make not in self.built:
            self.built[make] = make()
        self.value(self.built[make])

    def assign(self, variable, value):
        """Set a variable."""
        self.run(lambda: variable.assign(value))

    def value(self, x):
        """Return the value of a tensor or variable."""
        if self.is_eager:
            return np.asarray(x)
        new = [variable for variable in tf1.global_variables() if variable.name not in self.initialized]
        self.session.run([variable.initializer for variable in new])
        self.initialized.update(variable.name for variable in new)
        return self.session.run(x)


@pytest.fixture(params=["graph", "eager"])
def world(request):
    if request.param == "eager":
        yield World()
        return
    with tf.Graph().as_default(), tf1.Session() as session:
        yield World(session)


def _sgd(*args, rate=0.25, **kwargs):
    return v1.LossScaleOptimizer(tf1.train.GradientDescentOptimizer(rate), *args, **kwargs)


@pytest.mark.promise(4, 6, 15, 36)
@pytest.mark.parametrize("dtype", [tf.float16, tf.float32, tf.float64])
def test_gradients_of_every_kind(world, dtype):
    """A dense or sparse gradient has the dtype of its variable, and is unscaled in float32."""
    variable, unused = tf.Variable([1.0, 2.0], dtype=dtype), tf.Variable(1.0)
    table, optimizer = tf.Variable([[1.0], [2.0], [3.0]], dtype=dtype), _sgd(2.0**15, rate=1.0)

    def half_loss():
        loss = tf.reduce_sum(tf.cast(variable, tf.float16) * tf.constant([2.0**-24, 1.0], tf.float16))
        return loss + tf.cast(tf.reduce_sum(tf.gather(table, [1, 1])), tf.float16)

    pairs = optimizer.compute_gradients(world.loss(half_loss), [variable, table, unused])
    (dense, _), (sparse, _), (none, _) = pairs
    assert isinstance(sparse, tf.IndexedSlices)
    assert (dense.dtype, sparse.dtype, none) == (dtype, dtype, None)
    assert world.value(dense).tolist() == [2.0**-24, 1.0]
    world.run(lambda: optimizer.apply_gradients(pairs))
    assert world.value(table).tolist() == [[1.0], [0.0], [3.0]]


@pytest.mark.parametrize(("dtype", "size", "is_applied"), [("float32", 2e38, False), ("float64", 1e300, True)])
def test_a_scale_below_1(world, dtype, size, is_applied):
    """If unscaling makes a gradient infinite in its dtype, the step is skipped."""
    variable, optimizer = tf.Variable(0.0, dtype=dtype), _sgd(0.25, rate=1.0)
    world.run(lambda: optimizer.minimize(world.loss(lambda: variable * 4.0 * size), var_list=[variable]))
    assert world.value(variable) == -4.0 * size * is_applied


@pytest.mark.promise(7, 9, 13, 18, 47)
def test_the_documents_example(world):
    """The document's example with `FixedLossScaleManager(5000)` and Adam clips gradients between the two calls."""
    variable = tf.Variable([3.0, 4.0])
    optimizer = v1.LossScaleOptimizer(tf1.train.AdamOptimizer(0.1), v1.FixedLossScaleManager(5000))

    def step():
        loss = world.loss(lambda: tf.reduce_sum(variable**2))
        grads, variables = zip(*optimizer.compute_gradients(loss, [variable]), strict=True)
        grads, _ = tf.clip_by_global_norm(grads, 1.0)
        # The pairs may come from an iterator.
        return optimizer.apply_gradients(zip(grads, variables, strict=True))

    world.run(step)
    assert world.value(optimizer.loss_scale) == 5000.0
    np.testing.assert_allclose(world.value(variable), [2.9, 3.9], rtol=1e-6)
    np.testing.assert_allclose(world.value(optimizer.get_slot(variable, "m")), [0.06, 0.08], rtol=1e-5)


@pytest.mark.promise(10)
def test_gradients_from_elsewhere(world):
    """One warning says that their loss was not scaled."""
    optimizer, pairs = _sgd(8.0), [(tf.constant(1.0), tf.Variable(1.0))]
    with pytest.warns(UserWarning, match="cannot come from this optimizer's compute_gradients"):
        optimizer.apply_gradients(pairs)
    optimizer.apply_gradients(pairs)


@pytest.mark.promise(2, 3, 5, 8, 11, 14, 19, 31, 41)
def test_underflow_is_prevented(world):
    """In the document's setting, the gradient is 0 without scaling and 1e-4 with scaling."""
    variable = tf.Variable(0.0)

    def loss():
        x = tf.cast(variable, tf.float16)
        for constant in (1e4, 1e-4, 1e-4):  # backward, 1e-8 is lost before 1e4 can save it
            x = x * tf.constant(constant, tf.float16)
        return x

    for loss_scale, grad in (("none", 0.0), (1e4, 1e-4)):
        optimizer = _sgd(loss_scale, rate=1.0)
        pairs = optimizer.compute_gradients(world.loss(loss), [variable])
        np.testing.assert_allclose(world.value(pairs[0][0]), grad, rtol=1e-2)
        world.run(lambda optimizer=optimizer: optimizer.minimize(world.loss(loss), var_list=[variable]))
        np.testing.assert_allclose(world.value(variable), -grad, rtol=1e-2)


@pytest.mark.promise(12, 37, 38, 39, 40, 45)
def test_it_is_an_optimizer(world):
    """The name, the slots and the variables come from the wrapped optimizer."""
    variable = tf.Variable(1.0)
    optimizer = v1.LossScaleOptimizer(tf1.train.MomentumOptimizer(0.1, 0.9), "dynamic")
    assert isinstance(optimizer, tf1.train.Optimizer)
    assert optimizer.get_name() == "Momentum"
    world.run(lambda: optimizer.minimize(world.loss(lambda: variable * 2.0), var_list=[variable]))
    assert world.value(optimizer.get_slot(variable, "momentum")) == 2.0
    assert optimizer.get_slot(variable, "nothing") is None
    assert optimizer.get_slot_names() == ["momentum"]
    names = " ".join(variable.name for variable in optimizer.variables())
    assert "omentum" in names.partition("loss_scale")[0]


@pytest.mark.promise(16, 17, 29)
def test_what_a_loss_scale_may_be():
    """A number, "dynamic" or a policy, by position or by either name."""
    assert _sgd(8).policy == v1.FixedLossScale(8) == FixedScaling(8.0)
    assert _sgd("dynamic").policy == v1.DynamicLossScale() == DynamicScaling(init_scale=2.0**15, max_scale=2.0**126)
    assert _sgd(loss_scale=POLICY).policy is POLICY
    assert v1.MixedPrecisionLossScaleOptimizer(tf1.train.AdamOptimizer(), POLICY).policy is POLICY
    assert v1.FixedLossScale(1) == FixedScaling(1.0)
    manager = v1.ExponentialUpdateLossScaleManager(1024.0, 10)
    assert manager == v1.ExponentialUpdateLossScaleManager(1024.0, 9.5, 1.5)  # `tf.contrib` rounds up
    assert (manager.hysteresis, manager.backoff_factor, manager.refill_on_finite) == (2, 0.8, False)


@pytest.mark.promise(1, 22, 23, 24, 25, 42)
@pytest.mark.parametrize("make", OPTIMIZERS_OF_V1)
@pytest.mark.parametrize(("loss_scale", "bad", "after"), [(8.0, INF, 8.0), ("dynamic", float("nan"), 2.0**14)])
def test_an_overflow_skips(world, make, loss_scale, bad, after):
    """An overflow changes no bit of any optimizer, even with a fixed scale, and `global_step` does not count it."""
    variable, factor, global_step = tf.Variable([1.0, 2.0]), tf.Variable(1.0), tf.Variable(0)
    optimizer, seen = v1.LossScaleOptimizer(make(0.1), loss_scale), []

    def step():
        loss = world.loss(lambda: tf.reduce_sum(variable) * factor)
        return optimizer.minimize(loss, global_step, var_list=[variable])

    for value, applied in ((1.0, 1), (bad, 1), (1.0, 2)):
        world.assign(factor, value)
        world.run(step)
        assert world.value(global_step) == applied
        seen.append([world.value(each).tobytes() for each in (variable, *optimizer._optimizer.variables())])
    assert seen[0] == seen[1] != seen[2]
    numbers = optimizer.metrics()
    assert [world.value(numbers[name]) for name in ("steps", "skipped_steps", "applied_steps")] == [3, 1, 2]
    assert world.value(optimizer.loss_scale) == after
    assert not world.is_eager or optimizer.last_step.loss_scale_after == after


@pytest.mark.promise(20, 26, 27)
def test_names_and_operations():
    """In a graph, a step returns an operation with the name of the argument or of the optimizer."""
    name = "a/b.c-d>e_1"  # each kind of character that TensorFlow accepts
    with tf.Graph().as_default():
        variable, optimizer = tf1.Variable(1.0), _sgd(8.0, use_locking=True, name=name)
        pairs = optimizer.compute_gradients(variable * 2.0, [variable])
        named, unnamed = optimizer.apply_gradients(pairs, name="mine"), optimizer.apply_gradients(pairs)
    assert isinstance(named, tf.Operation)
    assert ("mine" in named.name, name in unnamed.name) == (True, True)
    assert (optimizer.get_name(), optimizer._use_locking) == (name, True)
    variable = tf.Variable(1.0)
    # Eager code returns None.
    assert _sgd(8.0).minimize(lambda: variable * 2.0, var_list=[variable]) is None


@pytest.mark.promise(30, 33, 34, 35, 42, 46)
def test_arguments_are_handed_on():
    """The arguments of `compute_gradients` and `minimize` reach the wrapped optimizer."""
    with tf.Graph().as_default():
        variable, global_step = tf1.Variable([1.0, 2.0]), tf1.train.get_or_create_global_step()
        optimizer = _sgd(8.0)
        compute = optimizer._optimizer.compute_gradients = mock.Mock(wraps=optimizer._optimizer.compute_gradients)
        # The state of the scale is not trainable.
        assert [variable for _, variable in optimizer.compute_gradients(variable * 3.0)] == [variable]
        assert compute.call_args.args[1:] == (None, optimizer.GATE_OP, None, False, None)
        arguments = ([variable], optimizer.GATE_NONE, tf1.AggregationMethod.EXPERIMENTAL_TREE, True)
        optimizer.minimize(variable * 3.0, global_step, *arguments, "mine", weights := tf.constant([1.0, 10.0]))
        assert compute.call_args.args[1:] == (*arguments, weights)
        assert (optimizer.GATE_NONE, optimizer.GATE_OP, optimizer.GATE_GRAPH) == (0, 1, 2)
        with pytest.raises(ValueError, match="gate_gradients"):
            optimizer.compute_gradients(variable * 3.0, [variable], gate_gradients=3)


@pytest.mark.promise(35, 44)
@pytest.mark.parametrize("dtype", [tf.float16, tf.float32])
def test_grad_loss(world, dtype):
    """In a graph, `grad_loss` has the dtype of the loss, although the scaled loss is float32; eager code ignores it."""
    variable = tf.Variable([1.0, 2.0])
    loss, weights = world.loss(lambda: tf.cast(variable, dtype) * 3.0), tf.constant([1.0, 10.0], dtype)
    for_graphs = (7, 99, True) if world.is_eager else (1, None, False)
    ((grad, found),) = _sgd(8.0).compute_gradients(loss, None, *for_graphs, weights)
    assert found is variable
    assert world.value(grad).tolist() == ([3.0, 3.0] if world.is_eager else [3.0, 30.0])


def test_steps_of_one_session_run_count():
    """All steps count, even if a session runs their updates in any order or at the same time, in branches."""
    with tf.Graph().as_default(), tf1.Session() as session:
        variable = tf1.get_variable("variable", initializer=[1.0, 2.0])
        optimizer = _sgd(POLICY, rate=1e-3)

        def step(factor):
            with tf.control_dependencies([optimizer.minimize(tf.reduce_sum(variable**2) * factor)]):
                return tf.constant(True)

        factors = map(tf.constant, (1.0, 2.0, 3.0))
        steps = [tf.cond(factor > 0.0, lambda f=factor: step(f), lambda: tf.constant(False)) for factor in factors]
        session.run(tf1.global_variables_initializer())
        for _ in range(100):
            session.run(steps)
        assert session.run(optimizer.scale_state.steps) == 300


def test_a_saved_graph_continues_its_policy(tmp_path):
    """In a graph that is saved and imported, the scale follows the policy over random overflows."""
    overflows = np.random.default_rng(0).random(30) < 0.3
    expected = simulate(POLICY, list(~overflows))

    def train(session, steps):
        for n in steps:
            session.run(tf1.get_collection(tf1.GraphKeys.TRAIN_OP), {"factor:0": INF if overflows[n] else 1.0})
            assert session.run(loss_scale) == expected.loss_scale_after[n]

    with tf.Graph().as_default(), tf1.Session() as session:
        variable, factor = tf1.get_variable("variable", initializer=2.0), tf1.placeholder(tf.float32, [], "factor")
        optimizer = v1.LossScaleOptimizer(tf1.train.AdamOptimizer(0.01), POLICY)
        step, loss_scale = optimizer.minimize(variable * factor), tf.identity(optimizer.loss_scale).name
        # `TRAIN_OP` contains the whole step.
        assert tf1.get_collection(tf1.GraphKeys.TRAIN_OP) == [step]
        session.run(tf1.global_variables_initializer())
        train(session, range(15))
        path = tf1.train.Saver().save(session, str(tmp_path / "saved"))
    with tf.Graph().as_default(), tf1.Session() as session:
        tf1.train.import_meta_graph(f"{path}.meta").restore(session, path)
        train(session, range(15, 30))
        weights = session.run(tf1.get_collection(tf1.GraphKeys.TRAINABLE_VARIABLES))
        np.testing.assert_allclose(weights, [2.0 - 0.01 * sum(~overflows)], rtol=1e-5)


def test_replicas_decide_together(world):
    """Both replicas apply a step, or skip it if one overflows, or if the sum of float16 gradients overflows."""
    strategy = STRATEGY if world.is_eager else tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        variable, optimizer = tf.Variable([1.0, 2.0], dtype=tf.float16), _sgd(1.0, rate=0.5)
    factors = tf.Variable([0.0, 0.0])

    def on_replica():
        factor = tf.gather(factors, tf.distribute.get_replica_context().replica_id_in_sync_group)
        loss = world.loss(lambda: tf.reduce_sum(variable) * tf.cast(factor, tf.float16))
        return optimizer.minimize(loss, var_list=[variable])

    def step():
        return strategy.experimental_local_results(strategy.run(on_replica))

    for values in ([0.5, 0.5], [INF, 0.5], [0.5, INF], [40000.0, 40000.0]):
        world.assign(factors, values)
        world.run(step)
        for local in strategy.experimental_local_results(variable):
            assert world.value(local).tolist() == [0.5, 1.5]
    assert world.value(optimizer.scale_state.skipped_steps) == 3
