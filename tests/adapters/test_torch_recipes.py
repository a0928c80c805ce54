"""Loops of docs/trainers.md and other pages in one process, beside the loops that they replace."""

import dataclasses
import importlib
import importlib.util
import math
import sys
import types
from types import SimpleNamespace

import pytest
import torch

from lossscale_core.testing import check_policy
from lossscale_torch import GradScaler
from tests.adapters.torch_programs import OVERFLOWS, Model, data_of, loss_fn, optimizer_of, run_recipe
from tests.adapters.torch_steps import EITHER_KIND, INF, one, take_step

pytestmark = pytest.mark.filterwarnings("default")


# --- loops that skip steps


def _names(**others):
    """Return the names of a loop with a model whose gradients overflow."""
    model = Model()
    return {"model": model, "optimizer": optimizer_of(model)[0], "loss_fn": loss_fn, **others}


def test_logging():
    """The loop logs every tenth step, and the share of steps that it has skipped."""
    scaler, logged = GradScaler("cpu", init_scale=2.0**10), {}
    names = _names(scaler=scaler, batches=data_of(11), log=logged.__setitem__)
    run_recipe("PyTorch", names, page="docs/logging.md")
    assert names["model"].skipped() == OVERFLOWS
    assert [logged[step]["applied"] for step in (0, 10)] == [False, True]
    assert logged[10]["overflow_share"] == 3 / 11


def test_timm(monkeypatch):
    """The class of timm steps by the scaler, and the schedule follows applied steps."""
    (place,) = importlib.util.find_spec("timm").submodule_search_locations
    utils = types.ModuleType("timm.utils")  # the whole package needs torchvision, with no build for this torch
    utils.__path__ = [f"{place}/utils"]
    monkeypatch.setitem(sys.modules, "timm", types.ModuleType("timm"))
    monkeypatch.setitem(sys.modules, "timm.utils", utils)
    utils.NativeScaler = importlib.import_module("timm.utils.cuda").NativeScaler
    updates = []
    names = _names(data=data_of(), num_updates=0, scheduler=SimpleNamespace(step_update=updates.append))
    run_recipe("timm", names)
    assert (names["model"].skipped(), updates) == (OVERFLOWS, [1, 2, 3, 4, 5])


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
    """Train by the calls of MAE, Swin and ultralytics."""
    for inputs, targets in data:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            outputs = model(inputs)
        scaler.scale(loss_fn(outputs, targets)).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()


def test_native_scaler():
    """The scaler in the class of MAE and Swin trains with the bits of torch's scaler."""
    loss_scaler = run_recipe("MAE, Swin, BEiT, ConvNeXt", {"NativeScaler": SimpleNamespace})["loss_scaler"]
    models = Model(), Model()
    for scaler, model in zip((loss_scaler._scaler, torch.amp.GradScaler("cpu")), models, strict=True):
        _train(scaler, model, optimizer_of(model)[0], data_of())
        assert model.skipped() == OVERFLOWS
    assert torch.equal(*(model.layer.weight for model in models))


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
