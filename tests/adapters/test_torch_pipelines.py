"""The recipes of docs/trainers.md, run on two gloo processes as they stand there."""

import torch
import torch.distributed as dist

from tests.adapters.pages import code_of
from tests.adapters.test_torch_distributed import _on_ranks

PAGE = "docs/trainers.md"
LIMIT = 60000.0


def _pipeline(rank, world_size):
    """Train two stages from a scale that is far too large: both skip the same steps, and the loss falls."""
    torch.manual_seed(0)
    parts = [torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU()), torch.nn.Linear(8, 1)]
    inputs = torch.randn(8, 4)
    targets, losses = inputs.sum(1, keepdim=True), []

    def loss_fn(outputs, targets):
        losses.append(torch.nn.functional.mse_loss(outputs.float(), targets))
        return losses[-1]

    names = {
        **{"device": torch.device("cpu"), "rank": rank, "world_size": world_size, "part_of_model": parts[rank]},
        **{"optimizer": torch.optim.SGD(parts[rank].parameters(), lr=0.05), "data": [(inputs, targets)] * 100},
        "loss_fn": loss_fn,
    }
    before = [each.detach().clone() for each in parts[rank].parameters()]
    source = code_of(PAGE, "Pipeline parallelism").replace("WORLD)", "WORLD, init_scale=2.0**30)")
    exec(compile(source, PAGE, "exec"), names)
    scaler = names["scaler"]
    scaler.check_sync()
    assert 5 < scaler.metrics()["skipped_steps"] < 40
    assert not any(torch.equal(a, b) for a, b in zip(before, parts[rank].parameters(), strict=True))
    if rank == 1:
        # Two micro-batches each; before them, the schedule has called it once on memory that holds anything.
        assert sum(losses[-2:]) < 0.5 * sum(losses[1:3])


def _averages(rank, world_size):
    """Average gradients that are finite everywhere; the sum of their undivided values is not."""
    names = {}
    exec(compile(code_of(PAGE, "Finite here, infinite in the sum"), PAGE, "exec"), names)
    average = names["average"]
    large, small = (torch.nn.Parameter(torch.zeros(3, dtype=torch.float16)) for _ in range(2))
    large.grad, small.grad = torch.full_like(large, LIMIT), torch.full_like(small, 1.0 + rank)
    undivided = large.grad.clone()
    dist.all_reduce(undivided)
    assert undivided.isinf().all()
    assert [bool(each) for each in average([large, small])] == [True, True]
    assert large.grad.tolist() == [torch.tensor(LIMIT).half().item()] * 3
    assert small.grad.tolist() == [1.5] * 3
    if rank == 0:
        large.grad[0] = torch.inf
    assert [bool(each) for each in average([large])] == [False, False]


def test_a_pipeline_skips_on_all_stages():
    """A stage that never scales a loss follows the last one."""
    _on_ranks(2, _pipeline)


def test_an_average_in_float16_does_not_overflow_in_the_sum():
    """And the two flags say where an overflow came from."""
    _on_ranks(2, _averages)
