"""`GradScaler(guard=)`: spikes skip a step as overflows do, and leave the loss scale alone."""

import copy
import io
import pickle
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from lossscale_core import SpikeGuard
from lossscale_core.adapters import guard_state_from_dict
from lossscale_core.errors import CheckpointWarning, PolicyError, SpikeStreakError
from lossscale_core.testing import simulate
from lossscale_torch import GradScaler
from tests.adapters.recorded_graph import RecordedGraph
from tests.adapters.test_torch_distributed import _local, _on_ranks
from tests.adapters.test_torch_synchronisation import _FusedOnMeta, _Plain, _Synchronisations
from tests.torch_versions import FSDP2

GUARD = SpikeGuard(warmup=4, memory=20)
INF = float("inf")
OPTIMIZERS = {
    "foreach": lambda params: torch.optim.AdamW(params, lr=0.1, foreach=True),
    "fused": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
}
EACH = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
CLIPS = {
    "clip": lambda scaler, optimizer: scaler.unscale_and_clip_(optimizer, 1.0),
    "unscale": lambda scaler, optimizer: scaler.unscale_(optimizer),
    "step alone": lambda scaler, optimizer: None,
}
RNG = np.random.default_rng(0)
NORMS = np.exp(0.3 * RNG.standard_normal(60)).astype(np.float32)
NORMS[RNG.choice(np.arange(10, 60), 6, replace=False)] *= 20
FLAGS = np.ones(60, bool)
FLAGS[RNG.choice(60, 6, replace=False)] = False


def _run(norms, flags, make=OPTIMIZERS["foreach"], prepare=CLIPS["clip"], scaler=None, param=None, optimizer=None):
    """Yield the scaler, its info and whether anything moved, after a step with each of these norms."""
    scaler = scaler or GradScaler("cpu", init_scale=2.0**10, growth_interval=10, guard=GUARD)
    param = torch.nn.Parameter(torch.zeros(4)) if param is None else param
    optimizer = optimizer or make([param])
    for norm, finite in zip(norms, flags, strict=True):
        before = _everything(param, optimizer)
        scaler.scale((param * (norm / 2)).sum() if finite else (param * INF).sum()).backward()
        prepare(scaler, optimizer)
        scaler.step(optimizer)
        info = scaler.update()
        optimizer.zero_grad()
        yield scaler, info, _everything(param, optimizer) != before


def _everything(param, optimizer):
    states = [value.tolist() for state in optimizer.state.values() for value in state.values()]
    return [param.tolist(), *states]


@EACH
@pytest.mark.parametrize("prepare", CLIPS.values(), ids=CLIPS)
def test_random_runs_go_as_simulated(make, prepare):
    """Spikes and overflows skip bit for bit, and only the latter move the loss scale."""
    expected = simulate(
        GradScaler("cpu", init_scale=2.0**10, growth_interval=10).policy, FLAGS, norms=NORMS, guard=GUARD
    )
    assert 4 <= expected.spiked.sum() <= 6
    for step, (scaler, info, moved) in enumerate(_run(NORMS, FLAGS, make, prepare)):
        assert bool(info.spiked) == expected.spiked[step]
        assert bool(info.overflowed) == expected.skipped[step]
        assert bool(info.applied) == (not expected.spiked[step] and not expected.skipped[step])
        assert float(info.loss_scale_used) == expected.loss_scale_used[step]
        assert scaler.get_scale() == expected.loss_scale_after[step]
        if make is OPTIMIZERS["foreach"] or step > 0:  # the first fused step makes its state, even if it is skipped
            assert moved == info.applied
    assert scaler.state_dict()["steps"] == expected.steps[-1]
    assert scaler.metrics()["spikes"] == expected.spiked.sum()
    assert f"refused {expected.spiked.sum()} spikes" in scaler.diagnose()


