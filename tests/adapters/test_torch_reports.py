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


def _mlp(*layers):
    return nn.Sequential(nn.Linear(16, 32), *layers, nn.Linear(32, 8))


def _tied():
    """Return an embedding and an output layer that share their weights."""
    layers = nn.Sequential(nn.Embedding(20, 16), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 20))
    layers[3].weight = layers[0].weight
    return layers


NETWORKS = {
    "attention": lambda: nn.Sequential(Attention(16, 1.0), Attention(16, 1.0)),
    "convolution": lambda: nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten()
    ),
    "dropout": lambda: _mlp(nn.Dropout(0.5), nn.ReLU()),
    "fused attention": lambda: nn.TransformerEncoderLayer(16, 2, 32, batch_first=True),
    "tied": _tied,
    "half": lambda: _mlp(nn.Tanh()).half(),
    "mlp": lambda: _mlp(nn.Tanh()),
}
INPUTS = {
    "convolution": lambda x: torch.randn(4, 3, 8, 8),
    "tied": lambda x: torch.randint(0, 20, (4, 6)),
    "half": lambda x: x.half(),
}


def _network(name):
    """Return a model and its inputs."""
    torch.manual_seed(0)
    x = torch.randn(4, 6, 16)
    model = NETWORKS[name]()
    return model, INPUTS[name](x) if name in INPUTS else x


def _loss_fn(model, x, weight=1.0):
    """Return a loss function that draws the same dropout masks in every call."""

    def loss_fn():
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.float16):
            out = model(x)
            return weight * (out - torch.linspace(-2, 2, out.shape[-1])).float().square().mean()

    return loss_fn


def _largest_finite_scale(model, loss_fn):
    """Return the largest power of two at which every gradient is finite, by bisection."""
    lowest, highest = -20, 60
    while highest - lowest > 1:
        middle = (lowest + highest) // 2
        model.zero_grad()
        (loss_fn().float() * 2.0**middle).backward()
        is_finite = all(parameter.grad.isfinite().all() for parameter in model.parameters())
        lowest, highest = (middle, highest) if is_finite else (lowest, middle)
    model.zero_grad()
    return 2.0**lowest


@pytest.mark.parametrize("weight", [1.0, 1e-3, 1e9])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_limit_agrees_with_bisection(name, weight):
    """The limit of the report is within one power of two of the largest scale with finite gradients."""
    model, x = _network(name)
    loss_fn = _loss_fn(model, x, weight)
    report = range_report(model, loss_fn)
    assert report.forward_finite
    assert 0.5 <= report.overflows_above / _largest_finite_scale(model, loss_fn) <= 2.0
    assert report.init_scale == min(report.overflows_above / 2, DynamicScaling().max_scale)
    policy = eval(str(report).rpartition("use ")[2], {"DynamicScaling": DynamicScaling})
    assert policy == report.policy
    assert policy.init_scale == report.init_scale


# -- no scale fits -----------------------------------------------------------------------------------------------------


def _square(model, x):
    with torch.autocast("cpu", torch.float16):
        return model(x).float().square().mean()


@pytest.mark.parametrize(
    ("dtype", "where"), [(torch.float16, "loss_fn (aten.div)"), (torch.float32, "the gradient of")]
)
def test_a_root_of_zero_is_named(dtype, where):
    """No scale makes its gradient finite; the report names this cause before the weight of the loss."""
    model, x = _network("half")
    report = range_report(model, lambda: (0.0 * model(x)).to(dtype).sqrt().float().mean())
    assert (report.forward_finite, report.init_scale, report.overflows_first[: len(where)]) == (True, None, where)
    assert "\nlook for a division by zero, or a root or logarithm of zero\n" in str(report)


def test_nan_without_infinity_is_predicted():
    """In float16 attention the backward pass of the softmax subtracts two infinities; half the scale fixes it."""
    torch.manual_seed(0)
    model = nn.ModuleDict({name: nn.Linear(16, 16, bias=False) for name in ("query", "key")})
    images, values = torch.randn(8, 16), 300.0 * torch.randn(8, 16)

    def loss_fn():
        with torch.autocast("cpu", torch.float16):
            weights = torch.softmax(model["query"](images) @ model["key"](images).T / 4, dim=-1)
            return (weights.half() @ values.half()).float().mean()

    report = range_report(model, loss_fn)
    assert (report.forward_finite, report.overflows_above) == (True, 2048.0)
    reports = {}
    for scale in (4096.0, 2048.0):
        model.zero_grad()
        loss = loss_fn()
        (loss * scale).backward()
        reports[scale] = overflow_report(model.named_parameters(), loss=loss)
    assert reports[4096.0] == [("query.weight", 256, 0, 0, 0.0), ("key.weight", 256, 0, 0, 0.0)]
    assert reports[4096.0].verdict.startswith("finite loss, NaN without an infinity: a smaller loss scale fixes")
    assert (reports[2048.0], reports[2048.0].verdict) == ([], "every gradient is finite")


