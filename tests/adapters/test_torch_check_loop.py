"""`check_training_loop` passes loops that follow their scaler, and names what the others move on a skipped step."""

import collections
import copy
import re

import numpy as np
import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from lossscale_torch import GradScaler
from lossscale_torch.testing import LoopError, check_training_loop
from tests.adapters.test_torch_distributed import _on_ranks

pytestmark = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning")  # bad loops do so


class Loop:
    """A loop that does everything right: accumulation, clipping, a schedule, an average, save and load."""

    autocast = False

    def __init__(self, scaler):
        self.scaler = scaler
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.9)
        self.ema = AveragedModel(self.model)

    def losses(self, batch):
        """Yield the losses of two micro-batches."""
        data = torch.randn(2, 8, 4, generator=torch.Generator().manual_seed(batch))
        for part in data:
            with torch.autocast("cpu", torch.float16, enabled=self.autocast):
                yield (self.model(part) - 1).square().mean() / 2

    def step(self, batch):
        """Take a step of two micro-batches."""
        self.optimizer.zero_grad()
        for loss in self.losses(batch):
            self.scaler.scale(loss).backward()
        self.clip()
        self.scaler.step(self.optimizer)
        self.follow(self.scaler.update())

    def clip(self):
        """Clip before the step."""
        self.scaler.unscale_and_clip_(self.optimizer, 0.1)

    def follow(self, info):
        """Let schedule and average follow an applied step."""
        if info.applied:
            self.scheduler.step()
            self.ema.update_parameters(self.model)

    def parts(self):
        """Return what a checkpoint holds."""
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "ema": self.ema,
            "scaler": self.scaler,
        }

    def state_dict(self):
        """Save the run."""
        return {name: part.state_dict() for name, part in self.parts().items()}

    def load_state_dict(self, saved):
        """Load the run."""
        for name, part in self.parts().items():
            part.load_state_dict(saved[name])


class Float16(Loop):
    """The same under autocast."""

    autocast = True


class Unscales(Loop):
    """The same with torch's own clip."""

    def clip(self):
        """Unscale first."""
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)


class Minimal:
    """A loop with an optimizer and nothing else."""

    def __init__(self, scaler):
        self.scaler = scaler
        self.model = torch.nn.Linear(4, 1)
        self.optimizer = torch.optim.Rprop(self.model.parameters())

    def step(self, batch):
        """Take a step."""
        self.optimizer.zero_grad()
        self.scaler.scale(self.model(torch.ones(2, 4)).square().mean()).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()


@pytest.mark.parametrize("build", [Loop, Float16, Unscales])
def test_a_loop_that_follows_passes(build):
    """With its own optimizer and with the fused kernel; the answer says what was checked."""
    checked = check_training_loop(build)
    assert len(checked) == 9
    assert sum("fused" in sentence for sentence in checked) == 4
    assert sum("saved and loaded" in sentence for sentence in checked) == 2


def test_what_a_loop_lacks_is_not_claimed():
    """Without save and load, and with an optimizer that has no fused kernel, the answer is shorter."""
    checked = check_training_loop(Minimal)
    assert len(checked) == 4
    assert not any("saved" in sentence or "fused" in sentence for sentence in checked)


class ScalesAList(Loop):
    """Scales both losses in one call, and runs one backward."""

    def step(self, batch):
        """Take a step of two losses."""
        self.optimizer.zero_grad()
        self.backward(list(self.losses(batch)))
        self.clip()
        self.scaler.step(self.optimizer)
        self.follow(self.scaler.update())

    def backward(self, losses):
        """Run the backward of all losses."""
        sum(self.scaler.scale(losses)).backward()


class ScalesATuple(ScalesAList):
    def backward(self, losses):
        torch.autograd.backward(self.scaler.scale(tuple(losses)))


class ScalesADict(ScalesAList):
    """Uses the second of the scaled values alone, as where the first is for a log."""

    def backward(self, losses):
        self.scaler.scale({"log": losses[0], "parts": losses, "total": sum(losses)})["total"].backward()


class ScalesAnIterator(ScalesAList):
    def backward(self, losses):
        sum(self.scaler.scale(iter(losses))).backward()


class ScalesListsInTurn(Loop):
    """Scales two micro-batches of two losses each."""

    def losses(self, batch):
        for loss in super().losses(batch):
            yield [loss, 0.5 * loss]

    def step(self, batch):
        self.optimizer.zero_grad()
        for losses in self.losses(batch):
            torch.autograd.backward(self.scaler.scale(losses))
        self.scaler.step(self.optimizer)
        self.follow(self.scaler.update())


