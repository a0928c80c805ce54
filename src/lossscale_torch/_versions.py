"""Replacements for what older versions of PyTorch lack, each with the version that made it unnecessary.

pyproject.toml declares the oldest version that works. When it reaches the version of a replacement, remove that.
"""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])


def not_compiled(function: _Function) -> _Function:
    """Keep Dynamo from tracing a function and its callees, as `torch.compiler.disable` does.

    The function is marked and not wrapped: a wrapper that turns Dynamo off and on again takes longer at each call than
    a scaler's `scale`, even without Dynamo. There are no public names for the marks, and `torch.compiler.disable` takes
    seconds to import.
    """
    try:
        from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
    except ImportError:  # before 2.7
        return _not_compiled_before_2_7(function)
    marked: Any = function
    marked._torchdynamo_disable = True  # a compiled caller breaks its graph here
    # Skip the function, and skip what it calls.
    set_code_exec_strategy(marked.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
    return function


def _not_compiled_before_2_7(function: _Function) -> _Function:
    """Return a wrapper that turns Dynamo off once it is imported: torch before 2.7 can skip single functions only.

    Warnings of the function name a line of this file, because the wrapper adds a stack frame.
    """
    from torch._C._dynamo.eval_frame import skip_code  # type: ignore[attr-defined]

    @functools.cache
    def disabled() -> Callable[..., Any]:
        return torch.compiler.disable(function)  # imports Dynamo, which takes seconds

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (disabled() if "torch._dynamo" in sys.modules else function)(*args, **kwargs)

    wrapper: Any = call
    wrapper._torchdynamo_disable = True
    skip_code(wrapper.__code__)
    return cast(_Function, wrapper)


@contextlib.contextmanager
def fsdp2_explained() -> Iterator[None]:
    """Add what to do to the error of a sharded model on a CPU, which torch raises in its forward pass before 2.7."""
    try:
        yield
    except AttributeError as error:
        if str(error) == "'Stream' object has no attribute 'record_event'":
            error.add_note("FSDP2 does not run on a CPU before torch 2.7; update torch, or train on GPUs.")
        raise


def current_accelerator() -> torch.device | None:
    """Return the type of this machine's accelerator, or None without one."""
    try:
        return torch.accelerator.current_accelerator()
    except RuntimeError:  # before 2.7, which returns None
        return None


def all_gather(everyone: torch.Tensor, own: torch.Tensor, group: Any) -> None:
    """Write the tensors of all ranks of a group, one after the other, to `everyone`."""
    if hasattr(torch.distributed, "all_gather_single"):
        torch.distributed.all_gather_single(everyone, own, group=group)
    else:  # before 2.13, which renamed it
        torch.distributed.all_gather_into_tensor(everyone, own, group=group)


def flattened_meshes(mesh: Any) -> list[Any]:
    """Return the one-dimensional meshes that `_flatten` has made of parts of a mesh's root; none before torch 2.10.

    `DeviceMesh._flatten` has no public name, nor have its results: https://github.com/pytorch/pytorch/pull/132632
    """
    if not hasattr(mesh, "_get_root_mesh"):  # before 2.10; a norm then costs one collective for each dimension
        return []
    return list(mesh._get_root_mesh()._flatten_mapping.values())
