"""`GradScaler(on_nonfinite_update=)`: a step with finite gradients that would make a value NaN or infinite."""

import copy
import math
import pickle
import sys
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from lossscale_core import DynamicScaling, SpikeGuard, state_from_dict
from lossscale_core.errors import NonfiniteStreakError, NonfiniteUpdateError, PolicyError
from lossscale_torch import GradScaler
from tests.adapters.emulated_device import Emulated
from tests.adapters.recorded_graph import RecordedGraph
from tests.adapters.test_torch_distributed import _local, _on_ranks
from tests.torch_versions import FSDP2

INF = float("inf")


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised by five Newton–Schulz iterations in float16, without what keeps them small."""

    def __init__(self, params, lr=0.01):
        super().__init__(params, {"lr": lr, "steps": 0})

    @torch.no_grad()
    def step(self, closure=None):
        """Take a step."""
        for group in self.param_groups:
            group["steps"] += 1
            for param in group["params"]:
                state = self.state[param]
                state.setdefault("momentum", torch.zeros_like(param)).lerp_(param.grad, 0.1)
                state["steps"] = state.get("steps", 0) + 1
                x = state["momentum"].half()
                x = x / (x.norm() + 1e-3)
                for _ in range(5):
                    a = x @ x.T
                    x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
                param.sub_(x.float(), alpha=group["lr"])


class HalfState(torch.optim.Optimizer):
    """Adam's second moment in float16, in state that is a new tensor at each step, next to lists and random numbers."""

    def __init__(self, params, lr=0.01):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        """Take a step."""
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                before = state.get("squares", torch.zeros_like(param, dtype=torch.float16))
                state["squares"] = (0.9 * before.float() + 0.1 * param.grad.square()).half()
                state.setdefault("history", []).append([param.grad.norm()])
                param.sub_(param.grad / (state["squares"].float().sqrt() + 1e-3), alpha=group["lr"])
                param.add_(torch.randn_like(param), alpha=1e-4)


CASES = {  # how to make an optimizer, the dtype of the weights, and the gradient of the bad step
    "adam": (lambda params: torch.optim.Adam(params, lr=0.1, foreach=False), torch.float32, 1e21),
    "adamw foreach": (lambda params: torch.optim.AdamW(params, lr=0.1, foreach=True), torch.float32, 1e21),
    "adamw fused": (lambda params: torch.optim.AdamW(params, lr=0.1, fused=True), torch.float32, 1e21),
    "amsgrad": (lambda params: torch.optim.Adam(params, lr=0.1, amsgrad=True), torch.float32, 1e21),
    "tensor rate": (lambda params: torch.optim.Adam(params, lr=torch.tensor(0.1)), torch.float32, 1e21),
    "sgd fused": (lambda params: torch.optim.SGD(params, lr=1e20, momentum=0.9, fused=True), torch.float32, 1e21),
    "muon": (Muon, torch.float32, 1e6),
    "state in float16": (HalfState, torch.float32, 1e4),
    "weights in float16": (lambda params: torch.optim.SGD(params, lr=1e3, momentum=0.9), torch.float16, 1e3),
}
EACH = pytest.mark.parametrize("case", CASES)


def _everything(params, optimizer):
    return copy.deepcopy([[param.detach() for param in params], optimizer.state_dict()])


