"""Keeping `torch.compile` out of a function, without importing the compiler and at next to no cost where it is off."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

# There are no public names for these, and `torch.compiler.disable` takes seconds to import.
from torch._C._dynamo.eval_frame import (
    _FrameAction,
    _FrameExecStrategy,
    get_eval_frame_callback,
    set_code_exec_strategy,
)

_Function = TypeVar("_Function", bound=Callable[..., Any])


def not_compiled(function: _Function) -> _Function:
    """Keep Dynamo from tracing a function and whatever it calls, as `torch.compiler.disable` does.

    That turns Dynamo off and on again around every call, also where it is not in use, which costs more than a scaler's
    `scale` does.
    """
    disabled: Callable[..., Any] | None = None

    @functools.wraps(function)
    def uncompiled(*args: Any, **kwargs: Any) -> Any:
        nonlocal disabled
        if get_eval_frame_callback() is None:
            return function(*args, **kwargs)
        if disabled is None:
            disabled = torch.compiler.disable(function)
        return disabled(*args, **kwargs)

    wrapper: Any = uncompiled
    wrapper._torchdynamo_disable = True  # a compiled caller breaks its graph here
    set_code_exec_strategy(wrapper.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.DEFAULT))
    return cast(_Function, wrapper)
