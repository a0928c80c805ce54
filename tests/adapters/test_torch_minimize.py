"""`GradScaler.minimize`: what is applied after retries is, bit for bit, what a run at that scale would have applied."""

import copy
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounter

from lossscale_core import DynamicScaling, FixedScaling, NoScaling
from lossscale_core.errors import CallOrderError, OverflowStreakError, PolicyError
from lossscale_torch import GradScaler
from tests.adapters.test_torch_protect import MakesBuffers
from tests.adapters.test_torch_synchronisation import _FusedOnMeta, _Synchronisations

TOO_LARGE = 2.0**40
OPTIMIZERS = {
    "ordinary": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "fused": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
}
EITHER_KIND = pytest.mark.parametrize("kind", list(OPTIMIZERS))


def _model():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1)
    )


class _Run:
    """A model with running statistics and dropout, trained in float16, and the calls of its loss."""

    def __init__(self, kind="ordinary", **scaler):
        self.model = _model()
        self.optimizer = OPTIMIZERS[kind](self.model.parameters())
        self.scaler = GradScaler("cpu", **(scaler or {"init_scale": 2.0**10}))
        self.calls = 0
        self.inputs = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))

    def loss(self, factor=1.0):
        self.calls += 1
        with torch.autocast("cpu", torch.float16):
            return self.model(self.inputs).float().square().mean() * factor

    def bad_loss(self):
        return self.loss(math.inf)

    def minimize(self, loss_fn=None, **how):
        return self.scaler.minimize(self.optimizer, loss_fn or self.loss, **how)

    def at_once(self, loss_scale, max_norm=None):
        """Take the same step in the plain way at one scale."""
        scaler = GradScaler("cpu", policy=FixedScaling(loss_scale))
        scaler.load_state_dict(scaler.state_dict())  # it continues, and warns of nothing
        self.optimizer.zero_grad()
        scaler.scale(self.loss()).backward()
        if max_norm is None:
            scaler.step(self.optimizer)
        else:
            scaler.unscale_and_clip_(self.optimizer, max_norm)
            scaler.step(self.optimizer)
        assert scaler.update().applied

    def everything(self):
        """Return parameters, buffers, optimizer state and random state, to compare bit for bit."""
        state = self.optimizer.state_dict()["state"]
        kept = {f"{index}.{name}": value for index, each in state.items() for name, value in each.items()}
        return {**copy.deepcopy(self.model.state_dict()), **copy.deepcopy(kept), "random": torch.get_rng_state()}


def _same(first, second):
    assert first.keys() == second.keys()
    for name, value in first.items():
        other = second[name]
        assert torch.equal(value, other) if isinstance(value, torch.Tensor) else value == other, name


@EITHER_KIND
@pytest.mark.parametrize("max_norm", [None, 0.1])
def test_a_step_after_retries_is_the_step_of_a_run_at_that_scale(kind, max_norm):
    """Parameters, optimizer state, running statistics and the random state agree bit for bit, over several steps."""
    ours, plain = (_Run(kind, init_scale=TOO_LARGE) for _ in range(2))
    for step in range(3):
        torch.manual_seed(step)
        info = ours.minimize(retries=32, max_norm=max_norm)
        after = ours.everything()
        assert info.applied
        torch.manual_seed(step)
        plain.at_once(float(info.loss_scale_used), max_norm)
        _same(after, plain.everything())
    assert 2.0**10 < ours.scaler.get_scale() < 2.0**17
    assert ours.calls > 20


@EITHER_KIND
@pytest.mark.parametrize("retries", [0, 1, 3])
def test_nothing_moves_once_the_retries_are_used_up(kind, retries):
    """Parameters, optimizer state and buffers are as before, also without retries; the scale is as the policy says."""
    run = _Run(kind, init_scale=2.0**10)
    assert run.minimize().applied
    before, calls = run.everything(), run.calls
    info = run.minimize(run.bad_loss, retries=retries)
    assert not info.applied
    assert (info.overflow_streak, info.loss_scale_used) == (retries + 1, 2.0 ** (10 - retries))
    assert run.calls == calls + 1 + retries
    assert run.scaler.get_scale() == 2.0 ** (9 - retries)
    assert int(run.scaler.metrics()["skipped_steps"]) == retries + 1
    after = run.everything()
    del before["random"], after["random"]
    _same(before, after)