def _are_same(one, other):
    """Return whether two nested structures are the same, bit for bit."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one.nan_to_num(9.0), other.nan_to_num(9.0))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_are_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_are_same, one, other))
    return one == other


class Run:
    """Steps with given gradients; those of a bad step are huge in one element of the first parameter."""

    def __init__(self, case, device="cpu", **settings):
        make, self.dtype, self.huge = CASES[case]
        torch.manual_seed(1)
        self.params = [torch.nn.Parameter(torch.ones(4, 4, dtype=self.dtype, device=device)) for _ in range(2)]
        self.optimizer, self.infos, self.device = make(self.params), [], device
        self.scaler = GradScaler(device, init_scale=1.0, growth_interval=3, half_gradients=True, **settings)

    def set_gradients(self, number):
        """Set the gradients of step `number`; a negative one is bad."""
        values = np.random.default_rng(abs(number)).standard_normal((2, 4, 4)) / 100
        self.scaler.scale(torch.ones((), device=self.device))
        for param, grad in zip(self.params, values, strict=True):
            param.grad = torch.tensor(grad, dtype=self.dtype, device=self.device) * self.scaler.get_scale()
        if number < 0:
            self.params[0].grad[1, 2] = self.huge * self.scaler.get_scale()

    def step(self, *numbers):
        """Take steps; return this run."""
        for number in numbers:
            self.set_gradients(number)
            self.scaler.step(self.optimizer)
            self.infos.append(self.scaler.update())
        return self


@EACH
@pytest.mark.parametrize("numbers", [(-1, 2, 3), (1, 2, -3, 4, 5, -6, -7, 8)], ids=["first", "later"])
def test_a_run_is_that_without_the_bad_steps(case, numbers):
    """Weights, state, settings, random numbers, loss scale and counters, bit for bit; in plain runs they break."""
    run = Run(case, on_nonfinite_update="skip").step(*numbers)
    expected = Run(case).step(*(number for number in numbers if number > 0))
    broken = Run(case).step(*numbers)
    found = _everything(run.params, run.optimizer)
    assert _are_same(found, _everything(expected.params, expected.optimizer))
    assert not _are_same(found, _everything(broken.params, broken.optimizer))
    bad = [number < 0 for number in numbers]
    assert [info.nonfinite_update for info in run.infos] == bad == [not info.applied for info in run.infos]
    assert not any(info.overflowed or info.spiked or info.nonfinite_loss for info in run.infos)
    saved = run.scaler.state_dict()
    counters = saved.pop("nonfinite")
    assert saved == expected.scaler.state_dict()
    assert counters["updates"] == sum(bad)
    assert {name: run.scaler.metrics()[name] for name in expected.scaler.metrics()} == expected.scaler.metrics()


@EACH
def test_a_plain_run_says_that_the_bad_step_was_applied(case):
    """The setting catches this."""
    run = Run(case).step(1, -2, 3)
    assert all(info.applied for info in run.infos)
    values = [*run.params, *(each for state in run.optimizer.state.values() for each in state.values())]
    assert any(isinstance(each, torch.Tensor) and not torch.isfinite(each).all() for each in values)


@pytest.mark.parametrize(
    ("case", "name"),
    [
        ("adam", r"state 'exp_avg_sq' of parameter 0 of group 0 \(torch.float32, shape \(4, 4\)\)"),
        ("adamw fused", "state 'exp_avg_sq' of parameter 0"),
        ("muon", r"parameter 0 of group 0"),
        ("state in float16", "state 'squares' of parameter 0"),
        ("weights in float16", r"parameter 0 of group 0 \(torch.float16"),
    ],
)
def test_raise_names_the_first_value(case, name):
    """After it was written; the scaler then starts a step with nothing known."""
    run = Run(case, on_nonfinite_update="raise").step(1, 2)
    saved = copy.deepcopy([run.optimizer.state_dict(), [param.detach() for param in run.params]])
    with pytest.raises(NonfiniteUpdateError, match=f"^{name}.* became NaN or infinite"):
        run.step(-3)
    run.optimizer.load_state_dict(saved[0])
    with torch.no_grad():
        for param, value in zip(run.params, saved[1], strict=True):
            param.copy_(value)
    assert run.step(4).infos[-1].applied
    with pytest.raises(NonfiniteUpdateError):
        run.step(-5)


def test_raise_takes_names_that_torch_knows():
    """Those of `named_parameters`, in the state of no parameter, and in lists."""
    model = torch.nn.Linear(2, 2)
    scaler = GradScaler("cpu", init_scale=1.0, on_nonfinite_update="raise")
    optimizer = torch.optim.Adam(model.named_parameters())
    if "param_names" in optimizer.param_groups[0]:
        scaler.scale(model(torch.full((1, 2), 1e21)).sum()).backward()
        with pytest.raises(NonfiniteUpdateError, match=r"^state 'exp_avg_sq' of weight \("):
            scaler.step(optimizer)


@pytest.mark.parametrize("setting", ["raise", "skip"])
def test_values_that_were_infinite_before_are_left_alone(setting):
    """A mask of -inf as a parameter, state that is infinite from the start, and weights that were set between steps."""
    mask = torch.nn.Parameter(torch.tensor([0.0, -INF]))
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([mask, weight], lr=0.1)
    optimizer.state["best"] = [torch.tensor(INF)]
    scaler = GradScaler("cpu", init_scale=1.0, on_nonfinite_update=setting)

    def step(size=1.0):
        scaler.scale(torch.ones(()))
        mask.grad, weight.grad = torch.ones(2), torch.full((2,), size)
        scaler.step(optimizer)
        return scaler.update()

    assert all(step().applied for _ in range(3))
    assert mask[0] != 0.0
    with torch.no_grad():
        weight[1] = -INF  # by hand, as pruning does
    assert step().applied
    with torch.no_grad():
        weight[1] = 1.0
    assert step().applied
    if setting == "skip":
        assert step(1e21).nonfinite_update
    else:
        with pytest.raises(NonfiniteUpdateError, match=r"^state 'exp_avg_sq' of parameter 1 of group 0"):
            step(1e21)


def test_large_numbers_are_finite():
    """Their squares overflow float32, and the norm of many; each element is looked at then."""
    weights = [torch.nn.Parameter(torch.full(shape, 3e38)) for shape in [(2,), (100, 100), (0,)]]
    optimizer = torch.optim.SGD(weights, lr=1.0)
    for setting in ("raise", "skip"):
        scaler = GradScaler("cpu", init_scale=1.0, on_nonfinite_update=setting)
        scaler.scale(torch.ones(()))
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        scaler.step(optimizer)
        assert scaler.update().applied


@pytest.mark.parametrize(("limit", "steps"), [(None, 20), (3, 3)])
def test_a_streak_raises(limit, steps):
    """eps=0 with a zero gradient is NaN at every step, and would be undone without end; the update is complete."""
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([weight], eps=0.0)
    policy = DynamicScaling(init_scale=8.0, max_overflow_streak=limit)
    scaler = GradScaler("cpu", policy=policy, on_nonfinite_update="skip")

    def step(size=0.0):
        scaler.scale(torch.ones(()))
        weight.grad = torch.tensor([1.0, size])
        scaler.step(optimizer)
        return scaler.update()

    assert step(size=1.0).applied
    before = weight.tolist()
    optimizer.state.clear()  # so that its average is zero again
    for _ in range(steps - 1):
        assert step().nonfinite_update
    with pytest.raises(NonfiniteStreakError, match=f"the last {steps} updates in a row .* look for eps=0"):
        step()
    assert weight.tolist() == before
    assert scaler.metrics()["nonfinite_update_streak"] == steps
    assert f"{steps} updates were undone" in scaler.diagnose()
    assert scaler.get_scale() == 8.0


def test_of_two_optimizers_one_stands_still():
    """Updated together or in turns: the steps of the other neither are undone nor end the streak."""
    for in_turns in (False, True):
        weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
        optimizers = [torch.optim.Adam([weights[0]], eps=0.0), torch.optim.Adam([weights[1]])]
        scaler = GradScaler("cpu", init_scale=8.0, on_nonfinite_update="skip")
        for number in range(5):
            scaler.scale(torch.ones(()))
            for weight, optimizer in zip(weights, optimizers, strict=True):
                weight.grad = torch.tensor([1.0, 0.0])
                scaler.step(optimizer)
                if in_turns:
                    info = scaler.update()
                    assert info.applied == info.applied_of(optimizer) == (weight is weights[1])
                    scaler.scale(torch.ones(()))
            if not in_turns:
                info = scaler.update()
                assert [info.applied_of(each) for each in optimizers] == [False, True]
                assert (info.applied, info.nonfinite_update, info.overflowed, info.spiked) == (
                    False,
                    True,
                    False,
                    False,
                )
            assert scaler.metrics()["nonfinite_update_streak"] == number + 1
        assert weights[0].tolist() == [1.0, 1.0]
        assert weights[1][0] < 1.0


def test_an_overflow_of_another_optimizer_still_counts():
    """The scale backs off, and the update of the other is undone."""
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizers = [torch.optim.Adam([weight], eps=0.0) for weight in weights]
    scaler = GradScaler("cpu", init_scale=8.0, on_nonfinite_update="skip")
    scaler.scale(torch.ones(()))
    weights[0].grad, weights[1].grad = torch.tensor([1.0, INF]), torch.tensor([1.0, 0.0])
    for optimizer in optimizers:
        scaler.step(optimizer)
    info = scaler.update()
    assert (info.applied, info.overflowed, info.nonfinite_update, info.loss_scale_after) == (False, True, True, 4.0)


def test_with_a_guard():
    """A spike is a spike, an update that is undone is none, and the guard's mean has its norm."""
    run = Run("adam", on_nonfinite_update="skip", guard=SpikeGuard(warmup=2))
    run.huge = 3.0
    run.step(1, 2, 3, -4)
    assert (run.infos[-1].spiked, run.infos[-1].nonfinite_update) == (True, False)
    run.optimizer.param_groups[0]["lr"] = INF
    run.step(5)
    assert (run.infos[-1].spiked, run.infos[-1].nonfinite_update) == (False, True)
    assert run.scaler.metrics()["spikes"] == 1
    assert run.scaler.metrics()["nonfinite_updates"] == 1