# -- nothing changes ---------------------------------------------------------------------------------------------------


def test_the_loss_is_computed_once():
    """The function may draw its batch from an iterator, and have an unknown signature."""
    model, x = _network("mlp")
    losses = map(functools.partial(_square, model), [x])
    assert range_report(model, functools.partial(next, losses)).forward_finite


def test_compiled_models_run_uncompiled():
    """The operations have the names of the model without `torch.compile`; `vmap` changes nothing either."""
    model, x = _network("mlp")
    plain = range_report(model, lambda: _square(model, x))
    compiled = torch.compile(model, backend="eager")
    report = range_report(compiled, lambda: _square(compiled, x))
    assert [record[:3] for record in report.backward] == [record[:3] for record in plain.backward]
    assert report.overflows_above == plain.overflows_above
    assert range_report(model, lambda: _square(torch.vmap(model), x)).overflows_above == plain.overflows_above


REFUSED = {
    "a number": (lambda model, x: range_report(model, lambda: _square(model, x).item()), "loss_fn returned float"),
    "several": (lambda model, x: range_report(model, lambda: _square(model, x).repeat(2)), r"shape \(2,\)"),
    "no graph": (lambda model, x: range_report(model, lambda: _square(model, x).detach()), "has no graph"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_function_without_a_loss_is_refused(name):
    """The message names the returned value and the expected one."""
    program, message = REFUSED[name]
    with pytest.raises(ValueError if name in ("several", "no graph") else TypeError, match=message):
        program(*_network("mlp"))


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


def test_a_mask_of_infinity_is_not_an_overflow():
    """The model writes such a mask on purpose."""
    x = torch.ones(3, 3, dtype=torch.float16, requires_grad=True)
    model = nn.Linear(3, 3).half()

    def loss_fn():
        scores = model(x).masked_fill(torch.eye(3, dtype=torch.bool), -math.inf)
        return scores.softmax(-1).float().square().mean()

    assert not any(record.overflowed for record in range_report(model, loss_fn).forward)


def test_small_gradients_flush_to_zero_without_a_scale():
    """The report gives their share at the recommended scale and at 1."""
    model = nn.Linear(4, 1)
    report = range_report(model, lambda: 1e-7 * _square(model, torch.full((2, 4), 1e-2)))
    assert report.flushed < 0.01
    assert report.flushed_at_one > 0.3
    assert report.init_scale > 2.0**16


def test_float32_and_bfloat16_need_no_scaling():
    """The report recommends `NoScaling`."""
    model = nn.Linear(4, 1)
    report = range_report(model, lambda: model(torch.ones(2, 4)).square().mean())
    assert report.overflows_above == math.inf
    assert report.policy == NoScaling()
    assert repr(report).endswith("use NoScaling()")
    model.bfloat16()
    assert "use NoScaling()" in str(range_report(model, lambda: model(torch.ones(2, 4).bfloat16()).float().mean()))


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
        states = [torch.get_rng_state(), repr(random.getstate()), repr(np.random.get_state())]
        tensors = (*model.state_dict().values(), other.grad)
        return [*(tensor.clone() for tensor in tensors), *states], model[1].running_mean

    before, buffer = everything()
    with pytest.raises(KeyError) if raises else contextlib.nullcontext():
        range_report(model, loss_fn)
    aux_loss, scaler = torch.ones(1, requires_grad=True), GradScaler("cpu", init_scale=4.0)
    scaler.scale(scaler.attach(torch.ones(1), aux_loss).sum()).backward()
    assert aux_loss.grad.item() == 4.0  # within the report it has the report's
    after, buffer_after = everything()
    assert buffer_after is buffer
    for a, b in zip(before, after, strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
    assert all(torch.equal(param.grad, torch.ones_like(param)) for param in model.parameters())


def _report_of_shards(rank, world_size):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mp_policy=MixedPrecisionPolicy(param_dtype=torch.float16))
    x = torch.randn(4, 16) * (1 + 10 * rank)
    for weight in (1.0, 1e-3, 1e9):
        report = range_report(model, lambda weight=weight: weight * model(x).float().square().mean())
        assert report.overflows_above < 2.0**40


def test_ranks_of_a_sharded_model_report_their_own_batches():
    """They run the same passes, though their shards and batches differ: each pass gathers the weights of all."""
    on_ranks(2, _report_of_shards)
