"""fairseq."""

import math
from collections.abc import Mapping
from typing import Any

from lossscale.dialects import _readings as read
from lossscale.dialects._counters import count, since_change, since_overflow
from lossscale.dialects._readings import HALVES, UNBOUNDED
from lossscale.dialects._record import Form, Meaning, NoCounterpartError, Reading, Saved, Settings, Tool, key
from lossscale_core.adapters import shown

_MOST_FALLS = 10_000


def _floor(settings: Settings, _: Mapping[str, Any]) -> Meaning:
    """Set `min_scale` to `threshold`, or to the last scale above `min_loss_scale`, at which fairseq ends the run."""
    if settings["min_scale"] > settings["stop_at"]:  # the run never ends
        return Meaning(settings)
    # fairseq puts the scale before the fall back and only then raises, so that a run ends at the scale above the stop:
    # https://github.com/facebookresearch/fairseq/blob/f591cc94caa8/fairseq/optim/dynamic_loss_scaler.py#L57
    return Meaning({**settings, "min_scale": _last_above(settings["stop_at"], settings)})


def _last_above(stop: float, settings: Settings) -> float:
    """Return the last scale above `stop` when the initial scale is divided by the factor repeatedly."""
    scale = float(settings["init_scale"])
    if scale <= stop:
        raise NoCounterpartError(
            "the scale starts at min_loss_scale or below, so that the first overflow ends the run; raise it"
        )
    factor = math.log(settings["growth_factor"])
    # A stop of 0 has no logarithm. A scale of 2**-1000 is far below every floor that this library takes.
    falls = (math.log(scale) - math.log(max(stop, 2.0**-1000))) / factor
    if falls > _MOST_FALLS:  # a factor close to 1 takes millions of divisions: compute all but the last ones at once
        # In two halves, since the whole factor may be smaller than every float64.
        half = math.exp(-(falls - _MOST_FALLS) * factor / 2.0)
        scale *= half
        scale *= half
    while scale / settings["growth_factor"] > stop:
        scale /= settings["growth_factor"]
    return scale


def _window(settings: Settings, config: Mapping[str, Any]) -> Meaning:
    """Compute the window from the batch size if the command line leaves it out, as fairseq does."""
    if config.get("fp16_scale_window") is None:
        names = ("distributed_world_size", "model_parallel_size", "update_freq")
        world, parallel, frequency = (_size(name, config.get(name, 1)) for name in names)
        settings = {**settings, "growth_interval": int(2**14 / max(world // parallel, 1) / frequency)}
        if settings["growth_interval"] < 1:
            raise NoCounterpartError(
                f"2**14 / distributed_world_size={world} / update_freq={frequency} leaves no window; "
                "pass fp16_scale_window"
            )
    return _floor(settings, config)


def _size(name: str, value: Any) -> int:
    """Return a factor of the batch size; fairseq refuses to compute the window from a list."""
    if isinstance(value, list | tuple | str) or read.real(value) < 1:
        raise NoCounterpartError(f"{name}={shown(value)} does not say the window; pass fp16_scale_window")
    return read.whole(value)


_STOP_AT = Reading(
    "the last scale above it is `min_scale`, unless `threshold` is above it",
    lambda value: Meaning({"stop_at": max(read.real(value), 0.0)}),
    lambda _: 0.0,
)

_RULE: Settings = {"kind": "tolerant", "max_scale": UNBOUNDED["max_scale"]}

FAIRSEQ = Tool(
    name="fairseq",
    title="fairseq's `DynamicLossScaler`",
    version="fairseq of September 2025, 0.12.2",
    forms=(
        Form(
            "constructor",
            (
                key("init_scale", read.INIT_SCALE, 2.0**15),
                key("scale_factor", read.FACTOR, 2.0),
                key("scale_window", read.INTERVAL_MODULO, 2000),
                key("tolerance", read.TOLERANCE, 0.0),
                key("threshold", read.FLOOR, None),
                key("min_loss_scale", _STOP_AT, 1e-4),
            ),
            _RULE,
            adjust=_floor,
        ),
        Form(
            "command line",
            (
                key("fp16_init_scale", read.INIT_SCALE, 2**7),
                key("fp16_scale_window", read.INTERVAL_MODULO, 2**14, none_is_default=True),
                key("fp16_scale_tolerance", read.TOLERANCE, 0.0),
                key("threshold_loss_scale", read.FLOOR, None),
                key("min_loss_scale", _STOP_AT, 1e-4),
            ),
            {**_RULE, **HALVES},
            ignored=("fp16", "memory_efficient_fp16", "distributed_world_size", "model_parallel_size", "update_freq"),
            adjust=_window,
        ),
    ),
    saved=(
        Saved(
            scale=("loss_scale",),
            counters={
                "growth_tracker": since_overflow("_iter", "_last_overflow_iter", optional=True),
                "steps_since_change": since_change("_iter", "_last_rescale_iter", optional=True),
                "overflows_since_backoff": count("_overflows_since_rescale", optional=True),
            },
        ),
    ),
)

TOOLS = (FAIRSEQ,)
