"""The five verbs on NumPy, the reference, and on a strict array-API namespace."""

from collections import OrderedDict, defaultdict

import array_api_strict as xps
import ml_dtypes
import numpy as np
import pytest

from lossscale_core import DynamicScaling, FixedScaling, all_finite, init_state, scale, select, unscale

STATE = FixedScaling(2.0**16).init_state()


def test_unscale_rounds_once():
    """`unscale` divides by the scale with one rounding, for any scale."""
    state = FixedScaling(3.0).init_state()
    grad = np.arange(1, 2000, dtype=np.float32)
    np.testing.assert_array_equal(unscale(grad, state), grad / np.float32(3.0))


def test_containers_keep_their_types():
    """A verb returns a container of the argument's type, also a default dict with its factory or an empty container."""
    unscaled = unscale(OrderedDict(w=defaultdict(list, w=np.ones(1)), more=[(), {}]), STATE)
    assert type(unscaled) is OrderedDict
    assert unscaled["w"]["not there"] == []
    assert unscaled["more"] == [(), {}]


def test_verbs_cause_no_numpy_warnings():
    """The verbs raise nothing if every NumPy warning is an error."""
    tiny, huge, tiniest = (np.full(4, value, np.float32) for value in (1e-30, 3e38, 1e-38))
    with np.errstate(all="raise"):
        assert all_finite([tiny, huge, tiny.astype(np.float64) * 1e-200])
        assert np.isinf(scale(huge, STATE)).all()
        assert (unscale(tiniest, STATE) >= 0).all()
        assert not all_finite([np.full(4, np.nan, np.float32)])


def test_masks_and_small_integers():
    """A mask hides no NaN, and small integers are integers."""
    assert not all_finite(np.ma.array([1.0, np.nan], mask=[False, True]))
    integers = np.zeros(3, ml_dtypes.int4)
    assert unscale(integers, STATE) is integers


def test_arrays_stay_on_their_device():
    """The arrays that a verb makes are on the device of its arguments."""
    device = xps.Device("device1")
    grads = [xps.asarray([1.0], device=device), xps.asarray([1], device=device)]
    finite = all_finite(grads)
    assert finite.device == device
    assert unscale(grads, STATE)[0].device == device
    assert select(finite, {"n": 3}, {"n": 2})["n"].device == device
    assert {value.device for value in init_state(DynamicScaling(), xp=xps, device=device)} == {device}


@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2])
def test_float8_is_checked_and_unscaled(dtype):
    """An array in float8 is a gradient: `all_finite` finds its NaN, and `unscale` returns float32."""
    state = init_state(DynamicScaling(init_scale=4.0))
    assert all_finite(np.array([1.0, 2.0], dtype))
    assert not all_finite(np.array([1.0, np.nan], dtype))
    unscaled = unscale(np.array([1.0, 2.0], dtype), state)
    assert (unscaled.tolist(), unscaled.dtype) == ([0.25, 0.5], np.float32)
    assert scale(np.zeros((0, 3), dtype), state).shape == (0, 3)
