"""The PyTorch world: torch, apex, DeepSpeed, Megatron-LM, fairseq, ColossalAI and Accelerate."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from lossscale_core._words import shown
from lossscale_core.dialects import _readings as read
from lossscale_core.dialects._counters import count, left, left_to_one, since_change, since_overflow, used
from lossscale_core.dialects._readings import UNBOUNDED
from lossscale_core.dialects._record import (
    Difference,
    Form,
    Meaning,
    NoCounterpartError,
    Peer,
    Reading,
    Saved,
    Settings,
    key,
)

_NO_FLOOR = Difference(
    "The scale has no floor: under persistent overflow it reaches 0, and the parameters become NaN.",
    "It stops at 2**-126, where its reciprocal is still a normal float32 number.",
)
_TO_INFINITY = Difference(
    "The scale has no ceiling: it grows to infinity and stays there.",
    "It stops at 2**126, where its reciprocal is still a normal float32 number.",
)
_RAISED_TO_FLOOR = Difference(
    "A floor acts on overflow only: a scale that starts below it is *raised* by the first overflow.",
    "An overflow never raises a scale, so a start below the floor is refused.",
)
_HALF_STEPS = Difference(
    "The scale is updated before the gradients are unscaled: on the step that makes it grow they are divided by the "
    "new scale, and come out too small by the growth factor.",
    "What multiplied the loss divides its gradients.",
)
_PAST_THE_INTERVAL = Difference(
    "Growth is tested with `==`: an interval that is lowered below the present count, below 1 or fractional stops it.",
    "Growth is tested with `>=`, so lowering works; an interval that never grows there is translated to one that never "
    "grows here, with a warning.",
)
_DISABLED = Difference(
    "A disabled scaler applies infinite gradients.",
    "`NoScaling()` keeps the scale at 1 and still skips them; a warning says so.",
)
_ITERATIONS = Saved(
    scale=("cur_scale",),
    counters={
        "growth_tracker": since_overflow("cur_iter", "last_overflow_iter"),
        "hysteresis_tracker": left_to_one("cur_hysteresis"),
    },
)

_STATIC_SCALER = Form("the static `LossScaler`", (key("scale", read.FIXED, 1.0),), {"kind": "fixed"}, only_read=True)
_STATIC_NOT_CHECKED = Difference(
    "The static `LossScaler` never sees an overflow: infinite gradients are applied.",
    "`FixedScaling` skips them; a warning says so.",
)
_FIXED_BUG = "applies infinite gradients under a fixed scale; FixedScaling skips the steps that overflow"

_TORCH_KEYS = (
    key("init_scale scale", read.INIT_SCALE, 65536.0),
    key("growth_factor", read.GROWTH_FACTOR, 2.0),
    key("backoff_factor", read.BACKOFF_FACTOR, 0.5),
    key("growth_interval", read.INTERVAL_EQUAL, 2000),
    key("enabled", read.ENABLED, True),
)
_TORCH_SAVED = Saved(scale=("scale",), counters={"growth_tracker": count("_growth_tracker", equal=True)})

TORCH = Peer(
    name="torch",
    title="`torch.amp.GradScaler`",
    version="PyTorch 2.13",
    rule="Doubles on the 2000th finite step in a row, halves on every overflow; no bounds.",
    forms=(Form("constructor or state dict", _TORCH_KEYS, UNBOUNDED, ignored=("device", "_growth_tracker")),),
    saved=(_TORCH_SAVED,),
    differences=(_NO_FLOOR, _PAST_THE_INTERVAL, _DISABLED),
)

TORCH_SHARDED = dataclasses.replace(
    TORCH,
    name="torch-sharded",
    title="`torch.distributed.fsdp.ShardedGradScaler`",
    forms=(
        Form(
            "constructor or state dict",
            _TORCH_KEYS,
            UNBOUNDED,
            ignored=("device", "process_group", "_growth_tracker"),
        ),
    ),
    differences=(
        _NO_FLOOR,
        _TO_INFINITY,
        _PAST_THE_INTERVAL,
        _DISABLED,
        Difference(
            "On a CPU it multiplies in float32 where torch's own scaler rounds a float64 product.",
            "float32; the same for powers of two, and within an ulp otherwise.",
        ),
    ),
)

ACCELERATE = dataclasses.replace(
    TORCH,
    name="accelerate",
    title="`accelerate.GradScalerKwargs`",
    version="Accelerate 1.15",
    forms=(Form("`GradScalerKwargs`, or the state dict in `scaler.pt`", _TORCH_KEYS, UNBOUNDED, ("_growth_tracker",)),),
    differences=(
        *TORCH.differences,
        Difference(
            "`update()` runs once for each optimizer: with two of them the count moves by two a step.",
            "A step is one update, however many optimizers took part.",
        ),
    ),
)


def _apex_start(settings: Settings, config: Mapping[str, Any]) -> Meaning:
    if config.get("opt_level") in ("O0", "O3") and config.get("loss_scale") is None:
        return Meaning({"kind": "fixed", "init_scale": 1.0})
    if settings["kind"] != "dynamic":
        return Meaning(settings)
    return Meaning({**settings, "init_scale": min(settings["init_scale"], settings["max_scale"])})


APEX = Peer(
    name="apex",
    title="`apex.amp`",
    version="apex 25.05, the last with `apex.amp`",
    rule="Doubles on the 2000th finite step in a row up to 2**24, halves on every overflow.",
    forms=(
        Form(
            "`amp.initialize` or `apex.amp.scaler.LossScaler`",
            (
                key("init_scale", read.INIT_SCALE, 65536.0),
                key("scale_factor", read.IGNORED_FACTOR, 2.0),
                key("scale_window", read.APEX_INTERVAL, 2000),
                key("min_loss_scale", read.FLOOR, None),
                key("max_loss_scale", read.MAX_SCALE, 2.0**24),
                key("loss_scale", read.fixed_unless("dynamic", None), "dynamic"),
                key("enabled", read.ENABLED, True),
            ),
            {"growth_factor": 2.0, "backoff_factor": 0.5},
            ignored=(
                *("opt_level", "num_losses", "verbosity", "cast_model_type", "patch_torch_functions"),
                *("keep_batchnorm_fp32", "master_weights", "cast_model_outputs", "loss_scaler*"),
            ),
            adjust=_apex_start,
        ),
    ),
    saved=(Saved(scale=("loss_scale",), counters={"growth_tracker": count("unskipped", equal=True)}),),
    differences=(
        Difference(
            "A fixed `loss_scale` is never checked: infinite gradients are applied.",
            "`FixedScaling` skips them; a warning says so.",
        ),
        Difference(
            "`scale_factor` is accepted and ignored.",
            "So it is here, with a warning.",
        ),
        _NO_FLOOR,
        _RAISED_TO_FLOOR,
        Difference(
            "Each of `num_losses` has a scaler of its own, saved as `loss_scaler0`, `loss_scaler1`, …",
            "One state is one scaler: hand `state_from_peer` one of them where there are several.",
        ),
    ),
    fixed_bug=_FIXED_BUG,
    within="loss_scaler*",
)

# apex's scaler of old, of which Megatron-LM's first and DeepSpeed's are copies with a shift.
_WINDOW_KEYS = (
    key("init_scale", read.INIT_SCALE, 2.0**32),
    key("scale_factor", read.FACTOR, 2.0),
    key("scale_window", read.INTERVAL_MODULO, 1000),
)
_SHIFT_KEYS = (
    *_WINDOW_KEYS,
    key("min_scale", read.MIN_SCALE, 1.0),
    key("delayed_shift", read.HYSTERESIS_EQUAL, 1),
    key("consecutive_hysteresis", read.REFILL_ON_FINITE, False),
)

APEX_FP16_UTILS = Peer(
    name="apex-fp16-utils",
    title="`apex.fp16_utils.DynamicLossScaler`",
    version="apex 25.05",
    rule="Doubles on the 1000th finite step in a row, halves on every overflow down to 1.",
    forms=(
        Form(
            "constructor",
            _WINDOW_KEYS,
            read.FLOOR_OF_ONE,
        ),
        _STATIC_SCALER,
    ),
    saved=(dataclasses.replace(_ITERATIONS, counters={"growth_tracker": _ITERATIONS.counters["growth_tracker"]}),),
    differences=(
        _RAISED_TO_FLOOR,
        _TO_INFINITY,
        Difference(
            "`FP16_Optimizer` uses the scaler of `apex.amp` instead.",
            "Convert its `dynamic_loss_args` from `apex`.",
        ),
        _STATIC_NOT_CHECKED,
    ),
    fixed_bug=_FIXED_BUG,
)

APEX_HYSTERESIS = Peer(
    name="apex-hysteresis",
    title="`amp_C.update_scale_hysteresis`",
    version="apex 25.05; NeMo's `GradScaler` is built on it",
    rule="torch's rule, but the scale falls only on the `hysteresis`-th overflow in a row and on each after it.",
    forms=(
        Form(
            "arguments",
            (*_TORCH_KEYS, key("hysteresis", read.HYSTERESIS_REACHED, 1)),
            {**UNBOUNDED, "refill_on_finite": True, "refill_on_backoff": False},
            ignored=("device", "_growth_tracker", "_hysteresis_tracker"),
        ),
    ),
    saved=(
        Saved(
            scale=("scale",),
            counters={
                "growth_tracker": count("_growth_tracker", equal=True),
                "hysteresis_tracker": left("_hysteresis_tracker", optional=True),
            },
            title="in NeMo's state dict",
        ),
        Saved(
            scale=("current_scale",),
            counters={
                "growth_tracker": count("growth_tracker", equal=True),
                "hysteresis_tracker": left("hysteresis_tracker"),
            },
            title="among the kernel's arguments",
        ),
    ),
    differences=(_NO_FLOOR, _PAST_THE_INTERVAL, _DISABLED),
)

_DEEPSPEED_RULE = {"cooldown": 1, "refill_on_backoff": False, "max_scale": UNBOUNDED["max_scale"]}
_HALVES = {"growth_factor": 2.0, "backoff_factor": 0.5}
_WITHOUT_ZERO = (
    "is ignored where ZeRO is off, as in this config: there every overflow lowers the scale, here the setting counts; "
    "set it to 1 for what this config did"
)

_BLOCK = ("enabled", "loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale")
_WHOLE_JSON = (
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"),
    *("zero_optimization", "bf16", "amp", "optimizer", "scheduler", "steps_per_print", "zero_allow_untested_optimizer"),
)


def _deepspeed_block(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the block of a whole JSON, with what it says of ZeRO; `"auto"` stands for a default there."""
    if not config.keys().isdisjoint(_WHOLE_JSON) and config.keys().isdisjoint(("fp16", *_BLOCK)):
        raise NoCounterpartError(
            "this config has no fp16 block, and DeepSpeed scales no loss without it; use NoScaling()"
        )
    if "fp16" in config and not isinstance(config["fp16"], Mapping):
        raise NoCounterpartError(f"fp16={shown(config['fp16'])} must be a block of keys")
    if "fp16" in config:
        config = {**config["fp16"], "zero_optimization": config.get("zero_optimization", {})}
    elif isinstance(config.get("dynamic_loss_args"), Mapping):
        config = {"dynamic_loss_scale": True, **config, **config["dynamic_loss_args"]}
        del config["dynamic_loss_args"]
    return {name: value for name, value in config.items() if not (isinstance(value, str) and value == "auto")}


