"""The dispatch mode of `range_report`: it measures the result of each operation, and undoes writes."""

import bisect
import contextlib
import functools
import math
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lossscale_core.adapters import CHUNK, OUTSIDE, OperationRange, Progress
from lossscale_torch._gradients import values_of

_LOW_PRECISION = {torch.float16, torch.bfloat16} | {
    getattr(torch, name)
    for name in ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz")
    if hasattr(torch, name)
}
_COMPUTES_NOTHING = re.compile(
    r"aten\.((new_)?(empty|zeros|ones|full)(_|$)|(zero_|fill_|resize_|clone|detach|alias|lift_fresh)$)"
)
"""Operations that do not write, fill with a constant, or copy a tensor that was measured already."""
_OVERWRITES = re.compile(
    r"aten\.(copy|zero|fill|resize|set|uniform|normal|log_normal|exponential|geometric|cauchy|random|bernoulli)_$"
)
"""Operations that overwrite their whole first argument without reading it."""
_WRAPPERS = re.compile(r"\b(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)(\.|$)")


class ModulePaths:
    """The module that an operation belongs to, in the forward pass by hooks, in a backward pass by its autograd node.

    autograd numbers its nodes as they are made; the numbers at which a module begins and ends say which nodes it made:
    https://docs.pytorch.org/docs/stable/autograd.html#torch.autograd.profiler.profile
    A backward pass that keeps its own graph, as a gradient penalty needs it, makes nodes, too.
    """

    def __init__(self, model: nn.Module) -> None:
        self._names = {module: plain_name(name) or type(module).__name__ for name, module in model.named_modules()}
        self._stack: list[tuple[str, int]] = []
        """The modules that run, each with the backward pass within which it began."""
        self._numbers: list[int] = []
        self._paths: list[str] = []
        self._thread = threading.get_ident()
        self._number = 0
        self._last = OUTSIDE
        self._kept = contextlib.ExitStack()

    def __enter__(self) -> "ModulePaths":
        for module, name in self._names.items():
            enter = functools.partial(self._enter, name)
            self._kept.callback(module.register_forward_pre_hook(enter, prepend=True).remove)
            self._kept.callback(module.register_forward_hook(self._leave, always_call=True).remove)
        # Each thread numbers the nodes that it makes, so that one thread must make and run all of them.
        self._kept.enter_context(torch.autograd.set_multithreading_enabled(False))
        return self

    def __exit__(self, *_: object) -> None:
        self._kept.close()

    def begin_backward(self) -> None:
        self._last = OUTSIDE
        self._stack.clear()

    def current(self) -> str:
        """Return the path of the module that the running operation belongs to."""
        task = torch._C._current_graph_task_id()  # -1 outside of backward passes
        node: Any = torch._C._current_autograd_node()
        if self._stack and self._stack[-1][1] == task:
            self._last = self._stack[-1][0]
        elif task == -1:
            self._last = OUTSIDE
        # Outside of nodes autograd sums the gradients of a tensor that was used several times; the nodes that
        # accumulate a parameter's gradient have the largest possible number.
        elif node is not None and (number := node._sequence_nr()) < 2**63:
            self._last = self._path_at(number)
        return self._last

    def follow(self) -> str:
        """Return the result of `current`; the nodes made since the last operation are assigned to this module."""
        path = self.current()
        # autograd makes the node of an operation before it runs the operation, and so after the last one has run.
        self._note(path, self._number)
        self._number = _next_number()
        return path

    def _path_at(self, number: int) -> str:
        index = bisect.bisect_right(self._numbers, number) - 1
        return self._paths[index] if index >= 0 else OUTSIDE

    def _enter(self, name: str, *_: object) -> None:
        self._stack.append((name, torch._C._current_graph_task_id()))
        self._note(name, _next_number())

    def _leave(self, *_: object) -> None:
        if self._stack:
            self._stack.pop()
        self._note(self.current(), _next_number())

    def _note(self, path: str, number: int) -> None:
        if threading.get_ident() != self._thread or (self._paths and self._paths[-1] == path):
            return
        self._numbers.append(max([number, *self._numbers[-1:]]))  # the search in them needs them in order
        self._paths.append(path)


