"""Policies by the names, parameters and defaults of TensorFlow's documentation."""

import contextlib
import math
from collections.abc import Callable
from typing import Any

from lossscale_core import DynamicScaling, FixedScaling, ScalingPolicy, as_policy
from lossscale_core.adapters import LARGEST_SCALE, check_setting, describe
from lossscale_core.errors import PolicyError

_LARGEST_COUNT = 2**31 - 1
"""The largest int32."""


def FixedLossScale(loss_scale_value: float) -> FixedScaling:  # noqa: N802, the name in the documentation
    """Return the policy of `tf.compat.v1.mixed_precision.FixedLossScale`. Here, an overflow skips the step.

    Args:
        loss_scale_value: The loss scale, at least 1.

    Returns:
        A new policy.

    Raises:
        PolicyError: `loss_scale_value` is below 1 or not a number. TensorFlow raises `ValueError`, a base class of this
            error.
    """
    return FixedScaling(_scale("loss_scale_value", loss_scale_value))


def DynamicLossScale(  # noqa: N802
    initial_loss_scale: float = 2.0**15, increment_period: float = 2000, multiplier: float = 2.0
) -> DynamicScaling:
    """Return the policy of `tf.compat.v1.mixed_precision.DynamicLossScale`.

    Args:
        initial_loss_scale: The first loss scale, at least 1.
        increment_period: The number of finite steps in a row after which the scale grows. It is rounded down.
        multiplier: Multiplies the scale when it grows, and divides it on an overflow; above 1.

    Returns:
        A new policy.

    Raises:
        PolicyError: An argument is not a number, or breaks its rule; the message names it.
    """
    growth_factor = _setting("multiplier", multiplier, "growth_factor")
    return DynamicScaling(
        init_scale=_scale("initial_loss_scale", initial_loss_scale),
        growth_interval=_count("increment_period", increment_period, math.floor),
        growth_factor=growth_factor,
        backoff_factor=1.0 / growth_factor,
        max_scale=LARGEST_SCALE,
    )


def FixedLossScaleManager(loss_scale: float) -> FixedScaling:  # noqa: N802
    """Return the policy of `tf.contrib.mixed_precision.FixedLossScaleManager`.

    Args:
        loss_scale: The loss scale, at least 1.

    Returns:
        A new policy.

    Raises:
        PolicyError: `loss_scale` is below 1 or not a number. TensorFlow raises `ValueError`, a base class of this
            error.
    """
    return FixedScaling(_scale("loss_scale", loss_scale))


def ExponentialUpdateLossScaleManager(  # noqa: N802
    init_loss_scale: float,
    incr_every_n_steps: float,
    decr_every_n_nan_or_inf: float = 2,
    incr_ratio: float = 2.0,
    decr_ratio: float = 0.8,
) -> DynamicScaling:
    """Return the policy of `tf.contrib.mixed_precision.ExponentialUpdateLossScaleManager`.

    Args:
        init_loss_scale: The first loss scale, at least 1.
        incr_every_n_steps: The number of finite steps in a row after which the scale grows.
        decr_every_n_nan_or_inf: The number of overflows after which the scale falls.
        incr_ratio: Multiplies the scale when it grows; above 1.
        decr_ratio: Multiplies the scale when it falls; between 0 and 1.

    Returns:
        A new policy.

    Raises:
        PolicyError: An argument is not a number, or breaks its rule; the message names it.
    """
    return DynamicScaling(
        init_scale=_scale("init_loss_scale", init_loss_scale),
        growth_interval=_count("incr_every_n_steps", incr_every_n_steps, math.ceil),
        hysteresis=_count("decr_every_n_nan_or_inf", decr_every_n_nan_or_inf, math.ceil),
        growth_factor=_setting("incr_ratio", incr_ratio, "growth_factor"),
        backoff_factor=_setting("decr_ratio", decr_ratio, "backoff_factor"),
        refill_on_finite=False,
        refill_on_backoff=True,
        max_scale=LARGEST_SCALE,
    )


def _number(argument: str, value: Any) -> float:
    """Return a value as a float. The value may be a number, its text, or a list, array or tensor of one element."""
    item = value[0] if isinstance(value, list | tuple) and len(value) == 1 else value
    item = item.numpy() if hasattr(item, "numpy") else item
    item = item.item() if getattr(item, "size", None) == 1 else item
    with contextlib.suppress(ValueError, OverflowError):
        if isinstance(item, int | float | str) and not isinstance(item, bool):
            return float(item)
    raise PolicyError(f"{argument}={describe(value)} must be a number that a float can hold; pass one such as 2000")


def _scale(argument: str, value: Any) -> float:
    """Return a first scale of at least 1, which is TensorFlow's smallest scale.

    https://github.com/tensorflow/tensorflow/blob/v2.21.0/tensorflow/python/training/experimental/loss_scale.py#L411
    """
    if not _number(argument, value) >= 1.0:
        raise PolicyError(f"{argument}={describe(value)}: loss scale must be at least 1")
    return _setting(argument, value, "init_scale")


