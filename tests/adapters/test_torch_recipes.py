"""Loops of docs/trainers.md and other pages in one process, beside the loops that they replace."""

import dataclasses
import importlib.util
import math
import sys
import types
from types import SimpleNamespace

import pytest
import torch

from lossscale_core.testing import check_policy
from lossscale_torch import GradScaler
from lossscale_torch.testing import check_training_loop
from tests.adapters.torch_programs import OVERFLOWS, Model, PageLoop, bits, data_of, loss_fn, optimizer_of, run_recipe
from tests.adapters.torch_steps import EITHER_KIND, INF, one, take_step

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.usefixtures("new_accelerator")]


# --- loops that `check_training_loop` checks: a skipped step changes nothing, and the loss scale has no influence


def _pair(batch):
    return data_of()[batch]


PAGES = {
    "README": ("README.md", "PyTorch", lambda batch: [_pair(batch)]),
    "quickstart": ("docs/quickstart.md", "PyTorch", lambda batch: [_pair(batch)]),
    "torch": ("docs/torch.md", "PyTorch", None),
    "spike-guard": ("docs/spike-guard.md", "Skipping spikes", lambda batch: [batch]),
    "logging": ("docs/logging.md", "PyTorch", lambda batch: [(batch, _pair(batch))]),
    "Accelerate": ("docs/trainers.md", "Accelerate", lambda batch: [_pair(batch)]),
    "timm": ("docs/trainers.md", "timm", lambda batch: [_pair(batch)]),
}
"""The page, the heading, and the data of a step; a page without data shows the lines of one step without a loop."""


def _import_timm(monkeypatch):
    """Let timm's own modules be imported; the package as a whole needs torchvision, with no build for this torch."""
    (place,) = importlib.util.find_spec("timm").submodule_search_locations
    for name, path in (("timm", place), ("timm.utils", f"{place}/utils"), ("timm.scheduler", f"{place}/scheduler")):
        module = types.ModuleType(name)
        module.__path__ = [path]
        monkeypatch.setitem(sys.modules, name, module)
    from timm.scheduler.step_lr import StepLRScheduler
    from timm.utils.cuda import NativeScaler

    sys.modules["timm.utils"].NativeScaler = NativeScaler
    return lambda optimizer: StepLRScheduler(optimizer, 1, decay_rate=0.5, t_in_epochs=False)


@pytest.mark.parametrize("name", PAGES)
def test_a_loop_of_the_docs_passes(name, monkeypatch):
    """The loop skips whole steps, and its gradients do not depend on the loss scale."""
    halve = lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)  # noqa: E731
    schedule = _import_timm(monkeypatch) if name == "timm" else halve
    assert len(check_training_loop(lambda scaler: PageLoop(scaler, *PAGES[name], schedule))) >= 3


# --- loops beside torch's scaler


def test_icefall(monkeypatch):
    """The policy has the scales of icefall's rule around torch's scaler."""
    policy = run_recipe("A rule around DynamicScaling: icefall", {}, page="docs/policies.md")["IcefallScaling"]()
    check_policy(policy)
    monkeypatch.setattr(type(policy), "rule", dataclasses.replace(policy.rule, init_scale=32.0, growth_interval=60))
    scaler, state = torch.amp.GradScaler("cpu", init_scale=32.0, growth_interval=60), policy.init_state()
    for batch in range(450):
        is_bad = batch in (3, 40, 100, 128, 348)
        take_step(scaler, one()[1], INF if is_bad else 1.0)
        scale = scaler.get_scale()
        if batch % 100 == 0 and (scale < 8.0 or (scale < 32.0 and batch % 400 == 0)):
            scaler.update(scale * 2.0)
        state = policy.update(state, not is_bad)
        assert state.loss_scale == scaler.get_scale()


def _train(scaler, model, optimizer, data):
    """Train by the calls of MAE, Swin and ultralytics; return the norms and scales."""
    numbers = []
    for inputs, targets in data:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            outputs = model(inputs)
        scaler.scale(loss_fn(outputs, targets)).backward()
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        numbers.append((float(norm), scaler.get_scale()))
    return numbers


