"""`range_report` on real float16 models: its predictions are right, its names too, and it changes nothing."""

import functools
import itertools
import random
import time

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from lossscale_core import DynamicScaling
from lossscale_torch import GradScaler, range_report
from tests.torch_versions import needs_fsdp2_on_cpu


class Attention(nn.Module):
    """One head, written out, so that the backward pass of its softmax is an operation of its own."""

    def __init__(self, width=16):
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x, mask=None):
        scores = self.query(x) @ self.key(x).transpose(-1, -2) / x.shape[-1] ** 0.5
        if mask is not None:
            scores = scores.masked_fill(mask, -torch.inf)
        weights = scores.softmax(dim=-1)
        return self.out(weights.to(scores.dtype) @ self.value(x))


class Tied(nn.Module):
    """An embedding that shares its weights with the output layer."""

    def __init__(self):
        super().__init__()
        self.embed, self.hidden = nn.Embedding(20, 16), nn.Linear(16, 16)

    def forward(self, tokens):
        return self.hidden(self.embed(tokens)).relu() @ self.embed.weight.T


def _mlp(*layers):
    return nn.Sequential(nn.Linear(16, 32), *layers, nn.Linear(32, 8))


def _network(name):
    """Return a model and its inputs."""
    torch.manual_seed(0)
    x = torch.randn(4, 6, 16)
    if name == "attention":
        return nn.Sequential(Attention(), Attention()), x
    if name == "convolution":
        layers = (nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten())
        return nn.Sequential(*layers), torch.randn(4, 3, 8, 8)
    if name == "dropout":
        return _mlp(nn.Dropout(0.5), nn.ReLU()), x
    if name == "layer norm":
        return _mlp(nn.LayerNorm(32), nn.GELU()), x
    if name == "fused attention":
        return nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), x
    if name == "embedding":
        return nn.Sequential(nn.Embedding(20, 16), nn.Linear(16, 20)), torch.randint(0, 20, (4, 6))
    if name == "tied":
        return Tied(), torch.randint(0, 20, (4, 6))
    return _mlp(nn.Tanh()), x


def _loss_fn(model, x, weight=1.0):
    """Return what draws the same dropout masks whenever it is called."""

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


@pytest.fixture(autouse=True)
def _one_thread():
    """Small tensors are slower on several threads, and much so where others run, too."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


NETWORKS = ["attention", "convolution", "dropout", "layer norm", "fused attention", "embedding", "tied", "mlp"]


@pytest.mark.parametrize("weight", [1.0, 1e-3, 1e3])
@pytest.mark.parametrize("name", NETWORKS)
def test_the_limit_is_the_one_that_bisection_finds(name, weight):
    """Within one power of two, on each network and with each weight of the loss."""
    model, x = _network(name)
    loss_fn = _loss_fn(model, x, weight)
    report = range_report(model, loss_fn)
    assert report.forward_finite
    assert 0.5 <= report.overflows_above / _largest_finite_scale(model, loss_fn) <= 2.0
    assert report.init_scale == min(report.overflows_above / 2, DynamicScaling().max_scale)


def test_parameters_in_float16_are_measured_as_well():
    """A model that was cast by `half()`; its loss is float16, too."""
    model, x = _network("mlp")
    model.half()

    def loss_fn():
        return model(x.half()).square().mean()

    report = range_report(model, loss_fn)
    assert 0.5 <= report.overflows_above / _largest_finite_scale(model, loss_fn) <= 2.0


def test_a_scaler_that_begins_with_the_scale_applies_its_first_step():
    """And does not with four times the limit."""
    model, x = _network("attention")
    report = range_report(model, _loss_fn(model, x))
    for scale, applied in ((report.init_scale, True), (4 * report.overflows_above, False)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        scaler = GradScaler("cpu", policy=DynamicScaling(init_scale=scale))
        scaler.scale(_loss_fn(model, x)()).backward()
        scaler.step(optimizer)
        assert scaler.update().applied is applied
        model.zero_grad()


# -- names -------------------------------------------------------------------------------------------------------------


def test_the_operation_that_overflows_first_is_named():
    """By the module's path and by what torch calls the operation, in the backward pass."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"loud": nn.Linear(16, 16), "quiet": nn.Linear(16, 1)})
    nn.init.normal_(model["loud"].weight, std=1e-4)  # of inputs around 1000, which the gradient is a multiple of
    x = 1000.0 * torch.randn(8, 16)
    report = range_report(model, lambda: _square(lambda x: model["quiet"](model["loud"](x)), x))
    assert report.overflows_first.module == "loud"
    assert report.overflows_first.operation == "aten.mm"
    limit = f"2**{np.log2(report.overflows_above):.0f}"
    assert f"backward: overflows above a loss scale of {limit}, first in loud (aten.mm)" in str(report)


