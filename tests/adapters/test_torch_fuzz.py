"""Random programs, run with torch's own scaler and ours: the same bits of parameters, optimizers and state.

What differs on purpose is left out: each row of the table of differences has a program in `test_torch_differences.py`.
"""

import contextlib
import copy
import pickle
import random
import types
from collections import defaultdict
from functools import partial

import pytest
import torch
from torch.amp.grad_scaler import _refresh_per_optimizer_state

from lossscale_torch import GradScaler
from lossscale_torch.hooks import Hook
from tests.adapters.torch_steps import Legacy
from tests.sweeping import IS_SWEEP

PROGRAMS = 200 * (10 if IS_SWEEP else 1)
TORCHS_KEYS = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")


def _wrapped(optimizer):
    """Return an optimizer whose step has lost its signature, as in https://github.com/pytorch/pytorch/issues/129922."""
    step = optimizer.step
    optimizer.step = lambda *args, **kwargs: step(*args, **kwargs)
    return optimizer


OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    "adam foreach": lambda params: torch.optim.Adam(params, lr=0.01, foreach=True),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.01),
    "fused sgd": lambda params: torch.optim.SGD(params, lr=0.1, fused=True),
    "fused adamw": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "fused adagrad": lambda params: torch.optim.Adagrad(params, lr=0.01, fused=True),
    "fused, wrapped": lambda params: _wrapped(torch.optim.AdamW(params, lr=0.01, fused=True)),
    "legacy": lambda params: Legacy(params, lr=0.1),
}
DTYPES = [torch.float32] * 4 + [torch.float64, torch.bfloat16]
CALLS = ["step", "unscale", "clip", "skip"] * 8 + ["unscale twice", "unscale only", "step twice"]
EVENTS = ["save", "interval", "factors", "copy", "pickle", "check", "flag", "fused", "late flag", "late scale"]
EVENTS += ["write scale", "write tracker", "assign scale"]


def _program(seed):
    """Return the optimizers, the dtypes of their parameters, the settings and the steps of a random program."""
    chance = random.Random(seed)
    kinds = chance.choices([*OPTIMIZERS], k=chance.choice([1, 1, 2, 2, 3]))
    dtypes = [torch.float32 if kind.startswith("fused") else chance.choice(DTYPES) for kind in kinds]
    settings = {
        "init_scale": chance.choice([2.0**16, 1024.0, 3.0, 8.0]),
        "growth_factor": chance.choice([2.0, 2.0, 4.0]),
        "backoff_factor": chance.choice([0.5, 0.5, 0.25]),
        "growth_interval": chance.choice([1, 2, 3, 5, 2000]),
    }
    alternates = len(kinds) > 1 and chance.random() < 0.3
    steps = []
    for number in range(chance.randint(4, 14)):
        calls = chance.choices(CALLS, k=len(kinds))
        if alternates:  # one optimizer at a time
            calls = [call if i == number % len(kinds) else "skip" for i, call in enumerate(calls)]
        infinity, nan = float("inf"), float("nan")
        steps.append(
            types.SimpleNamespace(
                losses=chance.choice([1, 1, 1, 2, 3]),
                zero=chance.choice(["none", "zero"]),
                bad=[chance.choice([None] * 11 + [infinity, -infinity, nan]) for _ in kinds],
                order=chance.sample(range(len(kinds)), len(kinds)),
                calls=calls,
                event=chance.choice([None] * len(EVENTS) + EVENTS),
                new_scale=chance.choice([None] * 9 + [16.0, torch.tensor(64.0)]),
            )
        )
    return kinds, dtypes, settings, steps


