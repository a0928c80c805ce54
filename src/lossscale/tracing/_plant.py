"""Planned overflows in a user's script, and the lines of a page about their effects."""

import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch

from lossscale.tracing._digests import (
    Same,
    all_optimizers,
    attributes_of,
    digests,
    is_finite,
    name_of,
    params_of,
    values_of,
)
from lossscale.tracing._followers import KINDS, SCHEDULES, Follower, Kind
from lossscale.tracing._snapshots import RATES, Snapshots

_SCALED = "each update follows a loss that the scaler has scaled"
_SKIPPED = "planned overflows are skipped"
_SAME = "a planned overflow changes no parameter and nothing in the optimizer's state"
_ZERO = "gradients are zero where each scaled loss is multiplied by zero"
_AGAIN = "a later update is applied"
_CLIPPED = "gradients are unscaled before they are clipped"
_SAVED = "torch.save writes the scaler's numbers with the optimizer's state"
_FEW = 4

Found = tuple[str, bool | None, str]
"""A line: what is required; held, not held, or None for not tried; and the reason."""


class Plan:
    """The planned updates of one scaler: the factors of its losses, and the findings.

    `numbers` are those of the updates to make infinite; the loss of the next one after them is multiplied by zero.
    """

    made: ClassVar[list["Plan"]] = []
    """The plans of all scalers in the process."""

    def __init__(self, scaler: Any, numbers: list[int]) -> None:
        self._scaler = scaler
        self._overflows, self._silent = frozenset(numbers), max(numbers, default=-2) + 1
        self._next_to = (min(numbers, default=0) - 1, self._silent + 1)
        self._snapshots = Snapshots({*numbers, *self._next_to})
        self._optimizers_seen: dict[Same, None] = {}  # which keep them: the findings come when the process ends
        self._update, self._is_in_step = 0, False
        self._unscaled: list[int] = []
        self._before: dict[tuple[str, Same], bytes] | None = None
        self._compared = 0
        self._moved: list[str] = []
        self._applied: dict[int, bool] = {}
        self._left: list[str] = []
        self._has_looked = self._has_bad_loss = False
        self._clips: list[bool] = []
        self._saves: list[tuple[int, bool, int, int]] = []
        self._at_start: dict[tuple[str, Same], bytes] = {}
        self._had_gradients = False
        self._finite: list[Same] = []
        self.begun_with: dict[str, Any] | None = None
        """The scaler's numbers when its first loss is scaled."""
        self.saved: dict[str, dict[str, Any]] = {}
        """The scaler's numbers in each file that has some, by its path; the last one is the newest."""
        self.made.append(self)

    @property
    def is_enabled(self) -> bool:
        """Whether the scaler is enabled."""
        return bool(self._scaler.is_enabled())

    @property
    def loaded(self) -> list[str]:
        """The paths of the files that `torch.load` has read in this process."""
        return list(self._scaler.loaded_in_run)

    @property
    def is_silent(self) -> bool:
        """Whether the losses of this step are multiplied by zero, so that it must be skipped."""
        return self._update == self._silent

    def begin_step(self) -> None:
        """Compare with the state before the last step, at the first loss after its update; take the next digests."""
        if self._is_in_step:
            return
        self._is_in_step = True
        if self.begun_with is None:
            self.begun_with = self._present()
            self._at_start = digests(self._optimizers())
        self._end_comparison()
        self._snapshots.begin(self._update, self._optimizers())
        if self._update in self._overflows:
            self._before = digests(self._optimizers())
            self._finite = [Same(param) for param in self._other_params() if is_finite(param)]

    def multiply(self, loss: torch.Tensor, scaled: torch.Tensor) -> torch.Tensor:
        """Return a scaled loss, times infinity or zero if that is planned for this update."""
        if self._update in self._overflows and _overflows_here():
            return scaled * torch.inf
        if self.is_silent:
            self._has_bad_loss = self._has_bad_loss or not bool(torch.isfinite(loss).all())
            return scaled * 0.0
        return scaled

    def meet(self, optimizer: Any) -> None:
        """Note an optimizer that the scaler is about to step, and its parameters before the first step."""
        self._optimizers_seen.setdefault(Same(optimizer))
        if not all(("", Same(param)) in self._at_start for param in params_of(optimizer)):
            self._at_start = {**digests([optimizer]), **self._at_start}

    def look(self, optimizer: Any) -> None:
        """Note the gradients, before they are unscaled, that are not zero although the losses were zero."""
        self._has_looked = True
        for param in params_of(optimizer):
            if param.grad is None:
                continue
            self._had_gradients = True
            if not is_finite(param.grad):  # as that of a square root at a loss of zero
                self._has_bad_loss = True
            elif bool((values_of(param.grad) != 0.0).any()):
                self._left.append(name_of(param))

    def note_clip(self, parameters: list[Any], unscaled: set[int]) -> None:
        """Note whether the optimizer of gradients that are about to be clipped is one of those that are unscaled."""
        clipped = {id(each) for each in parameters}
        for key, member in self._scaler._members.items() if self._is_in_step else ():
            optimizer = member.optimizer()
            if optimizer is not None and any(id(param) in clipped for param in params_of(optimizer)):
                self._clips.append(key in unscaled)

    def note_save(self, content: Any, path: str) -> None:
        """Note whether a file gets an optimizer's state, and how often it gets the present numbers of the scaler.

        Scalers may have the same numbers; then all of them must be there.
        """
        found, present = list(_dicts(content)), self._present()
        alike = [each for each in self.made if each.is_used and each._present() == present]
        own = [_numbers(each) for each in found if "scale" in each and "_growth_tracker" in each]
        has_optimizer = any({"state", "param_groups"} <= each.keys() for each in found)
        self._saves.append((self._update, has_optimizer, own.count(present), len(alike)))
        self.saved.pop(path, None)
        if present in own:
            self.saved[path] = present

    def end_step(self, info: Any) -> None:
        """Note an update. Synchronises at planned updates, and after them until one is applied."""
        if not self._is_in_step:
            self._unscaled.append(self._update)
        if self._update in self._overflows or (self._update > self._silent >= 0 and not self._is_applied_again()):
            self._applied[self._update] = bool(info.applied)
        self._snapshots.end(self._update)
        self._update, self._is_in_step = self._update + 1, False

    def lines(self, why_not: str) -> Iterator[Found]:
        """Yield the lines of the page, none of them tried if `why_not` is a reason for that."""
        self._end_comparison()
        self._snapshots.close(self._update)
        if why_not:
            kinds = [kind.what for kind in KINDS]
            for what in (_SCALED, _SKIPPED, _SAME, *kinds, _ZERO, _AGAIN, _CLIPPED, _SAVED):
                yield what, None, why_not
            return
        applied = [number for number in sorted(self._overflows) if self._applied[number]]
        yield self._of_scaled()
        yield self._of_skips(applied)
        yield self._of_digests()
        yield from (self._of_followers(kind, sorted(self._overflows - {*applied})) for kind in KINDS)
        yield self._of_zero_loss()
        yield self._of_later()
        yield self._of_clips()
        yield self._of_saves()

    def why_not(self) -> str:
        """Return why nothing is tried of this scaler; empty if its lines say something."""
        if not self.is_enabled:
            return "the scaler is disabled, so that no loss was scaled"
        if self._update <= max(self._overflows, default=0):
            return f"the script made {self._update} updates, numbered from 0; name earlier ones with --plant"
        if self.begun_with is None:
            return "no loss was scaled with scaler.scale"
        now = {key: value for key, value in digests(self._optimizers()).items() if not key[0]}
        if all(self._at_start.get(key, value) == value for key, value in now.items()):
            return "no parameter changed in this run, so that a skipped step looks like an applied one"
        return ""

    def _of_scaled(self) -> Found:
        if not self._unscaled:
            return _SCALED, True, f"{self._update} updates"
        numbers = _listed([str(each) for each in self._unscaled])
        return _SCALED, False, f"updates {numbers} of {self._update} came without scaler.scale(loss)"

    def _of_skips(self, applied: list[int]) -> Found:
        if unscaled := sorted(self._overflows.intersection(self._unscaled)):
            return _SKIPPED, None, f"updates {unscaled} came without scaler.scale(loss)"
        if applied:
            hint = "look for gradients that are repaired"
            return _SKIPPED, False, f"updates {applied} were applied although each loss was infinite; {hint}"
        return _SKIPPED, True, f"updates {sorted(self._overflows)}"

    def _of_digests(self) -> Found:
        if not self._compared:
            return _SAME, None, "the scaler has stepped no optimizer that has parameters"
        if not self._moved:
            others = f"; {len(self._finite)} parameters of other optimizers stayed finite" if self._finite else ""
            return _SAME, True, f"{self._compared} digests before and after {len(self._overflows)} updates{others}"
        return _SAME, False, f"{_listed(self._moved)}; call scaler.step(optimizer) and not optimizer.step()"

    def _of_followers(self, kind: Kind, skipped: list[int]) -> Found:
        """Return the line of one kind of object that follows the steps; learning rates count without a schedule, too.

        An object that does not move with the applied steps next to the planned ones says nothing about skipped steps.
        """
        others = [each for each in self.made if each is not self and each.is_used]
        if others and kind is not SCHEDULES:
            return kind.what, None, f"the process has {len(others) + 1} scalers, and each may skip alone"
        if not skipped:
            return kind.what, None, "no planned overflow was skipped"
        found = self._snapshots.names(kind)
        moved = {at: {each.name for each in self._own(self._snapshots.moved(at), kind)} for at in skipped}
        names = sorted(set().union(*moved.values()))
        compared = self._snapshots.compared(kind, skipped)
        faults = [_fault(kind, name, [at for at in skipped if name in moved[at]], len(compared)) for name in names]
        if faults:
            return kind.what, False, " ".join(faults)
        if found and not compared:
            late = "nothing was read before the planned updates; plan later ones"
            return kind.what, None, f"{_listed(sorted(found))}: {late}"
        near = {each.name for at in self._next_to for each in self._own(self._snapshots.moved(at), kind)}
        if near:
            return kind.what, True, _listed(sorted(near))
        still = f"{_listed(sorted(found))} did not change in the updates next to the planned ones"
        return kind.what, None, still if found else "none was found"

    def _own(self, followers: Iterator[Follower], kind: Kind) -> Iterator[Follower]:
        """Yield followers of a kind, without the schedules of other scalers' optimizers."""
        foreign = {id(same.it) for each in self.made if each is not self for same in each._optimizers_seen}
        for each in followers:
            optimizer = each.it if each.name == RATES else getattr(each.it, "optimizer", None)
            if each.kind is kind and id(optimizer) not in foreign:
                yield each

    def _of_zero_loss(self) -> Found:
        if not self._has_looked:
            return _ZERO, None, f"the script did not reach update {self._silent}"
        if self._silent in self._unscaled:
            return _ZERO, None, f"update {self._silent} came without scaler.scale(loss)"
        if self._has_bad_loss:
            return _ZERO, None, f"a loss of update {self._silent}, or its gradient at zero, was not finite by itself"
        if not self._had_gradients:
            return _ZERO, None, f"the optimizer had no gradients in update {self._silent}"
        if not self._left:
            return _ZERO, True, f"update {self._silent}, before unscaling; that step was skipped"
        hint = "a loss that is not scaled, a hook that adds to gradients, or a missing zero_grad()"
        return _ZERO, False, f"update {self._silent}: {_listed(self._left)} had others; look for {hint}"

    def _of_later(self) -> Found:
        later = [number for number in self._applied if number > self._silent]
        if not later:
            return _AGAIN, None, "there was no later update"
        if self._is_applied_again():
            return _AGAIN, True, f"update {later[-1]}"
        return _AGAIN, False, f"of the updates from {later[0]} on none was applied; look for a missing zero_grad()"

    def _of_clips(self) -> Found:
        number, early = len(self._clips), self._clips.count(False)
        if not number:
            return _CLIPPED, None, "torch's clip_grad_norm_ and clip_grad_value_ did not run"
        if early:
            order = "between scaler.unscale_(optimizer) and scaler.step(optimizer)"
            return _CLIPPED, False, f"{early} of {number} clips were not {order}"
        return _CLIPPED, True, f"{number} clips"

    def _of_saves(self) -> Found:
        with_optimizer = {update for update, has_optimizer, _, _ in self._saves if has_optimizer}
        there, asked = Counter[int](), dict[int, int]()
        for update, _, number, alike in self._saves:
            there[update] += number
            asked[update] = alike
        with_scaler = {update for update in asked if there[update] >= asked[update]}
        if not with_optimizer:
            return _SAVED, None, "torch.save wrote no optimizer's state"
        without = with_optimizer - with_scaler  # they may be in another file of the same checkpoint
        after = _listed([str(update) for update in sorted(without or with_optimizer)])
        if without:
            return _SAVED, False, f"checkpoints after {after} updates lack scaler.state_dict() as it was at that time"
        return _SAVED, True, f"checkpoints after {after} updates have them, as they were at that time"

    def _is_applied_again(self) -> bool:
        return any(applied for number, applied in self._applied.items() if number > self._silent)

    def _end_comparison(self) -> None:
        if self._before is None:
            return
        before, self._before = self._before, None
        after = digests(self._optimizers())
        self._compared = max(self._compared, len(after))
        for (name, same), digest in after.items():
            # A fused optimizer allocates its state in a first step that its kernel skips: the digest of zeros is empty.
            if before.get((name, same), b"") != digest:
                self._moved.append(f"{name_of(same.it)}{f' ({name})' if name else ''} changed")
        self._moved += [f"{name_of(each.it)} is not finite" for each in self._finite if not is_finite(each.it)]

    @property
    def is_used(self) -> bool:
        """Whether the scaler has made an update."""
        return self._update > 0

    def _present(self) -> dict[str, Any]:
        return _numbers(self._scaler.state_dict())

    def _optimizers(self) -> list[Any]:
        """Return the optimizers that this scaler steps, or all in the process before it has seen one."""
        return [same.it for same in self._optimizers_seen] or all_optimizers()

    def _other_params(self) -> Iterator[Any]:
        """Yield the parameters of optimizers that this scaler does not step; their losses may not be scaled."""
        own = {id(param) for each in self._optimizers() for param in params_of(each)}
        return (param for each in all_optimizers() for param in params_of(each) if id(param) not in own)


