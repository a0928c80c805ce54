"""`range_report` on real float16 models: its predictions are right, its names too, and it changes nothing."""

import random
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from keras import layers

from lossscale_core import DynamicScaling
from lossscale_tf import all_finite, init_state, range_report, scale

WIDTH = 8
RNG = np.random.default_rng(0)
X = tf.constant(RNG.normal(size=(6, 5, WIDTH)), tf.float32)
IMAGES = tf.constant(RNG.normal(size=(4, 6, 6, 3)), tf.float32)
TOKENS = tf.constant(RNG.integers(0, 7, size=(6, 5)))


class Attention(keras.Model):
    """One head, written out, so that the backward pass of its softmax is not hidden in a layer of float32."""

    def __init__(self):
        super().__init__(name="attention")
        self.query, self.key, self.value = (layers.Dense(WIDTH, name=name) for name in ("query", "key", "value"))

    def call(self, x):
        scores = tf.matmul(self.query(x), self.key(x), transpose_b=True) / WIDTH**0.5
        return tf.matmul(tf.nn.softmax(scores), self.value(x))


class Tied(keras.Model):
    """An embedding that shares its weights with the output layer."""

    def __init__(self):
        super().__init__(name="tied")
        self.embedding, self.mix = layers.Embedding(7, WIDTH, name="embed"), layers.Dense(WIDTH, name="mix")

    def call(self, tokens):
        hidden = self.mix(self.embedding(tokens))
        return tf.matmul(hidden, tf.cast(self.embedding.embeddings, hidden.dtype), transpose_b=True)


def _sequential(name, *parts):
    return keras.Sequential([*parts], name=name)


def _functional_attention():
    x = keras.Input((5, WIDTH))
    hidden = layers.LayerNormalization(name="norm")(x + layers.MultiHeadAttention(2, 4, name="heads")(x, x))
    return keras.Model(x, layers.Dense(WIDTH, name="out")(hidden), name="transformer")


MODELS = {
    "attention": (Attention, X),
    "heads": (_functional_attention, X),
    "conv": (
        lambda: _sequential(
            "conv",
            layers.Conv2D(4, 3, name="filters"),
            layers.BatchNormalization(name="norm"),
            layers.ReLU(),
            layers.GlobalAveragePooling2D(),
            layers.Dense(3, name="out"),
        ),
        IMAGES,
    ),
    "mlp": (
        lambda: _sequential(
            "mlp",
            layers.Dense(16, activation="silu", name="up"),
            layers.Dropout(0.5, name="drop"),
            layers.Dense(WIDTH, name="down"),
        ),
        X,
    ),
    "norm": (
        lambda: _sequential(
            "normed", layers.LayerNormalization(name="norm"), layers.Dense(WIDTH, activation="relu", name="down")
        ),
        X,
    ),
    "embedding": (
        lambda: _sequential("words", layers.Embedding(7, WIDTH, name="embed"), layers.Dense(3, name="out")),
        TOKENS,
    ),
    "tied": (Tied, TOKENS),
    "recurrent": (
        lambda: _sequential("recurrent", layers.SimpleRNN(WIDTH, name="cells"), layers.Dense(3, name="out")),
        X[:, :3],
    ),
}


@pytest.fixture(autouse=True)
def _policy_kept():
    """Build models under the policy of the test alone."""
    keras.utils.set_random_seed(0)
    yield
    keras.config.set_dtype_policy("float32")
    tf_keras.mixed_precision.set_global_policy("float32")


def _model(name, policy="mixed_float16"):
    """Return a model that is built, and its inputs."""
    keras.config.set_dtype_policy(policy)
    make, x = MODELS[name]
    model = make()
    model(x)
    return model, x


def _square(model, x, weight=1.0):
    out = tf.cast(model(x, training=True), tf.float32)
    return weight * tf.reduce_mean(tf.square(out - tf.linspace(-2.0, 2.0, out.shape[-1])))


def _loss_fn(model, x, weight=1.0):
    return tf.function(lambda: _square(model, x, weight))


