"""What a run logs about its loss scale by itself, through the logger `lossscale`."""

import functools
import math
from collections import deque
from typing import Literal, NamedTuple, get_args

import numpy as np

from lossscale_core._base import BaseScaling
from lossscale_core._config import PolicyLike, as_policy
from lossscale_core._diagnosis import Numbers, diagnosis, forward_pass
from lossscale_core._state import AnyScaleState, ScaleState
from lossscale_core.errors import PolicyError, ScaleFloorError

OnFloor = Literal["warn", "raise", "ignore"]
"""What an overflow does that brings the loss scale down to `min_scale`."""

_OF_THE_HOST = (np.generic, np.ndarray, float, int)
_LONG = 20
_TIMES_AS_LONG = 10
_APART = 1000


class Remark(NamedTuple):
    """Something worth a line in the log."""

    event: str
    """`calibrated`, `floor`, `ceiling`, `broken` or `streak`."""
    sentence: str


class Said(NamedTuple):
    """What a run has said so far, and the part of its last state that the next is compared with."""

    events: frozenset[str] = frozenset()
    """The events that are said once."""
    streak_began: int = -1
    """The step at which the streak of the last warning began."""
    streak: int = 0
    """How long that streak was then."""
    warned_at: int = -_APART
    """The step of the last warning."""
    steps: int = 0
    """The steps of the last state."""
    only_skipped: bool = False
    """Whether all of them were skipped."""


def remarks(policy: BaseScaling, state: AnyScaleState, said: Said) -> tuple[list[Remark], Said]:
    """Return what is worth saying about a state, and what has been said then. Pure; reads the state on the host.

    Each event but a streak is said once. A streak is said when it is 20 overflows long and whenever it has become ten
    times as long as at the last warning; another streak, from 1000 steps after that one. A state with fewer steps than
    the last begins a new run.
    """
    steps = int(state.steps)
    if steps < said.steps:
        said = Said()
    if _is_quiet(policy, state, said):
        return [], Said(said.events, said.streak_began, said.streak, said.warned_at, steps)
    numbers = Numbers(policy, state)
    sentence = diagnosis(policy, numbers)
    found = [
        Remark(event, text)
        for event, text in (
            ("calibrated", _calibrated(policy, numbers, sentence, said)),
            ("floor", _floor(policy, numbers, sentence)),
            ("ceiling", sentence if sentence.startswith("pressing") else None),
            ("broken", sentence if sentence.startswith("broken") else None),
        )
        if text and event not in said.events
    ]
    if not any(each.event != "calibrated" for each in found) and _is_long_streak(numbers, sentence, said):
        found.append(Remark("streak", sentence))
    return found, _remembered(numbers, found, said)


def _is_quiet(policy: BaseScaling, state: AnyScaleState, said: Said) -> bool:
    """Return whether a state is in the middle of a healthy run, which is told without a diagnosis."""
    if "calibrated" not in said.events or state.overflow_streak:
        return False
    floor, ceiling = policy.bounds() if policy.adapts else (0.0, math.inf)
    return bool(floor < state.loss_scale < ceiling)  # compared in float32


def _calibrated(policy: BaseScaling, numbers: Numbers, sentence: str, said: Said) -> str | None:
    if not policy.adapts or not numbers.applied or not numbers.skipped:
        return None
    is_first_run = said.only_skipped or numbers.applied == numbers.finite_in_a_row
    return f"calibration has ended; {sentence}" if is_first_run else None


def _floor(policy: BaseScaling, numbers: Numbers, sentence: str) -> str | None:
    """Return what to say where overflows have brought the scale down to its floor, or leave it there for long."""
    if not numbers.at_floor or not numbers.skipped or sentence.startswith("broken"):
        return None
    if not sentence.startswith("healthy"):
        return sentence
    if numbers.start <= numbers.scale:
        return None
    return f"down to min_scale={numbers.scale:g}: {numbers.counts}. {forward_pass(numbers.scale)}"


def _is_long_streak(numbers: Numbers, sentence: str, said: Said) -> bool:
    if numbers.streak < _LONG or sentence.startswith("calibrating"):
        return False
    if numbers.steps - numbers.streak == said.streak_began:
        return numbers.streak >= _TIMES_AS_LONG * said.streak
    return numbers.steps - said.warned_at >= _APART


def _remembered(numbers: Numbers, found: list[Remark], said: Said) -> Said:
    events = said.events | {each.event for each in found if each.event != "streak"}
    if numbers.applied:
        events |= {"calibrated"}  # from here on, a remark would come late
    said = said._replace(events=events, steps=numbers.steps, only_skipped=bool(numbers.skipped and not numbers.applied))
    if not any(each.event != "calibrated" for each in found):
        return said
    return said._replace(streak_began=numbers.steps - numbers.streak, streak=numbers.streak, warned_at=numbers.steps)


