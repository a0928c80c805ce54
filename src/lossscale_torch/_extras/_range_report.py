"""A report on the magnitudes of one forward and one backward pass: overflows, flushes to zero, the scale that fits."""

import bisect
import contextlib
import functools
import itertools
import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lossscale_core import DynamicScaling, NoScaling, ScalingPolicy
from lossscale_torch._extras._attach import ATTACHED_SCALE
from lossscale_torch._gradients import at_least_float32, has_meshes, values_of
from lossscale_torch._report import bad_gradients
from lossscale_torch._snapshots import Buffers, random_states
from lossscale_torch._verbs import all_finite, scaled

_DTYPES = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
LOW_PRECISION = {dtype for dtype in _DTYPES if dtype.is_floating_point and dtype.itemsize < 4}
_COMPUTES_NOTHING = re.compile(
    r"aten\.((new_)?(empty|zeros|ones|full)(_|$)|(zero_|fill_|resize_|clone|detach|alias|lift_fresh)$)"
)
"""Operations that do not write, fill with a constant, or copy a tensor that was measured already."""
_WRAPPERS = re.compile(r"\b(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)(\.|$)")
_OUTSIDE = "loss_fn"
_SMALLEST, _LARGEST = -24, 126  # powers of two: below the first, float16 gradients are zero
_DEFAULT = DynamicScaling()


class OperationRange(NamedTuple):
    """The result of an operation in float16, bfloat16 or float8."""

    operation: str
    """The operation, such as `"aten.mm"`."""
    module: str
    """The innermost module that it belongs to."""
    dtype: torch.dtype
    largest: float
    """The largest magnitude among the finite elements."""
    overflowed: bool
    """Whether the result is not finite though the inputs are."""
    elements: int
    zeros: int

    def __str__(self) -> str:
        return f"{self.module} ({self.operation})"


class RangeReport(NamedTuple):
    """The magnitudes of one forward pass and of a few backward passes; `print` the report."""

    loss: float
    """The loss, unscaled."""
    forward: tuple[OperationRange, ...]
    """The operations of the forward pass in float16, bfloat16 or float8, in order."""
    backward: tuple[OperationRange, ...]
    """The operations of the backward pass at `init_scale`."""
    overflows_above: float | None
    """The largest power of two at which the backward pass and every parameter's gradient is finite.

    None if no scale fits, and infinity if nothing is computed in these dtypes.
    """
    overflows_first: str
    """The module and the operation that overflow first, above this scale or at every scale; empty if none does."""
    flushed: float
    """The share of the gradient elements that are zero at `init_scale` and not at `overflows_above`."""
    flushed_at_one: float
    """The share of the gradient elements that are zero at a scale of 1 and not at `overflows_above`."""

    @property
    def forward_finite(self) -> bool:
        """Whether the loss is finite and no operation of the forward pass overflowed."""
        return math.isfinite(self.loss) and self._overflow is None

    @property
    def _overflow(self) -> OperationRange | None:
        return next((record for record in self.forward if record.overflowed), None)

    @property
    def init_scale(self) -> float | None:
        """The recommended first loss scale: half of `overflows_above`; None if no scale fits."""
        limit = self.overflows_above
        return None if limit is None else min(limit / 2.0, _DEFAULT.max_scale)

    @property
    def policy(self) -> ScalingPolicy | None:
        """The recommended policy, which begins at `init_scale`; below 1 it may go eight powers of two further down.

        `NoScaling` if no gradient is computed in float16 or float8; None if no scale fits.
        """
        init_scale, low = self.init_scale, _DEFAULT.min_scale
        if init_scale is None:
            return None
        if not any(record.dtype in LOW_PRECISION - {torch.bfloat16} for record in self.backward):
            return NoScaling()
        return DynamicScaling(init_scale=init_scale, min_scale=low if init_scale >= low else init_scale * 2.0**-8)

    def __str__(self) -> str:
        return "\n".join([self._forward_line(), *self._backward_lines()])

    def __repr__(self) -> str:
        return str(self)  # the fields are pages long

    def _forward_line(self) -> str:
        loss = "the loss is finite" if math.isfinite(self.loss) else f"the loss is {self.loss:g}"
        if overflow := self._overflow:
            return f"forward: overflows in {overflow}; {loss}"
        if not math.isfinite(self.loss):
            return f"forward: {loss}, and no operation in low precision has made it so; look at inputs and constants"
        if not self.forward:
            return "forward: finite; nothing is computed in float16, bfloat16 or float8"
        most = min(self.forward, key=_room)
        return f"forward: finite; largest {most.largest:.3g} in {most} ({_room(most):.1f} bits of room)"

    def _backward_lines(self) -> list[str]:
        if not math.isfinite(self.loss):
            return ["backward: not run, since the loss is not finite before it is scaled"]
        policy, limit = self.policy, self.overflows_above
        if policy is None or limit is None:
            return [
                f"backward: not finite even at a loss scale of 2**{_SMALLEST}, first in {self.overflows_first}",
                "look for a division by zero, or a root or logarithm of zero",
                "without one, give the loss a smaller weight, or compute in float32 or bfloat16",
            ]
        if not isinstance(policy, DynamicScaling):
            return ["backward: finite; no gradient is computed in float16 or float8", "use NoScaling()"]
        init_scale = format_power(policy.init_scale)
        low = f", min_scale={format_power(policy.min_scale)}" if policy.min_scale < _DEFAULT.min_scale else ""
        advice = f"use DynamicScaling(init_scale={init_scale}{low})"
        if overflow := self._overflow:  # the loss is finite, since x / inf is zero, but training learns wrong values
            advice = f"keep {overflow.module} in float32 before you choose a scale: float32_plan(model, loss_fn)"
        return [
            f"backward: overflows above a loss scale of {format_power(limit)}, first in {self.overflows_first}",
            f"gradient elements that flush to zero: {100 * self.flushed:.3g} % at {init_scale}, "
            f"{100 * self.flushed_at_one:.3g} % at 1",
            advice,
        ]


