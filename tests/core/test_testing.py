"""The public way to unit-test a policy, and what the checks of training loops share."""

import math

import ml_dtypes
import numpy as np
import pytest

from lossscale_core import DynamicScaling, FixedScaling, NoScaling, ScaleState
from lossscale_core.testing import LARGEST_NUMBER, loops, simulate, simulate_gradients


def test_a_trace_has_columns_per_step():
    """`simulate` returns arrays of shape (steps,) with the state's dtypes and the trackers after each step."""
    trace = simulate(DynamicScaling(growth_interval=3), [True, True, True, False])
    np.testing.assert_array_equal(trace.loss_scale_used, [2**16, 2**16, 2**16, 2**17])
    np.testing.assert_array_equal(trace.loss_scale_after, [2**16, 2**16, 2**17, 2**16])
    np.testing.assert_array_equal(trace.skipped, [False, False, False, True])
    np.testing.assert_array_equal(trace.growth_tracker, [1, 2, 0, 0])
    assert [column.dtype.name for column in trace] == ["float32", "float32", "bool"] + ["int32"] * 5
    assert trace._fields == ("loss_scale_used", "loss_scale_after", "skipped", *ScaleState._fields[1:])


def test_simulate_accepts_any_policy_source():
    """`simulate` accepts each source of a policy and any iterable of flags, also an empty one."""
    assert simulate(128, iter([True])).loss_scale_used.tolist() == [128.0]
    assert all(column.shape == (0,) for column in simulate("none", []))


def test_simulated_gradients_overflow():
    """In `simulate_gradients` a step overflows if scale × max |gradient| is above the dtype's largest number."""
    trace = simulate_gradients(FixedScaling(2.0), [65504.0 / 2, 32760.0, 40000.0, np.nan, np.inf, 0.0])
    assert trace.skipped.tolist() == [False, True, True, True, True, False]
    for name, largest in LARGEST_NUMBER.items():
        assert largest == float((ml_dtypes if name == "bfloat16" else np).finfo(name).max)
        assert simulate_gradients(FixedScaling(2.0), [largest / 2, largest], name).skipped.tolist() == [False, True]
    assert simulate_gradients(NoScaling(), [65504.0, 65505.0], np.float16).skipped.tolist() == [False, True]


@pytest.mark.parametrize(
    ("a", "b", "is_same"),
    [
        (np.array([1.0, np.nan]), np.array([1.0, np.nan]), True),
        (np.array([1.0, np.nan]), np.array([np.nan, 1.0]), False),
        (np.ones(2), np.ones((2, 1)), False),
        (np.ones(2), np.ones(2, np.float32), False),
        (math.nan, float("nan"), True),
        (1, 1.0, False),
        (np.ones(()), 1.0, False),
    ],
)
def test_same_compares_bits_and_types(a, b, is_same):
    """`same` compares arrays by shape, dtype and bits, and other values by type and value; NaN equals NaN."""
    assert loops.same(a, b) is loops.same(b, a) is is_same