def _largest_finite_scale(loss_fn, weight=1.0):
    """Return the largest power of two at which every gradient is finite, by bisection; the function is compiled."""
    with tf.GradientTape(persistent=True) as tape:
        loss = scale(weight * loss_fn(), init_state(DynamicScaling(init_scale=1.0)))
    variables = tape.watched_variables()
    lowest, highest = -20, 60
    while highest - lowest > 1:
        middle = (lowest + highest) // 2
        gradients = tape.gradient(loss, variables, output_gradients=tf.constant(2.0**middle))
        lowest, highest = (middle, highest) if all_finite(list(gradients)) else (lowest, middle)
    return 2.0**lowest


@pytest.mark.parametrize("name", MODELS)
def test_the_limit_is_the_one_that_bisection_finds(name):
    """Within one power of two, on each model and with each weight of the loss."""
    model, x = _model(name)
    loss_fn, policy, kept = _loss_fn(model, x), DynamicScaling(), [each.numpy() for each in model.variables]
    for weight in (1.0,) if name == "recurrent" else (1.0, 1e-3, 1e3):
        report = range_report(model, lambda weight=weight: weight * loss_fn())
        assert report.forward_finite
        assert 0.5 <= report.overflows_above / _largest_finite_scale(loss_fn, weight) <= 2.0
        assert report.init_scale == max(policy.min_scale, min(report.overflows_above / 2, policy.max_scale))
        for variable, value in zip(model.variables, kept, strict=True):
            variable.assign(value)  # the state of the dropout, which the bisection moves on


@pytest.mark.parametrize("name", ["attention", "conv", "mlp", "tied"])
def test_models_in_pure_float16_are_measured_as_well(name):
    """Their parameters are float16, and so are the gradients, which are sums over duplicates for an embedding."""
    model, x = _model(name, "float16")
    report = range_report(model, _loss_fn(model, x))
    assert 0.5 <= report.overflows_above / _largest_finite_scale(_loss_fn(model, x)) <= 2.0
    assert {record.dtype for record in report.backward if record.operation == "gradient"} == {"float16"}


def test_models_of_tf_keras_are_measured_as_well():
    """Under their own policy; layers and gradients have the names that tf_keras gives them."""
    tf_keras.mixed_precision.set_global_policy("mixed_float16")
    parts = [
        tf_keras.layers.Conv2D(4, 3, name="filters"),
        tf_keras.layers.BatchNormalization(name="norm"),
        tf_keras.layers.Flatten(name="flat"),
        tf_keras.layers.Dropout(0.5, name="drop"),
        tf_keras.layers.Dense(3, name="out"),
    ]
    model = tf_keras.Sequential(parts, name="conv")
    model(IMAGES)
    report = range_report(model, _loss_fn(model, IMAGES))
    assert 0.5 <= report.overflows_above / _largest_finite_scale(_loss_fn(model, IMAGES)) <= 2.0
    for records in (report.forward, report.backward):
        assert {"filters", "norm", "drop", "out"} <= {record.module for record in records}
    names = [record.module for record in report.backward if record.operation == "gradient"]
    assert names == [variable.name.removesuffix(":0") for variable in model.trainable_variables]


def test_an_optimizer_that_begins_with_the_scale_applies_its_first_step():
    """And does not with four times the limit."""
    model, x = _model("conv")
    report = range_report(model, _loss_fn(model, x))
    for loss_scale, applied in ((report.init_scale, True), (4 * report.overflows_above, False)):
        with tf.GradientTape() as tape:
            loss = scale(_square(model, x), init_state(DynamicScaling(init_scale=loss_scale)))
        gradients = tape.gradient(loss, [each.value for each in model.trainable_variables])
        assert bool(all_finite(gradients)) == applied


def test_what_flushes_is_counted():
    """A share of the gradient elements that grows as the scale falls, and that is none at the limit."""
    model, x = _model("attention")
    report = range_report(model, _loss_fn(model, x))
    shares = [report.flushed(report.overflows_above * 2.0**-shift) for shift in (0, 16, 24, 48)]
    assert shares == sorted(shares)
    assert shares[0] == 0.0
    assert shares[-1] == 1.0


