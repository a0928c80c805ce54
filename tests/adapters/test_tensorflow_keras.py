"""`LossScaleOptimizer` where Keras users live: `fit`, saved models, schedules, accumulation, strategies."""

from tests.adapters.tensorflow_devices import STRATEGY  # noqa: I001
import gc
import threading
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import lossscale_keras
from lossscale_core import DynamicScaling
from lossscale_core.errors import CallOrderError
from lossscale_core.testing import simulate
from lossscale_tf import LossScaleOptimizer, v1

INF = float("inf")
INPUTS = np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32)
TARGETS = INPUTS.sum(axis=1, keepdims=True)
POLICY = DynamicScaling(init_scale=2.0**10, growth_interval=3)


def _model(optimizer, **options):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(8), keras.layers.Dense(1, dtype="float32")])
    model.compile(optimizer=optimizer, loss="mse", **options)
    return model


def _fit(model, epochs=1, inputs=INPUTS):
    model.fit(inputs, TARGETS, epochs=epochs, batch_size=16, verbose=0, shuffle=False)
    return model.get_weights()


INNERS = {
    "plain": lambda: keras.optimizers.Adam(0.01),
    "schedule": lambda: keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5), momentum=0.9),
    "clipnorm": lambda: keras.optimizers.SGD(0.1, clipnorm=0.1),
    "global_clipnorm": lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.1),
    "clipvalue": lambda: keras.optimizers.SGD(0.1, clipvalue=0.1),
    "EMA": lambda: keras.optimizers.SGD(0.1, use_ema=True, ema_overwrite_frequency=2),
    "accumulation": lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2),
    "weight decay": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
}