def range_report(model: nn.Module, loss_fn: Callable[[], Tensor]) -> RangeReport:
    """Report which operation overflows, forward or backward, how much flushes to zero, and which loss scale fits.

    The report runs `loss_fn` once and about five backward passes at powers of two, and measures every computed float16,
    bfloat16 and float8 tensor. During a report `GradScaler.attach` multiplies by the scale of each pass. Afterwards
    gradients, buffers and the states of the random number generators of Python, NumPy and torch are as before, also if
    `loss_fn` raises an error. Compiled code runs uncompiled. Synchronises with the host after every operation.

    Args:
        model: A module, for the names: an operation is named by its innermost module, a gradient by its parameter.
        loss_fn: Runs the forward pass, under `torch.autocast` if training does, and returns the loss, unscaled: a
            tensor with one element of any dtype.

    Returns:
        The report. `print` it, or pass its `init_scale` on to `DynamicScaling`.

    Raises:
        TypeError: `model` is not a module, or `loss_fn` is not a function that returns a tensor.
        ValueError: The loss has several elements, or no graph leads from it to a parameter.
    """
    Passes.require_arguments(model, loss_fn, "range_report")
    with contextlib.ExitStack() as undo:
        return Passes(model, loss_fn, undo).report()


class Overflow(NamedTuple):
    """The first overflow of a pass."""

    cause: str
    """The operation, or the gradient of a parameter; of a forward pass the line of its report."""
    places: tuple[str, ...]
    """The module of the operation, if there is one, and the modules that may feed it, the nearest first."""
    kind: str = "forward"
    """`"forward"`, `"backward"`, or `"error"` if the pass raised an error."""