def test_a_loss_in_float16_is_lifted_before_it_is_scaled():
    """As `scale` lifts it: the loss scale enters the backward pass of the model as a float16 number."""
    variable = tf.Variable(tf.fill([4], tf.constant(0.25, tf.float16)))
    report = range_report(None, lambda: tf.reduce_sum(tf.square(variable)))
    assert report.overflows_above == 2.0**15
    assert report.overflows_first.operation == "Cast"


def test_gradients_of_constants_set_no_limit():
    """Eagerly TensorFlow sums them, in float16, and nothing needs the sum; a compiled step leaves it out."""
    variable = tf.Variable(tf.ones(2000))

    def loss_fn():
        chosen = tf.where(tf.range(2000) < 1, tf.cast(variable, tf.float16), 0)
        return tf.reduce_sum(tf.cast(chosen, tf.float32))

    assert range_report(None, loss_fn).overflows_above == 2.0**15


def test_sizes_of_gradients_set_no_limit():
    """A number of elements, in float16, does not grow with the loss scale."""
    variable = tf.Variable(tf.ones(40000))

    @tf.custom_gradient
    def averaged(x):
        return x, lambda upstream: upstream / tf.cast(tf.shape(upstream)[0], tf.float16)

    report = range_report(None, lambda: tf.reduce_sum(tf.cast(averaged(tf.cast(variable, tf.float16)), tf.float32)))
    assert report.overflows_above == 2.0**15


# -- names -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "paths"),
    [
        ("attention", {"attention", "attention/query", "attention/key", "attention/value"}),
        ("heads", {"heads", "heads/query", "heads/key", "heads/value", "heads/attention_output", "out"}),
        ("mlp", {"mlp/up", "mlp/drop", "mlp/down"}),
    ],
)
def test_operations_are_named_by_their_layer_in_both_passes(name, paths):
    """By its Keras path, also where an activation has a gradient of its own; what the loss computes is `loss_fn`'s."""
    model, x = _model(name)
    report = range_report(model, _loss_fn(model, x))
    built = {each.path for each in model._flatten_layers() if each.path}
    for records in (report.forward, report.backward):
        assert paths <= {record.module for record in records if record.operation != "gradient"}
        assert {record.module for record in records if "MatMul" in record.operation} <= built
    gradients = [record.module for record in report.backward if record.operation == "gradient"]
    assert gradients == [variable.path for variable in model.trainable_variables]
    first = report.overflows_first
    assert f"first in {first.module} ({first.operation})" in str(report)


def test_a_double_backward_has_the_names_of_its_layers():
    """What a gradient penalty computes, and the gradients of that."""
    model, x = _model("mlp")

    def penalty():
        with tf.GradientTape() as tape:
            tape.watch(x)
            out = tf.reduce_sum(tf.cast(model(x), tf.float32))
        return tf.reduce_mean(tf.square(tf.norm(tape.gradient(out, x), axis=-1) - 1))

    report = range_report(model, penalty)
    for records in (report.forward, report.backward):
        assert {record.module for record in records if "MatMul" in record.operation} == {"mlp/up", "mlp/down"}


def test_the_gradient_of_a_bias_belongs_to_its_layer():
    """An overflow in the sum over a batch belongs to the layer of the bias, not to the layer above."""
    keras.config.set_dtype_policy("mixed_float16")
    model = _sequential("model", layers.Dense(4, name="low"), layers.Dense(4, name="high"))
    report = range_report(model, lambda: _square(model, X))
    found = [record.module for record in report.backward if record.operation == "BiasAddGrad"]
    assert found == ["model/high", "model/low"]


