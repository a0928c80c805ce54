"""`all_finite` on NumPy is exact for every dtype, position, shape and layout, and allocates next to nothing."""

import tracemalloc

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from lossscale_core import all_finite


@given(
    hnp.arrays(
        st.sampled_from([np.float16, np.float32, np.float64, np.longdouble, ">f2", ">f8", ">c8"]),
        hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=6),
        elements={"allow_nan": True, "allow_infinity": True},
    ),
    st.data(),
)
def test_all_finite_agrees_with_isfinite(array, data):
    """For any bits, dtype, shape and strides, `all_finite` returns the `np.bool_` of NumPy's `isfinite(...).all()`."""
    array.flags.writeable = False
    view = array.T if data.draw(st.booleans()) else array
    view = view[data.draw(hnp.basic_indices(view.shape))] if view.ndim else view
    assert all_finite([view]) is np.isfinite(view).all()


@pytest.mark.parametrize("dtype", [np.float16, np.float64, ml_dtypes.bfloat16, ">f4", np.complex64], ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "strided", "transposed", "unaligned"])
def test_all_finite_needs_little_memory(dtype, layout):
    """`all_finite` checks four million numbers of any dtype and layout within a mebibyte."""
    array = np.ones((2000, 2000), dtype=dtype)
    if layout == "unaligned":
        array = np.frombuffer(b"\0" + array.tobytes(), dtype, offset=1).reshape(array.shape)
    array = {"strided": array[::2, ::3], "transposed": array.T}.get(layout, array)
    all_finite(array)
    tracemalloc.start()
    try:
        assert all_finite(array)
        assert tracemalloc.get_traced_memory()[1] <= 2**20
    finally:
        tracemalloc.stop()
