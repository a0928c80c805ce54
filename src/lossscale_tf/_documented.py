"""The policies that TensorFlow's own documents name, under their parameters and defaults."""

from typing import Any, cast

from lossscale_core import DynamicScaling, FixedScaling, ScalingPolicy, as_policy
from lossscale_core.dialects import from_peer
from lossscale_core.errors import PolicyError

# What a tool's arguments mean is said once, in `lossscale_core.dialects`. These functions are called by the tool's own
# names, so that what it does wrong is known to their users, and no warning repeats it.


def FixedLossScale(loss_scale_value: float) -> FixedScaling:  # noqa: N802, the document's own name
    """Return the policy of `tf.compat.v1.mixed_precision.FixedLossScale`; here an overflow skips the step.

    `ValueError` below 1, as there.
    """
    _require_at_least_one("loss_scale_value", loss_scale_value)
    return cast(FixedScaling, from_peer("tf-v1", {"loss_scale_value": float(loss_scale_value)}, warn=False))


def DynamicLossScale(  # noqa: N802
    initial_loss_scale: float = 2.0**15, increment_period: float = 2000, multiplier: float = 2.0
) -> DynamicScaling:
    """Return the policy of `tf.compat.v1.mixed_precision.DynamicLossScale`."""
    config = {"initial_loss_scale": float(initial_loss_scale), "increment_period": increment_period}
    return cast(DynamicScaling, from_peer("tf-v1", {**config, "multiplier": multiplier}, warn=False))


def FixedLossScaleManager(loss_scale: float) -> FixedScaling:  # noqa: N802
    """Return the policy of `tf.contrib.mixed_precision.FixedLossScaleManager`; `ValueError` below 1, as there."""
    _require_at_least_one("loss_scale", loss_scale)
    return cast(FixedScaling, from_peer("tf-contrib", {"loss_scale": float(loss_scale)}, warn=False))


def ExponentialUpdateLossScaleManager(  # noqa: N802
    init_loss_scale: float,
    incr_every_n_steps: float,
    decr_every_n_nan_or_inf: float = 2,
    incr_ratio: float = 2.0,
    decr_ratio: float = 0.8,
) -> DynamicScaling:
    """Return the policy of `tf.contrib.mixed_precision.ExponentialUpdateLossScaleManager`."""
    config = {
        "init_loss_scale": float(init_loss_scale),
        "incr_every_n_steps": incr_every_n_steps,
        "decr_every_n_nan_or_inf": decr_every_n_nan_or_inf,
        "incr_ratio": float(incr_ratio),
        "decr_ratio": float(decr_ratio),
    }
    return cast(DynamicScaling, from_peer("tf-contrib", config, warn=False))


def _require_at_least_one(name: str, value: float) -> None:
    if not value >= 1.0:
        raise PolicyError(f"{name}={value!r}: loss scale must be at least 1")


def documented_policy(loss_scale: Any, dynamic: bool | None, initial_scale: Any, growth_steps: Any) -> ScalingPolicy:
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
        config = {"initial_scale": initial_scale, "dynamic_growth_steps": growth_steps}
        return from_peer("keras", config, warn=False)
    if initial_scale is None:
        raise ValueError('"initial_scale" must be specified if "dynamic" is False')
    if growth_steps is not None:
        raise ValueError(f'"dynamic_growth_steps" must be None if "dynamic" is False, but got: {growth_steps}')
    return from_peer("keras", {"dynamic": False, "initial_scale": float(initial_scale)}, warn=False)


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


def policy_of_loss_scale(config: dict[str, Any]) -> FixedScaling | DynamicScaling:
    """Return the policy of a serialized `FixedLossScale` or `DynamicLossScale`."""
    if config["class_name"] == "FixedLossScale":
        return FixedLossScale(**config["config"])
    return DynamicLossScale(**config["config"])