def test_without_a_model_name_scopes_give_the_names():
    """And gradients are named by their variables."""
    variable = tf.Variable(tf.ones(4), name="weight")

    def loss_fn():
        with tf.name_scope("lift"):
            half = tf.cast(variable, tf.float16)
        with tf.name_scope("deep"), tf.name_scope("square"):
            half = half * half
        return tf.reduce_sum(tf.cast(half, tf.float32))

    report = range_report(None, loss_fn)
    assert [(r.module, r.operation) for r in report.forward] == [("lift", "Cast"), ("deep/square", "Mul")]
    assert {r.module for r in report.backward} == {"loss_fn", "deep/square", "weight"}


def test_modules_give_their_names():
    """Where their methods open their name scopes, as Sonnet's do."""

    class Linear(tf.Module):
        def __init__(self, name):
            super().__init__(name)
            with self.name_scope:
                self.weight = tf.Variable(tf.eye(WIDTH), name="weight")

        @tf.Module.with_name_scope
        def __call__(self, x):
            return tf.matmul(x, tf.cast(self.weight, tf.float16))

    class Network(tf.Module):
        def __init__(self):
            super().__init__("network")
            with self.name_scope:
                self.low, self.high = Linear("low"), Linear("high")

        @tf.Module.with_name_scope
        def __call__(self, x, training):
            return self.high(self.low(tf.cast(x, tf.float16)))

    model = Network()
    report = range_report(model, lambda: _square(model, X[0]))
    for records in (report.forward, report.backward):
        products = {record.module for record in records if record.operation == "MatMul"}
        assert products == {"network/low", "network/high"}
    gradients = {record.module for record in report.backward if record.operation == "gradient"}
    assert gradients == {"network/low/weight", "network/high/weight"}


def test_what_the_backward_pass_computes_again_is_not_scaled():
    """Under `tf.recompute_grad` it computes the forward pass again, which no loss scale multiplies."""
    keras.config.set_dtype_policy("mixed_float16")
    layer = layers.Dense(WIDTH, activation="tanh", name="layer")
    layer(X)
    report = range_report(layer, lambda: tf.reduce_sum(tf.cast(tf.recompute_grad(layer)(X), tf.float32)))
    assert [(r.module, r.scaled) for r in report.backward if r.operation == "Tanh"] == [("layer", False)]
    assert 1.0 < report.overflows_above < np.inf


def test_loops_and_branches_are_looked_into():
    """Functions that are otherwise compiled, too; their operations have the names of their scopes."""
    variable = tf.Variable(1.0)

    @tf.function(jit_compile=True)
    def doubled(x):
        with tf.name_scope("turn"):
            return tf.cond(x > 0, lambda: 2 * x, lambda: x / 0)

    @tf.function
    def loss_fn():
        half = tf.cast(variable, tf.float16)
        return tf.cast(tf.while_loop(lambda n, _: n < 3, lambda n, x: (n + 1, doubled(x)), (0, half))[1], tf.float32)

    report = range_report(None, loss_fn)
    for records in (report.forward, report.backward):
        assert [r.operation for r in records if r.module == "turn"].count("Mul") == 3
    assert report.overflows_above == 2.0**12


def test_a_concrete_function_is_one_operation():
    """Its results are measured, in both passes, and a variable that it writes to is put back."""
    variable, counter = tf.Variable(1.0), tf.Variable(0)

    @tf.function(input_signature=[tf.TensorSpec([], tf.float16)])
    def tripled(x):
        counter.assign_add(1)
        return 3 * x

    concrete = tripled.get_concrete_function()
    report = range_report(None, lambda: tf.cast(concrete(tf.cast(variable, tf.float16)), tf.float32))
    assert "tripled" in report.forward[1].operation
    assert report.forward[1].largest == 3.0
    assert len({record.operation for record in report.forward[1:]}) == 1
    assert report.overflows_above == 2.0**14
    assert counter.numpy() == 0


# -- no scale fits -----------------------------------------------------------------------------------------------------


