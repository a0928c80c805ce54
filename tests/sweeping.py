"""How often tests repeat one behaviour: enough to notice in each run, and many times in `nox -s sweep`, nightly."""

import os

from hypothesis import settings

IS_SWEEP = "LOSSSCALE_SWEEP" in os.environ
few_examples = settings(max_examples=500 if IS_SWEEP else 20)
"""For a test that compiles or traces something in each example."""


def seeds(count):
    """Return so many seeds in a sweep, and one otherwise."""
    return range(count if IS_SWEEP else 1)
