"""`LossScaleOptimizer(on_nonfinite_update=, on_nonfinite_loss=)`: updates and losses that are NaN or infinite."""

from tests.adapters.tensorflow_devices import STRATEGY  # noqa: I001
import contextlib
import json
import pickle
from collections import Counter

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from lossscale_core import DynamicScaling, SpikeGuard, step_info
from lossscale_core.errors import NonfiniteStreakError, NonfiniteUpdateError, PolicyError
from lossscale_tf import LossScaleLogger, LossScaleOptimizer

POLICY = DynamicScaling(init_scale=2.0**4, growth_interval=3)
POLICIES = {tf.float32: POLICY, tf.float16: DynamicScaling(init_scale=1.0, growth_interval=3)}
HUGE = 1e21  # finite in float32, and its square is not
SIZES = [1.0, 2.0, -1.5, 0.5, 3.0, 1.0, -2.0, 1.0]
BAD = 4  # the bad step comes before the step of this number
SKIP = {"on_nonfinite_update": "skip"}


class Muon(keras.optimizers.Optimizer):
    """The orthogonal factor of the momentum, by an iteration in float16 that a large gradient overflows."""

    def __init__(self):
        super().__init__(learning_rate=0.01, name="muon")

    def build(self, variables):
        super().build(variables)
        self.momenta = [self.add_variable_from_reference(each, "momentum") for each in variables]

    def update_step(self, gradient, variable, learning_rate):
        momentum = self.momenta[self._get_variable_index(variable)]
        self.assign(momentum, 0.9 * momentum + gradient)
        x = tf.reshape(tf.cast(tf.convert_to_tensor(momentum), tf.float16), [2, -1])
        x = x / (tf.norm(x) + 1e-3)
        for _ in range(3):
            square = tf.matmul(x, x, transpose_b=True)
            x = 3.4445 * x + tf.matmul(-4.7750 * square + 2.0315 * square @ square, x)
        self.assign_sub(variable, learning_rate * tf.reshape(tf.cast(x, tf.float32), variable.shape))


CAUSES = {
    "Adam's second moment": (lambda: keras.optimizers.Adam(0.1), tf.float32, HUGE),
    "tf_keras, new": (lambda: tf_keras.optimizers.Adam(0.1), tf.float32, HUGE),
    "tf_keras, legacy": (lambda: tf_keras.optimizers.legacy.Adam(0.1), tf.float32, HUGE),
    "an average": (lambda: keras.optimizers.Adam(0.1, use_ema=True, ema_overwrite_frequency=2), tf.float32, HUGE),
    "Newton-Schulz in float16": (Muon, tf.float32, 1e5),
    "state in float16": (lambda: keras.optimizers.SGD(4.0, momentum=0.9), tf.float16, 1e4),
    "learning rate in float16": (lambda: keras.optimizers.SGD(30.0), tf.float16, 1e4),
}


class Loop:
    """A loop over losses with gradients of given sizes."""

    def __init__(self, way="eager", inner=None, dtype=tf.float32, **options):
        self.variables = [tf.Variable(tf.cast([0.5, -0.0, 2.0, -1.0], dtype)), tf.Variable(tf.ones([2], dtype))]
        self.inner = keras.optimizers.Adam(0.1) if inner is None else inner
        self.optimizer = LossScaleOptimizer(self.inner, **{"policy": POLICIES[dtype], **options})
        self.optimizer.build(self.variables)
        self.step = self._step
        if way != "eager":
            self.step = tf.function(self._step, autograph=False, jit_compile=way == "XLA")

    def _step(self, size):
        half = tf.constant([1.0, -2.0, 0.25, 3.0])
        self.optimizer.minimize(
            lambda: (
                tf.reduce_sum(tf.cast(self.variables[0], tf.float32) * half) * size
                + tf.reduce_sum(tf.cast(self.variables[1], tf.float32))
            ),
            self.variables,
        )

    def take(self, sizes):
        for size in sizes:
            self.step(tf.constant(size))
        return self

    def bits(self):
        """Return everything but the counters of what is not finite."""
        kept = [*self.variables, *self.optimizer.weights, *self.optimizer.scale_state]
        if self.optimizer.guard is not None:
            kept += self.optimizer.guard_state
        return _bits(kept)

    def counts(self):
        return [int(each) for each in self.optimizer.nonfinite_state]


