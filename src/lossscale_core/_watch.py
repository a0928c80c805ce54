"""The log messages of a run about its loss scale, through the logger `lossscale`."""

import math
from collections.abc import Iterator

import numpy as np

from lossscale_core._base import BaseScaling
from lossscale_core._config import PolicyLike, as_policy
from lossscale_core._diagnosis import Numbers, diagnosis, fallen_below_one, forward_pass
from lossscale_core._messages import not_a_state
from lossscale_core._state import ScaleState, read

_OF_THE_HOST = (np.generic, np.ndarray, float, int)
_LONG = 20
_TIMES_AS_LONG = 10
_APART = 1000


class ScaleWatch:
    """The log of one run, through `logging.getLogger("lossscale")`.

    ```python
    watch = ScaleWatch()
    ...
    watch.log(policy, state)  # now and then, when the loop logs
    ```

    `GradScaler` and the `LossScaleOptimizer`s have one each. An `INFO` line says that the calibration has ended. A
    `WARNING` says once that the scale has fallen to `min_scale`, has fallen below 1 or is limited by `max_scale`. From
    20 overflows in a row on, a `WARNING` reports a streak, and again when it is ten times as long. Each line ends with
    the recommendation of `diagnose`. A log record has the attributes `event` (`calibrated`, `floor`, `below_one`,
    `ceiling`, `broken` or `streak`), `steps`, `loss_scale` and `overflow_streak`. A state with fewer steps than the
    last one begins another run.
    """

    def __init__(self) -> None:
        self._steps = 0
        self._start_over()

    def log(self, policy: PolicyLike, state: ScaleState) -> None:
        """Log each event of the state that was not logged yet. Synchronises with the host.

        Args:
            policy: Anything that `as_policy` accepts.
            state: A state of any framework.

        Raises:
            PolicyError: `policy` is not a policy.
        """
        members, state = BaseScaling.of(as_policy(policy)), _on_host(state)
        steps = int(state.steps)
        if steps < self._steps:
            self._start_over()
        self._steps = steps
        if self._is_quiet(members, state):
            self._only_skipped = False
            return
        numbers = Numbers(members, state)
        sentence = diagnosis(members, numbers)
        events = self._events(members, numbers, sentence)
        found = {event: text for event, text in events if event not in self._logged}
        if found.keys() <= {"calibrated"} and self._is_long_streak(numbers, sentence):
            found["streak"] = sentence
        self._remember(numbers, found)
        if found:
            _log(numbers, found)

    def _start_over(self) -> None:
        self._logged: frozenset[str] = frozenset()  # the one-time events that were logged
        self._only_skipped = False  # whether all steps so far were skipped
        self._warned_at, self._warned_streak = -_APART, 0  # the step of the last warning, and its streak

    def _is_quiet(self, policy: BaseScaling, state: ScaleState) -> bool:
        """Return whether a state is in the middle of a healthy run, which needs no diagnosis."""
        if "calibrated" not in self._logged or state.overflow_streak:
            return False
        floor, ceiling = policy.bounds() if policy.adapts else (0.0, math.inf)
        is_within = floor < state.loss_scale < ceiling  # compared in float32
        return bool(is_within and (state.loss_scale >= 1.0 or "below_one" in self._logged))

    def _events(self, policy: BaseScaling, numbers: Numbers, sentence: str) -> Iterator[tuple[str, str]]:
        """Yield the events that a state shows, each with its own sentence; `sentence` is the diagnosis."""
        if sentence.startswith("broken"):
            yield "broken", sentence
            return
        if sentence.startswith("pressing"):
            yield "ceiling", sentence
        is_first_run = self._only_skipped or numbers.applied == numbers.finite_in_a_row
        is_over = numbers.applied and not sentence.startswith("calibrating")
        if policy.adapts and numbers.skipped and is_over and is_first_run:
            yield "calibrated", f"calibration has ended; {sentence}"
        if numbers.at_floor and numbers.skipped and not sentence.startswith(("healthy", "no step", "fallen")):
            yield "floor", sentence
        elif numbers.at_floor and numbers.skipped and numbers.start > numbers.scale:
            low = f"down to min_scale={numbers.shown_scale}: {numbers.counts}."
            yield "floor", f"{low} {forward_pass(policy, numbers.scale)}"
        elif fallen := fallen_below_one(policy, numbers):
            yield "below_one", fallen

    def _is_long_streak(self, numbers: Numbers, sentence: str) -> bool:
        if numbers.streak < _LONG or sentence.startswith("calibrating"):
            return False
        if numbers.steps - numbers.streak < self._warned_at:  # the same streak
            return numbers.streak >= _TIMES_AS_LONG * self._warned_streak
        return numbers.steps - self._warned_at >= _APART

    def _remember(self, numbers: Numbers, found: dict[str, str]) -> None:
        self._logged |= found.keys() - {"streak"}
        if numbers.applied:
            self._logged |= {"calibrated"}  # from here on, this line would come late
        self._only_skipped = bool(numbers.skipped and not numbers.applied)
        if found.keys() - {"calibrated"}:
            self._warned_at, self._warned_streak = numbers.steps, numbers.streak


def _on_host(state: ScaleState) -> ScaleState:
    """Return the first fields of a state as host scalars, each read once, if it is not on the host."""
    try:
        if isinstance(state.loss_scale, _OF_THE_HOST):
            return state
    except AttributeError as error:
        raise not_a_state(state, "log(policy, state)") from error
    return ScaleState(
        np.float32(read(state.loss_scale)), *(int(getattr(state, name)) for name in ScaleState._fields[1:])
    )


def _log(numbers: Numbers, found: dict[str, str]) -> None:
    import logging  # most processes log nothing, and it would add a twentieth to the time of importing the core

    facts = {"steps": numbers.steps, "loss_scale": numbers.scale, "overflow_streak": numbers.streak}
    for event, sentence in found.items():
        level = logging.INFO if event == "calibrated" else logging.WARNING
        text = "lossscale, step %d: %s"
        logging.getLogger("lossscale").log(level, text, numbers.steps, sentence, extra={"event": event, **facts})
