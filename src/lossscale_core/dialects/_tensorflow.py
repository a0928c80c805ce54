"""The TensorFlow world: Keras, `tf.compat.v1` and `tf.contrib`."""

from collections.abc import Mapping
from typing import Any

from lossscale_core.dialects import _readings as read
from lossscale_core.dialects._counters import count, used
from lossscale_core.dialects._readings import FLOOR_OF_ONE, UNBOUNDED
from lossscale_core.dialects._record import Difference, Form, Meaning, NoCounterpartError, Peer, Saved, Settings, key

_FIXED_IS_NOT_CHECKED = Difference(
    "A fixed scale is never checked: infinite gradients are applied.",
    "`FixedScaling` skips them; a warning says so.",
)
_FIXED_BUG = "applies infinite gradients under a fixed scale; FixedScaling skips the steps that overflow"
_RAISED_TO_ONE = Difference(
    "An overflow *raises* a scale below 1 to 1.",
    "An overflow never raises a scale, so a start below 1 is refused.",
)
_CEILING = Difference(
    "Growth beyond the largest float32 number is left out; above 2**126 unscaled gradients flush to 0.",
    "The scale stops at 2**126, where its reciprocal is still a normal float32 number.",
)
_STEPS_ON_SKIP = Difference(
    "`iterations` advances on a skipped step too (TensorFlow 2.3 and later).",
    "A skipped step changes nothing; the state counts `steps` and `skipped_steps`.",
)
_KERAS_SAVED = Saved(
    scale=("current_loss_scale", "loss_scale"),
    counters={"growth_tracker": count("good_steps dynamic_counter")},
)
_DYNAMIC_LOSS_SCALE = (
    key("initial_loss_scale initial", read.INIT_SCALE, 2.0**15),
    key("increment_period growth", read.INTERVAL_REACHED, 2000),
    key("multiplier", read.FACTOR, 2.0),
)