def _bits(tensors):
    return [tf.convert_to_tensor(tensor).numpy().tobytes() for tensor in tensors]


@pytest.mark.parametrize("way", ["eager", "graph", "XLA"])
@pytest.mark.parametrize("cause", CAUSES)
def test_a_run_is_that_without_the_step(cause, way):
    """Bit for bit: parameters, the optimizer's variables and the loss scale's state."""
    make, dtype, bad = CAUSES[cause]
    clean = Loop(way, make(), dtype).take(SIZES)
    loop = Loop(way, make(), dtype, **SKIP).take(SIZES[:BAD])
    before = loop.bits()
    loop.take([bad])
    assert loop.bits() == before
    assert loop.counts() == [1, 1, 0, 0]
    assert way == "eager" or loop.step.experimental_get_tracing_count() == 1
    assert way != "eager" or _outcome(loop.optimizer.last_step) == (False, False, True, False)
    loop.take(SIZES[BAD:])
    assert loop.bits() == clean.bits()
    assert loop.counts() == [1, 0, 0, 0]
    assert "1 update was undone" in loop.optimizer.diagnose()
    assert int(loop.optimizer.metrics()["nonfinite_updates"]) == 1
    ignoring = Loop(way, make(), dtype).take([*SIZES[:BAD], bad])
    held = [*ignoring.variables, *ignoring.optimizer.weights]
    assert not all(np.isfinite(tf.convert_to_tensor(each).numpy()).all() for each in held)


def _outcome(info):
    return tuple(bool(each) for each in (info.applied, info.overflowed, info.nonfinite_update, info.nonfinite_loss))


@pytest.mark.parametrize("way", ["eager", "graph"])
@pytest.mark.parametrize("options", [{"jit_compile": True}, {"global_clipnorm": 1e30}], ids=str)
def test_with_other_options(options, way):
    """A compiled update, and a guard; its mean must not contain the norm of the step."""
    guard = SpikeGuard(warmup=1, threshold=1e30)
    runs = [Loop(way, guard=guard, **SKIP, **options) for _ in range(2)]
    for loop, bad in zip(runs, [[1e20], []], strict=True):
        loop.take([*SIZES[:BAD], *bad, *SIZES[BAD:]])
    assert runs[0].bits() == runs[1].bits()
    assert runs[0].counts()[0] == 1


@pytest.mark.parametrize("way", ["eager", "graph"])
def test_sparse_updates(way):
    """The gradients of an embedding: its rows are written in place."""
    ends = []
    for bad in ([HUGE], []):
        table = tf.Variable(tf.reshape(tf.range(12.0), [6, 2]))
        optimizer = LossScaleOptimizer(keras.optimizers.Adagrad(0.1), policy=POLICY, **SKIP)
        optimizer.build([table])

        def step(size, table=table, optimizer=optimizer):
            optimizer.minimize(lambda: tf.reduce_sum(tf.gather(table, [1, 3, 1])) * size, [table])

        step = step if way == "eager" else tf.function(step, autograph=False)
        for size in [*SIZES[:BAD], *bad, *SIZES[BAD:]]:
            step(tf.constant(size))
        ends.append(_bits([table, *optimizer.weights, *optimizer.scale_state]))
    assert ends[0] == ends[1]


def test_accumulated_gradients():
    """A window with a bad last micro-batch takes one more, as after an overflow."""
    ends = []
    for bad in ([HUGE], []):
        loop = Loop(inner=keras.optimizers.Adam(0.1, gradient_accumulation_steps=2), **SKIP)
        ends.append(loop.take([1.0, 2.0, 3.0, *bad, 4.0]).bits())
    assert ends[0] == ends[1]


