"""`guarded`: the step of an optimizer is taken as a whole or not at all, without a scaler."""

import copy
import math
import re
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import nn

from lossscale_core import SpikeGuard
from lossscale_core.errors import CallOrderError, PolicyError
from lossscale_torch import GradScaler, _watch, guarded
from tests.adapters.emulated_device import Emulated, EmulatedCopy
from tests.adapters.torch_steps import EITHER_KIND, guarded_steps, one, ready, same

NAN, INF = math.nan, math.inf
MAKES = [
    partial(torch.optim.SGD, momentum=0.9, fused=True),
    partial(torch.optim.SGD, momentum=0.9),
    torch.optim.AdamW,
    partial(torch.optim.AdamW, fused=True),
    partial(torch.optim.Adagrad, fused=True),
]
# torch's fused SGD in bfloat16 on a CPU gives another momentum from run to run by itself.
CASES = [*product(MAKES, [torch.float32]), *product(MAKES[1:], [torch.bfloat16])]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("max_norm", [None, 0.5])
@pytest.mark.parametrize(("make", "dtype"), CASES)
def test_a_bad_gradient_changes_nothing(make, dtype, max_norm):
    """A guarded run with bad batches ends with the bits of a run without these batches."""
    bad, runs = {0: NAN, 3: INF, 4: -INF, 9: NAN}, []
    for planted in (True, False):
        torch.manual_seed(0)
        model, calls = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)).to(dtype), []
        optimizer = make(model.parameters(), lr=0.01)
        # A schedule that follows the outcome may be made before or after the guard.
        early = torch.optim.lr_scheduler.StepLR(optimizer, 2) if planted else None
        assert guarded(optimizer, max_norm=max_norm) is optimizer
        scheduler = early or torch.optim.lr_scheduler.StepLR(optimizer, 2)
        optimizer.register_step_post_hook(lambda *_, calls=calls: calls.append(1))
        numbers = [number for number in range(12) if planted or number not in bad]
        for number in numbers:
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(number))
            optimizer.zero_grad()
            model(x.to(dtype)).float().square().mean().backward()
            model[0].weight.grad[0, 0] *= bad.get(number, 1.0)
            norm = nn.utils.get_total_norm([param.grad.float() for param in model.parameters()])
            optimizer.step()
            assert bool(optimizer.last_step) is (number not in bad)
            torch.testing.assert_close(optimizer.last_step.norm, norm, rtol=1e-5, atol=0.0, equal_nan=True)
            if optimizer.last_step:
                scheduler.step()
        assert scheduler.last_epoch == 8
        # torch's hooks run once, and not for a skipped step of an ordinary optimizer.
        assert len(calls) == (len(numbers) if optimizer.defaults["fused"] else 8)
        assert [int(optimizer.metrics()[name]) for name in ("steps", "skipped_steps")] == [len(numbers), 4 * planted]
        kept = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
        runs.append([*model.parameters(), *kept])
    assert same(*runs)


def test_a_closure_runs_once():
    """`step` returns the result of the closure, even if the step is skipped."""
    (param, optimizer), losses = one(), []
    guarded(optimizer)

    def closure():
        optimizer.zero_grad()
        losses.append((param * [2.0, NAN][len(losses)]).sum())
        losses[-1].backward()
        return losses[-1]

    for number, is_applied in enumerate((True, False)):
        assert optimizer.step(closure) is losses[number]
        assert bool(optimizer.last_step) is is_applied
    assert len(losses) == 2


# -- steps by their sizes: a is applied, s is skipped, p is refused as a spike, e raises an error --------------------

