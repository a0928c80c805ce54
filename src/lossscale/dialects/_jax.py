"""jmp and flax, for JAX."""

from collections.abc import Mapping
from typing import Any

from lossscale.dialects import _readings as read
from lossscale.dialects._counters import count
from lossscale.dialects._readings import UNBOUNDED
from lossscale.dialects._record import Form, Meaning, Saved, Settings, Tool, key


def _under_jit(settings: Settings, config: Mapping[str, Any]) -> Meaning:
    # tree_flatten leaves min_loss_scale out, so that the default of 1 comes back with each result of a jitted function:
    # https://github.com/google-deepmind/jmp/blob/9c1cdbbf78da/jmp/_src/loss_scale.py#L138
    if config.get("jit") and settings["min_scale"] != 1.0:
        bug = "min_loss_scale is lost under jit, and becomes 1 there and here; leave jit out to keep it"
        return Meaning({**settings, "min_scale": 1.0}, bug)
    return Meaning(settings)


JMP = Tool(
    name="jmp",
    title="`jmp.DynamicLossScale`",
    version="jmp 0.0.4",
    forms=(
        Form(
            "constructor",
            (
                key("loss_scale", read.INIT_SCALE),
                key("period", read.INTERVAL_EQUAL, 2000),
                key("factor", read.FACTOR, 2),
                key("min_loss_scale", read.MIN_SCALE, 1.0),
                key("counter", read.left_to_the_state("counter"), 0),
            ),
            {"max_scale": UNBOUNDED["max_scale"]},
            ignored=("jit",),
            adjust=_under_jit,
        ),
    ),
    saved=(Saved(scale=("loss_scale",), counters={"growth_tracker": count("counter", equal=True)}),),
)

FLAX = Tool(
    name="flax",
    title="`flax.training.dynamic_scale.DynamicScale`",
    version="flax 0.12.8",
    forms=(
        Form(
            "fields",
            (
                key("scale", read.INIT_SCALE, 65536.0),
                key("growth_factor", read.GROWTH_FACTOR, 2.0),
                key("backoff_factor", read.BACKOFF_FACTOR, 0.5),
                # flax compares before it counts the step, so that the scale grows one step later than elsewhere:
                # https://github.com/google/flax/blob/v0.12.8/flax/training/dynamic_scale.py#L146
                key("growth_interval", read.INTERVAL_ONE_LATER, 2000),
                key("minimum_scale", read.FLOOR, 2.0**-126),
                # The scaler of flax is its own state, so that its settings include a count.
                key("fin_steps", read.left_to_the_state("fin_steps"), 0),
            ),
            {"max_scale": UNBOUNDED["max_scale"]},
            ignored=("jit",),
        ),
    ),
    saved=(Saved(scale=("scale",), counters={"growth_tracker": count("fin_steps", equal=True)}),),
)

TOOLS = (JMP, FLAX)