class Passes:
    """One forward pass, and backward passes of its loss at different scales.

    The end of `undo` restores gradients, buffers and random states.
    """

    def __init__(self, model: nn.Module, loss_fn: Callable[[], Tensor], undo: contextlib.ExitStack) -> None:
        undo.enter_context(torch.compiler.set_stance("force_eager"))
        undo.callback(Buffers(model).restore)
        undo.callback(random_states())
        self._names = {param: plain_name(name) for name, param in model.named_parameters()}
        for param in self._names:
            _clear_gradient(param, undo)
            if hooks := param._post_accumulate_grad_hooks:  # no optimizer steps in a backward pass
                undo.callback(setattr, param, "_post_accumulate_grad_hooks", hooks)
                param._post_accumulate_grad_hooks = {}  # None would leave them in place
        self._attached_scale = torch.ones((), dtype=torch.float32, device="cpu")
        undo.callback(ATTACHED_SCALE.reset, ATTACHED_SCALE.set(self._attached_scale))
        self._recorder = _Recorder(model, undo)
        with self._recorder:
            loss = loss_fn()
        self.called = set(self._recorder.paths)
        self._loss = scaled(_require_loss(loss), 1.0)
        forward = tuple(self._recorder.records)
        self._of_forward = RangeReport(float(self._loss.detach()), forward, (), None, "", 0.0, 0.0)
        self.leaves = _leaves_of(self._loss)
        for leaf in self.leaves - self._names.keys():
            _clear_gradient(leaf, undo)
        self.seen: dict[float, tuple[list[OperationRange], list[str]]] = {}

    @staticmethod
    def require_arguments(model: object, loss_fn: object, caller: str) -> None:
        """Raise `TypeError` unless the arguments are a module and a function."""
        if not isinstance(model, nn.Module) or not callable(loss_fn):
            raise TypeError(
                f"{caller} was given {type(model).__name__} and {type(loss_fn).__name__}; it takes a module, and a "
                f"function without arguments; write {caller}(model, lambda: loss_fn(model(batch)))"
            )

    def report(self) -> RangeReport:
        """Search the largest scale that fits: predict it, test it, and bisect where the prediction fails."""
        report = self._of_forward
        if not math.isfinite(report.loss):
            return report
        low, high = (_SMALLEST, 0) if self.overflow_at(1.0) else (0, _LARGEST + 1)
        if overflow := self.overflow_at(2.0**low):
            return report._replace(backward=tuple(self.at(2.0**low)[0]), overflows_first=overflow.cause)
        if not self.at(2.0**low)[0]:  # no gradient is computed in low precision
            return report._replace(overflows_above=math.inf)
        is_sharded = has_meshes() and torch.distributed.get_world_size() > 1  # then ranks must run the same passes
        while high - low > 1:
            # A backward pass is linear in its scale, so the magnitudes at a scale that fits predict the limit. Numbers
            # that flush to zero fit at 2**40 times this scale, too.
            room = min((_room(record) for record in self.at(2.0**low)[0] if record.largest), default=40)
            predicted = low + max(int(min(room, _LARGEST)), 1)
            middle = (low + high) // 2 if predicted >= high or is_sharded else predicted
            low, high = (low, middle) if self.overflow_at(2.0**middle) else (middle, high)
        limit, half = 2.0**low, min(2.0 ** (low - 1), _DEFAULT.max_scale)
        at_half, overflow = tuple(self.at(half)[0]), None if high > _LARGEST else self.overflow_at(2.0**high)
        flushed, at_one = (self._flushed(scale, limit) for scale in (half, 1.0))
        above, cause = (limit, overflow.cause) if overflow else (math.inf, "")
        return RangeReport(report.loss, report.forward, at_half, above, cause, flushed, at_one)

    def overflow(self, loss_scale: float) -> Overflow | None:
        """Return the first overflow of the forward pass, or else of a backward pass at a scale."""
        report = self._of_forward
        if report.forward_finite:
            return self.overflow_at(loss_scale)
        records = itertools.dropwhile(lambda record: record is not report._overflow, reversed(report.forward))
        return Overflow(report._forward_line(), tuple(dict.fromkeys(record.module for record in records)))

    def overflow_at(self, loss_scale: float) -> Overflow | None:
        """Return the first overflow of a backward pass at a scale: an operation, or else a parameter's gradient."""
        records, bad = self.at(loss_scale)
        if later := [*itertools.dropwhile(lambda record: not record.overflowed, records)]:
            return Overflow(str(later[0]), tuple(dict.fromkeys(record.module for record in later)), "backward")
        if bad:  # a backward pass begins at the last module
            return Overflow(f"the gradient of {bad[-1]}", (bad[-1].rpartition(".")[0],), "backward")
        return None

    def at(self, loss_scale: float) -> tuple[list[OperationRange], list[str]]:
        """Return the operations of a backward pass at a scale, and the parameters with gradients that overflowed."""
        if loss_scale not in self.seen:
            self._attached_scale.fill_(loss_scale)
            self._recorder.records = []
            # Each pass draws the same random numbers. The graph is kept, so that loss_fn may draw another batch.
            restore_random_states = random_states()
            with self._recorder:
                torch.autograd.backward(self._loss, torch.full_like(self._loss, loss_scale), retain_graph=True)
            restore_random_states()
            _, bad = bad_gradients((name, param) for param, name in self._names.items())
            for param in self._names:
                param.grad = None
            self.seen[loss_scale] = self._recorder.records, [name for name, _ in bad]
        return self.seen[loss_scale]

    def _flushed(self, loss_scale: float, limit: float) -> float:
        zeros, more = (sum(record.zeros for record in self.at(scale)[0]) for scale in (limit, loss_scale))
        elements = sum(record.elements for record in self.at(limit)[0])
        return max(0.0, more - zeros) / max(elements - zeros, 1)