class _Side:
    """A program under one scaler, and what it has seen."""

    def __init__(self, make_scaler, kinds, dtypes, settings):
        torch.manual_seed(0)
        self.make_scaler, self.dtypes, self.kinds, self.seen = make_scaler, dtypes, kinds, []
        self.models = [torch.nn.Linear(3, 2).to(dtype) for dtype in dtypes]
        self.optimizers = [OPTIMIZERS[kind](model.parameters()) for kind, model in zip(kinds, self.models, strict=True)]
        self.scaler = make_scaler("cpu", **settings)

    def run(self, number, step):
        """Take a step; an error of one optimizer ends it, but not the program."""
        self._backward(step)
        with self._errors():
            for i in step.order:
                self._step(step.calls[i], i, step.event)
        nothing = all(call == "skip" for call in step.calls) and step.new_scale is None
        with self._errors():
            if step.event == "late scale":
                self.scaler._scale.fill_(4.0)
            self.scaler.update(self.scaler._scale if nothing else step.new_scale)
            self._between_steps(number, step.event)
        self.seen.append((self.scaler.get_scale(), self.scaler._get_growth_tracker()))

    @contextlib.contextmanager
    def _errors(self):
        try:
            yield
        except (RuntimeError, AssertionError) as error:
            self.seen.append((type(error), str(error)[:50]))

    def _backward(self, step):
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=step.zero == "none")
        for _ in range(step.losses):
            losses = [
                model(torch.ones(4, 3, dtype=dtype)).float().pow(2).mean()
                for model, dtype in zip(self.models, self.dtypes, strict=True)
            ]
            self.scaler.scale(sum(losses)).backward()
        for model, bad in zip(self.models, step.bad, strict=True):
            if bad is not None:
                model.weight.grad[0, 0] = bad

    def _step(self, call, i, event):
        scaler, optimizer = self.scaler, self.optimizers[i]
        if call == "skip":
            return
        if not call.startswith("step"):
            for _ in range(1 + call.endswith("twice")):
                scaler.unscale_(optimizer)
            if call == "clip":
                torch.nn.utils.clip_grad_norm_(self.models[i].parameters(), 0.5)
            if event == "flag":
                for flag in scaler._found_inf_per_device(optimizer).values():
                    flag.fill_(1.0)
        if event == "check":
            self.seen += [flag.item() for flag in scaler._check_inf_per_device(optimizer).values()]
        for _ in range(0 if call.endswith("only") else 1 + call.endswith("twice")):
            scaler.step(optimizer)
        if event == "late flag":  # the step was taken, and the scale follows the flag
            _raise_flags(scaler._found_inf_per_device(optimizer))

    def _between_steps(self, number, event):
        scaler = self.scaler
        if event == "save":
            saved = scaler.state_dict()
            self.scaler = self.make_scaler("cpu")
            self.scaler.load_state_dict({key: saved[key] for key in TORCHS_KEYS} if number % 2 else saved)
        elif event == "interval" and scaler._get_growth_tracker() < 4:  # else see the table of differences
            scaler.set_growth_interval(4)
        elif event == "factors":
            scaler.set_growth_factor(8.0)
            scaler.set_backoff_factor(0.125)
        elif event == "copy":
            self.scaler = copy.deepcopy(scaler)
        elif event == "pickle" and self.make_scaler in (GradScaler, torch.amp.GradScaler):
            self.scaler = pickle.loads(pickle.dumps(scaler))
        elif event == "fused" and not self.kinds[0].endswith(("legacy", "wrapped", "rmsprop", "foreach", "momentum")):
            # As with Accelerate's patched `step`: what an optimizer takes is asked of it at each step.
            is_fused = getattr(self.optimizers[0], "_step_supports_amp_scaling", False)
            self.optimizers[0]._step_supports_amp_scaling = not is_fused and self.dtypes[0] is torch.float32
            self.optimizers[0].param_groups[0].update(fused=not is_fused and self.dtypes[0] is torch.float32)
        elif event == "write scale":
            scaler._scale.fill_(32.0)
        elif event == "write tracker":
            scaler._growth_tracker.fill_(min(3, scaler.get_growth_interval() - 1))
        elif event == "assign scale":
            scaler._scale = torch.tensor(128.0)

    @property
    def tensors(self):
        """Parameters and states of optimizers."""
        params = [param.detach() for model in self.models for param in model.parameters()]
        states = [state for optimizer in self.optimizers for state in optimizer.state.values()]
        kept = [*params, *(value for state in states for value in state.values() if torch.is_tensor(value))]
        return [each.contiguous().flatten().view(torch.uint8).tolist() for each in kept]


def _raise_flags(flags, value=1.0):
    """Raise flags as an `all_reduce` over other ranks does: in place, and without a new version."""
    for flag in flags.values():
        flag.detach().numpy().fill(value)


def _with_hook(base):
    """Add a hook that does nothing to ours."""
    return partial(base, hooks=[Hook()]) if base is GradScaler else base


def _deciding(base):
    """Decide on the step, as NeMo, Composer and torch_xla override it, or reduce flags first, and leave some out."""

    class Deciding(base):
        calls = 0

        def _maybe_opt_step(self, optimizer, optimizer_state, *args, **kwargs):
            self.calls += 1
            flags = optimizer_state["found_inf_per_device"]
            if self.calls % 4 == 0:
                _raise_flags(flags)
            if self.calls % 2 == 0:
                return super()._maybe_opt_step(optimizer, optimizer_state, *args, **kwargs)
            if self.calls % 3 == 0 or sum(flag.item() for flag in flags.values()):
                return None
            return optimizer.step(*args, **kwargs)

    return Deciding


def _updating(base):
    """Write the persistent tensors by torch's own kernel, and replace the records, as Megatron's and NeMo's do."""

    class Updating(base):
        def update(self, new_scale=None):
            scale, tracker = self._check_scale_growth_tracker("update")
            flags = [f for state in self._per_optimizer_states.values() for f in state["found_inf_per_device"].values()]
            assert flags
            settings = (self._growth_factor, self._backoff_factor, self._growth_interval)
            torch._amp_update_scale_(scale, tracker, sum(flags), *settings)
            self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)

    return Updating


def _stepping(base):
    """Step by torch's own methods."""
    names = ("step", "_maybe_opt_step")
    return type("Stepping", (base,), {name: getattr(torch.amp.GradScaler, name) for name in names})


KINDS = (lambda base: base, lambda base: base, _with_hook, _deciding, _updating, _stepping)


@pytest.mark.filterwarnings("ignore:GradScaler is going to stop passing itself:FutureWarning")
def test_random_programs():
    """Each step leaves the same bits and errors, also with a hook that does nothing, and in subclasses of others."""
    for seed in range(PROGRAMS):
        *made, steps = _program(seed)
        kind = KINDS[seed % len(KINDS)]
        theirs, ours = (_Side(kind(base), *made) for base in (torch.amp.GradScaler, GradScaler))
        for number, step in enumerate(steps):
            theirs.run(number, step)
            ours.run(number, step)
            assert (ours.seen, ours.tensors) == (theirs.seen, theirs.tensors), (seed, made, steps[: number + 1])
