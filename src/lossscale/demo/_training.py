"""A run of the demo, the same on every framework: from the beginning, or from another framework's checkpoint."""

import io
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from lossscale.demo import _network
from lossscale.demo._data import Digits
from lossscale.demo._records import BATCH_SIZE, MEASURE_EVERY, Run, Step
from lossscale_core import ScalingPolicy, state_to_dict

_ARRAYS = ("weights", "mean", "square")


class Checkpoint(NamedTuple):
    """Everything a run needs to go on, in any framework, as plain arrays and numbers."""

    steps: int
    """Steps taken, applied and skipped: where the data goes on."""
    weights: list[NDArray[np.float32]]
    """Each layer's weight, of shape `(inputs, outputs)`, and bias, of shape `(outputs,)`, in turn."""
    mean: list[NDArray[np.float32]]
    """Adam's mean of the gradients of `weights`."""
    square: list[NDArray[np.float32]]
    """Adam's mean of their squares."""
    adam_steps: int
    """Steps applied."""
    scale_state: dict[str, Any]
    """What `state_to_dict` returns for the scale state and its policy."""

    def save(self, path: Path) -> None:
        """Write a NumPy archive: the arrays, and the numbers as JSON."""
        arrays = {f"{name}_{i}": array for name in _ARRAYS for i, array in enumerate(getattr(self, name))}
        numbers = {"steps": self.steps, "adam_steps": self.adam_steps, "scale_state": self.scale_state}
        archive = io.BytesIO()
        np.savez(archive, numbers=json.dumps(numbers), **arrays)
        path.write_bytes(archive.getvalue())

    @classmethod
    def load(cls, path: Path) -> "Checkpoint":
        """Read what `save` wrote."""
        with np.load(path) as archive:
            count = 2 * (len(_network.WIDTHS) - 1)
            arrays = {name: [archive[f"{name}_{i}"] for i in range(count)] for name in _ARRAYS}
            numbers = json.loads(str(archive["numbers"]))
        return cls(**{**arrays, **numbers})

    @classmethod
    def first(cls, seed: int, policy: ScalingPolicy) -> "Checkpoint":
        """Return where a run begins."""
        weights = [array for layer in _network.init_layers(seed) for array in layer]
        zeros = [np.zeros_like(array) for array in weights]
        return cls(0, weights, zeros, zeros, 0, state_to_dict(policy.init_state(), policy))


class Training(Protocol):
    """The network in training on one framework, made from a policy, a dtype, the loss's weight and a checkpoint."""

    steps: int
    """Steps taken."""

    def step(self, images: Any, labels: Any, is_measured: bool) -> tuple[Step, float | None]:
        """Take a step, and return what happened and, where it was measured, the share of gradients flushed to zero.

        Raises `OverflowStreakError` where the policy asks for it.
        """
        ...

    def scale_state(self) -> dict[str, Any]:
        """Return the scale state as a checkpoint of this framework has it, which is `state_to_dict`'s form."""
        ...

    def checkpoint(self) -> Checkpoint:
        """Return everything needed to go on."""
        ...

    def accuracy(self, digits: Digits) -> float:
        """Return the share of test images recognised."""
        ...


def train(
    kind: Callable[..., Training],
    digits: Digits,
    policy: ScalingPolicy,
    dtype: str,
    weight: float,
    seed: int,
    steps: int,
    on_step: Callable[[], Any],
) -> Run:
    """Train the network in `dtype` on `weight` times the cross-entropy, by a `Training` of this kind."""
    training = kind(policy, dtype, weight, Checkpoint.first(seed, policy))
    return run(training, digits, seed, steps, on_step)


def run(training: Training, digits: Digits, seed: int, steps: int, on_step: Callable[[], Any]) -> Run:
    """Train until `steps` steps are taken, and return what happened."""
    taken, flushed = [], []
    batches = itertools.islice(digits.batches(steps, BATCH_SIZE, seed), training.steps, None)
    for images, labels in batches:
        step, share = training.step(images, labels, training.steps % MEASURE_EVERY == 0)
        taken.append(step)
        if share is not None:
            flushed.append(share)
        on_step()
    return Run(
        steps=taken,
        flushed=float(np.mean(flushed)),
        accuracy=training.accuracy(digits),
        final_scale=float(training.scale_state()["loss_scale"]),
    )