def test_operations_are_named_by_their_module_in_both_passes():
    """What a module computes between its children is its own, and what the loss computes is `loss_fn`'s."""
    model, x = _network("attention")
    report = range_report(model, _loss_fn(model, x))
    for records in (report.forward, report.backward):
        modules = {record.module for record in records if record.operation != "gradient"}
        assert modules >= {f"{i}.{name}" for i in (0, 1) for name in ("query", "key", "value", "out")} | {"0", "1"}
    softmax = [record.module for record in report.backward if record.operation == "aten._softmax_backward_data"]
    assert softmax == ["1", "0"]
    gradients = [record.module for record in report.backward if record.operation == "gradient"]
    assert gradients == [name for name, _ in model.named_parameters()]


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointed_modules_keep_their_names(use_reentrant):
    """What the backward pass computes again has the names and the limit that it has without checkpoints."""

    class Checkpointed(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=use_reentrant)

    model, x = _network("attention")
    plain = range_report(model, _loss_fn(model, x))
    model = nn.Sequential(Checkpointed(model[0]), Checkpointed(model[1]))
    report = range_report(model, _loss_fn(model, x.requires_grad_()))
    assert report.overflows_above == plain.overflows_above
    named = {record.module for record in report.backward if record.scaled and record.operation == "aten.mm"}
    assert named >= {f"{i}.inner.{name}" for i in (0, 1) for name in ("query", "key", "value", "out")}


def _slope(model, x):
    """Return the gradient of a model's sum by its inputs, with its own graph, as a penalty needs it."""
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.float16):
        out = model(x).float().sum()
    return torch.autograd.grad(out, x, create_graph=True)[0]


def test_a_double_backward_has_the_names_of_its_modules():
    """What a gradient penalty computes, by `create_graph=True`, and the gradients of that."""
    model, x = _network("mlp")
    report = range_report(model, lambda: (_slope(model, x).norm(dim=-1) - 1).half().float().square().mean())
    named = {
        operation: {record.module for record in report.backward if record.operation == operation}
        for operation in ("aten.mm", "aten.tanh_backward", "aten.sum")
    }
    assert named == {"aten.mm": {"0", "2"}, "aten.tanh_backward": {"1"}, "aten.sum": {"0"}}
    assert [record.module for record in report.forward][-1] == "loss_fn"
    assert "loss_fn" not in {record.module for record in report.backward[1:] if record.operation != "gradient"}
    penalised = {record.module for record in report.forward if record.operation == "aten.mm"}
    assert penalised == {"0", "2"}


def test_a_gradient_within_a_module_has_the_names_of_what_it_differentiates():
    """As the forces of an energy that a module returns."""

    class Forces(nn.Module):
        def __init__(self, energy):
            super().__init__()
            self.energy = energy

        def forward(self, x):
            return 2 * _slope(self.energy, x).half()

    model, x = _network("mlp")
    report = range_report(forces := Forces(model), lambda: forces(x).float().square().mean())
    for records in (report.forward, report.backward):
        assert {record.module for record in records if record.operation == "aten.mm"} == {"energy.0", "energy.2"}
        assert {record.module for record in records if record.operation == "aten.mul"} >= {"Forces"}


def test_what_the_loss_scale_does_not_multiply_sets_no_limit():
    """A value near the largest that a checkpoint computes again in the backward pass is as large at every scale."""
    torch.manual_seed(0)
    model, x = nn.Linear(16, 16), torch.randn(4, 16)

    def loud(x):
        return (60000 * (model(x) / model(x).abs().max())).abs().add(100).sqrt()

    def loss_fn():
        with torch.autocast("cpu", torch.float16):
            return 1e-6 * checkpoint(loud, x, use_reentrant=False).float().square().mean()

    report = range_report(model, loss_fn)
    assert any(record.largest > 50000 and not record.scaled for record in report.backward)
    assert report.overflows_above >= 2.0**20
    assert 0.5 <= report.overflows_above / _largest_finite_scale(model, loss_fn) <= 2.0


