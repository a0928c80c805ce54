"""Clipping sharded gradients on gloo ranks: shards of one group in one collective, all others as torch clips."""

from contextlib import nullcontext
from functools import partial
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from lossscale_core import SpikeGuard
from lossscale_torch import GradScaler
from tests.adapters.test_torch_distributed import _local, _on_ranks
from tests.torch_versions import HAS_FSDP2_ON_CPU, TORCH

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


def _plain(*sizes):
    params = [torch.nn.Parameter(torch.ones(size)) for size in sizes]
    for param in params:
        param.grad = torch.arange(1.0, param.numel() + 1.0).view_as(param) * SCALE
    return params


def _whole(params):
    """Return the unscaled gradients, whole and copied."""
    grads = [param.grad for param in params if param.grad is not None]
    return [(each.full_tensor() if isinstance(each, DTensor) else each).clone() / SCALE for each in grads]


def _clip(params, norm_type=2.0, *, fused=False, calls=1, max_norm=0.5, how="clip", **kwargs):
    """Clip and step; return the norm and whether the step was applied, having counted the collectives if `calls`."""
    make = _FusedSGD if fused else torch.optim.SGD
    optimizers = [make([param], lr=1.0) for param in params] if how == "joint" else [make(params, lr=1.0)]
    scaler = kwargs.pop("kind", GradScaler)("cpu", init_scale=SCALE, **kwargs)
    scaler.scale(torch.ones(()))
    collectives = CommDebugMode()
    with nullcontext() if calls is None else collectives:
        norm = scaler.unscale_and_clip_(optimizers[0] if how == "clip" else optimizers, max_norm, norm_type)
        for optimizer in optimizers:
            scaler.step(optimizer)
    assert calls is None or collectives.get_total_counts() == calls, collectives.get_comm_counts()
    assert type(norm) is torch.Tensor
    applied = bool(scaler.update().applied)
    scaler.check_sync()
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (norm.item(), applied))
    assert len({repr(each) for each in everyone}) == 1, everyone
    return norm.item(), applied


def _require_torchs(params, norm_type, **kwargs):
    """Clip; the norm is that of the whole gradients, and the step has moved each parameter by them, clipped to 0.5."""
    grads, before = _whole(params), [each.clone() for each in _local_of(params)]
    expected = torch.nn.utils.get_total_norm(grads, norm_type).item()
    parts = [each.clone() / SCALE for each in _local_of([_summed(param.grad) for param in params])]
    norm, applied = _clip(params, norm_type, **kwargs)
    assert applied
    assert norm == pytest.approx(expected, rel=1e-5)
    factor = min(1.0, 0.5 / expected)
    for after, grad, was in zip(_local_of(params), parts, before, strict=True):
        torch.testing.assert_close(was - after, factor * grad, rtol=1e-4, atol=1e-6)


def _summed(grad):
    is_partial = isinstance(grad, DTensor) and grad.placements == (Partial(),)
    return grad.redistribute(placements=[Replicate()]) if is_partial else grad


def _local_of(tensors):
    return [each.to_local() if isinstance(each, DTensor) else each for each in (t.detach() for t in tensors)]


def _require_skipped(params, rank, culprit, **kwargs):
    """Clip gradients of which one rank's are spoiled; no rank steps, and nothing has changed."""
    before = [each.clone() for each in _local_of(params)]
    if rank == culprit:
        next(grad for grad in _local_of([param.grad for param in params]) if grad.numel()).flatten()[0] = kwargs.pop(
            "by"
        )
    kwargs.pop("by", None)
    grads = [each.clone() for each in _local_of([param.grad for param in params])]
    norm, applied = _clip(params, **kwargs)
    assert not applied
    assert not torch.isfinite(torch.tensor(norm))
    if kwargs.get("kind") is None:
        for now, was in zip(_local_of([param.grad for param in params]), grads, strict=True):
            torch.testing.assert_close(now, was, rtol=0, atol=0, equal_nan=True)
    assert all(torch.equal(a, b) for a, b in zip(before, _local_of(params), strict=True))


