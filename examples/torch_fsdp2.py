"""FSDP2 in float16: sharded weights, clipping by the global norm, and a sharded checkpoint to resume from.

    pip install . scikit-learn    # on a fresh machine: '.[torch]' instead of the dot
    torchrun --nproc-per-node 2 examples/torch_fsdp2.py

A perceptron learns to read scikit-learn's handwritten digits, on GPUs or, with gloo, on the CPU. `fully_shard` casts
the weights to float16, and each rank stores a shard of the float32 weights. Before a step the ranks combine their
flags.
"""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from lossscale_torch import DynamicScaling, GradScaler

POLICY = DynamicScaling(init_scale=2.0**20, growth_interval=50)
HALF = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)
BATCH_SIZE = 64


def main(steps: int = 100, folder: str = "runs/torch_fsdp2") -> tuple[float, nn.Module, GradScaler]:
    """Train in the process group of the caller, and return the accuracy, the model and the scaler."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    gpus = torch.cuda.device_count()
    device = torch.device("cuda", rank % gpus) if gpus else torch.device("cpu")
    digits = train_test_split(*load_digits(return_X_y=True), test_size=450, random_state=0)
    images, test_images, labels, test_labels = (torch.tensor(part, device=device) for part in digits)
    images, labels = images[rank::world_size].float() / 16, labels[rank::world_size]

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).to(device)
    mesh = dist.device_mesh.init_device_mesh(device.type, (world_size,))
    for module in (model[0], model[2], model):
        fully_shard(module, mesh=mesh, mp_policy=HALF)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    scaler = GradScaler(device.type, policy=POLICY)

    def contents(step: int) -> dict[str, Any]:
        """Return the content of a checkpoint after this number of steps."""
        weights, slots = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": slots, "scaler": scaler, "step": step}

    first_step = 0
    if Path(folder, ".metadata").exists():
        checkpoint = contents(first_step)
        dcp.load(checkpoint, checkpoint_id=folder)  # writes into `checkpoint`
        weights, slots = checkpoint["model"], checkpoint["optimizer"]
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=slots)
        first_step = checkpoint["step"]
    for step in range(first_step, steps):
        rows = torch.randint(len(images), (BATCH_SIZE,), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images[rows]).float(), labels[rows])
        scaler.scale(loss).backward()
        scaler.unscale_and_clip_(optimizer, max_norm=1.0)  # with the norm over all shards
        scaler.step(optimizer)
        scaler.update()
    dcp.save(contents(steps), checkpoint_id=folder)

    accuracy = (model(test_images.float() / 16).argmax(dim=1) == test_labels).float().mean().item()
    if rank == 0:
        print(f"accuracy {accuracy:.3f}; {scaler.diagnose()}")
    return accuracy, model, scaler


if __name__ == "__main__":
    dist.init_process_group()
    main()
    dist.destroy_process_group()
