"""Loss scaling for JAX: the five verbs over pytrees, a scaled `value_and_grad`, and a wrapper for any optimizer.

Everything is pure and works eagerly and under every transform; the state is a pytree of 0-d arrays.
"""

from lossscale_core import GradientReport
from lossscale_jax._autodiff import ScaledGradients, value_and_grad
from lossscale_jax._export import register_state_types as _register_state_types
from lossscale_jax._grads import all_finite, scale, select, unscale
from lossscale_jax._optimizer import LossScaledState, get_scale_state, load_scale_state, loss_scaled
from lossscale_jax._report import overflow_report
from lossscale_jax._state import init_state

__all__ = [
    "GradientReport",
    "LossScaledState",
    "ScaledGradients",
    "all_finite",
    "get_scale_state",
    "init_state",
    "load_scale_state",
    "loss_scaled",
    "overflow_report",
    "scale",
    "select",
    "unscale",
    "value_and_grad",
]

for _type in (LossScaledState, ScaledGradients):  # a pickle names the face, so that rooms behind it may move
    _type.__module__ = __name__
del _type
_register_state_types()