@pytest.mark.parametrize("is_eager", [True, False])
def test_one_bad_replica_undoes_the_step_on_both(is_eager):
    """Although the update was finite on the other."""
    with STRATEGY.scope():
        variable = tf.Variable(tf.zeros([3], tf.float16))
        optimizer = LossScaleOptimizer(keras.optimizers.SGD(1.0, momentum=0.5), policy=POLICY, **SKIP)
        optimizer.build([variable])
    second = STRATEGY.experimental_local_results(variable)[1]
    second.assign(tf.constant([0.0, 65504.0, 0.0], tf.float16))

    def step(size):
        STRATEGY.run(
            lambda: optimizer.minimize(lambda: tf.reduce_sum(tf.cast(variable, tf.float32)) * size, [variable])
        )

    step = step if is_eager else tf.function(step, autograph=False)

    def bits():
        held = [variable, *optimizer.weights, *optimizer.scale_state]
        values = [each.value if isinstance(each, keras.Variable) else each for each in held]
        return [_bits(STRATEGY.experimental_local_results(each)) for each in values]

    step(tf.constant(2.0))
    begin = bits()
    step(tf.constant(-100.0))
    assert bits() == begin
    assert [int(each) for each in optimizer.nonfinite_state] == [1, 1, 0, 0]
    step(tf.constant(2.0))
    assert bits() != begin
    assert [int(each) for each in optimizer.nonfinite_state] == [1, 0, 0, 0]


FIT = {
    "graph": {"jit_compile": False},
    "XLA": {"jit_compile": True},
    "eager": {"run_eagerly": True},
    "two replicas": {"jit_compile": False},
}
ROWS, BATCHES = 4, 12


def _data(bad, value):
    random = np.random.default_rng(0)
    inputs = random.normal(size=(BATCHES, ROWS, 3)).astype(np.float32)
    targets = inputs.sum(axis=2, keepdims=True)
    if bad is not None:
        inputs, targets = np.insert(inputs, bad, inputs[0], axis=0), np.insert(targets, bad, targets[0], axis=0)
        inputs[bad, -1] = value
    return inputs.reshape(-1, 3), targets.reshape(-1, 1)


def _model(**options):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, dtype="float32")], name="model")
    model.compile(optimizer=_wrapped(**options), loss="mae", jit_compile=False)
    return model


def _wrapped(**options):
    return LossScaleOptimizer(keras.optimizers.Adam(0.01), policy=POLICY, **options)


@pytest.mark.parametrize("way", FIT)
@pytest.mark.parametrize(("options", "value"), [(SKIP, 3e21), ({"on_nonfinite_loss": "hold"}, np.nan)])
def test_fit_is_that_without_the_batch(way, options, value):
    """In every way to run, on two replicas, too, of which one has the bad rows."""
    models = []
    for bad in (5, None):
        with STRATEGY.scope() if way == "two replicas" else contextlib.nullcontext():
            model = _model(**options)
            model.compile(optimizer=model.optimizer, loss="mae", **FIT[way])
        logger = LossScaleLogger()
        history = model.fit(*_data(bad, value), batch_size=ROWS, verbose=0, shuffle=False, callbacks=[logger])
        models.append(model)
    held = [_bits([*each.weights, *each.optimizer.weights, *each.optimizer.scale_state]) for each in models]
    assert held[0] == held[1]
    counts = [int(each) for each in models[0].optimizer.nonfinite_state]
    assert counts == ([1, 0, 0, 0] if options is SKIP else [0, 0, 1, 0])
    assert history.history["nonfinite_updates"] == history.history["nonfinite_losses"] == [0]


@pytest.mark.parametrize("way", ["eager", "graph"])
def test_what_was_not_finite_before_does_not_count(way):
    """A mask of minus infinity among the parameters; and a new fault next to it is found."""
    for reaction in ("raise", "skip"):
        mask, weight = tf.Variable([-np.inf, 0.0], name="mask"), tf.Variable([1.0, 1.0], name="weight")
        optimizer = LossScaleOptimizer(keras.optimizers.Adam(0.1), policy=POLICY, on_nonfinite_update=reaction)
        optimizer.build([mask, weight])

        def step(size, mask=mask, weight=weight, optimizer=optimizer):
            optimizer.minimize(lambda: tf.reduce_sum(tf.nn.softmax(mask + weight) * weight) * size, [mask, weight])

        step = step if way == "eager" else tf.function(step, autograph=False)
        for size in SIZES:
            step(tf.constant(size))
        assert int(optimizer.iterations) == len(SIZES)
        optimizer.check_overflow_streak()
        if reaction == "raise":
            with pytest.raises(NonfiniteUpdateError, match="_velocity became NaN or infinite in a step"):
                _checked(optimizer, step, HUGE)
        else:
            step(tf.constant(HUGE))
            assert int(optimizer.nonfinite_state.updates) == 1


