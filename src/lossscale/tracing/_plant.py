"""Planned overflows in a user's script, and the lines of a page about their effects."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from lossscale.tracing._digests import Same, all_optimizers, digests, is_finite, name_of, params_of, values_of
from lossscale.tracing._moved import KINDS, Followers

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

    def __init__(self, scaler: Any, numbers: list[int], followers: Followers) -> None:
        self._scaler, self._followers = scaler, followers
        self._overflows, self._silent = frozenset(numbers), max(numbers, default=-2) + 1
        self._update, self._is_in_step = 0, False
        self._before: dict[tuple[str, Same], bytes] | None = None
        self._compared = 0
        self._moved: list[str] = []
        self._rates: list[dict[int, list[float]]] = []
        self._applied: dict[int, bool] = {}
        self._left: list[str] = []
        self._has_looked = self._has_bad_loss = False
        self._clips: list[bool] = []
        self._saves: list[tuple[int, bool, bool]] = []
        self._at_start: dict[tuple[str, Same], bytes] = {}
        self._had_gradients = False
        self._finite: list[Same] = []
        self.begun_with: dict[str, Any] | None = None
        """The scaler's numbers when its first loss is scaled."""
        self.saved: dict[str, dict[str, Any]] = {}
        """The scaler's numbers in each file that has some, by its path; the last one is the newest."""

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
            self.begun_with = _numbers(self._scaler.state_dict())
            self._at_start = digests(self._optimizers())
        self._end_comparison()
        rates = {id(each): [float(group.get("lr", 0.0)) for group in each.param_groups] for each in self._optimizers()}
        self._rates.append(rates)
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
        """Note the parameters of an optimizer before its first step."""
        if not all(("", Same(param)) in self._at_start for param in params_of(optimizer)):
            self._at_start = {**digests([optimizer]), **self._at_start}

    def look(self, optimizer: Any) -> None:
        """Note the gradients, before they are unscaled, that are not zero although the losses were zero."""
        self._has_looked = True
        for param in params_of(optimizer):
            self._had_gradients = self._had_gradients or param.grad is not None
            if param.grad is not None and bool((values_of(param.grad) != 0.0).any()):
                self._left.append(name_of(param))

    def note_clip(self, parameters: list[Any], unscaled: set[int]) -> None:
        """Note whether the gradients that are about to be clipped are unscaled, where their optimizer is known."""
        clipped = {id(each) for each in parameters}
        for key, member in self._scaler._members.items() if self._is_in_step else ():
            optimizer = member.optimizer()
            if optimizer is not None and any(id(param) in clipped for param in params_of(optimizer)):
                self._clips.append(key in unscaled)

    def note_save(self, content: Any, path: str) -> None:
        """Note whether a file gets an optimizer's state, and whether it gets the present numbers of the scaler."""
        found = list(_dicts(content))
        present = _numbers(self._scaler.state_dict())
        own = [_numbers(each) for each in found if "scale" in each and "_growth_tracker" in each]
        has_optimizer = any({"state", "param_groups"} <= each.keys() for each in found)
        self._saves.append((self._update, has_optimizer, present in own))
        self.saved.pop(path, None)
        if present in own:
            self.saved[path] = present

    def end_step(self, info: Any) -> None:
        """Note an update. Synchronises at planned updates, and after them until one is applied."""
        if self._update in self._overflows or (self._update > self._silent >= 0 and not self._is_applied_again()):
            self._applied[self._update] = bool(info.applied)
        self._update, self._is_in_step = self._update + 1, False

    def lines(self) -> Iterator[Found]:
        """Yield the lines of the page; those that need an update which the script did not reach are not tried."""
        self._end_comparison()
        why_not = self._why_not()
        kinds = [kind.what for kind in KINDS]
        if why_not:
            yield from ((what, None, why_not) for what in (_SKIPPED, _SAME, *kinds, _ZERO, _AGAIN, _CLIPPED, _SAVED))
            return
        applied = [number for number in sorted(self._overflows) if self._applied[number]]
        fault = f"updates {applied} were applied although each loss was infinite; look for gradients that are repaired"
        yield _SKIPPED, not applied, fault if applied else f"updates {sorted(self._overflows)}"
        yield self._of_digests()
        if len(applied) < len(self._overflows):
            yield from self._of_followers()
        else:
            yield from ((kind.what, None, "no planned overflow was skipped") for kind in KINDS)
        yield self._of_zero_loss()
        yield self._of_later()
        yield self._of_clips()
        yield self._of_saves()

    def _why_not(self) -> str:
        if not self.is_enabled:
            return "the scaler is disabled, so that no loss was scaled"
        if self._update <= max(self._overflows, default=0):
            return f"the script made {self._update} updates, numbered from 0; name earlier ones with --plant"
        now = {key: digest for key, digest in digests(self._optimizers()).items() if not key[0]}
        if all(self._at_start.get(key, digest) == digest for key, digest in now.items()):
            return "no parameter changed in this run, so that a skipped step looks like an applied one"
        return ""

    def _of_digests(self) -> Found:
        if not self._compared:
            return _SAME, None, "the scaler has stepped no optimizer that has parameters"
        if not self._moved:
            others = f"; {len(self._finite)} parameters of other optimizers stayed finite" if self._finite else ""
            return _SAME, True, f"{self._compared} digests before and after {len(self._overflows)} updates{others}"
        return _SAME, False, f"{_listed(self._moved)}; call scaler.step(optimizer) and not optimizer.step()"

    def _of_followers(self) -> Iterator[Found]:
        """Yield a line for each kind of object that follows the steps; learning rates count without a schedule, too."""
        watched, sentences = self._followers.watched(), self._followers.sentences()
        for kind in KINDS:
            names, faults = sorted(watched.get(kind, ())), list(sentences.get(kind, ()))
            why_not = "none was found when the first loss was scaled"
            if kind is KINDS[0]:
                faults += self._moved_rates()
                # A rate that is constant there says nothing about skipped steps.
                near = (min(self._overflows) - 1, self._silent + 1)
                pairs = [self._rates[at : at + 2] for at in near if at >= 0]
                names += ["learning rates"] if any(len(pair) == 2 and _differ(*pair) for pair in pairs) else []
                why_not += ", and no learning rate changes next to the planned updates"
            held = not faults if names or faults else None
            yield kind.what, held, " ".join(faults) or _listed(names) or why_not

    def _moved_rates(self) -> list[str]:
        pairs = {at: self._rates[at : at + 2] for at in sorted(self._overflows)}
        moved = [at for at, pair in pairs.items() if len(pair) == 2 and _differ(*pair)]
        return [f"Learning rates changed over updates {moved}; follow applied steps only."] if moved else []

    def _of_zero_loss(self) -> Found:
        if not self._has_looked:
            return _ZERO, None, f"the script did not reach update {self._silent}"
        if self._has_bad_loss:
            return _ZERO, None, f"the loss of update {self._silent} was not finite by itself"
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
            return _CLIPPED, False, f"{early} of {number} clips came before scaler.unscale_(optimizer)"
        return _CLIPPED, True, f"{number} clips"

    def _of_saves(self) -> Found:
        with_optimizer = {update for update, has_optimizer, _ in self._saves if has_optimizer}
        with_scaler = {update for update, _, has_scaler in self._saves if has_scaler}
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
                self._moved.append(f"{name_of(same.param)}{f' ({name})' if name else ''} changed")
        self._moved += [f"{name_of(each.param)} is not finite" for each in self._finite if not is_finite(each.param)]

    def _optimizers(self) -> list[Any]:
        """Return the optimizers that this scaler steps, or all in the process before it has seen one."""
        seen = [member.optimizer() for member in self._scaler._members.values()]
        return [each for each in seen if each is not None] or all_optimizers()

    def _other_params(self) -> Iterator[Any]:
        """Yield the parameters of optimizers that this scaler does not step; their losses may not be scaled."""
        own = {id(param) for each in self._optimizers() for param in params_of(each)}
        return (param for each in all_optimizers() for param in params_of(each) if id(param) not in own)


