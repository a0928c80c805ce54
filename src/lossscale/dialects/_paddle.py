"""PaddlePaddle, eager."""

from typing import Any

from lossscale.dialects import _readings as read
from lossscale.dialects._counters import count, used
from lossscale.dialects._readings import UNBOUNDED
from lossscale.dialects._record import Form, Saved, Settings, Tool, key

# A finite step and a backoff both set the count of overflows to 0:
# https://github.com/PaddlePaddle/Paddle/blob/20ffb9f43b99/paddle/phi/kernels/impl/amp_kernel_impl.h
_REFILLS = {"refill_on_finite": True, "refill_on_backoff": True}


def _form(title: str, settings: Settings, ignored: str, *defaults: Any) -> Form:
    scale, grows, falls, up, down = defaults
    keys = (
        key("init_loss_scaling", read.INIT_SCALE, scale),
        # The kernel compares both counts with ==, so that below 1 the scale never changes.
        key("incr_every_n_steps", read.INTERVAL_EQUAL, grows),
        key("decr_every_n_nan_or_inf", read.HYSTERESIS_EQUAL, falls),
        key("incr_ratio", read.GROWTH_FACTOR, up),
        key("decr_ratio", read.BACKOFF_FACTOR, down),
        key("use_dynamic_loss_scaling", read.DYNAMIC, True, none_is_default=True),
        key("enable", read.ENABLED, True),
    )
    return Form(title, keys, {**_REFILLS, **settings}, tuple(ignored.split()))


PADDLE = Tool(
    name="paddle",
    title="`paddle.amp.GradScaler`",
    version="PaddlePaddle 3.3, eager",
    forms=(_form("constructor or state dict", UNBOUNDED, "scale incr_count decr_count", 2.0**16, 2000, 1, 2.0, 0.5),),
    saved=(
        Saved(
            scale=("scale",),
            counters={"growth_tracker": count("incr_count", equal=True), "hysteresis_tracker": used("decr_count")},
        ),
    ),
)

TOOLS = (PADDLE,)
