"""Keeping `torch.compile` out of a function, without importing the compiler."""

from collections.abc import Callable
from typing import Any, TypeVar

# There are no public names for these, and `torch.compiler.disable` takes seconds to import.
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

_Function = TypeVar("_Function", bound=Callable[..., Any])
_UNCOMPILED = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)  # skip the function, and skip what it calls


def not_compiled(function: _Function) -> _Function:
    """Keep Dynamo from tracing a function and whatever it calls, as `torch.compiler.disable` does.

    The function is marked and not wrapped: a wrapper that turns Dynamo off and on again costs more at each call, also
    where Dynamo is not in use, than a scaler's `scale` does.
    """
    marked: Any = function
    marked._torchdynamo_disable = True  # a compiled caller breaks its graph here
    set_code_exec_strategy(marked.__code__, _UNCOMPILED)
    return function
