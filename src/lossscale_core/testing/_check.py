"""A check of the rules for the `update` of a policy."""

import importlib.util
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from lossscale_core._base import BaseScaling
from lossscale_core._checkpoint import state_from_dict, state_to_dict
from lossscale_core._config import PolicyLike, as_policy
from lossscale_core._messages import describe
from lossscale_core._settings import LARGEST_COUNT, LARGEST_SCALE, SMALLEST_SCALE
from lossscale_core._state import ScaleState
from lossscale_core.errors import CheckpointWarning
from lossscale_core.testing._simulation import simulate

_FLAGS = [False, False, True, False, True, True, False, False, False, *[True] * 6, False]
_COUNTERS = ("growth_tracker", "steps", "skipped_steps", "overflow_streak")
_OVERFLOWS, _FINITE_STEPS = 3000, 5000


def check_policy(policy: PolicyLike) -> None:
    """Check that a policy obeys the rules of `ScalingPolicy`.

    The check runs steps from the first state, from both bounds of the scale and from beyond them, with full counters,
    and where growth is due. The rules:

    - **Fields** keep their dtypes and shapes, and are finite. `state_from_dict` restores what `state_to_dict` returns.
    - **Counters:** `steps`, `skipped_steps` and `overflow_streak` count from 0. A full counter stays full. The growth
      tracker does not fall without end over 3000 overflows.
    - **The loss scale** stays in `bounds()`, and an overflow does not raise it.
    - **`update`** is pure. It returns the same bits for host scalars, NumPy arrays, traced arrays (without a truth
      value) and, if it is installed, arrays of array-api-strict.

    Args:
        policy: Anything that `as_policy` accepts.

    Raises:
        AssertionError: The policy breaks a rule; the message names the field, the step and the rule.
        PolicyError: `policy` is not a policy.
    """
    checked: Any = as_policy(policy)
    traits = BaseScaling.of(checked)
    low, high = map(np.float32, traits.bounds())
    start = checked.init_state()
    _check_first_state(checked, start, low, high)
    for moment, first in _moments(start, low, high, traits.growth_interval):
        for flags in (_FLAGS, [not flag for flag in _FLAGS]):
            expected = list(_run(checked, first, flags, f"{moment}, on the host", None, lambda value: value))
            _check_run(_values(first), flags, expected, moment, low, high)
            for step, values in enumerate(expected, 1):
                _check_saving(checked, first._make(values[name][()] for name in first._fields), step, moment)
            for where, xp, convert in _namespaces():
                states = _run(checked, first, flags, f"{moment}, on {where}", xp, convert)
                for step, (state, on_host) in enumerate(zip(states, expected, strict=True), 1):
                    _require_equal(state, on_host, f"after step {step} {moment}, on {where}, but", "on the host")
    _check_long_runs(checked, traits, low, high)


def _check_first_state(policy: Any, start: Any, low: Any, high: Any) -> None:
    is_state = getattr(start, "_fields", ())[:6] == ScaleState._fields
    _require(is_state, f"init_state returned {describe(start)}; return a NamedTuple that begins as ScaleState")
    dtypes = dict.fromkeys(ScaleState._fields, "int32") | {"loss_scale": "float32"}
    again = policy.init_state()._asdict()
    for name, value in start._asdict().items():
        dtype = dtypes.get(name, "float32 or int32")
        is_valid = isinstance(value, np.generic) and value.dtype.name in dtype and np.isfinite(value)
        _require(is_valid, f"{name} of init_state is {describe(value)}; return a finite NumPy scalar of {dtype}")
        _require(again[name] == value, f"{name} of init_state is {value}, and then {again[name]}; return equal states")
        is_from_0 = name not in _COUNTERS[1:] or value == 0
        _require(is_from_0, f"{name} of init_state is {value}, but counts from 0")
    scale = start.loss_scale
    _require(low <= scale <= high, f"loss_scale of init_state is {scale:g}; keep it in bounds(), {low:g} to {high:g}")
    scales = BaseScaling.of(policy).scales_losses or scale == 1.0
    _require(scales, f"loss_scale of init_state is {scale:g}, but scales_losses is False; set it to True")


