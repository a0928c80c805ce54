"""flax, for JAX."""

from lossscale.dialects import _readings as read
from lossscale.dialects._counters import count
from lossscale.dialects._readings import UNBOUNDED
from lossscale.dialects._record import Form, Saved, Tool, key

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

TOOLS = (FLAX,)