def _setting(argument: str, value: Any, setting: str) -> float:
    """Return the value of an argument as a policy setting. The message of a `PolicyError` names the argument."""
    try:
        number: float = check_setting(setting, _number(argument, value))
    except PolicyError as reason:
        raise PolicyError(f"{argument}={describe(value)} cannot be the setting {setting}: {reason}") from None
    return number


def _count(argument: str, value: Any, to_int: Callable[[float], int]) -> int:
    """Return a count. TensorFlow compares its counter with `>=`, so that numbers below 1 act like 1.

    Keras and `tf.compat.v1` round a fraction down. `tf.contrib` compares the counter with the fraction:
    https://github.com/tensorflow/tensorflow/blob/v2.21.0/tensorflow/python/training/experimental/loss_scale.py#L346
    """
    number = _number(argument, value)
    if math.isnan(number):
        raise PolicyError(f"{argument}={describe(value)} must be a number; pass a whole number such as 2000")
    return to_int(min(max(number, 1), _LARGEST_COUNT))


def policy_from_loss_scale(loss_scale: Any) -> ScalingPolicy:
    """Return the policy of a documented argument `loss_scale`. "dynamic" is then the documented rule, from 2**15."""
    return DynamicLossScale() if isinstance(loss_scale, str) and loss_scale == "dynamic" else as_policy(loss_scale)


def policy_from_arguments(
    policy: Any, loss_scale: Any, dynamic: bool | None, initial_scale: Any, growth_steps: Any
) -> ScalingPolicy:
    """Return the policy of the wrapper: the argument `policy`, or the policy of the documented arguments."""
    require_no_manager(loss_scale if policy is None else policy)
    arguments = {"dynamic": dynamic, "initial_scale": initial_scale, "dynamic_growth_steps": growth_steps}
    settings = {name: value for name, value in arguments.items() if value is not None}
    if not (isinstance(loss_scale, str) and loss_scale == "dynamic"):
        settings["loss_scale"] = loss_scale
    if policy is not None:
        if settings:
            names = ", ".join(f"{name}={describe(value)}" for name, value in settings.items())
            raise ValueError(
                f"policy={describe(policy)} and {names} are both given; pass either policy= or the settings"
            )
        return as_policy(policy)
    if not isinstance(dynamic, bool | None):
        raise TypeError(f'"dynamic" argument to LossScaleOptimizer.__init__ must be a bool, but got: {dynamic!r}')
    if dynamic is not None and "loss_scale" in settings:
        raise ValueError(
            f"loss_scale={describe(loss_scale)} and dynamic={dynamic} are both set; pass either loss_scale= or dynamic="
        )
    if isinstance(loss_scale, bool):
        dynamic = loss_scale
    elif "loss_scale" in settings:
        if len(settings) > 1:
            raise ValueError("initial_scale and dynamic_growth_steps go with dynamic scaling; set them in the policy")
        return as_policy(loss_scale)
    if dynamic is not False:
        return DynamicScaling(
            init_scale=2.0**15 if initial_scale is None else _scale("initial_scale", initial_scale),
            growth_interval=2000 if growth_steps is None else _count("dynamic_growth_steps", growth_steps, math.floor),
            max_scale=LARGEST_SCALE,
        )
    if initial_scale is None:
        raise ValueError('"initial_scale" must be specified if "dynamic" is False')
    if growth_steps is not None:
        raise ValueError(f'"dynamic_growth_steps" must be None if "dynamic" is False, but got: {growth_steps}')
    return FixedScaling(_setting("initial_scale", initial_scale, "init_scale"))


_BASE_ARGUMENTS = {
    **dict.fromkeys(["weight_decay", "clipnorm", "clipvalue", "ema_overwrite_frequency", "loss_scale_factor"]),
    **{"gradient_accumulation_steps": None, "use_ema": False, "ema_momentum": 0.99},
}
"""Arguments of every Keras optimizer that have no effect on a wrapper. Keras 3.0 to 3.11 save these values."""


def require_no_base_arguments(arguments: dict[str, Any]) -> None:
    """Raise Keras's `ValueError` for arguments that belong to the inner optimizer, and for unknown arguments."""
    if unknown := [name for name in arguments if name not in _BASE_ARGUMENTS]:
        raise ValueError(f"LossScaleOptimizer does not support arguments: `{'`, `'.join(unknown)}`")
    for name, value in arguments.items():
        if value != _BASE_ARGUMENTS[name]:
            raise ValueError(
                f"LossScaleOptimizer does not support `{name}`. Instead, set `{name}` on the `inner_optimizer`."
            )


def require_no_manager(loss_scale: Any) -> None:
    """Raise `PolicyError` for a loss scale manager, which is not a policy because it changes its own variables."""
    if hasattr(loss_scale, "update_loss_scale"):
        raise PolicyError(
            f"{type(loss_scale).__name__} is a loss scale manager, which updates variables of its own; pass a policy: "
            "its update(state, grads_finite) returns a new state. FixedLossScaleManager and "
            "ExponentialUpdateLossScaleManager of lossscale_tf.v1 return policies, and a policy of your own is a "
            "class with init_state and update"
        )
