"""Promises 1 to 47: the documents of `tf.contrib` and `tf.compat.v1` about their `LossScaleOptimizer`.

Each is tried in a graph with a session and eagerly, where it applies to both.
"""

from tests.adapters.tensorflow_devices import EACH_MODE, OPTIMIZERS_OF_V1, STRATEGY  # noqa: I001
import copy

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


@pytest.mark.promise(1, 2, 3, 5, 8, 14, 18, 19, 31, 41)
def test_any_optimizer_any_strategy(world):
    """The loss is multiplied by the scale, and the gradients are divided and applied."""
    seen = []

    @tf.custom_gradient
    def watched(x):
        def backward(upstream):
            seen.append(upstream)
            return upstream

        return tf.identity(x), backward

    variable = tf.Variable(3.0)
    optimizer = _sgd(v1.FixedLossScaleManager(8.0))
    world.run(lambda: optimizer.minimize(world.loss(lambda: watched(variable)), var_list=[variable]))
    assert world.value(seen[0]) == 8.0
    assert world.value(variable) == 2.75


@pytest.mark.promise(4, 6, 15)
@pytest.mark.parametrize("dtype", [tf.float16, tf.float32, tf.float64])
def test_dtypes(world, dtype):
    """A gradient has the dtype of its variable and was unscaled in float32, whatever the dtype of the loss is."""
    variable = tf.Variable([1.0, 2.0], dtype=dtype)
    optimizer = _sgd(2.0**15, rate=1.0)

    def half_loss():
        return tf.reduce_sum(tf.cast(variable, tf.float16) * tf.constant([2.0**-24, 1.0], tf.float16))

    pairs = optimizer.compute_gradients(world.loss(half_loss), [variable])
    assert pairs[0][0].dtype == dtype
    assert world.value(pairs[0][0]).tolist() == [2.0**-24, 1.0]
    world.run(lambda: optimizer.apply_gradients(pairs))


@pytest.mark.parametrize(("dtype", "size", "is_applied"), [("float32", 2e38, False), ("float64", 1e300, True)])
def test_a_scale_below_1(world, dtype, size, is_applied):
    """Unscaling may make a gradient infinite in its dtype. The step is then skipped."""
    variable, optimizer = tf.Variable(0.0, dtype=dtype), _sgd(0.25, rate=1.0)
    world.run(lambda: optimizer.minimize(world.loss(lambda: variable * 4.0 * size), var_list=[variable]))
    assert world.value(variable) == -4.0 * size * is_applied


@pytest.mark.promise(7, 9, 13, 47)
def test_the_documents_example(world):
    """`FixedLossScaleManager(5000)` and Adam. Gradients may be clipped between the calls, and come from an iterator."""
    variable, clipped = tf.Variable(1.0), tf.Variable([3.0, 4.0])
    optimizer = v1.LossScaleOptimizer(tf1.train.AdamOptimizer(0.1), v1.FixedLossScaleManager(5000))
    world.run(lambda: optimizer.minimize(world.loss(lambda: variable * 2.0), var_list=[variable]))
    np.testing.assert_allclose(world.value(variable), 0.9, rtol=1e-6)
    assert world.value(optimizer.loss_scale) == 5000.0
    optimizer = _sgd(v1.FixedLossScaleManager(5000), rate=1.0)

    def step():
        loss = world.loss(lambda: tf.reduce_sum(clipped**2))
        grads, variables = zip(*optimizer.compute_gradients(loss, [clipped]), strict=True)
        grads, _ = tf.clip_by_global_norm(grads, 1.0)
        return optimizer.apply_gradients(zip(grads, variables, strict=True))

    world.run(step)
    np.testing.assert_allclose(world.value(clipped), [2.4, 3.2], rtol=1e-6)


@pytest.mark.promise(10)
def test_gradients_from_elsewhere(world):
    """One warning says that their loss was not scaled, unless other gradients come from `compute_gradients`."""
    variable = tf.Variable(1.0)
    foreign, own = _sgd(8.0), _sgd(8.0)
    with pytest.warns(UserWarning, match="cannot come from this optimizer's compute_gradients"):
        foreign.apply_gradients([(tf.constant(1.0), variable)])
    foreign.apply_gradients([(tf.constant(1.0), variable)])
    own.compute_gradients(world.loss(lambda: variable**2), [variable])
    own.apply_gradients([(tf.constant(1.0), variable)])


