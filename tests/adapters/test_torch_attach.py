"""`GradScaler.attach`: the gradients of losses inside the graph are those of `loss + aux_loss`, bit for bit."""

import copy
import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from lossscale_core import FixedScaling
from lossscale_torch import GradScaler
from tests.adapters.recorded_graph import RecordedGraph
from tests.adapters.test_torch_distributed import _on_ranks
from tests.adapters.torch_steps import one, same
from tests.torch_versions import HAS_FSDP2_ON_CPU

pytestmark = [  # Dynamo's own
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning"),
]
SHAPES = {"()": lambda each: each.sum(), "(tokens,)": lambda each: each.sum(-1), "(tokens, experts)": lambda each: each}


class Router(nn.Module):
    """A layer with a router; it attaches the router's loss, or keeps it in `aux_loss` to be added."""

    def __init__(self, attach, shape):
        super().__init__()
        self.router, self.attach, self.shape = nn.Linear(8, 8), attach, shape

    def forward(self, x):
        shares = self.router(x).softmax(-1)
        out, self.aux_loss = x + shares.to(x.dtype), SHAPES[self.shape](shares.float().square() * 0.1)
        return out if self.attach is None else self.attach(out, self.aux_loss)


def _model(attach=None, shape="()"):
    torch.manual_seed(0)
    layers = (nn.Linear(4, 8), Router(attach, shape), nn.ReLU(), Router(attach, shape), nn.Linear(8, 1))
    return nn.Sequential(*layers)


def _batch(seed=0):
    return torch.randn(16, 4, generator=torch.Generator().manual_seed(seed))


def _loss(model, x):
    """Return the loss of a model, with those that its routers have not attached."""
    loss = (model(x) - 1).float().square().mean()
    routers = [each for each in model.modules() if isinstance(each, Router) and each.attach is None]
    return sum([router.aux_loss.sum() for router in routers], loss)


def _scaler(loss_scale, **settings):
    return GradScaler("cpu", policy=FixedScaling(loss_scale), **settings)


def _gradients(model, scaler):
    """Return the unscaled gradients of a model."""
    scaler.unscale_(torch.optim.SGD(model.parameters(), lr=0.0))
    return [param.grad for param in model.parameters()]


def _added(shape="()", micro_batches=1):
    """Return the gradients of the loss with the auxiliary losses added to it, unscaled."""
    model, scaler = _model(shape=shape), _scaler(1.0)
    for part in _batch().chunk(micro_batches):
        scaler.scale(_loss(model, part) / micro_batches).backward()
    return _gradients(model, scaler)


CHECKPOINTS = {"plain": None, "checkpoint": False, "reentrant checkpoint": True}


@pytest.mark.parametrize("loss_scale", [1.0, 2.0**8, 2.0**16, None])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("how", CHECKPOINTS)
def test_gradients_are_those_of_the_sum(loss_scale, shape, micro_batches, how):
    """Two attached losses of any shape, weighted by the user as the main loss; the first `attach` places the scale.

    A disabled scaler adds the loss as it is. The forward pass of a checkpoint runs twice, and the loss counts once.
    """
    scaler = _scaler(loss_scale) if loss_scale else GradScaler("cpu", enabled=False)
    model = _model(lambda x, aux_loss: scaler.attach(x, aux_loss / micro_batches), shape)
    for layer in model if how != "plain" else ():
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=CHECKPOINTS[how])
    for part in _batch().chunk(micro_batches):
        scaler.scale(_loss(model, part.requires_grad_()) / micro_batches).backward()
    assert same(_gradients(model, scaler), _added(shape, micro_batches))


@pytest.mark.parametrize("loss_scale", [1.0, 2.0**8, 2.0**16])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("is_placed", [True, False])
def test_compiled(loss_scale, backend, is_placed):
    """The whole model is one graph once the scale is placed, and a new scale compiles nothing again."""
    torch._dynamo.reset()
    scaler = GradScaler("cpu", init_scale=4.0)
    if is_placed:
        scaler.place_on("cpu")
    model = _model(lambda x, loss: scaler.attach(x, loss))  # torch 2.6 cannot trace `scaler.attach` as an attribute
    model = torch.compile(model, backend=backend, fullgraph=is_placed)
    with torch._dynamo.config.patch(error_on_recompile=is_placed):
        for scale in (4.0, loss_scale):
            scaler.update(scale) if scale != 4.0 else None
            model.zero_grad()
            scaler.scale(_loss(model, _batch())).backward()
            assert same([param.grad * (1.0 / scale) for param in model.parameters()], _added())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("loss_scale", [1.0, 2.0**8])