def write_findings(folder: Path, plan: Plan, rank: int, ranks: int) -> None:
    """Write the findings for the process of the command, which waits for this one."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    content: dict[str, Any] = {"rank": rank, "ranks": ranks, "device": device, "torch": torch.__version__}
    why_not = plan.why_not()
    content.update(why_not=why_not, lines=list(plan.lines(why_not)))
    content.update(begun_with=plan.begun_with, saved=plan.saved, loaded=plan.loaded)
    name = f"{rank:06}-{os.getpid()}-{id(plan)}.json"
    (folder / name).write_text(json.dumps(content), encoding="utf-8")


def _overflows_here() -> bool:
    """Return whether this rank overflows: the last one of a group, so that the others must follow it."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return True
    return torch.distributed.get_rank() == torch.distributed.get_world_size() - 1


def _fault(kind: Kind, name: str, at: list[int], compared: int) -> str:
    if name == RATES:
        return f"Learning rates changed over updates {at}; follow applied steps only."
    return kind.sentence.format(name=name, moves=len(at), skips=compared)


def _dicts(content: Any, depth: int = 6) -> Iterator[dict[Any, Any]]:
    """Yield the dicts in what is saved, those included in lists and attributes."""
    parts: list[Any] = []
    if isinstance(content, dict):
        yield content
        parts = list(content.values())
    elif isinstance(content, list | tuple):
        parts = list(content)
    elif not isinstance(content, torch.Tensor | torch.nn.Module):
        parts = [attributes_of(content)]
    for part in parts if depth else ():
        if isinstance(part, dict | list | tuple) or attributes_of(part):
            yield from _dicts(part, depth - 1)


def _numbers(state: dict[str, Any]) -> dict[str, Any]:
    """Return the numbers in a scaler's state, for the comparison of two states."""
    return {name: value for name, value in state.items() if isinstance(value, bool | int | float)}


def _listed(parts: list[str]) -> str:
    parts = list(dict.fromkeys(parts))
    return ", ".join(parts[:_FEW]) + (f" and {len(parts) - _FEW} more" if len(parts) > _FEW else "")
