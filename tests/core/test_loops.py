"""What the checks of training loops share: comparisons and the texts of errors."""

import math

import numpy as np
import pytest

from lossscale_core.testing import loops


@pytest.mark.parametrize(
    ("a", "b", "is_same"),
    [
        (np.array([1.0, np.nan]), np.array([1.0, np.nan]), True),
        (np.array([1.0, np.nan]), np.array([np.nan, 1.0]), False),
        *((np.ones(2), other, False) for other in (np.ones((2, 1)), np.ones(2, np.float32))),
        *((math.nan, float("nan"), True), (None, None, True)),
        *((1, 1.0, False), (np.ones(()), 1.0, False), ("relu", "gelu", False)),
    ],
)
def test_values_that_are_the_same(a, b, is_same):
    """Arrays by shape, dtype and bits, other values by type and value; NaN is the same as NaN."""
    assert loops.same(a, b) is loops.same(b, a) is is_same


def test_gradients_that_do_not_come_from_the_loss_are_named():
    """One in the singular, many by the first four and the number of the others."""
    assert "and router has a gradient other than zero" in loops.not_from_the_loss(2, ["router"], "do this")
    message = loops.not_from_the_loss(2, list("abcdef"), "do this")
    assert message == (
        "at step 2 the loss was multiplied by zero, and a, b, c, d and 2 more have gradients other than zero; what "
        "adds them misses the loss scale; do this"
    )
