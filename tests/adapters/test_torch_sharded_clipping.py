"""Clipping sharded gradients on gloo ranks: shards of one group in one collective, all others as torch clips."""

from functools import partial
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from lossscale_core import SpikeGuard
from lossscale_torch import GradScaler
from tests.adapters.test_torch_distributed import _on_ranks
from tests.torch_versions import HAS_FSDP2_ON_CPU

INF, NAN = float("inf"), float("nan")
SCALE = 8.0
ORDERS = (2.0, INF)


class _HookedScaler(GradScaler):
    """A scaler with an unscaling of its own, as frameworks have it; it is clipped by torch's functions."""

    def _unscale_grads_(self, *args, **kwargs):
        return super()._unscale_grads_(*args, **kwargs)


class _FusedSGD(torch.optim.SGD):
    """SGD that takes the factor and the flag itself; torch's fused kernels refuse parameters of several meshes."""

    def __init__(self, params, lr):
        super().__init__(params, lr=lr)
        self._step_supports_amp_scaling = True

    @torch.no_grad()
    def step(self, closure=None):
        """Subtract the gradients where the flag is down."""
        params = [param for param in self.param_groups[0]["params"] if param.grad is not None]
        for param, grad in zip(_local_of(params), _local_of([param.grad for param in params]), strict=True):
            grad = grad if self.grad_scale is None else grad / self.grad_scale
            param.sub_(torch.where(self.found_inf == 0.0, grad, 0.0))


def _shards(*sizes, mesh, placements, seed=0):
    """Return parameters of these sizes; every process draws the same gradients, multiplied by the loss scale."""
    torch.manual_seed(seed)
    params = []
    for size in sizes:
        param = torch.nn.Parameter(distribute_tensor(torch.ones(size), mesh, placements))
        param.grad = distribute_tensor(torch.randn(size) * SCALE, mesh, placements)
        params.append(param)
    return params


def _local_of(tensors):
    return [each.to_local() if isinstance(each, DTensor) else each for each in (t.detach() for t in tensors)]


def _norm_of(params, order):
    """Return the norm of the unscaled gradients, from whole ones in float64; every rank must ask."""
    grads = [param.grad.full_tensor().double() / SCALE for param in params if param.grad is not None]
    return torch.nn.utils.get_total_norm(grads, order).item()


def _clip(params, order=2.0, *, fused=False, calls=1, is_joint=False, make_scaler=GradScaler, **settings):
    """Clip to 0.5 and step; return the norm and whether the step was applied, alike on all ranks.

    An applied step has moved each parameter by its share; a skipped one has changed nothing, gradients neither.
    """
    make = _FusedSGD if fused else torch.optim.SGD
    optimizers = [make([param], lr=1.0) for param in params] if is_joint else [make(params, lr=1.0)]
    scaler = make_scaler("cpu", init_scale=SCALE, **settings)
    having = [param for param in params if param.grad is not None]
    before, grads = ([each.clone() for each in _local_of(some)] for some in (having, [p.grad for p in having]))
    scaler.scale(torch.ones(()))
    with CommDebugMode() as collectives:
        norm = scaler.unscale_and_clip_(optimizers if is_joint else optimizers[0], 0.5, order)
        for optimizer in optimizers:
            scaler.step(optimizer)
    assert collectives.get_total_counts() == calls, collectives.get_comm_counts()
    assert type(norm) is torch.Tensor
    applied = bool(scaler.update().applied)
    assert norm.isfinite() == applied
    factor = min(1.0, 0.5 / (norm.item() + 1e-6)) / SCALE if applied else 0.0
    for now, was, grad in zip(_local_of(having), before, grads, strict=True):
        torch.testing.assert_close(was - now, factor * grad if applied else now * 0, rtol=1e-4, atol=1e-6)
    if not applied:
        torch.testing.assert_close(_local_of([p.grad for p in having]), grads, rtol=0, atol=0, equal_nan=True)
    scaler.check_sync()
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (norm.item(), applied))
    assert len({repr(each) for each in everyone}) == 1, everyone
    return norm.item(), applied


def _clip_as_torch(make, order, fused):
    """Clip what one collective cannot: norm, gradients and decision, or the error, are those of two passes."""
    found = []
    for takes_two in (False, True):
        params = make()
        optimizer = (_FusedSGD if fused else torch.optim.SGD)(params, lr=1.0)
        scaler = GradScaler("cpu", init_scale=SCALE)
        scaler.scale(torch.ones(()))
        try:
            if takes_two:
                scaler.unscale_(optimizer)
                norm = torch.nn.utils.clip_grad_norm_(params, 0.5, order)
                norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
            else:
                norm = scaler.unscale_and_clip_(optimizer, 0.5, order)
        except RuntimeError as error:
            found.append(str(error))
            continue
        scaler.step(optimizer)
        grads = _local_of([param.grad for param in params])
        found.append([norm, *grads, torch.tensor(bool(scaler.update().applied))])
        scaler.check_sync()
    if isinstance(found[0], str):
        assert found[0] == found[1]
        return found[0]
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=0.0, equal_nan=True)
    return found[0][-1].item()


# --- one mesh of one dimension


