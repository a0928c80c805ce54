"""The five verbs on NumPy, the reference, and on a strict array-API namespace."""

from collections import OrderedDict, defaultdict
from typing import NamedTuple

import array_api_strict as xps
import ml_dtypes
import numpy as np
import pytest

from lossscale_core import DynamicScaling, FixedScaling, ScaleState, all_finite, init_state, scale, select, unscale

STATE = FixedScaling(2.0**16).init_state()


class Layer(NamedTuple):
    weight: object
    bias: object


def test_unscale_rounds_once():
    """Division by the scale, not by a rounded reciprocal: correct to the last bit for any scale."""
    state = FixedScaling(3.0).init_state()
    grad = np.arange(1, 2000, dtype=np.float32)
    np.testing.assert_array_equal(unscale(grad, state), grad / np.float32(3.0))


def test_none_and_integers_pass_through():
    """A leaf that is not a gradient is left alone, and containers keep their types."""
    step = np.array(3)
    grads = OrderedDict(layer=Layer(np.ones(2, np.float32), None), step=step, more=[(), {}])
    unscaled = unscale(grads, STATE)
    assert type(unscaled) is OrderedDict
    assert type(unscaled["layer"]) is Layer
    assert unscaled["layer"].bias is None
    assert unscaled["step"] is step
    assert unscaled["more"] == [(), {}]
    assert grads["layer"].weight[0] == 1.0


def test_a_default_dict_keeps_its_factory():
    """A container is rebuilt as what it was."""
    unscaled = unscale(defaultdict(list, w=np.ones(1)), STATE)
    assert unscaled["not there"] == []


def test_leaves_that_are_no_numbers_are_refused():
    """A string among the gradients is a mistake, and the message names it."""
    for verb in (all_finite, lambda grads: unscale(grads, STATE)):
        with pytest.raises(TypeError, match="str"):
            verb(["loss"])
        with pytest.raises(TypeError, match="object"):
            verb([np.array([None])])


@pytest.mark.parametrize(
    ("other", "place"),
    [
        ({"w": 1}, "['w']"),
        ({"w": [1, (2,)]}, "['w'][1]"),
        ({"w": [1, None]}, "['w'][1]"),
        ({"w": [1]}, "['w']"),
        ({"w": (1, 2)}, "['w']"),
        ({"w": [1, 2], "x": 0}, "the top"),
        ([1], "the top"),
    ],
)
def test_select_names_where_structures_differ(other, place):
    """Two trees that do not match are refused, naming the place."""
    with pytest.raises(ValueError, match="structures differ") as caught:
        select(True, {"w": [1, 2]}, other)
    assert place in str(caught.value)


def test_nothing_is_raised_while_hunting_nans():
    """With every NumPy warning an error, the verbs still only answer."""
    tiny, huge, tiniest = (np.full(4, value, np.float32) for value in (1e-30, 3e38, 1e-38))
    with np.errstate(all="raise"):
        assert all_finite([tiny, huge, tiny.astype(np.float64) * 1e-200])
        assert np.isinf(scale(huge, STATE)).all()
        assert (unscale(tiniest, STATE) >= 0).all()
        assert not all_finite([np.full(4, np.nan, np.float32)])


def test_odd_arrays_are_taken_for_what_they_hold():
    """A mask hides no NaN, a matrix is an array, small integers are integers, and raw bytes are not a gradient."""
    assert not all_finite(np.ma.array([1.0, np.nan], mask=[False, True]))
    assert not all_finite(np.ma.array([1.0, np.nan], mask=[False, True], dtype=np.float16))
    with pytest.warns(PendingDeprecationWarning):
        matrix = np.matrix([[1.0, np.inf]])
    assert not all_finite(matrix)
    integers = np.zeros(3, ml_dtypes.int4)
    assert unscale(integers, STATE) is integers
    with pytest.raises(TypeError, match="not a gradient"):
        all_finite(np.zeros(2, "V4"))


