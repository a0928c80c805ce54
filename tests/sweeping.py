"""How often tests repeat one behaviour: enough to notice in each run, and many times in `nox -s sweep`, nightly."""

import itertools
import math
import os

from hypothesis import settings

IS_SWEEP = "LOSSSCALE_SWEEP" in os.environ


def examples(count):
    """Return settings with so many examples, and ten times as many in a sweep."""
    return settings(max_examples=count * (10 if IS_SWEEP else 1))


few_examples = examples(20)
"""For a test that compiles or traces something in each example."""


def every(count, *factors):
    """Return every `count`-th combination of these factors, and all in a sweep.

    A `count` that shares a divisor with the number of combinations could always leave out the same values.
    """
    combinations = [*itertools.product(*factors)]
    assert math.gcd(count, len(combinations)) == 1
    return combinations[:: 1 if IS_SWEEP else count]


def seeds(count):
    """Return so many seeds in a sweep, and one otherwise."""
    return range(count if IS_SWEEP else 1)
