"""`GradScaler(protect=...)`: buffers after a skipped step are as before it; averages follow applied steps."""

import copy
import gc
import io
import math
import pickle
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from lossscale_core import DynamicScaling, FixedScaling, NoScaling
from lossscale_torch import GradScaler
from tests.adapters.test_torch_synchronisation import _FusedOnMeta, _Synchronisations

EITHER_KIND = pytest.mark.parametrize("fused", [False, True], ids=["ordinary", "fused"])
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

    def __init__(self, fused=False, model=None, protect=None, **scaler):
        self.model = model or _model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, fused=fused)
        policy = scaler or {"policy": DynamicScaling(init_scale=8.0, growth_interval=3)}
        self.scaler = GradScaler("cpu", protect=[self.model] if protect is None else protect, **policy)

    def step(self, is_bad=False):
        """Take a step; if it is bad, its forward pass overflows, and the statistics become infinite or NaN."""
        self.optimizer.zero_grad()
        loss = self.model(X * math.inf if is_bad else X).square().mean()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        return self.scaler.update()


@EITHER_KIND
def test_a_skipped_step_leaves_the_statistics_as_they_were(fused):
    """Bit for bit, where torch's own loop keeps the NaN for good; an applied step keeps what it wrote."""
    loop, plain = _Loop(fused), _Loop(fused, protect=())
    for step, is_bad in enumerate([True, False, True, True, False]):
        before = _buffers(loop.model)
        assert bool(loop.step(is_bad).applied) != is_bad
        assert _same(before, _buffers(loop.model)) == is_bad, step
        plain.step(is_bad)
    assert loop.model[1].num_batches_tracked.item() == 2
    assert plain.model[1].num_batches_tracked.item() == 5
    assert loop.model[1].running_mean.isfinite().all()
    assert plain.model[1].running_mean.isnan().all()


@settings(max_examples=60)
@given(bad=st.lists(st.booleans(), max_size=12), fused=st.booleans(), clip=st.booleans(), inner=st.booleans())
def test_any_pattern_of_skips_equals_a_loop_that_never_saw_those_batches(bad, fused, clip, inner):
    """Buffers and weights agree bit for bit, whether the model or a part of it is protected."""
    model = _model()
    loop = _Loop(fused, model=model, protect=[model[1]] if inner else [model], policy=FixedScaling(8.0))
    plain = _Loop(fused, protect=(), policy=FixedScaling(8.0))
    for is_bad in bad:
        loop.optimizer.zero_grad()
        loop.scaler.scale(loop.model(X * math.nan if is_bad else X).square().mean()).backward()
        if clip:
            loop.scaler.unscale_and_clip_(loop.optimizer, math.inf)
        loop.scaler.step(loop.optimizer)
        loop.scaler.update()
        if not is_bad:
            plain.step()
    assert _same(_buffers(loop.model), _buffers(plain.model))
    assert all(torch.equal(a, b) for a, b in zip(loop.model.parameters(), plain.model.parameters(), strict=True))


@pytest.mark.parametrize("policy", [NoScaling(), FixedScaling(8.0)], ids=["none", "fixed"])
def test_every_policy_protects(policy):
    """Without any scaling, too; a disabled scaler skips nothing and protects nothing."""
    loop = _Loop(policy=policy)
    before = _buffers(loop.model)
    assert not loop.step(is_bad=True).applied
    assert _same(before, _buffers(loop.model))
    disabled = _Loop(enabled=False)
    assert not disabled.model._forward_pre_hooks
    disabled.step()
    assert disabled.model[1].num_batches_tracked.item() == 1


def test_a_step_that_the_user_leaves_out_is_a_skipped_one():
    """`skip` puts the buffers back, too."""
    loop = _Loop()
    before = _buffers(loop.model)
    loop.scaler.scale(loop.model(X).mean()).backward()
    loop.scaler.skip(loop.optimizer)
    assert not loop.scaler.update().applied
    assert _same(before, _buffers(loop.model))


