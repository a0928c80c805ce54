"""The Keras examples learn in float16, and steps that overflow change nothing."""

from tests.adapters.tensorflow_devices import STRATEGY  # noqa: F401, I001  # the devices of all tests, before any is used
import runpy
from pathlib import Path

import keras
import numpy as np
import pytest

EXAMPLES = {path.stem: path for path in (Path(__file__).parents[2] / "examples").glob("keras_*.py")}


@pytest.fixture(autouse=True)
def dtype_policy():
    """Restore Keras's dtype policy, which the examples set."""
    yield
    keras.config.set_dtype_policy("float32")


def _main(name):
    return runpy.run_path(str(EXAMPLES[name]))["main"]


def _assert_healthy(accuracy, optimizer):
    assert accuracy > 0.9
    assert 0 < int(optimizer.metrics()["skipped_steps"]) < 20


def _numbers(variables):
    return [np.asarray(variable).tobytes() for variable in variables]


def test_fit_learns_and_logs_the_scale():
    """The history contains the loss scale and the skipped steps of each epoch."""
    accuracy, model, history = _main("keras_fit")(5)
    _assert_healthy(accuracy, model.optimizer)
    assert len(history["loss_scale"]) == 5
    assert history["skipped_steps"][-1] == int(model.optimizer.metrics()["skipped_steps"])


def test_a_custom_loop_learns_and_resumes(tmp_path):
    """A run that is stopped and started again ends with the same bits as a run without a stop."""
    assert EXAMPLES.keys() == {"keras_fit", "keras_custom_loop"}
    main = _main("keras_custom_loop")
    accuracy, training = main(60, folder=tmp_path / "whole")
    _assert_healthy(accuracy, training.optimizer)
    main(20, folder=tmp_path / "halves")
    _, resumed = main(60, folder=tmp_path / "halves")
    ours, theirs = ([*run.optimizer.variables, *run.average] for run in (training, resumed))
    assert _numbers(ours) == _numbers(theirs)


def test_an_overflow_changes_nothing_in_fit():
    """After a first batch that overflows, the weights and BatchNorm's averages are unchanged."""
    main = _main("keras_fit")
    (_, before, _), (_, after, _) = main(0, 1), main(1, 1)
    assert int(after.optimizer.metrics()["skipped_steps"]) == 1
    assert _numbers(before.weights) == _numbers(after.weights)
