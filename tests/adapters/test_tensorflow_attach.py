"""Losses attached within the graph have gradients at the loss scale, in each way to run the graph."""

from tests.adapters.tensorflow_devices import STRATEGY  # noqa: I001
import copy

import keras
import numpy as np
import pytest
import tensorflow as tf

from lossscale_core import DynamicScaling, FixedScaling
from lossscale_tf import LossScaleOptimizer, range_report

SCALES = [1.0, 2.0**8, 2.0**16]
X = tf.constant(np.random.default_rng(0).normal(size=(8, 4)), tf.float32)


class MoE:
    """A mixture of two experts; its router has a loss for the balance and one for the size of its logits.

    `attach` is a method of an optimizer; without one, `losses` are to be added to the loss.
    """

    def __init__(self, attach=None, dtype=tf.float32):
        rng = np.random.default_rng(1)
        self.router = tf.Variable(tf.cast(rng.normal(size=(4, 2)), dtype))
        self.experts = tf.Variable(tf.cast(rng.normal(size=(2, 4, 3)), dtype))
        self.weights = [self.router, self.experts]
        self.attach = attach

    def __call__(self, x):
        x = tf.cast(x, self.router.dtype)
        logits = tf.matmul(x, self.router)
        shares = tf.nn.softmax(logits)
        out = tf.einsum("bi,eio,be->bo", x, self.experts, shares)
        balance, size = 2.0 * tf.square(tf.reduce_mean(shares, 0)), 0.125 * tf.reduce_mean(tf.square(logits))
        if self.attach is None:
            self.losses = [tf.reduce_sum(tf.cast(each, tf.float32)) for each in (balance, size)]
            return out
        return self.attach(self.attach(out, size), balance)


def _optimizer(policy=8.0, rate=1.0):
    policy = FixedScaling(policy) if isinstance(policy, float) else policy
    return LossScaleOptimizer(keras.optimizers.SGD(rate), policy=policy)


def _main(out):
    return tf.reduce_mean(tf.square(tf.cast(out, tf.float32)))


def _reference(model, x=X):
    """Return the gradients of the sum of the losses."""
    with tf.GradientTape() as tape:
        loss = tf.add_n([_main(model(x)), *model.losses])
    return tape.gradient(loss, model.weights)


def _scaled_gradients(optimizer, model, x=X, call=None):
    with tf.GradientTape() as tape:
        scaled = optimizer.get_scaled_loss(_main((call or model)(x)))
    return tape.gradient(scaled, model.weights)


def _gradients(optimizer, model):
    """Return the gradients of a custom loop."""
    return optimizer.get_unscaled_gradients(_scaled_gradients(optimizer, model))


def _by_compute_gradients(optimizer, model):
    return [grad for grad, _ in optimizer.compute_gradients(lambda: _main(model(X)), model.weights)]


def _recomputed(optimizer, model):
    call = tf.recompute_grad(model.__call__)
    return optimizer.get_unscaled_gradients(_scaled_gradients(optimizer, model, call=call))


def _in_a_function(optimizer, model):
    """Run the forward pass in a graph of its own."""
    call = tf.function(model.__call__, autograph=False)
    return optimizer.get_unscaled_gradients(_scaled_gradients(optimizer, model, call=call))


WAYS = {
    "loop": _gradients,
    "compute_gradients": _by_compute_gradients,
    "recompute_grad": _recomputed,
    "function": _in_a_function,
}
MODES = {
    "eager": lambda step: step,
    "traced": lambda step: tf.function(step, autograph=False),
    "converted": tf.function,
    "xla": lambda step: tf.function(step, jit_compile=True),
}
EACH_MODE = pytest.mark.parametrize("mode", MODES.values(), ids=MODES)


def _assert_same(grads, expected):
    for grad, other in zip(grads, expected, strict=True):
        np.testing.assert_array_equal(grad, other)


