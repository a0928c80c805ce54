"""What hangs on a step: hooks of one's own, and those that `guard=`, `protect=` and `process_group=` append."""

import copy
import gc
import math
import pickle
import weakref
from functools import partial

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from lossscale_core import FixedScaling, NoScaling, SpikeGuard
from lossscale_core.errors import OverflowStreakError
from lossscale_torch import GradScaler
from lossscale_torch.hooks import Hook
from tests.adapters.emulated_device import Emulated
from tests.adapters.recorded_graph import RecordedGraph
from tests.adapters.test_torch_distributed import _on_ranks
from tests.core.guarded_run import EXPECTED, GUARD, NORMS, POLICY

INF = float("inf")
EITHER_KIND = pytest.mark.parametrize("fused", [False, True], ids=["ordinary", "fused"])


def _pair(fused=False):
    params = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    return params, [torch.optim.SGD([param], lr=1.0, fused=fused) for param in params]


def _step(scaler, params, optimizers, *sizes, prepare=()):
    """Take a step of each optimizer with gradients of these sizes."""
    for optimizer in optimizers:
        optimizer.zero_grad()
    scaler.scale(sum((param * size).sum() for param, size in zip(params, sizes, strict=True))).backward()
    for call, *args in [*prepare, *((scaler.step, each) for each in optimizers)]:
        call(*args)
    return scaler.update()


# -- hooks of one's own ------------------------------------------------------------------------------------------------


class _Veto(Hook):
    """Vetoes on demand, counts the steps that it saw, and notes its calls."""

    def __init__(self, name="veto", calls=None):
        self.name, self.is_on, self.steps = name, False, 0
        self.calls = [] if calls is None else calls

    def before_step(self, scaler, optimizer, record):
        """Raise the flag if asked for."""
        record["found_inf_per_device"][self.name] = torch.tensor(float(self.is_on))
        self.calls.append((self.name, "before", id(optimizer)))

    def after_step(self, scaler, optimizer, record):
        """Note the call."""
        self.calls.append((self.name, "after", id(optimizer)))

    def after_update(self, scaler, info):
        """Count the step."""
        self.steps += 1
        self.calls.append((self.name, "update", bool(info.applied)))

    def state_dict(self):
        """Save the count."""
        return {self.name: self.steps}

    def load_state_dict(self, state_dict):
        """Restore the count, if there is one."""
        self.steps = state_dict.get(self.name, 0)


@EITHER_KIND
def test_a_veto_skips_the_step_and_leaves_the_scale(fused):
    """Neither the scale nor a counter moves, and the outcome is no overflow; an overflow beside it counts as one."""
    veto = _Veto()
    params, optimizers = _pair(fused)
    scaler = GradScaler("cpu", init_scale=8.0, hooks=[veto])
    _step(scaler, params, optimizers, 1.0, 1.0)
    veto.is_on, before = True, scaler.state_dict()
    info = _step(scaler, params, optimizers, 1.0, 1.0)
    assert (info.applied, info.overflowed, info.spiked) == (False, False, False)
    assert {**scaler.state_dict(), "veto": 1} == before
    info = _step(scaler, params, optimizers, 1.0, INF)
    assert (info.applied, info.overflowed, info.loss_scale_after) == (False, True, 4.0)
    assert [param[0].item() for param in params] == [0.0, 0.0]


def test_hooks_are_called_in_their_order():
    """Those of `hooks=` first to last at each of three points; the last is once, at the update that ends the step."""
    calls = []
    params, optimizers = _pair()
    scaler = GradScaler("cpu", hooks=[_Veto("a", calls), _Veto("b", calls)], updates_per_step=2)
    scaler.scale(sum(param.sum() for param in params)).backward()
    for optimizer in optimizers:
        scaler.step(optimizer)
        scaler.update()
    of_each = [(name, when, id(each)) for each in optimizers for when in ("before", "after") for name in "ab"]
    assert calls == [*of_each, ("a", "update", True), ("b", "update", True)]


def test_an_entry_of_a_hook_is_saved_and_restored():
    """Beside the scaler's own, under a name of the hook's; a checkpoint without it loads, too."""
    scaler = GradScaler("cpu", hooks=[_Veto("mine")])
    _step(scaler, *_pair(), 1.0, 1.0)
    resumed = GradScaler("cpu", hooks=[_Veto("mine")])
    resumed.load_state_dict(scaler.state_dict())
    assert resumed.state_dict() == scaler.state_dict()
    assert resumed.state_dict()["mine"] == 1
    resumed.load_state_dict(torch.amp.GradScaler("cpu").state_dict())
    assert resumed.state_dict()["mine"] == 0


