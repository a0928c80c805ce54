"""What `LossScaleOptimizer` logs by itself, eagerly and in `fit`, and what it does at the floor."""

import logging

import keras
import numpy as np
import pytest
import tensorflow as tf

from lossscale_core import DynamicScaling
from lossscale_core.errors import PolicyError, ScaleFloorError
from lossscale_tf import LossScaleLogger, LossScaleOptimizer, v1

NAN = float("nan")


@pytest.fixture(autouse=True)
def _log_everything(caplog):
    caplog.set_level(logging.INFO, "lossscale")


def _events(caplog):
    return [(record.event, record.steps) for record in caplog.records if record.name == "lossscale"]


def _keras(**settings):
    return LossScaleOptimizer(keras.optimizers.SGD(0.1), DynamicScaling(init_scale=2.0**10), **settings)


def _v1(**settings):
    return v1.LossScaleOptimizer(
        tf.compat.v1.train.GradientDescentOptimizer(0.1), DynamicScaling(init_scale=2.0**10), **settings
    )


EACH = pytest.mark.parametrize("make", [_keras, _v1], ids=["keras", "v1"])


def _run(optimizer, losses, weight=None):
    """Take an eager step with each of these factors of the loss."""
    weight = tf.Variable(1.0) if weight is None else weight
    for factor in losses:
        optimizer.minimize(lambda factor=factor: weight * factor, var_list=[weight])
    return optimizer


@EACH
def test_eager_steps_are_logged(make, caplog):
    """They read the state anyway: the floor at the step that reaches it, and once."""
    _run(make(), [NAN] * 30)
    assert _events(caplog) == [("floor", 10)]
    assert "look at the loss and the inputs first" in caplog.text


def test_a_healthy_run_says_that_it_is_calibrated(caplog):
    """One line, of the level INFO."""
    _run(_keras(), [NAN] * 3 + [1.0] * 10)
    assert _events(caplog) == [("calibrated", 4)]


@EACH
def test_raise_stops_at_the_floor(make):
    """The step that overflows there raises, once the state is set; a run that continues does so exactly."""
    weight = tf.Variable(1.0)
    optimizer = _run(make(on_floor="raise"), [1.0] + [NAN] * 9, weight)
    for steps in (11, 12):
        with pytest.raises(ScaleFloorError, match=r"^loss_scale=1 has reached min_scale=1, .* on_floor='warn'\.$"):
            _run(optimizer, [NAN], weight)
        assert optimizer.state_dict()["steps"] == steps
    _run(optimizer, [1.0], weight)
    optimizer.check_overflow_streak()
    with pytest.raises(PolicyError, match="on_floor='stop' must be"):
        make(on_floor="stop")


def _fit(optimizer, callbacks, epochs=2):
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(optimizer, "mse", jit_compile=False)
    inputs = np.full((20, 1), np.nan, np.float32)
    model.fit(inputs, inputs, batch_size=1, epochs=epochs, verbose=0, callbacks=callbacks)


def test_fit_is_logged_at_its_end_and_with_the_logger_at_that_of_an_epoch(caplog):
    """Compiled steps stay on their device, so that nothing is said before the state is read."""
    _fit(_keras(), [])
    assert _events(caplog) == [("floor", 40)]
    _fit(_keras(), [LossScaleLogger()])
    assert _events(caplog)[1:] == [("floor", 20)]
    with pytest.raises(ScaleFloorError):
        _fit(_keras(on_floor="raise"), [LossScaleLogger()])
    _fit(_keras(on_floor="ignore"), [LossScaleLogger()])
    assert len(_events(caplog)) == 2


@pytest.mark.parametrize("read", ["metrics", "state_dict", "diagnose", "check_overflow_streak"])
def test_what_reads_the_state_of_compiled_steps_logs(read, caplog):
    """On a CPU `metrics` does, too, since the host reads its own memory there."""
    optimizer, weight = _keras(), tf.Variable(1.0)

    @tf.function
    def train():
        optimizer.minimize(lambda: weight * NAN, var_list=[weight])

    for _ in range(30):
        train()
    assert _events(caplog) == []
    for _ in range(2):
        getattr(optimizer, read)()
    assert _events(caplog) == [("floor", 30)]


def test_a_config_keeps_on_floor():
    """It is left out of the config if it was not set, so that older releases read it."""
    assert "on_floor" not in _keras().get_config()
    config = _keras(on_floor="raise").get_config()
    assert LossScaleOptimizer.from_config(config).get_config()["on_floor"] == "raise"
