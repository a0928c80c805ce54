"""ColossalAI."""

from lossscale.dialects import _readings as read
from lossscale.dialects._counters import count, used
from lossscale.dialects._record import Form, Saved, Tool, key

# HYSTERESIS_REACHED, since the scaler accepts 0 and compares with >=, so that 0 acts as 1:
# https://github.com/hpcaitech/ColossalAI/blob/42d7b299cf96/colossalai/amp/naive_amp/grad_scaler/dynamic_grad_scaler.py
COLOSSALAI = Tool(
    name="colossalai",
    title="ColossalAI's `DynamicGradScaler`",
    version="ColossalAI 0.5, main of April 2026",
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
                # The state dict leaves both counts out; only vars(scaler) has them.
                "growth_tracker": count("_growth_step", optional=True, equal=True),
                "hysteresis_tracker": used("_hysteresis_step", optional=True),
            },
        ),
    ),
)

TOOLS = (COLOSSALAI,)