def test_clipping_and_unscaling_first():
    """Whatever has checked the gradients."""
    for prepare in (
        lambda scaler, optimizer: scaler.unscale_(optimizer),
        lambda scaler, optimizer: scaler.unscale_and_clip_(optimizer, 1e30),
    ):
        run = Run("adam", on_nonfinite_update="skip").step(1)
        before = _everything(run.params, run.optimizer)
        run.set_gradients(-2)
        prepare(run.scaler, run.optimizer)
        assert run.scaler.step(run.optimizer) is None
        assert run.scaler.update().nonfinite_update
        assert _are_same(before, _everything(run.params, run.optimizer))


def test_a_scaler_with_defaults_is_what_it_was():
    """No key of a state dict, of a pickle and of a copy is new."""
    scaler = Run("adam", on_nonfinite_update="ignore", on_nonfinite_loss="back_off").step(1, 2).scaler
    assert "nonfinite" not in scaler.state_dict()
    assert not any("nonfinite" in name for name in {*scaler.__getstate__(), *vars(scaler), *scaler.metrics()})


class _Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if operation is not torch.ops.aten.detach.default:  # it runs nothing
            self.names.append(str(operation))
        return operation(*args, **(kwargs or {}))


@pytest.mark.parametrize("case", ["adam", "adamw fused"])
def test_the_default_costs_nothing(case):
    """A step calls no function of the check, and as many operations of torch as torch's own scaler at most."""
    called, counts = set(), {}
    for setting in ("ignore", "skip"):
        run = Run(case, on_nonfinite_update=setting).step(1, 2)
        run.set_gradients(3)
        sys.setprofile(lambda frame, *_: called.add(f"{setting} {frame.f_code.co_filename.rpartition('/')[2]}"))  # noqa: B023
        try:
            run.scaler.step(run.optimizer)
            run.scaler.update()
        finally:
            sys.setprofile(None)
        run.set_gradients(4)
        with _Operations() as operations:
            run.scaler.step(run.optimizer)
        counts[setting] = operations.names
    assert {"skip _nonfinite.py", "skip _weights.py", "ignore _scaler.py"} <= called
    assert not {"ignore _nonfinite.py", "ignore _weights.py"} & called
    run.set_gradients(5)
    for param in run.params:  # what torch's own scaler does in a step
        param.grad = param.grad.clone()
    theirs = torch.amp.GradScaler("cpu", init_scale=1.0)
    theirs.scale(torch.ones(()))
    with _Operations() as operations:
        theirs.step(run.optimizer)
    assert len(counts["ignore"]) <= len(operations.names) < len(counts["skip"])


