"""A user's code, for mypy alone: `nox -s typing` checks it as strictly as the packages."""

from typing import Any

from lossscale_core import (
    DynamicScaling,
    ScaleState,
    StepInfo,
    TolerantScaleState,
    TolerantScaling,
    check_overflow_streak,
    diagnose,
    metrics,
    scale,
    state_to_dict,
    step_info,
    unscale,
)


def report(before: ScaleState, after: ScaleState) -> tuple[str, dict[str, Any], StepInfo, dict[str, Any]]:
    """Report on the states that the policies' own `init_state` returns."""
    policy = DynamicScaling()
    check_overflow_streak(policy, after)
    return diagnose(policy, after), metrics(after), step_info(before, after), state_to_dict(after, policy)


def report_tolerant(before: TolerantScaleState, after: TolerantScaleState) -> list[Any]:
    """Do the same with the state that has two counters more."""
    policy = TolerantScaling()
    return [diagnose(policy, after), metrics(after), step_info(before, after), state_to_dict(after), scale(1.0, after)]


def start() -> list[Any]:
    """Use the states as they come from a policy."""
    state = DynamicScaling().init_state()
    return [*report(state, state), unscale({"weight": 1.0}, state), scale(1.0, state)]
