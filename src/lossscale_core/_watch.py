"""The log of a run: each change of its verdict, through Python's `logging`."""

import math
from typing import Any

from lossscale_core._base import BaseScaling
from lossscale_core._config import PolicyLike, as_policy
from lossscale_core._diagnosis import describe_spikes, find_verdict, numbers_of
from lossscale_core._guard import GuardState
from lossscale_core._reports import BAD_LOSS
from lossscale_core._state import ScaleState

_WINDOW = 64
"""The smallest number of steps over which a watch counts skipped steps."""
_REPEAT_AFTER_STEPS = 1000
_REPEAT_AT_RATIO = 10


class ScaleWatch:
    """A watch that logs the condition of one run on `logging.getLogger("lossscale")`.

    ```python
    watch = ScaleWatch()
    ...
    watch.log(policy, state, loss=loss)  # whenever the loop logs
    ```

    `GradScaler` and each `LossScaleOptimizer` have a watch of their own.

    - **Verdict:** as in `diagnose`, but the watch counts skipped steps since an earlier call, at least 64 steps before,
      or since the first call. It does not count the steps before the first call, for example of a saved run.
    - **When:** the watch logs a new verdict, but not a verdict that returns within 1000 steps. It repeats a verdict
      when the streak of overflows is ten times as long.
    - **Level:** `calibrating` and `healthy` are logged as `INFO`, and other verdicts as `WARNING`. The first loss that
      is NaN or infinite is logged as `WARNING`, with the event `bad_loss`.
    - **Attributes:** a log record has the attributes `event` (the verdict), `steps`, `loss_scale` and
      `overflow_streak`.
    - **Restart:** a state with fewer steps than the last state begins another run.
    """

    def __init__(self) -> None:
        self._steps = 0
        self._verdict = "healthy"
        self._logged: dict[str, tuple[int, int]] = {}  # verdict: the step and the streak of its last log record
        self._has_bad_loss = False
        self._marks: tuple[ScaleState[Any], ...] = ()  # up to two earlier states, a window apart

    def log(self, policy: PolicyLike, state: ScaleState, *, loss: Any = None) -> None:
        """Log the verdict on the state if it is new. Synchronises with the host.

        Args:
            policy: Anything that `as_policy` accepts.
            state: A state of any framework.
            loss: The unscaled loss of the last step, or a mean of losses: a number, or an array of shape `()`.

        Raises:
            PolicyError: `policy` is not a policy.
            TypeError: `state` is not a state.
        """
        numbers = self._read(state, "log(policy, state)")
        is_calm = self._verdict == "healthy" and not numbers.overflow_streak
        if not (is_calm and self._marks and numbers.steps - self._marks[-1].steps < _WINDOW):
            self.diagnose(policy, numbers)
        if loss is not None and not self._has_bad_loss and not math.isfinite(float(loss)):
            self._has_bad_loss = True
            log_event("bad_loss", f"lossscale, step {numbers.steps}: {BAD_LOSS}")

    def diagnose(self, policy: PolicyLike, state: ScaleState, *, guard: GuardState | None = None) -> str:
        """Log the verdict on the state if it is new, and return it as text. Synchronises with the host.

        Args:
            policy: Anything that `as_policy` accepts.
            state: A state of any framework.
            guard: The state of a spike guard, which adds a sentence about the spikes if there were spikes.

        Returns:
            The verdict, a colon and the sentences, like the function `diagnose`.

        Raises:
            PolicyError: `policy` is not a policy.
            TypeError: `state` is not a state.
        """
        numbers = self._read(state, "diagnose(policy, state)")
        self._marks, before = self._marks or (numbers,), self._verdict
        self._verdict, reason = find_verdict(BaseScaling.of(as_policy(policy)), numbers, self._marks[0])
        if self._verdict == "broken":
            self._marks = ()
        elif numbers.steps - self._marks[-1].steps >= _WINDOW:
            self._marks = (self._marks[-1], numbers)
        logged_step, logged_streak = self._logged.get(self._verdict, (-_REPEAT_AFTER_STEPS, 0))
        level = "info" if self._verdict in ("calibrating", "healthy") else "warning"
        is_longer = numbers.overflow_streak >= _REPEAT_AT_RATIO * max(logged_streak, 2) and level == "warning"
        is_new = before != self._verdict and numbers.steps - logged_step >= _REPEAT_AFTER_STEPS
        text = f"{self._verdict}: {reason}"
        if self._verdict != "not started" and (is_longer or is_new):
            self._logged[self._verdict] = numbers.steps, numbers.overflow_streak
            facts = {name: getattr(numbers, name) for name in ("steps", "loss_scale", "overflow_streak")}
            log_event(self._verdict, f"lossscale, step {numbers.steps}: {text}", level, **facts)
        return text + describe_spikes(guard)

    def _read(self, state: ScaleState, call: str) -> ScaleState[Any]:
        """Return the fields of a state as Python numbers. Start over if the state begins another run."""
        numbers = numbers_of(state, call)
        if numbers.steps < self._steps:
            vars(self).update(vars(ScaleWatch()))
        self._steps = numbers.steps
        return numbers


def log_event(event: str, text: str, level: str = "warning", **facts: Any) -> None:
    """Log a message on the logger `lossscale`.

    Args:
        event: The attribute `event` of the log record.
        text: The message.
        level: The name of the level in lower case.
        facts: Further attributes of the log record.
    """
    import logging  # at the top of the module, this would make the import of the core 5 % slower

    getattr(logging.getLogger("lossscale"), level)(text, extra={"event": event, **facts})
