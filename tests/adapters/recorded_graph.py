"""A stand-in for a CUDA graph on a CPU: it records tensor operations and runs them again in the same memory."""

from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_READS = (torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.__bool__, torch.Tensor.__float__, torch.Tensor.__int__)


class _Refusing(TorchFunctionMode):
    """Refuses to read a tensor on the host, as a stream that is being captured does."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the function unless it reads."""
        if function in _READS:
            raise RuntimeError("operation not permitted when stream is capturing: a read on the host")
        return function(*args, **(kwargs or {}))


class RecordedGraph(TorchDispatchMode):
    """Records what runs inside `with`; `replay` runs it again without any of the Python around it.

    Like a CUDA graph, a replay reads and writes the memory that the recording touched, so it sees only what was changed
    in place since. What the recording allocated is written again.
    """

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[Any] = []
        self._refusing = _Refusing()

    def __enter__(self) -> "RecordedGraph":
        """Begin to record."""
        self._refusing.__enter__()
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        """End the recording."""
        super().__exit__(*exception)
        self._refusing.__exit__(*exception)

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and record it."""
        kwargs = kwargs or {}
        if operation is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing: a read on the host")
        result = operation(*args, **kwargs)
        self._calls.append((operation, args, kwargs, result))
        return result

    @torch.no_grad()
    def replay(self) -> None:
        """Run the recorded operations again, each into the memory of its first result."""
        for operation, args, kwargs, recorded in self._calls:
            result = operation(*args, **kwargs)
            for new, old in zip(tree_leaves(result), tree_leaves(recorded), strict=True):
                if isinstance(new, torch.Tensor) and new.data_ptr() != old.data_ptr():
                    old.copy_(new)
