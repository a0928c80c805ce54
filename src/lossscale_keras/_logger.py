"""The Keras callback that logs the loss scale in `fit`."""

import math
from typing import Any

import keras

from lossscale_core.adapters import BAD_LOSS, check_setting, log_event, warn_caller
from lossscale_keras._optimizer import LossScaleOptimizer


class LossScaleLogger(keras.callbacks.Callback):
    """Put `loss_scale` and `skipped_steps` into the logs of every epoch, and of each `every_n_batches`-th batch.

    With a spike guard, the logs also contain `spikes`, the number of steps that the guard has refused. The numbers
    appear in the progress bar, `History`, `CSVLogger` and `TensorBoard`; put this callback before them in the list of
    callbacks. Reading the numbers synchronises with the host, which `fit` does at the end of an epoch anyway. At the
    end of an epoch the callback also calls `check_limits`, which logs events and raises errors. At the first
    batch with a loss that is NaN or infinite it logs this, since no loss scale fixes it. A warning is issued if the
    optimizer is not a `LossScaleOptimizer` of this package.

    Args:
        every_n_batches: The number of batches between two entries in the logs of batches; None for epochs only. On
            JAX such an entry makes `fit` copy the state of the step back to the variables.

    Raises:
        PolicyError: `every_n_batches` is not a whole number from 1.
    """

    def __init__(self, every_n_batches: int | None = None) -> None:
        super().__init__()
        self.every_n_batches = check_setting("every_n_batches", every_n_batches)
        self._has_bad_loss = False

    def on_train_begin(self, logs: Any = None) -> None:
        """Warn of an optimizer that is not this package's."""
        if not isinstance(self.model.optimizer, LossScaleOptimizer):
            name = type(self.model.optimizer).__name__
            warn_caller(
                f"LossScaleLogger logs nothing: the optimizer is {name}; compile with the LossScaleOptimizer of "
                "lossscale_keras or lossscale_tf"
            )

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Add to the logs of this batch, if it is one of the chosen, and tell of the first bad loss."""
        loss, optimizer = (logs or {}).get("loss"), self.model.optimizer
        is_bad = isinstance(loss, float) and not math.isfinite(loss)  # a `train_step` may return another loss
        if is_bad and not self._has_bad_loss and isinstance(optimizer, LossScaleOptimizer):
            self._has_bad_loss = True
            log_event("bad_loss", f"lossscale, batch {batch}: {BAD_LOSS}")
        if self.every_n_batches is not None and (batch + 1) % self.every_n_batches == 0:
            if hasattr(self.model, "jax_state_sync"):  # during an epoch JAX has the values, and the variables have none
                self.model.jax_state_sync()
            self._add(logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Add to the logs of this epoch, and check the streaks."""
        self._add(logs)
        if isinstance(self.model.optimizer, LossScaleOptimizer):
            self.model.optimizer.check_limits()

    def _add(self, logs: Any) -> None:
        if logs is not None and isinstance(self.model.optimizer, LossScaleOptimizer):
            numbers = self.model.optimizer.metrics()
            logs["loss_scale"] = float(numbers["loss_scale"])
            logs["skipped_steps"] = int(numbers["skipped_steps"])
            if "spikes" in numbers:
                logs["spikes"] = int(numbers["spikes"])