def _shard_over_two(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,))

    def uneven(*, by=1.0, culprit=None):
        params = _shards((5, 3), (1, 2), mesh=mesh, placements=[Shard(0)])  # rank 1 has two rows and none
        if culprit in (None, rank):
            params[0].grad.to_local()[0, 0] *= by
        return params

    for order, fused, is_joint in product(ORDERS, (False, True), (False, True)):
        for by in (1.0, 1e30):  # the squares of the latter overflow float32
            params = uneven(by=by)
            expected = _norm_of(params, order)
            assert _clip(params, order, fused=fused, is_joint=is_joint) == (pytest.approx(expected, rel=1e-5), True)
        for culprit, by in product((0, 1), (INF, NAN)):
            assert not _clip(uneven(by=by, culprit=culprit), order, fused=fused, is_joint=is_joint)[1]
        _lack_gradients(uneven(), rank, order, fused)
    for fused in (False, True):
        assert _clip(uneven(), fused=fused, make_scaler=_HookedScaler, calls=2)[1]
        assert all(_clip_as_torch(uneven, order, fused) is True for order in (1.0, 3.0))
    assert _clip(uneven(), process_group=dist.group.WORLD)[1]  # the same ranks are not asked twice
    _mix_with_others(mesh, rank)
    if HAS_FSDP2_ON_CPU:
        _clip_modules(mesh, rank)
    _guard(uneven, rank)


def _lack_gradients(params, rank, order, fused):
    """Clip on a rank without gradients, which joins the others and learns what they found."""
    expected = _norm_of(params, order)
    if rank == 1:
        params[1].grad = None  # of which this rank holds nothing
    assert _clip(params, order, fused=fused) == (pytest.approx(expected, rel=1e-5), True)
    for param in params:
        param.grad = None if rank == 1 else torch.full_like(param, NAN)
    assert not _clip(params, order, fused=fused)[1]
    for param in params:
        param.grad = None
    assert _clip(params, order, fused=fused) == (0.0, True)


def _mix_with_others(mesh, rank):
    """Clip shards beside copies, plain gradients and partial sums."""

    def mixed(*, has_plain=False, is_summed=False, by=1.0):
        shards = _shards((4, 2), mesh=mesh, placements=[Shard(0)])
        shards[0].grad *= by if rank == 1 else 1.0
        copies = _shards((3,), mesh=mesh, placements=[Replicate()], seed=1)
        if is_summed:
            copies[0].grad = DTensor.from_local(torch.full((3,), SCALE * (1 + rank)), mesh, [Partial()])
        plain = torch.nn.Parameter(torch.ones(2))
        plain.grad = torch.ones(2)
        return [*shards, *copies, *([plain] if has_plain else [])]

    for fused, order in product((False, True), (*ORDERS, 1.0)):
        assert _clip_as_torch(mixed, order, fused) is True
        assert _clip_as_torch(partial(mixed, is_summed=True), order, fused) is True
        assert _clip_as_torch(partial(mixed, by=NAN), order, fused) is False
        assert "mixed torch.Tensor and DTensor" in _clip_as_torch(partial(mixed, has_plain=True), order, fused)


def _clip_modules(mesh, rank):
    """Clip the gradients of a module under `fully_shard`, to which one rank's overflow has spread."""
    for fused, size in product((False, True), (1.0, INF)):
        torch.manual_seed(0)
        module = torch.nn.Linear(5, 3)
        fully_shard(module, mesh=mesh)
        module(torch.full((2, 5), size if rank == 1 else 2.0)).square().mean().mul(SCALE).backward()
        params = [*module.parameters()]
        expected = _norm_of(params, 2.0)
        assert _clip(params, fused=fused) == (pytest.approx(expected, rel=1e-5, nan_ok=True), size == 1.0)


def _guard(make, rank):
    """Let the guard check the norm of all ranks; after a clip it needs no further communication."""
    for fused, clips in product((False, True), (False, True)):
        params = make()
        optimizer = (_FusedSGD if fused else torch.optim.SGD)(params, lr=1e-3)
        scaler = GradScaler("cpu", init_scale=SCALE, guard=SpikeGuard(warmup=2))
        for step in range(5):
            for param, fresh in zip(params, make(), strict=True):
                param.grad = fresh.grad * (1e4 if step == 4 and rank == 1 else 1.0)
            scaler.scale(torch.ones(()))
            with CommDebugMode() as collectives:
                if clips:
                    scaler.unscale_and_clip_(optimizer, 1.0)
                scaler.step(optimizer)
            assert not clips or collectives.get_total_counts() == 1
            info = scaler.update()
            assert (bool(info.spiked), bool(info.applied)) == (step == 4, step != 4)
        scaler.check_sync()


def test_one_collective_clips_what_two_ranks_share():
    """It brings the norm of DTensor's own clip, and the decision: one rank's overflow skips on both."""
    _on_ranks(2, _shard_over_two)


# --- meshes of two dimensions, and several of them


def _shard_over_four(rank, world_size):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def shards(placements, by=1.0, culprit=0):
        params = _shards((5, 3), (2, 2), mesh=mesh, placements=placements)  # none is empty, which has no infinity norm
        params[0].grad *= by if rank == culprit else 1.0
        return params

    def two_meshes():
        return [*shards([Shard(0), Shard(1)]), *_shards((3, 2), mesh=mesh["dp"], placements=[Shard(0)], seed=1)]

    for fused, order in product((False, True), ORDERS):
        for placements in ([Replicate(), Shard(0)], [Shard(0), Shard(1)]):
            assert _clip_as_torch(partial(shards, placements), order, fused) is True
            assert _clip_as_torch(partial(shards, placements, by=NAN), order, fused) is False
        _clip_as_torch(two_meshes, order, fused)


def test_what_is_not_one_group_of_shards_is_clipped_as_torch_does():
    """Hybrid and tensor parallel shards on four ranks, and parameters of two meshes."""
    _on_ranks(4, _shard_over_four)