def test_views_and_constants_are_not_operations_that_compute():
    """Each result counts once, and memory that nothing has been written to does not."""
    model, x = _network("attention")
    report = range_report(model, _loss_fn(model, x))
    operations = {record.operation for record in (*report.forward, *report.backward)}
    views = {"aten.t", "aten.view", "aten._unsafe_view", "aten.transpose", "aten.expand", "aten.detach"}
    assert not operations & (views | {"aten.empty_like", "aten.empty", "aten.zeros", "aten.new_zeros"})
    assert operations >= {"aten._to_copy", "aten.addmm", "aten.bmm", "aten.mm", "aten.sum"}


# -- no scale fits -----------------------------------------------------------------------------------------------------


class Scaled(nn.Module):
    """Multiplies, in float16."""

    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return x.half() * self.factor


def test_an_overflow_of_the_forward_pass_is_named():
    """No scale fits, and the report says where infinity comes from rather than where it goes."""
    model, x = _network("mlp")
    model.append(Scaled(1e6))
    report = range_report(model, lambda: _square(model, x))
    assert not report.forward_finite
    assert report.overflows_above is None
    assert report.init_scale is None
    assert (report.overflows_first.module, report.overflows_first.operation) == ("3", "aten.mul")
    assert "forward: overflows in 3 (aten.mul); the loss is inf" in str(report)
    assert "backward: not run, since the loss is not finite" in str(report)


def _square(model, x):
    with torch.autocast("cpu", torch.float16):
        return model(x).float().square().mean()


def test_a_scale_below_one_fits_where_one_overflows():
    """The loss is finite, its weight is large, and a scaler that begins with the scale applies a step."""
    model, x = _network("mlp")
    report = range_report(model, lambda: 1e9 * _square(model, x))
    assert report.forward_finite
    assert 0.5 <= report.overflows_above / _largest_finite_scale(model, lambda: 1e9 * _square(model, x)) <= 2.0
    policy = eval(str(report).rpartition("use ")[2], {"DynamicScaling": DynamicScaling})
    assert policy.init_scale == report.init_scale < 1.0
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.0), GradScaler("cpu", policy=policy)
    scaler.scale(1e9 * _square(model, x)).backward()
    scaler.step(optimizer)
    assert scaler.update().applied


def test_no_scale_fits_parameters_that_cannot_hold_the_unscaled_gradient():
    """The gradient of a parameter in float16 is finite at a scale below 1, and infinite when it is divided by it."""
    model = nn.Linear(4, 1).half()
    report = range_report(model, lambda: 1e9 * model(torch.ones(2, 4).half()).float().mean())
    assert report.overflows_above is None
    assert "is finite at a loss scale of 2**-14, and overflows when unscaled" in str(report)


def test_a_gradient_that_is_not_finite_at_any_scale_is_not_taken_for_an_overflow():
    """The root of zero has an infinite slope, in float32; what overflows in float16 is not to blame."""
    model, x = _network("mlp")
    report = range_report(model, lambda: (0.0 * _square(model, x)).sqrt())
    assert report.overflows_above is None
    assert "loss_fn (aten._to_copy) is the first to be given infinity or NaN" in str(report)


def test_an_infinity_that_is_meant_is_not_an_overflow():
    """The mask of an attention holds -inf, in the scores as well, and every scale up to the limit fits."""
    model, x = _network("attention")
    mask = torch.ones(6, 6, dtype=torch.bool).triu(1)
    report = range_report(model, lambda: _square(lambda x: model[1](model[0](x, mask), mask), x))
    assert any(record.nonfinite for record in report.forward)
    assert report.forward_finite
    assert report.overflows_above > 1.0


def test_nan_without_infinity_is_predicted():
    """If only the backward pass of attention overflows, the report finds the scale that leaves NaN and no infinity."""
    torch.manual_seed(0)
    model = nn.ModuleDict({name: nn.Linear(16, 16, bias=False) for name in ("query", "key")})
    images, values = torch.randn(8, 16), 300.0 * torch.randn(8, 16)

    def loss_fn():
        with torch.autocast("cpu", torch.float16):
            weights = torch.softmax(model["query"](images) @ model["key"](images).T / 4, dim=-1)
            return (weights.half() @ values.half()).float().mean()

    report = range_report(model, loss_fn)
    assert report.forward_finite
    assert report.overflows_above == 2048.0


