"""Random programs of two optimizers, run with torch's own scaler and ours side by side.

Every parameter's true gradient is known: what its losses have added since it was zeroed. Where the two scalers differ,
ours must have moved by the true gradient, or have refused. Each way in which they may differ is a row of the table in
docs/torch.md. A program zeroes what no scaler can get right: gradients that were added up under different factors, or
kept over two updates.
"""

import collections
import random
from pathlib import Path

import pytest
import torch

from lossscale_core.errors import CallOrderError
from lossscale_torch import GradScaler
from tests.sweeping import IS_SWEEP

PROGRAMS = 3000 if IS_SWEEP else 300
LENGTH = 24
BOTH = (torch.amp.GradScaler, GradScaler)
ROWS = {
    "waits": "gradients that were computed before another optimizer's update are divided by the new scale",
    "refused": "gradients that may be of two scales are divided by the last",
    "counted": "optimizers updated one by one after one loss count as many steps",
    "none": "an optimizer without gradients is an `AssertionError`",
    "late": "`backward` of a loss that was scaled before an `update` is an error",
}
_NO_GRADIENTS = (
    "No inf checks were recorded",
    "'int' object has no attribute 'device'",  # what a fused optimizer makes of no flags
    "unscale_() has already been called",  # on an optimizer that had no gradients then
)
PAGE = Path(__file__).parents[2] / "docs/torch.md"


class _Side:
    """One scaler with its own parameters, optimizers and losses."""

    def __init__(self, make_scaler, fused, growth_interval):
        self.params = [torch.nn.Parameter(torch.zeros(1, dtype=torch.float64)) for _ in range(2)]
        kinds = {"fused": fused} if fused else {}
        self.optimizers = [torch.optim.SGD([param], lr=1.0, **kinds) for param in self.params]
        self.scaler = make_scaler("cpu", init_scale=2.0**10, growth_interval=growth_interval)
        self.scaler.scale(torch.ones(()))
        self.pending = []

    def loss(self, values, kind):
        total = sum((param * value).sum() for param, value in zip(self.params, values, strict=True) if value)
        return total * self.scaler.get_scale() if kind == "by hand" else self.scaler.scale(total)

    def do(self, name, *args):
        """Run one operation; return an exception instead of raising it."""
        try:
            getattr(self, name)(*args)
        except (RuntimeError, AssertionError, AttributeError) as error:
            return error
        return None

    def backward(self, values, kind):
        self.loss(values, kind).backward()

    def forward(self, values, kind):
        self.pending.append(self.loss(values, kind))

    def late_backward(self):
        self.pending.pop().backward()

    def unscale(self, i):
        self.scaler.unscale_(self.optimizers[i])

    def clip(self, i):
        if isinstance(self.scaler, GradScaler):
            self.scaler.unscale_and_clip_(self.optimizers[i], float("inf"))
        else:
            self.unscale(i)
            torch.nn.utils.clip_grad_norm_(self.params[i], float("inf"))

    def step(self, i):
        self.scaler.step(self.optimizers[i])

    def update(self):
        self.scaler.update()

    def zero(self, i, set_to_none):
        self.optimizers[i].zero_grad(set_to_none=set_to_none)

    def spoil(self, i):
        if self.params[i].grad is not None:
            self.params[i].grad.fill_(float("inf"))

    def flag(self, i):
        for each in self.scaler._found_inf_per_device(self.optimizers[i]).values():
            each.detach().numpy().fill(1.0)

    @property
    def places(self):
        return [param.item() for param in self.params]

    @property
    def scale(self):
        """The loss scale, without asking our scaler: it would take note."""
        last = getattr(self.scaler, "last_step", None)
        return self.scaler._init_scale if last is None else last.loss_scale_after

    @property
    def state(self):
        is_ours = isinstance(self.scaler, GradScaler)
        return self.scale if is_ours else self.scaler.get_scale(), self.scaler._get_growth_tracker()


class _Truth:
    """The true gradients, by what they are still multiplied, and what is known of the program so far."""

    def __init__(self):
        self.gradients = [None, None]
        self.factors = [set(), set()]
        self.stepped = set()
        self.age = [0, 0]
        self.pending = []
        self.updates_since_scaled = 0

    def is_hopeless(self, i):
        """Return whether a gradient's parts are multiplied by different factors, or it was kept over two updates."""
        return len(self.factors[i]) > 1 or self.age[i] > 1

    def note(self, name, args, scale):
        """Follow an operation that neither side refused, at the loss scale it began with."""
        if name in ("backward", "forward"):
            self.updates_since_scaled *= args[1] != "scaled"
            if name == "forward":
                self.pending.append((args[0], scale))
            else:
                self._add(args[0], scale)
        elif name == "late_backward":
            self._add(*self.pending.pop())
        elif name == "update":
            self.updates_since_scaled += 1
            self.age = [age + 1 for age in self.age]
            self.stepped.clear()
        elif name == "zero":
            i, set_to_none = args
            self.gradients[i] = None if set_to_none or self.gradients[i] is None else 0.0
            self.factors[i] = set()
        elif self.gradients[args[0]] is not None and name == "spoil":
            self.gradients[args[0]] = float("inf")
        elif self.gradients[args[0]] is not None and name in ("step", "unscale", "clip"):
            self.factors[args[0]] = {1.0}
            self.stepped |= {args[0]} if name == "step" else set()

    def _add(self, values, scale):
        for i, value in enumerate(values):
            if value:
                self.age[i] = 0 if not self.factors[i] else self.age[i]
                self.age[i] += i in self.stepped  # made after its optimizer's step, so the next update is not its own
                self.gradients[i] = (self.gradients[i] or 0.0) + value
                self.factors[i].add(scale)


