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
from tests.adapters.recorded_graph import RecordedGraph
from tests.adapters.torch_steps import COPIES, EITHER_KIND, INF, Loop, Veto, copies, one, same, take_steps, two

# -- hooks of one's own ------------------------------------------------------------------------------------------------


def test_hooks_are_called_in_their_order():
    """Those of `hooks=` first to last at each of three points; the last is once, at the update that ends the step."""
    calls = []
    params, optimizers = two()
    scaler = GradScaler("cpu", hooks=[Veto("a", calls), Veto("b", calls)])
    scaler.scale(sum(param.sum() for param in params)).backward()
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    of_each = [(name, when, id(each)) for each in optimizers for when in ("before", "after") for name in "ab"]
    assert calls == [*of_each, ("a", "update", True), ("b", "update", True)]


def _loaded(scaler):
    """Return a new scaler that continues from the state of another."""
    other = GradScaler("cpu", hooks=[Veto()], guard=SpikeGuard())
    other.load_state_dict(scaler.state_dict())
    return other


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each)), _loaded])
def test_a_copy_has_hooks_and_a_guard_of_its_own(copied):
    """They begin in the same state, as after a restart, and go on alone, with no memory in common."""
    veto = Veto()
    params, optimizers = two()
    scaler = GradScaler("cpu", hooks=[veto], guard=SpikeGuard())
    for size in (1.0, 2.0):
        take_steps(params, optimizers, scaler, size, 1.0)
    other, before = copied(scaler), scaler.state_dict()
    assert other.state_dict() == before
    veto.value = 1.0
    assert take_steps(params, optimizers, other, 3.0, 1.0).applied
    assert other.state_dict()["guard"] != before["guard"]
    assert scaler.state_dict() == before
    assert not take_steps(params, optimizers, scaler, 3.0, 1.0).applied
    assert (other.state_dict()["veto"], scaler.state_dict()["veto"]) == (3, 3)


# -- Protect -----------------------------------------------------------------------------------------------------------

BATCH = torch.linspace(-1.0, 3.0, 32).reshape(8, 4)


def _step(loop, is_bad=False):
    """Take a step; if it is bad, its forward pass overflows, and the statistics become infinite or NaN."""
    return loop.step(batch=BATCH * INF if is_bad else BATCH)


def _act(loop, kind):
    """Do what may come between two steps."""
    module = loop.model[1] if kind == "load a part" else loop.model
    if kind == "forward":
        loop.model(BATCH)
    elif kind == "evaluate":
        loop.model.eval()(BATCH)
        loop.model.train()
    elif kind.startswith("load"):
        names = {name for name, _ in module.named_buffers()}
        module.load_state_dict({name: value + (name in names) for name, value in module.state_dict().items()})
    else:
        for buffer in loop.model.buffers():
            buffer += 1


BETWEEN = st.lists(st.sampled_from(["forward", "evaluate", "load", "load a part", "write"]), max_size=3)
STEPS = st.tuples(BETWEEN, st.sampled_from(["good", "good", "overflow", "clipped overflow", "veto", "skip"]))


@settings(max_examples=100)
@given(
    steps=st.lists(STEPS, max_size=8), fused=st.booleans(), place=st.integers(0, 2),
    policy=st.sampled_from([FixedScaling(8.0), NoScaling()]),
)  # fmt: skip
def test_a_skip_returns_to_the_buffers_before_the_step(steps, fused, place, policy):
    """To those before the first forward pass that trained since the last update, or to a state that was loaded since.

    Bit for bit, and so are the weights; the buffers of an applied step stay. A model is protected itself, or a module
    within, or one around it that is never called.
    """
    veto, model = Veto(), Loop().model
    protects = (model, [model[1]], torch.nn.ModuleList([model]))[place]
    loop = Loop(fused, model=model, protects=protects, policy=policy, hooks=[veto])
    for actions, kind in steps:
        before = None
        for each in actions:
            if each == "forward" and before is None:
                before = loop.buffers()
            _act(loop, each)
            before = None if each.startswith("load") else before
        before, weights = before or loop.buffers(), copies(model.parameters())
        loop.backward(BATCH * INF if "overflow" in kind else BATCH)
        after, veto.value = loop.buffers(), float(kind == "veto")
        if kind == "clipped overflow":
            loop.scaler.unscale_and_clip_(loop.optimizer, INF)
        (loop.scaler.skip if kind == "skip" else loop.scaler.step)(loop.optimizer)
        assert bool(loop.scaler.update().applied) == (kind == "good")
        assert same(loop.buffers(), after if kind == "good" else before)
        assert same(model.parameters(), weights) != (kind == "good")


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


def test_a_graph_that_is_still_to_run_backward_stays_valid():
    """Putting statistics back does not count as a change of what that graph has kept."""
    loop = Loop(fused=True, protects=True)
    waiting = loop.model(BATCH).square().mean()
    _step(loop, is_bad=True)
    waiting.backward()


def _replace_batch_norm(model):
    model[1] = torch.nn.BatchNorm1d(4)


def _replace_buffer(model):
    model[1].running_mean = torch.full((4,), 3.0)


def _add(model):
    model[0].add_module("norm", torch.nn.BatchNorm1d(4))
    model[0].register_forward_hook(lambda module, inputs, output: module.norm(output))
    model[0].register_buffer("late", torch.zeros(3))


def _resize(model):
    model[2].seen.resize_(5).zero_()


@pytest.mark.parametrize("change", [_replace_batch_norm, _replace_buffer, _add, _resize])
def test_modules_and_buffers_that_change_between_two_steps_are_protected(change):
    """A module or a buffer that was added or replaced after a step, or resized, comes back after a skipped step.

    A buffer that an earlier hook of the model writes before the forward pass comes back, too.
    """
    model = Loop().model
    model[2].register_buffer("seen", torch.zeros(3))
    model.register_forward_pre_hook(lambda module, inputs: setattr(module[2], "seen", module[2].seen.add_(1.0)))
    loop = Loop(protects=True, model=model)
    assert _step(loop).applied
    change(loop.model)
    before = loop.buffers()
    assert not _step(loop, is_bad=True).applied
    assert same(before, loop.buffers())
    assert _step(loop).applied
    assert not same(before, loop.buffers())
    loop.model[1] = torch.nn.Identity()
    assert not _step(loop, is_bad=True).applied


def test_buffers_on_a_device_come_back_by_one_select_for_each_dtype():
    """A fused step that a graph captures selects the floats of all modules together, and the counts together."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), *[torch.nn.BatchNorm1d(4) for _ in range(5)])
    loop = Loop(fused=True, protects=True, model=model)
    _step(loop)
    loop.scaler.place_on("cpu")  # the graph scales no loss
    with RecordedGraph() as graph:
        loop.model(BATCH)
        loop.scaler.unscale_(loop.optimizer)
        before = len(graph.operations)
        loop.scaler.step(loop.optimizer)
        loop.scaler.update()
    assert graph.operations[before:].count(torch.ops.aten.where.self) <= 2 + 2


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
    """Two scalers would put back the same buffers, each at its own updates; a pickle holds no modules or optimizers."""
    with pytest.warns(UserWarning, match="rescales no gradients; make a scaler with protect= or optimizers=, and load"):
        copied(GradScaler("cpu", optimizers=[one()[1]]))
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
        assert [model[1].num_batches_tracked.item() for model in (other, loop.model)] == [1, 0]
