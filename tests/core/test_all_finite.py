"""`all_finite` on NumPy is exact for every dtype, position, shape and layout, and allocates next to nothing."""

import tracemalloc

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from lossscale_core import all_finite

FLOATS = [np.float16, np.float32, np.float64, np.longdouble, ml_dtypes.bfloat16, ">f2", ">f4", ">f8"]
COMPLEX = [np.complex64, np.complex128]
BAD = [np.nan, -np.nan, np.inf, -np.inf]


def _peak_bytes(array):
    """Return how much checking a finite array allocates at most."""
    tracemalloc.start()
    try:
        assert all_finite(array)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def _largest(dtype):
    return ml_dtypes.finfo(dtype).max if dtype is ml_dtypes.bfloat16 else np.finfo(np.dtype(dtype)).max


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("bad", BAD, ids=["nan", "-nan", "inf", "-inf"])
def test_every_position_is_seen(dtype, bad):
    """One bad element anywhere among large, small, negative and zero ones is found."""
    largest = float(_largest(dtype)) if dtype is not np.longdouble else 1e300
    good = np.array([largest, -largest, 0.0, -0.0, 1e-7, -1.0] * 4, dtype=dtype)
    assert all_finite([good])
    for position in range(good.size):
        array = good.copy()
        array[position] = bad
        assert not all_finite([good, array]), position


@pytest.mark.parametrize("dtype", FLOATS + COMPLEX, ids=str)
@pytest.mark.parametrize("count", [1, 3, 1000])
def test_large_finite_values_are_never_flagged(dtype, count):
    """The largest numbers of a dtype are finite, though their squares and sums overflow."""
    largest = _largest(dtype)
    assert all_finite([np.full(count, largest, dtype=dtype), -np.full(count, largest, dtype=dtype)])
    assert all_finite([np.full(count, np.float32(1e30))])


@pytest.mark.parametrize("dtype", COMPLEX)
@pytest.mark.parametrize("bad", [complex(np.nan, 0), complex(0, np.inf), complex(1, -np.inf)])
def test_both_parts_of_complex_numbers_count(dtype, bad):
    """A real or an imaginary part that is not finite is found."""
    assert not all_finite(np.array([1.0, bad], dtype=dtype))


@given(
    hnp.arrays(
        st.sampled_from([np.float16, np.float32, np.float64]),
        hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=6),
        elements={"allow_nan": True, "allow_infinity": True},
    ),
    st.data(),
)
def test_agrees_with_isfinite_on_any_view(array, data):
    """Any bits, any shape, any strides: the answer is NumPy's own."""
    view = array.T if data.draw(st.booleans()) else array
    if view.ndim:
        view = view[data.draw(hnp.basic_indices(view.shape))]
    assert all_finite([view]) == bool(np.isfinite(view).all())


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_every_bit_pattern_of_sixteen_bits(dtype):
    """All 65536 float16 numbers, and as many float32 ones from the top bits, are checked as NumPy checks them."""
    if dtype is np.uint16:
        numbers = np.arange(2**16, dtype=np.uint16).view(np.float16)
    else:
        numbers = (np.arange(2**16, dtype=np.uint32) << 16).view(np.float32)
    judged = np.array([all_finite(number) for number in numbers.reshape(-1, 1)])
    np.testing.assert_array_equal(judged, np.isfinite(numbers))


def test_nothing_is_finite_and_integers_do_not_count():
    """No gradients, None, empty arrays, integers and bools: all finite, as an np.bool_."""
    for grads in ([], {}, None, [None], np.zeros((0, 3)), [np.zeros((), int)], [np.array([True])], [3, True]):
        assert all_finite(grads) is np.True_
    assert all_finite([None, 3, np.float32(np.inf)]) is np.False_
    assert all_finite({"a": [1.5, (float("nan"),)]}) is np.False_


@pytest.mark.parametrize(
    "dtype", [np.float16, np.float32, np.float64, ml_dtypes.bfloat16, ">f4", np.complex64], ids=str
)
@pytest.mark.parametrize("fill", [1.0, 3e4], ids=["small", "large"])
@pytest.mark.parametrize("layout", ["contiguous", "strided", "transposed"])
def test_allocates_at_most_one_mebibyte(dtype, fill, layout):
    """Sixteen million bytes are checked within a mebibyte, whatever the dtype, the layout and the path taken."""
    array = np.full((2000, 2000), fill, dtype=dtype)
    if np.dtype(dtype) == np.float32 and fill > 1.0:
        array *= np.float32(1e30)  # squares overflow: the exact look is taken
    array = {"contiguous": array, "strided": array[::2, ::3], "transposed": array.T}[layout]
    all_finite(array)
    assert _peak_bytes(array) <= 2**20


def test_an_unaligned_array_is_not_copied():
    """Sixteen million bytes that begin at an odd address are checked within a mebibyte, too."""
    array = np.zeros(16_000_001, np.uint8)[1:].view(np.float32)
    assert _peak_bytes(array) <= 2**20


def test_read_only_arrays_are_fine():
    """Gradients that may not be written are read."""
    array = np.ones(10, np.float32)
    array.flags.writeable = False
    assert all_finite(array)