@pytest.mark.parametrize("build", [ScalesAList, ScalesATuple, ScalesADict, ScalesAnIterator, ScalesListsInTurn])
def test_losses_may_be_scaled_together(build):
    """A list, tuple, dict or iterator of losses is made infinite once, in each call and in the first alone."""
    assert len(check_training_loop(build)) == 9


class SetsTheRate(Loop):
    """Sets the learning rate at the head of a step, from the number of applied steps."""

    def __init__(self, scaler):
        super().__init__(scaler)
        self.scheduler, self.number = None, 0

    def step(self, batch):
        for group in self.optimizer.param_groups:
            group["lr"] = 1e-2 / (1 + self.number)
        super().step(batch)

    def follow(self, info):
        if info.applied:
            self.number += 1
            self.ema.update_parameters(self.model)

    def parts(self):
        return {name: part for name, part in super().parts().items() if name != "scheduler"}

    def state_dict(self):
        return {**super().state_dict(), "number": self.number}

    def load_state_dict(self, saved):
        super().load_state_dict(saved)
        self.number = saved["number"]


class CountsAttempts(SetsTheRate):
    """The same from the number of steps that were tried, the skipped ones too."""

    def follow(self, info):
        self.number += not info.applied
        super().follow(info)


def test_a_rate_set_at_the_head_of_a_step_passes():
    """A skipped step sets the rate of the applied steps before it, which the step before did not know of yet."""
    assert len(check_training_loop(SetsTheRate)) == 9


class StepsSchedule(Loop):
    def follow(self, info):
        self.scheduler.step()
        if info.applied:
            self.ema.update_parameters(self.model)


class Averages(Loop):
    def follow(self, info):
        self.ema.update_parameters(self.model)
        if info.applied:
            self.scheduler.step()


class ReadsTheScale(Loop):
    """Asks whether the scale has fallen, as many trainers do; here it falls too little to be seen."""

    def step(self, batch):
        self.scaler.set_backoff_factor(1 - 2.0**-24)
        before = round(self.scaler.get_scale())
        self.optimizer.zero_grad()
        for loss in self.losses(batch):
            self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if round(self.scaler.get_scale()) >= before:
            self.scheduler.step()


class ClipsFirst(Loop):
    def clip(self):
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)


class ForgetsTheScaler(Loop):
    def parts(self):
        return {name: part for name, part in super().parts().items() if name != "scaler"}


class ForgetsTheSchedule(Loop):
    def parts(self):
        return {name: part for name, part in super().parts().items() if name != "scheduler"}


class HasBatchNorm(Loop):
    def __init__(self, scaler):
        super().__init__(scaler)
        self.model.insert(1, torch.nn.BatchNorm1d(8))
        self.ema = AveragedModel(self.model)


class ProtectsBatchNorm(HasBatchNorm):
    """The same, with buffers that a skipped step leaves as they were."""

    def __init__(self, scaler):
        super().__init__(scaler)
        self.protect = [self.model]


class Minimizes(ProtectsBatchNorm):
    """The same in one call."""

    def step(self, batch):
        self.follow(self.scaler.minimize(self.optimizer, lambda: sum(self.losses(batch)), max_norm=0.1))


class Retries(ProtectsBatchNorm):
    """The same with two micro-batches, each of which is run again where it is infinite."""

    def step(self, batch):
        """Take a step of two tries more."""
        losses = [lambda place=place: list(self.losses(batch))[place] for place in range(2)]
        self.follow(self.scaler.minimize(self.optimizer, losses, retries=2))


def test_a_loop_with_retries_passes():
    """A loss that is run again is infinite again, and all tries together are one update."""
    assert len(check_training_loop(Retries)) == 9


def test_loops_with_protected_buffers_pass():
    """With `protect=`, and with `minimize`."""
    assert len(check_training_loop(ProtectsBatchNorm)) == 9
    assert len(check_training_loop(Minimizes)) == 9


class StepsByItself(Loop):
    """Steps the optimizer past the scaler."""

    def step(self, batch):
        self.optimizer.zero_grad()
        for loss in self.losses(batch):
            self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        self.optimizer.step()
        self.scaler.update()


