"""The scaler under the real packages that call one: Lightning, Fabric, Accelerate and timm, in float16 on a CPU."""

import sys
import warnings

import pytest
import torch
from accelerate import Accelerator
from accelerate.scheduler import AcceleratedScheduler
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision as FabricMixedPrecision
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins import MixedPrecision

from lossscale_torch import GradScaler
from tests.adapters.test_torch_recipes import import_timm

pytestmark = pytest.mark.filterwarnings("default")  # what these packages warn of is theirs
OVERFLOWS = {2, 5}
STEPS = 8


def _data():
    torch.manual_seed(0)
    return [(torch.randn(8, 4), torch.randn(8, 1)) for _ in range(STEPS)]


def _spoil(module):
    module.weight.grad[0, 0] = float("inf")


class _Module(LightningModule):
    """A linear model with gradients that overflow at some steps, and a schedule that follows applied steps only."""

    def __init__(self, scaler, fused):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.scaler, self.fused = scaler, fused
        self.weights, self.rates = [], []

    def training_step(self, batch, index):
        images, targets = batch
        return (self.layer(images) - targets).square().mean()

    def on_after_backward(self):
        self.weights.append(self.layer.weight.detach().clone())
        if len(self.weights) - 1 in OVERFLOWS:
            _spoil(self.layer)

    def lr_scheduler_step(self, scheduler, metric):
        if self.scaler.last_step.applied:
            scheduler.step()
        self.rates.append(scheduler.get_last_lr()[0])

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1.0, fused=self.fused)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


@pytest.mark.parametrize("fused", [False, True])
def test_lightning(fused, tmp_path):
    """Trains through `MixedPrecision(scaler=...)`, skips what overflows, schedules what is applied, and resumes."""

    def trainer(scaler, **kwargs):
        plugin = MixedPrecision("16-mixed", "cpu", scaler)
        return Trainer(
            accelerator="cpu", plugins=[plugin], logger=False, enable_progress_bar=False, enable_model_summary=False,
            default_root_dir=tmp_path, enable_checkpointing=False, **kwargs,
        )  # fmt: skip

    scaler = GradScaler("cpu", init_scale=2.0**10)
    module = _Module(scaler, fused)
    first = trainer(scaler, max_epochs=1)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*lr_scheduler.step.*")
        first.fit(module, torch.utils.data.DataLoader(_data(), batch_size=None))
    moved = [not torch.equal(a, b) for a, b in zip(module.weights, module.weights[1:], strict=False)]
    assert [step for step, has_moved in enumerate(moved) if not has_moved] == sorted(OVERFLOWS)
    assert module.rates[-1] == 0.5 ** (STEPS - len(OVERFLOWS))
    assert scaler.get_scale() == 2.0**8
    first.save_checkpoint(tmp_path / "last.ckpt")
    restored = GradScaler("cpu")
    trainer(restored, max_epochs=1).fit(
        _Module(restored, fused),
        torch.utils.data.DataLoader(_data(), batch_size=None),
        ckpt_path=tmp_path / "last.ckpt",
    )
    assert restored.state_dict() == scaler.state_dict()


def test_fabric():
    """Fabric scales in backward, and unscales, steps and updates in the optimizer's step."""
    scaler = GradScaler("cpu", init_scale=2.0**10)
    fabric = Fabric(accelerator="cpu", plugins=[FabricMixedPrecision("16-mixed", "cpu", scaler)])
    model = torch.nn.Linear(4, 1)
    wrapped, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step, (images, targets) in enumerate(_data()):
        optimizer.zero_grad()
        fabric.backward((wrapped(images) - targets).square().mean())
        if step in OVERFLOWS:
            _spoil(model)
        before = model.weight.detach().clone()
        optimizer.step()
        assert torch.equal(before, model.weight) == (step in OVERFLOWS)
    assert scaler.get_scale() == 2.0**8


def _accelerator(scaler):
    """Return an Accelerator that trains in float16 autocast on the CPU with `scaler`, which it offers no option for."""
    accelerator = Accelerator(cpu=True)
    accelerator.scaler = scaler
    return accelerator