# --- one mesh of one dimension


def _shard_over_two(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,))

    def uneven():
        return _shards((5, 3), (1, 2), mesh=mesh, placements=[Shard(0)])  # rank 1 has two rows and none

    for norm_type, fused, how in product(ORDERS, (False, True), ("clip", "joint")):
        _require_torchs(uneven(), norm_type, fused=fused, how=how)
    # Next to no dispatch mode, under which nothing is read on the host.
    _require_torchs(uneven(), 2.0, fused=True, how="clip", calls=None)
    _require_skipped(uneven(), rank, 1, by=NAN, fused=True, how="clip", calls=None)
    for culprit, by, fused in product((0, 1), (INF, NAN), (False, True)):
        _require_skipped(uneven(), rank, culprit, by=by, fused=fused, how="clip")
    for fused, norm_type in product((False, True), ORDERS):
        _overflow_nothing(uneven(), norm_type, fused)
        _lack_gradients(uneven(), rank, norm_type, fused)
    _mix_with_others(mesh, rank)
    if HAS_FSDP2_ON_CPU:
        _train_modules(mesh, rank)
    _fall_back(uneven, rank)
    _guard(uneven, rank)


def _overflow_nothing(params, norm_type, fused):
    """Clip large finite gradients, with powers that overflow float32."""
    for param in params:
        param.grad = param.grad.sign() * 1e30
    whole = [grad.double() for grad in _whole(params)]
    norm, applied = _clip(params, norm_type, fused=fused)
    assert applied
    assert norm == pytest.approx(torch.nn.utils.get_total_norm(whole, norm_type).item(), rel=1e-5)


def _lack_gradients(params, rank, norm_type, fused):
    """Clip on a rank without gradients, which joins the others and learns what they found."""
    expected = torch.nn.utils.get_total_norm(_whole(params), norm_type).item()
    if rank == 1:
        params[1].grad = None  # of which this rank holds nothing
    norm, applied = _clip(params, norm_type, fused=fused)
    assert applied
    assert norm == pytest.approx(expected, rel=1e-5)
    for param in params:
        param.grad = None if rank == 1 else torch.full_like(param, NAN)
    assert not _clip(params, norm_type, fused=fused)[1]
    for param in params:
        param.grad = None
    assert _clip(params, norm_type, fused=fused) == (0.0, True)


def _clip_as_torch(make, norm_type, fused):
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
                norm = torch.nn.utils.clip_grad_norm_(params, 0.5, norm_type)
                norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
            else:
                norm = scaler.unscale_and_clip_(optimizer, 0.5, norm_type)
        except RuntimeError as error:
            found.append(str(error))
            continue
        scaler.step(optimizer)
        grads = _local_of([param.grad for param in params])
        found.append([norm, *grads, torch.tensor(bool(scaler.update().applied))])
        scaler.check_sync()
    assert type(found[0]) is type(found[1])
    if isinstance(found[0], str):
        assert found[0] == found[1]
        return found[0]
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=0.0, equal_nan=True)
    return found[0][-1].item()


def _mix_with_others(mesh, rank):
    """Clip shards beside copies, plain gradients and partial sums."""

    def mixed(*, has_plain=False, is_summed=False, by=1.0):
        shards = _shards((4, 2), mesh=mesh, placements=[Shard(0)])
        shards[0].grad *= by if rank == 1 else 1.0
        copies = _shards((3,), mesh=mesh, placements=[Replicate()], seed=1)
        if is_summed:
            copies[0].grad = DTensor.from_local(torch.full((3,), SCALE * (1 + rank)), mesh, [Partial()])
        return [*shards, *copies, *(_plain(2) if has_plain else [])]

    for fused, norm_type in product((False, True), (*ORDERS, 1.0)):
        assert _clip_as_torch(mixed, norm_type, fused) is True
        assert _clip_as_torch(partial(mixed, is_summed=True), norm_type, fused) is True
        assert _clip_as_torch(partial(mixed, by=NAN), norm_type, fused) is False
        assert "mixed torch.Tensor and DTensor" in _clip_as_torch(partial(mixed, has_plain=True), norm_type, fused)


