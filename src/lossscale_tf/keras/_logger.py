"""The Keras callback that logs the loss scale in `fit`."""

from typing import Any

import keras

from lossscale_tf._warning import warn_caller
from lossscale_tf.keras._optimizer import LossScaleOptimizer


class LossScaleLogger(keras.callbacks.Callback):
    """Put `loss_scale` and `skipped_steps` into the logs of every epoch, and of each `every_n_batches`-th batch.

    With a spike guard, the logs also contain `spikes`, the number of steps that the guard has refused.

    The numbers appear in the progress bar, `History`, `CSVLogger` and `TensorBoard`; put this callback before them in
    the list of callbacks. Reading the numbers synchronises with the host, which `fit` does at the end of an epoch
    anyway; batches cost nothing unless `every_n_batches` is set. When the numbers are read, an `OverflowStreakError` is
    raised if the policy's `max_overflow_streak` is reached. A warning is issued if the optimizer is not a
    `LossScaleOptimizer`, since it has no numbers to log.
    """

    def __init__(self, every_n_batches: int | None = None) -> None:
        super().__init__()
        if every_n_batches is not None and every_n_batches < 1:
            raise ValueError(f"every_n_batches={every_n_batches!r} must be at least 1; leave it out for epochs only")
        self.every_n_batches = every_n_batches

    def on_train_begin(self, logs: Any = None) -> None:
        """Warn of an optimizer that scales no loss."""
        if not isinstance(self.model.optimizer, LossScaleOptimizer):
            name = type(self.model.optimizer).__name__
            warn_caller(
                f"LossScaleLogger logs nothing: {name} scales no loss; compile with LossScaleOptimizer({name}(...))"
            )

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Add to the logs of this batch, if it is one of the chosen."""
        if self.every_n_batches is not None and (batch + 1) % self.every_n_batches == 0:
            self._add(logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Add to the logs of this epoch."""
        self._add(logs)
        if isinstance(self.model.optimizer, LossScaleOptimizer):
            self.model.optimizer.check_overflow_streak()

    def _add(self, logs: Any) -> None:
        optimizer = self.model.optimizer
        if logs is not None and isinstance(optimizer, LossScaleOptimizer):
            state = optimizer.scale_state
            logs["loss_scale"] = float(state.loss_scale)
            logs["skipped_steps"] = int(state.skipped_steps)
            if optimizer.guard_state is not None:
                logs["spikes"] = int(optimizer.guard_state.spikes)
