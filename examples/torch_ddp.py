"""DistributedDataParallel in float16: an overflow on one rank skips the step on every rank.

    pip install . scikit-learn    # on a fresh machine: '.[torch]' instead of the dot
    torchrun --nproc-per-node 2 examples/torch_ddp.py

A perceptron learns to read scikit-learn's handwritten digits, on GPUs or, with gloo, on the CPU. Each rank reads rows
of its own. DDP averages the gradients, so all ranks detect the same overflows without more communication.
"""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import ExponentialLR

from lossscale_torch import DynamicScaling, GradScaler

POLICY = DynamicScaling(init_scale=2.0**24, growth_interval=50)
BATCH_SIZE, MICRO_BATCHES = 64, 2


def main(steps: int = 100) -> tuple[float, nn.Module, GradScaler]:
    """Train in the process group of the caller, and return the accuracy, the model and the scaler."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    gpus = torch.cuda.device_count()
    device = torch.device("cuda", rank % gpus) if gpus else torch.device("cpu")
    digits = train_test_split(*load_digits(return_X_y=True), test_size=450, random_state=0)
    images, test_images, labels, test_labels = (torch.tensor(part, device=device) for part in digits)
    images, test_images = images.float() / 16, test_images.float() / 16
    images, labels = images[rank::world_size], labels[rank::world_size]

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).to(device)
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    scheduler = ExponentialLR(optimizer, 0.99)
    scaler = GradScaler(device.type, policy=POLICY)

    def backward(rows: torch.Tensor) -> None:
        with torch.autocast(device.type, torch.float16):
            logits = parallel(images[rows])
        loss = nn.functional.cross_entropy(logits.float(), labels[rows])
        scaler.scale(loss / MICRO_BATCHES).backward()

    for _ in range(steps):
        *others, last = torch.randint(len(images), (BATCH_SIZE,)).chunk(MICRO_BATCHES)
        optimizer.zero_grad()
        with parallel.no_sync():  # the last micro-batch sends the gradients of the whole batch
            for rows in others:
                backward(rows)
        backward(last)
        scaler.unscale_and_clip_(optimizer, max_norm=1.0)
        scaler.step(optimizer)
        if scaler.update().applied:
            scheduler.step()

    scaler.check_sync()  # raises an error if ranks differ
    accuracy = (model(test_images).argmax(dim=1) == test_labels).float().mean().item()
    if rank == 0:
        print(f"accuracy {accuracy:.3f}; {scaler.diagnose()}")
    return accuracy, model, scaler


if __name__ == "__main__":
    dist.init_process_group()
    main()
    dist.destroy_process_group()