@pytest.mark.parametrize("name", INNERS)
def test_an_overflow_in_fit_leaves_no_trace(name):
    """The step that overflows is as if it had not been, whatever the inner optimizer remembers."""
    spoilt = INPUTS.copy()
    spoilt[20, 0] = INF  # in the second of four batches
    model = _model(LossScaleOptimizer(INNERS[name](), POLICY), jit_compile=False)
    weights = _fit(model, inputs=spoilt)
    assert int(model.optimizer.metrics()["applied_steps"]) == 3
    keep = np.r_[0:16, 32:64]
    clean = _model(INNERS[name](), jit_compile=False)
    clean.fit(INPUTS[keep], TARGETS[keep], batch_size=16, verbose=0, shuffle=False)
    for ours, theirs in zip(weights, clean.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("jit_compile", [False, True])
def test_embeddings_in_fit(jit_compile):
    """Their sparse gradients are scaled, checked and unscaled like others: training is that of the bare optimizer."""
    words, labels = np.arange(32).reshape(16, 2) % 5, np.ones((16, 1), np.float32)

    def trained(optimizer):
        keras.utils.set_random_seed(0)
        layers = [keras.Input((2,)), keras.layers.Embedding(5, 3), keras.layers.Flatten(), keras.layers.Dense(1)]
        model = keras.Sequential(layers)
        model.compile(optimizer=optimizer, loss="mse", jit_compile=jit_compile)
        model.fit(words, labels, batch_size=4, verbose=0, shuffle=False)
        return model.get_weights()

    expected = trained(keras.optimizers.Adam(0.1))
    for ours, theirs in zip(trained(LossScaleOptimizer(keras.optimizers.Adam(0.1), POLICY)), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


SCHEDULE = tf_keras.optimizers.schedules.CosineDecay(0.1, 10)
TF_KERAS = {
    "new": lambda: tf_keras.optimizers.Adam(0.1),
    "legacy": lambda: tf_keras.optimizers.legacy.Adam(0.1),
}


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("name", TF_KERAS)
def test_tf_keras_optimizers_in_a_loop_of_ones_own(name, graph):
    """Applied and skipped like Keras 3's."""
    variable, expected = tf.Variable([1.0, 2.0]), tf.Variable([1.0, 2.0])
    inner, bare = TF_KERAS[name](), TF_KERAS[name]()
    if name == "new":
        inner.build([variable])
    bare.apply_gradients([(tf.constant([2.0, 4.0]), expected)])
    optimizer = LossScaleOptimizer(inner, POLICY)

    def step(factor):
        optimizer.minimize(lambda: factor * tf.reduce_sum(variable**2), [variable])

    step = tf.function(step, autograph=False) if graph else step
    step(tf.constant(1.0))
    np.testing.assert_array_equal(variable.numpy(), expected.numpy())
    step(tf.constant(INF))
    np.testing.assert_array_equal(variable.numpy(), expected.numpy())
    assert int(optimizer.iterations) == 1
    assert float(optimizer.beta_1) == np.float32(0.9)


@pytest.mark.parametrize("inner", [*TF_KERAS.values(), lambda: tf_keras.optimizers.SGD(SCHEDULE, momentum=0.5)])
def test_tf_keras_optimizers_come_back_from_a_config(inner):
    """As what they were, though Keras 3 has optimizers of the same names."""
    optimizer = LossScaleOptimizer(inner(), POLICY, global_clipnorm=1.0)
    again = LossScaleOptimizer.from_config(optimizer.get_config())
    assert type(again.inner_optimizer) is type(optimizer.inner_optimizer)
    assert again.get_config() == optimizer.get_config()


@pytest.mark.filterwarnings("ignore:no gradient exists for")
@pytest.mark.parametrize("mode", ["eager", "graph", "xla"])
@pytest.mark.parametrize("max_norm", [0.1, 1e6])
def test_global_clipnorm_is_tensorflows(mode, max_norm):
    """`global_clipnorm` does what `tf.clip_by_global_norm` does to unscaled gradients; an overflow is not clipped."""
    grads = [tf.constant([3.0, -4.0]), None, tf.constant([[12.0]])]
    variables = [tf.Variable([0.0, 0.0]), tf.Variable(1.0), tf.Variable([[0.0]])]
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(1.0), POLICY, global_clipnorm=max_norm)
    optimizer.build(variables)

    def step(factor):
        optimizer.scale_loss(tf.constant(0.0))  # as Keras does: scaled gradients follow
        scaled = [None if grad is None else grad * optimizer.loss_scale * factor for grad in grads]
        optimizer.apply_gradients(zip(scaled, variables, strict=True))

    if mode != "eager":
        step = tf.function(step, autograph=False, jit_compile=mode == "xla")
    step(tf.constant(1.0))
    expected, _ = tf.clip_by_global_norm(grads, max_norm)
    np.testing.assert_allclose(-variables[0].numpy(), expected[0].numpy(), rtol=1e-6)
    before = variables[2].numpy()
    step(tf.constant(INF))
    np.testing.assert_array_equal(variables[2].numpy(), before)
    assert float(optimizer.loss_scale) == 2.0**9


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("sparse", [False, True])
def test_variables_of_every_width(dtype, sparse):
    """Their gradients arrive in their dtype, `IndexedSlices` as such."""
    variable = keras.Variable(np.zeros((3, 1)), dtype=dtype)
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(1.0), 4.0)

    def loss():
        if sparse:
            return tf.reduce_sum(tf.gather(variable.value, [1, 1]))
        return tf.reduce_sum(variable.value * tf.constant([[0.0], [2.0], [0.0]], dtype))

    optimizer.minimize(loss, [variable.value])
    np.testing.assert_array_equal(variable.numpy(), [[0.0], [-2.0], [0.0]])
    assert variable.dtype == dtype


def test_the_scale_that_scaled_unscales():
    """Whatever is set or updated in between."""
    optimizer, variable = LossScaleOptimizer(keras.optimizers.SGD(1.0), 4.0), tf.Variable(1.0)
    with tf.GradientTape() as tape:
        scaled = optimizer.get_scaled_loss(variable * 3.0)
    optimizer.dynamic_scale.assign(64.0)
    (grad,) = optimizer.get_unscaled_gradients([tape.gradient(scaled, variable)])
    assert float(grad) == 3.0