def _deepspeed_zero(settings: Settings, config: Mapping[str, Any]) -> Meaning:
    zero = config.get("zero_optimization")
    is_off = isinstance(zero, Mapping) and not zero.get("stage", 0)
    tolerates = settings["kind"] == "dynamic" and settings["hysteresis"] > 1
    return Meaning(settings, f"hysteresis={settings['hysteresis']} {_WITHOUT_ZERO}" if is_off and tolerates else "")


def _deepspeed_optimizer(settings: Settings, config: Mapping[str, Any]) -> Meaning:
    if settings["kind"] == "fixed":
        return Meaning({"kind": "fixed", "init_scale": settings["static_loss_scale"]})
    shift = read.HYSTERESIS_EQUAL.read(config.get("delayed_shift", 1)).settings["hysteresis"]
    return Meaning(settings, f"delayed_shift={shown(config['delayed_shift'])} {_WITHOUT_SHIFT}" if shift > 1 else "")


_WITHOUT_SHIFT = (
    "is ignored by the FP16_Optimizer without ZeRO, and so it is here; ZeRO's optimizers take the same keywords and "
    "count it: for theirs, convert dynamic_loss_args alone"
)
_STATIC_SCALE = dataclasses.replace(
    read.number("static_loss_scale"), text="the scale where `dynamic_loss_scale` is false"
)