# -- what is not finite before anything is computed --------------------------------------------------------------------


def _with_nan(tensor, index=0, value=torch.nan):
    changed = tensor.detach().clone()
    changed.view(-1)[index] = value
    return changed


def _first_sentence(model, loss_fn):
    return str(range_report(model, loss_fn)).splitlines()[0]


def test_an_input_with_nan_is_named_before_anything_else():
    """By the name that it has in the function, whatever the operations make of it."""
    model, x = _network("mlp")
    x = _with_nan(x)
    report = range_report(model, lambda: _square(model, x))
    lines = str(report).splitlines()
    assert lines[0] == f"before the forward pass: x of loss_fn holds NaN in 1 of its {x.numel()} elements"
    assert lines[-1] == "replace NaN and infinity there first"
    assert report.nonfinite_inputs == (("x of loss_fn", x.numel(), 1, 0, 0),)


def test_a_label_with_infinity_is_named():
    """Which only the loss reads; also where it is in a dict, and in float64."""
    model, x = _network("mlp")
    batch = {"x": x, "y": _with_nan(torch.zeros(4, 6, 8, dtype=torch.float64), value=torch.inf)}
    sentence = _first_sentence(model, lambda: (model(batch["x"]) - batch["y"]).square().mean())
    assert sentence == "before the forward pass: batch['y'] of loss_fn holds infinity in 1 of its 192 elements"


@pytest.mark.parametrize("kind", ["weight", "buffer"])
def test_a_weight_with_nan_is_named(kind):
    """A parameter or a buffer, by its name in the model; one that no operation reads is not looked at."""
    model = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)).eval()
    tensor = model[1].weight if kind == "weight" else model[1].running_var
    for each in (tensor, model[2].weight):
        each.data = _with_nan(each)
    sentence = _first_sentence(model, lambda: _square(model[:2], torch.randn(4, 16)))
    name = "1.weight" if kind == "weight" else "1.running_var"
    assert sentence == f"before the forward pass: {kind} {name} holds NaN in 1 of its 8 elements"


def test_inputs_without_a_name_are_named_by_the_module_or_the_operation():
    """A batch that an iterator gives: what the model takes, and what only the loss reads."""
    model, x = _network("mlp")
    batches = iter([{"x": _with_nan(x), "y": _with_nan(torch.zeros(4, 6, 8))}])

    def loss_fn():
        batch = next(batches)
        return nn.functional.mse_loss(model(batch["x"]).float(), batch["y"])

    assert _first_sentence(model, loss_fn) == (
        "before the forward pass: input of Sequential holds NaN in 1 of its 384 elements, "
        "argument target of aten.mse_loss in loss_fn holds NaN in 1 of its 192 elements"
    )


def test_arguments_of_a_model_have_the_names_of_its_forward():
    """By position or by name, and within dicts."""

    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(16, 8)

        def forward(self, batch, *, bias):
            return self.linear(batch["features"]) + bias

    model, sources = Named(), iter([_with_nan(torch.ones(2, 16)), _with_nan(torch.ones(8))])
    sentence = _first_sentence(model, lambda: model({"features": next(sources)}, bias=next(sources)).mean())
    assert sentence.startswith("before the forward pass: batch['features'] of Named holds NaN in 1 of its 32 elements")
    assert sentence.endswith("bias of Named holds NaN in 1 of its 8 elements")


def test_a_mask_of_infinity_is_not_named_where_it_does_no_harm():
    """Nor is memory that is written before it is read."""
    model, x = _network("attention")
    mask = torch.full((6, 6), -torch.inf).triu(1)
    buffer = torch.full((4, 6, 16), torch.nan)

    def loss_fn():
        buffer[:].copy_(x)
        with torch.autocast("cpu", torch.float16):
            weights = (model[0].query(buffer) @ model[0].key(x).transpose(-1, -2) + mask).softmax(-1)
            return (weights.half() @ model[0].value(x)).float().square().mean()

    assert _first_sentence(model, loss_fn).startswith("forward: finite")
    assert buffer.isnan().all()


def test_a_module_within_vmap_is_measured():
    """The arguments there have no memory of their own that could identify them."""
    model, x = _network("mlp")
    report = range_report(model, lambda: _square(torch.vmap(model), _with_nan(x)))
    assert not report.forward_finite