@EACH_MODE
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_gradients_are_those_of_the_sum_of_the_losses(way, mode):
    """Bit for bit, at each scale, for two attached losses, one of which is not a scalar."""
    plain = MoE()
    expected = mode(lambda: _reference(plain))()
    for loss_scale in SCALES:
        optimizer = _optimizer(loss_scale)
        model = MoE(optimizer.attach)
        _assert_same(mode(lambda optimizer=optimizer, model=model: way(optimizer, model))(), expected)


@EACH_MODE
def test_in_a_loop_of_the_graph(mode):
    """A loss is attached in each turn, as by a layer that is used several times."""
    weight = tf.Variable([[0.5, -0.25], [0.125, 0.75]])

    def run(attach):
        def turn(number, x, total):
            x = tf.tanh(tf.matmul(x, weight))
            aux = tf.reduce_mean(tf.square(x))
            x, total = (x, total + aux) if attach is None else (attach(x, aux), total)
            return number + 1, x, total

        start = 0, tf.ones((3, 2)), 0.0
        _, x, total = tf.while_loop(lambda number, *_: number < 3, turn, start, maximum_iterations=3)
        return tf.reduce_mean(x) + total

    def plain():
        with tf.GradientTape() as tape:
            loss = run(None)
        return [tape.gradient(loss, weight)]

    expected = mode(plain)()
    for loss_scale in SCALES:
        optimizer = _optimizer(loss_scale)

        def step(optimizer=optimizer):
            with tf.GradientTape() as tape:
                scaled = optimizer.get_scaled_loss(run(optimizer.attach))
            return optimizer.get_unscaled_gradients([tape.gradient(scaled, weight)])

        _assert_same(mode(step)(), expected)


@EACH_MODE
def test_micro_batches(mode):
    """Gradients of several scaled losses are added up, and unscaled at once."""
    plain = MoE()

    def reference():
        found = [_reference(plain, x) for x in tf.split(X, 4)]
        return [tf.add_n(grads) for grads in zip(*found, strict=True)]

    expected = mode(reference)()
    for loss_scale in SCALES:
        optimizer = _optimizer(loss_scale)
        model = MoE(optimizer.attach)

        def step(optimizer=optimizer, model=model):
            found = [_scaled_gradients(optimizer, model, x) for x in tf.split(X, 4)]
            return optimizer.get_unscaled_gradients([tf.add_n(grads) for grads in zip(*found, strict=True)])

        _assert_same(mode(step)(), expected)


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16])
def test_half_precision(dtype):
    """Halves are lifted to float32, as the loss is; at 2**17 nothing is infinite, though float16 ends at 2**16."""
    model = MoE(dtype=dtype)
    with tf.GradientTape() as tape:
        loss = tf.add_n([_main(model(X)), *model.losses])
    expected = [tf.cast(each, tf.float32) for each in tape.gradient(loss, model.weights)]
    for loss_scale in (1.0, 2.0**8):
        optimizer = _optimizer(loss_scale)
        _assert_same(_gradients(optimizer, MoE(optimizer.attach, dtype)), expected)


def test_the_scale_is_not_rounded_to_the_precision_of_x():
    """A float32 loss on a float16 tensor, at a scale that float16 cannot hold."""
    optimizer, weight = _optimizer(2.0**17), tf.Variable(3.0)
    with tf.GradientTape() as tape:
        out = optimizer.attach(tf.cast(weight, tf.float16), 2.0**-10 * weight)
        scaled = optimizer.get_scaled_loss(2.0**-10 * tf.cast(out, tf.float32))
    assert out.dtype == tf.float16
    assert float(optimizer.get_unscaled_gradients([tape.gradient(scaled, weight)])[0]) == 2.0**-9


@EACH_MODE
def test_a_policy_that_scales_nothing(mode):
    """Attached losses then have their own gradients, too."""
    plain, optimizer = MoE(), LossScaleOptimizer(keras.optimizers.SGD(1.0), "none")
    model = MoE(optimizer.attach)
    _assert_same(mode(lambda: _gradients(optimizer, model))(), mode(lambda: _reference(plain))())