DEEPSPEED = Peer(
    name="deepspeed",
    title="DeepSpeed's `fp16` block",
    version="DeepSpeed 0.19.8, ZeRO stages 1 to 3",
    rule="Doubles on the 1001st finite step in a row and then every 1000th, halves from the second overflow since "
    "growth, down to 1.",
    forms=(
        Form(
            "the `fp16` block of its JSON, or the whole JSON",
            (
                key("initial_scale_power", read.POWER_OF_TWO, 16),
                key("loss_scale_window", read.INTERVAL_MODULO, 1000),
                key("hysteresis", read.HYSTERESIS_EQUAL, 2),
                key("consecutive_hysteresis", read.REFILL_ON_FINITE, False),
                key("min_loss_scale", read.WHOLE_FLOOR, 1),
                key("loss_scale", read.fixed_unless(0), 0),
                key("enabled", read.ENABLED_IN_WRITING, True),
            ),
            {**_HALVES, **_DEEPSPEED_RULE},
            ignored=("auto_cast", "fp16_master_weights_and_grads", "zero_optimization"),
            adjust=_deepspeed_zero,
        ),
        Form(
            "`DynamicLossScaler`",
            _SHIFT_KEYS,
            _DEEPSPEED_RULE,
            ignored=("raise_error_at_min_scale", "dtype"),
            only_read=True,
        ),
        Form(
            "`FP16_Optimizer` without ZeRO, which ignores hysteresis",
            (
                key("init_scale initial_dynamic_scale", read.INIT_SCALE, 2.0**32),
                key("scale_window", read.INTERVAL_MODULO, 1000),
                key("min_scale", read.MIN_SCALE, 1.0),
                key("static_loss_scale", _STATIC_SCALE, 1.0),
                key("dynamic_loss_scale", read.DYNAMIC, False),
            ),
            {**_HALVES, **_DEEPSPEED_RULE, "hysteresis": 1},
            ignored=("delayed_shift", "consecutive_hysteresis", "low_precision_dtype", "clip_grad", "verbose", "mpu"),
            only_read=True,
            adjust=_deepspeed_optimizer,
        ),
        _STATIC_SCALER,
    ),
    saved=(_ITERATIONS, Saved(scale=("cur_scale",), title="in a checkpoint of a fixed scale")),
    differences=(
        _HALF_STEPS,
        Difference(
            "An overflow while the scale is at `min_loss_scale` ends the run with an exception (ZeRO).",
            "The scale stays at the floor, and `diagnose` says `stuck at min_scale`.",
        ),
        Difference(
            "Without ZeRO, `hysteresis` and `consecutive_hysteresis` are ignored.",
            "They count. Given a whole JSON without ZeRO, a warning says so.",
        ),
        Difference(
            "`FP16_Optimizer` ignores `delayed_shift`, and ZeRO's optimizers, which take the same keywords, count it.",
            "Ignored for these keywords, with a warning where it is above 1; `dynamic_loss_args` alone counts it.",
        ),
        Difference(
            "`hysteresis: 0` is accepted, and the scale never falls.",
            "So it is here, with a warning.",
        ),
        _RAISED_TO_FLOOR,
        _TO_INFINITY,
        Difference(
            "Before 0.17 ZeRO's scale first grew one step earlier.",
            "The present rule, which is `cooldown=1`.",
        ),
        Difference(
            "`enabled: false`, as a block without `enabled`, trains without checking gradients.",
            "A block that is handed over is meant, unless it says false: `NoScaling()` still skips; a warning says so.",
        ),
    ),
    within="loss_scaler",
    saved_form=1,
    unwrap=_deepspeed_block,
)