def test_one_loss_may_be_followed_by_several_applications():
    """As Keras scales it: an encoder's and a decoder's gradients are unscaled, in a branch or another trace, too."""
    first, second = tf.Variable(0.0), tf.Variable(0.0)
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(1.0), 1024.0)
    optimizer.build([first, second])
    optimizer.scale_loss(tf.constant(0.0))
    optimizer.apply([tf.constant(1024.0)], [first])
    optimizer.apply([tf.constant(1024.0)], [second])
    assert (float(first), float(second)) == (-1.0, -1.0)

    @tf.function(autograph=False)
    def in_a_branch():
        optimizer.scale_loss(tf.constant(0.0))
        apply = lambda: (optimizer.apply([tf.constant(1024.0)], [first]), 1)[1]  # noqa: E731
        return tf.cond(first < 0.0, apply, lambda: 0)

    @tf.function(autograph=False)
    def in_another_trace():
        optimizer.apply([tf.constant(1024.0)], [first])

    in_a_branch()
    optimizer.scale_loss(tf.constant(0.0))
    in_another_trace()
    assert float(first) == -3.0


def test_the_scale_that_scaled_unscales_in_another_trace():
    """Scaled in one `tf.function` or eagerly, unscaled in another, the scale set in between."""
    for scaled_in, unscaled_in in ((tf.function, tf.function), (lambda f: f, tf.function), (tf.function, lambda f: f)):
        optimizer, variable = LossScaleOptimizer(keras.optimizers.SGD(1.0), 8.0), tf.Variable(0.0)
        optimizer.build([variable])
        scaled = scaled_in(lambda o=optimizer: o.get_scaled_loss(tf.constant(1.0)))

        def apply(grad, optimizer=optimizer, variable=variable):
            optimizer.apply_gradients([(optimizer.get_unscaled_gradients([grad])[0], variable)])

        apply = unscaled_in(apply)
        for _ in range(3):
            grad = scaled()
            optimizer.dynamic_scale.assign(64.0)
            apply(grad * 1.0)
        assert float(variable) == -3.0
        assert optimizer.steps_with_missing_calls == 0


@pytest.mark.parametrize(
    ("wrapper", "settings"),
    [(LossScaleOptimizer, {}), (LossScaleOptimizer, {"global_clipnorm": 0.5}), (v1.LossScaleOptimizer, {})],
)
def test_gradients_as_they_were_unscaled_and_processed_ones(wrapper, settings):
    """A traced step unscales and clips at once what comes back untouched, and takes anything else as it is."""

    def trained(process):
        inner = (
            tf1.train.GradientDescentOptimizer(1.0) if wrapper is v1.LossScaleOptimizer else keras.optimizers.SGD(1.0)
        )
        optimizer = wrapper(inner, loss_scale=POLICY, **settings)
        variables = [tf.Variable([1.0, 2.0]), tf.Variable(3.0)]

        @tf.function(autograph=False)
        def step(factor):
            loss = lambda: factor * sum(tf.reduce_sum(each**2) for each in variables)  # noqa: E731
            if wrapper is v1.LossScaleOptimizer:
                pairs = optimizer.compute_gradients(loss, variables)
            else:
                with tf.GradientTape() as tape:
                    scaled = optimizer.get_scaled_loss(loss())
                pairs = zip(optimizer.get_unscaled_gradients(tape.gradient(scaled, variables)), variables, strict=True)
            optimizer.apply_gradients([(process(grad), variable) for grad, variable in pairs])

        if wrapper is LossScaleOptimizer:
            optimizer.build(variables)
        for factor in (0.125, INF, 0.25):
            step(tf.constant(factor))
        return np.concatenate([each.numpy().ravel() for each in variables])

    untouched, processed = trained(lambda grad: grad), trained(lambda grad: 0.5 * grad)
    np.testing.assert_allclose(untouched, trained(tf.identity), rtol=1e-6)
    assert np.abs(processed - untouched).max() > 0.01


@pytest.mark.parametrize("by_keras", [False, True])
def test_micro_batches_in_a_loop(by_keras):
    """Scaled within `tf.while_loop`, applied after it, in one branch of a condition."""
    optimizer, variable = LossScaleOptimizer(keras.optimizers.SGD(1.0), 8.0), tf.Variable(0.0)
    optimizer.build([variable])

    @tf.function
    def step(count):
        total = tf.constant(0.0)
        for _ in tf.range(count):
            with tf.GradientTape() as tape:
                scaled = optimizer.scale_loss(variable * 1.0) if by_keras else optimizer.get_scaled_loss(variable * 1.0)
            total += tape.gradient(scaled, variable)
        if count > 2:
            grad = total if by_keras else optimizer.get_unscaled_gradients([total])[0]
            optimizer.apply_gradients([(grad, variable)])

    step(tf.constant(3))
    step(tf.constant(1))
    assert float(variable) == -3.0