ONE_NAN, RAISES = {"max_norm": 1.0, "guard": SpikeGuard()}, {"on_bad": "raise", "max_norm": 0.5}
SPIKES = {"guard": SpikeGuard(threshold=2.0, warmup=4, max_streak=3)}
RUNS = {
    "one NaN": (ONE_NAN, [1.0, NAN, 2.0, 3.0], "asaa", "step 2 of GuardedSGD was skipped: the grad"),
    "spikes": (SPIKES, [*[1.0] * 8, *[1e4] * 3], "aaaaaaaappe", "step 9 of GuardedSGD was skipped: its gradient norm"),
    "max_streak": ({"max_streak": 3}, [NAN, -INF, 1.0, INF, NAN, NAN], "ssasse", "3 steps in a row had gradients"),
    "on_bad": (RAISES, [1.0, INF, NAN, 2.0], "aeea", "step 3 of GuardedSGD was not taken: the gradients of"),
}
ON_DEVICE = {  # if only the device knows the norm, the host counts no spikes, and the device raises the error
    "spikes": ("aaaaaaaappp", ""),
    "on_bad": ("aeea", "a step of GuardedSGD had gradients that are not finite, or a spike"),
}


@pytest.mark.parametrize("kind", ["ordinary", "fused", "ordinary on a device", "fused on a device"])
@pytest.mark.parametrize("name", RUNS)
def test_the_outcome_of_each_step(name, kind, caplog):
    """A guarded step that is not applied changes nothing, and the run can continue after an error."""
    settings, sizes, letters, text = RUNS[name]
    is_late = kind == "fused on a device"
    letters, text = ON_DEVICE.get(name, (letters, "")) if is_late else (letters, text)
    with Emulated("mps"):
        device = "mps" if "device" in kind else "cpu"
        _, optimizer = one("fused" in kind, device=device, lr=1e-3, momentum=0.9)
        outcomes, rows = guarded_steps(guarded(optimizer, **settings), sizes)
    errors, reads, values = zip(*rows, strict=True)
    assert outcomes == letters
    assert any(text in line for line in [*errors, *(line for _, line in _lines(caplog))])
    for letter, before, after in zip(letters, [[1.0], *values], values, strict=False):
        assert before[0] != after[0] if letter == "a" else after[: len(before)] == before
    # The host waits once for each step, twice if it reports a bad step, and never for a fused optimizer.
    if name == "one NaN":
        assert list(reads) == ([1, 2, 1, 1] if kind == "ordinary on a device" else [0] * 4)


REFUSED = [
    (torch.optim.SGD, {"on_bad": "stop"}, PolicyError, """on_bad='stop' must be "skip" or "raise"; leave it out"""),
    (torch.optim.SGD, {"names": 3}, TypeError, r"guarded\(names=\) was given int; .* pass model.named_parameters\(\)"),
    (torch.optim.LBFGS, {}, TypeError, "given LBFGS, which computes gradients several times"),
    (lambda params: nn.ParameterList(params), {}, TypeError, "given ParameterList, which has no param_groups"),
    (lambda params: guarded(torch.optim.SGD(params)), {}, CallOrderError, "guarded already"),
]


@pytest.mark.parametrize(("make", "settings", "error", "text"), REFUSED)
def test_arguments_that_are_refused(make, settings, error, text):
    """The message has value, rule and remedy, and the object stays as it was."""
    argument = make([nn.Parameter(torch.ones(1))])
    kind = type(argument)
    with pytest.raises(error, match=text):
        guarded(argument, **settings)
    assert type(argument) is kind


@pytest.mark.parametrize("make_scaler", [GradScaler, torch.amp.GradScaler])
def test_a_scaler_refuses_a_guarded_optimizer(make_scaler):
    """The optimizer can step without the scaler after the error."""
    param, fused = one(fused=True)
    scaler = ready(make_scaler)
    param.grad = torch.ones(1)
    with pytest.raises(CallOrderError, match=r"a GuardedSGD, which does|guarded optimizer was given to a scaler"):
        scaler.step(guarded(fused))
    fused.step()
    assert fused.last_step


# -- the log ----------------------------------------------------------------------------------------------------------


def _lines(caplog):
    return [(record.event, record.getMessage()) for record in caplog.records]


PLACES = ["parameter 3 of group 0 (shape (2,))", "parameter 4 of group 0 (shape (2, 2))"]


