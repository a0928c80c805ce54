"""What hangs on a step: hooks of one's own, and what `protect=` appends; `test_torch_guard.py` is about `guard=`."""

import copy
import gc
import math
import pickle
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lossscale_core import FixedScaling, NoScaling, SpikeGuard
from lossscale_torch import GradScaler
from tests.adapters.emulated_device import Emulated
from tests.adapters.torch_steps import COPIES, EITHER_KIND, INF, Loop, Veto, copies, one, same, two


def _steps(scaler, params, optimizers, *sizes):
    """Take a step of each optimizer with gradients of these sizes."""
    for optimizer in optimizers:
        optimizer.zero_grad()
    scaler.scale(sum((param * size).sum() for param, size in zip(params, sizes, strict=True))).backward()
    for optimizer in optimizers:
        scaler.step(optimizer)
    return scaler.update()


# -- hooks of one's own ------------------------------------------------------------------------------------------------


def test_hooks_are_called_in_their_order():
    """Those of `hooks=` first to last at each of three points; the last is once, at the update that ends the step."""
    calls = []
    params, optimizers = two()
    scaler = GradScaler("cpu", hooks=[Veto("a", calls), Veto("b", calls)], updates_per_step=2)
    scaler.scale(sum(param.sum() for param in params)).backward()
    for optimizer in optimizers:
        scaler.step(optimizer)
        scaler.update()
    of_each = [(name, when, id(each)) for each in optimizers for when in ("before", "after") for name in "ab"]
    assert calls == [*of_each, ("a", "update", True), ("b", "update", True)]


def test_an_entry_of_a_hook_is_saved_and_restored():
    """Beside the scaler's own, under a name of the hook's; a checkpoint without it loads, too."""
    scaler = GradScaler("cpu", hooks=[Veto("mine")])
    _steps(scaler, *two(), 1.0, 1.0)
    resumed = GradScaler("cpu", hooks=[Veto("mine")])
    resumed.load_state_dict(scaler.state_dict())
    assert resumed.state_dict() == scaler.state_dict()
    assert resumed.state_dict()["mine"] == 1
    resumed.load_state_dict(torch.amp.GradScaler("cpu").state_dict())
    assert resumed.state_dict()["mine"] == 0


@COPIES
def test_a_copy_has_hooks_and_a_guard_of_its_own(copied):
    """They begin in the same state, and go on alone, with no memory in common."""
    veto = Veto()
    params, optimizers = two()
    scaler = GradScaler("cpu", hooks=[veto], guard=SpikeGuard())
    for size in (1.0, 2.0):
        _steps(scaler, params, optimizers, size, 1.0)
    other, before = copied(scaler), scaler.state_dict()
    assert other.state_dict() == before
    veto.value = 1.0
    assert _steps(other, params, optimizers, 3.0, 1.0).applied
    assert other.state_dict()["guard"] != before["guard"]
    assert scaler.state_dict() == before
    assert not _steps(scaler, params, optimizers, 3.0, 1.0).applied
    assert (other.state_dict()["veto"], scaler.state_dict()["veto"]) == (3, 3)


# -- a new scaler ------------------------------------------------------------------------------------------------------


def test_a_new_scaler_beside_an_optimizer_that_has_stepped():
    """No warning, which would be an error here, without scaling, and where the older optimizer comes later."""
    param = torch.nn.Parameter(torch.ones(2))
    param.grad = torch.ones(2)
    new, old = torch.optim.AdamW([param]), torch.optim.AdamW([param])
    old.step()
    assert _steps(GradScaler("cpu", policy="none"), [param], [old], 1.0).applied
    scaler = GradScaler("cpu")
    for optimizer in (new, old):
        assert _steps(scaler, [param], [optimizer], 1.0).applied


# -- Protect -----------------------------------------------------------------------------------------------------------

BATCH = torch.linspace(-1.0, 3.0, 32).reshape(8, 4)