class Repairs(Loop):
    """Makes the gradients finite before the scaler sees them."""

    def clip(self):
        for param in self.model.parameters():
            param.grad.nan_to_num_(0.0, 0.0, 0.0)


class ClearsBetween(Loop):
    """Forgets the gradients of the first micro-batch."""

    def losses(self, batch):
        for loss in super().losses(batch):
            self.optimizer.zero_grad()
            yield loss


class ScalesOne(Loop):
    """Forgets to scale the second of its losses."""

    def step(self, batch):
        self.optimizer.zero_grad()
        first, second = self.losses(batch)
        self.scaler.scale(first).backward()
        second.backward()
        self.scaler.step(self.optimizer)
        self.follow(self.scaler.update())


class HasBatchNormAndAverages(HasBatchNorm):
    """Makes two faults, each with a remedy of its own."""

    follow = Averages.follow


class UpdatesTwice(Loop):
    def follow(self, info):
        self.scaler.update(1024.0)


class Accelerates(Loop):
    """Accelerate's own answer, which is wrong for a fused optimizer."""

    fused = True

    def __init__(self, scaler):
        super().__init__(scaler)
        self.accelerator = Accelerator(cpu=True)
        self.accelerator.scaler = scaler
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, fused=self.fused)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.9)
        self._prepared = self.accelerator.prepare_optimizer(self.optimizer)
        self._prepared.scaler = scaler

    def step(self, batch):
        self._prepared.zero_grad()
        for loss in self.losses(batch):
            self.scaler.scale(loss).backward()
        self._prepared.step()
        if not self._prepared.step_was_skipped:
            self.scheduler.step()


class AcceleratesWithOrdinary(Accelerates):
    fused = False


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (StepsSchedule, r"step 0 was to be skipped, but .*scheduler\.last_epoch went from 0 to 1"),
        (Averages, r"step 0 was to be skipped, but ema\.n_averaged went from 0 to 1"),
        (ReadsTheScale, r"scheduler\.last_epoch went from 0 to 1"),
        (CountsAttempts, r"after step 1, optimizer\.param_groups\.0\.lr is 0\.005 and not 0\.01, .*unlike without the"),
        (ClipsFirst, r"a loss scale of 1 and one of 1024 gave the optimizer gradients of norm .*; .*unscale before"),
        (ScalesOne, r"at step 0 a loss scale of 1 and .* gradients of norm .*; scale every loss, and"),
        (Repairs, r"step 0 was applied although one of its losses was infinite; .*nan_to_num_"),
        (ClearsBetween, r"step 0 was applied although .*zero_grad between micro-batches, .*scale every loss"),
        (ForgetsTheScaler, r"after loading, scaler\.scale is 1024.0 and not"),
        (ForgetsTheSchedule, r"after step 5, .*unlike without save and load"),
        (HasBatchNorm, r"model\.1\.running_mean changed, .*; make the scaler with GradScaler\(protect=\[model\]\)"),
        (HasBatchNormAndAverages, r"; follow applied steps only \(info\.applied\), and make .*protect=\[model\]"),
        (StepsByItself, r"model\.0\.weight changed, .*; call scaler\.step\(optimizer\) and not optimizer\.step\(\)"),
        (UpdatesTwice, r"step\(0\) called scaler\.update\(\) 2 times"),
    ],
)
def test_a_loop_that_does_not_follow_fails(build, message):
    """The message names the step and what moved."""
    with pytest.raises(LoopError, match=message):
        check_training_loop(build)


def test_other_faults_are_not_named():
    """The error for an average that moved on a skipped step says to follow applied steps, and nothing else."""
    with pytest.raises(LoopError) as caught:
        check_training_loop(Averages)
    assert str(caught.value).endswith("as it was; follow applied steps only (info.applied)")


def test_accelerate_is_wrong_with_a_fused_optimizer_only():
    """It takes a scale that did not fall yet for an applied step; with an ordinary optimizer the loop passes."""
    with pytest.raises(LoopError, match=r"scheduler\.last_epoch went from 0 to 1"):
        check_training_loop(Accelerates)


def test_what_is_not_a_loop_is_refused():
    """The error names what build returned."""
    with pytest.raises(TypeError, match=re.escape("build returned None; return an object with step(batch)")):
        check_training_loop(lambda scaler: None)


class _Router(torch.autograd.Function):
    """Adds the gradients of a loss within the graph, times a seed."""

    @staticmethod
    def forward(ctx, x, aux_loss, seed):
        ctx.seed = seed
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad, torch.as_tensor(ctx.seed), None