def _moments(start: Any, low: Any, high: Any, interval: int) -> Iterator[tuple[str, Any]]:
    """Yield states from which a run may begin or resume, and a text for each state."""
    yield "from the first state", start
    yield "with full counters", start._replace(**dict.fromkeys(_COUNTERS, np.int32(LARGEST_COUNT - 1)))
    due = start._replace(growth_tracker=np.int32(min(max(interval, 1), LARGEST_COUNT) - 1))
    yield "where growth is due", due
    for where, scale in (
        *(("at the lower bound", low), ("just above the lower bound", low * 3), ("below the lower bound", low / 4)),
        *(("at the upper bound", high), ("just below the upper bound", high / 3), ("above the upper bound", high * 2)),
    ):
        if SMALLEST_SCALE <= scale <= LARGEST_SCALE:
            yield f"{where} of the scale, where growth is due", due._replace(loss_scale=np.float32(scale))


def _check_run(
    before: dict[str, Any], flags: list[bool], states: list[dict[str, Any]], moment: str, low: Any, high: Any
) -> None:
    for step, (flag, state) in enumerate(zip(flags, states, strict=True), 1):
        when = f"after step {step} {moment}"
        for name in _COUNTERS[1:]:
            is_counted = name == "steps" or not flag
            count = min(int(before[name]) + 1, LARGEST_COUNT) if is_counted else int(before[name])
            count = 0 if flag and name == "overflow_streak" else count
            _require(state[name] == count, f"{name} is {state[name]} {when}, but must be {count}")
        for name, value in state.items():
            _require(np.isfinite(value), f"{name} is {value} {when}; keep it finite")
        is_wrapped = before["growth_tracker"] > 2**30 and flag and state["growth_tracker"] < -(2**30)
        _require(not is_wrapped, f"growth_tracker wraps around {when}; use saturating_increment")
        old, new = before["loss_scale"], state["loss_scale"]
        change = f"loss_scale goes from {old:g} to {new:g}"
        _require(flag or new <= old, f"{change} by an overflow {when}; never raise it there")
        is_within = min(low, old) <= new <= max(high, old)
        _require(is_within, f"{change} {when}; keep it in bounds(), {low:g} to {high:g}")
        before = state