@pytest.mark.parametrize(("dtype", "advice"), [(torch.float32, "NoScaling"), (torch.bfloat16, "NoScaling")])
def test_the_report_says_what_needs_no_scaling(dtype, advice):
    """Without float16 the limit is infinite, or very large."""
    model, x = _network("mlp")

    def loss_fn():
        with torch.autocast("cpu", dtype, enabled=dtype is not torch.float32):
            return model(x).float().square().mean()

    report = range_report(model, loss_fn)
    assert report.overflows_above == torch.inf if dtype is torch.float32 else report.overflows_above > 2.0**60
    assert report.init_scale == DynamicScaling().init_scale
    assert str(report).endswith(f"use {advice}()")


# -- nothing changes ---------------------------------------------------------------------------------------------------


def _bits(model, optimizer, generator):
    """Return everything that a report must leave alone, as plain bytes."""
    tensors = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters() if p.grad is not None)]
    states = [value for state in optimizer.state.values() for value in state.values()]
    everything = [*tensors, *states, torch.get_rng_state(), generator.get_state()]
    python, numpys = random.getstate(), np.random.get_state()
    return [bytes(t.detach().clone().untyped_storage()) for t in everything], python, numpys[1].tobytes(), numpys[2]


class Restless(nn.Module):
    """Changes whatever a forward pass can change."""

    def __init__(self, generator):
        super().__init__()
        self.conv, self.norm, self.drop = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5)
        self.linear = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("table", torch.zeros(8, 8))
        self.generator = generator

    def forward(self, x):
        x = self.drop(self.norm(self.conv(x))).mean((2, 3))
        x = x + torch.rand(x.shape, generator=self.generator) * random.random() * np.random.rand()
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0).float()
        self.table[2:4].view(-1)[3:5] += 1.0
        with torch.no_grad():
            self.conv.bias += 1.0
        return self.linear(x)


@pytest.mark.parametrize("raises", [False, True])
def test_nothing_is_changed(raises):
    """Parameters, gradients, buffers, an optimizer that steps in the backward pass, and five random states."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(3)
    model, x = Restless(generator), torch.randn(4, 3, 6, 6)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    _square(model, x).backward()
    optimizer.step()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    before, objects = _bits(model, optimizer, generator), [p.grad for p in model.parameters()]
    buffers = list(model.buffers())

    def loss_fn():
        loss = _square(model, x)
        if raises:
            raise KeyError("the data ends here")
        return loss

    if raises:
        with pytest.raises(KeyError, match="the data ends here"):
            range_report(model, loss_fn)
    else:
        assert range_report(model, loss_fn).overflows_above
    assert _bits(model, optimizer, generator) == before
    assert all(p.grad is grad for p, grad in zip(model.parameters(), objects, strict=True))
    assert all(a is b for a, b in zip(model.buffers(), buffers, strict=True))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.children())
    assert all(parameter._post_accumulate_grad_hooks for parameter in model.parameters())


def test_gradients_of_inputs_and_of_other_models_are_left_alone():
    """A leaf that the model does not own keeps the gradient it had."""
    model, x = _network("mlp")
    x.requires_grad_()
    temperature = torch.ones((), requires_grad=True)
    temperature.grad = torch.full((), 5.0)
    range_report(model, lambda: _square(model, x) * temperature)
    assert x.grad is None
    assert temperature.grad == 5.0
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_loss_is_computed_once():
    """It may draw its batch from an iterator."""
    model, x = _network("mlp")
    batches = iter([x])
    assert range_report(model, lambda: 1e-3 * _square(model, next(batches))).overflows_above


def test_compiled_models_run_uncompiled():
    """So that their operations are seen, under the names that the model has without `torch.compile`."""
    model, x = _network("mlp")
    plain = range_report(model, lambda: _square(model, x))
    compiled = torch.compile(model, backend="eager")
    report = range_report(compiled, lambda: _square(compiled, x))
    assert [record[:3] for record in report.backward] == [record[:3] for record in plain.backward]
    assert report.overflows_above == plain.overflows_above


@pytest.fixture
def process_group():
    """One process on its own."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # which has nothing to do with a report