def _next(chance, truth):
    """Return a random operation that a program may do now."""
    values = chance.choice([(1, 0), (0, 1), (1, 1), (2, 1)])
    loss = (values, chance.choice(["scaled", "scaled", "scaled", "by hand"]))
    i = chance.randrange(2)
    operations = [(8, ("backward", *loss)), (1, ("forward", *loss)), (4, ("update",)), (1, ("spoil", i))]
    is_used_up = truth.factors[i] == {1.0}  # most programs then zero it before the next loss
    operations += [(40 if is_used_up else 2, ("zero", i, chance.random() < 0.8)), (1, ("flag", i))]
    if truth.pending:
        operations.append((2, ("late_backward",)))
    if truth.gradients[i] is not None or chance.random() < 0.02:
        operations += [(6, ("step", i)), (1, ("unscale", i)), (1, ("clip", i))]
    weights, choices = zip(*operations, strict=True)
    choice = chance.choices(choices, weights)[0]
    return ("zero", i, True) if choice[0] in ("step", "unscale", "clip") and truth.is_hopeless(i) else choice


def _difference(truth, operation, before, sides, errors):
    """Return how the two scalers differ after an operation: a key of ROWS, None, or an assertion that ours is right."""
    theirs, ours = errors
    if isinstance(ours, CallOrderError):
        return "refused"
    if ours is None and str(theirs).startswith(_NO_GRADIENTS):
        return "none"
    if ours is None and operation[0] == "late_backward" and truth.pending[-1][1] == sides[1].scale:
        return "late"
    assert type(theirs) is type(ours), (theirs, ours)
    if operation[0] == "step":
        i = operation[1]
        moves = [old[i] - side.places[i] for old, side in zip(before, sides, strict=True)]
        if moves[0] != moves[1] and not all(move != move for move in moves):
            assert moves[1] == truth.gradients[i], moves
            return "waits"
    if operation[0] in ("unscale", "clip") and errors == [None, None]:
        i = operation[1]
        grads = [side.params[i].grad for side in sides]
        if grads[0] is not None and grads[0].item() != grads[1].item():
            assert grads[1].item() == truth.gradients[i], grads
            return "waits"
    if sides[0].state != sides[1].state:
        assert truth.updates_since_scaled >= 1, [side.state for side in sides]
        return "counted"
    return None


def _run(seed, fused):
    """Run one random program until it ends, fails on both sides or differs; return how it differs, and its text."""
    chance = random.Random(seed)
    growth_interval = chance.choice([1, 1, 2, 3])
    sides = [_Side(make_scaler, fused, growth_interval) for make_scaler in BOTH]
    truth, program = _Truth(), []
    for _ in range(LENGTH):
        operation = _next(chance, truth)
        program.append(operation)
        before, scale = [side.places for side in sides], sides[1].scale
        errors = [side.do(*operation) for side in sides]
        try:
            difference = _difference(truth, operation, before, sides, errors)
        except AssertionError as error:
            raise AssertionError(f"growth_interval={growth_interval}, {program}") from error
        if difference:
            return difference, len(program)
        if errors[0] is None:
            truth.note(operation[0], operation[1:], scale)
        elif operation[0] == "late_backward":
            truth.pending.pop()
    return None, len(program)


@pytest.mark.parametrize("fused", [False, True], ids=["ordinary", "fused"])
def test_random_programs(fused):
    """If torch's scaler is right, ours does the same; if it is not, ours is right or raises an error."""
    found = collections.Counter(_run(seed, fused)[0] for seed in range(PROGRAMS))
    assert set(found) - {None} == set(ROWS)
    assert found["refused"] < 0.05 * PROGRAMS
    assert found[None] > 0.5 * PROGRAMS


@pytest.mark.parametrize("row", ROWS.values())
def test_every_difference_is_in_the_table(row):
    """The first column of the page says what torch's scaler does."""
    assert f"| {row} |" in PAGE.read_text()