_MEGATRON_RULE = {"refill_on_finite": False, "refill_on_backoff": False, "max_scale": UNBOUNDED["max_scale"]}

MEGATRON = Peer(
    name="megatron",
    title="Megatron-LM's `DynamicGradScaler`",
    version="Megatron-LM of August 2026, Megatron Core 0.16",
    rule="Doubles on the 1000th finite step in a row, halves from the second overflow since growth, down to 1.",
    forms=(
        Form(
            "constructor, which takes the first of two names",
            (
                key("initial_scale initial_loss_scale", read.INIT_SCALE, 2.0**32),
                key("min_scale min_loss_scale", read.POSITIVE_MIN_SCALE, 1.0),
                key("growth_factor", read.GROWTH_FACTOR, 2.0),
                key("backoff_factor", read.BACKOFF_FACTOR, 0.5),
                key("growth_interval loss_scale_window", read.INTERVAL_EQUAL, 1000),
                key("hysteresis", read.HYSTERESIS, 2),
            ),
            _MEGATRON_RULE,
            ignored=("fp16", "bf16"),
        ),
        Form(
            "`OptimizerConfig` and command line",
            (
                key("initial_loss_scale", read.INIT_SCALE, 2.0**32),
                key("min_loss_scale", read.POSITIVE_MIN_SCALE, 1.0),
                key("loss_scale_window", read.INTERVAL_EQUAL, 1000),
                key("hysteresis", read.HYSTERESIS, 2),
                key("loss_scale", read.fixed_unless(None, 0), None),
            ),
            {**_HALVES, **_MEGATRON_RULE},
            ignored=("fp16", "bf16"),
        ),
    ),
    saved=(
        Saved(
            scale=("scale",),
            counters={
                "growth_tracker": count("growth_tracker", equal=True),
                "hysteresis_tracker": left("hysteresis_tracker"),
            },
        ),
    ),
    differences=(
        Difference(
            "Its documentation says that hysteresis counts overflows in a row. Finite steps do not restore it; only "
            "growth does.",
            "So it is here: `refill_on_finite=False`.",
        ),
        Difference(
            "`loss_scale_window` is a float, and growth is tested with `==`: under 1000.5 the scale never grows.",
            "So it is here, with a warning.",
        ),
        _TO_INFINITY,
    ),
    within="grad_scaler",
)

