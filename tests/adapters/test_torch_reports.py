"""Range reports on real float16 models: their scales and names are right, and the model stays as it was."""

import contextlib
import functools
import math
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from lossscale_core import DynamicScaling, NoScaling
from lossscale_torch import GradScaler, overflow_report, range_report
from tests.adapters.overflowing_models import Attention
from tests.adapters.torch_ranks import on_ranks

pytestmark = pytest.mark.usefixtures("one_thread")


class Scores(nn.Module):
    """Attention to large values; in its backward pass the softmax subtracts two infinities, which is NaN."""

    def __init__(self):
        super().__init__()
        self.query, self.key = nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)
        self.values = 30.0 * torch.randn(6, 16).half()

    def forward(self, x):
        return torch.softmax(self.query(x) @ self.key(x).mT / 4, dim=-1).half() @ self.values


NETWORKS = {
    "attention": lambda: nn.Sequential(Attention(16, 1.0), Attention(16, 1.0)),
    "fused attention": lambda: nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True),
    "half": lambda: nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 8)).half(),
    "mlp": lambda: nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 8)),
    "scores": Scores,
}


def _network(name):
    """Return a model and its inputs."""
    torch.manual_seed(0)
    x = torch.randn(4, 6, 16)
    return NETWORKS[name](), x.half() if name == "half" else x


def _square(model, x):
    with torch.autocast("cpu", torch.float16):
        return model(x).float().square().mean()


def _are_gradients_finite(model, loss_fn, loss_scale):
    model.zero_grad()
    (loss_fn() * loss_scale).backward()
    return all(param.grad.isfinite().all() for param in model.parameters())


@pytest.mark.parametrize("weight", [1.0, 1e-3, 1e9])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_limit_agrees_with_passes(name, weight):
    """Half of the limit of the report has finite gradients, and four times the limit has not."""
    model, x = _network(name)
    loss_fn = lambda: weight * _square(model, x)  # noqa: E731
    report = range_report(model, loss_fn)
    assert (report.forward_finite, report.loss) == (True, loss_fn().item())
    limit = report.overflows_above
    assert [_are_gradients_finite(model, loss_fn, factor * limit) for factor in (0.5, 4.0)] == [True, False]
    assert report.init_scale == min(limit / 2, DynamicScaling().max_scale)
    policy = eval(str(report).rpartition("use ")[2], {"DynamicScaling": DynamicScaling})
    assert policy == report.policy


def test_nan_without_infinity_is_explained():
    """With the loss, an overflow report says that a smaller loss scale fixes NaN of the backward pass."""
    model, x = _network("scores")
    verdicts = []
    for scale in (2.0**24, 1.0):
        _are_gradients_finite(model, lambda: _square(model, x), scale)
        verdicts.append(overflow_report(model.named_parameters(), loss=_square(model, x)).verdict)
    assert verdicts[0].startswith("finite loss, NaN without an infinity: a smaller loss scale fixes")
    assert verdicts[1] == "every gradient is finite"


@pytest.mark.parametrize(
    ("dtype", "where"), [(torch.float16, "loss_fn (aten.div)"), (torch.float32, "the gradient of 2.bias")]
)
def test_a_root_of_zero_is_named(dtype, where):
    """The report names a root of zero, whose gradient no scale makes finite, before the weight of the loss."""
    model, x = _network("half")
    # The loss is computed once, so that it may come from an iterator.
    losses = ((0.0 * model(each)).to(dtype).sqrt().float().mean() for each in [x])
    report = range_report(model, functools.partial(next, losses))
    assert (report.forward_finite, report.init_scale, report.overflows_first[: len(where)]) == (True, None, where)
    assert "\nlook for a division by zero, or a root or logarithm of zero\n" in str(report)


# -- names and shares --------------------------------------------------------------------------------------------------