@EITHER_KIND
def test_the_random_state_moves_by_one_run_of_the_loss(kind):
    """However many tries there were, and whether the last was applied."""
    for bad in (False, True):
        run = _Run(kind, init_scale=TOO_LARGE)
        torch.manual_seed(3)
        run.minimize(run.bad_loss if bad else None, retries=30)
        after = torch.get_rng_state()
        torch.manual_seed(3)
        run.loss()
        assert torch.equal(torch.get_rng_state(), after)


@EITHER_KIND
@pytest.mark.parametrize("policy", [NoScaling(), FixedScaling(2.0**40)], ids=["none", "fixed"])
def test_a_policy_that_does_not_adapt_never_retries(policy, kind):
    """A lower scale is nothing that it could try; nothing moves all the same."""
    run = _Run(kind, policy=policy)
    before = run.everything()
    assert not run.minimize(run.bad_loss, retries=5).applied
    assert run.calls == 1
    del before["random"]
    _same(before, {name: value for name, value in run.everything().items() if name in before})


def test_a_policy_may_lower_the_scale_on_a_later_try_only():
    """Hysteresis and tolerance count each try; torch's rule needs three tries where this one needs six."""
    run = _Run(policy=DynamicScaling(init_scale=2.0**10, hysteresis=2, refill_on_backoff=True))
    scales = []

    def loss():
        scales.append(run.scaler.get_scale())
        return run.loss(math.inf if len(scales) < 6 else 1.0)

    info = run.minimize(loss, retries=8)
    assert scales == [1024.0, 1024.0, 512.0, 512.0, 256.0, 256.0]
    assert info.applied
    assert info.loss_scale_used == 256.0


def test_a_streak_of_overflows_is_an_error_after_the_last_try_only():
    """Retries that end well do not trip it, however many they were; those that do not raise once all is put back."""
    run = _Run(policy=DynamicScaling(init_scale=2.0**32, max_overflow_streak=3))
    assert run.minimize(retries=32).applied
    before, calls = run.everything(), run.calls
    with pytest.raises(OverflowStreakError, match="overflow_streak=6"):
        run.minimize(run.bad_loss, retries=5)
    assert run.calls == calls + 6
    after = run.everything()
    del before["random"], after["random"]
    _same(before, after)


