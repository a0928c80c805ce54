"""Simulated runs of a policy over flags or gradient magnitudes."""

import functools
from collections import namedtuple
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from lossscale_core._base import ScalingPolicy
from lossscale_core._config import PolicyLike, as_policy
from lossscale_core._guard import SpikeGuard
from lossscale_core._messages import describe
from lossscale_core._state import ScaleState
from lossscale_core._step import decide
from lossscale_core.files import Path, csv_lines, write_whole

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

LARGEST_NUMBER = {
    "float16": 65504.0,
    "bfloat16": (2.0 - 2.0**-7) * 2.0**127,
    "float32": (2.0 - 2.0**-23) * 2.0**127,
    "float64": (2.0 - 2.0**-52) * 2.0**1023,
}
"""The largest finite number of each dtype of gradients."""
TITLES = ("step", "scale", "applied", "overflowed", "spiked", "norm", "gradient_max", "scaler")
"""The titles of a trace in CSV; `docs/command.md` describes the columns."""


class Trace(NamedTuple):
    """A simulated run: arrays of shape `(steps,)` with an element for each step. The counters are after the step."""

    loss_scale_used: "NDArray[np.float32]"
    """float32: the scale that multiplied this step's loss."""
    loss_scale_after: "NDArray[np.float32]"
    """float32: the scale of the next step."""
    skipped: "NDArray[np.bool_]"
    """bool: the step overflowed and was skipped."""
    growth_tracker: "NDArray[np.int32]"
    hysteresis_tracker: "NDArray[np.int32]"
    steps: "NDArray[np.int32]"
    skipped_steps: "NDArray[np.int32]"
    overflow_streak: "NDArray[np.int32]"


def simulate(
    policy: PolicyLike,
    grads_finite: Iterable[Any],
    *,
    norms: "ArrayLike | None" = None,
    guard: SpikeGuard | None = None,
) -> Trace:
    """Run `policy` over steps with finite or non-finite gradients.

    A step takes a few microseconds and about 40 bytes.

    Args:
        policy: Anything that `as_policy` accepts.
        grads_finite: A bool for each step.
        norms: The norm of each step's unscaled gradients, of shape `(steps,)`; only with `guard`.
        guard: Checks the norms of the finite steps. A spike leaves the policy's state unchanged.

    Returns:
        The simulated run. It also has a column for each further counter of the policy's state and, with `guard`, a bool
        column `spiked`; `skipped` marks the overflows.

    Raises:
        PolicyError: `policy` is not a policy.
        TypeError: `grads_finite` is not a sequence of bools, 0 and 1.
        ValueError: One of `norms` and `guard` is missing, or `norms` has another length than `grads_finite`.
    """
    flags = _as_flags(grads_finite)
    if (None if norms is None else np.shape(norms)) != (None if guard is None else (len(flags),)):
        raise ValueError(f"norms={describe(norms)} and guard={guard}; pass both, with a norm for each step, or neither")
    return _run(as_policy(policy), len(flags), lambda step, _: flags[step], guard, norms)


