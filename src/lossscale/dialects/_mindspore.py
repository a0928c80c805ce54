"""MindSpore."""

from lossscale.dialects import _readings as read
from lossscale.dialects._counters import count, since_change, since_overflow
from lossscale.dialects._readings import FLOOR_OF_ONE
from lossscale.dialects._record import Form, Meaning, Saved, Tool, key

_FIXED_MANAGER = Form(
    "`FixedLossScaleManager`",
    (key("loss_scale", read.FIXED, 128.0),),
    {"kind": "fixed"},
    ignored=("drop_overflow_update",),
    adjust=lambda settings, config: Meaning(
        settings,
        ""
        if config.get("drop_overflow_update", True)
        else "drop_overflow_update=False applies infinite gradients; FixedScaling skips the steps that overflow",
    ),
)

_KEYS = (key("scale_factor", read.FACTOR, 2), key("scale_window", read.INTERVAL_MODULO, 2000))

MINDSPORE = Tool(
    name="mindspore",
    title="MindSpore's `DynamicLossScaleManager`",
    version="MindSpore 2.10",
    forms=(
        Form(
            "`DynamicLossScaleManager`",
            (key("init_loss_scale init", read.INIT_SCALE, 2.0**24), *_KEYS),
            # The manager raises RuntimeError on the 1001st overflow in a row.
            {**FLOOR_OF_ONE, "max_overflow_streak": 1001},
        ),
        Form(
            "`DynamicLossScaleUpdateCell` or `amp.DynamicLossScaler`",
            (key("loss_scale_value scale_value", read.INIT_SCALE, 2.0**24), *_KEYS),
            FLOOR_OF_ONE,
        ),
        _FIXED_MANAGER,
    ),
    saved=(
        Saved(
            scale=("loss_scale",),
            counters={
                "growth_tracker": since_overflow("cur_iter", "last_overflow_iter"),
                "overflow_streak": count("bad_step", optional=True),
            },
            title="`vars` of the manager",
        ),
        Saved(
            scale=("scale_sense",),
            counters={"growth_tracker": since_change("current_iterator_step", "last_overflow_iterator_step")},
            title="parameters of `DynamicLossScaleUpdateCell`",
        ),
        Saved(
            scale=("scale_value",),
            counters={"growth_tracker": count("counter", equal=True)},
            title="parameters of `amp.DynamicLossScaler`",
        ),
    ),
)

TOOLS = (MINDSPORE,)