@EACH_MODE
def test_a_graph_reads_the_present_scale(mode):
    """The scale doubles after each step, and the gradients stay those of the sum of the losses."""
    optimizer, plain = _optimizer(DynamicScaling(init_scale=1.0, growth_interval=1), rate=0.0), MoE()
    model = MoE(optimizer.attach)
    optimizer.build(model.weights)
    expected = mode(lambda: _reference(plain))()

    def step():
        grads = _gradients(optimizer, model)
        optimizer.apply_gradients(zip(grads, model.weights, strict=True))
        return grads

    step = mode(step)
    for _ in range(4):
        _assert_same(step(), expected)
    assert float(optimizer.loss_scale) == 16.0


@pytest.mark.parametrize("mode", list(MODES.values())[:2], ids=list(MODES)[:2])
def test_two_losses_in_flight(mode):
    """Both are scaled before either is applied, and the second backward pass comes after the scale has grown."""
    optimizer, weights = _optimizer(DynamicScaling(init_scale=8.0, growth_interval=1)), [tf.Variable(0.0) for _ in "ab"]
    optimizer.build(weights)

    def step():
        with tf.GradientTape(persistent=True) as tape:
            outs = [optimizer.attach(weight * 3.0, weight * 2.0) for weight in weights]
            scaled = [optimizer.get_scaled_loss(out) for out in outs]
        for loss, weight in zip(scaled, weights, strict=True):
            (grad,) = optimizer.get_unscaled_gradients([tape.gradient(loss, weight)])
            optimizer.apply_gradients([(grad, weight)])

    step = mode(step)
    for calls in (1, 2):
        step()
        assert [float(each) for each in weights] == [-5.0 * calls] * 2


@EACH_MODE
@pytest.mark.parametrize("loss_scale", SCALES)
def test_minimize_and_its_retries(mode, loss_scale):
    """The step is that of the sum of the losses; the first two tries overflow by an attached loss."""
    plain = MoE()
    expected = [weight - grad for weight, grad in zip(plain.weights, mode(lambda: _reference(plain))(), strict=True)]
    optimizer = _optimizer(DynamicScaling(init_scale=4.0 * loss_scale))

    def attach(x, aux_loss):
        factor = tf.where(optimizer.loss_scale > loss_scale, float("inf"), 1.0)
        return optimizer.attach(x, aux_loss * factor)

    model = MoE(attach)
    optimizer.build(model.weights)
    step = mode(lambda: optimizer.minimize(lambda: _main(model(X)), model.weights, retries=3))
    step()
    _assert_same(model.weights, expected)
    assert float(optimizer.loss_scale) == loss_scale


@EACH_MODE
def test_an_attached_loss_that_overflows_skips_the_step(mode):
    """The main loss is finite; the weights stay, and the scale falls."""
    weight, optimizer = tf.Variable(1.0), _optimizer(DynamicScaling(init_scale=8.0))
    optimizer.build([weight])

    def step(factor):
        optimizer.minimize(lambda: optimizer.attach(2.0 * weight, factor * weight), [weight])

    step = mode(step)
    step(tf.constant(float("inf")))
    assert (float(weight), float(optimizer.loss_scale)) == (1.0, 4.0)
    step(tf.constant(1.0))
    assert (float(weight), float(optimizer.loss_scale)) == (-2.0, 4.0)


