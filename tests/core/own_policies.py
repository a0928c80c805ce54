"""Policies as users write them: two with one rule, and the example of the documentation.

The rule halves the scale on an overflow, and adds to it after finite steps.
`AdditiveScaling` derives from `BaseScaling` and names its kind; `BareAdditiveScaling` is what a policy needs at least.
"""

import dataclasses
import doctest
import sys
import types
from collections import namedtuple
from pathlib import Path

import numpy as np

from lossscale_core import BaseScaling, ScaleState, select

AdditiveState = namedtuple("AdditiveState", [*ScaleState._fields, "additions"])
"""The fields of `ScaleState`, and how often the scale was raised, in float32."""


class BareAdditiveScaling:
    """Known to the library by its two methods."""

    init_scale, increment, growth_interval, min_scale, max_scale = 1024.0, 64, 2, 1.0, 2.0**15

    def init_state(self):
        """Return the state before the first step."""
        return AdditiveState(np.float32(self.init_scale), *(np.int32(0) for _ in range(5)), np.float32(0))

    def update(self, state, grads_finite, *, xp=None):
        """Return the state after a step."""
        is_due = state.growth_tracker >= self.growth_interval - 1
        applied = state._replace(
            loss_scale=select(is_due, state.loss_scale + self.increment, state.loss_scale, xp=xp),
            growth_tracker=select(is_due, state.growth_tracker * 0, state.growth_tracker + 1, xp=xp),
            overflow_streak=state.overflow_streak * 0,
            additions=select(is_due, state.additions + 1.0, state.additions, xp=xp),
        )
        halved = state.loss_scale * 0.5
        skipped = state._replace(
            loss_scale=select(halved >= self.min_scale, halved, state.loss_scale, xp=xp),
            growth_tracker=state.growth_tracker * 0,
            skipped_steps=state.skipped_steps + 1,
            overflow_streak=state.overflow_streak + 1,
        )
        return select(grads_finite, applied, skipped, xp=xp)._replace(steps=state.steps + 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdditiveScaling(BaseScaling):
    """Known to the library by its kind."""

    kind = "additive"
    state_type = AdditiveState
    adapts = True
    backoff_factor = 0.5

    init_scale: float = 1024.0
    increment: int = 64
    growth_interval: int = 2
    min_scale: float = 1.0
    max_scale: float = 2.0**15
    max_overflow_streak: int | None = None

    init_state = BareAdditiveScaling.init_state
    update = BareAdditiveScaling.update


def policy_of_the_docs():
    """Return a policy of the class in `docs/extending.md`."""
    page = (Path(__file__).parents[2] / "docs/extending.md").read_text()
    # torch.compile looks the names of a function up in the module that it says it is from.
    module = sys.modules["policy_of_the_docs"] = types.ModuleType("policy_of_the_docs")
    for example in doctest.DocTestParser().get_examples(page.partition("## A policy of your own")[2]):
        exec(example.source, vars(module))
        if hasattr(module, "HalvingScaling"):
            return module.HalvingScaling(init_scale=8.0)
    raise AssertionError("the page has no HalvingScaling")