def _checked(optimizer, step, *sizes):
    for size in sizes:
        step(tf.constant(size))
    optimizer.check_overflow_streak()


def test_an_eager_step_raises_after_it_was_written():
    """Once for each fault; the state of the scale has counted the step, and a restored variable is checked again."""
    loop = Loop(on_nonfinite_update="raise").take(SIZES)
    assert loop.optimizer.nonfinite_state is None
    held = [*loop.variables, *loop.optimizer.weights]
    saved = [tf.identity(each) for each in held]
    for _ in range(2):
        with pytest.raises(NonfiniteUpdateError, match=r"velocity became NaN .* on_nonfinite_update='skip' undoes"):
            loop.take([HUGE])
        assert _outcome(loop.optimizer.last_step) == (True, False, False, False)
        for variable, value in zip(held, saved, strict=True):
            variable.assign(value)
        loop.take([1.0])
    assert int(loop.optimizer.scale_state.steps) == len(SIZES) + 4


def test_a_graph_raises_where_it_is_asked():
    """Since a graph cannot: in `check_overflow_streak`, which the logger calls at the end of an epoch."""
    loop = Loop("graph", on_nonfinite_update="raise").take([*SIZES, HUGE])
    with pytest.raises(NonfiniteUpdateError, match="velocity became NaN or infinite"):
        loop.optimizer.check_overflow_streak()
    loop.optimizer.check_overflow_streak()
    model = _model(on_nonfinite_update="raise")
    with pytest.raises(NonfiniteUpdateError, match="kernel_velocity became NaN or infinite"):
        model.fit(*_data(5, 3e21), batch_size=ROWS, verbose=0, callbacks=[LossScaleLogger()])


@pytest.mark.parametrize("way", ["eager", "graph"])
def test_a_streak_raises(way):
    """With eps=0, a gradient of zero is NaN at every step: 0 / 0."""
    loop = Loop(way, keras.optimizers.Adam(0.1, epsilon=0.0), **SKIP)
    begin = loop.bits()
    with pytest.raises(NonfiniteStreakError, match=r"the last 20 updates in a row .* look for eps=0"):
        _checked(loop.optimizer, loop.step, *[0.0] * 20)
    assert loop.bits() == begin


def test_a_limit_of_the_policy_counts():
    """For updates and for losses."""
    policy = DynamicScaling(max_overflow_streak=2)
    loop = Loop(policy=policy, on_nonfinite_loss="hold", **SKIP).take([HUGE])
    with pytest.raises(NonfiniteStreakError, match="the last 2 updates"):
        loop.take([HUGE])
    loop = Loop(policy=policy, on_nonfinite_loss="hold").take([np.nan])
    with pytest.raises(NonfiniteStreakError, match=r"the last 2 losses in a row .* reaches max_overflow_streak=2"):
        loop.take([np.nan])


@pytest.mark.parametrize("way", ["eager", "graph", "XLA"])
def test_a_bad_loss_holds_the_scale(way):
    """The step is skipped; an overflow of the gradients of a finite loss still lowers the scale."""
    clean, loop = (Loop(way, on_nonfinite_loss="hold") for _ in range(2))
    clean.take(SIZES)
    loop.take(SIZES[:BAD])
    before, state = loop.bits(), loop.optimizer.scale_state
    for bad in (np.nan, np.inf):
        loop.take([bad])
    assert loop.bits() == before
    assert loop.counts() == [0, 0, 2, 2]
    assert way != "eager" or _outcome(loop.optimizer.last_step) == (False, False, False, True)
    assert _outcome(step_info(state, loop.optimizer.scale_state, nonfinite_loss=True)) == (False, False, False, True)
    loop.take(SIZES[BAD:])
    assert loop.bits() == clean.bits()
    assert loop.counts() == [0, 0, 2, 0]
    assert "2 losses were NaN or infinite before scaling" in loop.optimizer.diagnose()
    scale = float(loop.optimizer.loss_scale)
    loop.take([3e37])
    assert float(loop.optimizer.loss_scale) == scale / 2
    assert loop.counts() == [0, 0, 2, 0]


