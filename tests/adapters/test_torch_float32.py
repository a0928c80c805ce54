"""Modules that are kept in float32, and the plan that finds the modules to keep."""

import dataclasses
import pickle
from collections import OrderedDict

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from lossscale_torch import GradScaler, float32_plan, keep_in_float32, range_report
from tests.adapters.overflowing_models import Attention, Experts, model_of_transformers
from tests.sweeping import IS_SWEEP

pytestmark = pytest.mark.usefixtures("one_thread")
HALF = MixedPrecisionPolicy(param_dtype=torch.float16)


class Block(nn.Module):
    """A residual block; it may add to a copy of its input in float16, or have another norm."""

    def __init__(self, gain, is_half=False, norm=None):
        super().__init__()
        self.norm, self.linear, self.gain, self.is_half = norm or nn.LayerNorm(4), nn.Linear(4, 4), gain, is_half

    def forward(self, x):
        y = self.gain * self.linear(self.norm(x))
        return x.half().add(y.half()) if self.is_half else x + y


def _net(*gains, **options):
    """Return blocks between two linear layers, and their inputs; a gain of 1e6 makes a block overflow."""
    torch.manual_seed(0)
    blocks = nn.Sequential(*(Block(gain, **options) for gain in gains))
    parts = {"first": nn.Linear(4, 4), "blocks": blocks, "norm": nn.LayerNorm(4), "head": nn.Linear(4, 1)}
    return nn.Sequential(OrderedDict(parts)), torch.randn(8, 4)


def _loss_fn(model, x, weight=1.0, dtype=torch.float32, autocast=True):
    def loss_fn():
        with torch.autocast("cpu", torch.float16, enabled=autocast):
            out = model(x)
            return weight * (out if dtype is None else out.to(dtype)).square().mean()

    return loss_fn


# -- modules in float32 ------------------------------------------------------------------------------------------------


def _in_units(model):
    """Shard a model for float16; the modules in float32 are units, and what follows them gets float16 again."""
    mesh, float32 = dist.device_mesh.init_device_mesh("cpu", (1,)), MixedPrecisionPolicy(torch.float32)
    fully_shard(model.blocks[1], mesh=mesh, mp_policy=float32)
    fully_shard(model.norm, mesh=mesh, mp_policy=dataclasses.replace(float32, output_dtype=torch.float16))
    return fully_shard(model, mesh=mesh, mp_policy=HALF)


WRAPPED = {
    "compiled": lambda model: torch.compile(model, backend="eager", fullgraph=True),
    "checkpoint": lambda model: lambda x: checkpoint(model, x, use_reentrant=False),
    "ddp": lambda model: torch.compile(DistributedDataParallel(model), backend="eager"),
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "fsdp2": _in_units,
}


@pytest.mark.usefixtures("one_process")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # Dynamo's own
@pytest.mark.parametrize("is_kept_first", [True, False])
@pytest.mark.parametrize("kind", WRAPPED)
def test_every_wrapper_keeps_a_module(kind, is_kept_first):
    """The loss is the same whether a module is kept before or after it is wrapped; FSDP2 rounds it differently."""
    model, x = _net(1.0, 1e6)
    entries, names = set(model.state_dict()), ["blocks.1", "norm"]
    undo = keep_in_float32(model, names)
    expected = _loss_fn(model, x)()
    undo.close()
    if is_kept_first:
        keep_in_float32(model, names)
    wrapped = WRAPPED[kind](model)
    if not is_kept_first:
        keep_in_float32(wrapped if isinstance(wrapped, nn.Module) else model, names)
    assert set(model.state_dict()) == entries
    loss = _loss_fn(wrapped, x, autocast=kind != "fsdp2")()
    loss.backward()
    assert all(param.grad.isfinite().all() for param in model.parameters() if param.grad is not None)
    torch.testing.assert_close(loss, expected, rtol=1e-2 if kind == "fsdp2" else 0.0, atol=0.0)


def test_names_and_undoing():
    """A pattern stands for parts between two dots; a context ends its call only, and restores a replaced `forward`."""
    model, x = _net(1.0, 1e6, 1e6)
    loss_fn = _loss_fn(model, x)
    model.blocks[1].forward = model.blocks[1].forward
    with keep_in_float32(model, "blocks.[1-9]"), keep_in_float32(model, ["blocks.1", "blocks.?"]):
        assert loss_fn().isfinite()
    assert not loss_fn().isfinite()
    assert [name for name, module in model.named_modules() if "forward" in vars(module)] == ["blocks.1"]
    undo = keep_in_float32(model, ["blocks.1", "*.2"])
    assert loss_fn().isfinite()
    undo.close()
    assert not loss_fn().isfinite()