COPIES = pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])


@COPIES
def test_a_copy_has_hooks_and_a_guard_of_its_own(copied):
    """They begin in the same state, and go on alone, with no memory in common."""
    veto = _Veto()
    params, optimizers = _pair()
    scaler = GradScaler("cpu", hooks=[veto], guard=SpikeGuard())
    for size in (1.0, 2.0):
        _step(scaler, params, optimizers, size, 1.0)
    other, before = copied(scaler), scaler.state_dict()
    assert other.state_dict() == before
    veto.is_on = True
    assert _step(other, params, optimizers, 3.0, 1.0).applied
    assert other.state_dict()["guard"] != before["guard"]
    assert scaler.state_dict() == before
    assert not _step(scaler, params, optimizers, 3.0, 1.0).applied
    assert (other.state_dict()["veto"], scaler.state_dict()["veto"]) == (3, 3)


# -- Resumption --------------------------------------------------------------------------------------------------------


def test_a_new_scaler_beside_an_optimizer_that_has_stepped():
    """No warning, which would be an error here, without scaling, and where the older optimizer comes later."""
    param = torch.nn.Parameter(torch.ones(2))
    param.grad = torch.ones(2)
    new, old = torch.optim.AdamW([param]), torch.optim.AdamW([param])
    old.step()
    assert _step(GradScaler("cpu", policy="none"), [param], [old], 1.0).applied
    scaler = GradScaler("cpu")
    for optimizer in (new, old):
        assert _step(scaler, [param], [optimizer], 1.0).applied


# -- Guard -------------------------------------------------------------------------------------------------------------


class _Reimplemented(GradScaler):
    """A subclass with torch's own lines in the place of ours."""

    def _maybe_opt_step(self, optimizer, optimizer_state, *args, **kwargs):
        if not sum(v.item() for v in optimizer_state["found_inf_per_device"].values()):
            return optimizer.step(*args, **kwargs)
        return None


@EITHER_KIND
def test_a_subclass_that_steps_by_itself_is_guarded_too(fused):
    """A spike is a flag among the others; the norms that are checked, each once, are those before torch's clip."""
    params, optimizers = _pair(fused)
    scaler = _Reimplemented("cpu", policy=POLICY, guard=GUARD)
    clip = partial(torch.nn.utils.clip_grad_norm_, params[:1], 0.1)
    for step, norm in enumerate(NORMS):
        before = params[0].tolist()
        prepare = [(scaler.unscale_, optimizers[0]), (clip,)]
        info = _step(scaler, params[:1], optimizers[:1], float(norm) / 2**0.5, prepare=prepare)
        assert (bool(info.spiked), bool(info.overflowed)) == (EXPECTED.spiked[step], EXPECTED.skipped[step])
        assert bool(info.applied) == (params[0].tolist() != before) == (not (info.spiked or info.overflowed))
        assert scaler.get_scale() == EXPECTED.loss_scale_after[step]
    assert scaler.state_dict()["guard"]["norms"] == len(EXPECTED.skipped) - EXPECTED.skipped.sum()
    assert scaler.metrics()["spikes"] == EXPECTED.spiked.sum()
    assert f"refused {EXPECTED.spiked.sum()} spikes" in scaler.diagnose()


@EITHER_KIND
def test_each_optimizer_has_norms_of_its_own(fused):
    """A large norm of one is no spike of another, also after a restart; a spike skips one optimizer."""
    params, optimizers = _pair(fused)
    scaler = GradScaler("cpu", init_scale=2.0**4, guard=GUARD)
    for step in range(12):
        if step == 6:
            saved, scaler = scaler.state_dict(), GradScaler("cpu", guard=GUARD)
            scaler.load_state_dict(saved)
        sizes = (0.5, 2500.0 if step == 8 else 50.0)
        prepare = [(scaler.unscale_, each) for each in optimizers] if step % 2 else []
        info = _step(scaler, params, optimizers, *sizes, prepare=prepare)
        assert bool(info.spiked) == (step == 8)
        assert [bool(info.applied_of(each)) for each in optimizers] == [True, step != 8]
    first, second = scaler.state_dict()["guard"]
    assert (first["mean"], first["spikes"]) == (pytest.approx(0.5**0.5), 0)
    assert (second["spikes"], second["norms"]) == (1, 12.0)
    assert second["mean"] > 50.0 * 2**0.5