def write_findings(folder: Path, plan: Plan, rank: int, ranks: int) -> None:
    """Write the findings for the process of the command, which waits for this one."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    content = {"rank": rank, "ranks": ranks, "device": device, "torch": torch.__version__, "lines": list(plan.lines())}
    content.update(begun_with=plan.begun_with, saved=plan.saved, loaded=plan.loaded, is_enabled=plan.is_enabled)
    name = f"{rank:06}-{os.getpid()}-{id(plan)}.json"
    (folder / name).write_text(json.dumps(content), encoding="utf-8")


def _overflows_here() -> bool:
    """Return whether this rank overflows: the last one of a group, so that the others must follow it."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return True
    return torch.distributed.get_rank() == torch.distributed.get_world_size() - 1


def _differ(before: dict[int, list[float]], after: dict[int, list[float]]) -> bool:
    """Return whether the learning rates of an optimizer that is in both dicts differ."""
    return any(before[key] != after[key] for key in before.keys() & after.keys())


def _dicts(content: Any, depth: int = 6) -> Iterator[dict[Any, Any]]:
    """Yield the dicts in what is saved, those included in lists and attributes."""
    parts: list[Any] = []
    if isinstance(content, dict):
        yield content
        parts = list(content.values())
    elif isinstance(content, list | tuple):
        parts = list(content)
    elif not isinstance(content, torch.Tensor | torch.nn.Module):
        parts = [getattr(content, "__dict__", None)]
    if depth:
        for part in parts:
            if isinstance(part, dict | list | tuple) or hasattr(part, "state_dict"):
                yield from _dicts(part, depth - 1)


def _numbers(state: dict[str, Any]) -> dict[str, Any]:
    """Return the numbers in a scaler's state, for the comparison of two states."""
    return {name: value for name, value in state.items() if isinstance(value, bool | int | float)}


def _listed(parts: list[str]) -> str:
    parts = list(dict.fromkeys(parts))
    return ", ".join(parts[:_FEW]) + (f" and {len(parts) - _FEW} more" if len(parts) > _FEW else "")