@EACH
def test_each_optimizer_has_norms_of_its_own(make):
    """A large norm of one is not a spike of another; a spike skips one optimizer."""
    params = [torch.nn.Parameter(torch.zeros(4)) for _ in range(2)]
    optimizers = [make([param]) for param in params]
    scaler = GradScaler("cpu", init_scale=2.0**4, guard=GUARD)
    for step in range(10):
        norms = (1.0, 5000.0 if step == 8 else 100.0)
        scaler.scale(sum((param * (norm / 2)).sum() for param, norm in zip(params, norms, strict=True))).backward()
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        for optimizer in optimizers:
            scaler.step(optimizer)
        info = scaler.update()
        assert bool(info.spiked) == (step == 8)
        assert bool(info.applied_of(optimizers[1])) == (step != 8)
        assert bool(info.applied_of(optimizers[0]))
        for optimizer in optimizers:
            optimizer.zero_grad()
    first, second = scaler.state_dict()["guard"]
    assert (first["mean"], first["spikes"], second["spikes"]) == (1.0, 0, 1)
    assert second["mean"] > 100


def test_several_optimizers_clipped_together_have_one_norm():
    """Then a spike skips all of them."""
    params = [torch.nn.Parameter(torch.zeros(4)) for _ in range(2)]
    optimizers = [torch.optim.SGD([param], lr=0.1) for param in params]
    scaler = GradScaler("cpu", guard=GUARD)
    for norm in [1.0] * 8 + [100.0]:
        scaler.scale((params[0] * norm / 2).sum() + params[1].sum()).backward()
        scaler.unscale_and_clip_(optimizers, 1.0)
        for optimizer in optimizers:
            scaler.step(optimizer)
        info = scaler.update()
        for optimizer in optimizers:
            optimizer.zero_grad()
    assert [info.applied_of(optimizer) for optimizer in optimizers] == [False, False]
    assert isinstance(scaler.state_dict()["guard"], dict)


@EACH
def test_a_run_resumes_exactly(make):
    """Saved and loaded in the middle, with the optimizer, it ends in the same state bit for bit."""
    whole = [(bool(info.applied), scaler.state_dict()) for scaler, info, _ in _run(NORMS, FLAGS, make)]
    param = torch.nn.Parameter(torch.zeros(4))
    optimizer = make([param])
    *_, (scaler, _, _) = _run(NORMS[:30], FLAGS[:30], param=param, optimizer=optimizer)
    file = io.BytesIO()
    torch.save(scaler.state_dict(), file)
    file.seek(0)
    resumed = GradScaler("cpu", guard=GUARD)
    resumed.load_state_dict(torch.load(file))
    rest = _run(NORMS[30:], FLAGS[30:], scaler=resumed, param=param, optimizer=optimizer)
    assert [(bool(info.applied), scaler.state_dict()) for scaler, info, _ in rest] == whole[30:]


def test_a_checkpoint_without_a_guard_starts_it_afresh():
    """A warning says so; torch's own five keys load alike."""
    scaler = GradScaler("cpu", guard=GUARD)
    for saved in (GradScaler("cpu").state_dict(), torch.amp.GradScaler("cpu").state_dict()):
        with pytest.warns(CheckpointWarning, match="no state of a spike guard"):
            scaler.load_state_dict(saved)
    assert guard_state_from_dict(scaler.state_dict()) == GUARD.init_state()


def test_a_scaler_without_a_guard_keeps_what_it_loads():
    """So that a stop without one loses nothing."""
    *_, (scaler, _, _) = _run(NORMS, FLAGS)
    saved = scaler.state_dict()
    between = GradScaler("cpu")
    between.load_state_dict(saved)
    assert between.state_dict()["guard"] == saved["guard"]
    assert "guard" not in GradScaler("cpu").state_dict()


