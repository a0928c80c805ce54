"""Training on PyTorch: the same network, data and optimizer under `torch.autocast`, with our `GradScaler`."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lossscale_core._policy import ScalingPolicy
from lossscale_core.demo import _network
from lossscale_core.demo._data import Digits
from lossscale_core.demo._records import BATCH_SIZE, LEARNING_RATE, MEASURE_EVERY, Run, Step
from lossscale_torch import GradScaler


def train(
    digits: Digits,
    policy: ScalingPolicy,
    dtype: str,
    weight: float,
    seed: int,
    steps: int,
    on_step: Callable[[], Any],
) -> Run:
    """Train the network in `dtype` on `weight` times the cross-entropy, and return what happened."""
    model = _Perceptron(seed, dtype)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE, eps=1e-16)
    scaler = GradScaler("cpu", policy=policy)
    steps_done, flushed = [], []
    for step, (images, labels) in enumerate(digits.batches(steps, BATCH_SIZE, seed)):
        batch = torch.from_numpy(images), torch.from_numpy(labels)
        is_measured = step % MEASURE_EVERY == 0
        exact = model.exact_gradients(*batch, weight) if is_measured else []
        optimizer.zero_grad()
        loss = model.loss(*batch)
        scaler.scale(loss * weight).backward()
        gradients = model.gradients()
        if is_measured:
            flushed.append(_flushed_share(gradients[: len(exact)], exact))
        scale = scaler.get_scale()
        gradient_max = max(float(gradient.abs().max()) for gradient in gradients) / scale
        scaler.step(optimizer)
        info = scaler.update()
        if not info.applied:
            gradient_max = max(float(g.abs().max()) for g in model.exact_gradients(*batch, weight))
        steps_done.append(Step(loss.item(), scale, not info.applied, gradient_max))
        on_step()
    return Run(steps_done, float(np.mean(flushed)), model.accuracy(digits), scaler.get_scale())


class _Perceptron(nn.Module):
    """The demo's network, with float32 weights and, in float16, products under autocast."""

    def __init__(self, seed: int, dtype: str) -> None:
        super().__init__()
        self.dtype = getattr(torch, dtype)
        self.layers = nn.ModuleList()
        for weight, bias in _network.init_layers(seed):
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


def _flushed_share(stored: list[Tensor], exact: list[Tensor]) -> float:
    flushed = sum(int(((a == 0) & (b != 0)).sum()) for a, b in zip(stored, exact, strict=True))
    return flushed / max(1, sum(int((b != 0).sum()) for b in exact))
