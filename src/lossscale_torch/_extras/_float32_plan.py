"""Modules that run in float32 while the rest of a model runs in float16, and the search for such modules."""

import difflib
import fnmatch
import functools
import itertools
import re
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from lossscale_core import ScalingPolicy
from lossscale_torch._extras._range_report import LOW_PRECISION, Overflow, Passes, RangeReport, format_power, plain_name
from lossscale_torch._gradients import at_least_float32

_MAX_MODULES = 16
_MAX_TRIALS = {"forward": 8, "backward": 1, "error": 0}
"""The number of modules to try among the modules that feed an overflow, by its kind; the nearest module comes first."""
_CAST_BY_AUTOCAST = re.compile(r"\(aten\.\w*(mm|convolution|attention)")
"""Operations that autocast runs in half precision, even if a module in float32 feeds them."""


def keep_in_float32(model: nn.Module, names: str | Iterable[str]) -> ExitStack:
    """Run the named modules in float32, inside `torch.autocast` and under FSDP2, too.

    Their inputs in float16, bfloat16 and float8 are cast to float32, autocast is off inside, and their results stay in
    float32; without autocast they are cast back to the dtype of these inputs. The call changes no `state_dict`, works
    under `torch.compile`, activation checkpointing and DDP, and copies and pickles of the model keep its effect. A
    module that is kept already stays as it is. If a module changes an input in place, the change is copied to the
    original tensor, except in compiled code and in inference mode; there, keep the enclosing module. Does not
    synchronise.

    Args:
        model: A module; DDP and `torch.compile` may be around it or its parts, and do not appear in the names.
        names: Names as in `model.named_modules()`, such as `"blocks.1.mlp"`. `"*"`, `"?"` and `"[..]"` stand for
            characters between two dots: `"blocks.*.mlp"`.

    Returns:
        A context that undoes the call at its end, or in its `close()`.

    Raises:
        TypeError: `model` is not a module, or `names` are not names.
        ValueError: No module that runs has such a name, or a named module has parameters in half precision, by itself
            or in its FSDP unit. If you call `fully_shard` or `half()` later, or on an enclosing module, the first
            forward pass raises the error.
    """
    patterns = [names] if isinstance(names, str) or not isinstance(names, Iterable) else [*names]
    if not isinstance(model, nn.Module) or not all(isinstance(pattern, str) for pattern in patterns):
        raise TypeError(
            f"keep_in_float32() was given {type(model).__name__} and {type(names).__name__}; it takes a module and the "
            "names of modules in it; call keep_in_float32(model, plan.modules)"
        )
    modules = _running_modules(model)
    chosen: dict[str, nn.Module] = {}
    for pattern in patterns:
        matches = {name: module for name, module in modules.items() if name and _matches(name, pattern)}
        if not matches:
            nearest = "".join(difflib.get_close_matches(pattern, modules, 1, 0.0))
            raise ValueError(
                f"keep_in_float32() was given {pattern!r}, which names no module with a forward pass; the nearest name "
                f"is {nearest!r}; call keep_in_float32(model, plan.modules)"
            )
        chosen |= matches
    for name, module in chosen.items():
        _require_float32_parameters(module, name)
    with ExitStack() as undo:
        for name, module in chosen.items():
            if not _is_kept(module):
                before = {key: value for key, value in vars(module).items() if key == "forward"}
                undo.callback(vars(module).update, before)
                undo.callback(vars(module).pop, "forward", None)
                module.forward = functools.partial(_in_float32, module, name, module.forward)
        return undo.pop_all()


