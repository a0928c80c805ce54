"""The demo's trainers, saved to a file in one framework and resumed in another."""

import json
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tensorflow as tf
import torch

from lossscale.demo._training import begin
from lossscale.demo._verbs import LearntValues
from lossscale_core import state_from_dict, state_to_dict

_ARRAYS = ("weights", "mean", "square")


class Checkpoint(NamedTuple):
    """Everything a run needs to continue: plain arrays, weights of shape `(inputs, outputs)`, and plain numbers."""

    steps: int
    weights: list
    mean: list
    square: list
    adam_steps: int
    scale_state: dict

    def save(self, path):
        """Write a NumPy archive: the arrays, and the numbers as JSON."""
        arrays = {f"{name}_{i}": array for name in _ARRAYS for i, array in enumerate(getattr(self, name))}
        numbers = {"steps": self.steps, "adam_steps": self.adam_steps, "scale_state": self.scale_state}
        np.savez(path, numbers=json.dumps(numbers), **arrays)

    @classmethod
    def load(cls, path):
        """Read what `save` wrote."""
        with np.load(path) as archive:
            arrays = {name: [archive[f"{name}_{i}"] for i in range(6)] for name in _ARRAYS}
            return cls(**arrays, **json.loads(str(archive["numbers"])))


class Training:
    """A trainer of the demo, from its beginning or from any framework's checkpoint."""

    def __init__(self, settings, start=None):
        self.policy, self.trainer = settings.policy, begin(settings, "float16")
        self.learnt, self.resume, self.scale_state = (function(self) for function in _PARTS[settings.framework])
        self.steps = 0
        if start is not None:
            self.steps = start.steps
            self.resume(start)

    def step(self, images, labels):
        """Take a step; return the loss and whether the step was applied."""
        loss, _, info = self.trainer.step(images, labels)
        self.steps += 1
        return float(loss), bool(info.applied)

    def checkpoint(self):
        """Return everything needed to continue."""
        *arrays, adam_steps = self.learnt()
        return Checkpoint(
            self.steps, *([np.array(a) for a in each] for each in arrays), int(adam_steps), self.scale_state()
        )


def _verbs(asarray):
    """Return how a trainer by the verbs is read, resumed, and how its scale state is."""

    def resume(training):
        def call(start):
            arrays = ([asarray(array) for array in getattr(start, name)] for name in _ARRAYS)
            training.trainer.learnt = LearntValues(*arrays, asarray(np.float32(start.adam_steps)))
            state = state_from_dict(start.scale_state, training.policy)
            training.trainer.state = jax.tree.map(asarray, state)

        return call

    return (
        lambda training: lambda: training.trainer.learnt,
        resume,
        lambda training: lambda: state_to_dict(training.trainer.state, training.policy),
    )


def _torch_learnt(training):
    def learnt():
        trainer = training.trainer
        memory = [trainer.optimizer.state[parameter] for parameter in trainer.weights]
        groups = trainer.weights, [each["exp_avg"] for each in memory], [each["exp_avg_sq"] for each in memory]
        return *([tensor.detach().numpy().T for tensor in group] for group in groups), memory[0]["step"]

    return learnt


def _torch_resume(training):
    def resume(start):
        trainer = training.trainer
        for parameter, weight, mean, square in zip(trainer.weights, *start[1:4], strict=True):
            parameter.data.copy_(torch.tensor(weight.T))
            memory = {"exp_avg": torch.tensor(mean.T), "exp_avg_sq": torch.tensor(square.T)}
            trainer.optimizer.state[parameter] = {"step": torch.tensor(float(start.adam_steps)), **memory}
        trainer.scaler.load_state_dict(start.scale_state)

    return resume


def _slots(trainer):
    """Return the weights' variables, and those of Adam's means."""
    means = ([trainer.optimizer.get_slot(each, slot) for each in trainer.weights] for slot in ("momentum", "velocity"))
    return trainer.weights, *means


def _tensorflow_learnt(training):
    def learnt():
        groups = ([tf.convert_to_tensor(each).numpy() for each in group] for group in _slots(training.trainer))
        return *groups, training.trainer.optimizer.iterations

    return learnt


def _tensorflow_resume(training):
    def resume(start):
        for group, arrays in zip(_slots(training.trainer), start[1:4], strict=True):
            for variable, array in zip(group, arrays, strict=True):
                variable.assign(array)
        training.trainer.optimizer.iterations.assign(start.adam_steps)
        training.trainer.optimizer.load_state_dict(start.scale_state)

    return resume


_PARTS = {
    "numpy": _verbs(lambda value: value),
    "torch": (_torch_learnt, _torch_resume, lambda training: training.trainer.scaler.state_dict),
    "jax": _verbs(jnp.asarray),
    "tensorflow": (_tensorflow_learnt, _tensorflow_resume, lambda training: training.trainer.optimizer.state_dict),
}
