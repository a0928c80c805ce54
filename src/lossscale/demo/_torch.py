"""Training on PyTorch: our `GradScaler` around torch's Adam and `torch.autocast`."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from lossscale.demo._network import LEARNING_RATE, forward
from lossscale_core import ScalingPolicy
from lossscale_torch import GradScaler


class Trainer:
    """Parameters of shape `(outputs, inputs)`, as in torch, an optimizer, and a scaler."""

    def __init__(self, policy: ScalingPolicy, dtype: str, weight: float, weights: list[Any]) -> None:
        self.dtype, self.weight = dtype, weight
        self.weights = [nn.Parameter(torch.tensor(array.T).contiguous()) for array in weights]
        self.optimizer = torch.optim.Adam(self.weights, lr=LEARNING_RATE, eps=1e-16)
        self.scaler = GradScaler("cpu", policy=policy)

    def step(self, images: Any, labels: Any) -> tuple[float, list[Any], Any]:
        self.optimizer.zero_grad()
        loss, outputs = self._loss(images, labels, self.dtype)
        for output in outputs:
            output.retain_grad()
        self.scaler.scale(loss * self.weight).backward()
        self.scaler.unscale_(self.optimizer)
        output_grads = [output.grad.float() / self.scaler.get_scale() for output in outputs]
        self.scaler.step(self.optimizer)
        return loss.item(), [*(weight.grad for weight in self.weights), *output_grads], self.scaler.update()

    def exact_gradients(self, images: Any, labels: Any) -> list[Any]:
        loss, outputs = self._loss(images, labels, "float32")
        return list(torch.autograd.grad(loss * self.weight, [*self.weights, *outputs]))

    def logits(self, images: Any) -> Any:
        with torch.no_grad():
            return self._outputs(images, self.dtype)[-1]

    def _loss(self, images: Any, labels: Any, dtype: str) -> tuple[Tensor, list[Any]]:
        """Return the mean cross-entropy in float32, and every layer's output."""
        outputs = self._outputs(images, dtype)
        return functional.cross_entropy(outputs[-1].float(), torch.from_numpy(labels)), outputs

    def _outputs(self, images: Any, dtype: str) -> list[Any]:
        with torch.autocast("cpu", torch.float16, enabled=dtype == "float16"):
            return forward(self.weights, torch.from_numpy(images), functional.linear, torch.relu)