class Changes:
    """Copies of existing tensors that an operation writes to; they are restored on exit."""

    def __init__(self) -> None:
        self._new: set[int] = set()
        self._copies: dict[tuple[object, ...], tuple[Tensor, Tensor]] = {}
        self._generators: dict[torch.Generator, Tensor] = {}

    def __enter__(self) -> "Changes":
        return self

    def __exit__(self, *_: object) -> None:
        with torch.no_grad():
            self._forget_freed()
            for tensor, copy in reversed(self._copies.values()):  # views of one memory may overlap
                tensor.detach().copy_(copy)
        for generator, state in self._generators.items():
            generator.set_state(state)

    def before_write(self, tensor: Tensor) -> None:
        if (storage := storage_of(tensor)) not in self._new:
            key = (storage, tensor.storage_offset(), tensor.shape, tensor.stride())
            if key not in self._copies and _has_memory(tensor):
                self._forget_freed()
                self._copies[key] = (tensor, tensor.detach().clone())

    def before_draw(self, generator: torch.Generator) -> None:
        self._generators.setdefault(generator, generator.get_state())

    def _forget_freed(self) -> None:
        """Drop the copies of gathered parameters: `fully_shard` frees their memory while their tensors still exist."""
        self._copies = {key: pair for key, pair in self._copies.items() if _has_memory(pair[0])}

    def made(self, storage: int) -> None:
        self._new.add(storage)

    def has_made(self, storage: int) -> bool:
        return storage in self._new


class Recorder(TorchDispatchMode):
    """Measure results in float16, bfloat16 and float8, and track which tensors the loss scale multiplies."""

    def __init__(
        self, paths: ModulePaths, changes: Changes, look: "Callable[[Call, str], object] | None" = None
    ) -> None:
        super().__init__()
        self._paths = paths
        self._changes = changes
        self._look = look
        """Called before each operation of the forward pass, with the operation and the path of its module."""
        self._records: list[OperationRange] = []
        self._scaled: set[int] = set()
        self._nonfinite: set[int] = set()
        self._progress = Progress()
        self.measures = True
        """Whether to measure results; writes are undone in any case."""

    def take(self) -> list[OperationRange]:
        """Return the records of the pass that has ended."""
        self._progress.end()
        records, self._records = self._records, []
        return records

    def begin_backward(self, *seeds: Tensor) -> None:
        """Begin a backward pass from `seeds`, which hold the loss scale."""
        self._paths.begin_backward()
        self._look = None
        self._scaled = set(map(storage_of, seeds))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind.__torch_dispatch__ is not Tensor.__torch_dispatch__ for kind in types):
            return NotImplemented  # a subclass of Tensor goes first; its inner operations are measured
        call = Call(_facts(func), args, kwargs or {})
        place = self._paths.follow()
        if self._look is not None:
            self._look(call, place)
        self._save(call)
        was_finite = self._nonfinite.isdisjoint(map(storage_of, call.written))
        out = func(*args, **call.kwargs)
        self._progress.step()
        is_scaled = not self._scaled.isdisjoint(call.storages)
        for result in call.results(out):
            self._note(call, result, is_scaled)
            if self.measures and call.facts.computes and result.dtype in _LOW_PRECISION and result.numel():
                self._record(call, place, result, is_scaled, was_finite)
        return out

    def _save(self, call: "Call") -> None:
        """Copy the tensors that the call will change."""
        for tensor in call.written:
            self._changes.before_write(tensor)
        for each in call.given:
            if isinstance(each, torch.Generator):
                self._changes.before_draw(each)
            # The kernels of batch norm write to the running statistics, but not all their schemas declare this.
            elif call.facts.has_statistics and isinstance(each, Tensor) and each.ndim == 1:
                self._changes.before_write(each)

    def _note(self, call: "Call", result: Tensor, is_scaled: bool) -> None:
        """Record the properties of a result by its memory; they replace older ones, since memory is reused."""
        storage = storage_of(result)
        if storage not in call.storages:
            self._changes.made(storage)
        self._nonfinite.discard(storage)
        (self._scaled.add if is_scaled else self._scaled.discard)(storage)

    def _record(self, call: "Call", place: str, result: Tensor, is_scaled: bool, was_finite: bool) -> None:
        record = measure(result, call.facts.name, place)
        if record.nonfinite:
            self._nonfinite.add(storage_of(result))
        overflowed = bool(record.nonfinite) and was_finite and call.has_finite_inputs()
        self._records.append(record._replace(overflowed=overflowed, scaled=is_scaled))


class _Facts(NamedTuple):
    """The properties of an operation, from its schema and its name."""

    name: str
    written: tuple[tuple[int, str], ...]
    """The positions and names of the arguments that it writes to."""
    computes: bool
    overwrites: bool
    """Whether it overwrites its output without reading it."""
    has_statistics: bool
    is_view: bool
    names: tuple[str, ...]
    """The names of the arguments."""


