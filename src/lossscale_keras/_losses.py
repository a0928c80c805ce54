"""The loss scale of the last loss. A step divides its gradients by this scale, unless the caller names another loss.

The scale belongs to the moment at which a step runs, not to the moment at which a graph is traced. It is therefore
stored where the step runs, together with the stage of the last loss. On TensorFlow these are two variables of each
replica, which eager code and graphs set and read in the order of their calls. On the other backends they are two
attributes. While JAX or torch.compile traces, nothing is stored.

A loop that lacks a call lacks it at its first step. A call counts as missing only if it was never made.
"""

from typing import Any, NamedTuple

from lossscale_keras._backend import BACKEND, returns_gradients, xp
from lossscale_keras._stored import StateVariables

if BACKEND == "tensorflow":
    from lossscale_keras.tensorflow import StoredNumber
else:

    class StoredNumber:  # type: ignore[no-redef]
        """A number in an attribute of this object."""

        def __init__(self, name: str, start: float) -> None:
            self._number: Any = None

        def set(self, number: Any) -> None:
            """Set the number."""
            self._number = number

        def get(self) -> Any:
            """Return the number, or None before it was set."""
            return self._number


NO_LOSS, KERAS_DIVIDES, CALLER_DIVIDES, UNSCALED = 0.0, 1.0, 2.0, 3.0
"""The stages of the last loss: no loss was scaled yet; `apply` divides the gradients; the caller unscales
them; they are unscaled."""


class ScaledLoss(NamedTuple):
    """The mark of a scaled loss: its attribute `_loss_scaling`. The marks of its gradients refer to it."""

    owner: "Losses"
    loss_scale: Any
    change: Any
    """An object that identifies the change of the stage by this loss."""
    before: Any = None
    """The stage and the change before this loss, if one call computed and unscaled its gradients."""


class Losses:
    """The last loss of one optimizer, and a flag for each call that the loop has ever made."""

    def __init__(self, state: StateVariables, start: float) -> None:
        self._state = state
        """The state of the policy. Its scale divides the gradients if no loss was scaled."""
        self._last, self._stage = StoredNumber("last_loss_scale", start), StoredNumber("last_loss_stage", NO_LOSS)
        self._returns_gradients = False
        """Whether a trace of JAX or torch.compile has scaled a loss, and may have returned its gradients."""
        self.is_scaled = self.is_unscaled = self.is_read = self.has_warned = False
        self._is_read_since_loss = self._is_by_keras = False
        self._change: Any = None
        """The last change of the stage, in the order of the calls."""

    def scale(self, loss_scale: Any, by_keras: bool) -> ScaledLoss | None:
        """Record that a loss is multiplied by `loss_scale`, and return the mark of the loss.

        With `by_keras`, `scale_loss` scaled the loss, so that `apply` divides the gradients. Otherwise
        `get_scaled_loss` scaled the loss, so that the caller unscales the gradients. In a trace of JAX or
        torch.compile, the loss has no mark, and the result is None.
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
        """Return the two variables by their names. Only TensorFlow has them."""
        return {"last_loss_scale": self._last.variable, "last_loss_stage": self._stage.variable}

    def apply_traced(self) -> None:
        """Record that the same trace of JAX scaled a loss and applies its gradients."""
        self._returns_gradients = False

    def read_scale(self) -> None:
        """Record that the caller reads `loss_scale`, perhaps to divide gradients by it."""
        self.is_read = self._is_read_since_loss = True

    def may_be_divided(self, takes_scaled: bool) -> bool:
        """Return whether the caller has read the scale after a loss was scaled, although `apply` divides by it."""
        return self._is_read_since_loss and (takes_scaled or self._is_by_keras)

    def mark_of(self, loss: Any) -> ScaledLoss | None:
        """Return the mark of a loss that this optimizer scaled; None for any other value."""
        mark = getattr(loss, "_loss_scaling", None)
        return mark if isinstance(mark, ScaledLoss) and mark.owner is self else None

    def unscale(self, loss: ScaledLoss | None = None) -> ScaledLoss:
        """Record that gradients of a loss are unscaled, and return its mark. Without `loss`, it is the last loss."""
        self.is_unscaled, self._is_read_since_loss = True, False
        if loss is None or loss.change is self._change:  # otherwise the stage belongs to a later loss
            self._stage.set(UNSCALED)
            self._change = object()
        return loss or ScaledLoss(self, self.last(), None)

    def compute(self, loss_scale: Any) -> ScaledLoss:
        """Record that one call computes and unscales gradients, and return the mark of their loss."""
        before = self._stage.get(), self._change
        self.is_scaled = self.is_unscaled = True
        self._stage.set(UNSCALED)
        self._change = object()
        return ScaledLoss(self, loss_scale, self._change, before)

    def forget(self, loss: ScaledLoss) -> None:
        """Go back to the stage before a loss of `compute`, because its gradients are applied."""
        if loss.before is not None and loss.change is self._change:
            stage, self._change = loss.before
            self._stage.set(NO_LOSS if stage is None else stage)

    def last(self) -> Any:
        """Return the scale of the last loss; before the first loss or after a scaling trace, the current scale."""
        last = None if self._returns_gradients else self._last.get()
        return self.current() if last is None else last

    def current(self) -> Any:
        """Return the current scale: an array of shape `()`, or in a graph a tensor of this graph."""
        return self._state.read(1).loss_scale

    def divisor(self, takes_scaled: bool) -> Any:
        """Return the divisor of gradients in a step on TensorFlow, or None if the host knows that it is 1.

        With `takes_scaled`, as in `apply`, gradients are divided unless they are unscaled already. Without it, as in
        `apply_gradients`, they are divided only if `scale_loss` scaled the last loss.
        """
        stage = self._stage.get()
        if stage is None:
            return self.last() if takes_scaled else None
        is_divided = xp.not_equal(stage, UNSCALED) if takes_scaled else xp.equal(stage, KERAS_DIVIDES)
        if xp.executing_eagerly():
            return self.last() if bool(is_divided) else None
        return xp.where(is_divided, self.last(), 1.0)