def _check_long_runs(policy: Any, traits: BaseScaling, low: Any, high: Any) -> None:
    for flag, steps, what in ((False, _OVERFLOWS, "overflows"), (True, _FINITE_STEPS, "finite steps")):
        with np.errstate(all="ignore"):
            trace = simulate(policy, [flag] * steps)
        for step, scale in enumerate(trace.loss_scale_after, 1):
            text = f"loss_scale is {scale:g} after {step} {what} in a row; keep it in bounds(), {low:g} to {high:g}"
            _require(low <= scale <= high, text)
        middle, end = trace.growth_tracker[[steps // 2, -1]]
        _require(end >= min(middle, 0), f"growth_tracker is {end} after {steps} {what} in a row, and falls without end")
        first, last = trace.loss_scale_used[0], trace.loss_scale_after[-1]
        text = f"loss_scale goes from {first:g} to {last:g} in {steps} {what}, but adapts is False; set it to True"
        _require(traits is not policy or traits.adapts or first == last, text)  # a bare policy has no `adapts`
        is_lowered = last < first or first == low or flag or not traits.adapts or traits.hysteresis >= steps
        _require(is_lowered, f"loss_scale is {last:g} after {steps} {what} in a row, as before them; lower it")


def _run(
    policy: Any, state: Any, flags: list[bool], moment: str, xp: Any, convert: Callable[[Any], Any]
) -> Iterator[dict[str, np.ndarray[Any, Any]]]:
    """Yield the values after each step. Raises `AssertionError` if `update` is not pure or changes a type."""
    state = state._make(map(convert, state))
    for step, flag in enumerate(flags, 1):
        when = f"after step {step} {moment}"
        before, grads_finite = _values(state), flag if xp is None else convert(np.bool_(flag))
        try:
            with np.errstate(all="ignore"):
                after, again = (policy.update(state, grads_finite, xp=xp) for _ in range(2))
        except Exception as error:
            hint = "use operators and select(..., xp=xp)"
            raise AssertionError(f"update raised {error!r} {when}; {hint}") from error
        is_state = type(after) is type(state)
        _require(is_state, f"update returned {describe(after)} {when}; return the type of the state")
        values = _values(after)
        for name, value in before.items():
            old, new = (f"{array.dtype} of shape {array.shape}" for array in (value, values[name]))
            _require(new == old, f"{name} is {new} {when}, but must stay {old}")
        _require_equal(_values(again), values, f"{when}, but was", "before; make update pure")
        _require_equal(_values(state), before, f"in the state itself {when}, but was", "before; make update pure")
        yield values
        state = after


def _check_saving(policy: Any, state: Any, step: int, moment: str) -> None:
    """Require that saving and restoring a state does not change it, except a scale outside the bounds."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CheckpointWarning)
            copy = state_from_dict(state_to_dict(state, policy), policy)
    except Exception as error:
        raise AssertionError(f"the state after step {step} {moment} is saved, but not restored: {error}") from error
    low, high = BaseScaling.of(policy).bounds()
    copy = copy if low <= state.loss_scale <= high else copy._replace(loss_scale=state.loss_scale)
    _require_equal(_values(state), _values(copy), f"after step {step} {moment}, but", "once saved and restored")


def _require_equal(values: dict[str, Any], others: dict[str, Any], when: str, where: str) -> None:
    for name, value in values.items():
        text = f"{name} is {value} {when} {others[name]} {where}"
        _require(np.array_equal(value, others[name], equal_nan=True), text)


def _values(state: Any) -> dict[str, np.ndarray[Any, Any]]:
    return {name: np.array(getattr(value, "traced", value)) for name, value in state._asdict().items()}


def _namespaces() -> Iterator[tuple[str, Any, Callable[[Any], Any]]]:
    yield "NumPy arrays", np, np.asarray
    yield "traced arrays", _Traced, _Traced
    if importlib.util.find_spec("array_api_strict"):
        import array_api_strict

        yield "array-api-strict", array_api_strict, array_api_strict.asarray


class _Traced:
    """A NumPy array without a truth value, like an array that a framework traces. The class is its own namespace."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, traced: Any) -> None:
        self.traced = np.asarray(getattr(traced, "traced", traced))
        self.dtype, self.shape = self.traced.dtype, self.traced.shape

    def __bool__(self) -> bool:
        raise TypeError("a traced array has no truth value")

    @classmethod
    def where(cls, condition: Any, x: Any, y: Any) -> "_Traced":
        """Return x or y; a plain number takes the dtype of the other argument."""
        return _on_traced(np.where)(condition, x, y)


def _on_traced(function: Callable[..., Any]) -> Callable[..., _Traced]:
    """Return a function of traced arrays that applies `function` to their NumPy arrays."""
    return lambda *operands: _Traced(function(*(getattr(operand, "traced", operand) for operand in operands)))


_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
_OTHERS = ("lt", "le", "gt", "ge", "eq", "ne", "neg", "abs", "invert")
for _name in (*_BINARY, *(f"r{_name}" for _name in _BINARY), *_OTHERS):
    setattr(_Traced, f"__{_name}__", _on_traced(getattr(np.ndarray, f"__{_name}__")))


def _require(holds: Any, otherwise: str) -> None:
    if not holds:
        raise AssertionError(otherwise)