@pytest.mark.promise(11)
def test_underflow_is_prevented(world):
    """In the document's setting, the gradient is 0 without scaling and 1e-4 with scaling."""
    variable = tf.Variable(1.0)

    def loss():
        x = tf.cast(variable, tf.float16)
        for constant in (1e4, 1e-4, 1e-4):  # backward, 1e-8 is lost before 1e4 can save it
            x = x * tf.constant(constant, tf.float16)
        return x

    without = _sgd("none").compute_gradients(world.loss(loss), [variable])
    scaled = _sgd(1e4).compute_gradients(world.loss(loss), [variable])
    assert world.value(without[0][0]) == 0.0
    np.testing.assert_allclose(world.value(scaled[0][0]), 1e-4, rtol=1e-2)


@pytest.mark.promise(12, 37, 38, 39, 40, 45)
def test_it_is_an_optimizer(world):
    """The name, the slots and the variables come from the wrapped optimizer."""
    variable = tf.Variable(1.0)
    inner = tf1.train.MomentumOptimizer(0.1, 0.9)
    optimizer = v1.LossScaleOptimizer(inner, "dynamic")
    assert isinstance(optimizer, tf1.train.Optimizer)
    assert optimizer.get_name() == "Momentum"
    assert optimizer.get_slot(variable, "momentum") is None
    world.run(lambda: optimizer.minimize(world.loss(lambda: variable * 2.0), var_list=[variable]))
    assert world.value(optimizer.get_slot(variable, "momentum")) == 2.0
    assert optimizer.get_slot(variable, "nothing") is None
    assert optimizer.get_slot_names() == ["momentum"]
    names = [variable.name for variable in optimizer.variables()]
    assert any("Momentum" in name or "momentum" in name for name in names)
    assert any("loss_scale" in name for name in names)


@pytest.mark.promise(16, 17, 29)
def test_what_a_loss_scale_may_be():
    """A number, "dynamic" or a policy, by position or by either name."""
    assert _sgd(8).policy == FixedScaling(8.0)
    assert _sgd("dynamic").policy == v1.DynamicLossScale()
    assert _sgd(loss_scale=POLICY).policy is POLICY
    assert v1.MixedPrecisionLossScaleOptimizer(tf1.train.AdamOptimizer(), POLICY).policy is POLICY
    assert v1.DynamicLossScale().init_scale == 2.0**15
    assert v1.FixedLossScale(4.0) == FixedScaling(4.0)
    assert v1.FixedLossScale(1) == FixedScaling(1.0)
    manager = v1.ExponentialUpdateLossScaleManager(1024.0, 10)
    assert (manager.hysteresis, manager.backoff_factor, manager.refill_on_finite) == (2, 0.8, False)


@pytest.mark.promise(20)
def test_use_locking_and_name():
    """Both are accepted, and each name that TensorFlow accepts."""
    optimizer = _sgd(8.0, use_locking=True, name="scaled")
    assert optimizer._use_locking is True
    assert optimizer.get_name() == "scaled"
    assert _sgd(8.0, name="a/b.c-d>e_1").get_name() == "a/b.c-d>e_1"


@pytest.mark.promise(1, 22, 23, 24, 25, 42)
@pytest.mark.parametrize("make", OPTIMIZERS_OF_V1)
@pytest.mark.parametrize(("loss_scale", "bad", "after"), [(8.0, INF, 8.0), ("dynamic", float("nan"), 2.0**14)])
def test_an_overflow_skips(world, make, loss_scale, bad, after):
    """An overflow changes no bit of any optimizer, even with a fixed scale, and `global_step` does not count it."""
    (variable, expected), factor = (tf.Variable([1.0, 2.0]) for _ in range(2)), tf.Variable(1.0)
    global_step, optimizer, bare = tf.Variable(0), v1.LossScaleOptimizer(make(0.1), loss_scale), make(0.1)

    def step():
        loss = world.loss(lambda: tf.reduce_sum(variable) * factor)
        return optimizer.minimize(loss, global_step, var_list=[variable])

    def bare_step():
        return bare.minimize(world.loss(lambda: tf.reduce_sum(expected)), var_list=[expected])

    for value, applied in ((1.0, 1), (bad, 1), (1.0, 2)):
        world.assign(factor, value)
        world.run(step)
        assert world.value(global_step) == applied
    numbers = optimizer.metrics()
    assert [world.value(numbers[name]) for name in ("steps", "skipped_steps", "applied_steps")] == [3, 1, 2]
    assert world.value(optimizer.loss_scale) == after
    for _ in range(2):
        world.run(bare_step)
    pairs = zip([variable, *optimizer._optimizer.variables()], [expected, *bare.variables()], strict=True)
    assert all(world.value(ours).tobytes() == world.value(theirs).tobytes() for ours, theirs in pairs)


