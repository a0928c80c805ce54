"""Checks of arguments that both wrappers share."""

from typing import Any


def pairs_of(grads_and_vars: Any) -> list[tuple[Any, Any]]:
    """Return (gradient, variable) pairs as a list; raise `TypeError` for anything else."""
    try:
        return [(grad, variable) for grad, variable in grads_and_vars]
    except (TypeError, ValueError) as error:
        raise TypeError(f"grads_and_vars={grads_and_vars!r} must be (gradient, variable) pairs") from error


def scales_already(optimizer: Any) -> bool:
    """Return whether an optimizer scales losses: a wrapper of TensorFlow, Keras, tf_keras or this package."""
    # By name, since tf_keras need not be installed.
    return any("LossScaleOptimizer" in base.__name__ for base in type(optimizer).__mro__)