def test_accelerate(tmp_path):
    """`optimizer_step_was_skipped` is right, its scheduler follows, and `save_state` keeps the scaler."""
    scaler = GradScaler("cpu", init_scale=2.0**10)
    accelerator = _accelerator(scaler)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    assert isinstance(schedule, AcceleratedScheduler)
    for step, (images, targets) in enumerate(_data()):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = (model(images) - targets).square().mean()
        accelerator.backward(loss)
        if step in OVERFLOWS:
            _spoil(model)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        assert accelerator.optimizer_step_was_skipped == (step in OVERFLOWS)
        schedule.step()
    assert schedule.get_last_lr()[0] == pytest.approx(1e-3 * 0.5 ** (STEPS - len(OVERFLOWS)))
    accelerator.save_state(tmp_path)
    expected = scaler.state_dict()
    scaler.update(1.0)
    accelerator.load_state(tmp_path)
    assert scaler.state_dict() == expected


@pytest.mark.parametrize("fused", [False, True])
def test_a_schedule_under_accelerate_follows_applied_steps(fused):
    """A schedule that was not prepared asks the scaler, which knows of a fused optimizer's skips, too."""
    scaler = GradScaler("cpu", init_scale=2.0**10)
    accelerator = _accelerator(scaler)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, fused=fused)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    model, optimizer = accelerator.prepare(model, optimizer)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*lr_scheduler.step.*")
        for step, (images, targets) in enumerate(_data()):
            optimizer.zero_grad()
            accelerator.backward((model(images) - targets).square().mean())
            if step in {0, *OVERFLOWS}:
                _spoil(model)
            before = model.weight.detach().clone()
            optimizer.step()
            assert bool(scaler.last_step.applied) != torch.equal(before, model.weight)
            if accelerator.sync_gradients and scaler.last_step.applied:
                schedule.step()
    assert schedule.get_last_lr()[0] == 0.5 ** (STEPS - len({0, *OVERFLOWS}))


def test_accelerate_with_two_optimizers():
    """Accelerate updates after each of them: both get their true gradients, and one loss counts as one step."""
    scaler = GradScaler("cpu", init_scale=2.0**10, growth_interval=1, updates_per_step=2)
    accelerator = _accelerator(scaler)
    first, second = torch.nn.Linear(4, 1), torch.nn.Linear(4, 1)
    optimizers = accelerator.prepare(*(torch.optim.SGD(m.parameters(), lr=0.0) for m in (first, second)))
    for step, (images, targets) in enumerate(_data()):
        for module in (first, second):
            module.zero_grad()
        loss = (first(images) + second(images) - targets).square().mean()
        expected = torch.autograd.grad(loss, second.weight, retain_graph=True)[0]
        accelerator.backward(loss)
        if step in OVERFLOWS:
            _spoil(first)
        before = scaler.get_scale()
        for optimizer in optimizers:
            optimizer.step()
        torch.testing.assert_close(second.weight.grad, expected)
        assert scaler.get_scale() == before * (0.5 if step in OVERFLOWS else 2.0)
    assert int(scaler.metrics()["steps"]) == STEPS


def test_timm(monkeypatch):
    """timm's wrapper around `torch.amp.GradScaler`, with ours inside: clipping, skipping, its state dict."""
    import_timm(monkeypatch)
    native = sys.modules["timm.utils"].NativeScaler(device="cpu")
    native._scaler = GradScaler("cpu", init_scale=2.0**10)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []

    def spoil(weight):
        if len(losses) - 1 in OVERFLOWS:
            weight.grad.fill_(float("inf"))

    model.weight.register_post_accumulate_grad_hook(spoil)
    for step, (images, targets) in enumerate(_data()):
        optimizer.zero_grad()
        before = model.weight.detach().clone()
        with torch.autocast("cpu", torch.float16):
            loss = (model(images) - targets).square().mean()
        losses.append(loss)
        native(loss, optimizer, clip_grad=1.0, parameters=model.parameters())
        assert torch.equal(before, model.weight) == (step in OVERFLOWS)
    assert native.state_dict()["scale"] == 2.0**8
    native.load_state_dict({**native.state_dict(), "scale": 4.0, "loss_scale": 4.0})
    assert native._scaler.get_scale() == 4.0