def test_the_states_of_several_optimizers_are_restored_in_their_order():
    """The order in which they are first checked."""
    saved = None
    for _ in range(2):
        params = [torch.nn.Parameter(torch.zeros(4)) for _ in range(2)]
        optimizers = [torch.optim.SGD([param], lr=0.0) for param in params]
        scaler = GradScaler("cpu", guard=GUARD)
        if saved:
            scaler.load_state_dict(saved)
        for _ in range(6):
            scaler.scale(params[0].sum() + 100 * params[1].sum()).backward()
            for optimizer in optimizers:
                scaler.step(optimizer)
            assert not scaler.update().spiked
            for optimizer in optimizers:
                optimizer.zero_grad()
        saved = scaler.state_dict()
    assert [entry["mean"] for entry in saved["guard"]] == [2.0, 200.0]
    assert [entry["norms"] for entry in saved["guard"]] == [12.0, 12.0]


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, lambda scaler: pickle.loads(pickle.dumps(scaler))])
def test_copies_go_on_alone(copied):
    """A copy or a pickle has the same state, and no memory in common."""
    *_, (scaler, _, _) = _run(NORMS[:30], FLAGS[:30])
    other = copied(scaler)
    assert other.state_dict() == scaler.state_dict()
    *_, (other, _, _) = _run(NORMS[30:], FLAGS[30:], scaler=other)
    assert other.state_dict()["guard"] != scaler.state_dict()["guard"]


def test_a_norm_beyond_float32_is_a_spike():
    """It is finite in float64, so that the loss scale stays; float32's largest number is checked."""
    scaler = GradScaler("cpu", init_scale=2.0, guard=GUARD)
    param = torch.nn.Parameter(torch.zeros(4, dtype=torch.float64))
    infos = [info for _, info, _ in _run([1.0] * 8 + [1e300, 1.0], [True] * 10, scaler=scaler, param=param)]
    assert [info.spiked for info in infos] == [False] * 8 + [True, False]
    assert not any(info.overflowed for info in infos)
    assert scaler.state_dict()["guard"]["spikes"] == 1


def test_a_streak_of_spikes_raises_where_the_host_knows():
    """At the guard's `max_streak`; the error names norm and mean."""
    scaler = GradScaler("cpu", guard=SpikeGuard(warmup=4, max_streak=2))
    with pytest.raises(SpikeStreakError, match=r"norm of 100 .*number 2 in a row"):
        list(_run([1.0] * 5 + [100.0] * 3, [True] * 8, scaler=scaler))


def test_a_streak_names_the_norm_of_its_own_optimizer():
    """And not that of the optimizer that was checked last."""
    params = [torch.nn.Parameter(torch.zeros(4)) for _ in range(2)]
    optimizers = [torch.optim.SGD([param], lr=0.1) for param in params]
    scaler = GradScaler("cpu", guard=SpikeGuard(warmup=4, max_streak=1))

    def step(norm):
        scaler.scale((params[0] * (norm / 2)).sum() + params[1].sum()).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        for optimizer in optimizers:
            optimizer.zero_grad()

    for _ in range(6):
        step(1.0)
    with pytest.raises(SpikeStreakError, match=r"norm of 100 "):
        step(100.0)


def test_without_scaling_the_guard_decides_alone():
    """As for bfloat16: `policy="none"` still skips spikes and overflows."""
    scaler = GradScaler("cpu", policy="none", guard=GUARD)
    applied = [
        bool(info.applied)
        for _, info, _ in _run([1.0] * 8 + [50.0, 1.0], [True] * 6 + [False] + [True] * 3, scaler=scaler)
    ]
    assert applied == [True] * 6 + [False, True, False, True]
    assert scaler.get_scale() == 1.0


@EACH
@pytest.mark.parametrize("retries", [0, 3])
def test_minimize_retries_no_spike(make, retries):
    """A lower scale would not fix it: the loss runs once, nothing moves, buffers included, and the scale stays."""
    layers = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.BatchNorm1d(4))
    optimizer = make(layers.parameters())
    scaler = GradScaler("cpu", init_scale=2.0**10, guard=GUARD)
    runs = []

    def loss(norm):
        runs.append(norm)
        return layers(torch.randn(8, 4)).square().mean() * norm

    for norm in [1.0] * 8:
        assert bool(scaler.minimize(optimizer, partial(loss, norm), retries=retries).applied)
    before = copy.deepcopy(layers.state_dict())
    info = scaler.minimize(optimizer, partial(loss, 1e4), retries=retries)
    assert (bool(info.applied), bool(info.spiked), len(runs)) == (False, True, 9)
    assert all(torch.equal(value, before[name]) for name, value in layers.state_dict().items())
    assert scaler.get_scale() == 2.0**10