def test_the_copy_is_of_the_first_forward_that_trains():
    """Several forwards make one step; one in evaluation mode copies nothing."""
    loop = _Loop()
    loop.model.eval()(X)
    loop.model[1].running_mean.fill_(7.0)  # by hand, after the forward that does not count
    loop.model.train()
    loop.model(X)
    loop.model(X)
    assert not loop.step(is_bad=True).applied
    assert loop.model[1].running_mean.tolist() == [7.0] * 4
    assert loop.model[1].num_batches_tracked.item() == 0


@EITHER_KIND
@pytest.mark.parametrize("how", ["before the forward", "after a forward", "after a skip", "a part", "by hand"])
def test_what_was_loaded_in_between_is_not_undone(fused, how):
    """A skip returns to a state that was loaded after an update, or after a forward that no step followed."""
    loop = _Loop(fused)
    loop.step(is_bad=how == "after a skip")
    loaded = {name: value + 1 for name, value in copy.deepcopy(loop.model.state_dict()).items()}
    if how == "after a forward":
        loop.model(X)
    if how == "a part":
        loop.model(X)
        loop.model[1].load_state_dict({name[2:]: loaded[name] for name in loaded if name.startswith("1.")})
    elif how == "by hand":
        with torch.no_grad():
            for name, buffer in loop.model.named_buffers():
                buffer.copy_(loaded[name])
    else:
        loop.model.load_state_dict(loaded)
    assert not loop.step(is_bad=True).applied
    assert _same({name: loaded[name] for name in _buffers(loop.model)}, _buffers(loop.model))


@EITHER_KIND
def test_a_forward_that_two_updates_follow(fused):
    """Samples serve the discriminator's step first; the generator's own skip puts its statistics back."""
    torch.manual_seed(0)
    makes, judges = _model(), torch.nn.Linear(4, 1)
    first, second = (torch.optim.SGD(module.parameters(), lr=0.1, fused=fused) for module in (judges, makes))
    scaler = GradScaler("cpu", init_scale=8.0, protect=[makes, judges])
    before = _buffers(makes)
    sample = makes(X)
    scaler.scale(judges(sample.detach()).square().mean()).backward()
    scaler.step(first)
    assert scaler.update().applied
    scaler.scale(judges(sample).mean() * math.inf).backward()  # its graph is older than the update
    scaler.step(second)
    assert not scaler.update().applied
    assert _same(before, _buffers(makes))


@EITHER_KIND
@pytest.mark.parametrize("minimizes", [False, True])
def test_a_step_in_evaluation_mode_takes_nothing_back(minimizes, fused):
    """Values of an applied step stay if the next step, which writes nothing in its forward pass, is skipped."""
    loop = _Loop(fused)
    assert loop.step().applied
    before = _buffers(loop.model)
    loop.model.eval()
    if minimizes:
        assert not loop.scaler.minimize(loop.optimizer, lambda: loop.model(X * math.inf).mean()).applied
    else:
        assert not loop.step(is_bad=True).applied
    assert _same(before, _buffers(loop.model))


@EITHER_KIND
def test_two_updates_after_one_loss(fused):
    """An overflow in the second optimizer puts back what the forward for both has written."""
    model = _model()
    first, second = (torch.optim.SGD(part.parameters(), lr=0.1, fused=fused) for part in model)
    scaler = GradScaler("cpu", init_scale=8.0, protect=[model])
    before = _buffers(model)
    scaler.scale(model(X).square().mean()).backward()
    model[1].weight.grad[0] = math.inf
    scaler.step(first)
    assert scaler.update().applied
    scaler.step(second)
    assert not scaler.update().applied
    assert _same(before, _buffers(model))


