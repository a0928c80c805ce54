"""The list of checks: each rule with each way of running; the first way has all dtypes and scenarios, others half."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tests.conformance.suite import _finiteness, _scaling, _steps
from tests.conformance.suite._adapter import Adapter, Way
from tests.conformance.suite._scenarios import SCENARIOS, Scenario
from tests.conformance.suite._trial import Trial, require
from tests.sweeping import IS_SWEEP

VERBS = {
    "init_state": ["policy"],
    "scale": ["loss", "state"],
    "all_finite": ["grads"],
    "unscale": ["grads", "state"],
    "select": ["grads_finite", "new", "old"],
}


@dataclasses.dataclass(frozen=True)
class Check:
    """One rule for one adapter; a call runs the check.

    A failed check raises an `AssertionError` that names the rule and the value that breaks it.
    """

    rule: str
    """The rule's name, such as "every_position_is_seen"."""
    case: str
    """The way of running, and the dtype or scenario, such as "jit, float16"."""
    adapter: Adapter
    run: Callable[[], None] = dataclasses.field(repr=False)

    def __str__(self) -> str:
        return f"{self.adapter}: {self.rule}" + (f" ({self.case})" if self.case else "")

    def __call__(self) -> None:
        try:
            with self.adapter.context():
                self.run()
        # The message of the rule is complete, and a chain of exceptions would hide it under the frames of the trial.
        except AssertionError as error:
            raise AssertionError(f"{self}: {error}") from None
        except Exception as error:
            raise AssertionError(f"{self}: raised {type(error).__name__}: {error}") from error


def check(adapter: Adapter, *, scenarios: Mapping[str, Scenario] = SCENARIOS) -> None:
    """Run all checks of an adapter.

    Args:
        adapter: The adapter to check.
        scenarios: The runs over which states are compared with those of the host.

    Raises:
        AssertionError: At least one check failed; the message lists every failure.
    """
    failures, count = [], 0
    for each in checks(adapter, scenarios=scenarios):
        count += 1
        try:
            each()
        except AssertionError as error:
            failures.append(str(error))
    if failures:
        raise AssertionError(f"{len(failures)} of {count} checks failed:\n" + "\n".join(failures))


def checks(adapter: Adapter, *, scenarios: Mapping[str, Scenario] = SCENARIOS) -> list[Check]:
    """Return the checks of an adapter, each of which runs when it is called.

    Args:
        adapter: The adapter to check.
        scenarios: The runs over which states are compared with those of the host; add policies or recorded runs of
            your own.

    Returns:
        The checks; `str(check)` is the name of a check. With LOSSSCALE_SWEEP, each way has all dtypes and scenarios.
    """
    return [
        *_interface_checks(adapter),
        *(each for number in range(len(adapter.ways)) for each in _checks_of(adapter, number, scenarios)),
    ]


def _interface_checks(adapter: Adapter) -> Iterator[Check]:
    for verb, parameters in VERBS.items():
        run = functools.partial(_signature, adapter.verbs, verb, parameters)
        yield Check("the_verbs_have_one_signature", verb, adapter, run)
    eager = Trial(adapter, Way("eager"))
    for rule in (_steps.states_are_placed, _steps.a_host_flag_picks_a_side):
        yield Check(rule.__name__, "", adapter, functools.partial(rule, eager))


def _checks_of(adapter: Adapter, number: int, scenarios: Mapping[str, Scenario]) -> Iterator[Check]:
    way = adapter.ways[number]
    trial = Trial(adapter, way)
    for rule in _RULES:
        yield Check(rule.__name__, way.name, adapter, functools.partial(rule, trial))
    for turn, rule_of_dtype in enumerate((*_RULES_OF_NUMBERS, *_RULES_OF_REAL_NUMBERS), number):
        for dtype in _part(adapter.dtypes, number, turn):
            if "complex" not in dtype or rule_of_dtype in _RULES_OF_NUMBERS:
                case = f"{way.name}, {dtype}"
                yield Check(rule_of_dtype.__name__, case, adapter, functools.partial(rule_of_dtype, trial, dtype))
    for name, scenario in _part([*scenarios.items()], number, number):
        run = functools.partial(_steps.states_are_the_hosts, trial, scenario)
        yield Check("states_are_the_hosts", f"{way.name}, {name}", adapter, run)


def _part(values: Sequence[Any], number: int, turn: int) -> Sequence[Any]:
    """Return all values for the first way and in a sweep; otherwise, of more than three values, one half in turn."""
    return values if number == 0 or len(values) < 4 or IS_SWEEP else values[turn % 2 :: 2]


_RULES = (
    _finiteness.an_empty_structure_is_finite,
    _finiteness.nothing_hides_an_overflow,
    _scaling.losses_keep_their_structure,
    _scaling.gradients_keep_their_structure,
    _steps.full_counters_stay_full,
    _steps.only_a_bool_is_a_flag,
)
_RULES_OF_NUMBERS = (_finiteness.every_position_is_seen, _scaling.gradients_survive)
_RULES_OF_REAL_NUMBERS = (
    _finiteness.long_and_many_leaves_are_seen,
    _scaling.a_loss_is_lifted,
    _scaling.any_scale_unscales,
    _steps.selection_is_atomic,
    _steps.a_step_is_applied_or_skipped,
)


def _signature(verbs: Any, verb: str, expected: list[str]) -> None:
    function: Any = getattr(verbs, verb, None)
    require(callable(function), f"{verb} is missing; the five verbs are {', '.join(VERBS)}")
    parameters = inspect.signature(function).parameters.values()
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    require(positional == expected, f"{verb} takes ({', '.join(positional)}), but must take ({', '.join(expected)})")
    others = [p for p in parameters if p.name not in expected]
    good = all(p.kind is p.VAR_KEYWORD or (p.kind is p.KEYWORD_ONLY and p.default is not p.empty) for p in others)
    require(good, f"{verb} also takes {', '.join(p.name for p in others)}; make them keyword-only, with defaults")