class _Reimplemented(GradScaler):
    """A subclass with torch's own lines in the place of ours."""

    def _maybe_opt_step(self, optimizer, optimizer_state, *args, **kwargs):
        if not sum(v.item() for v in optimizer_state["found_inf_per_device"].values()):
            return optimizer.step(*args, **kwargs)
        return None


class _UnscalesByHand(GradScaler):
    """A subclass that unscales by itself, as trainers for full float16 do."""

    def _unscale_grads_(self, optimizer, inv_scale, found_inf, allow_fp16=False):
        return super()._unscale_grads_(optimizer, inv_scale, found_inf, True)


class _Counting(GradScaler):
    """A subclass that calls ours."""

    calls = 0

    def unscale_(self, optimizer):
        self.calls += 1
        super().unscale_(optimizer)


@EACH
@pytest.mark.parametrize("prepare", CLIPS.values(), ids=CLIPS)
@pytest.mark.parametrize("subclass", [_Reimplemented, _UnscalesByHand, _Counting])
def test_subclasses_are_guarded(subclass, make, prepare):
    """Each norm is checked once, and a spike is skipped, whichever method a subclass has replaced."""
    scaler = subclass("cpu", guard=GUARD)
    for step, (_, info, moved) in enumerate(_run([1.0] * 8 + [50.0, 1.0], [True] * 10, make, prepare, scaler)):
        assert bool(info.spiked) == (step == 8)
        assert moved == (step != 8)
    state = guard_state_from_dict(scaler.state_dict())
    assert (state.norms, state.spikes) == (10, 1)


def test_protected_buffers_go_back_after_a_spike():
    """As after an overflow."""
    layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
    scaler = GradScaler("cpu", guard=GUARD, protect=[layers])
    for step in range(9):
        before = copy.deepcopy(layers[1].state_dict())
        optimizer.zero_grad()
        scaler.scale(layers(torch.randn(8, 4)).square().mean() * (1e4 if step == 8 else 1.0)).backward()
        scaler.step(optimizer)
        assert scaler.update().spiked == (step == 8)
        same = all(torch.equal(value, before[name]) for name, value in layers[1].state_dict().items())
        assert same == (step == 8)


def test_a_flag_that_others_raise_is_an_overflow():
    """Whatever the guard says of the norm, the loss scale backs off."""
    param = torch.nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.SGD([param], lr=0.1)
    scaler = GradScaler("cpu", init_scale=2.0**10, guard=GUARD)
    list(_run([1.0] * 8, [True] * 8, scaler=scaler, param=param, optimizer=optimizer))
    scaler.scale((param * 50.0).sum()).backward()
    scaler.unscale_(optimizer)
    for flag in scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values():
        flag.fill_(1.0)
    scaler.step(optimizer)
    info = scaler.update()
    assert (info.applied, info.overflowed, info.loss_scale_after) == (False, True, 2.0**9)


@pytest.mark.parametrize("make", [_Plain, OPTIMIZERS["foreach"]])
def test_the_guard_costs_an_ordinary_optimizer_no_further_synchronisation(make):
    """The norm is read in the place of the flag: the same number of reads as with clipping alone."""
    counts = []
    for guard in (None, GUARD):
        param = torch.nn.Parameter(torch.zeros(4))
        optimizer = make([param])
        scaler = GradScaler("cpu", guard=guard)
        for _ in range(3):
            scaler.scale(torch.ones(()))
            param.grad = torch.ones(4)
            with _Synchronisations() as seen:
                scaler.unscale_and_clip_(optimizer, 1.0)
                scaler.step(optimizer)
                scaler.update()
        counts.append(seen.count)
    assert counts[0] == counts[1]