@pytest.mark.parametrize("order", [2.0, 3.0])
def test_several_optimizers_clipped_together_have_one_norm(order):
    """Then a spike skips all of them, and is no overflow, also after two passes."""
    params, optimizers = _pair()
    scaler = GradScaler("cpu", guard=GUARD)
    for size in [1.0] * 8 + [100.0]:
        info = _step(
            scaler, params, optimizers, size, 1.0, prepare=[(scaler.unscale_and_clip_, optimizers, 1.0, order)]
        )
    assert (info.spiked, info.overflowed, scaler.get_scale()) == (True, False, 2.0**16)
    assert [info.applied_of(optimizer) for optimizer in optimizers] == [False, False]


def test_a_streak_of_spikes_raises_where_the_host_knows():
    """At the guard's `max_streak`; the error names the norm of its own optimizer, and not the last one."""
    params, optimizers = _pair()
    scaler = GradScaler("cpu", guard=SpikeGuard(warmup=4, max_streak=2))
    for size in [0.5] * 5 + [50.0]:
        _step(scaler, params, optimizers, size, 1.0)
    with pytest.raises(OverflowStreakError, match=r"norm of 70\.7.*number 2 in a row"):
        _step(scaler, params, optimizers, 50.0, 1.0)


def test_without_scaling_the_guard_decides_alone():
    """As for bfloat16: `policy="none"` still skips spikes and overflows."""
    params, optimizers = _pair()
    scaler = GradScaler("cpu", policy="none", guard=GUARD)
    applied = [_step(scaler, params, optimizers, size, 1.0).applied for size in [1.0] * 6 + [INF, 1.0, 50.0, 1.0]]
    assert applied == [True] * 6 + [False, True, False, True]
    assert scaler.get_scale() == 1.0


def test_a_replayed_graph_still_checks():
    """The state is written in place, so that each replay compares with the norms of those before."""
    params, optimizers = _pair(fused=True)
    scaler = GradScaler("cpu", init_scale=2.0**10, guard=GUARD)
    scaler.place_on("cpu")
    params[0].grad = torch.ones(2)

    def step():
        scaler.unscale_and_clip_(optimizers[0], INF)
        scaler.step(optimizers[0])
        scaler.update()

    step()  # the guard's state is then on the host
    with RecordedGraph() as graph:
        step()
    scaler.load_state_dict(GradScaler("cpu", init_scale=2.0**10, guard=GUARD).state_dict())
    applied = []
    for size in [1.0] * 8 + [50.0, INF, 1.0]:
        params[0].grad.fill_(size * scaler.get_scale())
        before = params[0].tolist()
        graph.replay()
        applied.append(params[0].tolist() != before)
    assert applied == [True] * 8 + [False, False, True]
    assert scaler.state_dict()["guard"]["spikes"] == 1
    assert scaler.get_scale() == 2.0**9


# -- SameOnRanks -------------------------------------------------------------------------------------------------------


def _veto_on_one_rank(rank, world_size, fused):
    """Step with a veto, a spike and an overflow that one rank alone can see; all ranks skip these steps."""
    veto = _Veto()
    param = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([param], lr=1.0, fused=fused)
    scaler = GradScaler("cpu", init_scale=8.0, process_group=dist.group.WORLD, hooks=[veto], guard=GUARD)
    for step in range(10):
        veto.is_on = step == 7 and rank == 1
        size = {8: 50.0, 9: INF}.get(step, 1.0) if rank == 1 else 1.0
        info = _step(scaler, [param], [optimizer], size)
        assert (bool(info.spiked), bool(info.overflowed)) == (step == 8, step == 9)
        assert bool(info.applied) == (step < 7)
    assert (param[0].item(), scaler.get_scale()) == (-6.0, 4.0)


@EITHER_KIND
def test_one_ranks_veto_spike_or_overflow_skips_on_all(fused):
    """Each as what it is, so that a veto and a spike leave the loss scale."""
    _on_ranks(2, partial(_veto_on_one_rank, fused=fused))


# -- Protect -----------------------------------------------------------------------------------------------------------

X = torch.linspace(-1.0, 3.0, 32).reshape(8, 4)


def _model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))


def _buffers(module):
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


def _same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


