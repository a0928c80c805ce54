"""`fit` with `lossscale_keras.LossScaleOptimizer`, on the backend that KERAS_BACKEND names."""

import doctest
import functools
import re
import textwrap
from contextlib import nullcontext
from pathlib import Path

import keras
import numpy as np
import pytest

from lossscale_core import DynamicScaling, SpikeGuard
from lossscale_core.errors import OverflowStreakError
from lossscale_keras import LossScaleLogger, LossScaleOptimizer
from tests.adapters.keras_loops import BACKEND, assert_same, value_of, values_of
from tests.sweeping import IS_SWEEP

PAGE = (Path(__file__).parents[2] / "docs/keras-and-tensorflow.md").read_text(encoding="utf-8")
DATA = np.random.default_rng(0).normal(size=(96, 3)).astype("float32")
BAD = np.full((8, 3), np.inf, np.float32)
# On PyTorch, to compile the train step of Keras takes a minute; `test_keras_last_loss.py` compiles `apply` alone.
WAYS = {"tensorflow": ["jit_compile", "plain"], "jax": ["jit_compile", "eight devices"]}
WAYS["torch"] = ["plain", "jit_compile"] if IS_SWEEP else ["plain"]


@pytest.fixture(autouse=True)
def _mixed_float16():
    keras.utils.set_random_seed(0)
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    yield
    keras.config.set_dtype_policy(before)


def _model(*layers, optimizer, model_class=keras.Sequential, **settings):
    layers = [keras.Input((3,)), *layers, keras.layers.Dense(1, dtype="float32")]
    model = model_class(layers)
    model.compile(optimizer, "mse", **settings)
    return model


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")  # of TorchInductor
@pytest.mark.parametrize("way", WAYS[BACKEND])
def test_fit_in_float16_skips_bad_batches(way, caplog):
    """In `fit` in float16, a bad batch changes only the state, also if it is bad on one of eight devices."""
    scope = nullcontext()
    if way == "eight devices":
        devices = keras.distribution.list_devices()
        assert len(devices) == 8
        scope = keras.distribution.DataParallel(devices=devices, auto_shard_dataset=False).scope()
    with scope:
        inner = keras.optimizers.Adam(0.05, global_clipnorm=10.0)
        optimizer = LossScaleOptimizer(inner, DynamicScaling(init_scale=2.0**20, growth_interval=20))
        model = _model(keras.layers.Dense(8), optimizer=optimizer, jit_compile=way != "plain")
        # `compile` does not wrap the optimizer again.
        assert model.optimizer is optimizer
        fit = functools.partial(model.fit, batch_size=8, verbose=0, callbacks=[LossScaleLogger()])
        history = fit(DATA, DATA.sum(axis=1), epochs=12).history
        assert history["loss"][-1] < 0.01
        assert history["loss_scale"][-1] == float(optimizer.loss_scale)
        assert history["skipped_steps"][-1] == int(optimizer.metrics()["skipped_steps"])
        assert int(optimizer.iterations) == int(optimizer.metrics()["applied_steps"])
        before, scale = values_of(model.trainable_variables, inner.variables), float(optimizer.loss_scale)
        fit(np.concatenate([DATA[:7], BAD[:1]]), np.ones(8), epochs=2)
        assert [getattr(record, "event", "") for record in caplog.records].count("bad_loss") == 1
        assert_same(values_of(model.trainable_variables, inner.variables), before)
        info = optimizer.last_step
        assert (float(info.loss_scale_used), float(info.loss_scale_after)) == (scale / 2, scale / 4)
        assert (bool(info.applied), int(info.overflow_streak)) == (False, 2)


def test_logger_logs_batches_and_raises():
    """The logger adds its numbers to the logs of every second batch, and raises an error for a streak of overflows."""
    numbers, seen, policy = {"loss_scale", "skipped_steps", "spikes"}, [], DynamicScaling(max_overflow_streak=3)
    model = _model(optimizer=LossScaleOptimizer(keras.optimizers.SGD(0.01), policy, guard=SpikeGuard()))
    see = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(numbers <= {*logs}))
    model.fit(DATA, DATA[:, 0], batch_size=24, verbose=0, callbacks=[LossScaleLogger(every_n_batches=2), see])
    assert seen == [False, True, False, True]
    with pytest.raises(OverflowStreakError, match="max_overflow_streak=3"):
        model.fit(np.concatenate([BAD] * 4), np.ones(32), batch_size=8, verbose=0, callbacks=[LossScaleLogger()])
    plain = _model(optimizer=keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()))
    with pytest.warns(UserWarning, match="LossScaleLogger logs nothing: the optimizer is LossScaleOptimizer"):
        plain.fit(DATA, DATA[:, 0], verbose=0, callbacks=[LossScaleLogger()])
    with pytest.raises(ValueError, match=r"every_n_batches=0 must be .*; leave it out for epochs only"):
        LossScaleLogger(every_n_batches=0)


