"""The replacement of torch's scalers, and of this library's, by the traced ones."""

import functools
import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import lossscale_torch
from lossscale.tracing._scaler import CpuScaler, CudaScaler, TracedScaler, sharded
from lossscale_core import policy_from_dict

_OF_TORCH = torch.amp.GradScaler


def replace_scalers(policy: dict[str, Any] | None, trace: str | None) -> None:
    """Replace the scalers under every name that scripts import, and watch the norms of gradients."""
    TracedScaler.policy_of_run = None if policy is None else policy_from_dict(policy)
    TracedScaler.trace_of_run = None if trace is None else Path(trace)
    for scaler, modules in (
        (TracedScaler, (torch, torch.amp, torch.amp.grad_scaler, lossscale_torch)),
        (CudaScaler, (torch.cuda.amp, torch.cuda.amp.grad_scaler)),
        (CpuScaler, (torch.cpu.amp, torch.cpu.amp.grad_scaler)),
    ):
        for module in modules:
            vars(module)["GradScaler"] = scaler
    clip = _reporting_norm(torch.nn.utils.clip_grad_norm_)
    for module in (torch.nn.utils, torch.nn.utils.clip_grad):
        vars(module)["clip_grad_norm_"] = clip
    if torch.distributed.is_available():
        # Else DDP imports it, and its functions have the process group of that time as a default: the group's threads
        # would be left when the process ends, and one that frees a tensor then would abort it.
        importlib.import_module("torch.distributed.nn")


def replace_sharded_scaler(module: ModuleType, execute_module: Callable[[ModuleType], None]) -> None:
    """Execute the module of FSDP's scaler, which derives from torch's own there, and replace that scaler."""
    # The class statement there takes its base from this name. `sharded` puts TracedScaler before that class among its
    # bases, for which Python finds no order if the class itself derives from TracedScaler.
    names = vars(torch.amp.grad_scaler)
    names["GradScaler"] = _OF_TORCH
    try:
        execute_module(module)
    finally:
        names["GradScaler"] = TracedScaler
    vars(module)["ShardedGradScaler"] = sharded(vars(module)["ShardedGradScaler"])


def _reporting_norm(clip: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(clip)
    def clip_grad_norm_(*args: Any, **kwargs: Any) -> Any:
        norm = clip(*args, **kwargs)
        TracedScaler.note_norm(norm)
        return norm

    return clip_grad_norm_