def simulate_gradients(policy: PolicyLike, gradient_max: "ArrayLike", dtype: Any = "float16") -> Trace:
    """Run `policy` over steps with known magnitudes of the unscaled gradients.

    A step overflows if the loss scale × `gradient_max` exceeds the largest number of `dtype`, or if `gradient_max` is
    not finite.

    Args:
        policy: Anything that `as_policy` accepts.
        gradient_max: The largest magnitude of each step's gradients, of shape `(steps,)`.
        dtype: The dtype of the gradients: `"float16"`, `"bfloat16"`, `"float32"` or `"float64"`.

    Returns:
        The simulated run. It also has a column for each further counter of the policy's state.

    Raises:
        PolicyError: `policy` is not a policy.
        ValueError: `dtype` is another dtype, or `gradient_max` has another shape or a negative number.
    """
    dtype = dtype if isinstance(dtype, str) else np.dtype(dtype).name
    if dtype not in LARGEST_NUMBER:
        raise ValueError(f"dtype={dtype!r} must be one of {', '.join(LARGEST_NUMBER)}; pass the gradients' own dtype")
    try:
        magnitudes = np.asarray(gradient_max, dtype=np.float64)
    except (TypeError, ValueError):
        magnitudes = np.empty(())
    if magnitudes.ndim != 1 or (magnitudes < 0.0).any():
        raise ValueError(
            f"gradient_max={describe(gradient_max)} must hold a number from 0 for each step; call "
            "simulate_gradients(policy, gradient_max), with magnitudes such as [1.0, 2.0]"
        )
    return _run(
        as_policy(policy),
        len(magnitudes),
        # The product does not overflow in float64.
        lambda step, scale: bool(float(scale) * magnitudes[step] <= LARGEST_NUMBER[dtype]),
    )


def trace_to_csv(trace: Trace, path: Path) -> None:
    """Write a simulated run as a CSV file, which `lossscale plot` and `lossscale simulate` read.

    An existing file is replaced atomically. The columns of norms and magnitudes are empty, because a `Trace` does not
    have them.

    Args:
        trace: A run that `simulate` or `simulate_gradients` returned.
        path: The path of the file, which ends in `.csv`.

    Raises:
        OSError: The file cannot be written.
    """
    spiked = getattr(trace, "spiked", np.zeros_like(trace.skipped))
    step = trace.steps - ~spiked  # the number before the step; a spike is not counted
    columns = (step, trace.loss_scale_used, ~(trace.skipped | spiked), trace.skipped, spiked)
    rows = ((*cells, None, None, 0) for cells in zip(*columns, strict=True))
    write_whole(path, "".join(csv_lines(rows, TITLES)), overwrite=True)


def _as_flags(grads_finite: Any) -> list[bool]:
    """Return the flags of a run. Raises `TypeError` for other values, such as text."""
    flags = list(grads_finite) if isinstance(grads_finite, Iterable) else [None]
    if any(bool(flag) != flag for flag in flags):
        raise TypeError(
            f"grads_finite={describe(grads_finite)} must be a sequence of bools; call simulate(policy, grads_finite), "
            "with flags such as [True, False]"
        )
    return list(map(bool, flags))


def _run(
    policy: ScalingPolicy,
    steps: int,
    is_finite: Callable[[int, Any], bool],
    guard: SpikeGuard | None = None,
    norms: Any = None,
) -> Trace:
    """Run a policy and, with norms, a guard."""
    state: Any = policy.init_state()
    guard_state = None if guard is None else guard.init_state()
    norms, spiked = np.zeros(steps) if norms is None else np.asarray(norms, np.float32), np.zeros(steps, bool)
    rows = np.empty(steps + 1, [(name, type(start)) for name, start in state._asdict().items()])
    rows[0] = tuple(state)
    with np.errstate(over="ignore"):
        for step in range(steps):
            finite = is_finite(step, state.loss_scale)
            applied, state, guard_state = decide(policy, guard, state, guard_state, finite, norms[step])
            spiked[step] = finite and not applied
            rows[step + 1] = tuple(state)
    columns = {name: rows[name].copy() for name in state._fields}
    scales = columns.pop("loss_scale")
    after = {name: column[1:] for name, column in columns.items()} | ({} if guard is None else {"spiked": spiked})
    trace: Trace = _trace_type(*(name for name in after if name not in ScaleState._fields))(
        loss_scale_used=scales[:-1], loss_scale_after=scales[1:], skipped=np.diff(columns["skipped_steps"]) > 0, **after
    )
    return trace


@functools.cache
def _trace_type(*more: str) -> Any:
    """Return `Trace`, or a type with more fields for a policy with a larger state or a guard."""
    return namedtuple("Trace", (*Trace._fields, *more)) if more else Trace
