"""What a scaler says of its run: a log, warnings about steps that lose something, and the error of a streak."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from lossscale_core import BaseScaling, ScaleWatch
from lossscale_core.adapters import BAD_LOSS, check_overflow_streak, log_event, shown_number, warn_caller
from lossscale_core.errors import CheckpointWarning
from lossscale_torch._gradients import params_of
from lossscale_torch._step_info import StepInfo
from lossscale_torch.hooks import Hook

_EVERY = 32  # checking the state on the host takes about as long as its update
_MANY = 20
_NO_GRADIENTS = (
    f"{_MANY} updates in a row found no gradient in any optimizer: parameters are frozen or unused, the loss was "
    "detached, or an optimizer holds other parameters than the model"
)


class Watch(Hook):
    """Logs the events of a run, and raises the error of a streak of overflows, where the host knows the state."""

    def __init__(self) -> None:
        self._watch = ScaleWatch()
        self._is_new = True
        self._left = _EVERY
        self.without_gradients = 0
        """The updates in a row for which no optimizer had a gradient."""
        self.has_bad_loss = self._has_logged_loss = False
        """Whether the loss of the last step was NaN or infinite, and the host knows it."""
        self.retries = 0
        """The tries of `attempts` that ended in an applied step; the state counts them as skipped steps."""
        self.tries: Any = None
        """The loop over `attempts`, which sees the outcome of each try, and lets this watch see that of the loop."""

    def before_step(self, scaler: Any, optimizer: Any, record: dict[str, Any]) -> None:
        """Warn if the first step of a new scaler is not the first of its optimizer."""
        if not self._is_new:
            return
        self._is_new = False
        scales = BaseScaling.of(scaler.policy).scales_losses  # otherwise nothing is lost
        if scales and record["found_inf_per_device"] and _has_stepped(optimizer):
            warn_caller(
                f"the optimizer has taken steps before, but its scaler starts over with a loss scale of "
                f"{shown_number(scaler._init_scale)}; make one scaler for all steps, before the loop, and to continue "
                "from a checkpoint save scaler.state_dict() in it and pass it to scaler.load_state_dict()",
                CheckpointWarning,
            )

    def after_update(self, scaler: Any, info: StepInfo) -> None:
        """Look at the outcome of a step. Waits for the device after an overflow, to read the losses."""
        if self.tries is not None:
            self.tries.note(info)
        else:
            self.look(scaler, info, info.overflowed is True and not scaler._are_losses_finite())

    def look(self, scaler: Any, info: StepInfo, has_bad_loss: bool) -> None:
        """Check the state on the host at each update if there is a limit, else at each 32nd."""
        self.has_bad_loss = has_bad_loss
        if has_bad_loss and not self._has_logged_loss:
            self._has_logged_loss = True
            state: Any = scaler._state
            where = f", step {state.steps}" if hasattr(state, "steps") else ""  # one on a device would wait
            log_event("bad_loss", f"lossscale{where}: {BAD_LOSS}")
        has_stepped = not info.had_gradients and any(each is not False for each in (info.by_optimizer or {}).values())
        self.without_gradients = self.without_gradients + 1 if has_stepped else 0
        if self.without_gradients == _MANY:
            log_event("no_gradients", _NO_GRADIENTS)
        if has_stepped and scaler._losses:
            _warn_of_gradient_hooks(scaler._per_optimizer_states.values())
        limit = BaseScaling.of(scaler.policy).max_overflow_streak
        self._left -= 1
        if (self._left > 0 and limit is None) or isinstance(info.applied, Tensor):
            return
        state = scaler._state_on_host()
        if limit is not None:
            check_overflow_streak(scaler.policy, state)
        if self._left <= 0:
            self._left = _EVERY
            self.log(scaler.policy, state)

    def log(self, policy: Any, state: Any) -> Any:
        """Log the events of a state on the host that counts the tries of a step as one, and return this state."""
        if self.retries:
            steps, skipped = (type(n)(max(n - self.retries, 0)) for n in (state.steps, state.skipped_steps))
            state = state._replace(steps=steps, skipped_steps=skipped)
        self._watch.log(policy, state)
        return state

    def state_dict(self) -> dict[str, Any]:
        """Return the number of tries that the state counts and this watch does not, if there are any."""
        return {"retries": self.retries} if self.retries else {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Leave out the tries of the saved run, which this scaler continues."""
        self._is_new = False
        retries = state_dict.get("retries")
        self.retries = retries if type(retries) is int and retries > 0 else 0

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "tries": None}  # a copy of the scaler is in no loop


def _warn_of_gradient_hooks(records: Iterable[Any]) -> None:
    """Warn of optimizers that step in the backward pass, as those of sd-scripts, OneTrainer and torch itself."""
    params = [param for each in records if "optimizer" in each for param in params_of(each["optimizer"])]
    names = "_post_accumulate_grad_hooks", "_in_backward_optimizers"
    if any(getattr(param, name, None) for param in params for name in names):
        warn_caller(
            "the loss was scaled and step() found no gradients, but parameters have gradient hooks: an optimizer that "
            "steps in such a hook applies scaled gradients; let scaler.step() step it, or make the scaler with "
            "enabled=False"
        )


def _has_stepped(optimizer: Any) -> bool:
    """Return whether an optimizer's state shows a step; do not wait for a count on a device.

    Optimizers of torch keep a count "step" for each parameter, SGD and Muon only a momentum from the first step on.
    """
    state = getattr(optimizer, "state", None)
    states = state.values() if isinstance(state, Mapping) else ()
    return any(_is_positive(each.get("step", 1)) for each in states if isinstance(each, Mapping) and each)


def _is_positive(count: Any) -> bool:
    if isinstance(count, Tensor):
        return not count.is_cpu or bool((count > 0).any())
    return isinstance(count, int | float) and count > 0
