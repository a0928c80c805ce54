"""The scale of the last loss, by which its gradients are divided unless the caller names another loss.

A step is divided by what holds when it runs. So the scale of the last loss and its stage are stored where the step
runs: on TensorFlow in two variables of each replica, which eager code and graphs set and read in the order of their
calls; on the other backends in two attributes. Nothing is stored while JAX or torch.compile traces.

A loop that forgets a call forgets it at its first step. So a missing call is one that was never made.
"""

from typing import Any, NamedTuple

from lossscale_keras._backend import BACKEND, returns_gradients, xp
from lossscale_keras._stored import Stored

if BACKEND == "tensorflow":
    from lossscale_keras.tensorflow import StoredNumber
else:

    class StoredNumber:  # type: ignore[no-redef]
        """A number in an attribute."""

        def __init__(self, name: str, start: float) -> None:
            self._number: Any = None

        def set(self, number: Any) -> None:
            """Set the number."""
            self._number = number

        def get(self) -> Any:
            """Return the number, or None before it was set."""
            return self._number


NO_LOSS, KERAS_DIVIDES, CALLER_DIVIDES, UNSCALED = 0.0, 1.0, 2.0, 3.0
"""The stages of the last loss: none was scaled; `apply` divides its gradients; the caller unscales them; they are
unscaled."""


class ScaledLoss(NamedTuple):
    """The mark of a scaled loss, in its attribute `_loss_scaling`, and part of the marks of its gradients."""

    owner: "Losses"
    loss_scale: Any
    change: Any
    """The change of the stage by this loss."""
    before: Any = None
    """The stage and the change before it, if its gradients were computed and unscaled at once."""


class Losses:
    """The last loss of one optimizer, and the calls that were ever made."""

    def __init__(self, state: Stored, start: float) -> None:
        self._state = state
        """The state with the present scale, which is that of gradients if no loss was scaled."""
        self._last, self._stage = StoredNumber("last_loss_scale", start), StoredNumber("last_loss_stage", NO_LOSS)
        self._returns_gradients = False
        """Whether a trace that stores nothing has scaled a loss, and may have returned its gradients."""
        self.is_scaled = self.is_unscaled = self.is_read = self.has_warned = False
        self._is_read_since_loss = self._is_by_keras = False
        self._change: Any = None
        """The last change of the stage, in the order of the calls."""

    def scale(self, loss_scale: Any, by_keras: bool) -> ScaledLoss | None:
        """Record that a loss is multiplied by `loss_scale`, and return the mark of the loss; None while JAX traces.

        `scale_loss` scales it as Keras does, for `apply`, or `get_scaled_loss` for a caller who unscales the gradients.
        """
        self.is_scaled, self._is_read_since_loss, self._is_by_keras = True, False, by_keras
        self.is_unscaled |= by_keras
        if returns_gradients(loss_scale):
            self._returns_gradients = True
            return None
        self._last.set(loss_scale)
        self._stage.set(KERAS_DIVIDES if by_keras else CALLER_DIVIDES)
        self._change = object()
        return ScaledLoss(self, loss_scale, self._change)

    def variables(self) -> dict[str, Any]:
        """Return the variables of TensorFlow by their names."""
        return {"last_loss_scale": self._last.variable, "last_loss_stage": self._stage.variable}

    def apply_traced(self) -> None:
        """Record that the trace of JAX that scaled a loss applies its gradients itself."""
        self._returns_gradients = False

    def read_scale(self) -> None:
        """Record that the caller reads `loss_scale`, perhaps to divide gradients by it."""
        self.is_read = self._is_read_since_loss = True

    def may_be_divided(self, takes_scaled: bool) -> bool:
        """Return whether the caller has read the scale since the loss was scaled, and `apply` divides, too."""
        return self._is_read_since_loss and (takes_scaled or self._is_by_keras)

    def mark_of(self, loss: Any) -> ScaledLoss | None:
        """Return the mark of a loss that this optimizer has scaled; None for anything else."""
        mark = getattr(loss, "_loss_scaling", None)
        return mark if isinstance(mark, ScaledLoss) and mark.owner is self else None

    def unscale(self, loss: ScaledLoss | None = None) -> ScaledLoss:
        """Record that gradients of a loss are unscaled, and return its mark; the last loss unless it is named."""
        self.is_unscaled, self._is_read_since_loss = True, False
        if loss is None or loss.change is self._change:  # else a later loss has its own stage
            self._stage.set(UNSCALED)
            self._change = object()
        return loss or ScaledLoss(self, self.last(), None)

    def compute(self, loss_scale: Any) -> ScaledLoss:
        """Record that gradients are computed and unscaled at once, and return the mark of their loss."""
        before = self._stage.get(), self._change
        self.is_scaled = self.is_unscaled = True
        self._stage.set(UNSCALED)
        self._change = object()
        return ScaledLoss(self, loss_scale, self._change, before)

    def forget(self, loss: ScaledLoss) -> None:
        """Return to the stage before a loss whose gradients were computed, now that they are applied as they are."""
        if loss.before is not None and loss.change is self._change:
            stage, self._change = loss.before
            self._stage.set(NO_LOSS if stage is None else stage)

    def last(self) -> Any:
        """Return the scale of the last loss; the present one before the first, and for gradients of such traces."""
        last = None if self._returns_gradients else self._last.get()
        return self.present() if last is None else last

    def present(self) -> Any:
        """Return the present scale, as a value of the graph being built."""
        return self._state.read(1).loss_scale

    def divisor(self, takes_scaled: bool) -> Any:
        """Return what gradients of TensorFlow are divided by when they are applied; None for 1, if that is known.

        A caller that takes scaled gradients takes all that are not unscaled; any other, those of Keras's losses alone.
        """
        stage = self._stage.get()
        if stage is None:
            return self.last() if takes_scaled else None
        is_divided = xp.not_equal(stage, UNSCALED) if takes_scaled else xp.equal(stage, KERAS_DIVIDES)
        if xp.executing_eagerly():
            return self.last() if bool(is_divided) else None
        return xp.where(is_divided, self.last(), 1.0)