@pytest.mark.parametrize("is_sharded", [False, pytest.param(True, marks=needs_fsdp2_on_cpu)])
def test_distributed_models_train_on_as_if_nothing_had_been(process_group, is_sharded):
    """Under DistributedDataParallel and `fully_shard`, before the first step and between steps."""
    losses = []
    for with_reports in (False, True):
        model, x = _network("mlp")
        if is_sharded:
            precision = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)
            for layer in (model[0], model[2], model):
                fully_shard(layer, mp_policy=precision)
        else:
            model = nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            if with_reports:
                report = range_report(model, lambda model=model, x=x: _square(model, x))
                assert report.overflows_first.module.endswith("2")
            loss = _square(model, x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert losses[:3] == losses[3:]
    assert len(set(losses)) == 3


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda loss: loss.item(), TypeError, "loss_fn returned float"),
        (lambda loss: loss.repeat(2), ValueError, r"shape \(2,\)"),
        (lambda loss: loss.detach(), ValueError, "has no graph"),
    ],
)
def test_what_is_not_a_loss_is_refused(make, error, message):
    """The message says what was returned and what to return."""
    model, x = _network("mlp")
    with pytest.raises(error, match=message):
        range_report(model, lambda: make(_square(model, x)))


_LOSS_FN = (
    "it takes a function without arguments that runs the model and returns the loss; "
    "write range_report(model, lambda: loss_fn(model(batch)))"
)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            lambda model, x: (lambda: _square(model, x), model),
            "range_report was given function as model; the model, an nn.Module, comes first; "
            "write range_report(model, loss_fn)",
        ),
        (lambda model, x: (model, x), f"range_report was given Tensor as loss_fn; {_LOSS_FN}"),
        (lambda model, x: (model, _square(model, x)), f"range_report was given Tensor as loss_fn; {_LOSS_FN}"),
        (lambda model, x: (model, None), f"range_report was given NoneType as loss_fn; {_LOSS_FN}"),
        (lambda model, x: (model, _square), f"range_report was given a loss_fn that needs arguments; {_LOSS_FN}"),
        (lambda model, x: (model, model), f"range_report was given a loss_fn that needs arguments; {_LOSS_FN}"),
        (lambda model, x: (model, nn.MSELoss()), f"range_report was given a loss_fn that needs arguments; {_LOSS_FN}"),
    ],
    ids=["swapped", "batch", "loss", "nothing", "function", "model", "criterion"],
)
def test_wrong_arguments_are_named(arguments, message):
    """The message says what was given, what belongs there and what to write, before anything runs."""
    with pytest.raises(TypeError) as raised:
        range_report(*arguments(*_network("mlp")))
    assert str(raised.value) == message


def test_an_error_of_the_loss_is_its_own():
    """A TypeError within `loss_fn` is not mistaken for wrong arguments; a callable with an unknown signature runs."""
    model, x = _network("mlp")
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        range_report(model, lambda: _square(model))
    with pytest.raises(TypeError, match="loss_fn returned dict"):
        range_report(model, dict)
    assert range_report(model, functools.partial(_square, model, x)).forward_finite


# -- what it costs -----------------------------------------------------------------------------------------------------


def test_a_line_of_progress(capsys):
    """It counts on stderr beyond a thousand operations, and says nothing before."""
    model, x = _network("mlp")
    range_report(model, lambda: _square(model, x))
    assert capsys.readouterr().err == ""
    range_report(model, lambda: _square(model, x) + sum(torch.ones(2000)))
    assert "range_report: 1000 operations" in capsys.readouterr().err


def test_it_costs_at_most_thirty_steps():
    """A small model: its operations are so short that measuring each takes longer than they do."""
    model, x = _network("attention")
    loss_fn = _loss_fn(model, x)

    def seconds(function, times):
        measured = []
        for _ in range(times):
            start = time.thread_time()  # that of other processes does not count
            function()
            measured.append(time.thread_time() - start)
        return min(measured)

    assert seconds(lambda: range_report(model, loss_fn), 5) <= 30 * seconds(lambda: loss_fn().backward(), 20)


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")  # of torch 2.11
def test_it_takes_at_most_half_more_memory_than_a_step():
    """As torch counts it: the most that is allocated at any time, of a step and of a report."""
    model, x = nn.Sequential(*(nn.Linear(256, 256) for _ in range(6))), torch.randn(512, 256)

    def peak(function):
        with profile(profile_memory=True, activities=[ProfilerActivity.CPU]) as profiled:
            function()
        changes = [event.nbytes() for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
        return max(itertools.accumulate(changes))

    step = peak(lambda: _square(model, x).backward())
    model.zero_grad()
    assert peak(lambda: range_report(model, lambda: _square(model, x))) <= 1.5 * step