def test_checkpoints_copies_and_pickles_have_the_counters():
    """And the settings; a scaler without the setting keeps them, and one with it starts at zero without them."""
    run = Run("adam", on_nonfinite_update="skip").step(1, -2, -3)
    saved = run.scaler.state_dict()
    assert saved["nonfinite"] == {"updates": 2, "update_streak": 2, "losses": 0, "loss_streak": 0}
    state_from_dict(saved)
    for scaler in (copy.deepcopy(run.scaler), pickle.loads(pickle.dumps(run.scaler))):
        assert scaler.state_dict() == saved
        run.scaler = scaler
        assert run.step(-4).infos[-1].nonfinite_update
        assert scaler.metrics()["nonfinite_updates"] == 3
    plain = GradScaler("cpu")
    plain.load_state_dict(saved)
    assert plain.state_dict()["nonfinite"] == saved["nonfinite"]
    run.scaler.load_state_dict(GradScaler("cpu").state_dict())
    assert run.scaler.metrics()["nonfinite_updates"] == 0


@pytest.mark.parametrize("setting", [{"on_nonfinite_update": "warn"}, {"on_nonfinite_loss": "ignore"}])
def test_other_settings_are_refused(setting):
    """By the rule and the allowed values, also if the scaler is disabled."""
    for enabled in (True, False):
        with pytest.raises(PolicyError, match=next(iter(setting))):
            GradScaler("cpu", enabled=enabled, **setting)


