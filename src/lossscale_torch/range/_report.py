"""A report on the magnitudes that one forward and one backward pass of a model compute."""

import contextlib
import inspect
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lossscale_core.adapters import (
    GRADIENT,
    OperationRange,
    RangeReport,
    UnscaledGradient,
    check_loss_shape,
    unscaled_gradients,
)
from lossscale_torch._attach import attached_with
from lossscale_torch._gradients import values_of
from lossscale_torch._random import RandomState
from lossscale_torch._verbs import scaled
from lossscale_torch._versions import fsdp2_explained
from lossscale_torch.range._inputs import Inputs
from lossscale_torch.range._recorder import Changes, ModulePaths, Recorder, measure, plain_name, widened


def range_report(model: nn.Module, loss_fn: Callable[[], Tensor]) -> RangeReport:
    """Report which operations overflow, forward or backward, how much flushes to zero, and which loss scale fits.

    The report runs `loss_fn` once and a few backward passes (usually up to four) at different loss scales, and measures
    every computed float16, bfloat16 and float8 tensor. Two more passes find gradients that do not follow the loss
    scale; during a report `GradScaler.attach` multiplies by the scale of each pass. Afterwards parameters, gradients,
    buffers and the states of random number generators are bit for bit as before, also if `loss_fn` raises. Compiled
    code runs uncompiled. Synchronises with the host after every operation.

    Args:
        model: A module, for the names: an operation is named by its innermost module, a gradient by its parameter.
        loss_fn: Runs the forward pass, under `torch.autocast` if training does, and returns the loss, unscaled: a
            tensor with one element of any dtype.

    Returns:
        The report. `print` it, `plot` it, or pass its `init_scale` on to `DynamicScaling`.

    Raises:
        TypeError: `model` is not a module, or `loss_fn` is not a function without arguments that returns a tensor.
        ValueError: The loss has several elements, or no graph leads from it to a parameter.
    """
    _check_arguments(model, loss_fn)
    changes = Changes()
    paths = ModulePaths(model)
    inputs = Inputs(model, loss_fn, changes)
    run = _Run(model, loss_fn, Recorder(paths, changes, inputs.look))
    with (
        fsdp2_explained(),
        _run_eagerly(),
        _random_states_kept(),
        torch.autograd.set_detect_anomaly(False),
        run,
        changes,
        _registrations_kept(model),
        paths,
        inputs,
    ):
        return RangeReport.measure(
            run.forward, run.backward, nonfinite_inputs=inputs.found, unscaled_gradients=run.unscaled_gradients
        )