def test_autocast(dtype, loss_scale):
    """The gradients under autocast are those of the sum under autocast, at the same scale."""
    found = []
    for is_attached in (True, False):
        scaler = _scaler(loss_scale)
        model = _model(scaler.attach if is_attached else None)
        with torch.autocast("cpu", dtype):
            loss = _loss(model, _batch())
        scaler.scale(loss).backward()
        found.append(_gradients(model, scaler))
    assert same(*found)


@pytest.mark.parametrize("loss_scale", [1.0, 2.0**8, 2.0**15])
def test_float16_is_lifted(loss_scale):
    """The sum of a float16 loss is made in float32; its gradient is float16, and equal at each scale where it fits."""
    weight, scaler = torch.full((600,), 256.0, dtype=torch.float16, requires_grad=True), _scaler(loss_scale)
    x = scaler.attach(torch.ones(3, requires_grad=True), weight)  # the sum is above 65504
    scaler.scale(x.sum()).backward()
    assert weight.grad.dtype is torch.float16
    assert torch.equal(weight.grad.float() / loss_scale, torch.ones(600))


@pytest.mark.parametrize("dtype", [torch.float16, torch.complex64])
def test_float64_and_other_activations(dtype):
    """A float64 loss keeps its dtype; the activation may be float16 or complex."""
    weight, x = torch.tensor([1.0 / 3.0], dtype=torch.float64, requires_grad=True), torch.ones(2, dtype=dtype)
    scaler = _scaler(4.0)
    out = scaler.attach(x, weight.square())
    assert out.dtype is dtype
    assert torch.equal(out, x)
    scaler.scale(out.abs().sum()).backward()
    assert weight.grad.item() == 8.0 / 3.0


def test_a_replayed_graph_reads_the_present_scale():
    """The recorded backward pass reads the tensor that updates write in place."""
    weight, scaler = torch.nn.Parameter(torch.ones(3)), GradScaler("cpu", init_scale=4.0)
    scaler.place_on("cpu")
    with RecordedGraph() as graph:
        scaler.scale(scaler.attach(weight * 2, 3 * weight).sum()).backward()
    assert torch.equal(weight.grad, torch.full((3,), 20.0))
    scaler.update(1024.0)
    graph.replay()
    assert torch.equal(weight.grad, torch.full((3,), 5 * 1024.0))


OVERFLOWS = {
    "inf": lambda weight: weight * torch.inf,
    "nan": lambda weight: weight * torch.nan,
    "float16 from 2**16 on": lambda weight: weight.half() * weight.half(),
}


@pytest.mark.parametrize("aux_loss", OVERFLOWS.values(), ids=OVERFLOWS)
def test_gradients_that_are_not_finite_skip_the_step(aux_loss):
    """An overflow in an attached loss alone skips the step and lowers the scale."""
    (weight, optimizer), scaler = one(), GradScaler("cpu", init_scale=2.0**16)
    loss = scaler.attach(weight * 2, aux_loss(weight)).sum()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    assert not scaler.update().applied
    assert loss.isfinite()
    assert (weight.item(), scaler.get_scale()) == (1.0, 2.0**15)


def _on_two_ranks(rank, world_size):
    for kind in ("ddp", "fsdp2") if HAS_FSDP2_ON_CPU else ("ddp",):
        found = []
        for is_attached in (True, False):
            scaler = _scaler(256.0)
            model = _model(scaler.attach if is_attached else None)
            if kind == "ddp":
                model = DistributedDataParallel(model)
            else:
                for layer in [*model, model]:
                    fully_shard(layer)
            scaler.scale(_loss(model, _batch(rank))).backward()
            found.append([grad.full_tensor() if kind == "fsdp2" else grad for grad in _gradients(model, scaler)])
        assert same(*found)
    mesh = dist.device_mesh.init_device_mesh("cpu", (world_size,))
    weight = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)]).requires_grad_()
    for x in (torch.ones(2, requires_grad=True), distribute_tensor(torch.ones(2), mesh, [Shard(0)]).requires_grad_()):
        weight.grad, scaler = None, _scaler(256.0)
        scaler.scale(scaler.attach(x, weight * weight).sum()).backward()
        assert torch.equal(weight.grad.full_tensor(), torch.arange(4.0) * 512.0)