def test_gradients_are_computed_again():
    """Those of the optimizer's parameters from before the call are dropped; those of the step stay in `.grad`."""
    run, plain = (_Run(init_scale=2.0**10) for _ in range(2))
    for param in run.model.parameters():
        param.grad = torch.full_like(param, math.inf)
    torch.manual_seed(0)
    assert run.minimize().applied
    torch.manual_seed(0)
    plain.at_once(2.0**10)
    for ours, theirs in zip(run.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


@pytest.mark.parametrize("left", [None, 0.0], ids=["none", "zeros"])
def test_gradients_of_another_optimizer_are_those_of_the_last_try(left):
    """What the tries before have added to them is taken back, and its own step divides by the scale of the last try."""
    below, above = (torch.nn.Linear(1, 1, bias=False) for _ in range(2))
    for module in (below, above):
        torch.nn.init.ones_(module.weight)
    first, second = (torch.optim.SGD(module.parameters(), lr=1.0) for module in (above, below))
    scaler = GradScaler("cpu", init_scale=2.0**20)
    below.weight.grad = None if left is None else torch.full((1, 1), left)

    def loss():  # the gradient of `above` passes through float16 and overflows; that of `below` does not
        x = below(torch.ones(1, 1))
        return (x * above(torch.ones(1, 1)).half().float()).sum()

    info = scaler.minimize(first, loss, retries=8)
    assert info.applied
    assert info.loss_scale_used == below.weight.grad.item() == 2.0**15
    scaler.step(second)
    assert scaler.update().applied
    assert (above.weight.item(), below.weight.item()) == (0.0, 0.0)


# -- micro-batches -----------------------------------------------------------------------------------------------------


class _Micro:
    """A weight with gradients that overflow above another loss scale for each micro-batch `i`, and are else exact."""

    def __init__(self, limits, init_scale, fused=False, **policy):
        self.weight = torch.nn.Parameter(torch.zeros(3))
        self.optimizer = torch.optim.SGD([self.weight], lr=1.0, fused=fused)
        self.scaler = GradScaler("cpu", policy=DynamicScaling(init_scale=init_scale, **policy))
        self.limits, self.calls = limits, []

    def loss(self, i):
        """Return a loss with the gradient `i + 1`, which is 2**15 in float16 at the largest scale that it takes."""
        self.calls.append(i)
        factor = 2.0**15 / self.limits[i]
        halved = (self.weight * ((i + 1) / factor)).half().float()
        return (halved * factor).sum()

    @property
    def loss_fns(self):
        return [lambda i=i: self.loss(i) for i in range(len(self.limits))]

    def minimize(self, **how):
        return self.scaler.minimize(self.optimizer, self.loss_fns, **how)


EITHER_SGD = pytest.mark.parametrize("fused", [False, True], ids=["ordinary", "fused"])


@EITHER_SGD
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("init_scale", [2.0**16, 2.0**60, 2.0**126])
def test_retries_find_the_scale_from_any_first_one(init_scale, micro_batches, fused):
    """The first call calibrates; the next one needs a single try."""
    run = _Micro([2.0**9] * micro_batches, init_scale, fused, max_scale=2.0**126)
    assert run.minimize(retries=126).applied
    assert run.scaler.get_scale() == 2.0**9
    run.calls.clear()
    assert run.minimize(retries=3).applied
    assert run.calls == list(range(micro_batches))


@EITHER_SGD
def test_a_micro_batch_that_overflows_is_retried_alone(fused):
    """The gradients before it are multiplied by the ratio of the scales, and none is lost or counted twice."""
    run = _Micro([2.0**20, 2.0**10, 2.0**9], init_scale=2.0**12, fused=fused)
    info = run.minimize(retries=8)
    assert run.calls == [0, 1, 1, 1, 2, 2]
    assert run.weight.tolist() == [-6.0] * 3
    assert info.applied
    assert info.loss_scale_used == 2.0**9
    assert (run.scaler.metrics()["steps"], run.scaler.metrics()["skipped_steps"]) == (4, 3)


@EITHER_SGD
def test_micro_batches_share_their_retries(fused):
    """Once they are used up nothing moves, and the micro-batches that are left do not run."""
    run = _Micro([2.0**20, 2.0**10, 2.0**20], init_scale=2.0**12, fused=fused)
    assert not run.minimize(retries=1).applied
    assert run.calls == [0, 1, 1]
    assert run.weight.tolist() == [0.0] * 3
    assert run.scaler.get_scale() == 2.0**10
    assert run.minimize(retries=1).applied
    assert run.calls[3:] == [0, 1, 2]


@EITHER_SGD
def test_without_retries_micro_batches_are_checked_together(fused):
    """One update of the policy, whichever of them overflowed."""
    run = _Micro([2.0**20, 2.0**10, 2.0**20], init_scale=2.0**12, fused=fused)
    assert not run.minimize().applied
    assert run.calls == [0, 1, 2]
    assert run.scaler.get_scale() == 2.0**11


def test_an_overflow_of_the_sum_alone_is_retried():
    """Two float16 gradients are finite, and their sum is not."""
    weight = torch.nn.Parameter(torch.zeros(3, dtype=torch.float16))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = GradScaler("cpu", init_scale=2.0**15, half_gradients=True)
    assert scaler.minimize(optimizer, [lambda: weight.sum()] * 3, retries=2).applied
    assert weight.tolist() == [-3.0] * 3
    assert scaler.get_scale() == 2.0**14


def test_micro_batches_equal_a_loop_that_adds_them_up():
    """Bit for bit: each with the gradients that it has at its own scale, times the ratio to the last scale."""
    ours, plain = (_Run(init_scale=2.0**40) for _ in range(2))
    scales = []

    def spoiled(run):  # it fits at a quarter of the scale that the others take
        scales.append(run.scaler.get_scale())
        return run.loss(4.0)

    torch.manual_seed(1)
    info = ours.minimize([ours.loss, lambda: spoiled(ours), ours.loss], retries=40)
    assert info.applied
    torch.manual_seed(1)
    (plain.loss() * scales[0]).backward()
    for param in plain.model.parameters():
        param.grad *= info.loss_scale_used / scales[0]
    (plain.loss(4.0) * info.loss_scale_used).backward()
    (plain.loss() * info.loss_scale_used).backward()
    for param in plain.model.parameters():
        param.grad /= info.loss_scale_used
    plain.optimizer.step()
    assert scales[0] > info.loss_scale_used
    _same(ours.everything(), plain.everything())


def test_sparse_gradients_of_micro_batches_are_added_up_and_retried():
    """An embedding with sparse gradients goes back to the sum before the micro-batch that overflowed."""
    embedding = torch.nn.Embedding(4, 2, sparse=True)
    torch.nn.init.zeros_(embedding.weight)
    optimizer = torch.optim.SGD(embedding.parameters(), lr=1.0)
    scaler = GradScaler("cpu", init_scale=2.0**17)
    loss_fns = [
        lambda: embedding(torch.tensor([0, 1, 1])).sum(),
        lambda: embedding(torch.tensor([1, 2])).half().float().sum(),
    ]
    assert scaler.minimize(optimizer, loss_fns, retries=3).applied
    assert embedding.weight[:, 0].tolist() == [-1.0, -3.0, -1.0, 0.0]


_exponents = st.integers(4, 30)


@settings(max_examples=150)
@given(
    steps=st.lists(st.lists(_exponents, min_size=1, max_size=4), min_size=1, max_size=6),
    init=_exponents,
    retries=st.integers(0, 12),
    fused=st.booleans(),
    hysteresis=st.integers(1, 2),
    growth_interval=st.integers(1, 3),
)
def test_any_pattern_of_overflows_equals_a_plain_loop(steps, init, retries, fused, hysteresis, growth_interval):
    """Weights, calls and every counter of the policy, for any micro-batches and any limits of theirs."""
    policy = {"hysteresis": hysteresis, "growth_interval": growth_interval, "refill_on_backoff": True}
    run = _Micro([], 2.0**init, fused, **policy)
    state, weight, calls = run.scaler.policy.init_state(), 0.0, []
    for limits in steps:
        run.limits, run.calls = [2.0**limit for limit in limits], []
        info = run.minimize(retries=retries)
        state, applied, calls = _plain_step(run.scaler.policy, state, run.limits, retries)
        weight -= sum(range(1, len(limits) + 1)) if applied else 0
        assert bool(info.applied) == applied
        assert run.calls == calls
        assert run.weight.tolist() == [weight] * 3
        saved = run.scaler.state_dict()
        assert {name: saved[name] for name in state._fields} == {name: getattr(state, name) for name in state._fields}


def _plain_step(policy, state, limits, retries):
    """Return the policy's state after a step with retries, whether it was applied, and the losses that ran."""
    calls = []
    if retries == 0:
        finite = all(state.loss_scale <= limit for limit in limits)
        return policy.update(state, finite), finite, list(range(len(limits)))
    for number, limit in enumerate(limits):
        calls.append(number)
        while state.loss_scale > limit:
            state = policy.update(state, False)
            if retries == 0:
                return state, False, calls
            retries -= 1
            calls.append(number)
    return policy.update(state, True), True, calls


# -- buffers -----------------------------------------------------------------------------------------------------------


class _Statistics(torch.nn.Module):
    """Buffers of every kind that a forward may write, in place or by assignment."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("assigned", torch.zeros(3))
        self.register_buffer("is_set", torch.tensor(False))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("float16", torch.zeros(2, dtype=torch.float16))
        self.register_buffer("complex64", torch.zeros(2, dtype=torch.complex64))
        self.register_buffer("constant", torch.zeros(1).expand(5))  # cannot be written in place
        self.register_buffer("sparse", torch.eye(2).to_sparse())
        self.register_buffer("none", None)
        self.register_buffer("cache", torch.zeros(1), persistent=False)
        self.register_buffer("table", torch.zeros(1), persistent=False)
        self.length = 0  # what the cache and the table were made for
        self.other = torch.nn.Module()  # written to, but never called
        self.other.register_buffer("total", torch.zeros(()))

    def forward(self, x):
        self.mean.lerp_(x, 0.1)
        self.assigned = self.assigned * 0.9 + x.detach()
        self.is_set.fill_(True)
        self.count += 1
        self.float16 += 1
        self.complex64 += 1j
        self.other.total += 1
        if self.length < len(x):
            self.length, self.cache, self.table = len(x), torch.zeros(len(x)), torch.full((1,), float(len(x)))
        return (x * self.weight).sum()

    def written(self):
        return {name: value for name, value in copy.deepcopy(self.state_dict()).items() if name not in {"weight"}}


@EITHER_SGD
@pytest.mark.parametrize("retries", [0, 2])
def test_buffers_of_every_kind_are_put_back(fused, retries):
    """In place or assigned, of any dtype, of submodules that are never called; caches stay, and so do constants."""
    module = _Statistics()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, fused=fused)
    scaler = GradScaler("cpu", init_scale=8.0)
    before, same = module.written(), module.mean
    assert not scaler.minimize(optimizer, lambda: module(torch.ones(3)) * math.inf, retries=retries).applied
    _same({n: v.to_dense() for n, v in before.items()}, {n: v.to_dense() for n, v in module.written().items()})
    assert module.mean is same
    assert (module.length, len(module.cache), module.table.item()) == (3, 3, 3.0)
    assert scaler.minimize(optimizer, lambda: module(torch.ones(3)), retries=retries).applied
    assert (module.count.item(), module.other.total.item(), module.assigned.tolist()) == (1, 1.0, [1.0] * 3)


@pytest.mark.parametrize("micro_batches", [1, 2])
@EITHER_SGD
def test_each_try_begins_without_the_buffers_that_the_try_before_made(fused, micro_batches):
    """The first micro-batch overflows twice, and what is left is what a run without these tries leaves."""
    runs = {}
    for bad_tries in (0, 2):
        module, tries = MakesBuffers(), itertools.count()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, fused=fused)

        def loss(module=module, tries=tries, bad_tries=bad_tries):
            factor = math.inf if next(tries) < bad_tries else 1.0
            return module(torch.linspace(-1.0, 1.0, 8).reshape(2, 4)).square().mean() * factor

        scaler = GradScaler("cpu", init_scale=8.0)
        assert scaler.minimize(optimizer, [loss] * micro_batches, retries=3).applied
        assert next(tries) == bad_tries + micro_batches
        runs[bad_tries] = copy.deepcopy(module.state_dict())
    assert runs[2]["count"].item() == micro_batches
    _same(runs[0], runs[2])


@pytest.mark.parametrize("retries", [0, 2])
def test_no_buffer_that_was_made_is_left_once_the_retries_are_used_up(retries):
    """Persistent ones are as before: None, or not registered."""
    module = MakesBuffers()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    scaler = GradScaler("cpu", init_scale=8.0)
    loss = lambda: module(torch.ones(2, 4)).mean() * math.inf  # noqa: E731
    assert not scaler.minimize(optimizer, loss, retries=retries).applied
    assert module.mean is None
    assert not hasattr(module, "count")


def test_the_hook_is_there_while_the_loss_runs_only():
    """Also where the loss raises; a forward in another thread, or within backward, is not looked at."""
    hooks = torch.nn.modules.module._global_forward_pre_hooks
    run = _Run()
    seen = []

    def loss():
        seen.append(len(hooks))
        if len(seen) == 2:
            raise ZeroDivisionError
        return run.loss()

    run.minimize(loss, retries=1)
    with pytest.raises(ZeroDivisionError):
        run.minimize(loss, retries=1)
    assert seen == [1, 1]
    assert not hooks
    assert run.minimize().applied


@pytest.mark.filterwarnings("default:.*torch.jit.*:DeprecationWarning")
def test_a_compiled_module_compiles_no_more_often_and_is_put_back():
    """`torch.compile(module)` is seen without being named, and says nothing of hooks."""
    torch._dynamo.reset()
    run, frames = _Run(init_scale=2.0**10), CompileCounter()
    inner, run.model = run.model, torch.compile(run.model, backend=frames)
    counts = []
    for step in range(8):
        before = copy.deepcopy(inner.state_dict())
        is_bad = step % 3 == 2
        info = run.minimize(run.bad_loss if is_bad else None, retries=1)
        assert info.applied != is_bad
        if is_bad:
            _same(before, inner.state_dict())
        counts.append(frames.frame_count)
    assert counts[-1] == counts[2]


@pytest.mark.filterwarnings("default:The .grad attribute")  # Dynamo's own, where it resumes after the hook
def test_protect_names_what_the_hook_does_not_see():
    """A compiled function calls its modules without any hook; named, they are put back before each retry."""
    torch._dynamo.reset()
    for is_named in (False, True):
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = GradScaler("cpu", init_scale=8.0, protect=[model] if is_named else ())
        compiled = torch.compile(lambda x, model=model: model(x).square().mean(), backend="eager")
        scaler.minimize(optimizer, lambda f=compiled: f(torch.randn(8, 4)) * math.inf, retries=2)
        assert model[1].num_batches_tracked.item() == (0 if is_named else 3)


# -- closures ----------------------------------------------------------------------------------------------------------


class _Sam(torch.optim.SGD):
    """Sharpness-aware minimisation in its usual form: the gradients of the weights are there before `step`."""

    @torch.no_grad()
    def step(self, closure=None):
        assert closure is not None
        params = self.param_groups[0]["params"]
        norm = torch.stack([param.grad.norm() for param in params]).norm()
        for param in params:
            self.state[param]["uphill"] = 0.05 * param.grad / norm
            param.add_(self.state[param]["uphill"])
        torch.enable_grad()(closure)()
        for param in params:
            param.sub_(self.state[param]["uphill"])
        super().step()


class _ClosureSam(_Sam):
    def step(self, closure):
        closure()
        return super().step(closure)


def _lbfgs(params, **how):
    return torch.optim.LBFGS(params, lr=0.1, max_iter=4, history_size=3, **how)


CLOSURES = {
    "lbfgs": _lbfgs,
    "wolfe": lambda params: _lbfgs(params, line_search_fn="strong_wolfe"),
    "sam": lambda params: _ClosureSam(params, lr=0.1, momentum=0.9),
}
EACH_CLOSURE = pytest.mark.parametrize("kind", list(CLOSURES))


def _closure_run(kind, **scaler):
    run = _Run(**scaler)
    run.optimizer = CLOSURES[kind](list(run.model.parameters()))
    return run


def _state(optimizer):
    state = optimizer.state_dict()["state"]
    return [each for value in state.values() for each in value.values()]


def _flat(values):
    for each in values:
        yield from _flat(each) if isinstance(each, list) else [each]


@EACH_CLOSURE
def test_an_optimizer_with_a_closure_is_handed_the_unscaled_loss_and_gradients(kind):
    """A step equals the optimizer's own with a loss that is not scaled, in float64, where scaling loses nothing."""
    ours, plain = (_closure_run(kind, init_scale=2.0**10) for _ in range(2))
    for run in (ours, plain):
        run.model.double()
        run.loss = lambda run=run: run.model(run.inputs.double()).square().mean()
    for step in range(3):
        torch.manual_seed(step)
        assert ours.minimize(ours.loss, retries=2).applied
        torch.manual_seed(step)

        def closure():
            plain.optimizer.zero_grad()
            loss = plain.loss()
            loss.backward()
            return loss

        plain.optimizer.step(closure)
        _same(ours.model.state_dict(), plain.model.state_dict())
    pairs = list(zip(_flat(_state(ours.optimizer)), _flat(_state(plain.optimizer)), strict=True))
    assert pairs
    assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in pairs if a is not None)


