"""`LossScaleOptimizer` in each mode of `fit`: overflows, spikes, replicas, frozen layers, custom train steps."""

from tests.adapters.tensorflow_devices import STRATEGY  # noqa: I001
import functools
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
ROWS = 4
"""A batch's: under the strategy each of the two replicas gets half of them."""
STEPS, SPIKES, OVERFLOWS = 30, [12, 13, 22], [3, 5, 6, 18, 28]
"""A run's steps, and its bad batches. Its targets are 10 higher, so that the norms of gradients are alike."""


def _data(steps):
    inputs = np.random.default_rng(0).normal(size=(steps * ROWS, 3)).astype(np.float32)
    return inputs, inputs.sum(axis=1, keepdims=True)


def _layers():
    return [keras.Input((3,)), keras.layers.Dense(8), keras.layers.Dense(1, dtype="float32")]


def _model(optimizer, layers=_layers, **options):
    keras.utils.set_random_seed(0)
    model = keras.Sequential(layers())
    model.compile(optimizer=optimizer, loss="mse", **options)
    return model


def _fit(model, inputs, targets, **options):
    model.fit(inputs, targets, batch_size=ROWS, verbose=0, shuffle=False, **options)
    return model


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
    inputs[ROWS - 1] = INF
    _fit(model, inputs, targets)
    assert not all(np.isfinite(weight).all() for weight in model.get_weights())


@functools.cache
def _without_bad_batches(dtype):
    """Return a model that Keras's own wrapper has trained on the other batches, in this dtype policy."""
    is_good = np.repeat([n not in SPIKES + OVERFLOWS for n in range(STEPS)], ROWS)
    inputs, targets = _data(STEPS)
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01, global_clipnorm=1.0), 2.0**-4)
    return _fit(_model(optimizer, jit_compile=False), inputs[is_good], targets[is_good] + 10.0)


@pytest.mark.parametrize(
    ("scope", "options", "dtype", "wrapper"),
    [
        (nullcontext, {"jit_compile": False}, "float32", LossScaleOptimizer),
        (nullcontext, {"run_eagerly": True}, "mixed_float16", LossScaleOptimizer),
        (nullcontext, {"jit_compile": True, "steps_per_execution": 3}, "mixed_float16", LossScaleOptimizer),
        (STRATEGY.scope, {"jit_compile": False}, "float32", LossScaleOptimizer),
        (STRATEGY.scope, {"run_eagerly": True}, "float32", LossScaleOptimizer),
        (STRATEGY.scope, {"jit_compile": False}, "mixed_float16", lossscale_keras.LossScaleOptimizer),
        (tf.distribute.OneDeviceStrategy("CPU:0").scope, {"jit_compile": False}, "float32", LossScaleOptimizer),
    ],
)
def test_every_way_to_run(scope, options, dtype, wrapper):
    """A run with overflows and spikes ends like a run without these batches, and its loss scale follows the policy."""
    keras.config.set_dtype_policy(dtype)
    inputs, targets = _data(STEPS)
    # Only one of two replicas has the row with the overflow.
    inputs[[n * ROWS + (ROWS - 1) * (n % 2) for n in OVERFLOWS]] = INF
    inputs[[n * ROWS for n in SPIKES]] *= 200.0
    # No spike overflows in float16 at these scales.
    policy = DynamicScaling(init_scale=2.0**-4, growth_interval=3, min_scale=2.0**-9)
    guard = SpikeGuard(warmup=4, memory=8)
    with scope():
        optimizer = wrapper(keras.optimizers.Adam(0.01), policy, global_clipnorm=1.0, guard=guard)
        model = _model(optimizer, **options)
    assert model.optimizer is optimizer  # not wrapped a second time under mixed_float16
    _fit(model, inputs, targets + 10.0)
    assert getattr(optimizer, "steps_with_missing_calls", 0) == 0
    for variable in (*model.variables, *optimizer.variables):
        copies = STRATEGY.experimental_local_results(variable.value)
        assert len({copy.numpy().tobytes() for copy in copies}) == 1, variable.path
    # A spike does not change the loss scale.
    expected = simulate(policy, [n not in OVERFLOWS for n in range(STEPS) if n not in SPIKES])
    assert float(tf.convert_to_tensor(optimizer.loss_scale)) == expected.loss_scale_after[-1]
    metrics = optimizer.metrics()
    assert [int(metrics[name]) for name in ("spikes", "skipped_steps", "steps")] == [3, 5, 27]
    assert int(tf.convert_to_tensor(optimizer.iterations)) == STEPS - len(SPIKES) - len(OVERFLOWS)
    _assert_close(model, _without_bad_batches(dtype), atol=1e-6 if dtype == "float32" else 1e-3)


def test_embeddings():
    """With the sparse gradients of an embedding, training ends like training with the bare optimizer."""
    layers = lambda: [keras.Input((2,)), keras.layers.Embedding(5, 3), keras.layers.Flatten(), keras.layers.Dense(1)]  # noqa: E731
    data, adam = (np.arange(32).reshape(16, 2) % 5, np.ones((16, 1), np.float32)), keras.optimizers.Adam
    optimizers = LossScaleOptimizer(adam(0.01)), adam(0.01)
    _assert_close(*(_fit(_model(optimizer, layers, jit_compile=False), *data) for optimizer in optimizers))


@pytest.mark.skipif(not hasattr(keras.optimizers, "ScheduleFreeAdamW"), reason="this version of Keras has none")
@pytest.mark.parametrize("wrapper", [LossScaleOptimizer, lossscale_keras.LossScaleOptimizer])
@pytest.mark.parametrize("is_built", [False, True])
def test_schedule_free(wrapper, is_built):
    """`ScheduleFreeAdamW` in the wrapper trains like the bare optimizer, also if `fit` builds the model."""
    make = lambda: keras.optimizers.ScheduleFreeAdamW(0.05)  # noqa: E731
    # The averages begin at the first values of the model. If `fit` builds the model, only the trace has these values.
    layers = lambda: [*[keras.Input((3,))] * is_built, keras.layers.Dense(1)]  # noqa: E731
    ours, bare = (_model(optimizer, layers, jit_compile=False) for optimizer in (wrapper(make(), policy=8.0), make()))
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
    """In `fit`, a growth interval below the current count applies once the step is traced again."""
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.0), DynamicScaling(init_scale=4.0, growth_interval=100))
    optimizer.dynamic_growth_steps = 50
    model = _fit(_model(optimizer), *_data(4))
    with pytest.warns(UserWarning, match=r"dynamic_growth_steps=2 .*make_train_function\(force=True\)"):
        optimizer.dynamic_growth_steps = 2
    model.make_train_function(force=True)
    _fit(model, *_data(4))
    assert optimizer.loss_scale == 4.0 * 2.0**2  # four steps more: one reaches the interval, the third does again