def test_scaling_twice_is_an_error():
    """By hand, as Keras does, and within `minimize`."""
    optimizer, variable = LossScaleOptimizer(keras.optimizers.SGD(1.0), 8.0), tf.Variable(1.0)
    with pytest.raises(CallOrderError, match="scaled already"):
        optimizer.get_scaled_loss(optimizer.get_scaled_loss(variable * 1.0))
    with pytest.raises(CallOrderError, match="scaled already"):
        optimizer.scale_loss(optimizer.scale_loss(variable * 1.0))
    with pytest.raises(CallOrderError, match="scaled already"):
        optimizer.minimize(lambda: optimizer.get_scaled_loss(variable * 1.0), [variable])
    assert float(variable) == 1.0


def test_values_that_overwrite_a_variable_are_no_gradients():
    """As those of float8 scales: they are neither unscaled nor clipped, and do not count in the norm."""
    variable, overwritten = keras.Variable([0.0]), keras.Variable([1.0])
    overwritten.overwrite_with_gradient = True
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(1.0), 8.0, global_clipnorm=1.0)

    @tf.custom_gradient
    def loss(x, _):
        return tf.reduce_sum(x) * 0.5, lambda upstream: (upstream * [0.5], tf.constant([1e6]))

    with tf.GradientTape() as tape:
        scaled = optimizer.get_scaled_loss(loss(variable.value, overwritten.value))
    grads = optimizer.get_unscaled_gradients(tape.gradient(scaled, [variable.value, overwritten.value]))
    optimizer.apply_gradients(zip(grads, [variable, overwritten], strict=True))
    assert (float(variable.value[0]), float(overwritten.value[0])) == (-0.5, 1e6)


def test_a_hyperparameter_reaches_the_inner_optimizer():
    """Set between eager steps; one that the inner optimizer has not is an error, one that nothing reads a warning."""
    variable = tf.Variable(0.0)
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(1.0, momentum=0.5), 8.0)
    for momentum, expected in ((0.5, -1.0), (0.0, -2.0)):
        optimizer.momentum = momentum
        optimizer.minimize(lambda: variable, [variable])
        assert float(variable) == expected
    with pytest.raises(AttributeError, match="'SGD' object has no attribute 'beta_1'"):
        optimizer.beta_1 = 0.5
    for name in ("clipnorm", "global_clipnorm", "weight_decay", "use_ema"):
        with pytest.warns(UserWarning, match=f"{name} is set on the LossScaleOptimizer"):
            setattr(optimizer, name, 0.5)


