"""Loss scaling for JAX: the five verbs over pytrees, a scaled `value_and_grad`, and a wrapper for any optimizer.

All functions are pure, and work eagerly and under every transform. The state is a pytree of 0-d arrays.
"""

try:
    import jax as _jax  # noqa: F401
    import optax as _optax  # noqa: F401
except ModuleNotFoundError as error:
    if error.name not in ("jax", "optax"):
        raise
    raise ModuleNotFoundError(
        f'lossscale_jax needs jax and optax, and {error.name} is not installed; run: pip install "lossscale[jax]"',
        name=error.name,
    ) from error

from lossscale_core.adapters import GradientReport
from lossscale_jax._attach import attach
from lossscale_jax._autodiff import LossCheckedGradients, ScaledGradients, value_and_grad
from lossscale_jax._decide import select
from lossscale_jax._export import register_state_types as _register_state_types
from lossscale_jax._optimizer import LossScaledTransformation, loss_scaled
from lossscale_jax._range import range_report
from lossscale_jax._report import overflow_report
from lossscale_jax._retries import RetriedGradients, retrying_value_and_grad
from lossscale_jax._state import (
    CountedLossScaledState,
    GuardedLossScaledState,
    LossScaledState,
    get_scale_state,
    load_scale_state,
)
from lossscale_jax._verbs import all_finite, init_state, scale, unscale

__all__ = [
    "CountedLossScaledState",
    "GradientReport",
    "GuardedLossScaledState",
    "LossCheckedGradients",
    "LossScaledState",
    "LossScaledTransformation",
    "RetriedGradients",
    "ScaledGradients",
    "all_finite",
    "attach",
    "get_scale_state",
    "init_state",
    "load_scale_state",
    "loss_scaled",
    "overflow_report",
    "range_report",
    "retrying_value_and_grad",
    "scale",
    "select",
    "unscale",
    "value_and_grad",
]

for _type in (
    CountedLossScaledState,
    GuardedLossScaledState,
    LossCheckedGradients,
    LossScaledState,
    LossScaledTransformation,
    RetriedGradients,
    ScaledGradients,
):
    # A pickle stores the module name of a class: the public one lets the private modules change.
    _type.__module__ = __name__
del _type
_register_state_types()