@EACH_CLOSURE
@pytest.mark.parametrize("max_norm", [None, 0.1])
def test_a_closure_after_retries_is_the_step_of_a_run_at_that_scale(kind, max_norm):
    """An overflow in any evaluation begins the whole step again."""
    ours, plain = (_closure_run(kind, init_scale=TOO_LARGE) for _ in range(2))
    evaluations = []

    def loss():
        evaluations.append(ours.scaler.get_scale())
        return ours.loss(math.inf if evaluations == [2.0**9] * 2 else 1.0)

    torch.manual_seed(5)
    ours.scaler.load_state_dict({**ours.scaler.state_dict(), "scale": 2.0**9, "loss_scale": 2.0**9})
    info = ours.minimize(loss, retries=3, max_norm=max_norm)
    assert info.applied
    assert info.loss_scale_used == 2.0**8
    torch.manual_seed(5)
    plain.scaler = GradScaler("cpu", policy=FixedScaling(2.0**8))
    assert plain.minimize(max_norm=max_norm).applied
    _same(ours.model.state_dict(), plain.model.state_dict())
    assert (ours.scaler.metrics()["steps"], ours.scaler.metrics()["skipped_steps"]) == (2, 1)


@EACH_CLOSURE
@pytest.mark.parametrize("retries", [0, 2])
def test_an_overflow_between_evaluations_puts_the_weights_back(kind, retries):
    """Weights, the optimizer's state and buffers return to their start once no retry is left, and where it raises."""
    run = _closure_run(kind, init_scale=2.0**9)
    assert run.minimize().applied
    for error in (None, ZeroDivisionError):
        before = copy.deepcopy((run.model.state_dict(), run.optimizer.state_dict()))
        calls = run.calls

        def loss(error=error, calls=calls):
            if run.calls > calls and error is not None:
                raise error
            return run.loss(math.inf if run.calls > calls else 1.0)

        if error is None:
            assert not run.minimize(loss, retries=retries).applied
            _same(before[0], run.model.state_dict())
        else:
            with pytest.raises(ZeroDivisionError):
                run.minimize(loss, retries=retries)
        for name, param in run.model.named_parameters():
            assert torch.equal(param, before[0][name])
        now = run.optimizer.state_dict()
        assert now["param_groups"] == before[1]["param_groups"]
        old = [each for value in before[1]["state"].values() for each in value.values()]
        for a, b in zip(_flat(old), _flat(_state(run.optimizer)), strict=True):
            assert a is None or torch.equal(torch.as_tensor(a), torch.as_tensor(b))


