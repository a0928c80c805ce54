"""Keras: Keras 3, and `tf.keras.mixed_precision`."""

from collections.abc import Mapping
from typing import Any

from lossscale.dialects import _readings as read
from lossscale.dialects._counters import count
from lossscale.dialects._readings import FIXED_BUG, FLOOR_OF_ONE, HALVES, UNBOUNDED
from lossscale.dialects._record import Form, Meaning, NoCounterpartError, Saved, Settings, Tool, key


def _fixed(settings: Settings, config: Mapping[str, Any]) -> Meaning:
    # Keras refuses both configs as well:
    # https://github.com/keras-team/tf-keras/blob/v2.21.0/tf_keras/src/mixed_precision/loss_scale_optimizer.py#L676
    if settings["kind"] == "fixed":
        if config.get("initial_scale", config.get("initial")) is None:
            raise NoCounterpartError("dynamic=False needs initial_scale; add it")
        if config.get("dynamic_growth_steps") is not None:
            raise NoCounterpartError("dynamic_growth_steps needs dynamic=True; leave it out")
    return Meaning(settings)


# INTERVAL_CUT, since Keras converts the interval by int(), and compares with >=:
# https://github.com/keras-team/tf-keras/blob/v2.21.0/tf_keras/src/mixed_precision/loss_scale_optimizer.py#L144
KERAS = Tool(
    name="keras",
    title="`tf.keras.mixed_precision.LossScaleOptimizer`",
    version="TensorFlow 2.4 to 2.15, and tf_keras",
    forms=(
        Form(
            "constructor or `get_config`",
            (
                key("initial_scale initial", read.INIT_SCALE, 2.0**15, none_is_default=True),
                key("dynamic_growth_steps growth", read.INTERVAL_CUT, 2000, none_is_default=True),
                key("multiplier", read.ONLY_TWO, 2.0),
                key("dynamic", read.DYNAMIC, True),
            ),
            {**FLOOR_OF_ONE, **HALVES},
            ignored=("inner_optimizer", "name"),
            adjust=_fixed,
        ),
    ),
    saved=(
        Saved(
            scale=("current_loss_scale", "loss_scale"),
            counters={"growth_tracker": count("good_steps dynamic_counter")},
        ),
    ),
    fixed_bug=FIXED_BUG,
)

# Keras 3.0 to 3.11 write the arguments of every optimizer into the wrapper's config too, where they have no effect.
_KERAS_3_BASE = (
    "weight_decay",
    "clipnorm",
    "clipvalue",
    "global_clipnorm",
    "use_ema",
    "ema_*",
    "loss_scale_factor",
    "gradient_accumulation_steps",
)

KERAS_3 = Tool(
    name="keras3",
    title="`keras.optimizers.LossScaleOptimizer`",
    version="Keras 3.15",
    forms=(
        Form(
            "constructor or `get_config`",
            (
                key("initial_scale", read.INIT_SCALE, 2.0**15),
                # Unlike tf.keras, Keras 3 compares with ==:
                # https://github.com/keras-team/keras/blob/v3.15.1/keras/src/optimizers/loss_scale_optimizer.py#L164
                key("dynamic_growth_steps", read.INTERVAL_EQUAL, 2000),
                key("dynamic", read.ONLY_TRUE, True),
            ),
            # Nor does it keep the floor of 1: an overflow halves the scale down to 0.
            {**UNBOUNDED, **HALVES},
            ignored=("inner_optimizer", "name", *_KERAS_3_BASE),
        ),
    ),
    saved=(Saved(scale=("dynamic_scale",), counters={"growth_tracker": count("step_counter", equal=True)}),),
)

TOOLS = (KERAS, KERAS_3)
