"""jmp, for JAX."""

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

TOOLS = (JMP,)