@EITHER_KIND
def test_an_edit_by_hand_after_an_update_stays(fused):
    """If no forward ran and the statistics were set, a skip by another module does not restore them."""
    frozen, trained = _model(), _model()
    loop = _Loop(fused, model=trained, protect=[frozen, trained])
    frozen(X)
    loop.step()
    with torch.no_grad():
        frozen[1].running_mean.fill_(7.0)
        frozen[1].running_var.fill_(7.0)
        frozen[1].num_batches_tracked.fill_(7)
    reset = _buffers(frozen)
    assert not loop.step(is_bad=True).applied
    assert _same(reset, _buffers(frozen))


def test_a_part_that_is_called_alone_is_protected():
    """As in Lightning's `training_step`, which never calls the module itself."""
    whole = torch.nn.Module()
    whole.backbone = _model()
    loop = _Loop(model=whole.backbone, protect=[whole])
    before = _buffers(whole)
    assert not loop.step(is_bad=True).applied
    assert _same(before, _buffers(whole))


def test_a_graph_that_is_still_to_run_backward_stays_valid():
    """Putting statistics back does not count as a change of what that graph has kept."""
    model = _model()
    loop = _Loop(fused=True, model=model)
    waiting = model(X).square().mean()
    loop.step(is_bad=True)
    waiting.backward()


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "ordinary"])
def test_protecting_waits_no_more_than_the_step_does(fused):
    """Never, with a fused optimizer; the flag that an ordinary one has read serves."""
    loop = _Loop(fused)
    for is_bad in (False, True, False):
        with _Synchronisations() as seen:
            loop.step(is_bad)
        assert seen.count == (0 if fused else 1)


def test_protecting_runs_where_nothing_can_be_read():
    """On the `meta` device, which has no values."""
    model = _model().to("meta")
    optimizer = _FusedOnMeta(model.parameters())
    scaler = GradScaler("meta", policy="dynamic", protect=[model])
    for _ in range(3):
        scaler.scale(model(torch.ones(8, 4, device="meta")).sum()).backward()
        scaler.step(optimizer)
        assert scaler.update().applied.is_meta


@EITHER_KIND
def test_minimize_and_protect_together(fused):
    """The retries of `minimize` begin with the buffers of the first try, however they were restored."""
    for protect in (True, False):
        torch.manual_seed(0)
        loop = _Loop(fused, protect=None if protect else ())
        calls = []

        def loss(loop=loop, calls=calls):
            calls.append(_buffers(loop.model))
            return loop.model(X * (math.inf if len(calls) < 3 else 1.0)).square().mean()

        assert loop.scaler.minimize(loop.optimizer, loss, retries=4).applied
        assert len(calls) == 3
        assert all(_same(calls[0], each) for each in calls)
        assert loop.model[1].num_batches_tracked.item() == 1
        assert not loop.step(is_bad=True).applied
        assert loop.model[1].num_batches_tracked.item() == (1 if protect else 2)


# -- buffers that a forward pass makes ---------------------------------------------------------------------------------


