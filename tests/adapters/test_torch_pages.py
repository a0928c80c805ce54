"""The training loops that the docs show pass `check_training_loop`: a skipped step of them moves nothing."""

import importlib.util
import sys
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from lossscale_torch import GradScaler
from lossscale_torch.testing import check_training_loop
from tests.adapters.pages import code_of, split_loop
from tests.adapters.test_torch_recipes import ON_A_CPU, accelerate_afresh, in_float16

pytestmark = pytest.mark.filterwarnings("default")  # what the packages warn of is theirs
_ = accelerate_afresh  # a fixture, which pytest finds by its name in this module


def _pair(batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(batch)
    return torch.randn(8, 4, generator=generator), torch.randn(8, 1, generator=generator)


def _loss_fn(outputs: torch.Tensor, targets: Any = 1.0) -> torch.Tensor:
    return (outputs.float() - targets).square().mean()


class Page(NamedTuple):
    """A loop of a page, and what it runs over in one step."""

    path: str
    heading: str
    data: Callable[[int], list[Any]] = lambda batch: [_pair(batch)]
    start: str | None = None
    """The first statement of a step, where the page shows no loop."""


PAGES = {
    "README": Page("README.md", "PyTorch"),
    "quickstart": Page("docs/quickstart.md", "PyTorch"),
    "torch": Page("docs/torch.md", "PyTorch", start="optimizer.zero_grad()"),
    "spike-guard": Page("docs/spike-guard.md", "Skipping spikes", lambda batch: [batch]),
    "logging": Page("docs/logging.md", "PyTorch", lambda batch: [(batch, _pair(batch))]),
    "Accelerate": Page("docs/trainers.md", "Accelerate"),
    "timm": Page("docs/trainers.md", "timm"),
}


class _Loop:
    """A loop of a page, with the scaler of the check in the place of its own."""

    def __init__(self, page: Page, scaler: Any) -> None:
        source = code_of(page.path, page.heading)
        for name, value in ON_A_CPU.items():
            source = source.replace(name, value)
        setup, self._step = split_loop(source, page.start)
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        self._data = page.data
        self._names = {
            "torch": torch, "in_float16": in_float16, "GradScaler": lambda *args, **settings: scaler, "scaler": scaler,
            "model": model, "optimizer": optimizer, "data": [], "loss_fn": _loss_fn,
            "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
            "log": lambda step, numbers: None, "num_updates": 0,
        }  # fmt: skip
        exec(setup, self._names)
        self.model, self.scheduler = self._names["model"], self._names["scheduler"]
        self.optimizer = getattr(self._names["optimizer"], "optimizer", self._names["optimizer"])

    def step(self, batch: int) -> None:
        """Run the loop over the data of one step."""
        self._names["data"] = self._data(batch)
        exec(self._step, self._names)


def test_a_compiled_step_of_an_optimizer_is_called_or_left_out():
    """As docs/works-with.md says of it; the default backend would need a compiler."""
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([weight], lr=0.1)
    optimizer.step = torch.compile(optimizer.step, backend="eager")
    scaler = GradScaler("cpu", policy="dynamic")
    for factor, is_applied in ((1.0, True), (1e38, False), (1.0, True)):
        before = weight.detach().clone()
        optimizer.zero_grad()
        scaler.scale((weight * factor).sum()).backward()
        scaler.step(optimizer)
        assert bool(scaler.update()) is is_applied
        assert torch.equal(weight, before) is not is_applied


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
    return StepLRScheduler


@pytest.mark.parametrize("name", PAGES)
def test_a_loop_of_the_docs_passes(name, monkeypatch):
    """It skips as a whole, and the loss scale makes no difference to it."""
    schedule = _import_timm(monkeypatch) if name == "timm" else None

    def build(scaler: Any) -> _Loop:
        loop = _Loop(PAGES[name], scaler)
        if schedule is not None:
            loop.scheduler = loop._names["scheduler"] = schedule(loop.optimizer, 1, decay_rate=0.5, t_in_epochs=False)
        return loop

    assert len(check_training_loop(build)) >= 3
