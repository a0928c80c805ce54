"""The policies that TensorFlow's own documents name, under their parameters and defaults."""

from typing import Any

from lossscale_core import LARGEST_SCALE, DynamicScaling, FixedScaling, as_policy
from lossscale_core.errors import PolicyError

_DOCUMENTED_SCALE = 2.0**15
_DOCUMENTED_GROWTH = 2000


def FixedLossScale(loss_scale_value: float) -> FixedScaling:  # noqa: N802, the document's own name
    """Return the policy of `tf.compat.v1.mixed_precision.FixedLossScale`; here an overflow skips the step."""
    return FixedScaling(float(loss_scale_value))


def DynamicLossScale(  # noqa: N802
    initial_loss_scale: float = _DOCUMENTED_SCALE, increment_period: int = _DOCUMENTED_GROWTH, multiplier: float = 2.0
) -> DynamicScaling:
    """Return the policy of `tf.compat.v1.mixed_precision.DynamicLossScale`."""
    return DynamicScaling(
        init_scale=float(initial_loss_scale),
        growth_interval=int(increment_period),
        growth_factor=float(multiplier),
        backoff_factor=1.0 / float(multiplier),
        max_scale=LARGEST_SCALE,
    )


def FixedLossScaleManager(loss_scale: float) -> FixedScaling:  # noqa: N802
    """Return the policy of `tf.contrib.mixed_precision.FixedLossScaleManager`; `ValueError` below 1, as there."""
    if not loss_scale >= 1.0:
        raise ValueError(f"loss_scale={loss_scale!r}: loss scale must be at least 1")
    return FixedScaling(float(loss_scale))


def ExponentialUpdateLossScaleManager(  # noqa: N802
    init_loss_scale: float,
    incr_every_n_steps: int,
    decr_every_n_nan_or_inf: int = 2,
    incr_ratio: float = 2.0,
    decr_ratio: float = 0.8,
) -> DynamicScaling:
    """Return the policy of `tf.contrib.mixed_precision.ExponentialUpdateLossScaleManager`."""
    return DynamicScaling(
        init_scale=float(init_loss_scale),
        growth_interval=int(incr_every_n_steps),
        growth_factor=float(incr_ratio),
        backoff_factor=float(decr_ratio),
        hysteresis=int(decr_every_n_nan_or_inf),
        refill_on_finite=False,
        refill_on_backoff=True,
        max_scale=LARGEST_SCALE,
    )


def documented_policy(loss_scale: Any, dynamic: bool | None, initial_scale: Any, growth_steps: Any) -> Any:
    """Return the policy that the arguments of `tf.keras.mixed_precision.LossScaleOptimizer` stand for."""
    if dynamic is not None and not isinstance(dynamic, bool):
        raise TypeError(f'"dynamic" argument to LossScaleOptimizer.__init__ must be a bool, but got: {dynamic!r}')
    if isinstance(loss_scale, bool):
        loss_scale, dynamic = "dynamic", loss_scale
    if dynamic is None or dynamic:
        if loss_scale != "dynamic":
            if initial_scale is not None or growth_steps is not None:
                raise ValueError(
                    "initial_scale and dynamic_growth_steps go with dynamic scaling; set them in the policy"
                )
            return as_policy(loss_scale)
        return DynamicLossScale(
            _DOCUMENTED_SCALE if initial_scale is None else initial_scale,
            _DOCUMENTED_GROWTH if growth_steps is None else growth_steps,
        )
    if initial_scale is None:
        raise ValueError('"initial_scale" must be specified if "dynamic" is False')
    if growth_steps is not None:
        raise ValueError(f'"dynamic_growth_steps" must be None if "dynamic" is False, but got: {growth_steps}')
    return FixedScaling(float(initial_scale))


_BASE_DEFAULTS = {
    "weight_decay": None,
    "clipnorm": None,
    "clipvalue": None,
    "use_ema": False,
    "ema_momentum": 0.99,
    "ema_overwrite_frequency": None,
    "loss_scale_factor": None,
    "gradient_accumulation_steps": None,
}
"""Arguments of every Keras optimizer, which do nothing on a wrapper; Keras 3.0 to 3.11 save them with these values."""


def require_no_base_arguments(arguments: dict[str, Any]) -> None:
    """Raise `ValueError`, in Keras's words, for arguments that belong on the inner optimizer, and for unknown ones."""
    if unknown := [name for name in arguments if name not in _BASE_DEFAULTS]:
        raise ValueError(f"LossScaleOptimizer does not support arguments: `{'`, `'.join(unknown)}`.")
    for name, value in arguments.items():
        if value != _BASE_DEFAULTS[name]:
            raise ValueError(
                f"LossScaleOptimizer does not support `{name}`. Instead, set `{name}` on the `inner_optimizer`."
            )


def require_policy_or_number(loss_scale: Any) -> None:
    """Raise `PolicyError` for an object with a loss scale manager's methods, which change variables of their own."""
    if hasattr(loss_scale, "update_loss_scale"):
        raise PolicyError(
            f"{type(loss_scale).__name__} is a loss scale manager, whose update is made of operations on variables of "
            "its own; pass a policy, whose update(state, grads_finite) returns a new state: FixedLossScaleManager and "
            "ExponentialUpdateLossScaleManager of lossscale_tf.v1 return policies, and a policy of your own is a "
            "class with init_state and update"
        )


def policy_of_loss_scale(config: dict[str, Any]) -> Any:
    """Return the policy of a serialized `FixedLossScale` or `DynamicLossScale`."""
    if config["class_name"] == "FixedLossScale":
        return FixedLossScale(**config["config"])
    return DynamicLossScale(**config["config"])