@functools.cache
def _facts(func: Any) -> _Facts:
    name = str(func.overloadpacket)
    arguments = func._schema.arguments
    aliased = [(i, arg) for i, arg in enumerate(arguments) if arg.alias_info is not None]
    written = tuple((i, arg.name) for i, arg in aliased if arg.alias_info.is_write)
    computes = not _COMPUTES_NOTHING.match(name)
    has_statistics = bool(re.search("(batch|instance)_norm", name))
    overwrites = bool(_OVERWRITES.match(name)) or any(arg.is_out for _, arg in aliased)
    is_view = len(aliased) > len(written)
    names = tuple(arg.name for arg in arguments)
    return _Facts(name, written, computes, overwrites, has_statistics, is_view, names)


class Call:
    """An operation with its arguments."""

    def __init__(self, facts: _Facts, args: Any, kwargs: Any) -> None:
        self.facts, self.args, self.kwargs = facts, args, kwargs
        self.given = list(_flat((args, kwargs)))
        self.storages = {storage_of(each) for each in self.given if isinstance(each, Tensor)}
        found = [args[i] if i < len(args) else kwargs.get(name) for i, name in facts.written]
        self.written = list(_tensors(found)) if found else []

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors in the operation's arguments, with the names of these arguments."""
        for name, value in (*zip(self.facts.names, self.args, strict=False), *self.kwargs.items()):
            for tensor in _tensors(value):
                yield name, tensor

    def results(self, out: Any) -> Iterator[Tensor]:
        """Yield the tensors that the operation has made or written, without views of its arguments."""
        yield from self.written
        for tensor in _tensors(out):
            if storage_of(tensor) not in self.storages:
                yield tensor

    def has_finite_inputs(self) -> bool:
        """Return whether all inputs are finite, except those that were overwritten."""
        written = {id(tensor) for tensor in self.written}
        return all(is_finite(each) for each in self.given if id(each) not in written)


def measure(tensor: Tensor, operation: str, module: str) -> OperationRange:
    """Return the record of a tensor of floats that is not empty. Synchronises."""
    values = values_of(tensor.detach()).reshape(-1)
    histogram: Any = 0
    largest = 0.0
    for chunk in values.split(CHUNK):
        bits = chunk.float().view(torch.int32) & 0x7FFFFFFF  # the magnitudes, in the order of their values
        histogram = histogram + torch.bincount(bits >> 23, minlength=256)
        largest = max(largest, torch.where(bits < 0x7F800000, bits, 0).max().view(torch.float32).item())
    counts = {exponent: count for exponent, count in enumerate(histogram.tolist()) if count}
    dtype = str(values.dtype).removeprefix("torch.")
    zeros, nonfinite = counts.pop(0, 0), counts.pop(255, 0)
    exponents = {exponent - 127: count for exponent, count in counts.items()}
    return OperationRange(operation, module, dtype, largest, nonfinite, zeros, exponents)


def is_finite(value: Any) -> bool:
    if isinstance(value, Tensor):
        is_float = value.is_floating_point() or value.is_complex()
        return not is_float or bool(torch.isfinite(widened(values_of(value))).all())
    return not isinstance(value, float) or math.isfinite(value)


def plain_name(name: str) -> str:
    """Return a module's or a parameter's name without the wrappers of `torch.compile`, FSDP and checkpoints."""
    return _WRAPPERS.sub("", name).rstrip(".")


def widened(values: Tensor) -> Tensor:
    return values.float() if values.dtype.itemsize < 4 else values


def _next_number() -> int:
    """Return the number of the autograd node that this thread makes next."""
    return torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]


def storage_of(tensor: Tensor) -> int:
    """Return a number that identifies the memory of a tensor; 0 if it has none, as in unusual layouts."""
    if tensor.layout is torch.sparse_coo:
        tensor = tensor._values()
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else 0


def _has_memory(tensor: Tensor) -> bool:
    return tensor.layout is not torch.strided or tensor.untyped_storage().nbytes() > 0


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        for each in value:
            yield from _flat(each)
    elif isinstance(value, dict):
        yield from _flat(list(value.values()))
    else:
        yield value


def _tensors(value: Any) -> Iterator[Tensor]:
    return (each for each in _flat(value) if isinstance(each, Tensor))
