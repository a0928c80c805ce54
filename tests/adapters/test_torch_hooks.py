"""Hooks of a program, and the hook of `protect=`. `test_torch_transactions.py` tests which buffers a skip restores."""

import copy
import math
import pickle

import pytest
import torch

from lossscale_core import FixedScaling, SpikeGuard
from lossscale_torch import GradScaler
from tests.adapters.emulated_device import Emulated
from tests.adapters.torch_steps import COPIES, EITHER_KIND, INF, Loop, Veto, copies, one, same, take_steps, two

# -- hooks of a program ------------------------------------------------------------------------------------------------


def test_hooks_are_called_in_their_order():
    """`step` calls the hooks before and after an optimizer, and `update` calls them once, in the order of `hooks=`."""
    calls = []
    params, optimizers = two()
    scaler = GradScaler("cpu", hooks=[Veto("a", calls), Veto("b", calls)])
    take_steps(params, optimizers, scaler, 1.0, 1.0)
    of_each = [(name, when, id(each)) for each in optimizers for when in ("before", "after") for name in "ab"]
    assert calls == [*of_each, ("a", "update", True), ("b", "update", True)]


def _loaded(scaler):
    """Return a new scaler that continues from the state of another."""
    other = GradScaler("cpu", hooks=[Veto()], guard=SpikeGuard())
    other.load_state_dict(scaler.state_dict())
    return other


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each)), _loaded])
def test_copies_have_their_own_hooks(copied):
    """The hooks and the guard of a copy begin with the same state and share no memory, as after a restart."""
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


def test_a_later_backward_pass_stays_valid():
    """Autograd does not count a restored buffer as changed, so that an earlier graph can still run backward."""
    loop = Loop(fused=True, protects=True)
    waiting = loop.model(BATCH).square().mean()
    _step(loop, is_bad=True)
    waiting.backward()


def test_added_buffers_are_protected():
    """A skipped step restores buffers of a layer that was added after an earlier step."""
    loop = Loop(protects=True)
    assert _step(loop).applied
    loop.model[0].add_module("norm", torch.nn.BatchNorm1d(4))
    loop.model[0].register_forward_hook(lambda module, inputs, output: module.norm(output))
    before = loop.buffers()
    assert not _step(loop, is_bad=True).applied
    assert same(before, loop.buffers())


class _Reassigning(torch.nn.Module):
    """A layer that replaces its statistics by new tensors, makes a tensor late, and grows a cache."""

    def __init__(self, device):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4, device=device))
        self.register_buffer("first", None)
        self.register_buffer("cache", torch.zeros(1, device=device), persistent=False)
        self.register_buffer("sparse", torch.zeros(1).to_sparse())
        self.register_buffer("expanded", torch.zeros(1).expand(2))

    def forward(self, x):
        self.mean = self.mean.lerp(x.mean(0), 0.5)
        self.first = x.mean() if self.first is None else self.first
        self.cache = torch.zeros(len(x), device=x.device)
        self.sparse, self.expanded = self.sparse + self.sparse, self.expanded + 1.0


@EITHER_KIND
@pytest.mark.parametrize("device", ["cpu", "mps"])
def test_replaced_buffers_are_restored(device, fused):
    """A skipped step restores a buffer that the forward pass has replaced by another tensor."""
    with Emulated("mps"):
        model, (param, optimizer) = _Reassigning(device), one(fused, device)
        # The `ModuleList` need not live on.
        scaler = GradScaler(device, policy=FixedScaling(4.0), protect=torch.nn.ModuleList([model]))
        scaler.place_on(device)
        for step, size in enumerate((math.nan, 1.0, INF, 1.0, math.nan)):
            before, model.cache = model.mean.cpu(), torch.zeros(1, device=device)
            # A skipped step leaves sparse and expanded buffers, and a cache that the forward pass has made.
            model.sparse, model.expanded = torch.ones(1).to_sparse(), torch.zeros(1).expand(2)
            param.grad = torch.full((1,), size, device=device)
            model(torch.full((8, 4), size, device=device))
            scaler.step(optimizer)
            scaler.update()
            assert torch.equal(before, model.mean.cpu()) == (size != 1.0)
            assert len(model.cache) == 8
            assert (model.sparse.to_dense().item(), model.expanded.tolist()) == (2.0, [1.0, 1.0])
            assert (model.first is None) == (step == 0) or device == "mps"  # where a fused step is not waited for


@pytest.mark.filterwarnings("default:The .grad attribute")  # Dynamo's own, where it resumes after the hook
@pytest.mark.parametrize("kind", ["module", "function"])
def test_a_compiled_module_is_protected(kind):
    """A skipped step restores the buffers of a compiled module, and of a module that a compiled function calls."""
    torch._dynamo.reset()
    loop = Loop()
    model = loop.model
    loop.model = torch.compile(model if kind == "module" else lambda x: model(x), backend="eager")
    loop.scaler = GradScaler("cpu", protect=[loop.model if kind == "module" else model])
    for is_bad in (False, True, False, True):
        before = copies(model.buffers())
        assert _step(loop, is_bad).applied != is_bad
        assert same(before, model.buffers()) == is_bad


def test_forward_hooks_end_with_their_scaler():
    """A protected module has forward hooks until its scaler is deleted, which a loop over tries does not delay."""
    loop = Loop(protects=True)
    loop.retry()
    hooks = [loop.model._forward_pre_hooks, loop.model[1]._load_state_dict_post_hooks]
    assert all(hooks)
    del loop.scaler
    assert not any(hooks)


@COPIES
def test_copied_scalers_protect_nothing(copied):
    """A copy or a pickle of a scaler has neither its modules nor its optimizers, and warns."""
    with pytest.warns(UserWarning, match="rescales no gradients; make a scaler with protect= or optimizers=, and load"):
        copied(GradScaler("cpu", optimizers=[one()[1]]))
    loop = Loop(protects=True)
    original = loop.scaler
    with pytest.warns(UserWarning, match="a copy or a pickle of a scaler protects no modules"):
        loop.scaler = copied(original)
    _step(loop, is_bad=True)
    assert loop.model[1].running_mean.isnan().all()


def test_copied_models_are_not_restored():
    """A scaler does not restore the buffers of a copy or a pickle of a protected model."""
    loop = Loop(protects=True)
    for other in (copy.deepcopy(loop.model), pickle.loads(pickle.dumps(loop.model))):
        other(BATCH)
        other.load_state_dict(other.state_dict())
        assert not _step(loop, is_bad=True).applied
        assert [model[1].num_batches_tracked.item() for model in (other, loop.model)] == [1, 0]