def _code_with(words):
    """Return the only block of the page that contains these words, without prompts."""
    blocks = map(textwrap.dedent, re.findall(r"^ *```python\n(.*?)```", PAGE, re.DOTALL | re.MULTILINE))
    (code,) = [block for block in blocks if words in block]
    return "\n".join(line[4:] if line[:4] in (">>> ", "... ") else line for line in code.splitlines())


def test_the_examples_of_the_page():
    """The examples before the part on `lossscale_tf` run on every backend."""
    everywhere = PAGE.partition("\n## TensorFlow:")[0]
    examples = doctest.DocTestParser().get_doctest(everywhere, {}, "keras-and-tensorflow.md", None, None)
    assert len(examples.examples) > 15
    assert doctest.DocTestRunner().run(examples).failed == 0


def test_the_loops_of_the_page_train():
    """Each loop trains on its backend, and a bad batch is skipped."""
    words = {"torch": "model.zero_grad()", "tensorflow": ".apply(tape.gradient", "jax": "def scaled_loss"}[BACKEND]
    code = compile(_code_with(words), "docs/keras-and-tensorflow.md", "exec")
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, dtype="float32")])
    optimizer = LossScaleOptimizer(keras.optimizers.Adam(0.1))
    optimizer.build(model.trainable_variables)
    names = {"keras": keras, "model": model, "optimizer": optimizer, "loss_fn": keras.losses.MeanSquaredError()}
    names |= {BACKEND: __import__(BACKEND), "tf": __import__(BACKEND)}
    lists = model.trainable_variables, model.non_trainable_variables, optimizer.variables

    def train(x, y):
        values = ([variable.value for variable in variables] for variables in lists)
        names.update(zip(("weights", "others", "state"), values, strict=True))
        names.update(x=keras.ops.convert_to_tensor(x), y=keras.ops.convert_to_tensor(y))
        exec(code, names)
        if BACKEND == "jax":
            for variables, name in zip(lists, ("weights", "others", "state"), strict=True):
                for variable, value in zip(variables, names[name], strict=True):
                    variable.assign(value)

    for _ in range(60):
        train(DATA, DATA.sum(axis=1, keepdims=True))
    np.testing.assert_allclose(value_of(model.trainable_variables[0]), np.ones((3, 1)), atol=0.1)
    before = values_of(model.trainable_variables)
    train(BAD, np.ones((8, 1), np.float32))
    assert_same(values_of(model.trainable_variables), before)
    assert (int(optimizer.iterations), bool(optimizer.last_step.overflowed)) == (60, True)


def test_train_step_of_the_page():
    """With the train step of the page, a skipped batch leaves the bits of BatchNorm's averages unchanged."""
    names = {"keras": keras}
    exec(_code_with("def train_step" + ("(self, state, data)" if BACKEND == "jax" else "(self, data)")), names)

    def trained(model_class):
        inputs = keras.Input((3,))
        normalised = keras.layers.BatchNormalization()
        model = model_class(inputs, keras.layers.Dense(1, dtype="float32")(normalised(inputs)))
        model.compile(LossScaleOptimizer(keras.optimizers.SGD(0.01)), "mse")
        model.fit(DATA, DATA.sum(axis=1), verbose=0)
        before = values_of(model.non_trainable_variables)
        model.fit(BAD, np.ones(8), verbose=0)
        return before, values_of(model.non_trainable_variables)

    before, after = trained(names["ProtectedModel"])
    assert_same(after, before)
    assert np.abs(before[0]).max() > 0
    # With Keras's own train step, the averages are NaN.
    assert not np.isfinite(np.concatenate(trained(keras.Model)[1])).all()