@EITHER_KIND
def test_native_scaler(fused):
    """The scaler in the class of MAE and Swin has the norms, scales and weights of torch's scaler."""
    loss_scaler = run_recipe("MAE, Swin, BEiT, ConvNeXt", {"NativeScaler": SimpleNamespace})["loss_scaler"]
    runs = []
    for scaler in (loss_scaler._scaler, torch.amp.GradScaler("cpu")):
        model = Model()
        runs.append((_train(scaler, model, optimizer_of(model, fused)[0], data_of()), bits(model.layer.state_dict())))
    assert runs[0] == runs[1]


class _Trainer:
    """The parts of ultralytics' trainer that a step changes."""

    def __init__(self):
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)

    def _setup_train(self):
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)

    def train(self):
        self._setup_train()
        data = [(x * (1e6 if batch in OVERFLOWS else 1.0), y) for batch, (x, y) in enumerate(data_of())]
        _train(self.scaler, self.model, self.optimizer, data)


def test_ultralytics(monkeypatch):
    """An overflow of the forward pass stays out of BatchNorm's statistics; the scale and weights are the same."""
    monkeypatch.setitem(sys.modules, "ultralytics.models.yolo.detect", SimpleNamespace(DetectionTrainer=_Trainer))
    trainers = []
    yolo = SimpleNamespace(train=lambda trainer: trainers.append(trainer()))
    run_recipe("ultralytics", {"model": yolo, "options": {}})
    for trainer in (theirs := _Trainer(), *trainers):
        trainer.train()
        assert trainer.scaler.get_scale() == 2.0**7
    assert all(map(torch.equal, theirs.model.parameters(), trainer.model.parameters()))
    assert not theirs.model[1].running_var.isfinite().any()
    assert all(value.isfinite().all() for value in trainer.model.state_dict().values())


# --- other loops


@pytest.mark.parametrize("kind", [torch.amp.GradScaler, GradScaler])
@EITHER_KIND
def test_a_trainer_accepts_any_scaler(kind, fused):
    """The trainer knows for either scaler which steps were applied."""
    model = Model()
    optimizer, _ = optimizer_of(model, fused)
    trainer = run_recipe("A trainer that you maintain", {})["Trainer"](optimizer, kind("cpu", init_scale=2.0**10))
    skipped = set()
    for step, (inputs, targets) in enumerate(data_of()):
        optimizer.zero_grad()
        trainer.scaler.scale(loss_fn(model(inputs), targets)).backward()
        skipped |= set() if trainer.step() else {step}
    assert skipped == model.skipped() == OVERFLOWS


@EITHER_KIND
def test_two_optimizers(fused):
    """Each schedule follows its own optimizer; one loss scale backs off once for an overflow in either."""
    critic, generator = Model({1}), Model({4})
    (critic_optimizer, critic_schedule), (optimizer, schedule) = (optimizer_of(m, fused) for m in (critic, generator))
    names = {
        "critic": critic, "generator": generator, "critic_optimizer": critic_optimizer,
        "generator_optimizer": optimizer, "schedules": [critic_schedule, schedule],
        "critic_loss": lambda real, fake: (real - fake).float().mean(), "generator_loss": lambda fake: fake.mean(),
        "data": [(targets, inputs) for inputs, targets in data_of()], "scaler": GradScaler("cpu", init_scale=2.0**10),
    }  # fmt: skip
    run_recipe("Two optimizers", names)
    assert (critic.skipped(), generator.skipped()) == ({1}, {4})
    assert (critic_schedule.last_epoch, schedule.last_epoch) == (8 - 1, 8 - 1)
    assert names["scaler"].get_scale() == 2.0**8


@EITHER_KIND
def test_edm(fused):
    """EDM takes a bad step, and `guarded` skips it; the steps before it have the same bits."""
    models = []
    for before, skipped in ((True, set()), (False, {4})):
        models.append(net := Model({4: math.nan}))
        optimizer, average = torch.optim.Adam(net.parameters(), lr=0.1, fused=fused), []
        names = {
            "net": net, "optimizer": optimizer, "ema": average, "update_ema": list.append,
            "loss_fn": lambda net, pair: loss_fn(net(pair[0]), pair[1]), "data": data_of(),
        }  # fmt: skip
        run_recipe("EDM, StyleGAN3: nan_to_num", names, before=before)
        assert (net.skipped(), len(average)) == (skipped, 8 - len(skipped))
    assert all(map(torch.equal, models[0].weights[:5], models[1].weights[:5]))
