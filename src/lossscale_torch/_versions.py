"""Replacements for features that older versions of PyTorch lack. A comment names the first version with the feature.

pyproject.toml declares the oldest supported version. When this version has the feature, remove the replacement.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])


def not_compiled(function: _Function) -> _Function:
    """Keep Dynamo from tracing a function and its callees, as `torch.compiler.disable` does.

    This decorator marks the function and does not wrap it. A wrapper that turns Dynamo off and on again takes longer
    than a call of `GradScaler.scale`, even if Dynamo is not used. torch has no public names for these marks, and
    `torch.compiler.disable` takes seconds to import.
    """
    try:
        from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
    except ImportError:  # before 2.7
        return _not_compiled_before_2_7(function)
    marked: Any = function
    marked._torchdynamo_disable = True  # a compiled caller breaks its graph here
    # The first action is for the function, the second for the functions that it calls.
    set_code_exec_strategy(marked.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
    return function


def _not_compiled_before_2_7(function: _Function) -> _Function:
    """Return a wrapper that turns Dynamo off if it is imported; torch before 2.7 cannot mark the callees."""
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