@pytest.mark.promise(26, 27)
def test_the_operation():
    """A graph returns an operation with the name of the argument, or with a default name. Eager code returns None."""
    with tf.Graph().as_default():
        variable = tf1.Variable(1.0)
        pairs = (optimizer := _sgd(8.0)).compute_gradients(variable * 2.0, [variable])
        assert isinstance(optimizer.apply_gradients(pairs, name="mine"), tf.Operation)
        assert "mine" in optimizer.apply_gradients(pairs, name="mine").name
        assert "GradientDescent" in optimizer.apply_gradients(pairs).name
    variable = tf.Variable(1.0)
    assert _sgd(8.0).minimize(lambda: variable * 2.0, var_list=[variable]) is None


@EACH_MODE
@pytest.mark.filterwarnings("ignore:these gradients cannot come")  # they are made up here
def test_halves_that_overflow_when_summed(mode):
    """Each replica's gradient fits into float16, but their sum does not. This step is skipped, the next applied."""
    with STRATEGY.scope():
        variable = tf.Variable(np.float16(1.0))
        optimizer = v1.LossScaleOptimizer(tf1.train.GradientDescentOptimizer(1.0), 1.0)

    def step(grad):
        STRATEGY.run(lambda: optimizer.apply_gradients([(tf.cast(grad, tf.float16), variable)]))

    step = mode(step)
    step(tf.constant(40000.0))
    assert [float(value) for value in STRATEGY.experimental_local_results(variable)] == [1.0] * 2
    assert int(optimizer.scale_state.skipped_steps.numpy()) == 1
    step(tf.constant(0.25))
    assert [float(value) for value in STRATEGY.experimental_local_results(variable)] == [0.5] * 2


class Recording(tf1.train.GradientDescentOptimizer):
    """An optimizer that stores the arguments of its `compute_gradients`."""

    def compute_gradients(self, loss, *args):
        """Store the arguments, and compute."""
        self.arguments = args
        return super().compute_gradients(loss, *args)


@pytest.mark.promise(30, 34, 35, 42, 46)
def test_arguments_are_handed_on():
    """All arguments and defaults reach the wrapped optimizer, also by `minimize`. Gates are 0, 1 or 2."""
    with tf.Graph().as_default():
        variable, global_step = tf1.Variable([1.0, 2.0]), tf1.train.get_or_create_global_step()
        optimizer = v1.LossScaleOptimizer(inner := Recording(1.0), 8.0)
        optimizer.compute_gradients(variable * 3.0)
        assert inner.arguments == (None, optimizer.GATE_OP, None, False, None)
        arguments = ([variable], optimizer.GATE_NONE, tf1.AggregationMethod.EXPERIMENTAL_TREE, True)
        optimizer.minimize(variable * 3.0, global_step, *arguments, "mine", weights := tf.constant([1.0, 10.0]))
        assert inner.arguments == (*arguments, weights)
        assert (optimizer.GATE_NONE, optimizer.GATE_OP, optimizer.GATE_GRAPH) == (0, 1, 2)
        with pytest.raises(ValueError, match="gate_gradients"):
            optimizer.compute_gradients(variable * 3.0, [variable], gate_gradients=3)


