"""Loops of docs/trainers.md and other pages in one process, beside the loops that they replace."""

import copy
import dataclasses
import importlib.util
import math
import sys
import types
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from lossscale_core.testing import check_policy
from lossscale_torch import GradScaler
from lossscale_torch.testing import check_training_loop
from tests.adapters.torch_programs import OVERFLOWS, Model, PageLoop, bits, data_of, loss_fn, optimizer_of, run_recipe

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.usefixtures("new_accelerator")]
EITHER_KIND = pytest.mark.parametrize("fused", [False, True])


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


def _train(scaler, model, optimizer, data, after=lambda batch: None):
    """Train by the calls of MAE, Swin and ultralytics; return the norms and scales."""
    numbers = []
    for batch, (inputs, targets) in enumerate(data):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            outputs = model(inputs)
        scaler.scale(loss_fn(outputs, targets)).backward()
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        after(batch)
        numbers.append((float(norm), scaler.get_scale()))
    return numbers


def _run(scaler, fused, bad=OVERFLOWS, steps=8, **options):
    """Return the norms and scales of a run, and the weights at its end."""
    model = Model(bad)
    numbers = _train(scaler, model, optimizer_of(model, fused)[0], data_of(steps), **options)
    return numbers, bits(model.layer.state_dict())


@EITHER_KIND
def test_icefall(fused, monkeypatch):
    """The policy has the scales and weights of icefall's rule around torch's scaler."""

    def rule(batch):
        scale = scaler.get_scale()
        if batch % 100 == 0 and (scale < 8.0 or (scale < 32.0 and batch % 400 == 0)):
            scaler.update(scale * 2.0)

    names = run_recipe("A rule around DynamicScaling: icefall", {}, page="docs/policies.md")
    policy = names["IcefallScaling"]()
    check_policy(policy)
    monkeypatch.setattr(type(policy), "rule", dataclasses.replace(policy.rule, init_scale=32.0, growth_interval=60))
    scaler = torch.amp.GradScaler("cpu", init_scale=32.0, growth_interval=60)
    run = partial(_run, fused=fused, bad={3, 40, 100, 128, 348}, steps=450)
    assert run(GradScaler("cpu", policy=policy)) == run(scaler, after=rule)


@EITHER_KIND
def test_native_scaler(fused):
    """The scaler in the class of MAE and Swin has the norms, scales and weights of torch's scaler."""
    loss_scaler = run_recipe("MAE, Swin, BEiT, ConvNeXt", {"NativeScaler": SimpleNamespace})["loss_scaler"]
    assert _run(loss_scaler._scaler, fused) == _run(torch.amp.GradScaler("cpu"), fused)


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


# --- other loops


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


class _Trainer:
    """The parts of ultralytics' trainer that a step changes."""

    def __init__(self, fused):
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1, fused=fused)
        self.ema = copy.deepcopy(self.model)

    def _setup_train(self):
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)

    def train(self):
        self._setup_train()
        data = [(x * (1e6 if batch in OVERFLOWS else 1.0), y) for batch, (x, y) in enumerate(data_of())]
        _train(self.scaler, self.model, self.optimizer, data, after=self._average)
        return self

    def _average(self, batch):
        for name, average in self.ema.state_dict().items():
            if average.is_floating_point():
                average.lerp_(self.model.state_dict()[name], 0.1)


@EITHER_KIND
def test_ultralytics(fused, monkeypatch):
    """An overflow of the forward pass stays out of BatchNorm's statistics and their average; weights are the same."""
    monkeypatch.setitem(sys.modules, "ultralytics.models.yolo.detect", SimpleNamespace(DetectionTrainer=_Trainer))
    yolo = SimpleNamespace(train=lambda trainer, fused: trainers.append(trainer(fused).train()))
    trainers = [_Trainer(fused).train()]
    run_recipe("ultralytics", {"model": yolo, "options": {"fused": fused}})
    assert [trainer.scaler.get_scale() for trainer in trainers] == [2.0**7] * 2
    for pair in [trainer.model for trainer in trainers], [trainer.ema for trainer in trainers]:
        bad = [{name for name, value in model.state_dict().items() if not value.isfinite().all()} for model in pair]
        assert bad == [{"1.running_mean", "1.running_var"}, set()]
        assert all(map(torch.equal, *(model.parameters() for model in pair)))


@EITHER_KIND
@pytest.mark.parametrize("factor", [1.0, math.inf, math.nan])
def test_edm(factor, fused):
    """EDM takes a bad step, and `guarded` skips it; the other steps have the same bits."""
    skipped = {4} if factor != 1.0 else set()
    models = []
    for before, expected in ((True, set()), (False, skipped)):
        models.append(net := Model({4: factor}))
        optimizer, average = torch.optim.Adam(net.parameters(), lr=0.1, fused=fused), []
        names = {
            "net": net, "optimizer": optimizer, "ema": average, "update_ema": list.append,
            "loss_fn": lambda net, pair: loss_fn(net(pair[0]), pair[1]), "data": data_of(),
        }  # fmt: skip
        run_recipe("EDM, StyleGAN3: nan_to_num", names, before=before)
        assert (net.skipped(), len(average)) == (expected, 8 - len(expected))
        assert bool(optimizer.state[net.layer.weight]["exp_avg_sq"].max() > 1e6) is (before and factor == math.inf)
    assert all(map(torch.equal, models[0].weights[:5], models[1].weights[:5]))
    assert torch.equal(models[0].layer.weight, models[1].layer.weight) is (not skipped)


def test_a_compiled_optimizer_skips_whole_steps():
    """A compiled `optimizer.step` is called or left out, as docs/works-with.md says."""
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([weight], lr=0.1)
    optimizer.step = torch.compile(optimizer.step, backend="eager")  # the default backend would need a compiler
    scaler = GradScaler("cpu", policy="dynamic")
    for factor, is_applied in ((1.0, True), (1e38, False), (1.0, True)):
        before = weight.detach().clone()
        optimizer.zero_grad()
        scaler.scale((weight * factor).sum()).backward()
        scaler.step(optimizer)
        assert bool(scaler.update()) is is_applied
        assert torch.equal(weight, before) is not is_applied
