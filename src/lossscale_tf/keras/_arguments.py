"""The arguments of the wrapper's methods, in the words of Keras 3 and of tf_keras, checked."""

from typing import Any

import keras
import tensorflow as tf

from lossscale_tf._verbs import Gradient, as_tensor, is_gradient
from lossscale_tf._warning import warn_caller
from lossscale_tf._wrapper import pairs_of
from lossscale_tf.keras._inner import require_no_session


def loss_arguments(loss: Any, tape: Any, grad_loss: Any, runs_again: bool) -> tuple[tf.GradientTape | None, Any]:
    """Return the tape and `grad_loss` of a loss to minimize; `ValueError` if it cannot be differentiated, or run again.

    `runs_again` says that the loss may be run several times.
    """
    if runs_again and (tape is not None or not callable(loss)):
        raise ValueError("with retries= or protect= the loss runs within minimize; pass a callable and no tape")
    if not callable(loss) and tape is None:
        raise ValueError("a loss that is a tensor needs the tape it was computed under; pass tape=, or a callable")
    if tape is not None and not isinstance(tape, tf.GradientTape):  # of an older signature, grad_loss came third
        return None, tape
    return tape, grad_loss


def keras_pairs(grads_and_vars: Any) -> list[tuple[Any, Any]]:
    """Return (gradient, variable) pairs as a list; raise `TypeError` for anything else."""
    pairs = pairs_of(grads_and_vars)
    if not pairs:
        raise ValueError("grads_and_vars is empty, so that no variable has a gradient; pass (gradient, variable) pairs")
    for _, variable in pairs:
        if not isinstance(variable, tf.Variable | keras.Variable):
            raise TypeError(f"{variable!r} is not a variable; grads_and_vars must be (gradient, variable) pairs")
    return pairs


def are_summed(aggregation: dict[str, Any]) -> bool:
    """Return whether gradients are summed over replicas already, in the words of either tf_keras interface."""
    are_to_be_summed = bool(aggregation.pop("experimental_aggregate_gradients", True))
    are_to_be_summed &= not aggregation.pop("skip_gradients_aggregation", False)
    if aggregation:
        raise TypeError(f"apply_gradients() got an unexpected keyword argument {next(iter(aggregation))!r}")
    return not are_to_be_summed


def require_gradients(grads: list[Any], variables: list[Any]) -> list[tuple[Gradient, Any]]:
    """Return those (gradient, variable) pairs that have a gradient; raise if there is none, or none can be applied."""
    require_no_session()
    if tf.distribute.in_cross_replica_context():
        raise ValueError("gradients are applied in a replica context; call this inside strategy.run")
    present = [(_as_gradient(grad), each) for grad, each in zip(grads, variables, strict=True) if grad is not None]
    if not present:
        raise ValueError(f"none of the variables {[v.name for v in variables]} has a gradient")
    if missing := [v.name for grad, v in zip(grads, variables, strict=True) if grad is None]:
        warn_caller(f"no gradient exists for {', '.join(missing)}; they keep their values")
    return present


def _as_gradient(grad: Any) -> Gradient:
    tensor = as_tensor(grad)
    if not is_gradient(tensor):
        raise TypeError(f"a gradient of dtype {tensor.dtype.name} cannot be applied; differentiate floats")
    return tensor