@pytest.mark.parametrize("way", ["eager", "graph"])
def test_retries_stop_at_a_bad_loss(way):
    """And what the loss has written is restored; with "back_off" all tries run."""
    for reaction, tries in (("hold", 1), ("back_off", 4)):
        weight, calls = tf.Variable(1.0), tf.Variable(0)
        layer = keras.layers.BatchNormalization()
        layer.build((None, 1))
        optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.1), policy=POLICY, on_nonfinite_loss=reaction)
        optimizer.build([weight])

        def loss(size, weight=weight, calls=calls, layer=layer):
            calls.assign_add(1)
            layer(tf.fill([4, 1], size), training=True)
            return weight * size

        def step(size, weight=weight, loss=loss, optimizer=optimizer, layer=layer):
            optimizer.minimize(lambda: loss(size), [weight], retries=3, protect=[layer])

        step = step if way == "eager" else tf.function(step, autograph=False)
        step(tf.constant(1.0))
        average, scale = _bits([layer.moving_mean]), float(optimizer.loss_scale)
        step(tf.constant(np.nan))
        assert int(calls) == 1 + tries
        assert _bits([layer.moving_mean]) == average
        assert float(optimizer.loss_scale) == (scale if reaction == "hold" else scale / 2**4)


@pytest.mark.parametrize("way", ["eager", "graph"])
def test_a_retry_with_an_undone_update_restores_averages(way):
    """As a skipped try does, and no other try runs."""
    weight, calls, seen = tf.Variable(1.0), tf.Variable(0), tf.Variable(0.0, trainable=False)
    optimizer = LossScaleOptimizer(keras.optimizers.Adam(0.1), policy=POLICY, **SKIP)
    optimizer.build([weight])

    def loss(size):
        calls.assign_add(1)
        seen.assign_add(size)
        return weight * size

    step = lambda size: optimizer.minimize(lambda: loss(size), [weight], retries=3, protect=[seen])  # noqa: E731
    step = step if way == "eager" else tf.function(step, autograph=False)
    for size in (1.0, HUGE):
        step(tf.constant(size))
    assert (float(seen), int(calls), int(optimizer.nonfinite_state.updates)) == (1.0, 2, 1)


@pytest.mark.parametrize("is_eager", [True, False])
def test_a_bad_loss_of_one_replica_holds_both(is_eager):
    """Its gradients are finite, so that nothing else would show it."""
    with STRATEGY.scope():
        variable = tf.Variable([1.0, 2.0])
        optimizer = LossScaleOptimizer(keras.optimizers.SGD(1.0), policy=POLICY, on_nonfinite_loss="hold")
        optimizer.build([variable])

    def step(bad):
        def on_each():
            number = tf.distribute.get_replica_context().replica_id_in_sync_group
            added = tf.where(tf.equal(number, 1), bad, 0.0)
            optimizer.minimize(lambda: tf.reduce_sum(variable) + added, [variable])

        STRATEGY.run(on_each)

    step = step if is_eager else tf.function(step, autograph=False)
    bits = lambda: _bits([*STRATEGY.experimental_local_results(variable), *optimizer.scale_state])  # noqa: E731
    step(tf.constant(0.0))
    before = bits()
    step(tf.constant(np.inf))
    assert bits() == before
    assert [int(each) for each in optimizer.nonfinite_state] == [0, 0, 1, 1]
    step(tf.constant(0.0))
    assert bits() != before