@EACH_CLOSURE
def test_micro_batches_of_a_closure_are_added_up(kind):
    """The closure returns the sum of their unscaled losses."""
    one, three = (_closure_run(kind, init_scale=2.0**10) for _ in range(2))
    for run in (one, three):
        run.model.double().eval()
        run.loss = lambda run=run: run.model(run.inputs.double()).square().mean()
    assert one.minimize(lambda: one.loss() * 4.0).applied
    assert three.minimize([three.loss] * 4, retries=1).applied
    for a, b in zip(one.model.parameters(), three.model.parameters(), strict=True):
        torch.testing.assert_close(a, b)


# -- what else may happen ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*OPTIMIZERS, *CLOSURES])
def test_a_disabled_scaler_takes_the_plain_step(kind):
    """Nothing is scaled, checked or retried."""
    ours, plain = (_Run(enabled=False) for _ in range(2))
    for run in (ours, plain):
        run.optimizer = {**OPTIMIZERS, **CLOSURES}[kind](list(run.model.parameters()))
    torch.manual_seed(0)
    assert ours.minimize(retries=3, max_norm=0.1).applied is True
    torch.manual_seed(0)

    def closure():
        plain.optimizer.zero_grad()
        loss = plain.loss()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.model.parameters(), 0.1)
        return loss

    if kind in OPTIMIZERS:
        closure()
        plain.optimizer.step()
    else:
        plain.optimizer.step(closure)
    _same(ours.model.state_dict(), plain.model.state_dict())