def _train_modules(mesh, rank, calls=1):
    """Train under `fully_shard`, offloaded to the host or not; one rank's overflow skips on both."""
    for kwargs, fused in product(({}, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}), (False, True)):
        torch.manual_seed(0)
        module = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.Linear(3, 1))
        fully_shard(module, mesh=mesh, **kwargs)
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, fused=fused)
        scaler = GradScaler("cpu", init_scale=SCALE, growth_interval=100)
        for step in range(4):
            optimizer.zero_grad()
            images = torch.full((2, 5), INF if step == 2 and rank == 1 else 1.0 + rank)
            scaler.scale(module(images).square().mean()).backward()
            expected = torch.nn.utils.get_total_norm([p.grad.full_tensor() for p in module.parameters()])
            before = [each.clone() for each in _local(module)]
            with CommDebugMode() as collectives:
                norm = scaler.unscale_and_clip_(optimizer, 1.0)
                scaler.step(optimizer)
            assert calls is None or collectives.get_total_counts() == calls
            assert bool(scaler.update().applied) == (step != 2)
            assert all(map(torch.equal, before, _local(module))) == (step == 2)
            if step < 2:
                assert norm.item() == pytest.approx(expected.item() / SCALE, rel=1e-5)
            scaler.check_sync()


def _fall_back(make, rank):
    """Clip what one read cannot: through torch's functions, and with the same result."""
    for fused in (False, True):
        _require_torchs(make(), 2.0, fused=fused, kind=_HookedScaler, calls=2)
        for norm_type in (1.0, 3.0):
            assert _clip_as_torch(make, norm_type, fused) is True


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
        assert scaler.metrics()["skipped_steps"] == 0
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

    for fused, norm_type in product((False, True), ORDERS):
        for placements in ([Replicate(), Shard(0)], [Shard(0), Shard(1)]):
            assert _clip_as_torch(partial(shards, placements), norm_type, fused) is True
            assert _clip_as_torch(partial(shards, placements, by=NAN), norm_type, fused) is False
        _clip_as_torch(two_meshes, norm_type, fused)
    if HAS_FSDP2_ON_CPU:
        _train_modules(mesh, rank, calls=None)


def test_what_is_not_one_group_of_shards_is_clipped_as_torch_does():
    """Hybrid and tensor parallel shards on four ranks, and parameters of two meshes."""
    _on_ranks(4, _shard_over_four)


# --- synchronisations


@pytest.mark.skipif(TORCH < (2, 7), reason="no collective takes meta tensors before torch 2.7")
@pytest.mark.parametrize("shape", [(4,), (2, 2)])
def test_clipping_shards_costs_a_fused_optimizer_no_synchronisation(shape):
    """A whole step runs on torch's `meta` device, which has no values to read."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        mesh = init_device_mesh("cpu", shape)
        params = _shards((4, 4), mesh=mesh, placements=[Shard(dim) for dim in range(len(shape))])
        params += _shards((4, 4), mesh=mesh, placements=[Replicate()] * len(shape))
        params = [torch.nn.Parameter(param.detach().to("meta")) for param in params]
        optimizer = _FusedSGD(params, lr=0.1)
        scaler = GradScaler("meta", policy="dynamic")
        for param in params:
            param.grad = torch.ones_like(param)
        scaler.scale(torch.ones((), device="meta"))
        assert scaler.unscale_and_clip_(optimizer, 1.0).is_meta
        scaler.step(optimizer)
        assert scaler.update().applied.is_meta
    finally:
        dist.destroy_process_group()
