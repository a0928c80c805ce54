"""`GradScaler(on_nonfinite_loss="hold")`: a lost loss skips the step of `minimize`, and the loss scale stays."""

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from lossscale_core import DynamicScaling, SpikeGuard
from lossscale_core.errors import NonfiniteStreakError, SyncError
from lossscale_torch import GradScaler
from tests.adapters.test_torch_distributed import _on_ranks
from tests.torch_versions import FSDP2

INF, NAN = float("inf"), float("nan")
BAD = pytest.mark.parametrize("bad", [NAN, INF, -INF])


class Run:
    """Steps of `minimize` with losses that are multiplied by given numbers."""

    def __init__(self, make=lambda params: torch.optim.Adam(params, lr=0.1), **settings):
        torch.manual_seed(0)
        layers = (torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
        self.model = torch.nn.Sequential(*layers)
        self.optimizer = make(self.model.parameters())
        self.scaler = GradScaler("cpu", init_scale=8.0, growth_interval=4, **settings)
        self.calls = 0

    def loss(self, factor):
        """Return a loss; in float32 it overflows in the backward pass alone for the factor "overflow"."""
        self.calls += 1
        loss = self.model(torch.linspace(-1, 1, 32).view(8, 4)).square().mean()
        if factor == "overflow":
            loss.register_hook(lambda grad: grad * INF if self.scaler.get_scale() > 2.0 else grad)
            return loss
        return loss * factor

    def step(self, *factors, retries=0):
        """Take a step with a micro-batch for each factor."""
        losses = [partial(self.loss, factor) for factor in factors]
        return self.scaler.minimize(self.optimizer, losses if len(losses) > 1 else losses[0], retries=retries)

    def everything(self):
        """Return what a step changes, but for the counters and the random numbers."""
        saved = self.scaler.state_dict()
        saved.pop("nonfinite", None)
        return copy.deepcopy([self.model.state_dict(), self.optimizer.state_dict(), saved])


def _are_same(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_are_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_are_same, one, other))
    return one == other


@BAD
@pytest.mark.parametrize("retries", [0, 5])
@pytest.mark.parametrize("fused", [False, True])
def test_a_lost_loss_changes_nothing(bad, retries, fused):
    """Neither weights, buffers, optimizer nor the policy's state; a retry cannot help, so the loss runs once."""
    run = Run(lambda params: torch.optim.Adam(params, lr=0.1, fused=fused), on_nonfinite_loss="hold")
    assert run.step(1.0).applied
    before, calls = run.everything(), run.calls
    info = run.step(bad, retries=retries)
    assert (info.applied, info.nonfinite_loss, info.overflowed, info.spiked) == (False, True, False, False)
    assert info.loss_scale_after == 8.0
    assert run.calls == calls + 1
    assert _are_same(before, run.everything())
    assert run.scaler.metrics()["nonfinite_losses"] == 1
    info = run.step(1.0)
    assert (info.applied, info.nonfinite_loss) == (True, False)
    assert run.scaler.metrics()["nonfinite_loss_streak"] == 0


def test_by_default_the_scale_backs_off():
    """As every original does."""
    info = Run().step(NAN)
    assert (info.applied, info.overflowed, info.nonfinite_loss, info.loss_scale_after) == (False, True, False, 4.0)


def test_an_overflow_of_the_backward_pass_still_backs_off():
    """It is retried at a lower scale, and `diagnose` distinguishes the two causes."""
    run = Run(on_nonfinite_loss="hold")
    info = run.step("overflow", retries=3)
    assert (info.applied, info.loss_scale_after) == (True, 2.0)
    run.step(NAN)
    text = run.scaler.diagnose()
    assert "2 of 3 steps skipped" in text
    assert "1 loss was NaN or infinite before scaling, and the loss scale was kept" in text


@pytest.mark.parametrize("retries", [0, 5])
@pytest.mark.parametrize("factors", [(NAN, 1.0, 1.0), (1.0, NAN, 1.0), (1.0, 1.0, NAN), ("overflow", 1.0, NAN)])
def test_one_lost_micro_batch_holds_the_step(factors, retries):
    """The rest of them does not run; micro-batches that fit before it do not count."""
    run = Run(on_nonfinite_loss="hold")
    run.step(1.0)
    before = run.everything()
    info = run.step(*factors, retries=retries)
    overflowed = "overflow" in factors and retries > 0
    assert (info.applied, info.nonfinite_loss, info.overflowed) == (False, True, False)
    assert info.loss_scale_after == (2.0 if overflowed else 8.0)
    assert _are_same(before[:2], run.everything()[:2])
    if not overflowed:
        assert _are_same(before, run.everything())


@BAD
def test_with_a_closure(bad):
    """An optimizer that runs the loss several times stops at the first that is lost."""
    run = Run(lambda params: torch.optim.LBFGS(params, lr=0.1), on_nonfinite_loss="hold")
    run.step(1.0)
    before = run.everything()
    info = run.step(bad, retries=3)
    assert (info.applied, info.nonfinite_loss, info.loss_scale_after) == (False, True, 8.0)
    assert _are_same(before, run.everything())
    assert run.step(1.0).applied


def test_a_streak_raises():
    """A dead model must not hide: the policy's limit of overflows in a row holds for losses, too."""
    run = Run()
    run.scaler = GradScaler(
        "cpu", policy=DynamicScaling(init_scale=8.0, max_overflow_streak=3), on_nonfinite_loss="hold"
    )
    for _ in range(2):
        run.step(NAN, retries=2)
    with pytest.raises(NonfiniteStreakError, match=r"the last 3 losses in a row .* reaches max_overflow_streak=3"):
        run.step(NAN, retries=2)
    assert run.scaler.get_scale() == 8.0
    unlimited = Run(on_nonfinite_loss="hold")
    for _ in range(30):
        unlimited.step(NAN)
    assert unlimited.scaler.metrics()["nonfinite_loss_streak"] == 30


