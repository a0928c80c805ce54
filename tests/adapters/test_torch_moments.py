"""The order of calls in a step: which calls are refused, and which steps and losses are reported."""

import contextlib
import io

import pytest
import torch

from lossscale_core.errors import CallOrderError
from lossscale_torch import GradScaler
from tests.adapters.torch_steps import COPIES, EITHER_KIND, one, take_step

CALLS = ["unscale_", "unscale_and_clip_", "step", "skip"]


@pytest.mark.parametrize("enabled", [True, False], ids=["enabled", "disabled"])
@EITHER_KIND
@pytest.mark.parametrize("first", CALLS)
@pytest.mark.parametrize("second", CALLS)
def test_two_calls_in_a_step(first, second, fused, enabled):
    """No gradients are unscaled twice or after a step, and no step ends twice; then the next step is right."""
    (param, optimizer), scaler = one(fused), GradScaler("cpu", init_scale=8.0, enabled=enabled)

    def call(name):
        getattr(scaler, name)(optimizer, *([100.0] if "clip" in name else []))

    scaler.scale(param.sum()).backward()
    call(first)
    is_refused = enabled and (second in CALLS[:2] or first in CALLS[2:])
    with pytest.raises(RuntimeError, match="called") if is_refused else contextlib.nullcontext():
        call(second)
    scaler.update()
    before = param.item()
    optimizer.zero_grad()
    scaler.scale(param.sum()).backward()
    scaler.step(optimizer)
    assert scaler.update()
    assert param.item() == before - 1.0


@COPIES
def test_marks_of_scaled_losses(copied):
    """Each scaler and each copy of a scaler may scale a loss once, and so with a copy of the loss."""
    scaler = GradScaler("cpu", 2.0)
    loss = copied(scaler.scale(torch.ones(())))
    for other in (copied(scaler), GradScaler("cpu", 2.0)):
        loss = other.scale(loss)
    with pytest.raises(CallOrderError, match="scaled already"):
        scaler.scale(loss)
    torch.save(loss, file := io.BytesIO())
    file.seek(0)
    assert torch.load(file) == 8.0


@pytest.mark.parametrize("waits", [False, True])
def test_unfinished_steps_are_reported(waits, caplog):
    """A step that is begun and not finished is logged once; `diagnose` reports it until the next update."""
    param, optimizer = one()
    scaler = GradScaler("cpu", optimizers=[optimizer] if waits else ())
    for _ in range(30):
        scaler.scale(param.sum()).backward()
        scaler.unscale_(optimizer)
        assert not scaler.update()
    assert [record.event for record in caplog.records] == ["unfinished_step"]
    assert "neither taken nor skipped" in scaler.diagnose()
    take_step(scaler, optimizer, 1.0)
    assert "neither" not in scaler.diagnose()
