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
from tests.adapters.torch_ranks import on_ranks
from tests.adapters.torch_steps import same
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


@pytest.mark.parametrize("loss_scale", [1.0, 2.0**8, 2.0**15])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.complex64])
def test_dtypes(dtype, loss_scale):
    """A float64 loss keeps its dtype, and the sum of a float16 one is made in float32; the activation is as it was."""
    half = torch.full((600,), 256.0, dtype=torch.float16, requires_grad=True)  # the sum is above 65504
    double = torch.tensor([1.0 / 3.0], dtype=torch.float64, requires_grad=True)
    x, scaler = torch.ones(2, dtype=dtype), _scaler(loss_scale)
    out = scaler.attach(scaler.attach(x, double.square()), half)
    assert out.dtype is dtype
    assert torch.equal(out, x)
    scaler.scale(out.abs().sum()).backward()
    assert double.grad.item() == loss_scale * 2.0 / 3.0
    assert half.grad.dtype is torch.float16
    assert torch.equal(half.grad.float() / loss_scale, torch.ones(600))


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
    on_ranks(2, _on_two_ranks)


# What cannot hold


@pytest.mark.parametrize("use", [lambda x, out: x, lambda x, out: x + 0 * out.detach()], ids=["discarded", "detached"])
def test_what_cannot_hold(use):
    """A result that does not reach the loss has no effect, as documented."""
    weight, scaler = torch.nn.Parameter(torch.ones(3)), GradScaler("cpu", init_scale=4.0)
    x = weight * 2
    scaler.scale(use(x, scaler.attach(x, 3 * weight)).sum()).backward()
    assert torch.equal(weight.grad, torch.full((3,), 8.0))


def test_a_gradient_within_the_graph_has_the_attached_loss():
    """That of `autograd.grad`, as in a penalty, is of the sum, too; nothing is attached without gradients."""
    weight, scaler = torch.nn.Parameter(torch.ones(3)), GradScaler("cpu", init_scale=4.0)
    loss = scaler.scale(scaler.attach(weight * 2, 3 * weight).sum())
    (grad,) = torch.autograd.grad(loss, weight, create_graph=True)
    assert torch.equal(grad, torch.full((3,), 20.0))
    with torch.no_grad():
        assert torch.equal(scaler.attach(weight, torch.ones(3, requires_grad=True)), weight)


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
    """As in a model that was loaded, or a scaler that was made a second time; once."""
    layer, new = Router(GradScaler("cpu").attach, "()"), GradScaler("cpu")
    with pytest.warns(UserWarning, match="an attached loss takes its loss scale from a scaler that has"):
        new.scale(layer(torch.ones(1, 8)).sum()).backward()
    for attach in (layer.attach, new.attach):
        layer.attach = attach
        new.scale(layer(torch.ones(1, 8)).sum()).backward()  # another warning would be an error
