"""Megatron-LM, and the keys of its first scaler, which DeepSpeed copied."""

from lossscale.dialects import _readings as read
from lossscale.dialects._apex import WINDOW_KEYS
from lossscale.dialects._counters import count, left
from lossscale.dialects._readings import HALVES, UNBOUNDED
from lossscale.dialects._record import Form, Saved, Tool, key

SHIFT_KEYS = (
    *WINDOW_KEYS,
    key("min_scale", read.MIN_SCALE, 1.0),
    key("delayed_shift", read.HYSTERESIS_EQUAL, 1),
    key("consecutive_hysteresis", read.REFILL_ON_FINITE, False),
)

# Hysteresis is described there as consecutive, but only growth restores the tracker. The scale has no ceiling:
# https://github.com/NVIDIA/Megatron-LM/blob/eedfe533a44e/megatron/core/optimizer/grad_scaler.py
_RULE = {"refill_on_finite": False, "refill_on_backoff": False, "max_scale": UNBOUNDED["max_scale"]}

MEGATRON = Tool(
    name="megatron",
    title="Megatron-LM's `DynamicGradScaler`",
    version="Megatron-LM of August 2026, Megatron Core 0.16",
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
            _RULE,
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
            {**HALVES, **_RULE},
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
    within="grad_scaler",
)

TOOLS = (MEGATRON,)
