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


class Router(nn.Module):
    """A layer with a router; it attaches the router's losses, or keeps them in `aux_loss` to be added."""

    def __init__(self, attach=None):
        super().__init__()
        self.router, self.attach = nn.Linear(8, 8), attach

    def forward(self, x):
        shares = self.router(x).softmax(-1)
        out, self.aux_loss = x + shares, shares.square() * 0.1
        return out if self.attach is None else self.attach(out, self.aux_loss)


def _model(attach=None):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), Router(attach), nn.ReLU(), Router(attach), nn.Linear(8, 1))


def _batch(seed=0):
    return torch.randn(16, 4, generator=torch.Generator().manual_seed(seed))


def _loss(model, x):
    """Return the loss of a model, with those that its routers have not attached."""
    loss = (model(x) - 1).square().mean()
    routers = [each for each in model.modules() if isinstance(each, Router) and each.attach is None]
    return sum([router.aux_loss.sum() for router in routers], loss)


def _scaler(loss_scale):
    return GradScaler("cpu", policy=FixedScaling(loss_scale))


def _gradients(model, scaler):
    """Return the unscaled gradients of a model."""
    return [param.grad / scaler.get_scale() for param in model.parameters()]


def _added(micro_batches=1):
    """Return the gradients of the loss with the auxiliary losses added to it, unscaled."""
    model, scaler = _model(), _scaler(1.0)
    for part in _batch().chunk(micro_batches):
        scaler.scale(_loss(model, part) / micro_batches).backward()
    return _gradients(model, scaler)


@pytest.mark.parametrize("loss_scale", [1.0, 2.0**16, None])
@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("reentrant", [None, False, True])
def test_gradients_are_those_of_the_sum(loss_scale, micro_batches, reentrant):
    """Attached losses have the gradients of the sum of all losses, with micro-batches and checkpoints, too."""
    scaler = _scaler(loss_scale) if loss_scale else GradScaler("cpu", enabled=False)
    # The user weights attached losses as the main loss; the first `attach` places the scale.
    model = _model(lambda x, aux_loss: scaler.attach(x, aux_loss / micro_batches))
    # The forward pass of a checkpoint runs twice, and the loss counts once.
    for layer in model if reentrant is not None else ():
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=reentrant)
    for part in _batch().chunk(micro_batches):
        scaler.scale(_loss(model, part.requires_grad_()) / micro_batches).backward()
    assert same(_gradients(model, scaler), _added(micro_batches))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("is_placed", [True, False])
def test_a_compiled_model_attaches(backend, is_placed):
    """The whole model is one graph once the scale is placed, and a new scale compiles nothing again."""
    torch._dynamo.reset()
    scaler = GradScaler("cpu", init_scale=4.0)
    if is_placed:
        scaler.place_on("cpu")
    model = _model(lambda x, loss: scaler.attach(x, loss))  # torch 2.6 cannot trace `scaler.attach` as an attribute
    model = torch.compile(model, backend=backend, fullgraph=is_placed)
    with torch._dynamo.config.patch(error_on_recompile=is_placed):
        for _ in range(2):
            model.zero_grad()
            scaler.scale(_loss(model, _batch())).backward()
            assert same(_gradients(model, scaler), _added())
            scaler.update(2.0**16)


def test_losses_of_any_dtype_are_attached():
    """A float64 loss keeps its dtype, and the sum of a float16 one is made in float32; the activation is as it was."""
    half = torch.full((600,), 256.0, dtype=torch.float16, requires_grad=True)  # the sum is above 65504
    double = torch.tensor([1.0 / 3.0], dtype=torch.float64, requires_grad=True)
    x, scaler = torch.ones(2, dtype=torch.complex64), _scaler(2.0**15)
    out = scaler.attach(scaler.attach(x, double.square()), half)
    assert torch.equal(out, x)
    scaler.scale(out.abs().sum()).backward()
    assert double.grad.item() == 2.0**16 / 3.0
    assert torch.equal(half.grad, torch.full((600,), 2.0**15, dtype=torch.float16))


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
    # A DTensor means the sum of all its elements, as `loss + aux_loss.sum()` does.
    mesh = dist.device_mesh.init_device_mesh("cpu", (world_size,))
    weight, scaler = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)]).requires_grad_(), _scaler(256.0)
    scaler.scale(scaler.attach(torch.ones(2, requires_grad=True), weight * weight).sum()).backward()
    assert torch.equal(weight.grad.full_tensor(), torch.arange(4.0) * 512.0)


def test_attached_losses_on_ranks():
    """DDP and FSDP2 average the gradients of attached losses as those of the main loss."""
    on_ranks(2, _on_two_ranks)


def test_a_copied_layer_shares_its_scaler():
    """After a change of the scale, its auxiliary gradients have the scale of the others."""
    scaler, layer = GradScaler("cpu", init_scale=16.0), nn.Linear(1, 1, bias=False)
    layer.attach = scaler.attach
    layer = copy.deepcopy(layer)
    scaler.scale(torch.ones(()))
    scaler.update(4.0)
    scaler.scale(layer.attach(layer(torch.ones(1, 1)), layer.weight).sum()).backward()
    assert layer.weight.grad.item() == 8.0


def test_another_scalers_attached_loss_warns():
    """As in a model that was loaded, or a scaler that was made a second time; once."""
    layer, new = Router(GradScaler("cpu").attach), GradScaler("cpu")
    with pytest.warns(UserWarning, match="an attached loss takes its loss scale from a scaler that has"):
        new.scale(layer(torch.ones(1, 8)).sum()).backward()
    for attach in (layer.attach, new.attach):
        layer.attach = attach
        new.scale(layer(torch.ones(1, 8)).sum()).backward()  # another warning would be an error
