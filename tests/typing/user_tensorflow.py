"""A TensorFlow user's code, for type checkers alone: `nox -s typing` runs mypy and pyright on it.

TensorFlow and Keras declare no types, so that only what the library adds is typed: no name that it has may be unknown.
"""

from typing import Any, assert_type

import keras  # type: ignore[import-untyped]

from lossscale_core import ScaleState, StepInfo
from lossscale_tf import DynamicScaling, LossScaleLogger, LossScaleOptimizer, SpikeGuard, init_state, scale, unscale, v1


def fit(model: Any, x: Any, y: Any) -> str:
    """Train by `fit`."""
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.5), DynamicScaling(init_scale=2.0**20), guard=SpikeGuard())
    optimizer.build(model.trainable_variables)
    model.fit(x, y, callbacks=[LossScaleLogger()])
    assert_type(optimizer.last_step, StepInfo)
    assert_type(optimizer.scale_state, ScaleState)
    return optimizer.diagnose()


def step(optimizer: LossScaleOptimizer, model: Any, tape: Any, loss: Any) -> None:
    """Take a step with the calls of TensorFlow's documents."""
    scaled_loss = optimizer.get_scaled_loss(loss)
    scaled_grads = tape.gradient(scaled_loss, model.trainable_variables)
    grads = optimizer.get_unscaled_gradients(scaled_grads, loss=scaled_loss)
    optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
    optimizer.forget_losses()


def use_sessions(adam: Any, loss: Any, global_step: Any) -> Any:
    """Wrap an optimizer of `tf.compat.v1`."""
    return v1.LossScaleOptimizer(adam, "dynamic").minimize(loss, global_step)  # pyright: ignore[reportUnknownVariableType]


def use_the_verbs(grads: dict[str, Any]) -> dict[str, Any]:
    """Keep what goes in where it comes out."""
    state = assert_type(init_state("dynamic"), ScaleState)
    return assert_type(unscale(scale(grads, state), state), dict[str, Any])
