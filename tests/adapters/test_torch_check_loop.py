"""`check_training_loop`: right loops pass, and each kind of wrong loop is found by its own sentence."""

import copy

import pytest
import torch
from torch import nn

from lossscale_torch import GradScaler
from lossscale_torch.testing import check_training_loop
from tests.adapters.odd_optimizers import Duck

CHECKED = [
    "a step is skipped as a whole if its losses are infinite",
    "the optimizer receives the same gradients at each loss scale",
    "all gradients come from losses that are scaled or attached",
]
pytestmark = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")


class Loop:
    """A right loop with BatchNorm, a schedule and an average; subclasses change a part."""

    keeps_buffers = True
    model = property(lambda self: self.net)

    def __init__(self, scaler: GradScaler) -> None:
        self.scaler = scaler
        self.net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1))
        self.protect = [self.net] if self.keeps_buffers else []
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.ema = copy.deepcopy(self.net)

    def backward(self, batch):
        """Scale the loss and differentiate it."""
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(batch))
        self.scaler.scale((self.net(x) - x.sum(1, keepdim=True)).square().mean()).backward()

    def step(self, batch):
        """Take a step."""
        self.net.zero_grad()
        self.backward(batch)
        self.scaler.step(self.optimizer)
        self.follow(self.scaler.update())

    def follow(self, info):
        """Do what follows an applied step."""
        if info.applied:
            self.scheduler.step()
            self.ema[0].weight.data.lerp_(self.net[0].weight.data, 0.1)


class Attaches(Loop):
    """One with a loss inside the graph."""

    def backward(self, batch):
        hidden = self.net[0](torch.ones(8, 4))
        hidden = self.scaler.attach(hidden, hidden.square().mean())
        self.scaler.scale(self.net[1:](hidden).square().mean()).backward()


class Descends(Loop):
    """One with an optimizer that is not derived from torch's."""

    def __init__(self, scaler):
        super().__init__(scaler)
        self.optimizer = Duck(self.net.parameters())


@pytest.mark.parametrize(
    ("loop", "checked"), [(Loop, CHECKED), (Attaches, CHECKED), (Descends, [CHECKED[0], CHECKED[2]])]
)
def test_a_right_loop_passes(loop, checked):
    """The sentences say what was checked; what another optimizer than torch's receives is not seen."""
    assert check_training_loop(loop) == checked


def _count_batches(loop, batch):
    Loop.backward(loop, batch)
    loop.ema.register_buffer("batches", torch.tensor(batch + 1))


def _step_by_itself(loop, batch):
    loop.backward(batch)
    loop.scaler.unscale_(loop.optimizer)
    loop.optimizer.step()
    loop.follow(loop.scaler.update())


def _clear_after_applied_steps(loop, batch):
    loop.backward(batch)
    loop.scaler.step(loop.optimizer)
    if loop.scaler.update():
        loop.optimizer.zero_grad()


def _ask_the_step(loop, batch):
    loop.backward(batch)
    if loop.scaler.step(loop.optimizer):
        loop.scheduler.step()
    loop.scaler.update()


def _clip_scaled(loop, batch):
    Loop.backward(loop, batch)
    nn.utils.clip_grad_norm_(loop.net.parameters(), 0.1)


def _add_a_little(loop, batch):
    Loop.backward(loop, batch)
    (1e-5 * loop.net[0].weight.square().sum()).backward()


def _lower_the_rate(loop, info):
    loop.optimizer.param_groups[0]["lr"] *= 1.0 if info.applied else 0.5


def _freeze(loop, batch):
    loop.optimizer.param_groups[0]["lr"] = 0.0
    Loop.backward(loop, batch)


WRONG = [
    ({"follow": lambda loop, info: loop.scheduler.step()}, r"skipped, but scheduler.*follow applied steps only"),
    ({"backward": _count_batches}, r"ema\.batches went from 0 to 1;.*keep a counter of batches outside of the model"),
    ({"keeps_buffers": False}, r"step 0 was to be skipped, but model\.1\..*protect buffers"),
    ({"step": _step_by_itself}, r"step 0 was applied although its losses were infinite"),
    ({"step": _clear_after_applied_steps}, r"step 1 was skipped although its losses were finite.*clear them in every"),
    ({"backward": _clip_scaled}, r"at step 0 a loss scale of 1 and one of 1024 gave the optimizer gradients of norm"),
    ({"backward": _add_a_little}, r"at step 0 the loss was multiplied by zero, and 0\.weight has a gradient other"),
    ({"follow": _lower_the_rate}, r"after step 1, unlike without the skipped steps, optimizer\.param_groups\.0\.lr"),
    ({"follow": lambda loop, info: loop.scaler.update(2.0)}, r"step\(0\) called scaler\.update\(\) 2 times"),
    ({"step": _ask_the_step}, r"loop asks whether scaler\.step\(optimizer\) is true.*if scaler\.update\(\): \.\.\."),
    ({"backward": _freeze}, r"no parameter changed in eight steps"),
    ({"follow": lambda loop, info: loop.net[0].weight.data.add_(1.0), "model": None}, r"to be skipped, but parameters"),
]


@pytest.mark.parametrize(("changed", "sentence"), WRONG)
def test_a_wrong_loop_is_found(changed, sentence):
    """The message names the step, what differs and what to do."""
    with pytest.raises(AssertionError, match=sentence):
        check_training_loop(type("Wrong", (Loop,), changed))
