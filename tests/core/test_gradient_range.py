"""The range of gradients of small networks that compute in float16."""

import ml_dtypes
import numpy as np
import pytest

from lossscale_core import gradient_range

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(16, 8)).astype(np.float16), RNG.normal(size=(16, 1))
FIRST, LAST = RNG.normal(size=(8, 8)).astype(np.float16) / 3, RNG.normal(size=(8, 1)).astype(np.float16)


def _grads_at(scale, weight_of_the_loss=1.0, added=0.0):
    """Return the gradients of a network of two layers, in float16 from the loss on; `added` misses the scale."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        hidden = X @ FIRST
        error = (np.float32(scale * weight_of_the_loss / 16) * ((hidden @ LAST).astype(np.float32) - Y)).astype(
            np.float16
        )
        return {"first": X.T @ (error @ LAST.T) + np.float16(added), "last": hidden.T @ error}


def test_the_limit_is_exact():
    """All gradients are finite at `overflows_above`; at twice this scale the named gradient is not finite."""
    result = gradient_range(_grads_at)
    assert all(np.isfinite(grad).all() for grad in _grads_at(result.overflows_above).values())
    assert not np.isfinite(_grads_at(2 * result.overflows_above)[result.first_overflow]).all()
    assert (result.flushed, result.unscaled) == ({}, [])
    assert str(result).startswith(f"finite up to a loss scale of 2**{int(np.log2(result.overflows_above))}; above it ")


def test_flushed_gradients_are_counted():
    """`flushed` holds the share of each gradient that is zero at a scale of 1 only."""
    result = gradient_range(lambda scale: _grads_at(scale, 1e-7))
    before, after = _grads_at(1.0, 1e-7), _grads_at(result.overflows_above, 1e-7)
    lost = {name: ((before[name] == 0) & (after[name] != 0)).mean() for name in before}
    assert result.flushed == lost
    assert min(lost.values()) > 0.2
    assert "of its elements are zero at a loss scale of 1" in str(result)


@pytest.mark.parametrize("added", [1e-3, 10.0])
def test_an_unscaled_gradient_is_named(added):
    """`unscaled` names a gradient that does not grow with the scale, however small it is."""
    result = gradient_range(lambda scale: _grads_at(scale, added=added))
    assert result.unscaled == ["first"]
    assert str(result).endswith("not multiplied by the loss scale: first")
    # A gradient that is clamped, or scaled again, is zero at a scale of zero, and does not double.
    for grad_at in (lambda scale: min(scale, 1.0), lambda scale: scale**1.5):
        assert gradient_range(lambda scale, grad_at=grad_at: {"w": grad_at(scale) * np.ones(3)}).unscaled == ["w"]


def test_a_gradient_without_scale_is_named():
    """`first_overflow` names a parameter if its gradient is not finite at any scale."""
    result = gradient_range(lambda scale: {"fine": np.ones(2), "bad": np.array([scale, np.nan])})
    assert result == (0.0, "bad", {}, [])
    assert str(result) == "bad is not finite at any loss scale: look at the inputs and the forward pass"


def test_the_largest_tried_scale():
    """The largest scale that `gradient_range` tries is 2**40, and it needs at most twelve backward passes."""
    scales = []

    def grads_at(scale):
        scales.append(scale)
        dtypes = (np.float32, np.float64, ml_dtypes.bfloat16, np.complex64)
        grads = {np.dtype(dtype).name: (scale * np.ones(3)).astype(dtype) for dtype in dtypes}
        return {**grads, "imaginary": np.complex64(1j * scale), "empty": np.zeros((0, 3))}

    assert gradient_range(grads_at) == (2.0**40, None, {}, [])
    assert len(scales) <= 12
    assert len({*scales}) == len(scales)