def test_an_overflow_of_the_forward_pass_is_named():
    """No scale fits, and the report says where infinity comes from rather than where it goes."""
    keras.config.set_dtype_policy("mixed_float16")
    parts = [layers.Dense(WIDTH, name="up"), layers.Rescaling(6e4, name="loud"), layers.Rescaling(1e-4, name="quiet")]
    model = keras.Sequential(parts, name="model")
    report = range_report(model, _loss_fn(model, 10 * X))
    assert not report.forward_finite
    assert report.overflows_above is None
    assert report.init_scale is None
    assert (report.overflows_first.module, report.overflows_first.operation) == ("model/loud", "Mul")
    assert "forward: overflows in model/loud (Mul); the loss is" in str(report)
    assert "backward: not run, since the loss" in str(report)


def test_a_scale_below_one_fits_where_one_overflows():
    """The loss is finite, and the weight in front of it is large."""
    model, x = _model("mlp")
    report = range_report(model, _loss_fn(model, x, 1e9))
    assert report.forward_finite
    assert 0.5 <= report.overflows_above / _largest_finite_scale(_loss_fn(model, x), 1e9) <= 2.0
    assert report.init_scale == report.overflows_above / 2 < 1.0


def test_a_gradient_that_is_not_finite_at_any_scale_is_not_taken_for_an_overflow():
    """The root of zero has an infinite slope, and what is given infinity is named."""
    model, x = _model("mlp")
    report = range_report(model, lambda: tf.sqrt(0.0 * _loss_fn(model, x)()))
    assert report.forward_finite
    assert (report.overflows_above, report.loss_scale) == (None, 1.0)
    assert "not finite even at a loss scale of 1; loss_fn (Cast) is the first to be given" in str(report)


def test_an_infinity_that_is_meant_is_not_an_overflow():
    """The mask of an attention holds -inf, and every scale up to the limit fits."""
    model, x = _model("attention")
    mask = tf.constant(np.where(np.tri(5), 0.0, -np.inf), tf.float16)

    def loss_fn():
        return tf.reduce_sum(
            tf.cast(tf.nn.softmax(model(x) @ tf.ones([WIDTH, 5], tf.float16) + mask)[..., 0], tf.float32)
        )

    report = range_report(model, loss_fn)
    assert any(record.nonfinite for record in report.forward)
    assert report.forward_finite
    assert report.overflows_above > 1.0


def _between(compute):
    """Return a model with a middle layer, `loud`, that computes something in float16."""
    keras.config.set_dtype_policy("mixed_float16")
    parts = [layers.Dense(WIDTH, name="up"), layers.Lambda(compute, name="loud"), layers.Dense(WIDTH, name="down")]
    return keras.Sequential(parts, name="model")


@pytest.mark.parametrize(
    ("compute", "operation"),
    [
        (lambda x: x * 1e6, "Mul"),
        (lambda x: x + 1e5, "AddV2"),
        (lambda x: tf.where(x > 0, x, -1e9), "SelectV2"),
        (lambda x: keras.ops.where(x > 0, x, -1e9), "SelectV2"),
        (lambda x: x + (1.0 - tf.cast(x > 0, x.dtype)) * -1e9, "Mul"),
        (lambda x: tf.pad(x, [[0, 0], [0, 0], [1, 0]], constant_values=-1e9), "PadV2"),
        (lambda x: tf.concat([x, tf.fill([6, 5, 1], tf.constant(1e5, x.dtype))], -1), "Fill"),
        (lambda x: tf.nn.softmax(tf.where(x < 1e9, -1e9, x)), "SelectV2"),
    ],
    ids=["product", "sum", "where", "keras where", "mask", "padding", "moved", "masked rows"],
)
def test_a_constant_that_float16_cannot_hold_is_named_where_it_is_given(compute, operation):
    """It is infinite before any operation sees it; of the layers that hold infinity, the report names the first."""
    model = _between(compute)
    report = range_report(model, _loss_fn(model, X))
    assert not report.forward_finite
    assert (report.overflows_first.module, report.overflows_first.operation) == ("model/loud", operation)
    assert str(report).splitlines() == [
        f"forward: the loss is {report.loss:g}, and model/loud ({operation}) is the first to be given infinity or NaN",
        "backward: not run, since the loss is not finite before it is scaled",
        "look at the inputs and constants of that operation first; a number too large for float16 is infinite",
    ]