def _running_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that have a forward pass by their names; the name of the model itself is empty."""
    outer = [module for name, module in model.named_modules() if not plain_name(name)]  # torch.compile around DDP, too
    inner = next((module.module for module in outer if isinstance(module, nn.parallel.DistributedDataParallel)), model)
    named = inner.named_modules(remove_duplicate=False)
    return {plain_name(name): part for name, part in named if not name or type(part).forward is not nn.Module.forward}


def _is_kept(module: nn.Module) -> bool:
    return getattr(module.forward, "func", None) is _in_float32


def _in_float32(module: nn.Module, name: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    copies: dict[Tensor, Tensor] = {}

    def in_float32(value: Any) -> Any:
        # A list or a dict without tensors in low precision is not copied, since the module may write into it.
        if not any(getattr(leaf, "dtype", None) in LOW_PRECISION for leaf in tree_leaves(value)):
            return value
        return tree_map_only(Tensor, lambda tensor: copies.setdefault(tensor, at_least_float32(tensor)), value)

    is_eager = not torch.compiler.is_compiling()
    if is_eager:
        _require_float32_parameters(module, name)
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    devices = [tensor.device.type for tensor in (*tensors, *itertools.islice(module.parameters(), 1))]
    device = next((device for device in devices if device not in ("cpu", "meta")), "cpu")
    is_autocast = torch.is_autocast_enabled(device)
    with torch.autocast(device, enabled=False):
        result = forward(*map(in_float32, args), **{key: in_float32(value) for key, value in kwargs.items()})
    for tensor, copy in copies.items() if is_eager else ():
        if copy is not tensor and not copy.is_inference() and copy._version:
            tensor.copy_(copy)  # the module has written into it
    half = next((tensor.dtype for tensor in tensors if tensor.dtype in LOW_PRECISION), torch.float32)
    if is_autocast or half is torch.float32:
        return result
    # Without autocast nothing casts the inputs of the module that follows to the dtype of its weights.
    return tree_map_only(Tensor, lambda tensor: tensor.to(half) if tensor.dtype is torch.float32 else tensor, result)


def _matches(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatch.fnmatchcase, parts, wanted))


def _require_float32_parameters(module: nn.Module, name: str) -> None:
    # The type tells a unit of FSDP2 without an import; a module itself looks up missing attributes slowly.
    units = [part for part in module.modules() if hasattr(type(part), "_get_fsdp_state")]
    dtypes = {unit._get_fsdp_state()._mp_policy.param_dtype for unit in units}  # type: ignore[operator]
    if half := LOW_PRECISION & (dtypes | {param.dtype for param in module.parameters()}):
        raise ValueError(
            f"{name} has parameters in {half.pop()}; a module that is kept in float32 computes with parameters in "
            f"float32; call float() on it before the optimizer is made, or under FSDP2 make it a unit of its own: "
            f"fully_shard(model.get_submodule({name!r}), mp_policy=MixedPrecisionPolicy(param_dtype=torch.float32)); "
            "without autocast add output_dtype=torch.float16 to this policy"
        )


class Float32Plan(NamedTuple):
    """The modules that must run in float32, and the range reports without and with them; `print` the plan."""

    modules: tuple[str, ...]
    """A minimal set: if you leave out one of them, something overflows. Pass it to `keep_in_float32`."""
    patterns: tuple[str, ...]
    """The same modules, with one pattern such as `"blocks.*.mlp"` for several blocks; it may cover further blocks."""
    before: RangeReport
    """The report without the plan; the worst one if there are several batches."""
    after: RangeReport
    """The report with the plan, chosen in the same way."""
    running: int
    """The number of modules of the model."""
    note: str = ""
    """The overflow that remains and its remedy, or a plan with fewer modules and a smaller scale; mostly empty."""

    @property
    def policy(self) -> ScalingPolicy | None:
        """The policy to train with, which `after` recommends; None if no scale fits."""
        return self.after.policy

    def __str__(self) -> str:
        names = ", ".join(self.modules) or "nothing"
        if self.patterns != self.modules:
            names = f"{names} (or {', '.join(self.patterns)})"
        now = str(self.after).split("\n")
        fits = self.after.forward_finite and self.after.init_scale is not None
        after = f"finite; {now[-1]}; {len(self.modules)} of {self.running} modules in float32" if fits else now[0]
        before = str(self.before).split("\n")[self.before.forward_finite]
        lines = [f"before: {before}", f"keep in float32: {names}", f"after: {after}", self.note]
        return "\n".join(line.replace(": overflows", " overflows", 1) for line in lines if line)

    def __repr__(self) -> str:
        return str(self)  # the reports are pages long


def float32_plan(
    model: nn.Module, loss_fn: Callable[[], Tensor] | Sequence[Callable[[], Tensor]], *, at_least: float = 2.0**0
) -> Float32Plan:
    """Search the modules that must run in float32, so that neither the forward nor the backward pass overflows.

    First the search makes the forward pass finite, module by module. If an operation between modules overflows, the
    search tries the modules that feed this operation. Modules for the backward pass follow only if no loss scale of
    `at_least` fits. Then the search drops the modules that are not needed. The search mostly takes two to four passes
    for each module and batch, and five for each of two reports; like `range_report`, it changes nothing, and
    synchronises after every operation.

    Args:
        model: The model, with its parameters in float32.
        loss_fn: Runs the forward pass as for `range_report`, on the same batch each time. If it is a list of functions,
            the plan fits all of them.
        at_least: The smallest loss scale to accept.

    Returns:
        The plan: `print` it, and pass its `modules` to `keep_in_float32` before training. `patterns` names the
        same modules, with one pattern for several blocks. `before` and `after` are the range reports of the worst
        batch. `note` is mostly empty; it names an overflow that remains and its remedy, or a plan with fewer
        modules and a smaller scale.

    Raises:
        TypeError: As for `range_report`.
        ValueError: As for `range_report`; or a module that must run in float32 has parameters in half precision, or a
            module that is kept already is never called, though its weights are used.
    """
    loss_fns = loss_fn if isinstance(loss_fn, Sequence) else [loss_fn]
    for function in loss_fns:
        Passes.require_arguments(model, function, "float32_plan")
    search = _Search(model, loss_fns, at_least)
    before = search.report([])
    names: list[str] = []
    note = ""
    forward: list[str] | None = None  # the modules that make the forward pass finite, if they are not enough
    while overflow := search.overflow(names):
        if overflow.kind == "backward" and forward is None:
            names = forward = search.minimal(names, "backward")
        extended = search.extend(names, overflow)
        if extended == names or len(names) >= _MAX_MODULES:
            hint = "no module can be kept for it; compute it in float32 there, or make the loss or its values smaller"
            hint = hint if extended == names else f"{_MAX_MODULES} modules are kept already"
            cause = f"backward: overflows at a loss scale of {format_power(at_least)}, first in {overflow.cause}"
            cause = cause if overflow.kind == "backward" else overflow.cause
            note = f"{cause}; {hint}" if overflow.places else cause
            first = "".join(overflow.places[:1])
            names = names[:-1] if overflow.kind == "error" else [name for name in names if not _is_in(first, name)]
            names = names if forward is None else forward
            break
        names = extended
    else:
        names = search.minimal(names)
        if forward is not None and (report := search.report(forward)).init_scale is not None:
            note = f"or keep {', '.join(forward) or 'nothing'}, and {str(report).splitlines()[-1]}"
    patterns = dict.fromkeys(search.pattern(name, names) for name in names)
    running = len(search.modules) - 1
    return Float32Plan(tuple(names), tuple(patterns), before, search.report(names), running, note)


class _Search:
    """The passes with different modules in float32; passes with the same modules run once."""

    def __init__(self, model: nn.Module, loss_fns: Sequence[Callable[[], Tensor]], at_least: float) -> None:
        self.modules, self._loss_fns, self._at_least = _running_modules(model), loss_fns, at_least
        self._called: set[str] = set()
        self._results: dict[frozenset[str], tuple[Overflow | None, Any]] = {}

    def overflow(self, names: list[str]) -> Overflow | None:
        """Return the first overflow, of the forward pass or else of a backward pass at the smallest scale to accept."""
        if frozenset(names) not in self._results:
            self._results[frozenset(names)] = self._run(names, needs_report=False)
        return self._results[frozenset(names)][0]

    def report(self, names: list[str]) -> RangeReport:
        """Return the worst of the batches' reports."""
        if not self._results.get(frozenset(names), (None, None))[1]:
            self._results[frozenset(names)] = self._run(names, needs_report=True)
        return self._results[frozenset(names)][1]

    def _run(self, names: list[str], needs_report: bool) -> tuple[Overflow | None, Any]:
        """Return the first overflow and the worst report; None stands for a report that is not needed."""
        overflow, reports = None, []
        for loss_fn in self._loss_fns:
            try:
                with keep_in_float32(self.modules[""], names) as undo:
                    passes = Passes(self.modules[""], loss_fn, undo)
                    self._require_calls(passes)
                    overflow = overflow or passes.overflow(self._at_least)
                    if overflow and not needs_report:
                        return overflow, None
                    reports.append(passes.report())
            except RuntimeError as error:  # index_add_ raises it if it adds a kept module's result to a half buffer
                if not names or needs_report or isinstance(error, torch.OutOfMemoryError):
                    raise
                named = {module: name for name, module in self.modules.items() if name}
                running = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
                places = [named[owner] for owner in running if isinstance(owner, nn.Module) and owner in named]
                return Overflow(f"{', '.join(names)} cannot be kept: {error}", ((places or names)[-1],), "error"), None
        return overflow, min(reports, key=lambda report: (report.forward_finite, report.overflows_above or 0.0))

    def _require_calls(self, passes: Passes) -> None:
        """Raise `ValueError` if weights of a kept module are used and no pass has called the module."""
        self._called |= passes.called & self.modules.keys()
        called = {self.modules[name] for name in self._called}
        for name, module in self.modules.items():
            if _is_kept(module) and module not in called and not passes.leaves.isdisjoint(module.parameters()):
                raise ValueError(
                    f"{name} is kept in float32 and its weights are used without calling it; keep what uses them"
                )

    def extend(self, names: list[str], overflow: Overflow) -> list[str]:
        """Return the names with a module that feeds the overflow, or else with the overflow's module, if it has one."""
        first = "".join(overflow.places[:1])
        place = next((name.rpartition(".")[0] for name in names if _is_in(first, name)), first)
        outside = [module for module in overflow.places if not any(_is_in(module, name) for name in names)]
        if overflow.kind == "backward" and outside:
            place = outside[0]
        while place and place not in self._called:
            place = place.rpartition(".")[0]
        feeders = [name for name in outside if name in self._called and name != place and _is_in(name, place or name)]
        # A module in float32 casts its inputs itself, so that the modules that feed it cannot help.
        cannot_help = _CAST_BY_AUTOCAST.search(overflow.cause) or (overflow.kind == "forward" and first not in outside)
        for feeder in () if cannot_help else feeders[: _MAX_TRIALS[overflow.kind]]:
            try:
                after = self.overflow([*names, feeder])
            except ValueError:  # it has parameters in half precision
                continue
            if after is None or (_is_later(after, overflow) and (place or overflow.kind == "forward")):
                return [*names, feeder]
        return [*(name for name in names if not _is_in(name, place)), place] if place else names

    def minimal(self, names: list[str], allowed: str = "") -> list[str]:
        """Drop the modules without which nothing overflows, or only a pass of the allowed kind."""
        for name in names if len(names) > 1 else ():
            rest = [other for other in names if other != name]
            overflow = self.overflow(rest)
            names = rest if overflow is None or overflow.kind == allowed else names
        return names

    def pattern(self, name: str, names: list[str]) -> str:
        """Return a pattern for the same part of several blocks, if all these parts have one type; else the name."""
        star = re.sub(r"(?<=\.)\d+\b", "*", name)
        covered = [other for other in self.modules if _matches(other, star)]
        are_alike = len({type(self.modules[other]) for other in covered}) == 1
        return star if are_alike and len(set(covered).intersection(names)) > 1 else name


def _is_in(name: str, container: str) -> bool:
    return f"{name}.".startswith(f"{container}.")


def _is_later(overflow: Overflow, before: Overflow) -> bool:
    """Return whether more of the model ran before `overflow` than before the overflow `before`."""
    if overflow.kind == before.kind == "forward":
        return not {*overflow.places} <= {*before.places}
    return overflow.kind == "backward" and (before.kind == "forward" or before.places[0] not in overflow.places)