class ScaleWatch:
    """The memory of one run that logs by itself, through `logging.getLogger("lossscale")`.

    ```python
    watch = ScaleWatch(on_floor="raise")
    ...
    watch.check(policy, state)  # every so often, where the state is read anyway
    ```

    `GradScaler` and the `LossScaleOptimizer`s have one each. An `INFO` line says that the calibration has ended. A
    `WARNING` says that the scale has first come down to `min_scale` or is pressing against `max_scale`, and, from 20
    overflows in a row, that there is a streak; a streak is said again when it has become ten times as long. Each line
    ends with what `diagnose` recommends. A log record has the attributes `event` (`calibrated`, `floor`, `ceiling`,
    `broken` or `streak`), `steps`, `loss_scale` and `overflow_streak`.

    Args:
        on_floor: What an overflow does that brings the scale down to `min_scale`: `"warn"` logs, `"raise"` makes
            `check` raise an error, and `"ignore"` says nothing while the scale is there.

    Raises:
        PolicyError: `on_floor` is none of the three.
    """

    def __init__(self, on_floor: OnFloor = "warn") -> None:
        if on_floor not in get_args(OnFloor):
            raise PolicyError(f"on_floor={on_floor!r} must be 'warn', 'raise' or 'ignore'")
        self.on_floor = on_floor
        self._said = Said()

    def log(self, policy: PolicyLike, state: AnyScaleState) -> None:
        """Log what is worth saying and was not said yet. Synchronises with the host.

        Args:
            policy: Anything that `as_policy` accepts.
            state: A state of any framework.

        Raises:
            PolicyError: `policy` is not a policy.
        """
        self._said = _say(BaseScaling.of(as_policy(policy)), _on_host(state), self._said, self.on_floor)

    def check(self, policy: PolicyLike, state: AnyScaleState) -> None:
        """Log as `log` does, and raise an error if `on_floor` says so. Synchronises with the host.

        Args:
            policy: Anything that `as_policy` accepts.
            state: A state of any framework.

        Raises:
            ScaleFloorError: `on_floor` is `"raise"`, and the last step overflowed and left the scale at `min_scale`.
            PolicyError: `policy` is not a policy.
        """
        if self.on_floor == "raise":
            require_above_floor(BaseScaling.of(as_policy(policy)), _on_host(state))
        self.log(policy, state)


def _say(policy: BaseScaling, state: AnyScaleState, said: Said, on_floor: OnFloor) -> Said:
    """Log what is worth saying about a state of the host, and return what has been said then."""
    found, said = remarks(policy, state, said)
    if found and on_floor == "ignore" and Numbers(policy, state).at_floor:
        found = [remark for remark in found if remark.event == "broken"]
    if not found:
        return said
    import logging  # most processes say nothing, and it would add a twentieth to the time of importing the core

    facts = {"steps": said.steps, "loss_scale": float(state.loss_scale), "overflow_streak": int(state.overflow_streak)}
    for remark in found:
        level = logging.INFO if remark.event == "calibrated" else logging.WARNING
        extra = {"event": remark.event, **facts}
        logging.getLogger("lossscale").log(level, "loss scaling, step %d: %s", said.steps, remark.sentence, extra=extra)
    return said


def require_above_floor(policy: BaseScaling, state: AnyScaleState) -> None:
    """Raise `ScaleFloorError` if the last step overflowed and left the scale at the policy's floor."""
    if not state.overflow_streak:
        return
    numbers = Numbers(policy, state)
    if sentence := _floor(policy, numbers, diagnosis(policy, numbers)):
        raise ScaleFloorError(
            f"loss_scale={numbers.scale:g} has reached min_scale={policy.min_scale:g}, and on_floor is 'raise'; "
            f"{sentence} To train on, pass on_floor='warn'."
        )


def log_arrays(policy: BaseScaling, state: AnyScaleState) -> None:
    """Log what is worth saying about a state of arrays.

    A state of host scalars is passed over: it belongs to a facade that logs by itself, or to a simulation.
    """
    # The key is the repr, since a policy of a user may have no hash.
    if not _is_on_host(state):
        _runs_under(repr(policy)).log(policy, _on_host(state))


def _is_on_host(state: AnyScaleState) -> bool:
    return isinstance(state.loss_scale, _OF_THE_HOST)


def _on_host(state: AnyScaleState) -> AnyScaleState:
    """Return the first fields of a state as host scalars, each read once, if it is not on the host."""
    if _is_on_host(state):
        return state
    return ScaleState(
        np.float32(float(state.loss_scale)), *(int(getattr(state, name)) for name in ScaleState._fields[1:])
    )


def choose_on_floor(policy: BaseScaling, on_floor: OnFloor) -> None:
    """Set what `log_arrays` does at the floor of a policy."""
    _runs_under(repr(policy)).on_floor = ScaleWatch(on_floor).on_floor


class _Runs:
    """The memories of the last runs whose policies look alike, for pure functions, which do not know whose state it is.

    A state belongs to the run whose last state is nearest before it.
    """

    def __init__(self) -> None:
        self.on_floor: OnFloor = "warn"
        # A pure function does not learn that a run has ended, so that the oldest memory makes room for a new one.
        self._said: deque[Said] = deque(maxlen=16)

    def log(self, policy: BaseScaling, state: AnyScaleState) -> None:
        """Log what is worth saying about a state of the host."""
        # Several runs under one policy take turns. A state with fewer steps than all of them begins another one.
        earlier = [said for said in self._said if said.steps <= int(state.steps)]
        said = max(earlier, key=lambda said: said.steps, default=None)
        if said is not None:
            self._said.remove(said)
        self._said.append(_say(policy, state, said or Said(), self.on_floor))


@functools.lru_cache(maxsize=64)
def _runs_under(_: str) -> _Runs:
    return _Runs()