def _step(loop, is_bad=False, clips=False):
    """Take a step; if it is bad, its forward pass overflows, and the statistics become infinite or NaN."""
    loop.backward(BATCH * INF if is_bad else BATCH)
    if clips:
        loop.scaler.unscale_and_clip_(loop.optimizer, INF)
    loop.scaler.step(loop.optimizer)
    return loop.scaler.update()


def _require_skipped(loop, before=None):
    """Take a bad step; the buffers are then as before it."""
    before = before or loop.buffers()
    assert not _step(loop, is_bad=True).applied
    assert same(before, loop.buffers())


def _counts(loop):
    return loop.model[1].num_batches_tracked.item()


@settings(max_examples=60)
@given(bad=st.lists(st.booleans(), max_size=12), fused=st.booleans(), clips=st.booleans(), place=st.integers(0, 2))
def test_any_pattern_of_skips_equals_a_loop_that_never_saw_those_batches(bad, fused, clips, place):
    """Buffers and weights agree bit for bit: of a protected model, of one within, or around it and never called."""
    plain = Loop(fused, policy=FixedScaling(8.0))
    model = copy.deepcopy(plain.model)
    protect = (model, [model[1]], torch.nn.ModuleList([model]))[place]
    loop = Loop(fused, model=model, protects=protect, policy=FixedScaling(8.0))
    for is_bad in bad:
        assert bool(_step(loop, is_bad, clips).applied) != is_bad
        if not is_bad:
            _step(plain)
    assert same(loop.buffers(), plain.buffers())
    assert same(loop.model.parameters(), plain.model.parameters())


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
    loop = Loop(protects=True, model=torch.nn.Sequential(_Counts(), torch.nn.Linear(4, 1)))
    assert not _step(loop, is_bad=True).applied
    counts = {kind: buffer.to_dense().tolist() for kind, buffer in loop.model[0].named_buffers()}
    assert counts == {"dense": [0.0, 0.0], "sparse": [1.0, 1.0], "expanded": [1.0, 1.0]}


def test_every_skip_counts_and_a_disabled_scaler_protects_nothing():
    """Without scaling, by the user, and by a veto."""
    _require_skipped(Loop(protects=True, policy=NoScaling()))
    veto = Veto()
    for leaves_out in (True, False):
        loop = Loop(protects=True, hooks=[veto])
        before, veto.value = loop.buffers(), float(not leaves_out)
        loop.backward()
        (loop.scaler.skip if leaves_out else loop.scaler.step)(loop.optimizer)
        assert not loop.scaler.update().applied
        assert same(before, loop.buffers())
    disabled = Loop(protects=True, enabled=False)
    assert not disabled.model._forward_pre_hooks
    _step(disabled)
    assert _counts(disabled) == 1


@EITHER_KIND
def test_the_copy_is_of_the_first_forward_that_trains(fused):
    """Several forwards make one step; one in evaluation mode copies nothing, and a skip then takes nothing back."""
    loop = Loop(fused, protects=True)
    loop.model.eval()(BATCH)
    loop.model[1].running_mean.fill_(7.0)  # by hand, after the forward that does not count
    before = loop.buffers()
    loop.model.train()
    loop.model(BATCH)
    loop.model(BATCH)
    _require_skipped(loop, before)
    _step(loop)
    loop.model.eval()
    _require_skipped(loop)


@EITHER_KIND
@pytest.mark.parametrize("how", ["before the forward", "after a forward", "after a skip", "a part", "by hand"])
def test_what_was_loaded_in_between_is_not_undone(fused, how):
    """A skip returns to a state that was loaded after an update, or after a forward that no step followed."""
    loop = Loop(fused, protects=True)
    _step(loop, is_bad=how == "after a skip")
    loaded = copy.deepcopy(loop.model)
    for buffer in loaded.buffers():
        buffer += 1
    if how in {"after a forward", "a part"}:
        loop.model(BATCH)
    if how == "a part":
        loop.model[1].load_state_dict(loaded[1].state_dict())
    elif how == "by hand":
        for buffer, value in zip(loop.model.buffers(), loaded.buffers(), strict=True):
            buffer.copy_(value)
    else:
        loop.model.load_state_dict(loaded.state_dict())
    _require_skipped(loop, copies(loaded.buffers()))


