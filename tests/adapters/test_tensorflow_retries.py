"""`minimize(retries=, protect=)`: an overflow is run again at a lower scale, and a skipped step leaves no trace."""

from tests.adapters.tensorflow_devices import STRATEGY  # noqa: I001
import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from lossscale_core import DynamicScaling, FixedScaling, NoScaling, SpikeGuard, state_to_dict
from lossscale_core.errors import OverflowStreakError, PolicyError, ScaleFloorError, SpikeStreakError
from lossscale_tf import LossScaleOptimizer, v1

POLICY = DynamicScaling(init_scale=2.0**20, growth_interval=3)
GOOD_SCALE = 2.0**12  # the largest scale at which the gradients of `Loop` are finite in float16
BATCH = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
WAYS = ["eager", "graph", "XLA"]
FLOAT8 = tf.dtypes.experimental.float8_e5m2


class Loop:
    """A loop of `minimize` with a loss that writes to moving averages and to the states of two random generators."""

    def __init__(self, way="eager", policy=POLICY, retries=0, **options):
        self.weights = tf.Variable(np.linspace(-1.0, 1.0, 12, dtype=np.float32).reshape(3, 4))
        self.average, self.dropout = keras.layers.BatchNormalization(scale=False), keras.layers.Dropout(0.5, seed=1)
        self.average.build((None, 4))
        self.noise = tf.random.Generator.from_seed(1)
        self.protect = [self.average, self.dropout, self.noise]
        self.variables = [self.weights, self.average.beta]
        inner = keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.9), momentum=0.9)
        self.optimizer = LossScaleOptimizer(inner, policy=policy, **options)
        self.optimizer.build(self.variables)
        self.retries, self.calls, self.size = retries, 0, tf.Variable(1.0)
        self.step = self._step if way == "eager" else tf.function(self._step, autograph=False, jit_compile=way == "XLA")
        self.held = [*self.variables, *self.average.non_trainable_variables, *self.dropout.variables, self.noise.state]
        self.held += [*inner.variables]
        self.begin = [tf.identity(each) for each in self.held]

    def _step(self, batch):
        self.optimizer.minimize(lambda: self._loss(batch), self.variables, retries=self.retries, protect=self.protect)

    def _loss(self, batch):
        self.calls += 1
        outputs = self.average(batch @ self.weights + self.noise.uniform([8, 4]), training=True)
        outputs = self.dropout(outputs, training=True) * outputs
        return self.size * tf.cast(tf.reduce_sum(8.0 * tf.cast(outputs, tf.float16)), tf.float32)

    def bits(self):
        """Return everything but the state of the loss scale."""
        return [tf.convert_to_tensor(each).numpy().tobytes() for each in self.held]

    def state(self):
        """Return the state of the loss scale."""
        return [float(each) for each in self.optimizer.scale_state]

    def begin_again(self, loss_scale):
        """Go back to the beginning, at another loss scale."""
        for variable, value in zip(self.held, self.begin, strict=True):
            variable.assign(value)
        start = POLICY.init_state()._replace(loss_scale=np.float32(loss_scale))
        self.optimizer.load_state_dict(state_to_dict(start, POLICY))


def _run(finite, policy=POLICY):
    """Return the state after updates by these flags."""
    state = policy.init_state()
    for flag in finite:
        state = policy.update(state, flag)
    return [float(each) for each in state]


def _bits_of_run(loop):
    bits = []
    for _ in range(4):
        loop.step(tf.constant(BATCH))
        bits.append(loop.bits())
    return bits


@pytest.mark.parametrize("way", WAYS)
def test_it_is_the_run_that_began_at_that_scale(way):
    """Weights, slots, iterations, averages and generators, bit for bit over several steps, of which none is lost."""
    loop = Loop(way, retries=32)
    retried = _bits_of_run(loop)
    assert int(loop.optimizer.iterations) == 4
    assert loop.state() == _run([False] * 8 + [True] * 3 + [False, True])  # grown, and lowered by a retry
    assert loop.calls == (8 + 3 + 2 if way == "eager" else 1)
    if way == "XLA":  # which may round another program otherwise
        loop.begin_again(GOOD_SCALE)
        assert _bits_of_run(loop) == retried
    else:
        assert _bits_of_run(Loop(way, DynamicScaling(init_scale=GOOD_SCALE, growth_interval=100))) == retried
    assert way == "eager" or loop.step.experimental_get_tracing_count() == 1


