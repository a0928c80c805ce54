"""The events that `LossScaleOptimizer` logs, eagerly and in `fit`, and the cost of `LossScaleLogger`."""

import logging
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

from lossscale_core import DynamicScaling
from lossscale_tf import LossScaleLogger, LossScaleOptimizer, v1

NAN = float("nan")


@pytest.fixture(autouse=True)
def _log_everything(caplog):
    caplog.set_level(logging.INFO, "lossscale")


def _events(caplog):
    return [(record.event, getattr(record, "steps", None)) for record in caplog.records if record.name == "lossscale"]


def _keras():
    return LossScaleOptimizer(keras.optimizers.SGD(0.1), DynamicScaling(init_scale=2.0**10))


def _v1():
    return v1.LossScaleOptimizer(tf.compat.v1.train.GradientDescentOptimizer(0.1), DynamicScaling(init_scale=2.0**10))


def _run(optimizer, losses):
    """Take an eager step with each factor of the loss."""
    weight = tf.Variable(1.0)
    for factor in losses:
        optimizer.minimize(lambda factor=factor: weight * factor, var_list=[weight])


@pytest.mark.parametrize("make", [_keras, _v1])
def test_eager_steps_are_logged(make, caplog):
    """Eager steps read the state anyway. Each verdict is logged once, at the step that causes it."""
    _run(make(), [NAN] * 30)
    assert _events(caplog) == [("calibrating", 1), ("stuck at min_scale", 14)]
    assert "NaN or infinity in the inputs, the forward pass and the loss" in caplog.text


@pytest.mark.parametrize("make", [_keras, _v1])
def test_a_loaded_state_is_another_run(make, caplog):
    """Events that the optimizer logged before do not hide events of the loaded run."""
    optimizer, other = make(), make()
    _run(other, [NAN] * 31)
    _run(optimizer, [NAN] * 30)
    caplog.clear()
    optimizer.load_state_dict(other.state_dict())
    _run(optimizer, [NAN])
    assert _events(caplog) == [("stuck at min_scale", 32)]


@pytest.mark.parametrize(
    ("callbacks", "events"),
    [((), [("stuck at min_scale", 40)]), ((LossScaleLogger,), [("bad_loss", None), ("stuck at min_scale", 20)])],
)
def test_fit_logs_after_each_epoch(callbacks, events, caplog):
    """Compiled steps stay on the device, so that nothing is logged before the state is read."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(_keras(), "mse", jit_compile=False)
    inputs = np.full((20, 1), np.nan, np.float32)
    model.fit(inputs, inputs, batch_size=1, epochs=2, verbose=0, callbacks=[callback() for callback in callbacks])
    assert _events(caplog) == events


@pytest.mark.parametrize("make", [_keras, _v1])
@pytest.mark.parametrize("read", ["state_dict", "diagnose", "check_limits"])
def test_reading_compiled_state_logs_events(make, read, caplog):
    """`metrics` logs nothing, because it does not wait for the device."""
    optimizer, weight = make(), tf.Variable(1.0)

    @tf.function
    def train():
        optimizer.minimize(lambda: weight * NAN, var_list=[weight])

    for _ in range(30):
        train()
    assert _events(caplog) == []
    for _ in range(2):
        getattr(optimizer, read)()
    assert _events(caplog) == [("stuck at min_scale", 30)]


def test_the_logger_reads_nothing_per_step():
    """It adds eight reads per epoch, for any number of steps. With `every_n_batches` it adds two reads per entry."""
    model, epochs = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)]), 3
    model.compile(_keras(), "mse", jit_compile=False)
    fit = lambda callbacks, rows: model.fit(  # noqa: E731
        np.ones((rows, 3)), np.ones(rows), batch_size=1, epochs=epochs, verbose=0, callbacks=callbacks
    )
    fit([], 4)  # trace first

    def reads(callbacks, batches):
        """Count how often the training thread converts a tensor to host numbers, in TensorFlow and in Keras."""
        count = 0

        def profile(frame, event, _):
            nonlocal count
            count += event == "call" and frame.f_code.co_name in {"_numpy", "convert_to_numpy"}

        sys.setprofile(profile)
        try:
            fit(callbacks, batches)
        finally:
            sys.setprofile(None)
        return count

    for batches in (5, 40):
        plain = reads([], batches)  # `fit` itself reads whether there was another batch
        assert reads([LossScaleLogger()], batches) == plain + 8 * epochs
        assert reads([LossScaleLogger(every_n_batches=5)], batches) == plain + epochs * (8 + 2 * (batches // 5))