@pytest.mark.parametrize("is_eager", [True, False])
def test_a_loop_of_ones_own_holds_too(is_eager):
    """By the loss that `get_scaled_loss` or `compute_gradients` was given, each loss of micro-batches included."""
    weight, optimizer = tf.Variable(1.0), _wrapped(on_nonfinite_loss="hold")
    optimizer.build([weight])

    def step(*added):
        total = tf.zeros([])
        for each in added:
            with tf.GradientTape() as tape:
                scaled = optimizer.get_scaled_loss(weight * 2.0 + each)
            total += tape.gradient(scaled, weight)
        optimizer.apply_gradients(zip(optimizer.get_unscaled_gradients([total]), [weight], strict=True))

    def computed(added):
        optimizer.apply_gradients(optimizer.compute_gradients(lambda: weight * 2.0 + added, [weight]))

    steps = [step, computed] if is_eager else [tf.function(each, autograph=False) for each in (step, computed)]
    for added, expected in (((0.0, 0.0), 0), ((np.nan, 0.0), 1), ((0.0, 0.0), 1), ((0.0, np.inf), 2)):
        steps[0](*map(tf.constant, added))
        assert int(optimizer.nonfinite_state.losses) == expected
    for added, expected in ((0.0, 2), (np.nan, 3), (0.0, 3)):
        steps[1](tf.constant(added))
        assert int(optimizer.nonfinite_state.losses) == expected
    assert int(optimizer.iterations) == 4


def test_a_loss_that_is_unknown_is_refused():
    """Rather than treated as an overflow."""
    weight, optimizer = tf.Variable(1.0), _wrapped(on_nonfinite_loss="hold")
    optimizer.build([weight])
    with pytest.raises(ValueError, match=r"^on_nonfinite_loss='hold' needs the loss of these gradients.* use minimize"):
        optimizer.apply_gradients([(tf.constant(1.0), weight)])
    assert float(weight) == 1.0


def _whole(model, folder):
    model.save(folder / "saved.keras")
    return keras.models.load_model(folder / "saved.keras")


def _weights(model, folder, **options):
    model.save_weights(folder / "saved.weights.h5")
    other = _model(**options)
    other.optimizer.build(other.trainable_variables)
    other.load_weights(folder / "saved.weights.h5")
    return other


def _checkpoint(model, folder, **options):
    path = tf.train.Checkpoint(model=model, optimizer=model.optimizer).save(folder / "checkpoint")
    other = _model(**options)
    other.optimizer.build(other.trainable_variables)
    tf.train.Checkpoint(model=other, optimizer=other.optimizer).restore(path).expect_partial()
    return other


BOTH = {"on_nonfinite_loss": "hold", **SKIP}
SAVED = {
    ".keras": _whole,
    ".weights.h5": lambda model, folder: _weights(model, folder, **BOTH),
    "Checkpoint": lambda model, folder: _checkpoint(model, folder, **BOTH),
    "pickle": lambda model, folder: pickle.loads(pickle.dumps(model)),
}


@pytest.mark.filterwarnings("ignore:__array__ implementation")  # Keras's own variables, to NumPy
@pytest.mark.parametrize("way", SAVED)
def test_the_counters_are_saved(tmp_path, way):
    """In every kind of file."""
    model = _model(**BOTH)
    model.fit(*_data(5, 3e21), batch_size=ROWS, verbose=0, shuffle=False)
    other = SAVED[way](model, tmp_path)
    assert _bits(other.optimizer.nonfinite_state) == _bits(model.optimizer.nonfinite_state)
    assert int(other.optimizer.nonfinite_state.updates) == 1
    assert BOTH.items() <= other.optimizer.get_config().items()


GUARDED = {"guard": SpikeGuard(warmup=100)}


