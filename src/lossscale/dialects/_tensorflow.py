"""TensorFlow: `tf.compat.v1.mixed_precision` and `tf.contrib.mixed_precision`."""

from collections.abc import Mapping
from typing import Any

from lossscale.dialects import _readings as read
from lossscale.dialects._counters import count, used
from lossscale.dialects._readings import FIXED_BUG, FLOOR_OF_ONE
from lossscale.dialects._record import Form, Saved, Tool, key

SAVED = Saved(
    scale=("current_loss_scale", "loss_scale"),
    counters={"growth_tracker": count("good_steps dynamic_counter")},
)

_DYNAMIC_LOSS_SCALE = (
    key("initial_loss_scale initial", read.INIT_SCALE, 2.0**15),
    key("increment_period growth", read.INTERVAL_CUT, 2000),
    key("multiplier", read.FACTOR, 2.0),
)


def loss_scale_object(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config of a serialized LossScale in `loss_scale`, as `get_config` writes it."""
    inner = config.get("loss_scale", config)
    if isinstance(inner, Mapping) and isinstance(inner.get("config"), Mapping):
        return {**{name: value for name, value in config.items() if name == "optimizer"}, **inner["config"]}
    return config


# The floor of 1 is part of the rule and not a setting:
# https://github.com/tensorflow/tensorflow/blob/v2.21.0/tensorflow/python/training/experimental/loss_scale.py#L411
LOSS_SCALE_FORMS = (
    Form("`DynamicLossScale`", _DYNAMIC_LOSS_SCALE, FLOOR_OF_ONE, ignored=("optimizer",)),
    Form("`FixedLossScale`", (key("loss_scale_value", read.FIXED),), {"kind": "fixed"}, ignored=("optimizer",)),
    Form(
        "the wrapper's `loss_scale`",
        (*_DYNAMIC_LOSS_SCALE, key("loss_scale", read.fixed_unless("dynamic"), "dynamic")),
        FLOOR_OF_ONE,
        ignored=("optimizer", "opt"),
    ),
)

TF_V1 = Tool(
    name="tf-v1",
    title="`tf.compat.v1.mixed_precision`",
    version="TensorFlow 1.14 to 2.21",
    forms=LOSS_SCALE_FORMS,
    saved=(SAVED,),
    fixed_bug=FIXED_BUG,
    unwrap=loss_scale_object,
)

TF_CONTRIB = Tool(
    name="tf-contrib",
    title="`tf.contrib.mixed_precision`",
    version="TensorFlow 1.15",
    forms=(
        Form(
            "`ExponentialUpdateLossScaleManager`",
            (
                key("init_loss_scale", read.INIT_SCALE),
                key("incr_every_n_steps", read.INTERVAL_REACHED),
                key("decr_every_n_nan_or_inf", read.HYSTERESIS_REACHED, 2),
                key("incr_ratio", read.GROWTH_FACTOR, 2.0),
                key("decr_ratio", read.BACKOFF_FACTOR, 0.8),
            ),
            {**FLOOR_OF_ONE, "refill_on_finite": False, "refill_on_backoff": True},
        ),
        Form("`FixedLossScaleManager`", (key("loss_scale", read.FIXED),), {"kind": "fixed"}),
    ),
    saved=(
        Saved(
            scale=("loss_scale",),
            counters={"growth_tracker": count("good_steps"), "hysteresis_tracker": used("bad_steps")},
        ),
    ),
)

TOOLS = (TF_V1, TF_CONTRIB)
