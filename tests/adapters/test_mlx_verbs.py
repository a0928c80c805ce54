"""What is special to MLX in the five verbs and in `overflow_report`; the conformance suite checks the rest."""

import math
from typing import NamedTuple

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from lossscale_core import DynamicScaling, FixedScaling, TolerantScaling
from lossscale_core.errors import PolicyError
from lossscale_mlx import all_finite, init_state, overflow_report, scale, select, unscale
from tests.adapters.mlx_training import bits

STATE = init_state(FixedScaling(2.0**10))
WIDTHS = {"float16": 16, "float32": 32}


@given(st.data(), st.sampled_from(list(WIDTHS)), st.integers(-10, 20))
def test_finiteness_and_unscaling_are_those_of_numpy(data, dtype, exponent):
    """Of arrays of any shape, with NaN, infinities, subnormal and negative zeros."""
    shape = arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5)
    numbers = st.floats(width=WIDTHS[dtype])
    leaves = [data.draw(arrays.arrays(dtype, shape, elements=numbers)) for _ in range(2)]
    state = init_state(FixedScaling(2.0**exponent))
    grads = {"a": mx.array(leaves[0]), "b": [None, mx.array(leaves[1])]}
    assert all_finite(grads).item() == all(np.isfinite(leaf).all() for leaf in leaves)
    unscaled = unscale(grads, state)
    for leaf, result in zip(leaves, (unscaled["a"], unscaled["b"][1]), strict=True):
        assert result.dtype == mx.float32
        with np.errstate(all="ignore"):
            expected = leaf.astype(np.float32) / np.float32(2.0**exponent)
        is_normal = np.abs(expected) >= np.finfo(np.float32).tiny  # MLX may flush subnormal numbers to zero
        np.testing.assert_array_equal(np.array(result)[is_normal], expected[is_normal])


def test_a_state_is_of_arrays_of_the_hosts_dtypes():
    """float32 and int32, of shape (), also with the counters of another policy."""
    for policy in (DynamicScaling(), TolerantScaling()):
        state = init_state(policy)
        assert type(state) is type(policy.init_state())
        for field, on_host in zip(state, policy.init_state(), strict=True):
            assert isinstance(field, mx.array)
            assert field.shape == ()
            assert str(field.dtype) == f"mlx.core.{on_host.dtype.name}"


def test_a_loss_of_any_kind_is_scaled_in_float32():
    """A Python number, an integer, float16 at a scale that float16 does not have, and a tree of them."""
    state = init_state(FixedScaling(2.0**17))
    for loss in (3.0, 3, mx.array(3), mx.array(3.0, mx.float16), mx.array(3.0, mx.bfloat16)):
        scaled = scale(loss, state)
        assert (scaled.dtype, scaled.item()) == (mx.float32, 3 * 2.0**17)
    on_host = FixedScaling(2.0**17).init_state()
    assert scale(mx.array(3.0, mx.float16), on_host).item() == 3 * 2.0**17
    assert unscale(mx.array(3.0, mx.float16), on_host).item() == 3 * 2.0**-17
    assert scale({"a": [1.0, None]}, state)["a"][0].item() == 2.0**17


class _Pair(NamedTuple):
    first: mx.array
    second: mx.array


def test_trees_keep_their_containers():
    """A NamedTuple stays one, and a tuple in a list, too."""
    grads = [_Pair(mx.ones(2, mx.float16), mx.array([1, 2])), (None,)]
    unscaled = unscale(grads, STATE)
    assert isinstance(unscaled[0], _Pair)
    assert unscaled[0].second is grads[0].second
    assert unscaled[1] == (None,)


@pytest.mark.parametrize("flag", [True, False, mx.array(True), mx.array(False)], ids=str)
def test_select_takes_one_side_bit_for_bit(flag):
    """NaN and negative zero on either side, in each dtype; nothing leaks from the other side."""
    new = {"a": mx.array([math.nan, -0.0]), "b": mx.array([1, 2]), "c": mx.array([-0.0], mx.float16), "d": None}
    old = {"a": mx.array([-0.0, math.nan]), "b": mx.array([3, 4]), "c": mx.array([math.inf], mx.float16), "d": None}
    chosen = select(flag, new, old)
    assert chosen.pop("d") is None
    side = {**(new if bool(flag) else old)}
    del side["d"]
    assert bits(chosen) == bits(side)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: init_state("dynamo"), PolicyError, "dynamo"),
        (lambda: scale(STATE, mx.array(1.0)), TypeError, r"call scale\(loss, state\)"),
        (lambda: unscale(STATE, {"w": mx.array(1.0)}), TypeError, r"call unscale\(grads, state\)"),
        (lambda: all_finite({"a": [np.ones(2)]}), TypeError, r"a\.0=.* is not an array of MLX"),
        (lambda: unscale({"w": 1.0}, STATE), TypeError, r"w=1\.0 is not an array of MLX"),
        (lambda: overflow_report({"w": np.array([math.nan])}), TypeError, r"w=.* is not an array of MLX"),
        (lambda: select({"w": mx.array(1.0)}, {}, {}), TypeError, r"call select\(grads_finite, new, old\)"),
        (lambda: select(mx.array([True]), {}, {}), TypeError, r"must be a bool of shape \(\)"),
        (lambda: select(True, {"w": mx.ones(2)}, {"w": mx.ones(3)}), ValueError, r"at \['w'\]"),
        (lambda: select(True, {"w": mx.ones(2)}, {"v": mx.ones(2)}), ValueError, "differ at the top"),
    ],
)
def test_swapped_arguments_are_errors_that_say_what_to_do(call, error, words):
    """A state in the place of a loss, a tree in the place of a flag, trees that differ."""
    with pytest.raises(error, match=words):
        call()


def test_a_report_names_the_leaf_and_the_cause():
    """By the path of MLX, with the counts; the loss tells whether the scale is the cause."""
    bad = mx.array([math.nan, math.inf, -math.inf, -3.0], mx.float16)
    grads = {"layers": [{"weight": bad, "bias": mx.ones(2)}], "n": mx.array([1])}
    report = overflow_report(grads, loss=mx.array(1.0))
    assert str(report) == (
        "layers.0.weight: 1 NaN, 1 +inf, 1 -inf, largest finite 3\nfinite loss: a smaller loss scale fixes this"
    )
    assert "the loss itself is not finite" in overflow_report(grads, loss=math.nan).verdict
    assert overflow_report({"w": mx.ones(2)}) == []
    (of_complex,) = overflow_report([mx.array([complex(1, math.inf)], mx.complex64)])
    assert (of_complex.name, of_complex.positive_inf, of_complex.largest_finite) == ("0", 1, 1.0)
    with pytest.raises(ValueError, match="Attempting to eval an array during function transformations"):
        mx.compile(lambda x: len(overflow_report(x)) * x)(mx.array(1.0))