def test_autocast_around_several_calls():
    """The float16 weights that autocast keeps until it ends are those of the present step, and of the present graph."""
    inside, outside = (_Run(init_scale=TOO_LARGE) for _ in range(2))
    torch.manual_seed(0)
    with torch.autocast("cpu", torch.float16):
        for _ in range(3):
            assert inside.minimize(retries=32).applied
    torch.manual_seed(0)
    for _ in range(3):
        assert outside.minimize(retries=32).applied
    _same(inside.everything(), outside.everything())


@pytest.mark.parametrize(
    ("loss_fn", "how", "error", "message"),
    [
        *(
            (None, {"retries": retries}, PolicyError, f"retries={retries!r} must be a whole number from 0 to .*; pass")
            for retries in (-1, 1.5, True, "3", None)
        ),
        (None, {"max_norm": -1.0}, PolicyError, "max_norm=-1.0 must be a number from 0; pass math.inf not to clip"),
        (lambda: None, {}, TypeError, "loss_fn returned None; return the loss"),
        ([], {}, TypeError, "must be a function without arguments"),
        (3, {}, TypeError, "loss_fn=3 must be a function"),
    ],
)
def test_what_is_refused(loss_fn, how, error, message):
    """The message says what was given and what is allowed; nothing moved."""
    run = _Run()
    before = run.everything()
    with pytest.raises(error, match=message):
        run.scaler.minimize(run.optimizer, run.loss if loss_fn is None else loss_fn, **how)
    for name, param in run.model.named_parameters():
        assert torch.equal(param, before[name])


