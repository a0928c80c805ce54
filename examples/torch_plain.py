"""Plain PyTorch in float16: micro-batches, two optimizers with one clip, an average, schedules, TensorBoard, resuming.

    pip install . scikit-learn tensorboard    # on a fresh machine: '.[torch]' instead of the dot
    python examples/torch_plain.py

A perceptron learns to read scikit-learn's handwritten digits. The first loss scale is far too large, so the first steps
overflow and are skipped. Stop the program and start it again: it continues from its last checkpoint.
"""

from pathlib import Path

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.tensorboard import SummaryWriter

from lossscale_torch import GradScaler

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BATCH_SIZE, MICRO_BATCHES = 128, 4


class Training:
    """The parts of a checkpoint, and the step that changes them."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        body, head = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU()), nn.Linear(64, 10)
        self.model = nn.Sequential(body, head).to(DEVICE)
        self.average = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.95), use_buffers=True)
        self.optimizers = [torch.optim.SGD(body.parameters(), 0.2, 0.9), torch.optim.AdamW(head.parameters(), 1e-2)]
        self.schedulers = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99) for optimizer in self.optimizers]
        # `protect` restores BatchNorm's statistics if a step is skipped.
        self.scaler = GradScaler(DEVICE, init_scale=2.0**24, growth_interval=50, protect=[self.model])
        self.parts = [self.model, self.average, self.scaler, *self.optimizers, *self.schedulers]

    def step(self, images: torch.Tensor, labels: torch.Tensor) -> dict[str, float]:
        """Train on one batch, and return numbers for a log."""
        self.model.zero_grad()
        for inputs, targets in zip(images.chunk(MICRO_BATCHES), labels.chunk(MICRO_BATCHES), strict=True):
            with torch.autocast(DEVICE, torch.float16):
                logits = self.model(inputs)
            loss = nn.functional.cross_entropy(logits.float(), targets)
            self.scaler.scale(loss / MICRO_BATCHES).backward()
        norm = self.scaler.unscale_and_clip_(self.optimizers, max_norm=1.0)  # they share a norm and a decision
        for optimizer in self.optimizers:
            self.scaler.step(optimizer)
        if (info := self.scaler.update()).applied:
            self.average.update_parameters(self.model)
            for scheduler in self.schedulers:
                scheduler.step()
        return {"loss_scale": info.loss_scale_used, "applied": info.applied, "grad_norm": norm}


def main(steps: int = 200, folder: str = "runs/torch_plain") -> tuple[float, Training]:
    """Train, print one line about the run, and return the accuracy and the training."""
    digits = train_test_split(*load_digits(return_X_y=True), test_size=450, random_state=0)
    images, test_images, labels, test_labels = (torch.tensor(part, device=DEVICE) for part in digits)
    training, checkpoint, first_step = Training(), Path(folder, "checkpoint.pt"), 0
    if checkpoint.exists():
        first_step, *states = torch.load(checkpoint)
        for part, state in zip(training.parts, states, strict=True):
            part.load_state_dict(state)
    with SummaryWriter(folder, purge_step=first_step) as writer:
        for step in range(first_step, steps):
            rows = torch.randint(len(images), (BATCH_SIZE,), generator=torch.Generator().manual_seed(step))
            for name, value in training.step(images[rows].float() / 16, labels[rows]).items():
                writer.add_scalar(name, float(value), step)
            if step % 20 == 19:
                torch.save([step + 1, *(part.state_dict() for part in training.parts)], checkpoint)
    logits = training.average.eval()(test_images.float() / 16)
    accuracy = (logits.argmax(dim=1) == test_labels).float().mean().item()
    print(f"accuracy {accuracy:.3f}; {training.scaler.diagnose()}")
    return accuracy, training


if __name__ == "__main__":
    main()
