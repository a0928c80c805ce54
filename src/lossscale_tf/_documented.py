"""The policies that TensorFlow's own documents name, under their parameters and defaults."""

from typing import Any

from lossscale_core import LARGEST_SCALE, DynamicScaling, FixedScaling, as_policy

_DOCUMENTED_SCALE = 2.0**15
_DOCUMENTED_GROWTH = 2000


def documented_policy(loss_scale: Any, dynamic: bool | None, initial_scale: Any, growth_steps: Any) -> Any:
    """Return the policy that the arguments of `tf.keras.mixed_precision.LossScaleOptimizer` stand for."""
    if isinstance(loss_scale, bool):
        loss_scale, dynamic = "dynamic", loss_scale
    if dynamic is None or dynamic:
        if loss_scale != "dynamic":
            if initial_scale is not None or growth_steps is not None:
                raise ValueError(
                    "initial_scale and dynamic_growth_steps go with dynamic scaling; set them in the policy"
                )
            return as_policy(loss_scale)
        return DynamicScaling(
            init_scale=_DOCUMENTED_SCALE if initial_scale is None else float(initial_scale),
            growth_interval=_DOCUMENTED_GROWTH if growth_steps is None else int(growth_steps),
            max_scale=LARGEST_SCALE,
        )
    if initial_scale is None:
        raise ValueError('"initial_scale" must be specified if "dynamic" is False')
    if growth_steps is not None:
        raise ValueError(f'"dynamic_growth_steps" must be None if "dynamic" is False, but got {growth_steps}')
    return FixedScaling(float(initial_scale))


def policy_of_loss_scale(config: dict[str, Any]) -> Any:
    """Return the policy of a serialized `FixedLossScale` or `DynamicLossScale`."""
    values = config["config"]
    if config["class_name"] == "FixedLossScale":
        return FixedScaling(float(values["loss_scale_value"]))
    factor = float(values["multiplier"])
    return DynamicScaling(
        init_scale=float(values["initial_loss_scale"]),
        growth_interval=int(values["increment_period"]),
        growth_factor=factor,
        backoff_factor=1.0 / factor,
        max_scale=LARGEST_SCALE,
    )