class _Recorder(TorchDispatchMode):
    """Measure the results in low precision, and find their modules: in a backward pass the module that made the node.

    autograd numbers its nodes as they are made. The numbers at which a module begins and ends identify its nodes:
    https://docs.pytorch.org/docs/stable/autograd.html#torch.autograd.profiler.profile
    """

    def __init__(self, model: nn.Module, undo: contextlib.ExitStack) -> None:
        super().__init__()
        self.records: list[OperationRange] = []
        self.paths: list[str] = []
        self._numbers: list[int] = []
        self._stack: list[str] = []
        for name, module in model.named_modules():
            enter = functools.partial(self._note, plain_name(name) or type(module).__name__)
            undo.callback(module.register_forward_pre_hook(enter, prepend=True).remove)
            leave = functools.partial(self._note, "")
            undo.callback(module.register_forward_hook(leave, always_call=True).remove)
        # Each thread numbers the nodes that it makes, so one thread must make and run all of them.
        undo.enter_context(torch.autograd.set_multithreading_enabled(False))

    def _note(self, entered: str, *_: object) -> None:
        """Note the node that is made next, where a module is entered or left."""
        if entered:
            self._stack.append(entered)
        elif self._stack:
            self._stack.pop()
        self._numbers.append(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]
        self.paths.append(self._stack[-1] if self._stack else _OUTSIDE)

    def _module(self) -> str:
        """Return the path of the module that the running operation belongs to."""
        node: Any = torch._C._current_autograd_node()
        if self._stack or node is None:
            return self._stack[-1] if self._stack else _OUTSIDE
        place = bisect.bisect_right(self._numbers, node._sequence_nr()) - 1
        return self.paths[place] if place >= 0 and node._sequence_nr() < 2**63 else _OUTSIDE

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind.__torch_dispatch__ is not Tensor.__torch_dispatch__ for kind in types):
            return NotImplemented  # a subclass of Tensor goes first; its inner operations are measured
        name, kwargs = str(func.overloadpacket), kwargs or {}
        computes = not (_COMPUTES_NOTHING.match(name) or func.is_view)
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor | float)] if computes else []
        are_finite = computes and bool(all_finite(inputs))
        result = func(*args, **kwargs)
        for tensor in tree_leaves(result) if computes else ():
            if isinstance(tensor, Tensor) and tensor.dtype in LOW_PRECISION and tensor.numel():
                values = at_least_float32(values_of(tensor.detach())).abs()
                finite = torch.isfinite(values)
                largest, zeros = float(torch.where(finite, values, 0.0).max()), int((values == 0.0).sum())
                place, overflowed = self._module(), are_finite and not bool(finite.all())
                record = OperationRange(name, place, tensor.dtype, largest, overflowed, values.numel(), zeros)
                self.records.append(record)
        return result


def _clear_gradient(param: Tensor, undo: contextlib.ExitStack) -> None:
    undo.callback(setattr, param, "grad", param.grad)
    param.grad = None


def _leaves_of(loss: Tensor) -> set[Tensor]:
    """Return the leaves that a backward pass would give gradients."""
    seen, waiting = set(), [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [following for following, _ in node.next_functions]
    return {node.variable for node in seen if hasattr(node, "variable")}


def _require_loss(loss: object) -> Tensor:
    if not isinstance(loss, Tensor):
        raise TypeError(f"loss_fn returned {type(loss).__name__}; range_report needs a tensor: return the loss")
    if loss.numel() != 1:
        raise ValueError(f"loss_fn returned shape {tuple(loss.shape)}; a loss has one element: return its mean or sum")
    if not loss.requires_grad:
        raise ValueError("the loss has no graph; run the forward pass with gradients, and return the loss undetached")
    return loss


def plain_name(name: str) -> str:
    """Return a module's or a parameter's name without the wrappers of `torch.compile`, FSDP and checkpoints."""
    return _WRAPPERS.sub("", name).rstrip(".")


def _room(record: OperationRange) -> float:
    """Return how often a result can double before it overflows."""
    return math.log2(torch.finfo(record.dtype).max / record.largest) if record.largest else math.inf


def format_power(scale: float) -> str:
    exponent = math.log2(scale)
    return f"2**{exponent:.0f}" if exponent.is_integer() else f"{scale:g}"