@pytest.mark.parametrize("wide", [False, True])
def test_a_mask_that_does_no_harm_is_not_blamed_for_a_later_constant(wide):
    """What it writes ends at the softmax, also at one in float32, and the layer that is named comes after it."""

    def attend(x):
        masked = tf.where(x > 0, x, -1e9) + tf.cast(tf.constant(-1e9) * tf.cast(x < 0, tf.float32), x.dtype)
        return tf.nn.softmax(tf.cast(masked, tf.float32) if wide else masked)

    model = _between(attend)
    report = range_report(model, _loss_fn(lambda x, training: 1e6 * model(x, training=training), X))
    assert any(record.nonfinite for record in report.forward if record.module == "model/loud")
    assert (report.overflows_first.module, report.overflows_first.operation) == ("loss_fn", "Mul")
    assert "and loss_fn (Mul) is the first to be given infinity or NaN" in str(report)


def test_an_overflow_on_the_way_to_the_loss_is_named_rather_than_a_mask():
    """Both reach the loss, and only the overflow has made an infinity."""
    model = _between(lambda x: tf.where(x > 0, x, -1e9) + tf.exp(100.0 * tf.abs(x)))
    report = range_report(model, _loss_fn(model, X))
    assert str(report).startswith("forward: overflows in model/loud (Exp); the loss is")


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: tf.nn.softmax(tf.where(x > tf.reduce_min(x), x, -1e9)),
        lambda x: tf.nn.softmax(tf.where(x > tf.reduce_min(x), x, -np.inf)),
        lambda x: tf.clip_by_value(x, -1e6, 1e6),
    ],
    ids=["-1e9", "-inf", "bounds"],
)
def test_a_constant_that_does_no_harm_is_passed_over(compute):
    """Where float32 makes the loss infinite, nothing is named, and where a gradient overflows, its operation is."""
    model = _between(compute)
    report = range_report(model, _loss_fn(model, X))
    assert report.forward_finite
    assert report.overflows_above > 1.0
    assert str(report).startswith("forward: finite;")
    divided = range_report(model, lambda: _square(model, X) / 0.0)
    assert divided.overflows_first is None
    assert str(divided).splitlines()[0] == "forward: the loss is inf, and no operation in low precision has made it so"
    steep = range_report(model, lambda: tf.sqrt(0.0 * _square(model, X)))
    assert "not finite even at a loss scale of 1; loss_fn (Cast) is the first to be given" in str(steep)


# -- what is not finite before anything is computed --------------------------------------------------------------------


def _with(array, value):
    changed = np.array(array)
    changed.flat[0] = value
    return changed


def _first_sentence(model, loss_fn):
    return str(range_report(model, loss_fn)).splitlines()[0]


@pytest.mark.parametrize("convert", [np.asarray, tf.constant])
def test_an_input_with_nan_is_named_before_anything_else(convert):
    """By the name that it has in the function, as an array and as a tensor."""
    model, x = _model("mlp")
    broken = convert(_with(x, np.nan))
    report = range_report(model, lambda: _square(model, broken))
    lines = str(report).splitlines()
    assert lines[0] == f"before the forward pass: broken of loss_fn holds NaN in 1 of its {np.size(x)} elements"
    assert lines[-1] == "replace NaN and infinity there first"


def test_a_label_with_infinity_is_named():
    """Which only the loss reads, in float32, and within a compiled function."""
    model, x = _model("mlp")
    batch = {"x": x, "y": _with(np.zeros(model(x).shape, np.float32), np.inf)}
    loss_fn = tf.function(lambda: keras.losses.MeanSquaredError()(batch["y"], tf.cast(model(batch["x"]), tf.float32)))
    sentence = _first_sentence(model, loss_fn)
    size = batch["y"].size
    assert sentence == f"before the forward pass: batch['y'] of loss_fn holds infinity in 1 of its {size} elements"