def _loss_scale_object(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what a serialized LossScale inside `loss_scale` holds, as `get_config` writes it."""
    inner = config.get("loss_scale", config)
    if isinstance(inner, Mapping) and isinstance(inner.get("config"), Mapping):
        return {**{name: value for name, value in config.items() if name == "optimizer"}, **inner["config"]}
    return config


_LOSS_SCALE_FORMS = (
    Form("`DynamicLossScale`", _DYNAMIC_LOSS_SCALE, FLOOR_OF_ONE, ignored=("optimizer",)),
    Form("`FixedLossScale`", (key("loss_scale_value", read.FIXED),), {"kind": "fixed"}, ignored=("optimizer",)),
    Form(
        "the wrapper's `loss_scale`",
        (*_DYNAMIC_LOSS_SCALE, key("loss_scale", read.fixed_unless("dynamic"), "dynamic")),
        FLOOR_OF_ONE,
        ignored=("optimizer", "opt"),
    ),
)


def _keras_fixed(settings: Settings, config: Mapping[str, Any]) -> Meaning:
    if settings["kind"] == "fixed":
        if config.get("initial_scale", config.get("initial")) is None:
            raise NoCounterpartError("dynamic=False needs initial_scale")
        if config.get("dynamic_growth_steps") is not None:
            raise NoCounterpartError("dynamic_growth_steps goes with dynamic=True")
    return Meaning(settings)


KERAS = Peer(
    name="keras",
    title="`tf.keras.mixed_precision.LossScaleOptimizer`",
    version="TensorFlow 2.4 to 2.15, and tf_keras",
    rule="Doubles on the 2000th finite step in a row, halves on every overflow down to 1.",
    forms=(
        Form(
            "constructor or `get_config`",
            (
                key("initial_scale initial", read.INIT_SCALE, 2.0**15, none_is_default=True),
                key("dynamic_growth_steps growth", read.INTERVAL_REACHED, 2000, none_is_default=True),
                key("multiplier", read.ONLY_TWO, 2.0),
                key("dynamic", read.DYNAMIC, True),
            ),
            {**FLOOR_OF_ONE, "growth_factor": 2.0, "backoff_factor": 0.5},
            ignored=("inner_optimizer", "name"),
            adjust=_keras_fixed,
        ),
    ),
    saved=(_KERAS_SAVED,),
    differences=(_FIXED_IS_NOT_CHECKED, _RAISED_TO_ONE, _STEPS_ON_SKIP, _CEILING),
    fixed_bug=_FIXED_BUG,
)

KERAS_EXPERIMENTAL = Peer(
    name="keras-experimental",
    title="`tf.keras.mixed_precision.experimental.LossScaleOptimizer`",
    version="TensorFlow 2.1 to 2.3",
    rule=KERAS.rule,
    forms=_LOSS_SCALE_FORMS,
    saved=(_KERAS_SAVED,),
    differences=(_FIXED_IS_NOT_CHECKED, _RAISED_TO_ONE, _STEPS_ON_SKIP, _CEILING),
    fixed_bug=_FIXED_BUG,
    unwrap=_loss_scale_object,
)

# Keras 3.0 to 3.11 write the arguments of every optimizer into the wrapper's config too, where they do nothing.
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

KERAS_3 = Peer(
    name="keras3",
    title="`keras.optimizers.LossScaleOptimizer`",
    version="Keras 3.15",
    rule="Doubles on the 2000th finite step in a row, halves on every overflow; no bounds.",
    forms=(
        Form(
            "constructor or `get_config`",
            (
                key("initial_scale", read.INIT_SCALE, 2.0**15),
                key("dynamic_growth_steps", read.INTERVAL_EQUAL, 2000),
                key("dynamic", read.ONLY_TRUE, True),
            ),
            {**UNBOUNDED, "growth_factor": 2.0, "backoff_factor": 0.5},
            ignored=("inner_optimizer", "name", *_KERAS_3_BASE),
        ),
    ),
    saved=(Saved(scale=("dynamic_scale",), counters={"growth_tracker": count("step_counter", equal=True)}),),
    differences=(
        Difference(
            "No bounds: the scale reaches 0 and divides by it, or infinity and stays there.",
            "It stays between 2**-126 and 2**126.",
        ),
        Difference(
            "Growth is tested with `==`: `dynamic_growth_steps` lowered below the count, or below 1, stops it.",
            "Growth is tested with `>=`; a value that never grows there never grows here, with a warning.",
        ),
        Difference(
            "Under `MirroredStrategy` it looks at replica 0 alone, before the all-reduce.",
            "Every replica is asked before anyone decides.",
        ),
        Difference("No fixed scale: `dynamic=False` is refused.", "`FixedScaling`."),
    ),
)

TF_V1 = Peer(
    name="tf-v1",
    title="`tf.compat.v1.mixed_precision`",
    version="TensorFlow 1.14 to 2.21",
    rule=KERAS.rule,
    forms=_LOSS_SCALE_FORMS,
    saved=(_KERAS_SAVED,),
    differences=(_FIXED_IS_NOT_CHECKED, _RAISED_TO_ONE, _CEILING),
    fixed_bug=_FIXED_BUG,
    unwrap=_loss_scale_object,
)

TF_CONTRIB = Peer(
    name="tf-contrib",
    title="`tf.contrib.mixed_precision`",
    version="TensorFlow 1.15",
    rule="Doubles on the N-th finite step in a row, falls by 0.8 on every second overflow, in a row or not, down to 1.",
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
    differences=(
        Difference(
            "Its documentation says that a fall below 1 is left out. The scale becomes 1, from below too.",
            "It stops at 1; an overflow never raises a scale, so a start below 1 is refused.",
        ),
        _CEILING,
    ),
)

PEERS = (KERAS, KERAS_EXPERIMENTAL, KERAS_3, TF_V1, TF_CONTRIB)