SETTINGS = {
    "clipnorm": 0.5,
    "clipvalue": 0.5,
    "global_clipnorm": 0.5,
    "use_ema": True,
    "ema_momentum": 0.9,
    "ema_overwrite_frequency": 3,
    "gradient_accumulation_steps": 4,
    "weight_decay": 0.1,
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_of_the_inner_optimizer_can_be_read(name):
    """On the wrapper, which makes no averages or accumulators of its own for it."""
    settings = {name: SETTINGS[name]} | ({"use_ema": True} if name.startswith("ema") else {})
    inner, variable = keras.optimizers.SGD(0.1, **settings), keras.Variable([1.0, 2.0])
    optimizer = LossScaleOptimizer(inner, POLICY)
    assert getattr(optimizer, name) == SETTINGS[name]
    own = len(optimizer.variables) - len(inner.variables)
    optimizer.build([variable])
    assert len(optimizer.variables) - len(inner.variables) == own
    optimizer.minimize(lambda: tf.reduce_sum(variable.value), [variable.value])
    assert getattr(optimizer, name) == SETTINGS[name]


@pytest.mark.parametrize("of", [tf_keras.optimizers, tf_keras.optimizers.legacy])
def test_what_tf_keras_has_can_be_read(of):
    """`clipnorm`, `variables` as a method, and hyperparameters of a user's own legacy optimizer, read and set."""
    optimizer, variable = LossScaleOptimizer(of.SGD(0.1, clipnorm=0.5), POLICY), tf.Variable(1.0)
    optimizer.minimize(lambda: variable * 1.0, [variable])
    assert optimizer.clipnorm == 0.5
    assert optimizer.use_ema is False
    assert [id(each) for each in optimizer.variables()] == [id(each) for each in optimizer.variables]

    class Own(tf_keras.optimizers.legacy.SGD):
        def __init__(self):
            super().__init__(0.1)
            self._set_hyper("mine", 0.25)

    optimizer = LossScaleOptimizer(Own(), POLICY)
    assert "mine" in dir(optimizer)
    assert float(optimizer.mine) == 0.25
    optimizer.mine = 0.5
    assert float(optimizer.inner_optimizer.mine) == 0.5


@pytest.mark.parametrize("of", [keras.optimizers, tf_keras.optimizers, tf_keras.optimizers.legacy])
def test_iterations_can_be_set(of):
    """As the inner optimizer's can; Keras 3's in applied steps, whatever it accumulates."""
    optimizer = LossScaleOptimizer(of.SGD(0.1), POLICY)
    optimizer.iterations = 7 if of is keras.optimizers else tf.Variable(7, dtype=tf.int64)
    assert int(optimizer.iterations) == int(optimizer.inner_optimizer.iterations) == 7
    if of is keras.optimizers:
        optimizer = LossScaleOptimizer(of.SGD(0.1, gradient_accumulation_steps=3), POLICY)
        optimizer.iterations = 7
        assert int(optimizer.iterations) == 7


def test_arguments_that_a_wrapper_does_not_take():
    """Keras's sentence says where they belong; `dynamic` is a bool, and an unknown argument is named."""
    with pytest.raises(ValueError, match=r"does not support `clipnorm`\. Instead, set `clipnorm` on the `inner_opt"):
        LossScaleOptimizer(keras.optimizers.SGD(), clipnorm=1.0)
    with pytest.raises(ValueError, match="does not support arguments: `no_such`"):
        LossScaleOptimizer(keras.optimizers.SGD(), no_such=1)
    with pytest.raises(TypeError, match=r"\"dynamic\" argument .* must be a bool, but got: 'no'"):
        LossScaleOptimizer(keras.optimizers.SGD(), dynamic="no")


@pytest.mark.parametrize("other", [LossScaleOptimizer, tf_keras.mixed_precision.LossScaleOptimizer])
def test_one_optimizer_in_two_wrappers(other):
    """Is refused, since both would save it under the same names; another one of the same config is taken."""
    inner = tf_keras.optimizers.SGD()
    first = other(inner)
    with pytest.raises(ValueError, match="already wrapped by a LossScaleOptimizer"):
        LossScaleOptimizer(inner)
    LossScaleOptimizer(type(inner).from_config(first.inner_optimizer.get_config()))


@pytest.mark.parametrize("of", [keras.optimizers, tf_keras.optimizers, tf_keras.optimizers.legacy])
@pytest.mark.parametrize("call", ["minimize", "get_scaled_loss", "scale_loss", "apply_gradients", "get_gradients"])
def test_a_graph_for_sessions(of, call):
    """Is refused, and `v1` is named: a Keras optimizer has no operation to run there."""
    with tf.Graph().as_default():
        variable = tf.Variable(1.0)
        optimizer = LossScaleOptimizer(of.SGD(0.1), 8.0)
        calls = {
            "minimize": lambda: optimizer.minimize(lambda: variable * 1.0, [variable]),
            "get_scaled_loss": lambda: optimizer.get_scaled_loss(variable * 1.0),
            "scale_loss": lambda: optimizer.scale_loss(variable * 1.0),
            "apply_gradients": lambda: optimizer.apply_gradients([(tf.constant(1.0), variable)]),
            "get_gradients": lambda: optimizer.get_gradients(variable * 1.0, [variable]),
        }
        with pytest.raises(RuntimeError, match=r"lossscale_tf\.v1\.LossScaleOptimizer"):
            calls[call]()


@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("by_keras", [False, True])
def test_a_gradient_aggregator_of_ones_own(mode, by_keras):
    """That of a legacy optimizer gets unscaled gradients, and what it returns is checked and applied."""
    variables = [tf.Variable(0.0), tf.Variable(0.0)]
    aggregate = lambda pairs: [(4.0 * grad, variable) for grad, variable in pairs]  # noqa: E731
    optimizer = LossScaleOptimizer(tf_keras.optimizers.legacy.SGD(1.0, gradient_aggregator=aggregate), 2.0)
    assert optimizer.gradient_aggregator is aggregate
    optimizer.build(variables)

    def step(factor):
        if not by_keras:
            return optimizer.minimize(lambda: factor * tf.add_n(variables), variables)
        with tf.GradientTape() as tape:
            scaled = optimizer.scale_loss(factor * tf.add_n(variables))
        return optimizer.apply(tape.gradient(scaled, variables), variables)

    step = step if mode == "eager" else tf.function(step, autograph=False)
    step(tf.constant(1.0))
    step(tf.constant(INF))
    step(tf.constant(1e38))  # finite until it is aggregated
    assert [float(each) for each in variables] == [-4.0, -4.0]
    assert int(optimizer.metrics()["skipped_steps"]) == 2


@pytest.mark.skipif(not hasattr(keras.optimizers, "ScheduleFreeAdamW"), reason="this version of Keras has none")
def test_schedule_free_with_a_model_that_is_built_in_fit():
    """Its averages begin at the model's first values, which are only known in the trace; it trains as the bare one."""

    def trained(optimizer):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.layers.Dense(4), keras.layers.Dense(1)])
        model.compile(optimizer=optimizer, loss="mse", jit_compile=False)
        return _fit(model, epochs=3)

    expected = trained(keras.optimizers.ScheduleFreeAdamW(0.05))
    weights = trained(LossScaleOptimizer(keras.optimizers.ScheduleFreeAdamW(0.05), POLICY))
    for ours, theirs in zip(weights, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("wrapper", [LossScaleOptimizer, v1.LossScaleOptimizer])
def test_eager_steps_of_two_threads(wrapper):
    """Are taken one at a time: each of them counts, and is in the weights."""
    inner = tf1.train.GradientDescentOptimizer(1.0) if wrapper is v1.LossScaleOptimizer else keras.optimizers.SGD(1.0)
    optimizer, variable = wrapper(inner, loss_scale=DynamicScaling(growth_interval=7)), tf.Variable(0.0)
    optimizer.minimize(lambda: variable * 1.0, var_list=[variable])

    def steps():
        for _ in range(40):
            optimizer.minimize(lambda: variable * 1.0, var_list=[variable])

    threads = [threading.Thread(target=steps) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert int(optimizer.metrics()["steps"]) == 81
    assert int(optimizer.metrics()["skipped_steps"]) == 0
    assert float(variable) == -81.0


@pytest.mark.parametrize("mode", ["eager", "graph", "xla"])
@pytest.mark.parametrize("size", [1e30, 1e39, 1e200])
def test_global_clipnorm_of_float64(mode, size):
    """Norms beyond float32, and beyond what float64 holds the square of, are clipped like others."""
    variable = keras.Variable([0.0, 0.0], dtype="float64")
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(1.0), POLICY, global_clipnorm=1.0)
    optimizer.build([variable])

    def step(grad):
        optimizer.scale_loss(tf.constant(0.0))
        optimizer.apply_gradients([(grad * tf.cast(optimizer.loss_scale, grad.dtype), variable)])

    step = step if mode == "eager" else tf.function(step, autograph=False, jit_compile=mode == "xla")
    step(tf.constant([3.0, -4.0], tf.float64) * size)
    np.testing.assert_allclose(variable.numpy(), [-0.6, 0.8], rtol=1e-6)
    before = variable.numpy()
    step(tf.constant([3.0, INF], tf.float64) * size)
    np.testing.assert_array_equal(variable.numpy(), before)


@pytest.mark.parametrize("arguments", [{"loss_scale": 8.0}, {"initial_scale": 4.0}, {"dynamic": False}])
def test_arguments_that_contradict_a_policy_are_refused(arguments):
    """Instead of being dropped; so is a growth interval for a fixed scale."""
    with pytest.raises(ValueError, match="pass either policy= or the settings"):
        LossScaleOptimizer(keras.optimizers.SGD(), policy=POLICY, **arguments)
    if "loss_scale" in arguments:
        with pytest.raises(ValueError, match="pass either loss_scale= or dynamic="):
            LossScaleOptimizer(keras.optimizers.SGD(), **arguments, dynamic=True)
    with pytest.raises(AttributeError, match="dynamic_growth_steps is of dynamic scaling"):
        LossScaleOptimizer(keras.optimizers.SGD(), 8.0).dynamic_growth_steps = 5


@pytest.mark.parametrize("arguments", [{}, {"loss_scale": "dynamic"}, {"policy": "dynamic"}, {"dynamic": True}])
def test_dynamic_is_that_of_the_documents(arguments):
    """It begins at 2**15, by whichever argument it is given; in `lossscale_keras` it begins at 2**16."""
    assert LossScaleOptimizer(keras.optimizers.SGD(), **arguments).loss_scale == 2.0**15
    assert lossscale_keras.LossScaleOptimizer(keras.optimizers.SGD()).loss_scale == 2.0**16


def test_gradients_of_other_kinds():
    """Arrays are taken, integers are refused, and a variable without a gradient is named."""
    variable, other = tf.Variable([1.0]), tf.Variable([1.0], name="other")
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(1.0), "none")
    optimizer.apply_gradients([(np.ones(1, np.float32), variable)])
    assert float(variable[0]) == 0.0
    with pytest.raises(TypeError, match="dtype int32"):
        optimizer.apply_gradients([(tf.constant([1]), variable)])
    optimizer.build([variable, other])
    with pytest.warns(UserWarning, match="no gradient exists for other"):
        optimizer.apply_gradients([(tf.constant([1.0]), variable), (None, other)])


