"""`fit` with `lossscale_keras.LossScaleOptimizer`, on the backend that KERAS_BACKEND names."""

import doctest
import re
import textwrap
from pathlib import Path

import keras
import numpy as np
import pytest

from lossscale_core import DynamicScaling, SpikeGuard
from lossscale_core.errors import OverflowStreakError
from lossscale_keras import LossScaleLogger, LossScaleOptimizer
from tests.adapters.keras_loops import BACKEND, EACH_WRAPPER, assert_same, value_of, values_of

PAGE = (Path(__file__).parents[2] / "docs/keras-and-tensorflow.md").read_text(encoding="utf-8")
DATA = np.random.default_rng(0).normal(size=(96, 3)).astype("float32")
BAD = np.full((8, 3), np.inf, np.float32)


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
@pytest.mark.parametrize("jit_compile", [False, True])
def test_fit_in_float16_skips_bad_batches(jit_compile):
    """`compile` does not wrap the optimizer again, and a bad batch changes only the variables of the state."""
    inner = keras.optimizers.Adam(0.05, global_clipnorm=10.0)
    optimizer = LossScaleOptimizer(inner, DynamicScaling(init_scale=2.0**20, growth_interval=20))
    model = _model(keras.layers.Dense(8), optimizer=optimizer, jit_compile=jit_compile)
    assert model.optimizer is optimizer
    epochs = 3 if (BACKEND, jit_compile) in (("torch", True), ("jax", False)) else 12  # these two take seconds a step
    logged = model.fit(DATA, DATA.sum(axis=1), batch_size=8, epochs=epochs, verbose=0, callbacks=[LossScaleLogger()])
    losses = logged.history["loss"]
    assert losses[-1] < (0.01 if epochs == 12 else losses[0] / 4)
    assert logged.history["loss_scale"][-1] == float(optimizer.loss_scale)
    assert logged.history["skipped_steps"][-1] == int(optimizer.metrics()["skipped_steps"])
    assert int(optimizer.iterations) == int(optimizer.metrics()["applied_steps"])
    before, scale = values_of(model.trainable_variables, inner.variables), float(optimizer.loss_scale)
    model.fit(BAD, np.ones(8), batch_size=8, epochs=2, verbose=0)
    assert_same(values_of(model.trainable_variables, inner.variables), before)
    info = optimizer.last_step
    assert (float(info.loss_scale_used), float(info.loss_scale_after)) == (scale / 2, scale / 4)
    assert (bool(info.applied), int(info.overflow_streak)) == (False, 2)


@EACH_WRAPPER
@pytest.mark.parametrize("jit_compile", {"jax": [True], "torch": [False]}.get(BACKEND, [False, True]))
def test_fit_calls_methods_of_a_subclass(wrapper, jit_compile):
    """`fit` calls an overridden `apply`, or `stateless_apply` on JAX. The subclass replaces the gradients by ones."""

    class Ones(wrapper):
        def apply(self, grads, trainable_variables=None):
            super().apply([keras.ops.ones_like(grad) * self.dynamic_scale for grad in grads], trainable_variables)

        def stateless_apply(self, optimizer_variables, grads, trainable_variables):
            grads = [keras.ops.ones_like(grad) * 8.0 for grad in grads]
            return super().stateless_apply(optimizer_variables, grads, trainable_variables)

    model = _model(optimizer=Ones(keras.optimizers.SGD(1.0), 8.0), jit_compile=jit_compile)
    before = model.get_weights()
    model.fit(DATA[:16], DATA[:16, 0], batch_size=8, verbose=0)
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_allclose(old - new, 2.0, rtol=1e-5)


def test_logger_logs_the_first_bad_loss(caplog):
    """The log names the batch of the first NaN or infinity, once, and does not mention finite losses."""
    model = _model(optimizer=LossScaleOptimizer(keras.optimizers.SGD(0.01)))
    for data, said in ((DATA, 0), (np.concatenate([DATA, BAD, DATA]), 1)):
        model.fit(data, data.sum(axis=1), batch_size=8, verbose=0, callbacks=[LossScaleLogger()])
        assert [getattr(record, "event", "") for record in caplog.records].count("bad_loss") == said


def test_logger_logs_batches_and_raises():
    """Every second batch has an entry with the guard's spikes. A streak raises an error at the end of the epoch."""
    numbers, seen, policy = {"loss_scale", "skipped_steps", "spikes"}, [], DynamicScaling(max_overflow_streak=3)
    model = _model(optimizer=LossScaleOptimizer(keras.optimizers.SGD(0.01), policy, guard=SpikeGuard()))
    see = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(numbers <= {*logs}))
    callbacks = [LossScaleLogger(every_n_batches=2), see]
    model.fit(DATA, DATA.sum(axis=1), batch_size=24, verbose=0, callbacks=callbacks)
    assert seen == [False, True, False, True]
    with pytest.raises(OverflowStreakError, match="max_overflow_streak=3"):
        model.fit(np.concatenate([BAD] * 4), np.ones(32), batch_size=8, verbose=0, callbacks=[LossScaleLogger()])
    plain = _model(optimizer=keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()))
    with pytest.warns(UserWarning, match="LossScaleLogger logs nothing: the optimizer is LossScaleOptimizer") as warned:
        plain.fit(DATA, DATA.sum(axis=1), verbose=0, callbacks=[LossScaleLogger()])
    assert [w.filename for w in warned if "logs nothing" in str(w.message)] == [__file__]
    for wrong in (0, "10", 2.5, True):
        with pytest.raises(ValueError, match=f"every_n_batches={wrong!r} must be .*; leave it out for epochs only"):
            LossScaleLogger(every_n_batches=wrong)


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
    """After a skipped batch the averages have the same bits. Without this train step they are NaN."""
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
    assert not np.isfinite(np.concatenate(trained(keras.Model)[1])).all()


@pytest.mark.skipif(BACKEND != "jax", reason="Keras has DataParallel on JAX")
def test_eight_devices_decide_together():
    """An infinity in the batch of one device skips the step on all devices."""
    devices = keras.distribution.list_devices()
    assert len(devices) == 8
    with keras.distribution.DataParallel(devices=devices, auto_shard_dataset=False).scope():
        optimizer = LossScaleOptimizer(keras.optimizers.Adam(0.05), guard=SpikeGuard(), global_clipnorm=10.0)
        model = _model(keras.layers.Dense(8), optimizer=optimizer)
        losses = model.fit(DATA, DATA.sum(axis=1), batch_size=16, epochs=12, verbose=0).history["loss"]
        assert losses[-1] < 0.05
        assert len(model.trainable_variables[0].value.sharding.device_set) == 8
        before, steps = values_of(model.trainable_variables), int(optimizer.iterations)
        batch = DATA[:16].copy()
        batch[3] = np.inf
        model.fit(batch, np.ones(16), batch_size=16, verbose=0)
        assert_same(values_of(model.trainable_variables), before)
        assert (int(optimizer.iterations), bool(optimizer.last_step.overflowed)) == (steps, True)