@pytest.mark.parametrize("retries", [0, 7])
@pytest.mark.parametrize("way", WAYS[:2])
def test_nothing_has_moved_when_the_retries_are_used_up(way, retries):
    """Each try is an update of the policy; without retries, too, what is protected stays."""
    loop = Loop(way, retries=retries)
    before = loop.bits()
    loop.step(tf.constant(BATCH))
    assert loop.bits() == before
    assert loop.state() == _run([False] * (retries + 1))


@pytest.mark.parametrize("policy", [FixedScaling(2.0**20), NoScaling()], ids=["fixed", "none"])
def test_a_policy_that_does_not_adapt_is_not_retried(policy):
    """The loss runs once, and a skipped step leaves what is protected as it was."""
    loop = Loop(policy=policy, retries=5)
    before = loop.bits()
    loop.step(tf.constant(BATCH * np.inf))
    assert loop.calls == 1
    assert loop.bits() == before
    assert loop.state() == _run([False], policy)


@pytest.mark.parametrize("way", WAYS[:2])
def test_hysteresis_counts_the_tries(way):
    """A try that does not lower the scale is a try, too."""
    policy = DynamicScaling(init_scale=2.0**14, hysteresis=3)
    loop = Loop(way, policy, retries=5)
    loop.step(tf.constant(BATCH))
    assert loop.state() == _run([False] * 4 + [True], policy)


def test_a_streak_of_overflows_is_an_error_after_the_last_try_only():
    """Nothing has moved then; with retries enough no error is raised."""
    policy = DynamicScaling(init_scale=2.0**20, max_overflow_streak=3)
    Loop(policy=policy, retries=8).step(tf.constant(BATCH))
    loop = Loop(policy=policy, retries=7)
    before = loop.bits()
    with pytest.raises(OverflowStreakError, match="overflow_streak=8 has reached max_overflow_streak=3"):
        loop.step(tf.constant(BATCH))
    assert loop.bits() == before


@pytest.mark.parametrize("way", WAYS[:2])
def test_a_spike_is_not_retried(way):
    """Another scale would not make the norm smaller; what is protected stays, also where a streak is an error."""
    loop = Loop(way, DynamicScaling(init_scale=2.0**4), retries=5, guard=SpikeGuard(warmup=1, max_streak=2))
    loop.step(tf.constant(BATCH))
    before = loop.bits()
    loop.size.assign(100.0)
    loop.step(tf.constant(BATCH))
    assert loop.bits() == before
    assert int(loop.optimizer.guard_state.spikes) == 1
    if way == "eager":
        with pytest.raises(SpikeStreakError):
            loop.step(tf.constant(BATCH))
        assert loop.calls == 3
        assert loop.bits() == before


def _overflowing(weight):
    return tf.cast(tf.reduce_sum(tf.cast(weight, tf.float16) * 8.0), tf.float32)


@pytest.mark.parametrize("inner", [keras.optimizers.Adam, tf_keras.optimizers.legacy.Adam])
def test_in_a_trace_the_loss_may_branch_and_the_optimizer_may_be_new(inner):
    """AutoGraph converts the loss, and the optimizer's variables are made outside of the loop."""
    weight, optimizer = tf.Variable([1.0, 2.0]), LossScaleOptimizer(inner(0.5), policy=POLICY)

    @tf.function
    def step(sign):
        def loss():
            if sign > 0.0:
                return _overflowing(weight)
            return -_overflowing(weight)

        optimizer.minimize(loss, [weight], retries=10)

    step(tf.constant(1.0))
    np.testing.assert_allclose(weight, [0.5, 1.5], rtol=1e-4)
    step(tf.constant(-1.0))
    assert int(optimizer.iterations) == 2
    assert int(optimizer.scale_state.skipped_steps) == 8


class Model(keras.Model):
    """A model that is built by its first call."""

    def __init__(self):
        super().__init__()
        self.layer, self.average = keras.layers.Dense(1), keras.layers.BatchNormalization()

    def call(self, inputs, training=False):
        """Return one number a row."""
        return self.average(self.layer(inputs), training=training)


@pytest.mark.parametrize("way", WAYS[:2])
def test_a_model_may_be_built_by_the_first_try(way):
    """Which creates its variables; what is protected must be built before."""
    keras.utils.set_random_seed(0)
    model, optimizer = Model(), LossScaleOptimizer(keras.optimizers.SGD(0.1), policy=POLICY)

    def step(protect=()):
        loss = lambda: _overflowing(model(BATCH, training=True) ** 2)  # noqa: E731
        optimizer.minimize(loss, lambda: model.trainable_variables, retries=10, protect=protect)

    with pytest.raises(ValueError, match=r"is not built, so that protect= cannot copy its variables; build it first"):
        step([model])
    (step if way == "eager" else tf.function(step, autograph=False))()
    assert int(optimizer.iterations) == 1
    step([model])


