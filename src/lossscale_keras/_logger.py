"""The Keras callback that logs the loss scale in `fit`."""

import math
from typing import Any

import keras

from lossscale_core.adapters import BAD_LOSS, check_setting, log_event, warn_caller
from lossscale_keras._optimizer import LossScaleOptimizer


class LossScaleLogger(keras.callbacks.Callback):
    """Put `loss_scale` and `skipped_steps` into the logs of every epoch, and of each `every_n_batches`-th batch.

    With a spike guard, the logs also contain `spikes`, the number of steps that the guard skipped. The numbers appear
    in the progress bar, `History`, `CSVLogger` and `TensorBoard`. Put this callback before these callbacks in the list.

    At the end of each epoch the callback also calls `check_limits`, which logs events and raises errors. It logs the
    first batch with a loss of NaN or infinity, because no loss scale fixes such a loss. It warns if the optimizer is
    not a `LossScaleOptimizer` of this package or of `lossscale_tf`.

    Reading the numbers synchronises with the host. `fit` synchronises at the end of each epoch anyway.

    Args:
        every_n_batches: The number of batches between two entries in the logs of batches; None for epochs only. On
            JAX each of these entries makes `fit` copy the state of the step back to the variables.

    Raises:
        PolicyError: `every_n_batches` is not a whole number from 1.
    """

    def __init__(self, every_n_batches: int | None = None) -> None:
        super().__init__()
        self.every_n_batches = check_setting("every_n_batches", every_n_batches)
        self._has_bad_loss = False

    def on_train_begin(self, logs: Any = None) -> None:
        """Warn if the optimizer is not a `LossScaleOptimizer`."""
        if not isinstance(self.model.optimizer, LossScaleOptimizer):
            name = type(self.model.optimizer).__name__
            warn_caller(
                f"LossScaleLogger logs nothing: the optimizer is {name}; compile with the LossScaleOptimizer of "
                "lossscale_keras or lossscale_tf"
            )

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Add the numbers to the logs of every n-th batch, and log the first bad loss."""
        loss, optimizer = (logs or {}).get("loss"), self.model.optimizer
        is_bad = isinstance(loss, float) and not math.isfinite(loss)  # a `train_step` may return a loss of another type
        if is_bad and not self._has_bad_loss and isinstance(optimizer, LossScaleOptimizer):
            self._has_bad_loss = True
            log_event("bad_loss", f"lossscale, batch {batch}: {BAD_LOSS}")
        if self.every_n_batches is not None and (batch + 1) % self.every_n_batches == 0:
            if hasattr(self.model, "jax_state_sync"):  # during an epoch on JAX the variables have no values
                self.model.jax_state_sync()
            self._add(logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Add the numbers to the logs of this epoch, and call `check_limits`."""
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