def test_an_interrupted_call_is_undone():
    """After Ctrl-C inside `keep_in_float32`, all modules run as before."""

    class Interrupted(nn.Identity):
        def __setattr__(self, name, value):
            super().__setattr__(name, value)
            if name == "forward":
                raise KeyboardInterrupt

    model = nn.Sequential(nn.Linear(4, 4), Interrupted())
    with pytest.raises(KeyboardInterrupt):
        keep_in_float32(model, "*")
    assert not any("forward" in vars(layer) for layer in model)


def test_inputs_of_a_kept_module():
    """Tensors in half precision are cast, nested ones too; the inputs keep the values that the module writes."""

    class Writes(nn.Module):
        def forward(self, x, nested, seen):
            seen.append((x.dtype, nested["y"].dtype, (x @ x).dtype))
            return x.mul_(2.0)

    model = nn.Sequential(Writes())
    keep_in_float32(model, "0")
    x, seen = torch.ones(2, 2, dtype=torch.bfloat16), []
    with torch.autocast("cpu", torch.float16):
        out = model[0](x, {"y": torch.ones(2, dtype=torch.float8_e5m2)}, seen=seen)
    assert seen == [(torch.float32,) * 3]
    assert (out.dtype, x.dtype, x.unique().item()) == (torch.float32, torch.bfloat16, 2.0)


def test_results_without_autocast_are_half():
    """Nothing else casts the inputs of the layer that follows in a model in half precision."""
    model, x = _net(1.0, 1.0)
    expected = model(x)
    model.half()
    model.blocks[1].linear.float()
    keep_in_float32(model, "blocks.1.linear")
    out = model(x.half())
    assert out.dtype is torch.half
    torch.testing.assert_close(out.float(), expected, rtol=2e-2, atol=2e-2)


def _weight_only(model, x):
    keep_in_float32(model, "first")
    float32_plan(model, lambda: nn.functional.linear(x, model.first.weight).mean())


def _unit_later(model, x):
    keep_in_float32(model, "blocks.1")
    fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (1,)), mp_policy=HALF)
    model(x)


LIST = nn.Sequential(nn.ModuleList())
REFUSED = {
    "unknown": (lambda model, x: keep_in_float32(model, "blocks.1.linaer"), "nearest name is 'blocks.1.linear'"),
    "list": (lambda model, x: keep_in_float32(LIST, "0"), "'0', which names no module with a forward pass"),
    "half": (lambda model, x: keep_in_float32(model.half(), "blocks.1"), r"1 has .*float16; .* call float\(\) on it"),
    "weight only": (_weight_only, "first is kept in float32 and its weights are used without calling it"),
    "in a half unit": (_unit_later, r"'blocks.1'\), mp_policy=.*float32\)\); .* add output_dtype=torch.float16"),
}


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("name", REFUSED)
def test_other_modules_are_refused(name):
    """The message names the remedy; under FSDP2 it shows the line to write."""
    program, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        program(*_net(1.0, 1.0))


# -- the plan ----------------------------------------------------------------------------------------------------------


class Steep(nn.Module):
    """A layer that is the identity nearly, and has gradients that exceed float16 at a loss scale of 1."""

    def __init__(self):
        super().__init__()
        self.small = nn.Linear(4, 4, bias=False)
        nn.init.constant_(self.small.weight, 1e-7)

    def forward(self, x):
        return 1e7 * self.small(x)