@pytest.mark.parametrize(("fused", "names"), [(False, PLACES), (True, ["1.bias", "2.weight"])])
def test_the_first_skipped_step_is_logged(fused, names, caplog):
    """A line names the last gradient that is not finite; later the watch logs how many steps were skipped."""
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)))
    params = [*model.parameters()][:: -1 if fused else 1]  # names of the model are in its own order
    optimizer = guarded(torch.optim.AdamW(params, lr=1e-3, fused=fused), names=model if fused else None)
    for number in range(40):
        for place, param in enumerate(model.parameters()):
            param.grad = torch.full_like(param, NAN if number and 0 < place < 4 else 1.0)
        optimizer.step()
    (first, text), (second, often) = _lines(caplog)
    assert (first, second) == ("skipped_step", "skipping too often")
    fault = "the gradient of {} is not finite, and the gradient of {} is (3 of 6 are not)".format(*names)
    assert text.startswith(f"step 2 of GuardedAdamW was skipped: {fault};")
    assert "31 of 32 steps" in often


def test_steps_on_devices_are_logged_late(caplog, monkeypatch):
    """The line comes when a copy of the counts has arrived, without a read; later lines as often as the watch looks."""
    monkeypatch.setattr(_watch, "LateCopy", EmulatedCopy)
    with Emulated("mps"):
        param, optimizer = one(fused=True, device="mps")
        guarded(optimizer, guard=SpikeGuard())
        for number in range(70):
            param.grad = torch.full((1,), NAN if number > 1 else 1.0, device="mps")
            optimizer.step()
        assert Emulated.reads == 0
    (first, text), (second, often) = _lines(caplog)
    assert (first, second) == ("skipped_step", "skipping too often")
    assert re.match(r"[12] of the first [4-7] steps of GuardedSGD were skipped: gradients were not finite", text)
    assert "the last 30 steps in a row overflowed" in often


# -- checks by hand -----------------------------------------------------------------------------------------


def _rows():
    page = Path("docs/do-i-need-this.md").read_text("utf-8")
    table = page.partition("| by hand | instead |\n")[2].partition("\n\n")[0]
    return [re.findall("`([^`]+)`", row) for row in table.splitlines()[1:]]


def _run(setup, step, bad_steps, fused):
    """Take eight steps with a NaN in some, a norm of 16 times the usual and a huge one; return what there is then."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    names = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "bad": 0, "typical": 2.0}
    names |= {"torch": torch, "guarded": guarded, "SpikeGuard": SpikeGuard}
    exec(setup, names)
    # torch rounds the factor of its clip to float32 twice, and `guarded` once, so that the last bit may differ for
    # other norms than 16 times the usual.
    for number in range(8):
        for param in model.parameters():
            param.grad = torch.full_like(param, NAN if number in bad_steps else {2: 16.0, 6: 1e3}.get(number, 1.0))
        names |= {"number": number, "before": copy.deepcopy(model.state_dict())}
        try:
            exec(step, names)
        except (FloatingPointError, AssertionError):
            return "stopped", number
    return [*model.parameters()], scheduler.last_epoch


@EITHER_KIND
@pytest.mark.parametrize(("by_hand", "instead"), [row[:2] for row in _rows()])
def test_what_people_write_by_hand(by_hand, instead, fused):
    """Each replacement in the page's table gives the bits of the check by hand with torch's clip."""
    bad_steps = (3, 4, 5) if "bad" in by_hand else (3,)
    checked = "" if "load_state_dict" in by_hand else "if torch.isfinite(norm): "
    step = by_hand if "optimizer.step" in by_hand else f"{checked}optimizer.step()\n{by_hand}"
    norm = "norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"
    params, epoch = _run("", f"{norm}\n{step}", bad_steps, fused)
    setup, check = (instead, "") if instead.startswith("guarded(") else ("guarded(optimizer, max_norm=1.0)", instead)
    ours, our_epoch = _run(setup, f"optimizer.step()\n{check}", bad_steps, fused)
    assert epoch == our_epoch
    assert params == ours if params == "stopped" else same(params, ours)
    assert (params == "stopped") == ("raise" in by_hand or "assert" in by_hand)
