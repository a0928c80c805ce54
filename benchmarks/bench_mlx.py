"""What loss scaling costs in MLX, against MLX alone: ratios of interleaved medians.

    python benchmarks/bench_mlx.py                                      measure and print
    python benchmarks/bench_mlx.py --quick                              a smoke test, without mx.compile
    python benchmarks/bench_mlx.py --output-folder docs/benchmarks  keep the table

A step is a whole training step of a perceptron in float32 with Adam. Runs on MLX's default device. Exits with status 1
where a bar is missed by more than the noise allowed.
"""

import math
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from measuring import Row, interleaved, run

from lossscale_core import SpikeGuard
from lossscale_mlx import LossScaleOptimizer

Step = Callable[[], Any]
CASES: dict[str, tuple[bool, dict[str, Any]]] = {
    "scaled": (False, {}),
    "scaled and clipped, against optim.clip_grad_norm": (True, {"max_norm": 1.0}),
    "scaled, clipped and guarded, against optim.clip_grad_norm": (True, {"max_norm": 1.0, "guard": SpikeGuard()}),
}
"""For each work, whether MLX alone clips, and the settings of the wrapper."""


def loss_fn(model: nn.Module, inputs: mx.array, labels: mx.array) -> mx.array:
    """Return the loss of a batch."""
    return nn.losses.cross_entropy(model(inputs), labels, reduction="mean")


def build(width: int, settings: dict[str, Any] | None, clips: bool, compiled: bool) -> Step:
    """Return a step with loss scaling, or without it if there are no settings."""
    mx.random.seed(0)
    model = nn.Sequential(nn.Linear(256, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))
    inputs, labels = mx.random.normal((64, 256)), mx.random.randint(0, 10, (64,))
    optimizer: Any = optim.Adam(1e-3) if settings is None else LossScaleOptimizer(optim.Adam(1e-3), **settings)
    optimizer.init(model.trainable_parameters())
    differentiate = (nn.value_and_grad if settings is None else optimizer.value_and_grad)(model, loss_fn)
    state = [model.state, optimizer.state]

    def step(inputs: mx.array, labels: mx.array) -> mx.array:
        loss, grads = differentiate(model, inputs, labels)
        if settings is None and clips:
            grads, _ = optim.clip_grad_norm(grads, 1.0)
        optimizer.update(model, grads)
        return loss

    taken = partial(mx.compile, inputs=state, outputs=state)(step) if compiled else step

    def evaluated() -> None:
        mx.eval(taken(inputs, labels), state)

    evaluated()
    return evaluated


def measure(quick: bool) -> list[Row]:
    """Return a row for each size, way of running and work."""
    rows = []
    for width, weights, bar in ((64, "21 thousand weights", math.inf), (1024, "1.3 million weights", 1.3)):
        for compiled in (False,) if quick else (False, True):
            plain = {clips: build(width, None, clips, compiled) for clips in (False, True)}
            scaled = [build(width, settings, clips, compiled) for clips, settings in CASES.values()]
            *times, alone, clipped = interleaved([*scaled, plain[False], plain[True]], 3 if quick else 60)
            where = f"{weights}, {'compiled' if compiled else 'eager'}"
            for (work, (clips, _)), time in zip(CASES.items(), times, strict=True):
                rows.append(Row(f"{where}: {work}", "×", time / (clipped if clips else alone), bar))
    return rows


if __name__ == "__main__":
    versions = f"MLX {mx.__version__} on {mx.default_device()}"
    notes = "A number is the time of a whole training step, as a multiple of the same step of MLX alone."
    sys.exit(run("mlx", "What loss scaling costs in MLX", measure, versions, __doc__ or "", notes))
