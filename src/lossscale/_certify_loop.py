"""The certificate of a PyTorch training loop: the checks of `lossscale_torch.testing`, and where they ran."""

import contextlib
import importlib
import shlex
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from lossscale._certificate import Certificate, Line, environment_variable
from lossscale_torch.testing import certify_training_loop

_SEED = "torch.manual_seed(0) before build, and torch.manual_seed(step + 1) before each step"


def certified_loop(build: Callable[[Any], Any], *arguments: str) -> Certificate:
    """Run the checks of a loop; in a process group, on all ranks.

    Args:
        build: Takes a scaler and returns the loop.
        arguments: Those of `lossscale certify`, for the command that repeats this.

    Returns:
        The certificate, the same on all ranks. If the loop cannot be built, its only line is not tried.
    """
    is_group = torch.distributed.is_available() and torch.distributed.is_initialized()
    ranks = torch.distributed.get_world_size() if is_group else 1
    with warnings.catch_warnings():
        # torch notices a schedule that moves before its optimizer, which has skipped its first step.
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
        try:
            lines = [Line(*check) for check in certify_training_loop(build)]
        except (Exception, SystemExit) as error:
            if ranks > 1:
                raise  # the launcher then ends the ranks that wait for this one
            lines = [Line("the loop can be built", None, f"{type(error).__name__}: {error}")]
    own = shlex.join(["lossscale", "certify", *arguments])
    command = f"torchrun --standalone --nproc-per-node {ranks} -m {own}" if ranks > 1 else own
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    about = {"repeat it with": f"`{command}`", "seed": f"`{_SEED}`", "device": device, "ranks": str(ranks)}
    return Certificate(lines, about)


@contextlib.contextmanager
def process_group() -> Iterator[None]:
    """Join the group of the ranks that a launcher has started, if any, and leave it when all are done.

    A launcher ends the other ranks as soon as one ends with another status than 0. The threads of the group end here:
    one that frees a tensor of Python's while the interpreter ends would abort the process.
    """
    if environment_variable("WORLD_SIZE", 1) == 1:
        yield
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(environment_variable("LOCAL_RANK", 0) % torch.cuda.device_count())
    # DDP imports this module. Its functions take the current group as a default, and would keep the group's threads.
    importlib.import_module("torch.distributed.nn")
    torch.distributed.init_process_group()
    try:
        yield
        torch.distributed.barrier()
    finally:
        torch.distributed.destroy_process_group()