@pytest.mark.parametrize("mode", list(MODES.values())[:2], ids=list(MODES)[:2])
def test_replicas(mode):
    """Each replica adds the gradients of its own batch; the user divides an attached loss by the replicas."""
    expected = [tf.add_n(grads) for grads in zip(*(_reference(MoE(), x) for x in tf.split(X, 2)), strict=True)]
    for loss_scale in SCALES:
        with STRATEGY.scope():
            model, optimizer = MoE(), _optimizer(loss_scale)
            model.attach = optimizer.attach
            optimizer.build(model.weights)
        before = [each.numpy() for each in model.weights]

        def on_replica(x, model=model, optimizer=optimizer):
            grads = optimizer.get_unscaled_gradients(_scaled_gradients(optimizer, model, x))
            optimizer.apply_gradients(zip(grads, model.weights, strict=True))

        batches = STRATEGY.experimental_distribute_values_from_function(
            lambda context: tf.split(X, 2)[context.replica_id_in_sync_group]
        )
        mode(lambda on_replica=on_replica, batches=batches: STRATEGY.run(on_replica, args=(batches,)))()
        for weight, value, grad in zip(model.weights, before, expected, strict=True):
            np.testing.assert_allclose(weight.numpy(), value - grad, rtol=1e-6)


# -- fit ---------------------------------------------------------------------------------------------------------------


class Router(keras.layers.Layer):
    """A gate with a loss for its size; it holds a function, not an optimizer."""

    def __init__(self, attach=None):
        super().__init__(name="router")
        self.gate = keras.layers.Dense(3, name="gate")
        self.attach = attach

    def call(self, x):
        gates = self.gate(x)
        aux_loss = 0.125 * tf.reduce_mean(tf.square(tf.cast(gates, tf.float32)))
        if self.attach is None:
            self.add_loss(aux_loss)
            return tf.nn.softmax(gates)
        return self.attach(tf.nn.softmax(gates), aux_loss)


@pytest.fixture
def _policy_kept():
    yield
    keras.config.set_dtype_policy("float32")


@pytest.mark.usefixtures("_policy_kept")
@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
@pytest.mark.parametrize("options", [{}, {"jit_compile": True}, {"run_eagerly": True}], ids=str)
def test_in_fit(policy, options):
    """Weights go as with `add_loss`, at a scale that grows: bit for bit, if XLA does not reorder the whole step."""

    def fit(attaches):
        keras.utils.set_random_seed(0)
        keras.config.set_dtype_policy(policy)
        optimizer = _optimizer(DynamicScaling(init_scale=256.0, growth_interval=1), rate=0.5)
        inputs = keras.Input((4,))
        hidden = Router(optimizer.attach if attaches else None)(inputs)
        model = keras.Model(inputs, keras.layers.Dense(1, dtype="float32")(hidden))
        model.compile(optimizer, "mse", **options)
        model.fit(X, X[:, :1], batch_size=4, epochs=2, shuffle=False, verbose=0)
        assert float(optimizer.loss_scale) == 4096.0
        return model.get_weights()

    for weight, expected in zip(fit(attaches=True), fit(attaches=False), strict=True):
        np.testing.assert_allclose(weight, expected, rtol=1e-5 if "jit_compile" in options else 0.0)


def test_in_fit_on_two_replicas():
    """Keras divides the losses of `add_loss` by the replicas; the user divides an attached loss."""

    def fit(attaches):
        keras.utils.set_random_seed(0)
        with STRATEGY.scope():
            optimizer = _optimizer(DynamicScaling(init_scale=256.0, growth_interval=1), rate=0.5)
            attach = lambda x, aux_loss: optimizer.attach(x, aux_loss / STRATEGY.num_replicas_in_sync)  # noqa: E731
            inputs = keras.Input((4,))
            model = keras.Model(inputs, keras.layers.Dense(1)(Router(attach if attaches else None)(inputs)))
            model.compile(optimizer, "mse")
        data = tf.data.Dataset.from_tensor_slices((X, X[:, :1])).batch(4)
        model.fit(data, epochs=2, shuffle=False, verbose=0)
        return model.get_weights()

    _assert_same(fit(attaches=True), fit(attaches=False))


# -- what cannot hold --------------------------------------------------------------------------------------------------