def _layers(*layers, gain=1.0):
    """Return a model that begins with a linear layer with large weights, and its inputs."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), *layers, nn.LayerNorm(4), nn.Linear(4, 1))
    model[0].weight.data.mul_(gain)
    return model, torch.randn(8, 6, 4)


def _loud_head():
    model, x = _net(1.0)
    model.head.weight.data.mul_(1e4)
    return model, x


MANY = nn.Sequential(*(nn.Identity() for _ in range(20)))
PLANS = {
    "nothing": (lambda: _net(1.0), {}, [], "keep in float32: nothing\nafter: finite; ... ; 0 of 7 modules"),
    "part behind others": (lambda: _net(1e6, norm=MANY), {}, ["blocks.0.linear"], "(aten.mul)"),
    "several": (lambda: _net(1e6, 1.0, 1e6), {}, ["blocks.0.linear", "blocks.2.linear"], "(or blocks.*.linear)\n"),
    # The experts add float16 to a buffer, which becomes float32 when the layer before them is kept.
    "buffer later": (lambda: _layers(Experts(4), gain=3e5), {}, ["0", "1"], "before: forward overflows in 0 ("),
    "attention": (lambda: _layers(Attention(4, 1e2)), {}, ["1"], "before: forward overflows in 1 (aten.exp)"),
    "always half": (lambda: _layers(nn.Sequential(Block(1e6, True))), {}, [], "forward overflows in 1.0 ("),
    "loss in half": (lambda: _net(1.0), {"dtype": torch.half, "weight": 1e7}, [], "\nforward overflows in loss_fn"),
    "half loss": (_loud_head, {"dtype": None, "weight": 1e-4}, ["head"], "before: forward overflows in loss_fn (aten."),
    "between": (lambda: (Steep(), torch.randn(8, 4)), {"weight": 1e4}, ["small"], "\nor keep nothing, and use"),
    "large loss": (lambda: _net(1.0), {"weight": 1e9}, [], "min_scale=2**-2"),
    "backward": (lambda: _layers(Steep()), {"weight": 1e4}, ["1.small"], "\nor keep nothing, and use DynamicScaling("),
}


@pytest.mark.parametrize("name", PLANS)
def test_plans_name_modules_or_a_remedy(name):
    """A plan names the modules to keep in float32, or says that none helps and names a remedy."""
    torch.manual_seed(0)
    make, options, modules, text = PLANS[name]
    model, x = make()
    plan = _require_plan(model, _loss_fn(model, x, **options), modules)
    # A pattern stands for several modules; if only one of several blocks is kept, it is named itself.
    assert plan.patterns == plan.modules or name == "several"
    assert all(part in repr(plan) for part in text.split(" ... "))
    assert plan.after.forward_finite is ("\nafter: finite; use " in str(plan))


def _require_plan(model, loss_fn, modules):
    """Require a plan of these modules, and a step that is applied with them; return the plan."""
    plan = float32_plan(model, loss_fn)
    assert list(plan.modules) == modules
    assert plan.after.forward_finite or not modules
    if plan.after.forward_finite:
        keep_in_float32(model, modules)
        scaler, optimizer = GradScaler("cpu", policy=plan.policy), torch.optim.SGD(model.parameters(), lr=0.0)
        scaler.scale(loss_fn()).backward()
        scaler.step(optimizer)
        assert scaler.update().applied
    return plan


MODELS = {
    "T5ForConditionalGeneration": ["encoder.block.1.layer.1.DenseReluDense.wo"],
    "Qwen2ForCausalLM": [f"model.layers.1.mlp.{name}_proj" for name in ("gate", "up", "down")],
    "MambaForCausalLM": ["backbone.layers.1.mixer"],
}


@pytest.mark.parametrize("name", MODELS if IS_SWEEP else ["T5ForConditionalGeneration"])
def test_plans_for_other_projects_models(name):
    """A plan for a model that is made from its configuration is minimal, and a step with it is applied."""
    torch.manual_seed(0)
    model, loss_of_model = model_of_transformers(name)

    def loss_fn():
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.float16):
            return loss_of_model()

    _require_plan(model, loss_fn, MODELS[name])


@pytest.mark.usefixtures("one_process")
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # a linear layer returns a view
@pytest.mark.parametrize("autocast", [False, True])
def test_a_plan_under_fsdp2(autocast):
    """The error shows the line that makes a unit in float32; with this unit the plan fits, and a step is applied."""

    def make(line=""):
        torch.manual_seed(0)
        model, x = _layers(Attention(4, 1e2))
        exec(line, {"model": model, "torch": torch} | {f.__name__: f for f in (fully_shard, MixedPrecisionPolicy)})
        for layer in (*model, model):
            if not hasattr(layer, "unshard"):
                fully_shard(layer, mp_policy=HALF)
        return model, _loss_fn(model, x, autocast=autocast)

    with pytest.raises(ValueError, match=r"^1 has parameters in torch.float16; .*fully_shard") as refused:
        float32_plan(*make())
    line, _, more = str(refused.value).partition(": ")[2].partition("; without autocast add ")
    model, loss_fn = make(line if autocast else line.replace("))", f", {more.split()[0]}))"))
    plan = _require_plan(model, loss_fn, ["1"] if autocast else [])
    assert plan.after.forward_finite


def test_plans_accept_a_scale_of_one():
    """A loss scale of 1 is enough unless `at_least` is larger; `before` describes the batch that overflows first."""
    model, x = _net(1.0)
    largest = range_report(model, _loss_fn(model, x)).overflows_above
    loss_fns = [_loss_fn(model, x, weight) for weight in (1.0, largest, 8.0)]
    plan = float32_plan(model, loss_fns)
    assert (plan.modules, plan.note, plan.before.overflows_above) == ((), "", 1.0)
    assert float32_plan(model, loss_fns, at_least=2.0).modules