def test_a_graph_that_is_still_to_run_backward_stays_valid():
    """Putting statistics back does not count as a change of what that graph has kept."""
    loop = Loop(fused=True, protects=True)
    waiting = loop.model(BATCH).square().mean()
    _step(loop, is_bad=True)
    waiting.backward()


class _Reassigning(torch.nn.Module):
    """A layer that puts new tensors in the place of its statistics, makes one late, and grows a cache."""

    def __init__(self, device):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4, device=device))
        self.register_buffer("first", None)
        self.register_buffer("cache", torch.zeros(1, device=device), persistent=False)

    def forward(self, x):
        self.mean = self.mean.lerp(x.mean(0), 0.5)
        self.first = x.mean() if self.first is None else self.first
        self.cache = torch.zeros(len(x), device=x.device)


@EITHER_KIND
@pytest.mark.parametrize("device", ["cpu", "mps"])
def test_buffers_come_back_by_their_names(device, fused):
    """Also on a device, and where a forward pass has put other tensors; a cache that it has made stays."""
    with Emulated("mps"):
        model, (param, optimizer) = _Reassigning(device), one(fused, device)
        scaler = GradScaler(device, policy=FixedScaling(4.0), protect=[model])
        scaler.place_on(device)
        for step, size in enumerate((math.nan, 1.0, INF, 1.0, math.nan)):
            before, model.cache = model.mean.cpu(), torch.zeros(1, device=device)
            param.grad = torch.full((1,), size, device=device)
            model(torch.full((8, 4), size, device=device))
            scaler.step(optimizer)
            scaler.update()
            assert torch.equal(before, model.mean.cpu()) == (size != 1.0)
            assert len(model.cache) == 8
            assert (model.first is None) == (step == 0) or device == "mps"  # where a fused step is not waited for


@pytest.mark.filterwarnings("default:The .grad attribute")  # Dynamo's own, where it resumes after the hook
@pytest.mark.parametrize("compiled", ["module", "inner", "in place", "function"])
def test_a_compiled_module_is_protected(compiled):
    """Before or after it was compiled, in place, or called by a compiled function."""
    torch._dynamo.reset()
    loop = Loop()
    model = loop.model
    runs = torch.compile(model, backend="eager") if compiled in {"module", "inner"} else model
    loop.scaler = GradScaler("cpu", protect=[runs if compiled == "module" else model])
    if compiled == "in place":
        model.compile(backend="eager")
    loop.model = torch.compile(lambda x: model(x), backend="eager") if compiled == "function" else runs
    for is_bad in (False, True, False, True):
        before = copies(model.buffers())
        assert _step(loop, is_bad).applied != is_bad
        assert same(before, model.buffers()) == is_bad


def test_the_hooks_end_with_the_scaler_and_keep_nothing_alive():
    """Neither the scaler, nor the modules."""
    loop, kept = Loop(protects=True), Loop(protects=True)
    _step(loop)
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
    loop = Loop(protects=True)
    original, hooks = loop.scaler, len(loop.model._forward_pre_hooks)
    with pytest.warns(UserWarning, match="a copy or a pickle of a scaler protects no modules"):
        loop.scaler = copied(original)
    _step(loop, is_bad=True)
    assert loop.model[1].running_mean.isnan().all()
    assert len(loop.model._forward_pre_hooks) == hooks


def test_a_protected_model_can_be_copied_and_saved():
    """The copy has no part in the scaler: its buffers stay as its own forward leaves them."""
    loop = Loop(protects=True)
    for other in (copy.deepcopy(loop.model), pickle.loads(pickle.dumps(loop.model))):
        other(BATCH)
        other.load_state_dict(other.state_dict())
        assert not _step(loop, is_bad=True).applied
        assert (other[1].num_batches_tracked.item(), _counts(loop)) == (1, 0)
