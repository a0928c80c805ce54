"""apex: `apex.amp`, and the keys and counters of its older scaler, which DeepSpeed copied."""

from collections.abc import Mapping
from typing import Any

from lossscale.dialects import _readings as read
from lossscale.dialects._counters import count, left_to_one, since_overflow
from lossscale.dialects._readings import FIXED_BUG, HALVES
from lossscale.dialects._record import Form, Meaning, Saved, Settings, Tool, key


def _start(settings: Settings, config: Mapping[str, Any]) -> Meaning:
    if config.get("opt_level") in ("O0", "O3") and config.get("loss_scale") is None:
        return Meaning({"kind": "fixed", "init_scale": 1.0})
    if settings["kind"] != "dynamic":
        return Meaning(settings)
    return Meaning({**settings, "init_scale": min(settings["init_scale"], settings["max_scale"])})


APEX = Tool(
    name="apex",
    title="`apex.amp`",
    version="apex 25.05, the last with `apex.amp`",
    forms=(
        Form(
            "`amp.initialize` or `apex.amp.scaler.LossScaler`",
            (
                key("init_scale", read.INIT_SCALE, 65536.0),
                # apex.amp takes this argument and never reads it; 2 and 1/2 are written out where the scale changes:
                # https://github.com/NVIDIA/apex/blob/b82c6bd7613f/apex/amp/scaler.py
                key("scale_factor", read.IGNORED_FACTOR, 2.0),
                key("scale_window", read.APEX_INTERVAL, 2000),
                # The floor is tested for truth there, so that 0 means none, as None does.
                key("min_loss_scale", read.FLOOR, None),
                key("max_loss_scale", read.MAX_SCALE, 2.0**24),
                key("loss_scale", read.fixed_unless("dynamic", None), "dynamic"),
                key("enabled", read.ENABLED, True),
            ),
            HALVES,
            ignored=(
                *("opt_level", "num_losses", "verbosity", "cast_model_type", "patch_torch_functions"),
                *("keep_batchnorm_fp32", "master_weights", "cast_model_outputs", "loss_scaler*"),
            ),
            adjust=_start,
        ),
    ),
    saved=(Saved(scale=("loss_scale",), counters={"growth_tracker": count("unskipped", equal=True)}),),
    fixed_bug=FIXED_BUG,
    within="loss_scaler*",
)

ITERATIONS = Saved(
    scale=("cur_scale",),
    counters={
        "growth_tracker": since_overflow("cur_iter", "last_overflow_iter"),
        "hysteresis_tracker": left_to_one("cur_hysteresis"),
    },
)

STATIC_SCALER = Form("the static `LossScaler`", (key("scale", read.FIXED, 1.0),), {"kind": "fixed"})

# The first scaler of Megatron-LM and DeepSpeed's are copies of this one with a delayed shift.
WINDOW_KEYS = (
    key("init_scale", read.INIT_SCALE, 2.0**32),
    key("scale_factor", read.FACTOR, 2.0),
    # The scale grows where the iterations since the last overflow are a multiple of the window; growth resets nothing:
    # https://github.com/NVIDIA/apex/blob/48343d94a068/apex/fp16_utils/loss_scaler.py
    key("scale_window", read.INTERVAL_MODULO, 1000),
)

TOOLS = (APEX,)
