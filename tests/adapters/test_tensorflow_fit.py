"""`LossScaleOptimizer` in each mode of `fit`: overflows, spikes, replicas, frozen layers, custom train steps."""

from tests.adapters.tensorflow_devices import STRATEGY  # noqa: I001
from contextlib import nullcontext

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import lossscale_keras
from lossscale_core import DynamicScaling, SpikeGuard
from lossscale_core.testing import simulate
from lossscale_tf import LossScaleOptimizer

INF = float("inf")
POLICY = DynamicScaling(init_scale=2.0**10, growth_interval=3)
ROWS = 4
"""A batch's: under the strategy each of the two replicas gets half of them."""


def _data(steps):
    inputs = np.random.default_rng(0).normal(size=(steps * ROWS, 3)).astype(np.float32)
    return inputs, inputs.sum(axis=1, keepdims=True)


def _spoilt(inputs, rows):
    spoilt = inputs.copy()
    spoilt[rows, 0] = INF
    return spoilt


def _layers():
    return [keras.Input((3,)), keras.layers.Dense(8, name="first"), keras.layers.Dense(1, dtype="float32")]


def _model(optimizer, layers=_layers, **options):
    keras.utils.set_random_seed(0)
    model = keras.Sequential(layers())
    model.compile(optimizer=optimizer, loss="mse", **options)
    return model


def _fit(model, inputs, targets, **options):
    model.fit(inputs, targets, batch_size=ROWS, verbose=0, shuffle=False, **options)
    return model


def _bare(**settings):
    return keras.optimizers.Adam(0.01, **settings)


def _wrapped():
    return LossScaleOptimizer(_bare(), POLICY)


def _assert_close(model, expected, **tolerance):
    for ours, theirs in zip(model.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, **{"rtol": 1e-5, "atol": 1e-6, **tolerance})


@pytest.fixture(autouse=True)
def _dtype_policy():
    yield
    keras.config.set_dtype_policy("float32")


def test_keras_wrapper_lets_one_replica_decide():
    """An infinity on the second replica reaches the weights, as the page says."""
    with STRATEGY.scope():
        model = _model(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.01)), jit_compile=False)
    inputs, targets = _data(1)
    _fit(model, _spoilt(inputs, [ROWS - 1]), targets)
    assert not all(np.isfinite(weight).all() for weight in model.get_weights())


WAYS = {
    "graph": {"jit_compile": False},
    "XLA": {"jit_compile": True},
    "eager": {"run_eagerly": True},
    "several steps an execution": {"jit_compile": False, "steps_per_execution": 3},
    "several steps an execution, XLA": {"jit_compile": True, "steps_per_execution": 3},
    "two replicas": {"jit_compile": False},
    "two replicas, eager": {"run_eagerly": True},
    "one replica": {"jit_compile": False},
}
SCOPES = {"two replicas": STRATEGY.scope, "one replica": tf.distribute.OneDeviceStrategy("CPU:0").scope}


@pytest.mark.parametrize(
    ("way", "dtype", "wrapper"),
    [
        *((way, "float32", LossScaleOptimizer) for way in WAYS),
        ("eager", "mixed_float16", LossScaleOptimizer),
        ("several steps an execution, XLA", "mixed_float16", LossScaleOptimizer),
        ("two replicas", "mixed_float16", lossscale_keras.LossScaleOptimizer),
    ],
)
def test_every_way_to_run(way, dtype, wrapper):
    """A run with overflows and spikes ends like a run without these batches, and the state follows the policy.

    The other run uses Keras's own wrapper. A spike does not change the loss scale. An overflow on one of two replicas
    skips the step on both, and the variables of both have the same bits.
    """
    keras.config.set_dtype_policy(dtype)
    steps, spikes, overflows = 30, [12, 13, 22], [3, 5, 6, 18, 28]
    inputs, targets = _data(steps)
    spoilt = _spoilt(inputs, [n * ROWS + (ROWS - 1) * (n % 2) for n in overflows])
    spoilt[[n * ROWS for n in spikes]] *= 200.0
    targets += 10.0  # so that the norms of gradients are alike
    policy = DynamicScaling(
        init_scale=2.0**-4, growth_interval=3, min_scale=2.0**-9
    )  # at which no spike overflows in float16
    guard = SpikeGuard(warmup=4, memory=8)
    with SCOPES.get(way.partition(",")[0], nullcontext)():
        optimizer = wrapper(_bare(), policy, global_clipnorm=1.0, guard=guard)
        model = _model(optimizer, **WAYS[way])
    assert model.optimizer is optimizer  # not wrapped a second time under mixed_float16
    _fit(model, spoilt, targets)
    assert getattr(optimizer, "steps_with_missing_calls", 0) == 0
    if "replicas" in way:
        for variable in (*model.variables, *optimizer.variables):
            first, second = (copy.numpy() for copy in STRATEGY.experimental_local_results(variable.value))
            assert first.tobytes() == second.tobytes(), variable.path
    expected = simulate(policy, [n not in overflows for n in range(steps) if n not in spikes])
    assert float(tf.convert_to_tensor(optimizer.loss_scale)) == expected.loss_scale_after[-1]
    metrics = optimizer.metrics()
    assert [int(metrics[name]) for name in ("spikes", "skipped_steps", "steps")] == [3, 5, 27]
    assert int(tf.convert_to_tensor(optimizer.iterations)) == steps - len(spikes) - len(overflows)
    good_rows = np.repeat([n not in spikes + overflows for n in range(steps)], ROWS)
    clean = _model(keras.optimizers.LossScaleOptimizer(_bare(global_clipnorm=1.0), 2.0**-4), jit_compile=False)
    _assert_close(model, _fit(clean, inputs[good_rows], targets[good_rows]), atol=1e-6 if dtype == "float32" else 1e-3)