@pytest.fixture
def half():
    """Return an optimizer, a weight and the gradient of a main loss of 3 and an attached loss of 2."""
    return _optimizer(8.0), tf.Variable(1.0)


def _discarded(optimizer, weight):
    optimizer.attach(weight, 2.0 * weight)
    return 3.0 * weight


def _detached(optimizer, weight):
    return 3.0 * weight + tf.stop_gradient(optimizer.attach(weight, 2.0 * weight))


@pytest.mark.parametrize("loss", [_discarded, _detached])
def test_a_result_that_is_not_used_loses_the_loss(half, loss):
    """Eagerly the step warns, once; in a graph nothing can be noticed."""
    optimizer, weight = half
    optimizer.build([weight])
    with pytest.warns(UserWarning, match="attached got no backward pass.* use the result of attach"):
        optimizer.minimize(lambda: loss(optimizer, weight), [weight])
    optimizer.minimize(lambda: loss(optimizer, weight), [weight])
    tf.function(lambda: optimizer.minimize(lambda: loss(optimizer, weight), [weight]), autograph=False)()
    assert float(weight) == 1.0 - 3 * 3.0


def test_only_what_is_lost_is_warned_of(half):
    """Not a pass without a tape, nor one that is recomputed, retried or reported on, nor a copy of the optimizer."""
    optimizer, weight = half
    optimizer.build([weight])

    def loss():
        return 3.0 * optimizer.attach(weight, 2.0 * weight)

    for _ in range(2):
        loss()
        range_report(None, loss)
        range_report(None, lambda: float("inf") * loss())
        optimizer.minimize(loss, [weight], retries=2)
        optimizer.minimize(tf.recompute_grad(loss), [weight])
    with tf.GradientTape() as tape:
        waiting = optimizer.get_scaled_loss(loss())
    copy.deepcopy(optimizer).compute_gradients(loss, [weight])
    optimizer.minimize(lambda: 1.0 * weight, [weight])
    assert float(tape.gradient(waiting, weight)) / 8.0 == 5.0
    assert float(weight) == 1.0 - 4 * 5.0 - 1.0


def test_two_backward_passes_through_one_tensor_count_the_loss_twice(half):
    """As two losses that are differentiated one after the other do."""
    optimizer, weight = half
    with tf.GradientTape(persistent=True) as tape:
        out = optimizer.attach(weight, 2.0 * weight)
        losses = [optimizer.get_scaled_loss(3.0 * out), optimizer.get_scaled_loss(5.0 * out)]
    assert sum(float(tape.gradient(loss, weight)) for loss in losses) / 8.0 == 3.0 + 5.0 + 2 * 2.0


def test_a_loss_that_is_not_scaled_gets_too_large_an_attached_loss(half):
    """By the loss scale; so does the inner gradient of a penalty."""
    optimizer, weight = half
    with tf.GradientTape() as tape:
        loss = 3.0 * optimizer.attach(weight, 2.0 * weight)
    assert float(tape.gradient(loss, weight)) == 3.0 + 8.0 * 2.0
    with tf.GradientTape() as tape:
        with tf.GradientTape() as inner:
            loss = 3.0 * optimizer.attach(weight, tf.square(weight))
        penalty = tf.square(inner.gradient(loss, weight))  # of 3 + 8 * 2 * weight
        scaled = optimizer.get_scaled_loss(penalty)
    assert float(tape.gradient(scaled, weight)) / 8.0 == 2.0 * (3.0 + 16.0) * 16.0


@pytest.mark.parametrize("position", [0, 1])
def test_whole_numbers_are_refused(half, position):
    """They have no gradient, so that the loss would be lost."""
    arguments = [tf.constant(1.0), tf.constant(1.0)]
    arguments[position] = tf.constant([1, 2])
    with pytest.raises(TypeError, match=f"{('x', 'aux_loss')[position]} is a tensor of int32; attach needs floats"):
        half[0].attach(*arguments)