def test_a_weight_with_nan_is_named():
    """By its path in the model."""
    model, x = _model("mlp")
    kernel = model.trainable_variables[0]
    kernel.assign(_with(kernel.numpy(), np.nan))
    sentence = _first_sentence(model, lambda: _square(model, x))
    elements = f"{np.prod(kernel.shape)} elements"
    assert sentence == f"before the forward pass: weight {kernel.path} holds NaN in 1 of its {elements}"


def test_a_variable_outside_of_keras_is_named():
    """That of a `tf.Module` by its own name, and any other by the name that it has in the function."""
    module, nan = tf.Module(), [np.nan, 1.0]
    module.kernel, other = tf.Variable(nan, name="kernel"), tf.Variable(nan)
    for model, variable, name in ((module, module.kernel, "weight kernel"), (None, other, "variable of loss_fn")):
        sentence = _first_sentence(model, lambda variable=variable: tf.reduce_sum(2.0 * variable))
        assert sentence == f"before the forward pass: {name} holds NaN in 1 of its 2 elements"


def test_the_batch_of_an_iterator_is_named_by_the_operation_that_reads_it():
    """It has no name in the function."""
    model, x = _model("mlp")
    batches = iter(tf.data.Dataset.from_tensors(_with(x, np.nan)))
    sentence = _first_sentence(model, lambda: _square(model, next(batches)))
    assert sentence.startswith("before the forward pass: an input of ")
    assert sentence.endswith(f"holds NaN in 1 of its {np.size(x)} elements")


def test_a_mask_of_infinity_is_not_named_where_it_does_no_harm():
    """Neither where a scale fits, nor where the loss is infinite by something else."""
    mask = tf.constant([0.0] * (WIDTH - 1) + [-np.inf])
    model = _between(lambda x: tf.nn.softmax(x + tf.cast(mask, x.dtype)))
    assert _first_sentence(model, lambda: _square(model, X)).startswith("forward: finite")
    divided = _first_sentence(model, lambda: _square(model, X) / 0.0)
    assert divided == "forward: the loss is inf, and no operation in low precision has made it so"


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_the_report_says_what_needs_no_scaling(policy):
    """Without float16 the limit is infinite, or very large."""
    model, x = _model("mlp", policy)
    report = range_report(model, _loss_fn(model, x))
    assert report.overflows_above == np.inf if policy == "float32" else report.overflows_above > 2.0**60
    assert str(report).endswith("use NoScaling()")


# -- what it leaves alone ----------------------------------------------------------------------------------------------


def _bits(variables):
    """Return everything that a report must leave alone, as plain bytes."""
    random_states = random.getstate(), np.random.get_state()[1].tobytes(), np.random.get_state()[2]
    return [each.numpy().tobytes() for each in variables], random_states, tf.config.functions_run_eagerly()


@pytest.mark.parametrize("raises", [False, True])
def test_nothing_is_changed(raises):
    """Variables of the model, an optimizer, metrics and generators, those of no owner, and random states."""
    model, x = _model("conv")
    dropout, optimizer, metric = layers.Dropout(0.5), keras.optimizers.Adam(), keras.metrics.Mean()
    optimizer.build(model.trainable_variables)
    generator, counter, table = tf.random.Generator.from_seed(3), tf.Variable(0), tf.Variable(tf.zeros([3, 2]))
    keras.random.normal([1])  # from here on Keras has a global generator
    tf.random.set_seed(5)
    expected = tf.random.normal([3]), tf.random.normal([3], seed=2)
    tf.random.set_seed(5)
    kept = [*model.variables, *dropout.variables, *optimizer.variables, *metric.variables]
    kept += [generator.state, counter, table, keras.src.random.seed_generator.global_seed_generator().state]
    before = _bits(kept)

    def loss_fn():
        loss = _square(lambda x, **options: dropout(model(x, **options), **options), x)
        loss += 1e-3 * tf.reduce_sum(tf.random.normal([3]) + tf.random.normal([3], seed=2) + generator.normal([3]))
        loss += 1e-3 * keras.random.normal([]) * random.random() * np.random.rand()
        counter.assign_add(1)
        table.scatter_update(tf.IndexedSlices([[1.0, 2.0]], [1]))
        metric.update_state(loss)
        gradients = [tf.ones_like(each) for each in model.trainable_variables]
        optimizer.apply(gradients, model.trainable_variables)
        if raises:
            raise KeyError("the data ends here")
        return loss

    if raises:
        with pytest.raises(KeyError, match="the data ends here"):
            range_report(model, loss_fn)
    else:
        assert range_report(model, loss_fn).overflows_above > 1.0
    assert _bits(kept) == before
    np.testing.assert_array_equal((tf.random.normal([3]), tf.random.normal([3], seed=2)), expected)