@pytest.mark.parametrize("prepare", CLIPS.values(), ids=CLIPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_fused_optimizer_is_guarded_without_a_wait(prepare, dtype):
    """A whole step runs on torch's `meta` device, which has no values to read; so does the guard's state."""
    param = torch.nn.Parameter(torch.ones(3, device="meta", dtype=dtype))
    optimizer = _FusedOnMeta([param])
    scaler = GradScaler("meta", policy="dynamic", guard=GUARD)
    for _ in range(3):
        param.grad = torch.ones_like(param)
        scaler.scale(torch.ones((), device="meta"))
        prepare(scaler, optimizer)
        scaler.step(optimizer)
        assert all(value.is_meta for value in scaler.update()[:6])
    assert scaler.metrics()["spikes"].is_meta


def test_a_replayed_graph_still_checks():
    """The state is written in place, so that each replay compares with the norms of those before."""
    param = torch.nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.SGD([param], lr=1.0, fused=True)
    scaler = GradScaler("cpu", init_scale=2.0**10, growth_interval=1000, guard=GUARD)
    weight = torch.ones(())
    param.grad = torch.zeros(4)

    def step():
        param.grad.zero_()
        scaler.scale((param * (weight / 2)).sum()).backward()
        scaler.unscale_and_clip_(optimizer, INF)
        scaler.step(optimizer)
        scaler.update()

    step()
    with RecordedGraph() as graph:
        step()
    param.detach().zero_()
    scaler.load_state_dict(GradScaler("cpu", init_scale=2.0**10, guard=GUARD).state_dict())
    applied = []
    for norm in [1.0] * 8 + [50.0, INF, 1.0]:
        weight.fill_(norm)
        before = param.detach().clone()
        graph.replay()
        applied.append(not torch.equal(param.detach(), before))
    assert applied == [True] * 8 + [False, False, True]
    assert scaler.state_dict()["guard"]["spikes"] == 1
    assert scaler.get_scale() == 2.0**9


def _decide_together(rank, world_size, kind, fused):
    """Train with a spike on the last rank alone, or on all; each rank skips it and keeps the loss scale."""
    torch.manual_seed(0)
    module = torch.nn.Linear(4, 4, bias=False)
    if kind == "ddp":
        module = DistributedDataParallel(module)
    elif kind == "fsdp2":
        fully_shard(module, mesh=dist.device_mesh.init_device_mesh("cpu", (world_size,)))
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3, fused=fused)
    group = dist.group.WORLD if kind == "group" else None
    scaler = GradScaler("cpu", init_scale=8.0, guard=GUARD, process_group=group)
    for step in range(10):
        is_large = step == 8 and rank == world_size - 1
        optimizer.zero_grad()
        scaler.scale(module(torch.full((2, 4), 50.0 if is_large else 1.0)).sum()).backward()
        before = [param.detach().clone() for param in _local(module)]
        if step % 2:
            scaler.unscale_and_clip_(optimizer, 1.0)
        scaler.step(optimizer)
        info = scaler.update()
        assert bool(info.spiked) == (step == 8)
        assert all(torch.equal(a, b) for a, b in zip(before, _local(module), strict=True)) == (step == 8)
    assert scaler.get_scale() == 8.0
    if kind != "group":
        scaler.check_sync()


@pytest.mark.parametrize("kind", ["ddp", FSDP2, "group"])
def test_ranks_decide_together(kind):
    """A spike that one rank alone can see skips the step on every rank."""
    _on_ranks(2, partial(_decide_together, kind=kind, fused=kind != "fsdp2"))


def test_a_guard_that_is_not_one_is_refused():
    """At once, and not in the first step."""
    with pytest.raises(PolicyError, match="guard='spike' must be a SpikeGuard"):
        GradScaler("cpu", guard="spike")