class Attaches(Loop):
    """Adds the loss of a router within the graph."""

    def __init__(self, scaler):
        super().__init__(scaler)
        self.model = torch.nn.ModuleDict({"main": torch.nn.Linear(4, 1), "router": torch.nn.Linear(4, 2)})
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler, self.ema = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.9), AveragedModel(self.model)

    def losses(self, batch):
        data = torch.randn(8, 4, generator=torch.Generator().manual_seed(batch))
        shares = self.model["router"](data).softmax(-1)
        x = self.attach(shares[:, :1] * data, 0.1 * shares.square().mean())
        yield (self.model["main"](x) - 1).square().mean()

    def attach(self, x, aux_loss):
        """Attach, as the documentation says."""
        return self.scaler.attach(x, aux_loss)


class CompilesAttach(Attaches):
    """Compiles the forward pass."""

    def __init__(self, scaler):
        super().__init__(scaler)
        torch._dynamo.reset()
        self.forward = torch.compile(self.compute, backend="aot_eager")

    def compute(self, data):
        shares = self.model["router"](data).softmax(-1)
        return self.model["main"](self.scaler.attach(shares[:, :1] * data, 0.1 * shares.square().mean()))

    def losses(self, batch):
        yield (self.forward(torch.randn(8, 4, generator=torch.Generator().manual_seed(batch))) - 1).square().mean()


class AsksForTheScale(Attaches):
    """Sets the seed by hand, from the scale of the step."""

    def attach(self, x, aux_loss):
        return _Router.apply(x, aux_loss, self.scaler.get_scale())


class AsMegatron(Attaches):
    """Sets the seed as Megatron does: what `scale` makes of one."""

    def attach(self, x, aux_loss):
        return _Router.apply(x, aux_loss, self.scaler.scale(torch.ones(())))


class AddsNoise(Loop):
    """Changes gradients after unscaling: noise, and a decay."""

    def clip(self):
        self.scaler.unscale_(self.optimizer)
        for param in self.model.parameters():
            param.grad.add_(torch.randn_like(param) * 1e-3).add_(param.detach(), alpha=1e-2)


class Decays(Loop):
    """Lets the optimizer decay the weights."""

    def __init__(self, scaler):
        super().__init__(scaler)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-2, momentum=0.9, weight_decay=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.9)


class UnscaledRouter(Attaches):
    def attach(self, x, aux_loss):
        return _Router.apply(x, aux_loss, 1.0)


class CopiesTheModel(Attaches):
    """Trains a copy of its model; the copy has the `attach` of a copy of the scaler."""

    def __init__(self, scaler):
        super().__init__(scaler)
        self.of_copy = copy.deepcopy(scaler).attach

    def attach(self, x, aux_loss):
        return self.of_copy(x, aux_loss)


class DecaysByAHook(Loop):
    def __init__(self, scaler):
        super().__init__(scaler)
        weight = self.model[0].weight
        weight.register_hook(lambda grad: grad + 1e-3 * weight.detach())


class UnscaledSecondToken(Loop):
    """Runs the backward pass of a small loss of another head without the scaler."""

    def step(self, batch):
        self.optimizer.zero_grad()
        for loss in self.losses(batch):
            self.scaler.scale(loss).backward()
        (1e-6 * self.model(torch.ones(2, 4)).mean()).backward()
        self.scaler.step(self.optimizer)
        self.follow(self.scaler.update())


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo's own
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("build", [Attaches, CompilesAttach, AsksForTheScale, AsMegatron, AddsNoise, Decays])
def test_gradients_that_follow_the_scale_pass(build):
    """Losses that are attached, or scaled by hand; noise and decay after unscaling, and decay in the optimizer."""
    assert "all gradients come from losses that are scaled or attached" in check_training_loop(build)


@pytest.mark.parametrize(
    ("build", "names"),
    [
        (UnscaledRouter, "router.weight, router.bias have gradients"),
        (CopiesTheModel, "router.weight, router.bias have gradients"),
        (DecaysByAHook, "0.weight has a gradient"),
        (UnscaledSecondToken, "0.weight, 0.bias, 2.weight, 2.bias have gradients"),
    ],
)
def test_gradients_that_miss_the_scale_fail(build, names):
    """The parameters are named, however small the weight of the loss is."""
    message = f"at step 0 the loss was multiplied by zero, and {names} other than zero; .*scaler.attach"
    with pytest.raises(LoopError, match=message):
        check_training_loop(build)