def test_a_model_that_the_report_builds_begins_as_if_it_had_not():
    """Its variables have their first values, those of batch norm too, and another model of the seed has the same."""
    models = []
    for reports in (True, False):
        keras.config.set_dtype_policy("mixed_float16")
        keras.utils.set_random_seed(0)
        model = MODELS["conv"][0]()
        if reports:
            range_report(model, _loss_fn(model, IMAGES))
        model(IMAGES)
        models.append(model)
    for ours, theirs in zip(*(model.variables for model in models), strict=True):
        np.testing.assert_array_equal(ours.numpy(), theirs.numpy())


def test_the_loss_is_computed_once():
    """It may draw its batch from an iterator."""
    model, x = _model("mlp")
    batches = iter([x])
    assert range_report(model, lambda: _square(model, next(batches))).overflows_above > 1.0
    assert next(batches, None) is None


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (float, TypeError, "loss_fn returned float"),
        (lambda loss: tf.cast(loss, tf.int32), TypeError, "loss_fn returned a tensor of int32"),
        (lambda loss: tf.stack([loss, loss]), ValueError, r"shape \(2,\)"),
        (tf.stop_gradient, ValueError, "does not depend on a trainable variable"),
    ],
)
def test_what_is_not_a_loss_is_refused(make, error, message):
    """The message says what was returned and what to return."""
    model, x = _model("mlp")
    with pytest.raises(error, match=message):
        range_report(model, lambda: make(_square(model, x)))


def test_it_is_called_outside_of_a_graph():
    """A graph has no numbers to report."""
    with pytest.raises(RuntimeError, match="call it outside of"):
        tf.function(lambda: range_report(None, lambda: tf.constant(1.0)))()


# -- what it costs -----------------------------------------------------------------------------------------------------


def test_a_line_of_progress(capsys):
    """It counts on stderr beyond a thousand operations, and says nothing before."""
    model, x = _model("mlp")
    range_report(model, lambda: _square(model, x))
    assert capsys.readouterr().err == ""
    range_report(model, lambda: _square(model, x) + sum(tf.ones([]) for _ in range(600)))
    assert "range_report: 1000 operations" in capsys.readouterr().err


def test_it_costs_at_most_thirty_steps():
    """Of a small model that runs eagerly, as it does for the report."""
    model, x = _model("heads")

    def step():
        with tf.GradientTape() as tape:
            loss = _square(model, x)
        tape.gradient(loss, [each.value for each in model.trainable_variables])

    def seconds(function):
        measured = []
        for _ in range(4):
            start = time.thread_time()  # that of other processes does not count
            function()
            measured.append(time.thread_time() - start)
        return min(measured)

    assert seconds(lambda: range_report(model, lambda: _square(model, x))) <= 30 * seconds(step)


def test_variables_of_graphs_are_no_hindrance():
    """A program may hold some of `tf.compat.v1`; the report leaves them alone."""
    with tf.Graph().as_default():
        kept = [tf.Variable([1.0, 2.0]), tf.compat.v1.get_variable("kept", [2], use_resource=False)]
    weight = tf.Variable(tf.ones([4], tf.float16))
    report = range_report(tf.Module(), lambda: tf.reduce_sum(weight * weight))
    assert report.forward_finite
    assert len(kept) == 2