class _Loop:
    """A plain loop around a protected model."""

    def __init__(self, fused=False, model=None, protect=None, **settings):
        self.model = model or _model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, fused=fused)
        self.scaler = GradScaler("cpu", protect=self.model if protect is None else protect, **settings)

    def step(self, is_bad=False, clip=False):
        """Take a step; if it is bad, its forward pass overflows, and the statistics become infinite or NaN."""
        self.optimizer.zero_grad()
        self.scaler.scale(self.model(X * INF if is_bad else X).square().mean()).backward()
        if clip:
            self.scaler.unscale_and_clip_(self.optimizer, INF)
        self.scaler.step(self.optimizer)
        return self.scaler.update()

    def require_skipped(self, before=None):
        """Take a bad step; the buffers are then as before it."""
        before = before or _buffers(self.model)
        assert not self.step(is_bad=True).applied
        assert _same(before, _buffers(self.model))


@settings(max_examples=60)
@given(bad=st.lists(st.booleans(), max_size=12), fused=st.booleans(), clip=st.booleans(), place=st.integers(0, 2))
def test_any_pattern_of_skips_equals_a_loop_that_never_saw_those_batches(bad, fused, clip, place):
    """Buffers and weights agree bit for bit: of a protected model, of one within, or around it and never called."""
    model = _model()
    protect = (model, [model[1]], torch.nn.ModuleList([model]))[place]
    loop = _Loop(fused, model=model, protect=protect, policy=FixedScaling(8.0))
    plain = _Loop(fused, protect=(), policy=FixedScaling(8.0))
    for is_bad in bad:
        assert bool(loop.step(is_bad, clip).applied) != is_bad
        if not is_bad:
            plain.step()
    assert _same(_buffers(loop.model), _buffers(plain.model))
    assert all(torch.equal(a, b) for a, b in zip(loop.model.parameters(), plain.model.parameters(), strict=True))


class _Counts(torch.nn.Module):
    """A module with buffers of three kinds, to which each forward pass adds 1."""

    def __init__(self):
        super().__init__()
        self.register_buffer("dense", torch.zeros(2))
        self.register_buffer("sparse", torch.zeros(2).to_sparse())
        self.register_buffer("expanded", torch.zeros(1).expand(2))

    def forward(self, x):
        self.dense, self.expanded = self.dense + 1.0, self.expanded + 1.0
        self.sparse = self.sparse + torch.ones(2).to_sparse()
        return x


def test_buffers_that_cannot_be_written_stay():
    """Sparse and expanded ones keep what a skipped step wrote; a dense one beside them comes back."""
    model = torch.nn.Sequential(_Counts(), _model())
    loop = _Loop(model=model)
    assert not loop.step(is_bad=True).applied
    counts = {kind: buffer.to_dense().tolist() for kind, buffer in model[0].named_buffers()}
    assert counts == {"dense": [0.0, 0.0], "sparse": [1.0, 1.0], "expanded": [1.0, 1.0]}


def test_every_skip_counts_and_a_disabled_scaler_protects_nothing():
    """Without scaling, by the user, and by a veto."""
    _Loop(policy=NoScaling()).require_skipped()
    veto = _Veto()
    for leave_out in (True, False):
        loop = _Loop(hooks=[veto])
        before, veto.is_on = _buffers(loop.model), not leave_out
        loop.scaler.scale(loop.model(X).mean()).backward()
        (loop.scaler.skip if leave_out else loop.scaler.step)(loop.optimizer)
        assert not loop.scaler.update().applied
        assert _same(before, _buffers(loop.model))
    disabled = _Loop(enabled=False)
    assert not disabled.model._forward_pre_hooks
    disabled.step()
    assert disabled.model[1].num_batches_tracked.item() == 1


@EITHER_KIND
def test_the_copy_is_of_the_first_forward_that_trains(fused):
    """Several forwards make one step; one in evaluation mode copies nothing, and a skip then takes nothing back."""
    loop = _Loop(fused)
    loop.model.eval()(X)
    loop.model[1].running_mean.fill_(7.0)  # by hand, after the forward that does not count
    before = _buffers(loop.model)
    loop.model.train()
    loop.model(X)
    loop.model(X)
    loop.require_skipped(before)
    loop.step()
    loop.model.eval()
    loop.require_skipped()


@EITHER_KIND
@pytest.mark.parametrize("how", ["before the forward", "after a forward", "after a skip", "a part", "by hand"])
def test_what_was_loaded_in_between_is_not_undone(fused, how):
    """A skip returns to a state that was loaded after an update, or after a forward that no step followed."""
    loop = _Loop(fused)
    loop.step(is_bad=how == "after a skip")
    loaded = copy.deepcopy(loop.model)
    for buffer in loaded.buffers():
        buffer += 1
    if how in {"after a forward", "a part"}:
        loop.model(X)
    if how == "a part":
        loop.model[1].load_state_dict(loaded[1].state_dict())
    elif how == "by hand":
        for buffer, value in zip(loop.model.buffers(), loaded.buffers(), strict=True):
            buffer.copy_(value)
    else:
        loop.model.load_state_dict(loaded.state_dict())
    loop.require_skipped(_buffers(loaded))


