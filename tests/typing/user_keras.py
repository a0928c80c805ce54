"""A Keras user's code, for type checkers alone: `nox -s typing` runs mypy and pyright on it.

Keras declares no types, so that only what the library adds is typed: no name that it has may be unknown.
"""

from typing import Any, assert_type

import keras  # type: ignore[import-untyped]

import lossscale_keras
from lossscale_core import ScaleState, ScalingPolicy, StepInfo
from lossscale_keras import DynamicScaling, LossScaleLogger, LossScaleOptimizer, SpikeGuard


def fit(model: Any, x: Any, y: Any) -> str:
    """Train by `fit`."""
    policy = DynamicScaling(init_scale=2.0**20)
    optimizer = LossScaleOptimizer(keras.optimizers.Adam(0.05), policy, global_clipnorm=1.0, guard=SpikeGuard())
    model.compile(optimizer=optimizer, loss="mse")
    model.fit(x, y, epochs=20, verbose=0, callbacks=[LossScaleLogger()])
    assert_type(optimizer.policy, ScalingPolicy)
    assert_type(optimizer.last_step, StepInfo)
    assert_type(optimizer.scale_state, ScaleState)
    assert_type(optimizer.metrics(), dict[str, Any])
    optimizer.check_limits()
    optimizer.load_state_dict(optimizer.state_dict())
    if optimizer.last_step.applied:
        print(float(optimizer.loss_scale))
    return optimizer.diagnose()


def step(optimizer: LossScaleOptimizer, model: Any, tape: Any, loss: Any, grads: list[Any]) -> None:
    """Take a step in a loop of one's own, on each backend."""
    optimizer.apply(tape.gradient(optimizer.scale_loss(loss), model.trainable_variables), model.trainable_variables)
    weights, _ = optimizer.stateless_apply(list(model.variables), grads, model.trainable_variables)
    print(lossscale_keras.overflow_report(list(zip(grads, weights, strict=True)), loss=loss).verdict)


def use_the_verbs(grads: dict[str, Any]) -> dict[str, Any]:
    """Keep what goes in where it comes out."""
    state = assert_type(lossscale_keras.init_state("dynamic"), ScaleState)
    grads = assert_type(lossscale_keras.unscale(lossscale_keras.scale(grads, state), state), dict[str, Any])
    return assert_type(lossscale_keras.select(lossscale_keras.all_finite(grads), grads, grads), dict[str, Any])