MEGATRON_V1 = Peer(
    name="megatron-v1",
    title="`megatron.fp16.loss_scaler.DynamicLossScaler`",
    version="Megatron-LM 1.0",
    rule="Doubles on the 1000th finite step in a row, halves on each overflow down to 1 but for `delayed_shift`.",
    forms=(
        Form(
            "constructor",
            _SHIFT_KEYS,
            {"refill_on_backoff": False, "max_scale": UNBOUNDED["max_scale"]},
        ),
        _STATIC_SCALER,
    ),
    saved=(_ITERATIONS,),
    differences=(
        Difference("`delayed_shift=0` is accepted, and the scale never falls.", "So it is here, with a warning."),
        _RAISED_TO_FLOOR,
        _TO_INFINITY,
        _STATIC_NOT_CHECKED,
    ),
    fixed_bug=_FIXED_BUG,
    within="loss_scaler",
)


_MOST_FALLS = 10_000


def _fairseq_floor(settings: Settings, _: Mapping[str, Any]) -> Meaning:
    """Stop the scale at `threshold`, or at the last value above `min_loss_scale`, where fairseq's run would end."""
    if settings["min_scale"] > settings["stop_at"]:  # the scale never falls to where the run ends
        return Meaning(settings)
    return Meaning({**settings, "min_scale": _last_above(settings["stop_at"], settings)})


def _last_above(stop: float, settings: Settings) -> float:
    """Return the last scale above `stop` that falling by the factor from the first scale passes."""
    scale = float(settings["init_scale"])
    if scale <= stop:
        raise NoCounterpartError("the first overflow ends the run where the scale starts at min_loss_scale or below")
    factor = math.log(settings["growth_factor"])
    falls = (math.log(scale) - math.log(max(stop, 2.0**-1000))) / factor
    if falls > _MOST_FALLS:  # a factor next to 1 takes millions of falls: leave out all but the last of them
        half = math.exp(-(falls - _MOST_FALLS) * factor / 2.0)
        scale *= half
        scale *= half
    while scale / settings["growth_factor"] > stop:
        scale /= settings["growth_factor"]
    return scale