class MakesBuffers(torch.nn.Module):
    """A layer that has no statistics and no caches before its first forward pass."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))
        self.register_buffer("mean", None)
        self.register_buffer("cache", None, persistent=False)
        self.length = 0  # what the cache and the table were made for

    def forward(self, x):
        now = x.detach().mean(0)
        self.mean = now if self.mean is None else self.mean.lerp(now, 0.5)
        if not hasattr(self, "count"):
            self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.count += 1
        if self.length < len(x):
            self.length, self.cache = len(x), torch.arange(len(x))
            self.register_buffer("table", torch.arange(len(x)), persistent=False)
        return (x - self.mean) * self.weight * (self.cache + self.table).numel()


def test_buffers_that_a_skipped_forward_made_are_gone_again():
    """None where they were None, not registered where they were not; caches stay, and the next step starts over."""
    loop, plain = _Loop(model=MakesBuffers()), _Loop(model=MakesBuffers(), protect=())
    for _ in range(2):
        assert not loop.step(is_bad=True).applied
        assert loop.model.mean is None
        assert not hasattr(loop.model, "count")
        assert list(loop.model.state_dict()) == ["weight"]
        assert (loop.model.length, len(loop.model.cache), len(loop.model.table)) == (8, 8, 8)
    for is_bad in (False, True, False):
        loop.step(is_bad)
        if not is_bad:
            plain.step()
    assert _same(loop.model.state_dict(), plain.model.state_dict())
    assert loop.model.count.item() == 2


def test_a_fused_step_leaves_what_the_forward_made():
    """The device cannot take a buffer away, and the host does not wait for the decision; later steps are protected."""
    loop = _Loop(fused=True, model=MakesBuffers())
    with _Synchronisations() as seen:
        assert not loop.step(is_bad=True).applied
    assert seen.count == 1  # the line above
    assert loop.model.count.item() == 1
    before = _buffers(loop.model)
    assert not loop.step(is_bad=True).applied
    assert all(torch.equal(loop.model.get_buffer(name), before[name]) for name in ("count", "table"))


@pytest.mark.parametrize("edit", [None, "in place", "replaced", "registered"])
def test_a_buffer_that_a_forward_made_before_two_updates(edit):
    """The second update, if it skips, takes the buffer away, unless it was edited by hand since the first."""
    model, judge = MakesBuffers(), torch.nn.Parameter(torch.ones(()))
    makes, judges = (torch.optim.SGD([param], lr=0.1) for param in (model.weight, judge))
    scaler = GradScaler("cpu", init_scale=8.0, protect=[model])
    sample = model(X)
    scaler.scale(sample.detach().mean() * judge).backward()
    scaler.step(judges)
    assert scaler.update().applied
    if edit == "in place":
        model.mean.fill_(7.0)
    elif edit == "replaced":
        model.mean = torch.full((4,), 7.0)
    elif edit == "registered":
        model.register_buffer("mine", torch.ones(()))
    scaler.scale(sample.mean() * math.inf).backward()
    scaler.step(makes)
    assert not scaler.update().applied
    assert not hasattr(model, "count")
    assert (model.mean is None) == (edit in {None, "registered"})
    assert hasattr(model, "mine") == (edit == "registered")


# -- averages of the weights -------------------------------------------------------------------------------------------


@EITHER_KIND
@pytest.mark.parametrize("use_buffers", [False, True])
@pytest.mark.parametrize("make", [{}, {"multi_avg_fn": get_ema_multi_avg_fn(0.9)}], ids=["mean", "ema"])
def test_an_average_follows_applied_steps_only(make, use_buffers, fused):
    """Weights, buffers and the count equal those of a loop that never saw the skipped batches."""
    model, plain = _model(), _model()
    average, expected = (AveragedModel(each, use_buffers=use_buffers, **make) for each in (model, plain))
    loop = _Loop(fused, model=model, protect=[model, average], policy=FixedScaling(8.0))
    clean = _Loop(fused, model=plain, protect=(), policy=FixedScaling(8.0))
    for is_bad in (True, False, False, True, False, True):
        loop.step(is_bad)
        average.update_parameters(model)
        if not is_bad:
            clean.step()
            expected.update_parameters(plain)
    assert average.n_averaged.item() == 3
    assert _same(expected.state_dict(), average.state_dict())


def test_an_average_before_the_first_update_is_torchs():
    """No step was decided yet."""
    model = _model()
    average = AveragedModel(model)
    loop = _Loop(model=model, protect=[average])
    average.update_parameters(model)
    assert average.n_averaged.item() == 1
    del loop
    gc.collect()


def test_a_copy_of_an_average_has_torchs_own_method():
    """Copied, pickled, and once the scaler is gone."""
    model = _model()
    average = AveragedModel(model)
    loop = _Loop(model=model, protect=[average])
    assert not loop.step(is_bad=True).applied
    for other in (copy.deepcopy(average), pickle.loads(pickle.dumps(average))):
        other.update_parameters(model)
        assert (other.n_averaged.item(), average.n_averaged.item()) == (1, 0)
    average.update_parameters(model)
    assert average.n_averaged.item() == 0
    file = io.BytesIO()
    torch.save(average, file)
    del loop
    gc.collect()
    assert "update_parameters" not in vars(average)
    average.update_parameters(model)
    assert average.n_averaged.item() == 1


# -- how long hooks live -----------------------------------------------------------------------------------------------


def test_the_hooks_die_with_the_scaler_and_keep_nothing_alive():
    """Neither the scaler, nor the modules."""
    loop = _Loop()
    loop.step()
    model, scaler = weakref.ref(loop.model), weakref.ref(loop.scaler)
    hooks, loading = loop.model._forward_pre_hooks, loop.model._load_state_dict_post_hooks
    assert hooks
    assert loading
    del loop.scaler
    gc.collect()
    assert scaler() is None
    assert not hooks
    assert not loading
    assert not loop.model[1]._forward_pre_hooks
    kept = _Loop()
    model = weakref.ref(kept.model)
    del kept.model, kept.optimizer
    gc.collect()
    assert model() is None


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda scaler: pickle.loads(pickle.dumps(scaler))])
def test_a_copy_of_a_scaler_protects_nothing_and_says_so(copied):
    """Two scalers would put back the same buffers, each at its own updates; a pickle holds no modules."""
    loop = _Loop()
    with pytest.warns(UserWarning, match="a copy or a pickle of a scaler protects no modules"):
        other = copied(loop.scaler)
    hooks = len(loop.model._forward_pre_hooks)
    loop.scaler, original = other, loop.scaler
    loop.step(is_bad=True)
    assert loop.model[1].running_mean.isnan().all()
    assert len(loop.model._forward_pre_hooks) == hooks
    assert original.is_enabled()


@pytest.mark.parametrize(
    ("given", "named"), [(1, "1 is not one"), ([1], "1 is not one"), (["model"], "'model' is not one")]
)
def test_what_is_not_a_module_is_refused(given, named):
    """The message says what to pass."""
    with pytest.raises(TypeError, match=f"protect= takes modules, and {named}; pass protect="):
        GradScaler("cpu", protect=given)


def test_a_protected_model_can_be_copied_and_saved():
    """The copy has no part in the scaler: its buffers stay as its own forward leaves them."""
    loop = _Loop()
    for other in (copy.deepcopy(loop.model), pickle.loads(pickle.dumps(loop.model))):
        other(X)
        other.load_state_dict(other.state_dict())
        assert not loop.step(is_bad=True).applied
        assert (other[1].num_batches_tracked.item(), loop.model[1].num_batches_tracked.item()) == (1, 0)


def test_one_module_may_be_given_alone():
    """Also one that is a sequence of others."""
    model = _model()
    loop = _Loop(model=model, protect=model)
    assert not loop.step(is_bad=True).applied
    assert model[1].num_batches_tracked.item() == 0


# -- what others make of modules ---------------------------------------------------------------------------------------


def test_batch_norm_that_is_to_be_synchronised():
    """`SyncBatchNorm` has the buffers of `BatchNorm`; on a CPU it runs in one process alone."""
    model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(_model())
    assert isinstance(model[1], torch.nn.SyncBatchNorm)
    loop = _Loop(model=model)
    before = _buffers(model)
    assert not loop.step(is_bad=True).applied
    assert _same(before, _buffers(model))
    assert loop.step().applied
    assert model[1].num_batches_tracked.item() == 1


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


def test_spectral_norm_is_protected():
    """Its vectors are buffers that each forward in training mode moves."""
    model = torch.nn.utils.parametrizations.spectral_norm(torch.nn.Linear(4, 4))
    loop = _Loop(model=model)
    before = _buffers(model)
    assert not loop.step(is_bad=True).applied
    assert _same(before, _buffers(model))
    assert loop.step().applied
    assert not _same(before, _buffers(model))
