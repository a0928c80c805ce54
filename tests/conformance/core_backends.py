"""The core's verbs on host scalars, NumPy and array-api-strict, described for the conformance suite."""

import array_api_strict as xps
import ml_dtypes
import numpy as np

import lossscale_core
from tests.conformance.suite import Adapter

ALL_DTYPES = ("float16", "bfloat16", "float32", "float64", "complex64", "complex128")


def on_numpy(values, dtype):
    """Return an array of any dtype in the list above, bfloat16 by way of ml_dtypes."""
    return np.asarray(values).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


def on_host(values, dtype):
    """Return a scalar where the shape is (), and a Python bool for a flag."""
    array = on_numpy(values, dtype)[()]
    return bool(array) if isinstance(array, np.bool_) else array


HOST = Adapter(name="host", verbs=lossscale_core, asarray=on_host, dtypes=ALL_DTYPES)
NUMPY = Adapter(name="numpy", verbs=lossscale_core, asarray=on_numpy, dtypes=ALL_DTYPES, xp=np, placement={"xp": np})
STRICT = Adapter(
    name="array-api-strict",
    verbs=lossscale_core,
    asarray=lambda values, dtype: xps.asarray(values, dtype=getattr(xps, dtype)),
    dtypes=("float32", "float64", "complex64", "complex128"),  # the standard has no narrower ones
    placement={"xp": xps},
)
CORE = (HOST, NUMPY, STRICT)