@pytest.mark.filterwarnings("ignore:__array__ implementation", "ignore:the saved optimizer has no state of a spike")
@pytest.mark.parametrize("way", [_weights, _checkpoint])
@pytest.mark.parametrize("now", [BOTH, {**BOTH, **GUARDED}], ids=["", "guard"])
@pytest.mark.parametrize("then", [{}, BOTH, GUARDED], ids=["nothing", "counters", "guard"])
def test_what_was_saved_without_counters_loads_into_one_with(tmp_path, way, then, now):
    """The counters, and the guard, start over if they were not saved."""
    if then is GUARDED and now is BOTH:
        return  # the guard of a file is not dropped
    model = _model(**then)
    model.fit(*_data(5, 3e21 if then is BOTH else 1.0), batch_size=ROWS, verbose=0, shuffle=False)
    other = way(model, tmp_path, **now)
    assert _bits([*other.weights, *other.optimizer.weights]) == _bits([*model.weights, *model.optimizer.weights])
    assert _bits(other.optimizer.scale_state) == _bits(model.optimizer.scale_state)
    assert [int(each) for each in other.optimizer.nonfinite_state] == ([1, 0, 0, 0] if then is BOTH else [0] * 4)
    if now is not BOTH:
        assert float(other.optimizer.guard_state.norms) == (BATCHES + 1.0 if then is GUARDED else 0.0)


def test_the_dict_for_other_frameworks_has_the_counters():
    """And a dict without them sets them to zero."""
    loop = Loop(**SKIP).take([1.0, HUGE])
    saved = json.loads(json.dumps(loop.optimizer.state_dict()))
    assert saved["nonfinite"] == {"updates": 1, "update_streak": 1, "losses": 0, "loss_streak": 0}
    other = Loop(**SKIP)
    other.optimizer.load_state_dict(saved)
    assert other.counts() == [1, 1, 0, 0]
    other.optimizer.load_state_dict(Loop().optimizer.state_dict())
    assert other.counts() == [0, 0, 0, 0]


def test_a_tf_keras_checkpoint_has_the_counters(tmp_path):
    """In the layout of the unwrapped optimizer."""
    loop = Loop(inner=tf_keras.optimizers.legacy.Adam(0.1), **SKIP).take([1.0, HUGE])
    path = tf.train.Checkpoint(optimizer=loop.optimizer).save(tmp_path / "checkpoint")
    other = Loop(inner=tf_keras.optimizers.legacy.Adam(0.1), **SKIP)
    tf.train.Checkpoint(optimizer=other.optimizer).restore(path)
    assert other.counts() == [1, 1, 0, 0]


def test_the_defaults_add_nothing():
    """Neither a variable, an entry in a config or a dict, nor an operation in a trace."""
    plain, both = _wrapped(), _wrapped(**BOTH)
    assert len(both.variables) == len(plain.variables) + 4
    assert [each.name for each in both.variables[:-4]] == [each.name for each in plain.variables]
    assert plain.nonfinite_state is None
    for held in (plain.get_config(), plain.metrics(), plain.state_dict()):
        assert not [name for name in held if "nonfinite" in name]
    config = json.loads(json.dumps(both.get_config()))
    assert {name: config[name] for name in BOTH} == BOTH
    assert LossScaleOptimizer.from_config(config).get_config() == config


def _operations(**options):
    loop = Loop("graph", keras.optimizers.SGD(0.1), **options)
    graph = loop.step.get_concrete_function(tf.TensorSpec([], tf.float32)).graph.as_graph_def()
    nodes = [*graph.node, *(node for function in graph.library.function for node in function.node_def)]
    return Counter(node.op for node in nodes)


def test_a_trace_reads_the_variables_only_to_skip():
    """The defaults read each of the two gradients once, and "raise" adds no operation that reads a variable."""
    default = _operations()
    assert default == _operations(on_nonfinite_update="ignore", on_nonfinite_loss="back_off")
    assert default["L2Loss"] == 2
    assert _operations(on_nonfinite_update="raise")["L2Loss"] == 2
    assert _operations(**SKIP)["L2Loss"] > 2


def test_other_values_are_refused():
    """By the names of the arguments."""
    with pytest.raises(PolicyError, match="on_nonfinite_update='undo' must be 'ignore', 'raise' or 'skip'"):
        _wrapped(on_nonfinite_update="undo")
    with pytest.raises(PolicyError, match="on_nonfinite_loss=None must be 'back_off' or 'hold'"):
        _wrapped(on_nonfinite_loss=None)