def test_an_optimizer_that_was_unscaled_is_refused():
    """Its gradients would be dropped, and new ones taken for unscaled."""
    run = _Run()
    run.scaler.scale(run.loss()).backward()
    run.scaler.unscale_(run.optimizer)
    with pytest.raises(CallOrderError, match=r"call update\(\) first"):
        run.minimize()
    run.scaler.update()
    assert run.minimize().applied


def test_another_optimizers_overflow_is_not_retried():
    """One that was stepped before in the same update skips by itself; this one is applied once."""
    run = _Run(init_scale=2.0**10)
    param = torch.nn.Parameter(torch.ones(1))
    other = torch.optim.SGD([param], lr=1.0)
    run.scaler.scale(param.sum() * math.inf).backward()
    run.scaler.step(other)
    info = run.minimize(retries=3)
    assert (info.applied, info.applied_of(run.optimizer), info.applied_of(other)) == (False, True, False)
    assert run.calls == 1


# -- what it costs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "retries", "expected"), [("fused", 0, 0), ("fused", 2, 1), ("ordinary", 2, 1)])
def test_how_often_a_good_first_try_waits(kind, retries, expected):
    """As `step` does; with retries a fused optimizer's flag is read once, too."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=kind == "fused")
    scaler = GradScaler("cpu")
    for _ in range(3):
        with _Synchronisations() as seen:
            scaler.minimize(optimizer, lambda: model(torch.ones(8, 4)).square().mean(), retries=retries)
    assert seen.count == expected


@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_without_retries_a_fused_step_runs_where_nothing_can_be_read(max_norm):
    """On the `meta` device: loss, backward, step, update, and the choice of buffers."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8)).to("meta")
    optimizer = _FusedOnMeta(model.parameters())
    scaler = GradScaler("meta", policy="dynamic")
    for _ in range(3):
        info = scaler.minimize(optimizer, lambda: model(torch.ones(8, 4, device="meta")).sum(), max_norm=max_norm)
        assert info.applied.is_meta