@pytest.mark.promise(35)
@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16, tf.float32])
def test_grad_loss(dtype):
    """`grad_loss` has the dtype of the loss, although the scaled loss is float32 or wider."""
    with tf.Graph().as_default(), tf1.Session() as session:
        variable = tf1.get_variable("variable", initializer=[1.0, 2.0])
        loss = tf.cast(variable, dtype) * 3.0
        ((grad, _),) = _sgd(8.0).compute_gradients(loss, (variable,), grad_loss=tf.constant([1.0, 10.0], dtype))
        session.run(tf1.global_variables_initializer())
        assert session.run(grad).tolist() == [3.0, 30.0]


@pytest.mark.promise(44)
def test_eagerly_a_callable():
    """By default the loss selects the variables. Four arguments for graphs have no effect."""
    variable = tf.Variable([2.0, 3.0])
    weights = tf.constant([1.0, 10.0])
    for arguments in ((), (None, 7, 99, True, weights), ([variable], 7, 99, True, weights)):
        ((grad, default),) = _sgd(8.0).compute_gradients(lambda: variable**2, *arguments)
        assert default is variable
        assert grad.numpy().tolist() == [4.0, 6.0]


@pytest.mark.promise(33)
def test_trainable_variables_by_default():
    """The variables of the loss scale are not among them."""
    with tf.Graph().as_default():
        variables = [tf1.Variable(1.0), tf1.Variable(2.0)]
        pairs = _sgd("dynamic").compute_gradients(variables[0] * variables[1])
        assert [variable for _, variable in pairs] == variables
        with pytest.raises(ValueError, match="No variables"):
            _sgd("dynamic").compute_gradients(variables[0] * variables[1], var_list=[])


@pytest.mark.promise(36)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_none_and_sparse(world, dtype):
    """A gradient may be None. `IndexedSlices` stay sparse, in the dtype of their variable. Both can be applied."""
    table, unused = tf.Variable([[1.0], [2.0], [3.0]], dtype=dtype), tf.Variable(1.0)
    optimizer = _sgd(8.0, rate=1.0)
    loss = world.loss(lambda: tf.reduce_sum(tf.gather(table, [1, 1])))
    pairs = optimizer.compute_gradients(loss, [table, unused])
    assert isinstance(pairs[0][0], tf.IndexedSlices)
    assert pairs[0][0].dtype == dtype
    assert pairs[1][0] is None
    world.run(lambda: optimizer.apply_gradients(pairs))
    assert world.value(table).tolist() == [[1.0], [0.0], [3.0]]


@pytest.mark.promise(43)
@pytest.mark.filterwarnings("ignore:these gradients")
def test_values_that_are_not_variables(world):
    """A value that is not a variable is a `ValueError`, like a list without gradients. No list is a `TypeError`."""
    optimizer = _sgd(8.0)
    with pytest.raises(ValueError, match=r"is not a tf\.Variable"):
        optimizer.apply_gradients([(tf.constant(1.0), tf.constant(1.0))])
    with pytest.raises(TypeError, match="pairs"):
        optimizer.apply_gradients(3)
    with pytest.raises(ValueError, match="No gradients provided"):
        optimizer.apply_gradients([(None, tf.Variable(1.0))])
    variable, constant = tf.Variable(1.0), tf.constant(2.0)
    with pytest.raises(ValueError, match=r"is not a tf\.Variable"):
        optimizer.minimize(world.loss(lambda: variable * constant), var_list=[variable, constant])


@pytest.mark.parametrize("branch", [False, True])
def test_steps_of_one_session_run_count(branch):
    """All steps count, even if a session runs their updates in any order or at the same time, or in branches."""
    with tf.Graph().as_default(), tf1.Session() as session:
        variable = tf1.get_variable("variable", initializer=[1.0, 2.0])
        optimizer = _sgd(POLICY, rate=1e-3)

        def step(factor):
            with tf.control_dependencies([optimizer.minimize(tf.reduce_sum(variable**2) * factor)]):
                return tf.constant(True)

        steps = [
            tf.cond(factor > 0.0, lambda f=factor: step(f), lambda: tf.constant(False)) if branch else step(factor)
            for factor in map(tf.constant, (1.0, 2.0, 3.0))
        ]
        session.run(tf1.global_variables_initializer())
        for _ in range(100):
            session.run(steps)
        assert session.run(optimizer.scale_state.steps) == 300


