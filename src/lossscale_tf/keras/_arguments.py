"""Checks of the arguments of the wrapper, which has the parameter names of Keras 3 and of tf_keras."""

from typing import Any

import keras
import tensorflow as tf

from lossscale_core import ScalingPolicy
from lossscale_core.adapters import describe, require_pairs, warn_caller
from lossscale_tf._documented import documented_policy, policy_of, require_policy_or_number
from lossscale_tf._verbs import Gradient, as_tensor
from lossscale_tf.keras._inner import require_no_session

_DEFAULTS = {"loss_scale": "dynamic", "dynamic": None, "initial_scale": None, "dynamic_growth_steps": None}


def policy_of_arguments(
    policy: Any, loss_scale: Any, dynamic: bool | None, initial_scale: float | None, growth_steps: int | None
) -> ScalingPolicy:
    """Return the policy of the constructor's arguments: either `policy`, or the one that the others describe."""
    require_policy_or_number(loss_scale if policy is None else policy)
    if policy is None:
        return documented_policy(loss_scale, dynamic, initial_scale, growth_steps)
    values = (loss_scale, dynamic, initial_scale, growth_steps)
    pairs = zip(_DEFAULTS.items(), values, strict=True)
    if settings := ", ".join(f"{name}={describe(value)}" for (name, default), value in pairs if value != default):
        raise ValueError(
            f"policy={describe(policy)} and {settings} are both given; pass either policy= or the settings"
        )
    return policy_of(policy)


def loss_arguments(loss: Any, tape: Any, grad_loss: Any) -> tuple[tf.GradientTape | None, Any]:
    """Return the tape and `grad_loss` of a loss; raise `ValueError` if it cannot be differentiated."""
    if not callable(loss) and tape is None:
        raise ValueError("a loss that is a tensor needs the tape it was computed under; pass tape=, or a callable")
    if tape is not None and not isinstance(tape, tf.GradientTape):  # in an older signature, grad_loss was third
        return None, tape
    return tape, grad_loss


def keras_pairs(grads_and_vars: Any) -> tuple[list[Any], list[Any]]:
    """Return gradients and variables of pairs; raise `TypeError` for anything else."""
    pairs = require_pairs(grads_and_vars, "apply_gradients")
    if not pairs:
        raise ValueError("grads_and_vars is empty, so that no variable has a gradient; pass (gradient, variable) pairs")
    for _, variable in pairs:
        if not isinstance(variable, tf.Variable | keras.Variable):
            raise TypeError(f"{variable!r} is not a variable; grads_and_vars must be (gradient, variable) pairs")
    grads, variables = zip(*pairs, strict=True)
    return list(grads), list(variables)


def are_summed(aggregation: dict[str, Any]) -> bool:
    """Return whether gradients are summed over replicas already, by the argument of either tf_keras interface."""
    are_to_be_summed = bool(aggregation.pop("experimental_aggregate_gradients", True))
    are_to_be_summed &= not aggregation.pop("skip_gradients_aggregation", False)
    if aggregation:
        raise TypeError(f"apply_gradients() got an unexpected keyword argument {next(iter(aggregation))!r}")
    return not are_to_be_summed


def present_gradients(grads: list[Any], variables: list[Any]) -> tuple[list[Gradient], list[Any]]:
    """Return the gradients that are not None, and their variables; raise an error if none can be applied."""
    require_no_session()
    present = [each for grad, each in zip(grads, variables, strict=True) if grad is not None]
    if not present:
        raise ValueError(f"none of the variables {[v.name for v in variables]} has a gradient")
    if len(present) < len(variables):
        missing = [v.name for grad, v in zip(grads, variables, strict=True) if grad is None]
        warn_caller(f"no gradient exists for {', '.join(missing)}; they keep their values")
    tensors = [as_tensor(grad) for grad in grads if grad is not None]
    for tensor in tensors:
        if not (tensor.dtype.is_floating or tensor.dtype.is_complex):
            raise TypeError(f"a gradient of dtype {tensor.dtype.name} cannot be applied; differentiate floats")
    return tensors, present
