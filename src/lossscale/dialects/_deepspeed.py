"""DeepSpeed."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from lossscale.dialects import _readings as read
from lossscale.dialects._apex import ITERATIONS, STATIC_SCALER
from lossscale.dialects._megatron import SHIFT_KEYS
from lossscale.dialects._readings import HALVES, UNBOUNDED
from lossscale.dialects._record import Form, Meaning, NoCounterpartError, Saved, Settings, Tool, key
from lossscale_core.adapters import shown

# The first finite step after an overflow does not count: stable_interval = cur_iter - last_overflow_iter - 1.
# Backing off leaves cur_hysteresis at 1, so that each further overflow backs off, too:
# https://github.com/deepspeedai/DeepSpeed/blob/68ee9f83ae9a/deepspeed/runtime/fp16/loss_scaler.py
_RULE = {"cooldown": 1, "refill_on_backoff": False, "max_scale": UNBOUNDED["max_scale"]}

_WITHOUT_ZERO = (
    "is ignored by DeepSpeed without ZeRO, as in this config: every overflow lowers its scale, but this library "
    "applies the setting; set it to 1 to keep DeepSpeed's behaviour"
)

_WITHOUT_SHIFT = (
    "is ignored by the FP16_Optimizer without ZeRO, and by this conversion; ZeRO's optimizers take the same keywords "
    "and apply it: for them, convert dynamic_loss_args alone"
)

_BLOCK = ("enabled", "loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale")

_WHOLE_JSON = (
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"),
    *("zero_optimization", "bf16", "amp", "optimizer", "scheduler", "steps_per_print", "zero_allow_untested_optimizer"),
)


def _block(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fp16 block of a JSON with its ZeRO settings, without values of `"auto"`, which mean the default."""
    if not config.keys().isdisjoint(_WHOLE_JSON) and config.keys().isdisjoint(("fp16", *_BLOCK)):
        raise NoCounterpartError(
            "this config has no fp16 block, without which DeepSpeed does not scale the loss; use NoScaling()"
        )
    if "fp16" in config and not isinstance(config["fp16"], Mapping):
        raise NoCounterpartError(f"fp16={shown(config['fp16'])} must be a block of keys")
    if "fp16" in config:
        config = {**config["fp16"], "zero_optimization": config.get("zero_optimization", {})}
    elif isinstance(config.get("dynamic_loss_args"), Mapping):
        config = {"dynamic_loss_scale": True, **config, **config["dynamic_loss_args"]}
        del config["dynamic_loss_args"]
    return {name: value for name, value in config.items() if not (isinstance(value, str) and value == "auto")}


def _without_zero(settings: Settings, config: Mapping[str, Any]) -> Meaning:
    zero = config.get("zero_optimization")
    is_off = isinstance(zero, Mapping) and not zero.get("stage", 0)
    tolerates = settings["kind"] == "dynamic" and settings["hysteresis"] > 1
    return Meaning(settings, f"hysteresis={settings['hysteresis']} {_WITHOUT_ZERO}" if is_off and tolerates else "")


def _of_optimizer(settings: Settings, config: Mapping[str, Any]) -> Meaning:
    if settings["kind"] == "fixed":
        return Meaning({"kind": "fixed", "init_scale": settings["static_loss_scale"]})
    shift = read.HYSTERESIS_EQUAL.read(config.get("delayed_shift", 1)).settings["hysteresis"]
    return Meaning(settings, f"delayed_shift={shown(config['delayed_shift'])} {_WITHOUT_SHIFT}" if shift > 1 else "")


_STATIC_SCALE = dataclasses.replace(
    read.number("static_loss_scale"), text="the scale where `dynamic_loss_scale` is false"
)

DEEPSPEED = Tool(
    name="deepspeed",
    title="DeepSpeed's `fp16` block",
    version="DeepSpeed 0.19.8, ZeRO stages 1 to 3",
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
                key("enabled", read.ENABLED, True),
            ),
            {**HALVES, **_RULE},
            ignored=("auto_cast", "fp16_master_weights_and_grads", "zero_optimization"),
            adjust=_without_zero,
        ),
        Form(
            "`DynamicLossScaler`",
            SHIFT_KEYS,
            _RULE,
            ignored=("raise_error_at_min_scale", "dtype"),
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
            {**HALVES, **_RULE, "hysteresis": 1},
            ignored=("delayed_shift", "consecutive_hysteresis", "low_precision_dtype", "clip_grad", "verbose", "mpu"),
            adjust=_of_optimizer,
        ),
        STATIC_SCALER,
    ),
    saved=(ITERATIONS, Saved(scale=("cur_scale",), title="in a checkpoint of a fixed scale")),
    within="loss_scaler",
    saved_form=1,
    unwrap=_block,
)

TOOLS = (DEEPSPEED,)
