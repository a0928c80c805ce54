"""The public way to unit-test a policy."""

import tracemalloc

import ml_dtypes
import numpy as np
import pytest

from lossscale_core import DynamicScaling, FixedScaling, NoScaling, ScaleState
from lossscale_core.testing import LARGEST_NUMBER, Trace, simulate, simulate_gradients


def test_simulate_has_a_row_a_step_and_a_column_a_tracker():
    """Arrays of shape (steps,), with the state's dtypes; the trackers are those after the step."""
    trace = simulate(DynamicScaling(growth_interval=3), [True, True, True, False])
    assert isinstance(trace, Trace)
    np.testing.assert_array_equal(trace.loss_scale_used, [2**16, 2**16, 2**16, 2**17])
    np.testing.assert_array_equal(trace.loss_scale_after, [2**16, 2**16, 2**17, 2**16])
    np.testing.assert_array_equal(trace.skipped, [False, False, False, True])
    np.testing.assert_array_equal(trace.growth_tracker, [1, 2, 0, 0])
    np.testing.assert_array_equal(trace.overflow_streak, [0, 0, 0, 1])
    assert [column.dtype.name for column in trace] == ["float32", "float32", "bool"] + ["int32"] * 5
    assert trace._fields == ("loss_scale_used", "loss_scale_after", "skipped", *ScaleState._fields[1:])


def test_simulate_takes_what_as_policy_takes():
    """And any iterable of flags, none at all included."""
    assert simulate("none", np.array([True, False])).skipped.tolist() == [False, True]
    assert simulate(128, iter([True])).loss_scale_used.tolist() == [128.0]
    empty = simulate("dynamic", [])
    assert all(column.shape == (0,) for column in empty)


def test_simulate_gradients_overflows_beyond_the_largest_number():
    """scale × max |gradient| may reach the dtype's largest number and no further."""
    trace = simulate_gradients(FixedScaling(2.0), [65504.0 / 2, 32760.0, 40000.0, np.nan, np.inf, 0.0])
    assert trace.skipped.tolist() == [False, True, True, True, True, False]
    assert simulate_gradients(NoScaling(), [1e38], "bfloat16").skipped.tolist() == [False]
    assert simulate_gradients(FixedScaling(4.0), [1e38], "bfloat16").skipped.tolist() == [True]
    assert simulate_gradients(FixedScaling(4.0), [1e38], "float32").skipped.tolist() == [True]
    assert simulate_gradients(FixedScaling(4.0), [1e308, np.inf], "float64").skipped.tolist() == [True, True]


def test_the_largest_numbers_are_those_of_the_dtypes():
    """To the last bit, as NumPy and ml_dtypes have them."""
    for name, largest in LARGEST_NUMBER.items():
        finfo = ml_dtypes.finfo(name) if name == "bfloat16" else np.finfo(name)
        assert largest == float(finfo.max)
    assert simulate_gradients(NoScaling(), [65504.0, 65505.0], np.float16).skipped.tolist() == [False, True]


def test_text_is_not_taken_for_flags():
    """Flags written as text, or that are not 0 or 1, are answered at once."""
    with pytest.raises(TypeError, match="sequence of bools"):
        simulate("dynamic", "0010")
    for odd in (None, "x", float("nan"), 0.5):
        with pytest.raises(TypeError, match="which is not a bool"):
            simulate("dynamic", [True, odd])


def test_simulate_gradients_refuses_negative_magnitudes():
    """With the step and the value: its absolute value is probably what is meant, but not certainly."""
    with pytest.raises(ValueError, match=r"gradient_max of step 1 is -3, but a magnitude is 0 or above; pass abs"):
        simulate_gradients(NoScaling(), [0.0, -3.0, -4.0])


@pytest.mark.parametrize(
    ("maxima", "dtype", "words"), [([1.0], "float8", "float16, bfloat16"), ([[1.0]], "float16", "steps")]
)
def test_simulate_gradients_names_bad_input(maxima, dtype, words):
    """An unknown dtype or a wrong shape is answered with the remedy."""
    with pytest.raises(ValueError, match=words):
        simulate_gradients("dynamic", maxima, dtype)


def test_a_long_run_takes_the_memory_of_its_trace():
    """A run of more steps than are kept as states at a time is as exact, and takes tens of bytes a step."""
    flags = [step % 7 != 0 for step in range(60_000)]
    policy = DynamicScaling(growth_interval=5)
    tracemalloc.start()
    trace = simulate(policy, flags)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 60_000 * 40 + 10_000 * 600
    state = policy.init_state()
    for step, finite in enumerate(flags):
        state = policy.update(state, finite)
        if step in (0, 9_998, 9_999, 10_000, 19_999, 59_999):
            row = [trace.loss_scale_after[step], trace.steps[step], trace.skipped_steps[step]]
            assert row == [state.loss_scale, state.steps, state.skipped_steps]
