"""The rules of `scale` and `unscale` for values, dtypes and structures."""

from typing import Any, NamedTuple

import numpy as np

from lossscale_core import FixedScaling
from tests.conformance.suite._trial import LIFTED, Trial, require_structure

_SCALE = 2.0**16
_OTHER_SCALES = (2.0**-20, 2.0**120)
# float16 gets its smallest subnormal number. The others may be flushed to zero where they are subnormal, as by XLA.
_SMALLEST = {"float16": 2.0**-24, "bfloat16": 2.0**-100, "float32": 2.0**-100, "float64": 2.0**-900}


class Layer(NamedTuple):
    """A NamedTuple among the containers."""

    weight: Any
    bias: Any


def a_loss_is_lifted(trial: Trial, dtype: str) -> None:
    """Scale multiplies in float32 or wider: 2 times a scale of 2**16 is infinite in float16, and must not be."""
    state, lifted = trial.state(FixedScaling(_SCALE)), LIFTED.get(dtype, dtype)
    scale = trial.run(trial.adapter.verbs.scale)
    for values in (np.float64(2.0), np.array([2.0, -3.0, 0.0]), np.float64(_fraction(dtype))):
        scaled = scale(trial.array(values, dtype), state)
        trial.expect(f"a {dtype} loss, scaled by 2**16,", scaled, values * _SCALE, lifted)
    for other in _OTHER_SCALES:
        scaled = scale(trial.array(2.0, dtype), trial.state(FixedScaling(other)))
        trial.expect(f"a {dtype} loss, scaled by {other:g},", scaled, 2.0 * other, lifted)


def losses_keep_their_structure(trial: Trial) -> None:
    """Scale takes nested losses, and leaves None alone."""
    dtype = trial.adapter.dtypes[0]
    losses = Layer({"a": trial.array(2.0, dtype)}, [trial.array(3.0, "float32"), None])
    scaled = trial.run(trial.adapter.verbs.scale)(losses, trial.state(FixedScaling(_SCALE)))
    require_structure("scale", scaled, losses)
    trial.expect("the loss at ['a'], scaled,", scaled.weight["a"], 2.0 * _SCALE, LIFTED.get(dtype, dtype))
    trial.expect("the loss at [0], scaled,", scaled.bias[0], 3.0 * _SCALE, "float32")


def gradients_survive(trial: Trial, dtype: str) -> None:
    """Unscale returns 16-bit gradients in float32, where small ones survive, and others in their own dtype, exactly.

    The rule holds for small and large scales, too, and the gradients that are passed in do not change.
    """
    state, lifted = trial.state(FixedScaling(_SCALE)), LIFTED.get(dtype, dtype)
    small = _SMALLEST.get(dtype, 2.0**-100)
    values = np.array([1.5, -3.0, 0.0, -0.0, small, -small, _fraction(dtype), np.inf])
    if "complex" in dtype:
        values = values[:3] * (1.0 - 0.5j)
    unscale, grad = trial.run(trial.adapter.verbs.unscale), trial.array(values, dtype)
    trial.expect(f"a {dtype} gradient, unscaled,", unscale(grad, state), values / _SCALE, lifted)
    trial.expect(f"a {dtype} gradient, after it was unscaled,", grad, values, dtype)
    for other in _OTHER_SCALES:
        unscaled = unscale(trial.array(values[:2], dtype), trial.state(FixedScaling(other)))
        trial.expect(f"a {dtype} gradient, unscaled by {other:g},", unscaled, values[:2] / other, lifted)


def any_scale_unscales(trial: Trial, dtype: str) -> None:
    """Unscale divides by a scale that is not a power of two to within two units in the last place of float32."""
    values = np.arange(1.0, 200.0)
    unscaled = trial.run(trial.adapter.verbs.unscale)(trial.array(values, dtype), trial.state(FixedScaling(3.0)))
    trial.expect(f"a {dtype} gradient, unscaled by 3,", unscaled, values / 3.0, LIFTED.get(dtype, dtype), rtol=2.0**-22)


def gradients_keep_their_structure(trial: Trial) -> None:
    """Unscale keeps containers, leaves None, integers and bools alone, and takes empty leaves."""
    dtype = trial.adapter.dtypes[0]
    grads = {
        "layer": Layer(trial.array([_SCALE], dtype if dtype != "float16" else trial.adapter.dtypes[-1]), None),
        "counts": [trial.array([3, 70000], "int32"), (None, trial.array(np.zeros(0), dtype))],
        "is_frozen": trial.array(True, "bool"),
    }
    unscaled = trial.run(trial.adapter.verbs.unscale)(grads, trial.state(FixedScaling(2.0)))
    require_structure("unscale", unscaled, grads)
    trial.expect("an integer leaf, unscaled,", unscaled["counts"][0], np.array([3, 70000], np.int32), "int32")
    trial.expect("a bool, unscaled,", unscaled["is_frozen"], np.True_, "bool")
    trial.expect("an empty leaf, unscaled,", unscaled["counts"][1][1], np.zeros(0), LIFTED.get(dtype, dtype))


def _fraction(dtype: str) -> float:
    """Return a number that needs all digits of a dtype wider than float32, or a few digits for a narrower one."""
    return 1.0 / 3.0 if dtype in ("float64", "complex128") else 0.375