def test_a_disabled_scaler_checks_nothing():
    """Training runs as it would without a scaler; without loss scaling, use the policy "none"."""
    run = Run("adam", on_nonfinite_update="skip", enabled=False).step(1, -2)
    assert not torch.isfinite(run.optimizer.state[run.params[0]]["exp_avg_sq"]).all()
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([weight])
    scaler = GradScaler("cpu", policy="none", on_nonfinite_update="skip")
    scaler.scale(weight.sum() * 1e21).backward()
    scaler.step(optimizer)
    assert scaler.update().nonfinite_update
    assert not optimizer.state


def test_minimize_is_undone_too():
    """Without retries, since no loss scale helps; also a step with a closure."""

    def make(size, optimizer):
        scaler = GradScaler("cpu", init_scale=8.0, on_nonfinite_update="skip")
        return scaler.minimize(optimizer, lambda: (weight * size).sum(), retries=3)

    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([weight])
    info = make(1e21, optimizer)
    assert (info.applied, info.nonfinite_update, info.loss_scale_after) == (False, True, 8.0)
    optimizer = torch.optim.LBFGS([weight], lr=INF)
    assert make(1.0, optimizer).nonfinite_update
    assert weight.tolist() == [1.0, 1.0]
    assert not optimizer.state
    optimizer = torch.optim.LBFGS([weight], lr=0.1)
    assert make(1.0, optimizer).applied
    assert weight.tolist() != [1.0, 1.0]