def _fairseq_window(settings: Settings, config: Mapping[str, Any]) -> Meaning:
    """Derive the window of the command line from the size of a step, where it is left out."""
    if config.get("fp16_scale_window") is None:
        names = ("distributed_world_size", "model_parallel_size", "update_freq")
        world, parallel, frequency = (_size(name, config.get(name, 1)) for name in names)
        settings = {**settings, "growth_interval": int(2**14 / max(world // parallel, 1) / frequency)}
        if settings["growth_interval"] < 1:
            raise NoCounterpartError(
                f"2**14 / distributed_world_size={world} / update_freq={frequency} leaves no window; "
                "pass fp16_scale_window"
            )
    return _fairseq_floor(settings, config)


def _size(name: str, value: Any) -> int:
    """Return what a step is made of so many times; fairseq refuses to derive a window from a list of them."""
    if isinstance(value, list | tuple | str) or read.real(value) < 1:
        raise NoCounterpartError(f"{name}={shown(value)} does not say the window; pass fp16_scale_window")
    return read.whole(value)


_STOP_AT = Reading(
    "the last scale above it is `min_scale`, unless `threshold` is above it",
    lambda value: Meaning({"stop_at": max(read.real(value), 0.0)}),
    lambda _: 0.0,
)
_FAIRSEQ_RULE: Settings = {"kind": "tolerant", "max_scale": UNBOUNDED["max_scale"]}

FAIRSEQ = Peer(
    name="fairseq",
    title="fairseq's `DynamicLossScaler`",
    version="fairseq of September 2025, 0.12.2",
    rule="Doubles on the 2000th finite step in a row; halves where overflows reach the share `tolerance` of the steps "
    "since the last change.",
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
            _FAIRSEQ_RULE,
            adjust=_fairseq_floor,
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
            {**_FAIRSEQ_RULE, "growth_factor": 2.0, "backoff_factor": 0.5},
            ignored=("fp16", "memory_efficient_fp16", "distributed_world_size", "model_parallel_size", "update_freq"),
            adjust=_fairseq_window,
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
    differences=(
        Difference(
            "Where the scale would fall to `min_loss_scale` the run ends with `FloatingPointError`; never under a "
            "`threshold` above it.",
            "The scale stays at the last value above it, or at `threshold`, and `diagnose` says `stuck at min_scale`.",
        ),
        Difference(
            "A checkpoint holds the scale alone: a resumed run counts from 0.",
            "So does the restored state; a state saved here keeps its counters.",
        ),
        Difference(
            "A `threshold` above the scale raises it on overflow.", "An overflow never raises a scale: refused."
        ),
        Difference(
            "`scale_window` of the command line is 2**14 / ranks / update_freq.", "The same, from the same keys."
        ),
        _TO_INFINITY,
    ),
)

COLOSSALAI = Peer(
    name="colossalai",
    title="ColossalAI's `DynamicGradScaler`",
    version="ColossalAI 0.5, main of April 2026",
    rule="Doubles on the 1000th finite step in a row, halves from the second overflow since growth; no bounds.",
    forms=(
        Form(
            "constructor",
            (
                key("initial_scale", read.INIT_SCALE, 65536.0),
                key("growth_factor", read.GROWTH_FACTOR, 2.0),
                key("backoff_factor", read.BACKOFF_FACTOR, 0.5),
                key("growth_interval", read.INTERVAL_EQUAL, 1000),
                key("min_scale", read.FLOOR, None),
                key("max_scale", read.CEILING, None),
                key("hysteresis", read.HYSTERESIS_REACHED, 2),
            ),
            {"refill_on_finite": False, "refill_on_backoff": False},
            ignored=("verbose",),
        ),
    ),
    saved=(
        Saved(
            scale=("scale",),
            counters={
                "growth_tracker": count("_growth_step", optional=True, equal=True),
                "hysteresis_tracker": used("_hysteresis_step", optional=True),
            },
        ),
    ),
    differences=(
        _HALF_STEPS,
        Difference(
            "A checkpoint lacks both counters and the interval: a resumed run counts from 0.",
            "So does the restored state; a state saved here keeps its counters.",
        ),
        Difference(
            "Its plugins pass `min_scale=1`, `max_scale=2**32`.", "Pass what they pass; the class has no bounds."
        ),
        _NO_FLOOR,
    ),
)

PEERS = (
    *(TORCH, TORCH_SHARDED, ACCELERATE, APEX, APEX_FP16_UTILS, APEX_HYSTERESIS),
    *(DEEPSPEED, MEGATRON, MEGATRON_V1, FAIRSEQ, COLOSSALAI),
)