@pytest.mark.parametrize("library", [keras, tf_keras], ids=["keras", "tf_keras"])
@pytest.mark.parametrize("way", ["eager", "graph"])
def test_a_metric_counts_the_applied_try_alone(way, library):
    """A metric that the loss updates is put back after each overflow, if it is protected."""
    mean, weight = library.metrics.Mean(), tf.Variable([1.0])
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.1), policy=POLICY)

    def loss():
        mean.update_state(3.0)
        return _overflowing(weight)

    step = lambda: optimizer.minimize(loss, [weight], retries=10, protect=[mean])  # noqa: E731
    mean.result()
    (step if way == "eager" else tf.function(step, autograph=False))()
    assert int(optimizer.iterations) == 1
    assert int(optimizer.metrics()["skipped_steps"]) > 0
    assert [float(each) for each in mean.variables] == [3.0, 1.0]


class Retrying(keras.Model):
    """A model with a `fit` that retries."""

    def train_step(self, data):
        """Take a whole step."""
        inputs, targets = data
        loss = lambda: _overflowing((self(inputs, training=True) - targets) ** 2)  # noqa: E731
        self.optimizer.minimize(loss, self.trainable_variables, retries=9, protect=[self])
        return {"loss_scale": self.optimizer.scale_state.loss_scale}


def test_fit_may_retry_in_a_train_step():
    """The model that is protected does not count the state of its optimizer as its own."""
    inputs = keras.Input((3,))
    model = Retrying(inputs, keras.layers.BatchNormalization()(inputs))
    model.compile(LossScaleOptimizer(keras.optimizers.SGD(0.0), policy=POLICY), "mse")
    history = model.fit(BATCH, BATCH, epochs=2, batch_size=8, verbose=0).history
    assert int(model.optimizer.iterations) == 2
    assert history["loss_scale"][0] == history["loss_scale"][1] < POLICY.init_scale


def test_replicas_are_refused():
    """They cannot meet in a loop; the message says what to do instead."""
    loop = Loop(retries=1)
    with pytest.raises(ValueError, match=r"MirroredStrategy combines gradients across replicas.*run a step that was"):
        STRATEGY.run(loop.step, (tf.constant(BATCH),))


def test_what_is_given_is_checked():
    """Each message names the value and what may be given."""
    weight, optimizer = tf.Variable([1.0]), LossScaleOptimizer(keras.optimizers.SGD(0.1))
    for retries in (-1, True, 1.5, None):
        with pytest.raises(PolicyError, match=f"retries={retries!r} must be a whole number from 0"):
            optimizer.minimize(lambda: _overflowing(weight), [weight], retries=retries)
    with pytest.raises(TypeError, match="protect='bn' holds no variables that could be put back"):
        optimizer.minimize(lambda: _overflowing(weight), [weight], protect="bn")
    with tf.GradientTape() as tape:
        loss = _overflowing(weight)
    for given in ((loss, tape), (lambda: loss, tape)):
        with pytest.raises(ValueError, match="the loss runs within minimize; pass a callable and no tape"):
            optimizer.minimize(given[0], [weight], given[1], retries=1)


def _v1(retries, protect, policy=POLICY):
    weight = tf.Variable([1.0, 2.0])
    average = tf.Variable(0.0, trainable=False)
    global_step = tf.Variable(0, trainable=False, dtype=tf.int64)
    optimizer = v1.LossScaleOptimizer(tf.compat.v1.train.AdamOptimizer(0.5), policy)

    def loss():
        average.assign_add(1.0)
        return _overflowing(weight)

    def step():
        given = [average] if protect else []
        return optimizer.minimize(loss, global_step, [weight], retries=retries, protect=given)

    return step, optimizer, lambda: [each.numpy().tobytes() for each in (weight, average, global_step)]