@pytest.mark.parametrize("name", TF_KERAS)
def test_fit_with_an_optimizer_of_tf_keras(name):
    """Keras 3 trains with it, too, and ends as it ends with its own."""
    expected = _fit(_model(LossScaleOptimizer(keras.optimizers.Adam(0.1))), epochs=2)
    for ours, theirs in zip(_fit(_model(LossScaleOptimizer(TF_KERAS[name]())), epochs=2), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-4)


def test_a_step_that_was_interrupted_is_forgotten():
    """What Keras scaled before an exception does not affect a step of the user's own."""
    optimizer, variable = LossScaleOptimizer(keras.optimizers.SGD(1.0), 1024.0), tf.Variable(1.0)
    optimizer.scale_loss(tf.constant(0.0))
    optimizer.minimize(lambda: variable * 2.0, [variable])
    assert float(variable) == -1.0


def test_traces_are_let_go():
    """No graph is kept alive by what was scaled in it."""
    optimizer, graphs = LossScaleOptimizer(keras.optimizers.SGD(1.0), 2.0), []
    for _ in range(3):
        trace = tf.function(lambda: optimizer.get_scaled_loss(tf.constant(1.0)), autograph=False)
        graphs.append(weakref.ref(trace.get_concrete_function().graph))
        del trace
    gc.collect()
    assert [graph() for graph in graphs] == [None] * 3