def test_protected_buffers_follow():
    """BatchNorm's statistics are as before the step that was undone."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=INF)
    scaler = GradScaler("cpu", init_scale=1.0, on_nonfinite_update="skip", protect=[model])
    scaler.scale(model(torch.randn(4, 2)).square().sum()).backward()
    scaler.step(optimizer)
    assert not scaler.update().applied
    assert model[1].num_batches_tracked == 0


@pytest.mark.parametrize("case", ["adam", "adamw fused", "sgd fused"])
@pytest.mark.parametrize("device", ["mps", "xpu"])
def test_on_a_device(case, device):
    """As on the host; a fused optimizer is undone by `where`, and the first step, which creates state, by the host."""
    if (device, case) == ("mps", "adamw fused"):
        pytest.skip("its kernel is not emulated there")
    numbers = (-1, 2, -3, 4, -5, -6, 7)
    expected = Run(case).step(*(number for number in numbers if number > 0))
    with Emulated(device):
        run = Run(case, device=device, on_nonfinite_update="skip").step(*numbers)
        assert [bool(info.nonfinite_update) for info in run.infos] == [number < 0 for number in numbers]
        assert not any(bool(info.spiked) or bool(info.overflowed) for info in run.infos)
        assert [bool(info.applied) for info in run.infos] == [number > 0 for number in numbers]
        found = [param.detach().cpu() for param in run.params]
        metrics = {name: float(value) for name, value in run.scaler.metrics().items()}
    for one, other in zip(found, expected.params, strict=True):
        torch.testing.assert_close(one, other.detach(), rtol=1e-6, atol=0.0)
    assert metrics["nonfinite_updates"] == 4
    assert metrics["steps"] == 3
    assert metrics["nonfinite_update_streak"] == 0


@pytest.mark.parametrize("device", ["mps", "xpu"])
def test_with_a_guard_on_a_device(device):
    """Which of the two has skipped a step stays on the device, and an overflow is neither."""
    with Emulated(device):
        run = Run("sgd fused", device=device, on_nonfinite_update="skip", guard=SpikeGuard(warmup=2))
        for number, rate, size in [
            (1, 1.0, None),
            (2, 1.0, None),
            (3, INF, None),
            (-4, 1.0, 9.0),
            (-5, 1.0, INF),
            (6, INF, None),
            (7, 1.0, None),
        ]:
            run.optimizer.param_groups[0]["lr"], run.huge = rate, size
            run.step(number)
        found = [[bool(each) for each in (i.applied, i.nonfinite_update, i.spiked, i.overflowed)] for i in run.infos]
        expected = ["applied", "applied", "undone", "spiked", "overflowed", "undone", "applied"]
        assert found == [[each == name for name in ("applied", "undone", "spiked", "overflowed")] for each in expected]
        assert all(bool(param.detach().cpu().isfinite().all()) for param in run.params)
        assert int(run.scaler.metrics()["nonfinite_updates"]) == 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("case", ["adam", "adamw foreach", "adamw fused", "sgd fused", "muon"])
def test_on_a_gpu(case):
    """Bit for bit the run without the bad steps."""
    numbers = (-1, 2, -3, 4, -5, -6, 7)
    run = Run(case, device="cuda", on_nonfinite_update="skip").step(*numbers)
    expected = Run(case, device="cuda").step(*(number for number in numbers if number > 0))
    assert _are_same(_everything(run.params, run.optimizer), _everything(expected.params, expected.optimizer))
    assert [bool(info.nonfinite_update) for info in run.infos] == [number < 0 for number in numbers]


def test_a_recorded_step_is_undone_at_each_replay():
    """Without a read on the host; counters, known values and the loss scale are in memory that a replay reads."""
    numbers = (1, 2, -3, 4, -5, -6, 7)
    expected = Run("adamw fused").step(*(number for number in numbers if number > 0))
    run = Run("adamw fused", on_nonfinite_update="skip").step(1)
    run.set_gradients(2)
    with RecordedGraph() as graph:
        run.scaler.scale(torch.ones(()))
        run.scaler.step(run.optimizer)
        info = run.scaler.update()
    assert bool(info.applied)
    static = [param.grad for param in run.params]
    for number in numbers[2:]:
        run.set_gradients(number)
        for param, memory in zip(run.params, static, strict=True):
            memory.copy_(param.grad)
            param.grad = memory
        graph.replay()
        assert bool(info.nonfinite_update) == (number < 0)
    assert _are_same(_everything(run.params, run.optimizer), _everything(expected.params, expected.optimizer))
    assert int(run.scaler.metrics()["nonfinite_updates"]) == 3


def _train(rank, world_size, kind, fused, setting):
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 4))
    group = dist.group.WORLD if kind == "group" else None
    scaler = GradScaler("cpu", init_scale=2.0, process_group=group, on_nonfinite_update=setting)
    if kind == "ddp":
        module = DistributedDataParallel(module)
    elif kind == "fsdp2":
        fully_shard(module, mesh=dist.device_mesh.init_device_mesh("cpu", (world_size,)))
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, fused=fused)
    for number in range(6):
        optimizer.zero_grad()
        scaler.scale(module(torch.full((2, 4), 1.0 + rank)).square().mean()).backward()
        bad = number in (0, 3)
        if bad and (kind == "ddp" or rank == 1):
            grad = next(module.parameters()).grad
            (grad.to_local() if kind == "fsdp2" else grad)[0, 0] = 1e22
        before = [param.detach().clone() for param in _local(module)]
        if bad and setting == "raise":
            other = "another rank" if rank == 0 and kind != "ddp" else "exp_avg_sq"
            with pytest.raises(NonfiniteUpdateError, match=other):
                scaler.step(optimizer)
            return
        scaler.step(optimizer)
        info = scaler.update()
        assert bool(info.nonfinite_update) == bad == (not info.applied)
        assert all(torch.equal(*pair) for pair in zip(before, _local(module), strict=True)) == bad
    scaler.check_sync()
    assert scaler.metrics()["nonfinite_updates"] == 2
    assert all(torch.isfinite(each).all() for state in optimizer.state.values() for each in state.values())


@pytest.mark.parametrize("kind", ["ddp", FSDP2, "group"])
@pytest.mark.parametrize(("fused", "setting"), [(False, "skip"), (True, "skip"), (False, "raise")])
def test_two_ranks_undo_alike(kind, fused, setting):
    """One of which has the bad gradient; "raise" stops all of them."""
    _on_ranks(2, partial(_train, kind=kind, fused=fused, setting=setting))


def test_the_diagnosis_tells_of_it():
    """In a sentence."""
    scaler = Run("adam", on_nonfinite_update="skip").step(1, -2).scaler
    assert "1 update was undone" in scaler.diagnose()
    assert math.isfinite(scaler.metrics()["nonfinite_updates"])


# -- callers who write to what is checked ------------------------------------------------------------------------------


def _at(values, **settings):
    """Return a weight, its optimizer, and a function that steps with a gradient; the loss is not scaled."""
    weight = torch.nn.Parameter(torch.tensor(values))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = GradScaler("cpu", policy="none", **{"on_nonfinite_update": "skip", **settings})
    scaler.place_on("cpu")

    def step(*grad):
        weight.grad = torch.tensor(grad)
        scaler.step(optimizer)
        return scaler.update()

    return weight, optimizer, step


@pytest.mark.parametrize("write", ["in place", "replaced"])
def test_a_write_that_torch_does_not_count_is_not_the_steps(write):
    """`.data` has no version: a mask that is written through it is left alone, and what it repairs is checked again."""
    weight, optimizer, step = _at([1.0, 1.0])
    assert step(0.0, 0.5).applied
    masked = torch.tensor([-INF, 1.0])
    if write == "in place":
        weight.data[0] = -INF
    else:
        weight.data = masked
    assert step(0.0, 0.5).applied
    weight.data.fill_(1.0)
    optimizer.param_groups[0]["lr"] = 1e5
    assert step(0.0, 3e38).nonfinite_update
    assert weight.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("reaction", ["skip", "raise"])
def test_sparse_state_is_checked_and_restored(reaction):
    """The momentum of sparse gradients is sparse, too."""
    embedding = torch.nn.Embedding(10, 3, sparse=True)
    optimizer = torch.optim.SGD(embedding.parameters(), lr=0.1, momentum=0.9)
    scaler = GradScaler("cpu", policy="none", on_nonfinite_update=reaction)

    def step(factor):
        optimizer.zero_grad()
        scaler.scale(embedding(torch.tensor([1, 2])).sum() * factor).backward()
        scaler.step(optimizer)
        return scaler.update()

    assert step(1.0).applied
    before = copy.deepcopy([embedding.weight, optimizer.state[embedding.weight]["momentum_buffer"]])
    optimizer.param_groups[0]["lr"] = 1e10
    if reaction == "raise":
        with pytest.raises(NonfiniteUpdateError):
            step(1e35)
        return
    assert step(1e35).nonfinite_update
    assert torch.equal(embedding.weight, before[0])
    assert torch.equal(optimizer.state[embedding.weight]["momentum_buffer"].to_dense(), before[1].to_dense())


def test_counters_wait_in_a_scaler_without_the_settings():
    """As a guard's state does, for the next one that has them."""
    saved = GradScaler("cpu", on_nonfinite_update="skip").state_dict()
    saved["nonfinite"] = {"updates": 3, "update_streak": 1, "losses": 0, "loss_streak": 0}
    plain = GradScaler("cpu")
    plain.load_state_dict(saved)
    assert plain.state_dict()["nonfinite"] == saved["nonfinite"]
    plain.load_state_dict(GradScaler("cpu").state_dict())
    assert "nonfinite" not in plain.state_dict()