@pytest.mark.parametrize("way", WAYS[:2])
def test_v1_retries_eagerly_and_in_a_trace(way):
    """As for Keras: the good step is that of a run at its scale, and exhausted retries leave everything."""

    def run(step):
        def without_result():
            step()

        (without_result if way == "eager" else tf.function(without_result, autograph=False))()

    good, _, expected = _v1(0, False, DynamicScaling(init_scale=GOOD_SCALE))
    run(good)
    step, optimizer, bits = _v1(8, True)
    run(step)
    assert bits() == expected()
    assert float(optimizer.loss_scale.numpy()) == GOOD_SCALE
    step, optimizer, bits = _v1(7, True)
    before = bits()
    run(step)
    assert bits() == before
    assert float(optimizer.loss_scale.numpy()) == GOOD_SCALE


def test_v1_refuses_a_graph_for_sessions():
    """And a loss that is a tensor, which cannot be run again."""
    with tf.Graph().as_default():
        weight = tf.compat.v1.Variable([1.0])
        optimizer = v1.LossScaleOptimizer(tf.compat.v1.train.GradientDescentOptimizer(0.5), POLICY)
        with pytest.raises(RuntimeError, match="which a graph for sessions cannot"):
            optimizer.minimize(lambda: _overflowing(weight), retries=1)

    optimizer = v1.LossScaleOptimizer(tf.compat.v1.train.GradientDescentOptimizer(0.5), POLICY)
    with pytest.raises(ValueError, match="pass a callable"):
        tf.function(lambda: optimizer.minimize(tf.constant(1.0), retries=1))()


def test_one_replica_of_a_strategy_that_merges():
    """Eagerly it retries, without waiting for itself; a loop in a graph cannot merge, and is refused."""
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    with strategy.scope():
        weight = tf.Variable([1.0])
        optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.5), POLICY)

    def step():
        return strategy.run(lambda: optimizer.minimize(lambda: _overflowing(weight), [weight], retries=8))

    step()
    assert float(optimizer.loss_scale) == GOOD_SCALE
    assert weight.numpy() != 1.0
    with pytest.raises(ValueError, match="run a step that was skipped again"):
        tf.function(step, autograph=False)()


def test_the_floor_is_no_end_while_a_lower_scale_is_left():
    """`on_floor="raise"` raises for the last try alone."""
    weight = tf.Variable([1.0])
    policy = DynamicScaling(init_scale=2.0 * GOOD_SCALE, min_scale=GOOD_SCALE)
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.5), policy, on_floor="raise")
    optimizer.minimize(lambda: _overflowing(weight), [weight], retries=5)
    assert float(optimizer.loss_scale) == GOOD_SCALE
    assert weight.numpy() != 1.0
    with pytest.raises(ScaleFloorError):
        optimizer.minimize(lambda: _overflowing(weight) * 1e30, [weight], retries=5)


class Centred(keras.layers.Layer):
    """A custom layer that writes to its kernel in the forward pass."""

    def build(self, shape):
        """Make the kernel."""
        self.kernel = self.add_weight(shape=(shape[-1], 4), initializer="glorot_uniform")

    def call(self, inputs, training=False):
        """Return the product with the kernel, which has a mean of 0 from then on."""
        if training:
            self.kernel.assign(self.kernel - keras.ops.mean(self.kernel))
        return inputs @ self.kernel


class Counting(tf.Module):
    """A module in plain TensorFlow, which adds to its weights within a function and a branch."""

    def __init__(self):
        super().__init__()
        self.kernel, self.is_read_only = tf.Variable(tf.ones((3, 4))), tf.Variable(False, trainable=False)

    @tf.function(autograph=False)
    def __call__(self, inputs, training=False):
        """Return the product with the weights."""
        add = lambda: self.kernel.assign_add(tf.fill((3, 4), 0.25)).read_value()  # noqa: E731
        tf.cond(self.is_read_only, self.kernel.read_value, add)
        return tf.matmul(inputs, self.kernel)


class Halving(tf_keras.layers.Dense):
    """A layer of tf_keras that writes to its kernel in the forward pass."""

    def call(self, inputs, training=False):
        """Return the product with the kernel, which is half as large from then on."""
        if training:
            self.kernel.assign(0.5 * self.kernel)
        return super().call(inputs)


def _built(layer):
    layer.build((None, 3))
    return layer


def _centred():
    layer = keras.Sequential([keras.Input((3,)), Centred(), keras.layers.Dense(2)])
    assert len(layer.trainable_variables) == 3
    return layer


WRITERS = {
    "keras": lambda: _built(keras.layers.SpectralNormalization(keras.layers.Dense(4))),
    "sparse": lambda: _built(keras.layers.SpectralNormalization(keras.layers.Embedding(8, 4))),
    "tf_keras": lambda: _built(Halving(4, kernel_initializer="ones")),  # others draw a seed, and warn
    "user": _centred,
    "module": Counting,
}