def test_a_graph_that_is_still_to_run_backward_stays_valid():
    """Putting statistics back does not count as a change of what that graph has kept."""
    loop = _Loop(fused=True)
    waiting = loop.model(X).square().mean()
    loop.step(is_bad=True)
    waiting.backward()


class _Reassigning(torch.nn.Module):
    """A layer that puts new tensors in the place of its statistics, and grows a cache."""

    def __init__(self, device):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4, device=device))
        self.register_buffer("cache", torch.zeros(1, device=device), persistent=False)

    def forward(self, x):
        self.mean = self.mean.lerp(x.mean(0), 0.5)
        self.cache = torch.zeros(len(x), device=x.device)


@EITHER_KIND
@pytest.mark.parametrize("device", ["cpu", "mps"])
def test_buffers_come_back_by_their_names(device, fused):
    """Also on a device, and where a forward pass has put other tensors; a cache that it has made stays."""
    with Emulated("mps"):
        model, param = _Reassigning(device), torch.nn.Parameter(torch.ones(4, device=device))
        optimizer = torch.optim.SGD([param], lr=0.5, fused=fused)
        scaler = GradScaler(device, policy=FixedScaling(4.0), protect=[model])
        scaler.place_on(device)
        for size in (1.0, INF, 1.0, math.nan):
            before, model.cache = model.mean.cpu(), torch.zeros(1, device=device)
            param.grad = torch.full((4,), size, device=device)
            model(torch.full((8, 4), size, device=device))
            scaler.step(optimizer)
            scaler.update()
            assert torch.equal(before, model.mean.cpu()) == (size != 1.0)
            assert len(model.cache) == 8


@pytest.mark.filterwarnings("default:The .grad attribute")  # Dynamo's own, where it resumes after the hook
@pytest.mark.parametrize("compiled", ["module", "inner", "in place", "function"])
def test_a_compiled_module_is_protected(compiled):
    """Before or after it was compiled, in place, or called by a compiled function."""
    torch._dynamo.reset()
    model = _model()
    runs = torch.compile(model, backend="eager") if compiled in {"module", "inner"} else model
    loop = _Loop(model=model, protect=[runs if compiled == "module" else model])
    if compiled == "in place":
        model.compile(backend="eager")
    loop.model = torch.compile(lambda x: model(x), backend="eager") if compiled == "function" else runs
    for is_bad in (False, True, False, True):
        before = _buffers(model)
        assert loop.step(is_bad).applied != is_bad
        assert _same(before, _buffers(model)) == is_bad


def test_the_hooks_end_with_the_scaler_and_keep_nothing_alive():
    """Neither the scaler, nor the modules."""
    loop, kept = _Loop(), _Loop()
    loop.step()
    hooks = [loop.model._forward_pre_hooks, loop.model[1]._load_state_dict_post_hooks]
    assert all(hooks)
    del loop.scaler
    assert not any(hooks)
    model = weakref.ref(kept.model)
    del kept.model, kept.optimizer
    gc.collect()
    assert model() is None


@COPIES
def test_a_copy_of_a_scaler_protects_nothing_and_says_so(copied):
    """Two scalers would put back the same buffers, each at its own updates; a pickle holds no modules."""
    loop = _Loop()
    original = loop.scaler
    with pytest.warns(UserWarning, match="a copy or a pickle of a scaler protects no modules"):
        loop.scaler = copied(original)
    loop.step(is_bad=True)
    assert loop.model[1].running_mean.isnan().all()
    assert len(loop.model._forward_pre_hooks) == len(_Loop().model._forward_pre_hooks)


def test_a_protected_model_can_be_copied_and_saved():
    """The copy has no part in the scaler: its buffers stay as its own forward leaves them."""
    loop = _Loop()
    for other in (copy.deepcopy(loop.model), pickle.loads(pickle.dumps(loop.model))):
        other(X)
        other.load_state_dict(other.state_dict())
        assert not loop.step(is_bad=True).applied
        assert (other[1].num_batches_tracked.item(), loop.model[1].num_batches_tracked.item()) == (1, 0)
