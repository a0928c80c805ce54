"""`LossScaleLogger`: where its numbers land, and what it costs."""

import collections
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

from lossscale_core import DynamicScaling
from lossscale_tf import LossScaleLogger, LossScaleOptimizer

POLICY = DynamicScaling(init_scale=2.0**10, growth_interval=3)
ROWS = 4


def _model():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(LossScaleOptimizer(keras.optimizers.SGD(0.0), POLICY), loss="mse", jit_compile=False)
    return model


def _fit(model, callbacks, batches=4, epochs=2, verbose=0):
    inputs = np.ones((batches * ROWS, 3), np.float32)
    inputs[-1, 0] = np.inf  # in the last batch of each epoch
    options = {"batch_size": ROWS, "epochs": epochs, "verbose": verbose, "shuffle": False}
    return model.fit(inputs, np.ones((batches * ROWS, 1)), callbacks=callbacks, **options).history


@pytest.mark.filterwarnings("ignore:__array__ implementation")  # TensorBoard's own, to NumPy
def test_where_the_numbers_appear(tmp_path, capsys):
    """Once an epoch: in the history, a line of the CSV file, a curve of TensorBoard, and on the progress bar."""
    others = keras.callbacks.CSVLogger(tmp_path / "log.csv"), keras.callbacks.TensorBoard(tmp_path, write_graph=False)
    history = _fit(_model(), [LossScaleLogger(), *others], verbose=2)
    assert history["loss_scale"] == [2.0**10, 2.0**10]  # grown after three steps, halved by the fourth
    assert history["skipped_steps"] == [1, 2]
    header, *lines = (tmp_path / "log.csv").read_text().split()
    assert header.startswith("epoch,loss,loss_scale,skipped_steps")
    assert [line.split(",")[2:4] for line in lines] == [["1024.0", "1"], ["1024.0", "2"]]
    (events,) = (tmp_path / "train").glob("events*")
    curves = collections.defaultdict(list)
    for event in tf.compat.v1.train.summary_iterator(str(events)):
        for value in event.summary.value:
            curves[value.tag].append(float(tf.make_ndarray(value.tensor)))
    assert curves["epoch_loss_scale"] == [2.0**10, 2.0**10]
    assert curves["epoch_skipped_steps"] == [1.0, 2.0]
    assert "loss_scale: 1024.0000 - skipped_steps: 2.0000" in capsys.readouterr().out


def test_no_read_per_step():
    """It adds eight reads an epoch, however many steps that has; asked for batches, it adds two for each."""
    model, epochs = _model(), 3
    _fit(model, [])  # trace first

    def reads(callbacks, batches):
        """Count how often the thread that trains turns a tensor into numbers of the host: TensorFlow's way, Keras's."""
        count = 0

        def profile(frame, event, _):
            nonlocal count
            count += event == "call" and frame.f_code.co_name in {"_numpy", "convert_to_numpy"}

        sys.setprofile(profile)
        try:
            _fit(model, callbacks, batches, epochs)
        finally:
            sys.setprofile(None)
        return count

    for batches in (5, 40):
        plain = reads([], batches)  # `fit` itself reads whether there was another batch
        assert reads([LossScaleLogger()], batches) == plain + 8 * epochs
        assert reads([LossScaleLogger(every_n_batches=5)], batches) == plain + epochs * (8 + 2 * (batches // 5))
