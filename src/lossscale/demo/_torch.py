"""Training on PyTorch: the same network, data and optimizer under `torch.autocast`, with our `GradScaler`."""

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lossscale.demo import _training
from lossscale.demo._data import Digits
from lossscale.demo._records import LEARNING_RATE, Step
from lossscale.demo._training import Checkpoint
from lossscale_core import ScalingPolicy
from lossscale_torch import GradScaler


class Training:
    """A model, torch's Adam, and our `GradScaler`."""

    def __init__(self, policy: ScalingPolicy, dtype: str, weight: float, start: Checkpoint) -> None:
        self.weight, self.steps = weight, start.steps
        self.model = _Perceptron(start.weights, dtype)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=LEARNING_RATE, eps=1e-16)
        self.optimizer.load_state_dict(
            {**self.optimizer.state_dict(), "state": dict(enumerate(_memory(start)))}  # of each parameter
        )
        self.scaler = GradScaler("cpu", policy=policy)
        self.scaler.load_state_dict(start.scale_state)

    def step(self, images: Any, labels: Any, is_measured: bool) -> tuple[Step, float | None]:
        """Take a step; see `_training.Training`."""
        batch = torch.from_numpy(images), torch.from_numpy(labels)
        exact = self.model.exact_gradients(*batch, self.weight) if is_measured else []
        self.optimizer.zero_grad()
        loss = self.model.loss(*batch)
        self.scaler.scale(loss * self.weight).backward()
        gradients = self.model.gradients()
        flushed = _flushed_share(gradients[: len(exact)], exact) if is_measured else None
        scale = self.scaler.get_scale()
        gradient_max = max(float(gradient.abs().max()) for gradient in gradients) / scale
        self.scaler.step(self.optimizer)
        info = self.scaler.update()
        if not info.applied:
            gradient_max = max(float(g.abs().max()) for g in self.model.exact_gradients(*batch, self.weight))
        self.steps += 1
        return Step(loss.item(), scale, not info.applied, gradient_max), flushed

    def scale_state(self) -> dict[str, Any]:
        """Return the scaler's state."""
        return self.scaler.state_dict()

    def checkpoint(self) -> Checkpoint:
        """Return everything needed to go on."""
        memory = list(self.optimizer.state_dict()["state"].values())
        weights = [_plain(parameter) for parameter in self.model.parameters()]
        mean, square = ([_plain(each[name]) for each in memory] for name in ("exp_avg", "exp_avg_sq"))
        return Checkpoint(self.steps, weights, mean, square, int(memory[0]["step"]), self.scale_state())

    def accuracy(self, digits: Digits) -> float:
        """Return the share of test images recognised."""
        return self.model.accuracy(digits)


train = functools.partial(_training.train, Training)


class _Perceptron(nn.Module):
    """The demo's network, with float32 weights and, in float16, products under autocast."""

    def __init__(self, weights: list[NDArray[np.float32]], dtype: str) -> None:
        super().__init__()
        self.dtype = getattr(torch, dtype)
        self.layers = nn.ModuleList()
        for weight, bias in zip(weights[::2], weights[1::2], strict=True):
            layer = nn.Linear(*weight.shape)
            with torch.no_grad():
                layer.weight.copy_(torch.from_numpy(weight.T))
                layer.bias.copy_(torch.from_numpy(bias))
            self.layers.append(layer)
        self.outputs: list[Tensor] = []

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits, and keep every layer's output so that its gradient can be seen."""
        self.outputs = []
        hidden = images
        with torch.autocast("cpu", torch.float16, enabled=self.dtype is torch.float16):
            for i, layer in enumerate(self.layers):
                hidden = layer(torch.relu(hidden) if i else hidden)
                self.outputs.append(hidden)
        return hidden

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross-entropy, in float32."""
        logits = self(images)
        for output in self.outputs:
            output.retain_grad()
        return nn.functional.cross_entropy(logits.float(), labels)

    def gradients(self) -> list[Tensor]:
        """Return the gradients of the parameters, then those of the layers' outputs."""
        return [leaf.grad for leaf in (*self.parameters(), *self.outputs) if leaf.grad is not None]

    def exact_gradients(self, images: Tensor, labels: Tensor, weight: float) -> list[Tensor]:
        """Return the parameters' unscaled gradients as float32 has them, from the same weights."""
        stored, self.dtype = self.dtype, torch.float32
        loss = self.loss(images, labels) * weight
        self.dtype = stored
        return list(torch.autograd.grad(loss, list(self.parameters())))

    def accuracy(self, digits: Digits) -> float:
        """Return the share of test images recognised."""
        with torch.no_grad():
            logits = self(torch.from_numpy(digits.test_images))
        return float((logits.argmax(dim=1).numpy() == digits.test_labels).mean())


def _memory(start: Checkpoint) -> Iterator[dict[str, Tensor]]:
    """Yield what Adam remembers of each parameter."""
    for mean, square in zip(start.mean, start.square, strict=True):
        count = torch.tensor(float(start.adam_steps))
        yield {"step": count, "exp_avg": torch.tensor(mean.T), "exp_avg_sq": torch.tensor(square.T)}


def _plain(tensor: Tensor) -> NDArray[np.float32]:
    """Return a parameter, or what Adam remembers of it, with inputs before outputs."""
    return np.array(tensor.detach().numpy().T)


def _flushed_share(stored: list[Tensor], exact: list[Tensor]) -> float:
    flushed = sum(int(((a == 0) & (b != 0)).sum()) for a, b in zip(stored, exact, strict=True))
    return flushed / max(1, sum(int((b != 0).sum()) for b in exact))