def test_on_ranks():
    """DDP and FSDP2 average the gradients of attached losses as those of the main loss.

    A DTensor means the sum of all its elements, as `loss + aux_loss.sum()` does; the activation may be one, too.
    """
    _on_ranks(2, _on_two_ranks)


# What cannot hold


def _with_a_penalty(scaler, weight):
    x = scaler.attach(weight * 2, 3 * weight)
    (grad,) = torch.autograd.grad(scaler.scale(x.sum()), weight, create_graph=True)
    assert torch.equal(grad, torch.full((3,), 20.0))  # 2 of the loss, and 3 of the attached one
    scaler.scale(x.sum()).backward()
    return 2 + 3


def _discarded(scaler, weight):
    x = weight * 2
    scaler.attach(x, 3 * weight)
    scaler.scale(x.sum()).backward()
    return 2


def _detached(scaler, weight):
    x = weight * 2
    x = x + scaler.attach(x, 3 * weight).detach() * 0
    scaler.scale(x.sum()).backward()
    return 2


@pytest.mark.parametrize("program", [_with_a_penalty, _discarded, _detached])
def test_what_cannot_hold(program):
    """Each program's gradients are other than 2 + 3, as documented."""
    weight, scaler = torch.nn.Parameter(torch.ones(3)), GradScaler("cpu", init_scale=4.0)
    expected = program(scaler, weight)
    assert torch.equal(weight.grad, torch.full((3,), 4.0 * expected))


def test_nothing_changes_without_gradients():
    """An evaluation under `no_grad` and a frozen router change nothing."""
    scaler, weight = _scaler(4.0), torch.ones(3)
    with torch.no_grad():
        x = scaler.attach(weight, torch.ones(3, requires_grad=True) * 2)
        assert torch.equal(x, weight)
        assert torch.equal(scaler.attach(weight, torch.ones(3)), weight)


def test_a_copy_of_a_layer_shares_the_scaler_of_its_attached_loss():
    """After skips the auxiliary gradients have the scale of the others."""
    scaler, layer = GradScaler("cpu", init_scale=16.0), nn.Linear(2, 2, bias=False)
    layer.attach = scaler.attach
    layer = copy.deepcopy(layer)
    optimizer, before = torch.optim.SGD(layer.parameters(), lr=1.0), layer.weight.detach().clone()
    for value in (torch.inf, torch.inf, 0.0):
        optimizer.zero_grad()
        scaler.scale(layer.attach(layer(torch.full((1, 2), value)), layer.weight.sum()).sum() * 0.0).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 4.0
    torch.testing.assert_close(before - layer.weight, torch.ones(2, 2))


def test_an_attached_loss_with_another_scaler_is_told():
    """As in a model that was loaded, or a scaler that was made a second time."""
    layer, new = Router(GradScaler("cpu").attach, "()"), GradScaler("cpu")
    with pytest.warns(UserWarning, match="an attached loss takes its loss scale from a scaler that has"):
        new.scale(layer(torch.ones(1, 8)).sum()).backward()
    layer.attach = new.attach
    new.scale(layer(torch.ones(1, 8)).sum()).backward()  # another warning would be an error


# A loss that is differentiated twice


def _penalized(scaler, half=False):
    """Return the gradients of a loss with a penalty on its gradient by the inputs, unscaled."""
    model, x = _model(), _batch().requires_grad_()
    with torch.autocast("cpu", torch.float16, enabled=half):
        loss = nn.functional.mse_loss(model(x).float(), torch.ones(16, 1))
    (scaled_slopes,) = torch.autograd.grad(scaler.scale(loss), x, create_graph=True)
    slopes = scaled_slopes / scaler.get_scale()
    scaler.scale(loss + 10.0 * slopes.square().sum()).backward()
    return _gradients(model, scaler)


@pytest.mark.parametrize("loss_scale", [2.0**-3, 1.0, 2.0**8, 2.0**12])
@pytest.mark.parametrize("half", [False, True], ids=["float32", "float16"])
def test_a_penalty_on_gradients(half, loss_scale):
    """Its gradients are those of float32: bit for bit, since powers of two round nothing; in float16 nearly."""
    found = _penalized(GradScaler("cpu", init_scale=loss_scale), half)
    for grad, right in zip(found, _penalized(GradScaler("cpu", enabled=False)), strict=True):
        assert (grad - right).norm() < 1e-2 * right.norm() if half else torch.equal(grad, right)
