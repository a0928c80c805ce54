"""The rules of steps and states: a step is applied completely or not at all, and states match those of the host."""

from typing import Any, NamedTuple

import numpy as np

from lossscale_core import DynamicScaling, FixedScaling, NoScaling
from tests.conformance.suite._scenarios import Scenario
from tests.conformance.suite._trial import LIFTED, Trial, require, require_structure

_OLD = [1.5, -0.0, 0.375, 2.0**-20]
_NEW = [np.nan, np.inf, -np.inf, 7.0]
_OLD_COUNT, _NEW_COUNT = 2**24 + 1, 2**30 + 3  # neither is exact in float32


class Model(NamedTuple):
    """The values that a step changes: a NamedTuple, as the states of many optimizers are."""

    params: Any
    memory: Any
    count: Any
    is_odd: Any


def selection_is_atomic(trial: Trial, dtype: str) -> None:
    """Select returns every leaf of one side bit for bit; not even a NaN of the other side leaves a trace."""
    new, old = _model(trial, dtype, _NEW, _NEW_COUNT), _model(trial, dtype, _OLD, _OLD_COUNT)
    select = trial.run(trial.adapter.verbs.select)
    _expect_model(trial, select(trial.flag(True), new, old), _NEW, _NEW_COUNT, dtype)
    _expect_model(trial, select(trial.flag(False), new, old), _OLD, _OLD_COUNT, dtype)


def a_host_flag_picks_a_side(trial: Trial) -> None:
    """Select takes a Python bool, too."""
    dtype = trial.adapter.dtypes[0]
    new, old = _model(trial, dtype, _NEW, _NEW_COUNT), _model(trial, dtype, _OLD, _OLD_COUNT)
    select = trial.adapter.verbs.select
    _expect_model(trial, select(True, new, old), _NEW, _NEW_COUNT, dtype)
    _expect_model(trial, select(False, new, old), _OLD, _OLD_COUNT, dtype)


def a_step_is_applied_or_skipped(trial: Trial, dtype: str) -> None:
    """In one function of all verbs, an overflow in one leaf leaves every parameter unchanged and is counted."""
    verbs, policy, wide = trial.adapter.verbs, DynamicScaling(init_scale=4.0), LIFTED.get(dtype, dtype)

    def step(state: Any, params: Any, grads: Any) -> Any:
        finite = verbs.all_finite(grads)
        moved = verbs.select(finite, verbs.unscale(grads, state), params)
        return moved, policy.update(state, finite, xp=trial.adapter.xp)

    step, before = trial.run(step), trial.state(policy)
    params = {"a": trial.array([1.0, 2.0], wide), "b": trial.array([3.0], wide)}
    for last in (8.0, np.nan, np.inf, -np.inf):
        applied = bool(np.isfinite(last))
        grads = {"a": trial.array([-4.0, 4.0], dtype), "b": trial.array([last], dtype)}
        after, state = step(before, params, grads)
        moment = f"after a step with {last} in the last gradient"
        trial.expect(f"parameter a {moment}", after["a"], np.array([-1.0, 1.0] if applied else [1.0, 2.0]), wide)
        trial.expect(f"parameter b {moment}", after["b"], np.array([2.0] if applied else [3.0]), wide)
        trial.expect_state(moment, state, policy.update(policy.init_state(), applied))


def only_a_bool_is_a_flag(trial: Trial) -> None:
    """Update refuses a number in the place of the flag, such as a norm or torch's `found_inf`, by its dtype."""
    for policy in (NoScaling(), DynamicScaling()):
        step, state = trial.run(trial.update(policy)), trial.state(policy)
        for wrong in (trial.array(np.nan, "float32"), trial.array(1.0, "float32"), trial.array(1, "int32")):
            try:
                step(state, wrong)
            except Exception as error:  # a compiler may wrap the error
                require("must be a bool of shape ()" in str(error), f"update raised {error!r} for a number as the flag")
            else:
                require(False, f"update took {wrong} for a flag")


def states_are_the_hosts(trial: Trial, scenario: Scenario) -> None:
    """Every state is bit for bit that of host scalars, and no field changes its dtype or shape."""
    policy, flags = scenario.policy, scenario.grads_finite
    step, expected = trial.run(trial.update(policy)), policy.init_state()
    # Without values every step has the same dtypes and shapes.
    if not trial.way.has_values:
        flags = flags[:1]
    states = trial.way.iterate(step, trial.state(policy), [trial.flag(flag) for flag in flags])
    for n, (state, flag) in enumerate(zip(states, flags, strict=True)):
        expected = policy.update(expected, flag)
        trial.expect_state(f"after step {n} ({policy!r})", state, expected)


def full_counters_stay_full(trial: Trial) -> None:
    """Counters that are full continue like the host's: none wraps around below zero."""
    full = 2**31 - 1
    counts = {name: np.int32(full - 1) for name in ("growth_tracker", "steps", "skipped_steps", "overflow_streak")}
    for policy in (NoScaling(), DynamicScaling(growth_interval=full)):
        start: Any = policy.init_state()
        expected = start._replace(**{name: v for name, v in counts.items() if name in start._fields})
        step = trial.run(trial.update(policy))
        state = expected._make(trial.array(value, value.dtype.name) for value in expected)
        for n, flag in enumerate((False, False, True, True, False)):
            if trial.way.has_values or n == 0:
                state, expected = step(state, trial.flag(flag)), policy.update(expected, flag)
                trial.expect_state(f"after step {n} with full counters ({policy!r})", state, expected)


def states_are_placed(trial: Trial) -> None:
    """init_state accepts everything that as_policy accepts, and returns the policy's first state, of shape ()."""
    for policy, host in (
        ("dynamic", DynamicScaling()),
        (1024.0, FixedScaling(1024.0)),
        (DynamicScaling(cooldown=3, hysteresis=2), DynamicScaling(cooldown=3, hysteresis=2)),
    ):
        trial.expect_state(f"of init_state({policy!r})", trial.state(policy), host.init_state())


def _model(trial: Trial, dtype: str, values: list[float], count: int) -> Model:
    values = _with_fraction(values, dtype)
    return Model(
        params=[trial.array(values, dtype), trial.array(values[-1], dtype)],
        memory=(trial.array(values[::-1], dtype), None, {"nothing": trial.array(np.zeros(0), dtype)}),
        count=trial.array(np.int32(count), "int32"),
        is_odd=trial.array(count % 2 == 1, "bool"),
    )


def _expect_model(trial: Trial, model: Any, values: list[float], count: int, dtype: str) -> None:
    require_structure("select", model, _model(trial, dtype, values, count))
    values = _with_fraction(values, dtype)
    trial.expect("the first parameter selected", model.params[0], np.array(values), dtype)
    trial.expect("the second parameter selected", model.params[1], values[-1], dtype)
    trial.expect("the memory selected", model.memory[0], np.array(values[::-1]), dtype)
    trial.expect("the empty leaf selected", model.memory[2]["nothing"], np.zeros(0), dtype)
    trial.expect("the counter selected", model.count, np.int32(count), "int32")
    trial.expect("the bool selected", model.is_odd, np.bool_(count % 2 == 1), "bool")


def _with_fraction(values: list[float], dtype: str) -> list[float]:
    """Return the values, and for float64 one more that needs all its digits."""
    return [*values, values[-1] / 3.0] if dtype == "float64" else values