def test_compiled_models_run_uncompiled():
    """The operations have the names of the model without `torch.compile`."""
    model, x = _network("mlp")
    compiled = torch.compile(model, backend="eager")
    reports = [range_report(each, lambda each=each: _square(each, x)) for each in (model, compiled)]
    names, same_names = [[record[:3] for record in report.backward] for report in reports]
    assert names == same_names


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_modules_keep_their_names(reentrant):
    """Operations that the backward pass computes again have the names of the forward pass."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    x = torch.ones(2, 4, requires_grad=True)
    report = range_report(model, lambda: checkpoint(lambda y: _square(model, y), x, use_reentrant=reentrant))
    modules = {record.module for record in report.backward}
    assert modules <= {"0", "1", "loss_fn"}
    assert "0" in modules
    assert x.grad is None


def test_masks_of_infinity_are_no_overflow():
    """The model writes such a mask on purpose."""
    model, x = _network("half")
    mask = torch.tensor([True] + [False] * 7)
    report = range_report(model, lambda: model(x).masked_fill(mask, -math.inf).softmax(-1).float().square().mean())
    assert not any(record.overflowed for record in report.forward)


def test_small_gradients_flush_to_zero():
    """The report gives their share at the recommended scale and at 1."""
    model = nn.Linear(4, 1)
    report = range_report(model, lambda: 1e-7 * _square(model, torch.full((2, 4), 1e-2)))
    assert report.flushed < 0.01
    assert report.flushed_at_one > 0.3
    assert report.init_scale > 2.0**16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_dtypes_need_no_scaling(dtype):
    """The report recommends `NoScaling`."""
    model, x = nn.Linear(4, 1).to(dtype), torch.ones(2, 4, dtype=dtype)
    report = range_report(model, lambda: model(x).float().square().mean())
    assert report.policy == NoScaling()
    assert repr(report).endswith("use NoScaling()")
    assert report.overflows_above == math.inf


# -- what a report leaves as it was ------------------------------------------------------------------------------------


@pytest.mark.parametrize("raises", [False, True])
def test_nothing_is_changed(raises):
    """Parameters, gradients, buffers and random states stay as they were, even if the loss raises an error."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))
    other = nn.Parameter(torch.ones(1))
    for param in (*model.parameters(), other):
        param.grad = torch.ones_like(param)

    def loss_fn():
        loss = _square(model, torch.randn(8, 4)) * other + random.random() + np.random.rand()
        model[1].running_mean = torch.zeros(4)
        if raises:
            raise KeyError("loss")
        return loss

    def everything():
        states = [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()]
        return repr([model.state_dict(), [param.grad for param in (*model.parameters(), other)], *states])

    before, buffer = everything(), model[1].running_mean
    with pytest.raises(KeyError) if raises else contextlib.nullcontext():
        range_report(model, loss_fn)
    assert everything() == before
    assert model[1].running_mean is buffer


def test_attached_losses_have_the_reports_scale():
    """A report sees the overflow of an attached loss; afterwards `attach` uses the scale of its scaler again."""
    scaler, model = GradScaler("cpu", init_scale=4.0), nn.Linear(4, 1).half()
    x = torch.ones(2, 4, dtype=torch.float16)
    loss_fn = lambda: scaler.attach(torch.ones(1, requires_grad=True), model(x)).sum()  # noqa: E731
    assert range_report(model, loss_fn).overflows_above < 2.0**16
    model.zero_grad()
    scaler.scale(loss_fn()).backward()
    assert model.bias.grad.item() == 8.0


def _report_of_shards(rank, world_size):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mp_policy=MixedPrecisionPolicy(param_dtype=torch.float16))
    x = torch.randn(4, 16) * (1 + 10 * rank)
    for weight in (1.0, 1e-3, 1e9):
        report = range_report(model, lambda weight=weight: weight * model(x).float().square().mean())
        assert report.overflows_above < 2.0**40


def test_ranks_report_their_own_batches():
    """They run the same passes, though their shards and batches differ: each pass gathers the weights of all."""
    on_ranks(2, _report_of_shards)