def test_the_growth_interval_can_be_lowered():
    """Below the present count, too: the scale grows on the next finite step."""
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.0), DynamicScaling(init_scale=4.0, growth_interval=100))
    variable = tf.Variable(1.0)
    for _ in range(5):
        optimizer.minimize(lambda: variable, [variable])
    optimizer.dynamic_growth_steps = 2
    optimizer.minimize(lambda: variable, [variable])
    assert optimizer.loss_scale == 8.0


def test_a_lowered_growth_interval_reaches_fit_when_it_is_traced_again():
    """And a warning says that it must be."""
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.0), DynamicScaling(init_scale=4.0, growth_interval=100))
    model = _model(optimizer)
    _fit(model)
    with pytest.warns(UserWarning, match=r"dynamic_growth_steps=2 .*make_train_function\(force=True\)"):
        optimizer.dynamic_growth_steps = 2
    model.make_train_function(force=True)
    _fit(model)
    assert optimizer.loss_scale == 4.0 * 2.0**2  # four steps more: one reaches the interval, the third does again


tf1 = tf.compat.v1
UNFIT = {
    "ours": lambda: LossScaleOptimizer(keras.optimizers.SGD()),
    "Keras's": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()),
    "tf_keras's": lambda: tf_keras.mixed_precision.LossScaleOptimizer(tf_keras.optimizers.SGD()),
    "ours of v1": lambda: v1.LossScaleOptimizer(tf1.train.GradientDescentOptimizer(1.0), 4.0),
    "of v1": lambda: tf1.train.GradientDescentOptimizer(1.0),
    "a class": lambda: keras.optimizers.SGD,
    "a number": lambda: 3,
    "a name": lambda: "sgd",
}