class WritingLoop:
    """A loop of `minimize` with a layer that writes to a trained variable in the forward pass."""

    def __init__(self, way, writer, init_scale, retries, wrapper, inner):
        keras.utils.set_random_seed(0)
        tf_keras.utils.set_random_seed(0)
        self.layer, self.optimizer = WRITERS[writer](), wrapper(inner(0.1), DynamicScaling(init_scale=init_scale))
        self.variables, self.retries = [*self.layer.trainable_variables], retries
        self.inputs = tf.constant([[1.0, 5.0, 1.0]]) if writer == "sparse" else tf.constant(BATCH)
        self.step = self._step if way == "eager" else tf.function(self._step, autograph=False, jit_compile=way == "XLA")

    def _step(self):
        loss = lambda: _overflowing(self.layer(self.inputs, training=True))  # noqa: E731
        options = {"retries": self.retries, "protect": [self.layer] if self.retries else ()}
        self.optimizer.minimize(loss, var_list=self.variables, **options)

    def bits(self):
        """Return the layer's variables."""
        return [np.asarray(each).tobytes() for each in self.layer.variables]

    def run(self):
        """Return the variables before and after each of three steps."""
        return [self.bits(), *((self.step(), self.bits())[1] for _ in range(3))]


KERAS = (LossScaleOptimizer, keras.optimizers.SGD)
V1 = (v1.LossScaleOptimizer, tf.compat.v1.train.GradientDescentOptimizer)


@pytest.mark.parametrize(
    ("way", "writer", "optimizers"),
    [
        *((way, writer, KERAS) for way in WAYS[:2] for writer in WRITERS),
        ("XLA", "keras", KERAS),
        *((way, "tf_keras", V1) for way in WAYS[:2]),
    ],
)
def test_a_forward_pass_may_write_to_what_is_trained(way, writer, optimizers):
    """A try that overflows puts it back, and the optimizer updates what the applied try has written."""
    begun_low = WritingLoop(way, writer, GOOD_SCALE, 0, *optimizers).run()
    assert begun_low[1] != begun_low[0]
    assert WritingLoop(way, writer, POLICY.init_scale, 8, *optimizers).run() == begun_low
    loop = WritingLoop(way, writer, POLICY.init_scale, 7, *optimizers)
    loop.step()
    assert loop.bits() == begun_low[0]


def test_a_loss_that_fails_leaves_what_it_wrote_to_as_it_was():
    """An error within the loss is raised after its writes are undone."""
    loop = WritingLoop("eager", "user", GOOD_SCALE, 8, *KERAS)
    before = loop.bits()

    def failing():
        loop.layer(loop.inputs, training=True)
        raise KeyError("data")

    with pytest.raises(KeyError):
        loop.optimizer.minimize(failing, loop.variables, protect=[loop.layer])
    assert loop.bits() == before


def test_a_narrow_variable_is_put_back():
    """Also one in float8, which TensorFlow exchanges with no other library."""
    module, weight = tf.Module(), tf.Variable([1.0])
    module.level = tf.Variable(tf.cast(1.0, FLOAT8))
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.1), POLICY)

    def loss():
        module.level.assign(tf.cast(2.0, FLOAT8))
        return _overflowing(weight)

    levels = []
    for _ in range(2):
        optimizer.minimize(loss, [weight], retries=7, protect=[module])
        levels.append(float(tf.cast(module.level, tf.float32)))
    assert levels == [1.0, 2.0]


@pytest.mark.parametrize("retries", [0, 8])
@pytest.mark.parametrize("way", WAYS[:2])
def test_weights_that_the_loss_reads_are_not_copied(way, retries):
    """The optimizer updates them in place, as in a plain step: the memory that holds them stays the same."""
    layer = keras.layers.Dense(64)
    layer.build((None, 64))
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.1), POLICY)
    optimizer.build(layer.trainable_variables)

    def step():
        loss = lambda: _overflowing(layer(tf.ones((2, 64))))  # noqa: E731
        optimizer.minimize(loss, layer.trainable_variables, retries=retries, protect=[layer])

    step = step if way == "eager" else tf.function(step, autograph=False)
    for _ in range(9):
        step()
    iterations, places = int(optimizer.iterations), _places(layer)
    step()
    assert int(optimizer.iterations) == iterations + 1
    assert _places(layer) == places


def _places(layer):
    return [np.asarray(tf.identity(each.value)).__array_interface__["data"] for each in layer.variables]