@pytest.mark.parametrize("kind", ["GradientDescentOptimizer", "AdamOptimizer"])
def test_a_saved_graph_continues_its_policy(kind, tmp_path, caplog):
    """The scale follows the policy over random overflows, also in an imported graph with restored variables.

    `TRAIN_OP` contains the whole step, and slots have the names that the wrapped optimizer gives them.
    """
    overflows = np.random.default_rng(0).random(30) < 0.3
    expected = simulate(POLICY, list(~overflows))

    def train(session, steps):
        for n in steps:
            session.run(tf1.get_collection(tf1.GraphKeys.TRAIN_OP), {"factor:0": INF if overflows[n] else 1.0})
            assert session.run(loss_scale) == expected.loss_scale_after[n]

    with tf.Graph().as_default(), tf1.Session() as session:
        variable, factor = tf1.get_variable("variable", initializer=2.0), tf1.placeholder(tf.float32, [], "factor")
        optimizer = v1.LossScaleOptimizer(bare := getattr(tf1.train, kind)(0.01), POLICY)
        step, loss_scale = optimizer.minimize(variable * factor), tf.identity(optimizer.loss_scale).name
        assert tf1.get_collection(tf1.GraphKeys.TRAIN_OP) == [step]
        slots = {"beta1_power", "beta2_power", "variable/Adam", "variable/Adam_1"} if kind == "AdamOptimizer" else set()
        assert {variable.op.name for variable in bare.variables()} == slots
        session.run(tf1.global_variables_initializer())
        train(session, range(15))
        path = tf1.train.Saver().save(session, str(tmp_path / "saved"))
    with tf.Graph().as_default(), tf1.Session() as session:
        tf1.train.import_meta_graph(f"{path}.meta").restore(session, path)
        train(session, range(15, 30))
        weights = session.run(tf1.get_collection(tf1.GraphKeys.TRAINABLE_VARIABLES))
        np.testing.assert_allclose(weights, [2.0 - 0.01 * sum(~overflows)], rtol=1e-5)
    assert not [message for message in caplog.messages if "serializing" in message]


def test_replicas_in_a_session():
    """Under a `MirroredStrategy` of this graph, both replicas apply a step, or skip it if one overflows."""
    with tf.Graph().as_default(), tf1.Session() as session:
        strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
        with strategy.scope():
            variable = tf1.get_variable("variable", initializer=[1.0, 2.0])
            optimizer = _sgd(POLICY, rate=0.5)
        factor = tf1.placeholder(tf.float32, [2])

        def replica():
            here = tf.distribute.get_replica_context().replica_id_in_sync_group
            return optimizer.minimize(tf.reduce_sum(variable) * tf.gather(factor, here), var_list=[variable])

        step = strategy.experimental_local_results(strategy.run(replica))
        session.run(tf1.global_variables_initializer())
        for factors in ([0.5, 0.5], [INF, 0.5], [0.5, INF]):
            session.run(step, {factor: factors})
            for replica in strategy.experimental_local_results(variable):
                np.testing.assert_array_equal(session.run(replica), [0.5, 1.5])
        assert session.run(optimizer.scale_state.skipped_steps) == 2


def test_a_deep_copy_continues_by_itself():
    """It starts with the state of the original. Later steps of either optimizer do not change the other."""
    variable = tf.Variable([1.0, 2.0])
    optimizer = v1.LossScaleOptimizer(tf1.train.AdamOptimizer(0.1), POLICY)
    assert optimizer.last_step is None
    optimizer.minimize(lambda: tf.reduce_sum(variable * INF), var_list=[variable])
    assert optimizer.last_step.loss_scale_after == 2.0**9
    copied, of_copy = copy.deepcopy((optimizer, variable))
    copied.minimize(lambda: tf.reduce_sum(of_copy**2), var_list=[of_copy])
    assert copied.loss_scale.numpy() == optimizer.loss_scale.numpy() == 2.0**9
    assert (int(copied.scale_state.steps), int(optimizer.scale_state.steps)) == (2, 1)
    assert variable.numpy().tolist() == [1.0, 2.0]
    assert (of_copy.numpy() < variable.numpy()).all()
