"""The demo: a perceptron with a hand-written backward pass learns handwritten digits in real float16, on NumPy.

With a loss weight of 1 the gradients of this network do not underflow in float16. The demo therefore uses a small
weight, as multi-task, distillation and reinforcement learning do. Adam divides each gradient by its magnitude. In
float32 the weight therefore has no effect, but in float16 without scaling, gradients flush to zero.
"""

import bz2
import itertools
from importlib.resources import files
from typing import Any, NamedTuple

import numpy as np
from threadpoolctl import threadpool_limits

import lossscale_core as core

DEFAULT_POLICY = core.DynamicScaling(growth_interval=10, max_scale=2.0**48)
"""A policy that grows much faster than in real training, so that the scale settles within a few hundred steps."""
_WIDTHS = (64, 64, 32, 10)
_TRAINING_IMAGES, _BATCH_SIZE, _LEARNING_RATE = 1347, 512, 3e-3


class Run(NamedTuple):
    """A training run."""

    steps: Any
    """float64, shape `(4, steps)`: loss before its weight, scale, 1 if skipped, largest unscaled gradient magnitude."""
    zero: float
    """The share of zero elements in the last gradients."""
    accuracy: float
    """The share of test images that the network recognises at the end."""
    final_scale: float


def regimes(policy: core.ScalingPolicy) -> dict[str, tuple[str, core.ScalingPolicy]]:
    """Return the storage dtype and the policy of each regime by its name; the last regime is float16 with `policy`."""
    return {
        "float32": ("float32", core.NoScaling()),
        "float16, no scaling": ("float16", core.NoScaling()),
        "float16, fixed 64": ("float16", core.FixedScaling(64.0)),
        "float16, your policy" if policy != DEFAULT_POLICY else "float16, dynamic": ("float16", policy),
    }


@threadpool_limits.wrap(limits=1)  # for matrices this small, one thread is faster than several
@np.errstate(over="ignore", invalid="ignore")
def train(policy: Any, dtype: str, weight: float, seed: int, steps: int) -> Run:
    """Train the network and return the run.

    Args:
        policy: The policy.
        dtype: The dtype of stored weights, activations and gradients.
        weight: The weight of the loss.
        seed: The seed of the weights and the batches.
        steps: The number of steps.

    Raises:
        OverflowStreakError: The policy's `max_overflow_streak` is reached.
    """
    images, labels = _digits()
    params, rng = list[Any](), np.random.default_rng(seed)
    for n_in, n_out in itertools.pairwise(_WIDTHS):  # He et al., 2015
        params.append(rng.normal(0.0, np.sqrt(2.0 / n_in), (n_in, n_out)).astype(np.float32))
        params.append(np.zeros(n_out, np.float32))
    zeros = [np.zeros_like(param) for param in params]
    learnt: Any = (params, zeros, zeros, 0)  # with Adam's averages and count, which a skipped step must not change
    state: Any = core.init_state(policy)
    rows, count = [], len(params)
    batches = np.random.default_rng(seed).integers(0, _TRAINING_IMAGES, (steps, _BATCH_SIZE))
    for batch in batches:
        x, y, before = images[batch], labels[batch], state
        loss, stored = _gradients(learnt[0], dtype, x, y, core.scale(np.float32(weight), before))
        finite, grads = core.all_finite(stored[:count]), core.unscale(stored, before)
        learnt = core.select(finite, _adam(learnt, grads[:count]), learnt)
        state = policy.update(before, finite)
        core.check_limits(policy, state)
        rows.append((loss, float(before.loss_scale), not finite, max(float(np.abs(grad).max()) for grad in grads)))
    logits = _forward([param.astype(dtype) for param in learnt[0]], images[_TRAINING_IMAGES:].astype(dtype))[-1]
    accuracy = float(np.mean(logits.argmax(axis=1) == labels[_TRAINING_IMAGES:]))
    zero = float(np.mean(np.concatenate([np.ravel(grad) == 0 for grad in grads[:count]])))
    return Run(np.array(rows, float).T, zero, accuracy, float(state.loss_scale))


def _digits() -> tuple[Any, Any]:
    """Return the images, float32 of shape `(1797, 64)` from 0 to 1, and their labels, in random order.

    The test set of https://doi.org/10.24432/C50P49 (E. Alpaydin and C. Kaynak, 1998), under CC BY 4.0, with five levels
    of gray instead of 17. The file has a row for each image: 64 pixels and the label.
    """
    content = bz2.decompress(files("lossscale").joinpath("digits.bz2").read_bytes())
    rows = np.frombuffer(content, np.uint8).reshape(-1, 65)
    rows = rows[np.random.default_rng(0).permutation(len(rows))]
    return (rows[:, :64] / 4.0).astype(np.float32), rows[:, 64].astype(int)


def _gradients(params: Any, dtype: str, images: Any, labels: Any, weight: Any) -> tuple[float, list[Any]]:
    """Return the loss, and the gradients of `weight` × loss: of the parameters, then of the layers' outputs.

    Weights, activations and gradients are stored in `dtype`: small values flush to zero, and large values overflow.
    Products are summed in float32, as in tensor cores.
    """
    stored, images = [param.astype(dtype) for param in params], images.astype(dtype)
    outputs = _forward(stored, images)
    logits = outputs[-1].astype(np.float32)
    logits -= logits.max(axis=1, keepdims=True)
    log_probabilities = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    rows, grad = np.arange(len(labels)), np.exp(log_probabilities)
    grad[rows, labels] -= 1.0
    output_grads, param_grads = [(grad / np.float32(len(labels)) * weight).astype(dtype)], list[Any]()
    for matrix, inputs in zip(stored[-2::-2], [*map(_relu, outputs[-2::-1]), images], strict=True):
        grad = output_grads[-1]
        param_grads += [grad.sum(axis=0, dtype=np.float32).astype(dtype), _product(inputs.T, grad).astype(dtype)]
        if len(param_grads) < len(stored):
            output_grads.append(np.where(inputs > 0, _product(grad, matrix.T), 0.0).astype(dtype))
    return float(-log_probabilities[rows, labels].mean()), [*reversed(param_grads), *reversed(output_grads)]


def _forward(params: Any, images: Any) -> list[Any]:
    """Return every layer's output before its rectifier; the last output has the logits."""
    outputs: list[Any] = []
    for matrix, bias in zip(params[::2], params[1::2], strict=True):
        inputs = _relu(outputs[-1]) if outputs else images
        outputs.append((_product(inputs, matrix) + bias.astype(np.float32)).astype(matrix.dtype))
    return outputs


def _relu(outputs: Any) -> Any:
    return np.maximum(outputs, outputs.dtype.type(0))


def _product(a: Any, b: Any) -> Any:
    # NumPy's own float16 product is slow, and sums in float16.
    return a.astype(np.float32, copy=False) @ b.astype(np.float32, copy=False)


def _adam(learnt: Any, grads: Any) -> Any:
    """Return the result of a step of Adam (Kingma and Ba, 2015), with an epsilon far below the gradients."""
    params, means, squares, steps = learnt
    means = [m + 0.1 * (g - m) for m, g in zip(means, grads, strict=True)]
    squares = [s + 0.001 * (g * g - s) for s, g in zip(squares, grads, strict=True)]
    mean_weight, square_weight = 1.0 - 0.9 ** (steps + 1), 1.0 - 0.999 ** (steps + 1)
    moments = [(m / mean_weight) / (np.sqrt(s / square_weight) + 1e-16) for m, s in zip(means, squares, strict=True)]
    return [p - _LEARNING_RATE * m for p, m in zip(params, moments, strict=True)], means, squares, steps + 1
