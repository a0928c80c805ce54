"""Loss scaling for JAX: the five verbs over pytrees, a scaled `value_and_grad`, and a wrapper for any optimizer.

The verbs are `init_state`, `scale`, `all_finite`, `unscale` and `select`. All functions are pure. They work eagerly,
and all except `overflow_report` work under JAX's transforms. A scale state is a pytree of arrays of shape `()`.
"""

try:
    import optax as _optax  # noqa: F401  # also imports jax
except ModuleNotFoundError as error:
    if error.name not in ("jax", "optax"):
        raise
    problem = f"lossscale_jax needs jax and optax, and {error.name} is not installed"
    raise ModuleNotFoundError(f'{problem}; run: pip install "lossscale[jax]"', name=error.name) from error

from lossscale_core import DynamicScaling, FixedScaling, NoScaling, SpikeGuard, __version__
from lossscale_jax._optimizer import LossScaledTransformation, loss_scaled
from lossscale_jax._states import LastStep, LossScaledState, Window, get_last_step, get_scale_state, load_scale_state
from lossscale_jax._verbs import all_finite, init_state, overflow_report, scale, select, unscale, value_and_grad

__all__ = [
    "DynamicScaling",
    "FixedScaling",
    "LastStep",
    "LossScaledState",
    "LossScaledTransformation",
    "NoScaling",
    "SpikeGuard",
    "Window",
    "__version__",
    "all_finite",
    "get_last_step",
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

for _type in (LastStep, LossScaledState, LossScaledTransformation, Window):
    # A pickle stores the module name of a class. With the public name, the private modules may change.
    _type.__module__ = __name__
del _type
