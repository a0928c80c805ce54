"""An exact test that every element of a NumPy array is finite, in one read and with little memory."""

from typing import Any

import numpy as np

_SAME_SIZE_INTEGERS = {2: (np.int16, np.uint16), 4: (np.int32, np.uint32), 8: (np.int64, np.uint64)}
# NumPy calls BLAS for float32 and float64 only. For float16 its dot product is a loop that is slower than a test.
_SUMMED_BY_BLAS = "fd"
# np.isfinite allocates one byte per element; chunks keep this small compared with the gradients.
_CHUNK = 2**15


def all_finite_in(array: np.ndarray[Any, Any]) -> bool:
    """Return whether `array` (any float or complex dtype, any shape and strides) holds no NaN and no infinity."""
    dtype = array.dtype
    if dtype.char in _SUMMED_BY_BLAS and dtype.isnative and array.flags.forc and array.flags.aligned:
        # BLAS reads the array once, at memory speed. A sum of squares that overflows says nothing: test exactly then.
        flat = array.ravel(order="K")
        # NaN is not below infinity either, and no square is negative, so that nothing cancels an infinity.
        if flat.dot(flat) < np.inf:
            return True
    if array.size == 0:
        return True
    if dtype.kind == "c":
        return all_finite_in(array.real) and all_finite_in(array.imag)
    if dtype.isnative and dtype.itemsize in _SAME_SIZE_INTEGERS:
        return _all_finite_by_bits(array)
    return _all_finite_by_chunks(array)


def _all_finite_by_bits(array: np.ndarray[Any, Any]) -> bool:
    """Compare bit patterns: among IEEE 754 floats of one sign, infinity and NaN are the largest integers.

    The signed maximum is that of the positive numbers, the unsigned maximum that of the negative ones.
    """
    signed, unsigned = _SAME_SIZE_INTEGERS[array.dtype.itemsize]
    infinity = np.array([np.inf, -np.inf], dtype=array.dtype)
    return bool(
        array.view(signed).max() < infinity.view(signed)[0] and array.view(unsigned).max() < infinity.view(unsigned)[1]
    )


def _all_finite_by_chunks(array: np.ndarray[Any, Any]) -> bool:
    """Call `np.isfinite` on chunks, for dtypes that are not IEEE 754 floats in this machine's byte order."""
    pieces = np.nditer(array, flags=["external_loop", "buffered", "zerosize_ok"], order="K", buffersize=_CHUNK)
    return all(np.isfinite(piece).all() for piece in pieces)