@pytest.mark.parametrize("inner", UNFIT.values(), ids=UNFIT)
def test_what_cannot_be_wrapped_is_refused(inner):
    """With a reason."""
    inner = inner()
    with pytest.raises(TypeError, match=r"wrap the optimizer once|is not a Keras optimizer|wrap it by lossscale_tf.v1"):
        LossScaleOptimizer(inner)


@pytest.mark.parametrize("norm", [1e300, INF])
def test_a_clipnorm_that_float32_cannot_hold_clips_nothing(norm):
    """And reads back as it was given."""
    optimizer, variable = LossScaleOptimizer(keras.optimizers.SGD(0.5), 8.0, global_clipnorm=norm), tf.Variable(1.0)
    optimizer.minimize(lambda: variable**2, [variable])
    assert (float(variable), optimizer.global_clipnorm) == (0.0, norm)


OWN_SUM = [{}, {"experimental_aggregate_gradients": False}, {"skip_gradients_aggregation": True}]
"""What says that gradients are summed over replicas before `apply_gradients`; nothing if they are not."""


@pytest.mark.parametrize("own_sum", OWN_SUM, ids=str)
@pytest.mark.parametrize("graph", [True, False])
def test_two_replicas_decide_alike(graph, own_sum):
    """200 steps with overflows on one replica at a time: variables and slots stay bit-identical on both."""
    steps = 200 if graph else 8  # eagerly a step under a strategy takes long
    with STRATEGY.scope():
        variable = tf.Variable([1.0, 2.0])
        optimizer = LossScaleOptimizer(keras.optimizers.Adam(0.01), POLICY)
    victims = np.random.default_rng(0).integers(0, 5, steps)
    expected = simulate(POLICY, list(victims >= 2))

    def on_replica(victim):
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        with tf.GradientTape() as tape:
            scaled = optimizer.get_scaled_loss(tf.reduce_sum(variable**2))
        (grad,) = optimizer.get_unscaled_gradients(tape.gradient(scaled, [variable]))
        grad = tf.where(replica == victim, INF, grad)
        if own_sum:
            grad = tf.distribute.get_replica_context().all_reduce("sum", grad)
        optimizer.apply_gradients([(grad, variable)], **own_sum)

    def step(victim):
        STRATEGY.run(on_replica, args=(victim,))

    step = tf.function(step, autograph=False) if graph else step
    for n, victim in enumerate(victims):
        before = variable.numpy()
        step(tf.constant(int(victim)))
        copies = [each.numpy() for each in STRATEGY.experimental_local_results(variable)]
        assert copies[0].tobytes() == copies[1].tobytes()
        assert np.array_equal(before, copies[0]) == (victim < 2)
        assert optimizer.loss_scale == expected.loss_scale_after[n]
    for slot in optimizer.inner_optimizer.variables:
        first, second = (each.numpy() for each in STRATEGY.experimental_local_results(slot.value))
        assert first.tobytes() == second.tobytes()


def test_fit_under_a_strategy_skips_on_every_replica():
    """An infinity on the second replica alone: Keras 3.15's own wrapper puts it into the weights, ours skips."""
    spoilt = INPUTS[:8].copy()
    spoilt[7, 0] = INF
    weights = {}
    for wrapper in (LossScaleOptimizer, keras.optimizers.LossScaleOptimizer):
        with STRATEGY.scope():
            model = _model(wrapper(keras.optimizers.SGD(0.01)), jit_compile=False)
        before = model.get_weights()
        model.fit(spoilt, TARGETS[:8], batch_size=8, verbose=0, shuffle=False)
        weights[wrapper] = before, model.get_weights()
    for before, after in zip(*weights[LossScaleOptimizer], strict=True):
        np.testing.assert_array_equal(before, after)
    assert not all(np.isfinite(each).all() for each in weights[keras.optimizers.LossScaleOptimizer][1])