class UnscaledWithoutAModel(Minimal):
    """Keeps its model to itself, and takes steps without a fused kernel."""

    def __init__(self, scaler):
        super().__init__(scaler)
        self.inner, self.model = self.model, None
        self.inner.bias.register_hook(lambda grad: grad + 1e-6)

    def step(self, batch):
        self.optimizer.zero_grad()
        self.scaler.scale(self.inner(torch.ones(2, 4)).square().mean()).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()


def test_parameters_without_a_name_are_numbered():
    """The number in the optimizer's group names a parameter of a loop without a model."""
    with pytest.raises(LoopError, match="and parameter 1 of group 0 has a gradient"):
        check_training_loop(UnscaledWithoutAModel)


class _OnRanks(Loop):
    def __init__(self, scaler):
        super().__init__(scaler)
        self.ema = None
        self.parallel = self.wrapped()

    def wrapped(self):
        return DistributedDataParallel(self.model)

    def losses(self, batch):
        data = torch.randn(8, 4, generator=torch.Generator().manual_seed(batch))
        yield (self.parallel(data) - 1).square().mean()

    def follow(self, info):
        if info.applied:
            self.scheduler.step()

    def parts(self):
        return {name: part for name, part in super().parts().items() if name != "ema"}


class _FollowsRankZero(_OnRanks):
    """Without DDP's reduction, and with the answer of rank 0 for all."""

    def wrapped(self):
        return self.model

    def losses(self, batch):
        data = torch.randn(8, 4, generator=torch.Generator().manual_seed(batch))
        yield (self.model(data) - 1).square().mean()

    def step(self, batch):
        self.optimizer.zero_grad()
        for loss in self.losses(batch):
            self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        finite = torch.tensor(all(bool(param.grad.isfinite().all()) for param in self.model.parameters()))
        dist.broadcast(finite, 0)
        if finite:
            self.optimizer.step()
        self.scaler.update()


def _passes(rank, world_size):
    assert len(check_training_loop(_OnRanks)) == 9


def test_loops_on_ranks_pass():
    """The last rank alone sees the infinite loss, and both skip."""
    _on_ranks(2, _passes)


class _WrongOnOneRank(_OnRanks):
    """Adds something to a gradient of the last rank alone, after the reduction."""

    def clip(self):
        if dist.get_rank() == 1:
            self.model[0].weight.grad.add_(1e-6)
        super().clip()


def _one_rank_is_wrong(rank, world_size):
    with pytest.raises(LoopError, match=r"multiplied by zero, and 0\.weight has a gradient other than zero"):
        check_training_loop(_WrongOnOneRank)


def test_what_one_rank_adds_fails_on_all():
    """No rank waits for another that has raised its error."""
    _on_ranks(2, _one_rank_is_wrong)


def _rank_zero_decides(rank, world_size):
    message = (r"step 0 was applied although one", r"step 0 was to be skipped, but model\.0\.weight changed")[rank]
    with pytest.raises(LoopError, match=message):
        check_training_loop(_FollowsRankZero)


def test_the_decision_of_rank_zero_fails():
    """The infinite gradients of the last rank are applied, there and here."""
    _on_ranks(2, _rank_zero_decides)


def test_the_scaler_is_one_of_ours():
    """A loop may rely on `last_step`, `skip` and whatever else the class has."""
    seen = []

    def build(scaler):
        seen.append(scaler)
        return Minimal(scaler)

    check_training_loop(build)
    assert all(isinstance(scaler, GradScaler) for scaler in seen)


class Followed(Minimal):
    """A loop with a fused kernel and a schedule."""

    def __init__(self, scaler):
        super().__init__(scaler)
        self.parallel = self.model
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)

    def step(self, batch):
        self.optimizer.zero_grad()
        self.backward_before(batch)
        self.scaler.scale((self.parallel(torch.ones(2, 4)) - batch).square().mean()).backward()
        self.clip(batch)
        self.scaler.step(self.optimizer)
        if self.scaler.update().applied:
            self.scheduler.step()

    def backward_before(self, batch):
        """Run no other backward pass."""

    def clip(self, batch):
        """Clip nothing."""