def test_without_a_guard_no_guard_state():
    """There is no guard variable, and no guard entry in the config, the metrics and the state dict."""
    without = _wrapped()
    assert len(LossScaleOptimizer(_bare(), POLICY, guard=SpikeGuard()).variables) == len(without.variables) + 5
    assert without.guard is without.guard_state is without.get_config()["guard"] is None
    for holds in (without.metrics(), without.state_dict()):
        assert not {"guard", "spikes"} & holds.keys()


def test_layers_frozen_and_unfrozen():
    """Between two calls of `fit`, frozen layers stay unchanged, unfrozen layers train, and slots continue.

    A batch that overflows has no effect.
    """

    def train(optimizer, inputs, targets):
        model = _model(optimizer, jit_compile=False)
        optimizer.build(model.trainable_variables)
        for trainable in (True, False, True):
            before = model.get_layer("first").get_weights()
            model.get_layer("first").trainable = trainable
            model.compile(optimizer, loss="mse", jit_compile=False)
            _fit(model, inputs, targets)
            assert trainable != all(map(np.array_equal, before, model.get_layer("first").get_weights()))
        return model

    inputs, targets = _data(6)
    good_rows = np.r_[:ROWS, 2 * ROWS : 6 * ROWS]
    wrapped = train(_wrapped(), _spoilt(inputs, [ROWS]), targets)
    _assert_close(wrapped, train(_bare(), inputs[good_rows], targets[good_rows]))
    assert int(wrapped.optimizer.metrics()["skipped_steps"]) == 3


@pytest.mark.parametrize("jit_compile", [False, True])
def test_embeddings(jit_compile):
    """Sparse gradients are scaled, checked and unscaled. Training ends like training with the bare optimizer."""
    layers = lambda: [keras.Input((2,)), keras.layers.Embedding(5, 3), keras.layers.Flatten(), keras.layers.Dense(1)]  # noqa: E731
    data = np.arange(32).reshape(16, 2) % 5, np.ones((16, 1), np.float32)
    ours, bare = (_fit(_model(make(), layers, jit_compile=jit_compile), *data) for make in (_wrapped, _bare))
    _assert_close(ours, bare)


@pytest.mark.skipif(not hasattr(keras.optimizers, "ScheduleFreeAdamW"), reason="this version of Keras has none")
@pytest.mark.parametrize("wrapper", [LossScaleOptimizer, lossscale_keras.LossScaleOptimizer])
@pytest.mark.parametrize("is_built", [False, True])
def test_schedule_free(wrapper, is_built):
    """Its averages begin at the first values of the model. If `fit` builds the model, only the trace has these values.

    The wrapper trains like the bare optimizer, which is built before `fit` if the model is built before.
    """
    make = lambda: keras.optimizers.ScheduleFreeAdamW(0.05)  # noqa: E731
    layers = lambda: [*[keras.Input((3,))] * is_built, keras.layers.Dense(4), keras.layers.Dense(1)]  # noqa: E731
    ours, bare = (_model(optimizer, layers, jit_compile=False) for optimizer in (wrapper(make(), POLICY), make()))
    if is_built:
        bare.optimizer.build(bare.trainable_variables)
    _assert_close(*(_fit(model, *_data(4), epochs=3) for model in (ours, bare)))


@pytest.mark.parametrize("of", [tf_keras.optimizers, tf_keras.optimizers.legacy])
def test_optimizers_of_tf_keras(of):
    """Keras 3 trains with an optimizer of tf_keras, and ends like training with its own optimizer of this name."""
    ours, theirs = (
        _fit(_model(LossScaleOptimizer(module.Adam(0.1)), jit_compile=False), *_data(4), epochs=2)
        for module in (of, keras.optimizers)
    )
    _assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


def test_a_lowered_growth_interval_reaches_fit():
    """The interval may be below the current count. A warning says that the step must be traced again."""
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.0), DynamicScaling(init_scale=4.0, growth_interval=100))
    optimizer.dynamic_growth_steps = 50
    model = _fit(_model(optimizer), *_data(4))
    with pytest.warns(UserWarning, match=r"dynamic_growth_steps=2 .*make_train_function\(force=True\)"):
        optimizer.dynamic_growth_steps = 2
    model.make_train_function(force=True)
    _fit(model, *_data(4))
    assert optimizer.loss_scale == 4.0 * 2.0**2  # four steps more: one reaches the interval, the third does again