class _Run:
    """The forward pass, and backward passes for the search; as a context it restores existing gradients."""

    def __init__(self, model: nn.Module, loss_fn: Callable[[], Tensor], recorder: Recorder) -> None:
        self._names: dict[Tensor, str] = {parameter: plain_name(name) for name, parameter in model.named_parameters()}
        self._loss_fn = loss_fn
        self._recorder = recorder
        self._kept = contextlib.ExitStack()
        self._leaves: list[Tensor] = []
        self._loss: Tensor
        self._attached_with = torch.ones((), dtype=torch.float32, device="cpu")
        self._early: list[str] = []
        self._norms: dict[float, dict[str, float]] = {}

    def __enter__(self) -> "_Run":
        self._keep(self._names)
        self._kept.enter_context(attached_with(self._attached_with))
        return self

    def __exit__(self, *_: object) -> None:
        self._kept.close()

    def forward(self) -> tuple[float, Iterable[OperationRange]]:
        with self._recorder:
            loss = _checked(self._loss_fn())
        self._early = [self._names[leaf] for leaf, _ in self._take_gradients()]
        self._loss, self._random_state = scaled(loss, 1.0), RandomState()
        self._keep(leaf for leaf in _leaves_of(self._loss) if leaf not in self._names)
        return float(loss.detach()), self._recorder.take()

    def backward(self, loss_scale: float) -> Iterable[OperationRange]:
        self._random_state.restore()  # so that the gradients of two passes can be compared
        seed = torch.full_like(self._loss, loss_scale)
        self._attached_with.fill_(loss_scale)
        self._recorder.begin_backward(seed, self._attached_with)
        with self._recorder, self._early_explained():
            # The graph is kept for the next scale, so that loss_fn, which may draw another batch, is called once.
            torch.autograd.backward(self._loss, seed, retain_graph=True)
        norms, records = self._norms.setdefault(loss_scale, {}), self._recorder.take()
        for leaf, grad in self._take_gradients():
            name = self._name_of(leaf)
            norms[name] = math.hypot(norms.get(name, 0.0), _norm(widened(values_of(grad.detach()))))
            if self._recorder.measures:
                records.append(measure(grad, GRADIENT, name)._replace(scaled=True))
        return records

    def unscaled_gradients(self, loss_scale: float) -> list[UnscaledGradient]:
        """Return the gradients that do not follow the loss scale."""
        self._recorder.measures = False
        found = unscaled_gradients(self._norms_at, loss_scale)
        early = [UnscaledGradient(name, "early") for name in self._early]
        return [*early, *(each for each in found if each.name not in self._early)]

    def _norms_at(self, loss_scale: float) -> dict[str, float]:
        """Return the 2-norms of the gradients at a scale, once from a pass of the search if there was one."""
        if loss_scale not in self._norms:
            self.backward(loss_scale)
        return self._norms.pop(loss_scale)

    def _name_of(self, leaf: Tensor) -> str:
        return self._names.get(leaf, "an input")

    def _take_gradients(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each leaf with its gradient, and drop it."""
        for leaf in self._leaves:
            if leaf.grad is not None and leaf.grad.numel():
                yield leaf, leaf.grad
                leaf.grad = None

    @contextlib.contextmanager
    def _early_explained(self) -> Iterator[None]:
        """Add to an error of the backward pass that `loss_fn` has run one itself, which frees the graph."""
        try:
            yield
        except RuntimeError as error:
            if self._early:
                error.add_note("loss_fn calls backward itself; return the loss, and leave that to range_report.")
            raise

    def _keep(self, leaves: Iterable[Tensor]) -> None:
        for leaf in leaves:
            self._leaves.append(leaf)
            self._kept.enter_context(_gradient_kept(leaf))


@contextlib.contextmanager
def _gradient_kept(leaf: Tensor) -> Iterator[None]:
    """Begin without a gradient, and without hooks that let an optimizer step within the backward pass."""
    grad, hooks = leaf.grad, leaf._post_accumulate_grad_hooks
    leaf.grad = None
    if hooks:
        leaf._post_accumulate_grad_hooks = {}  # None would leave them in place
    try:
        yield
    finally:
        leaf.grad = grad
        if hooks:
            leaf._post_accumulate_grad_hooks = hooks


@contextlib.contextmanager
def _registrations_kept(model: nn.Module) -> Iterator[None]:
    """Restore the parameters and buffers of each module if they were replaced under their names."""
    kinds: list[dict[str, Any]] = [kind for each in model.modules() for kind in (each._parameters, each._buffers)]
    registered = [(kind, dict(kind)) for kind in kinds]
    try:
        yield
    finally:
        for kind, before in registered:
            if list(map(id, kind.values())) != list(map(id, before.values())):
                kind.clear()
                kind.update(before)


@contextlib.contextmanager
def _random_states_kept() -> Iterator[None]:
    state = RandomState()
    try:
        yield
    finally:
        state.restore()


def _run_eagerly() -> contextlib.AbstractContextManager[object]:
    """Run compiled code uncompiled; Dynamo is not imported if nothing is compiled."""
    if "torch._dynamo" not in sys.modules:
        return contextlib.nullcontext()
    return torch.compiler.set_stance("force_eager")


def _check_arguments(model: object, loss_fn: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"range_report was given {type(model).__name__} as model; the model, an nn.Module, comes first; "
            "write range_report(model, loss_fn)"
        )
    if not callable(loss_fn) or _needs_arguments(loss_fn):
        given = "a loss_fn that needs arguments" if callable(loss_fn) else f"{type(loss_fn).__name__} as loss_fn"
        raise TypeError(
            f"range_report was given {given}; it takes a function without arguments that runs the model and returns "
            "the loss; write range_report(model, lambda: loss_fn(model(batch)))"
        )


def _needs_arguments(function: Callable[..., object]) -> bool:
    """Return whether a function cannot be called without arguments; False if its signature is unknown."""
    try:
        signature = inspect.signature(function.forward if isinstance(function, nn.Module) else function)
    except ValueError:
        return False
    return any(
        each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
        for each in signature.parameters.values()
    )


def _checked(loss: object) -> Tensor:
    if not isinstance(loss, Tensor):
        raise TypeError(f"loss_fn returned {type(loss).__name__}; range_report needs a tensor: return the loss")
    check_loss_shape(loss.shape)
    if not loss.requires_grad:
        raise ValueError("the loss has no graph; run the forward pass with gradients, and return the loss undetached")
    return loss


def _norm(values: Tensor) -> float:
    """Return the 2-norm of real, dense values, also where their squares are too large for their dtype."""
    largest = float(values.abs().amax()) if values.numel() else 0.0
    return largest * float((values / largest).norm()) if 0.0 < largest < math.inf else largest


def _leaves_of(loss: Tensor) -> list[Tensor]:
    """Return the leaves that a backward pass would give gradients, in the order of the forward pass."""
    leaves, seen, waiting = [], set(), [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [each for each, _ in node.next_functions]
            if (leaf := getattr(node, "variable", None)) is not None:
                leaves.append(leaf)
    return leaves[::-1]