class NeverSteps(Followed):
    def step(self, batch):
        self.scaler.scale(self.model(torch.ones(2, 4)).square().mean()).backward()
        self.scaler.unscale_(self.optimizer)
        self.scaler.update()


class NotFinite(Followed):
    def __init__(self, scaler):
        super().__init__(scaler)
        torch.nn.init.constant_(self.model.weight, float("nan"))


class Hidden(Followed):
    """Has no member for its model, and moves a weight in each step."""

    def __init__(self, scaler):
        super().__init__(scaler)
        self.model = None

    def step(self, batch):
        super().step(batch)
        self.parallel.weight.data.add_(1.0)


class AddsLater(Followed):
    """Adds a loss that is not scaled in each fourth step."""

    def backward_before(self, batch):
        if batch % 4 == 3:
            self.model.weight.square().sum().backward()


class ClipsLater(Followed):
    """Clips scaled gradients from its sixth step on."""

    def clip(self, batch):
        if batch >= 5:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.01)


class _Average:
    """Moves on each step, skipped or not."""

    def __init__(self, content):
        self.content = content

    def state_dict(self):
        return self.content


class InNumPy(Followed):
    def __init__(self, scaler):
        super().__init__(scaler)
        self.ema = _Average({"mean": np.zeros(2)})

    def step(self, batch):
        super().step(batch)
        self.ema.content["mean"] += 1


class InADeque(Followed):
    def __init__(self, scaler):
        super().__init__(scaler)
        self.ema = _Average(collections.deque([0]))

    def step(self, batch):
        super().step(batch)
        self.ema.content.append(1)


class TwoModels(Followed):
    """Has a second model, which it does not show, and steps its optimizer without the scaler."""

    def __init__(self, scaler):
        super().__init__(scaler)
        self.second = torch.nn.Linear(1, 1)
        self.of_second = torch.optim.Adam(self.second.parameters())

    def backward_before(self, batch):
        self.of_second.zero_grad()
        self.scaler.scale(self.second(torch.ones(1)).square().mean()).backward()

    def step(self, batch):
        super().step(batch)
        self.of_second.step()


class SecondIsRight(TwoModels):
    """Does not scale the loss of the second model."""

    def backward_before(self, batch):
        self.of_second.zero_grad()
        self.second(torch.ones(1)).square().mean().backward()


class ClipsTheOther(TwoModels):
    """Clips the scaled gradients of a second model."""

    def backward_before(self, batch):
        super().backward_before(batch)
        torch.nn.utils.clip_grad_norm_(self.second.parameters(), 0.01)
        self.scaler.step(self.of_second)

    def step(self, batch):
        Followed.step(self, batch)


class Complex(Minimal):
    """Has parameters that fused kernels refuse."""

    def __init__(self, scaler):
        super().__init__(scaler)
        self.model = torch.nn.Linear(4, 1, dtype=torch.complex64)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)

    def step(self, batch):
        self.optimizer.zero_grad()
        output = self.model(torch.ones(2, 4, dtype=torch.complex64))
        self.scaler.scale(torch.view_as_real(output).square().mean()).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (NeverSteps, "no parameter changed"),
        (NotFinite, "none of its steps was applied; look for a loss that is not finite"),
        (Hidden, "step 0 was to be skipped, but optimizer.parameter 0 of group 0 changed"),
        (InNumPy, "step 0 was to be skipped, but ema.mean changed"),
        (InADeque, "step 0 was to be skipped, but ema.1 appeared"),
        (TwoModels, r"parameters of Adam are not finite after it; call scaler.step\(optimizer\) for each"),
        (AddsLater, "at step 3 the loss was multiplied by zero, and weight has a gradient other than zero"),
        (ClipsLater, "at step 5 a loss scale of 1 and one of 1024 gave the optimizer gradients of norm"),
        (ClipsTheOther, "at step 0 a loss scale of 1 and one of 1024 gave the optimizer gradients of norm"),
    ],
)
def test_every_step_every_optimizer_and_every_value_is_compared(build, message):
    """Faults in later steps alone, in a second optimizer alone, and in arrays and containers of an average."""
    with pytest.raises(LoopError, match=message):
        check_training_loop(build)


@pytest.mark.parametrize(("build", "count"), [(Followed, 7), (SecondIsRight, 7), (Complex, 4)])
def test_what_has_no_fault_passes(build, count):
    """Complex parameters are not tried with a fused kernel, which refuses them."""
    assert len(check_training_loop(build)) == count