def test_arrays_stay_on_their_device():
    """Whatever the verbs make to go with an array, they make on its device."""
    device = xps.Device("device1")
    grads = [xps.asarray([1.0], device=device), xps.asarray([1], device=device)]
    finite = all_finite(grads)
    assert finite.device == device
    assert unscale(grads, STATE)[0].device == device
    assert select(finite, {"n": 3}, {"n": 2})["n"].device == device


def test_python_numbers_serve_as_a_state():
    """A state of plain numbers works too, in Python's own precision."""
    policy = DynamicScaling(backoff_factor=0.3, min_scale=0.1)
    after = policy.update(ScaleState(2, 0, 1, 0, 0, 0), False)
    assert after == ScaleState(0.6, 0, 0, 1, 1, 1)


def test_a_host_state_serves_arrays_of_any_namespace():
    """A state kept on the host scales and unscales arrays that live elsewhere."""
    grad = xps.asarray([65536.0], dtype=xps.float32)
    assert float(unscale(grad, STATE)[0]) == 1.0
    assert float(scale(grad, STATE)[0]) == 2.0**32


def test_a_foreign_tensor_is_refused_with_a_remedy():
    """The error for an object without a namespace says to pass one."""

    class Tensor:
        dtype = "float32"

    with pytest.raises(TypeError, match="xp="):
        all_finite([Tensor()])


def test_init_state_places_the_state():
    """Host scalars by default, arrays of a namespace and device when asked."""
    assert init_state(DynamicScaling()) == DynamicScaling().init_state()
    placed = init_state(DynamicScaling(), xp=xps, device=xps.Device("device1"))
    assert {str(value.device) for value in placed} == {str(xps.Device("device1"))}


def _records(*rows):
    return np.array(list(rows), dtype=[("a", "f4"), ("b", "f4", 2), ("n", "i4")]).view(np.recarray)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_record_array_with_a_nan_is_not_finite(bad):
    """Every field of every record counts, nested ones and those of scalars too; integer fields do not."""
    fine, broken = (1.0, (2.0, 3.0), 4), (1.0, (2.0, bad), 4)
    assert all_finite(_records(fine, fine))
    assert not all_finite(_records(fine, broken))
    assert not all_finite({"x": _records((bad, (2.0, 3.0), 4))})
    assert not all_finite(_records(fine, broken)[1])
    nested = np.rec.array([(1.0, (bad,))], dtype=[("a", "f4"), ("b", np.dtype((np.record, [("c", "f8")])))])
    assert not all_finite(nested)
    assert not all_finite(np.array([1.0, bad]).view(np.recarray))
    assert all_finite(_records())


@pytest.mark.parametrize("verb", [scale, unscale])
def test_a_record_array_is_scaled_by_its_fields(verb):
    """A record array as a whole is refused in plain words."""
    with pytest.raises(TypeError, match="is not a gradient; pass each field of it"):
        verb(_records((1.0, (2.0, 3.0), 4)), init_state("dynamic"))


def test_an_empty_leaf_is_finite_and_keeps_its_shape():
    """Nothing holds no NaN, whatever its dtype, and the message names the dtype of a leaf that is not a gradient."""
    state = init_state("dynamic")
    for dtype in (np.float16, np.float32, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2):
        empty = np.zeros((0, 3), dtype)
        assert all_finite(empty)
        assert unscale(empty, state).shape == scale(empty, state).shape == (0, 3)
    for empty in (np.zeros(0, object), np.zeros(0, "S1")):
        with pytest.raises(TypeError, match=r"a leaf of dtype \S+ is not a gradient"):
            all_finite(empty)


@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2])
def test_float8_is_checked_and_lifted(dtype):
    """What is stored in float8 is a gradient: its NaN is found, and it is unscaled in float32."""
    state = init_state(DynamicScaling(init_scale=4.0))
    assert all_finite(np.array([1.0, 2.0], dtype))
    assert not all_finite(np.array([1.0, np.nan], dtype))
    assert unscale(np.array([1.0, 2.0], dtype), state).tolist() == [0.25, 0.5]
    assert unscale(np.array([1.0], dtype), state).dtype == np.float32
