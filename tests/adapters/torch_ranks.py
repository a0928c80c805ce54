"""Ranks on one machine: processes that communicate with gloo on loopback."""

import os
from datetime import timedelta
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def _in_process(rank, world_size, folder, work):
    torch.set_num_threads(1)
    where = {"init_method": f"file://{folder}/rendezvous", "rank": rank, "world_size": world_size}
    dist.init_process_group("gloo", **where, timeout=timedelta(minutes=5))  # a rank that waits in vain fails
    work(rank, world_size)
    dist.barrier()  # no rank leaves while another still communicates with it
    os._exit(0)  # past the end of gloo's threads, which waits or aborts now and then


# A server imports these once, and each rank is a fresh fork of it: importing torch takes seconds, most tests less.
# Optimizers import `torch._dynamo`.
PRELOADED = ["torch._dynamo", "tests.adapters.test_torch_distributed", "tests.adapters.test_torch_norms"]
mp.set_forkserver_preload(PRELOADED)


def on_ranks(world_size, work):
    """Run `work(rank, world_size)` in that many processes; the first failure is raised here."""
    with TemporaryDirectory() as folder:
        mp.start_processes(_in_process, (world_size, folder, work), nprocs=world_size, start_method="forkserver")


def local(tensor):
    """Return the part of a tensor that this rank has, without its graph."""
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach()


def local_parameters(module):
    """Return the parameters of a module, of sharded ones the part of this rank."""
    return [local(param) for param in module.parameters()]