def test_other_calls_are_as_before():
    """In a custom loop the scaler does not see the loss: there, a lost loss is an overflow."""
    run = Run(on_nonfinite_loss="hold")
    run.scaler.scale(run.loss(NAN)).backward()
    run.scaler.step(run.optimizer)
    assert run.scaler.update().overflowed


def test_with_a_guard_and_clipping():
    """The guard sees no norm of the step."""
    run = Run(on_nonfinite_loss="hold", on_nonfinite_update="skip", guard=SpikeGuard(warmup=2))
    for factor in (1.0, NAN, 1.0):
        run.scaler.minimize(run.optimizer, partial(run.loss, factor), max_norm=1.0)
    before = run.scaler.state_dict()["guard"]
    assert run.scaler.minimize(run.optimizer, partial(run.loss, NAN), max_norm=1.0).nonfinite_loss
    assert run.scaler.state_dict()["guard"] == before
    assert run.scaler.metrics()["nonfinite_losses"] == 2


def test_an_attached_loss_of_a_lost_one_is_not_warned_of(recwarn):
    """Its backward pass runs."""
    run = Run(on_nonfinite_loss="hold")
    weight = next(run.model.parameters())

    def loss():
        return run.scaler.attach(run.loss(NAN), weight.square().sum())

    assert run.scaler.minimize(run.optimizer, loss).nonfinite_loss
    assert not [str(each.message) for each in recwarn if "attached" in str(each.message)]


def test_after_an_error_nothing_is_left():
    """An error of `loss_fn` after a lost micro-batch, or anywhere else, does not hold the next step."""
    run = Run(on_nonfinite_loss="hold")
    with pytest.raises(ZeroDivisionError):
        run.scaler.minimize(run.optimizer, [partial(run.loss, 1.0), lambda: 1 / 0])
    assert run.step(1.0).applied


def _train(rank, world_size, kind, retries, fused):
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
    if kind == "ddp":
        module = DistributedDataParallel(module)
    elif kind == "fsdp2":
        fully_shard(module, mesh=dist.device_mesh.init_device_mesh("cpu", (world_size,)))
    group = dist.group.WORLD if kind in ("ddp", "group") else None
    scaler = GradScaler("cpu", init_scale=8.0, process_group=group, on_nonfinite_loss="hold")
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, fused=fused)
    for number in range(6):
        bad = number in (0, 3)

        def loss(bad=bad):
            factor = NAN if bad and rank == 1 else 1.0
            return module(torch.full((2, 4), 1.0 + rank)).square().mean() * factor

        before = [param.detach().clone() for param in module.parameters()]
        info = scaler.minimize(optimizer, [loss, loss] if retries and kind == "group" else loss, retries=retries)
        assert bool(info.nonfinite_loss) == bad == (not info.applied)
        same = [_local(one).equal(_local(other)) for one, other in zip(before, module.parameters(), strict=True)]
        assert all(same) == bad
    scaler.check_sync()
    assert scaler.get_scale() == 8.0
    assert scaler.metrics()["nonfinite_losses"] == 2


def _local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


@pytest.mark.parametrize("kind", ["ddp", FSDP2, "group"])
@pytest.mark.parametrize(("retries", "fused"), [(0, False), (2, False), (0, True)])
def test_two_ranks_hold_alike(kind, retries, fused):
    """Only one of which has a lost loss."""
    _on_ranks(2, partial(_train, kind=kind, retries=retries, fused=fused))


def _refuse(rank, world_size):
    run = Run(on_nonfinite_loss="hold")
    with pytest.raises(SyncError, match="make the scaler with process_group=, or with 'back_off'"):
        run.step(1.0)
    assert Run().step(1.0).applied


def test_several_ranks_that_do_not_combine_are_refused():
    """Their scales would drift apart."""
    _on_ranks(2, _refuse)


def test_a_call_that_raised_leaves_no_lost_loss():
    """The next step, of another call or of a loop, is an ordinary one."""
    weight = torch.nn.Parameter(torch.ones(2))
    closure, sgd = torch.optim.LBFGS([weight]), torch.optim.SGD([weight], lr=0.1)
    scaler = GradScaler("cpu", policy="none", on_nonfinite_loss="hold")

    def broken():
        raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        scaler.minimize(closure, [lambda: weight.sum() * float("nan"), broken])
    info = scaler.minimize(sgd, lambda: (weight**2).sum())
    assert info.applied
    assert not info.nonfinite_loss


def test_losses_of_another_optimizer_do_not_end_a_streak():
    """A model that is dead is found although another one trains in turns."""
    dead, alive = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    first, second = torch.optim.SGD([dead], lr=0.1), torch.optim.SGD([alive], lr=0.1)
    policy = DynamicScaling(max_overflow_streak=5)
    scaler = GradScaler("cpu", policy=policy, on_nonfinite_loss="hold")
    for _ in range(4):
        scaler.minimize(first, lambda: dead.sum() * float("nan"))
        scaler.minimize(second, lambda: alive.sum())
    with pytest.raises(NonfiniteStreakError, match="the last 5 losses"):
        scaler.minimize(first, lambda: dead.sum() * float("nan"))
    assert scaler.minimize(first, lambda: dead.sum()).applied
    assert scaler.metrics()["nonfinite_loss_streak"] == 0
