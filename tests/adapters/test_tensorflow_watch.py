"""The events that `LossScaleOptimizer` logs, eagerly and in `fit`."""

from tests.adapters.tensorflow_devices import eager, traced  # noqa: I001
import logging

import keras
import numpy as np
import pytest
import tensorflow as tf

from lossscale_core import DynamicScaling
from lossscale_tf import LossScaleLogger, LossScaleOptimizer, v1

POLICY = DynamicScaling(init_scale=2.0**10)
EACH = pytest.mark.parametrize(
    "make",
    [
        lambda: LossScaleOptimizer(keras.optimizers.SGD(0.1), POLICY),
        lambda: v1.LossScaleOptimizer(tf.compat.v1.train.GradientDescentOptimizer(0.1), POLICY),
    ],
    ids=["keras", "v1"],
)


@pytest.fixture(autouse=True)
def _log_everything(caplog):
    caplog.set_level(logging.INFO, "lossscale")


def _events(caplog):
    return [(record.event, getattr(record, "steps", None)) for record in caplog.records if record.name == "lossscale"]


def _overflow(optimizer, steps, mode=eager):
    weight = tf.Variable(1.0)

    def step():
        optimizer.minimize(lambda: weight * float("nan"), var_list=[weight])

    step = mode(step)
    for _ in range(steps):
        step()


@EACH
def test_eager_steps_are_logged(make, caplog):
    """Each verdict is logged once, at the eager step that causes it, and again in a run that is loaded."""
    _overflow(optimizer := make(), 30)
    assert _events(caplog) == [("calibrating", 1), ("stuck at min_scale", 14)]
    caplog.clear()
    optimizer.load_state_dict(optimizer.state_dict())
    _overflow(optimizer, 1)
    assert _events(caplog) == [("stuck at min_scale", 31)]


@pytest.mark.parametrize(
    ("callbacks", "events"),
    [([], [("stuck at min_scale", 40)]), ([LossScaleLogger()], [("bad_loss", None), ("stuck at min_scale", 20)])],
)
def test_fit_logs_after_each_epoch(callbacks, events, caplog):
    """Compiled steps stay on the device, so that nothing is logged before the state is read."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(LossScaleOptimizer(keras.optimizers.SGD(0.1), POLICY), "mse", jit_compile=False)
    inputs = np.full((20, 1), np.nan, np.float32)
    model.fit(inputs, inputs, batch_size=1, epochs=2, verbose=0, callbacks=callbacks)
    assert _events(caplog) == events


@EACH
@pytest.mark.parametrize("read", ["state_dict", "diagnose", "check_limits"])
def test_reading_compiled_state_logs_events(make, read, caplog):
    """A traced step logs nothing, because it does not wait for the device."""
    _overflow(optimizer := make(), 30, traced)
    assert _events(caplog) == []
    for _ in range(2):
        getattr(optimizer, read)()
    assert _events(caplog) == [("stuck at min_scale", 30)]
