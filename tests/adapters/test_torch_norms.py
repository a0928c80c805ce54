"""One norm and one decision for gradients on any device meshes, in four gloo processes."""

from functools import partial
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from lossscale_core import SpikeGuard
from lossscale_core.errors import SyncError
from lossscale_torch import clip_and_check_, guarded
from tests.adapters.odd_optimizers import FusedDuck
from tests.adapters.torch_ranks import local, on_ranks
from tests.adapters.torch_steps import ready, same
from tests.sweeping import every
from tests.torch_versions import HAS_FSDP2_ON_CPU

INF, NAN = float("inf"), float("nan")
SCALE, MAX_NORM = 8.0, 0.5
RESULTS = []
"""The norms, outcomes and states of this rank."""
ORDERS = (2.0, INF, 8.0)  # a clip of an order above 6 unscales first
COPIED, BY_ROW, BY_COLUMN = Replicate(), Shard(0), Shard(1)


def _layouts():
    """Return a function for each layout that makes its parameters, some of them with an empty shard; and a mesh."""
    all_ranks, grid = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    sharded = [((5, 3), all_ranks, [BY_ROW]), ((1,), all_ranks, [BY_ROW])]
    experts = [((4, 6), grid, [BY_ROW, BY_COLUMN]), ((8, 3), grid, [BY_ROW, BY_ROW])]
    columns = [((4, 6), grid, [BY_ROW, BY_COLUMN]), ((3,), grid, [BY_ROW, COPIED]), ((5,), grid["a"], [BY_ROW])]
    copies = [((5, 3), grid, [COPIED, BY_ROW]), ((1,), grid, [COPIED, BY_ROW])]
    lists = {
        "fsdp": sharded,
        "three meshes": [*sharded, *experts, ((5,), grid["a"], [BY_ROW]), ((3, 2), grid["b"], [BY_ROW])],
        "hsdp": copies,
        "tensor parallel": columns,
        "beside plain tensors": [*sharded, ((4,), None, None)],
        "copied": [((4,), all_ranks, [COPIED]), *copies],
        "float64 among them": [*sharded, ((6,), grid, [BY_ROW, BY_ROW], torch.float64)],
    }
    return {name: partial(_params, specs) for name, specs in lists.items()}, grid


def _params(specs, by=1.0, culprit=None, lacks=()):
    """Return parameters with scaled gradients; gradients may be missing, or not finite on one rank."""
    torch.manual_seed(0)
    params = []
    for shape, mesh, placements, *dtype in specs:
        param, grad = torch.ones(shape, dtype=dtype[0] if dtype else None), torch.randn(shape) * SCALE * by
        grad = grad.to(param.dtype)
        if mesh is not None:
            param, grad = (_distributed(tensor, mesh, placements) for tensor in (param, grad))
        params.append(nn.Parameter(param))
        params[-1].grad = None if len(params) - 1 in lacks else grad
    if dist.get_rank() == culprit:
        next(grad for p in params if p.grad is not None and (grad := local(p.grad)).numel()).view(-1)[0] = NAN
    return params


def _distributed(tensor, mesh, placements):
    """Return the shards of a tensor that all ranks have, without communication."""
    return DTensor.from_local(tensor, mesh, [COPIED] * mesh.ndim).redistribute(placements=placements)


def _whole(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def _exact(grads, order):
    return torch.linalg.vector_norm(torch.cat([grad.double().flatten() for grad in grads]) / SCALE, order).item()


# --- the ways to take a step


def _by_scaler(params, make, calls=(), is_joint=False, **settings):
    optimizers = [make([param], lr=1.0) for param in params] if is_joint else [make(params, lr=1.0)]
    scaler, norm = ready(init_scale=SCALE, **settings), None
    for name, *arguments in calls:
        norm = getattr(scaler, name)(optimizers if is_joint else optimizers[0], *arguments)
    for optimizer in optimizers:
        scaler.step(optimizer)
    applied, state = bool(scaler.update().applied), scaler.state_dict()
    return torch.tensor(state["guard"]["mean"]) if "guard" in settings else norm, applied, state


def _by_guarded(params, make, **settings):
    optimizer = guarded(make(params, lr=1.0), **settings)
    optimizer.step()
    return (
        optimizer.last_step.norm,
        bool(optimizer.last_step),
        optimizer.state_dict()["param_groups"][0]["guarded_steps"],
    )


def _by_clip_and_check(params, make, **settings):
    norm, is_finite = clip_and_check_(params, MAX_NORM, **settings)
    if is_finite:
        torch.optim.SGD(params, lr=1.0).step()
    return norm, bool(is_finite), None


UNSCALE, CLIP, GUARD = ("unscale_",), ("unscale_and_clip_", MAX_NORM), {"guard": SpikeGuard()}
CLIPS = {f"clip of order {order}": (order, partial(_by_scaler, calls=[(*CLIP, order)])) for order in ORDERS}
WAYS = {
    **CLIPS,
    "joint clip": (2.0, partial(_by_scaler, calls=[CLIP], is_joint=True)),
    "plain": (2.0, _by_scaler),
    "unscaled": (2.0, partial(_by_scaler, calls=[UNSCALE])),
    "guard": (2.0, partial(_by_scaler, **GUARD)),
    "guard, unscaled": (2.0, partial(_by_scaler, calls=[UNSCALE], **GUARD)),
    "guard, clip": (2.0, partial(_by_scaler, calls=[CLIP], **GUARD)),
    "guarded": (2.0, _by_guarded),
    "guarded, clip": (2.0, partial(_by_guarded, max_norm=MAX_NORM)),
    "guarded, guard": (2.0, partial(_by_guarded, **GUARD)),
    "clip_and_check_": (2.0, _by_clip_and_check),
}
"""The order of the norm, and a function that takes a step; it returns the norm, the outcome and a state."""


def _step(params, way, fused=False, **settings):
    """Take a step; return the norm of the unscaled gradients, or None, and whether the step was applied.

    An applied step has moved each parameter by its gradient. A skipped step has changed no parameter, and a clip then
    has changed no gradient.
    """
    having = [param for param in params if param.grad is not None]
    before, grads = [local(param).clone() for param in having], [local(param.grad).clone() for param in having]
    _, take = WAYS[way]
    norm, applied, state = take(params, FusedDuck if fused else torch.optim.SGD, **settings)
    has_scale = getattr(take, "func", take) is _by_scaler
    factor = min(1.0, MAX_NORM / (norm.item() + 1e-6)) if "clip" in way else 1.0
    factor = factor / (SCALE if has_scale else 1.0) if applied else 0.0
    for param, was, grad in zip(having, before, grads, strict=True):
        change = was - local(param)
        torch.testing.assert_close(change, factor * grad if applied else change * 0.0, rtol=1e-4, atol=1e-6)
        if not applied and "clip" in way and way != "clip of order 8.0":
            torch.testing.assert_close(local(param.grad), grad, rtol=0.0, atol=0.0, equal_nan=True)
    assert norm is None or type(norm) is torch.Tensor
    norm = None if norm is None else norm.item()
    RESULTS.append(repr((norm, applied, state)))
    return None if norm is None else norm / (1.0 if has_scale else SCALE), applied


def _require_norm(make, whole, way, fused=False, **settings):
    """Require a step by the norm of these gradients, and that a NaN on one rank skips the step on all."""
    order, _ = WAYS[way]
    norm, applied = _step(make(), way, fused, **settings)
    assert applied, way
    assert norm is None or norm == pytest.approx(_exact(whole, order), rel=1e-6), (way, fused)
    assert not _step(make(culprit=1), way, fused, **settings)[1], (way, fused)


def _require_same_on_ranks():
    """Require that the steps before had the same norms, outcomes and states on all ranks, to the bit."""
    of_ranks = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, RESULTS)
    assert all(results == of_ranks[0] for results in of_ranks)
    RESULTS.clear()


# --- the norm


def _compare(rank, world_size):
    layouts, grid = _layouts()
    for make, by, fused, way in every(5, layouts.values(), (1.0, 1e30), (False, True), CLIPS):
        whole = [_whole(param.grad) for param in make(by=by)]
        _require_norm(partial(make, by=by), whole, way, fused)
    if HAS_FSDP2_ON_CPU:
        _shard_experts(grid)
    _use_elsewhere(layouts)
    _reduce_partial_sums(grid)
    _leave_gradients_after_an_error(layouts["fsdp"])
    _join_stages(rank, grid)
    _combine_flags_alone(rank)
    _lack_gradients(rank, layouts)
    _require_same_on_ranks()


def _shard_experts(grid):
    """Clip experts that are sharded over all ranks, as docs/torch.md shows."""
    for way, fused in product(CLIPS, (False, True)):
        torch.manual_seed(0)
        experts = nn.Linear(3, 8, bias=False)
        whole = experts.weight.detach() * SCALE
        experts.weight = nn.Parameter(distribute_tensor(experts.weight.detach(), grid["b"], [BY_ROW]))
        fully_shard(experts, mesh=grid["a"])
        experts.weight.grad = experts.weight.detach() * SCALE
        exact = pytest.approx(_exact([whole], CLIPS[way][0]), rel=1e-6)
        assert _step([experts.weight], way, fused) == (exact, True)


def _use_elsewhere(layouts):
    """Take the other steps: with a guard, by a guarded optimizer, with several optimizers, or with another scaler."""
    names, others = ("three meshes", "hsdp", "beside plain tensors"), WAYS.keys() - CLIPS.keys()
    for name, by, fused, way in every(7, names, (1.0, 1e30), (False, True), sorted(others)):
        whole = [_whole(param.grad) for param in layouts[name](by=by)]
        settings = {"process_group": dist.group.WORLD} if by == 1.0 else {}
        _require_norm(partial(layouts[name], by=by), whole, way, fused, **settings)


def _reduce_partial_sums(grid):
    """Step by gradients that are summands: of a row, over the ranks of a column, and over all."""
    layouts = (([Partial(), COPIED], 2), ([Partial(), Partial()], 4), ([COPIED, Partial()], 2))
    calls = (None, "unscale_", 2.0, INF)
    for (placements, summed), call, fused, size in every(5, layouts, calls, (False, True), (SCALE, 2e38)):
        param = nn.Parameter(DTensor.from_local(torch.ones(4), grid, [COPIED, COPIED]))
        param.grad = DTensor.from_local(torch.full((4,), size), grid, placements)
        optimizer = torch.optim.AdamW([param], betas=(0.0, 0.0), fused=fused)
        scaler = ready(init_scale=SCALE)
        if call == "unscale_":
            scaler.unscale_(optimizer)
        elif call is not None:
            norm = scaler.unscale_and_clip_(optimizer, 1e3, call)
            assert size > SCALE or norm.item() == pytest.approx(summed * 4 ** (1 / call), rel=1e-6)
        scaler.step(optimizer)
        applied = bool(scaler.update().applied)  # large summands are finite, and their sum is not
        assert applied == (size == SCALE) != torch.equal(local(param), torch.ones(4))
        assert not applied or optimizer.state[param]["exp_avg"].to_local().tolist() == [summed] * 4


def _leave_gradients_after_an_error(make):
    """Clip on ranks outside of the group, and as a connection breaks."""
    pair, reduce = dist.new_group([0, 1]), dist.all_reduce
    outside = SyncError if dist.get_rank() > 1 else ConnectionError
    for settings, error in (({"norm_group": pair}, outside), ({}, ConnectionError)):
        params = make()
        before = [local(param.grad).clone() for param in params]
        dist.all_reduce = _break
        with pytest.raises(error):
            ready(init_scale=SCALE, **settings).unscale_and_clip_(torch.optim.SGD(params), MAX_NORM)
        dist.all_reduce = reduce
        assert same([local(param.grad) for param in params], before)


def _break(*_, **__):
    raise ConnectionError


def _join_stages(rank, grid):
    """Clip two sharded stages of a pipeline by the norm of both, and four stages without meshes."""
    pairs = [((5 + rank // 2, 3), grid["b"], [BY_ROW]), *[((1,), grid["b"], [BY_ROW])] * (rank // 2)]
    stages = {grid.get_group("a"): pairs, dist.group.WORLD: [((2 + rank,), None, None)]}
    for (group, specs), by, way, fused in every(5, stages.items(), (1.0, 1e30), WAYS, (False, True)):
        parts = [None] * dist.get_world_size(group)
        dist.all_gather_object(parts, [_whole(param.grad) for param in _params(specs, by=by)], group=group)
        whole = [grad for part in parts for grad in part]
        _require_norm(partial(_params, specs, by=by), whole, way, fused, norm_group=group)


def _combine_flags_alone(rank):
    """Check gradients that are not on a mesh: the ranks of a process group share the flag, and keep their norms."""
    param = nn.Parameter(torch.ones(4))
    for group, is_good in ((None, rank != 2), (dist.group.WORLD, False)):
        param.grad = torch.full((4,), NAN if rank == 2 else 1.0)
        norm, grads_finite = clip_and_check_(param, MAX_NORM, process_group=group)
        assert norm.item() == pytest.approx(NAN if rank == 2 else 2.0, nan_ok=True)
        assert grads_finite.item() is is_good


def _lack_gradients(rank, layouts):
    """Take each kind of step with gradients that some ranks lack: other calls than those of the others would hang."""
    lacking = [  # the missing gradients of each rank, and the rank with a gradient that is not finite
        (((), range(9), (), ()), 2),
        (((), (0,), range(9), ()), None),
        ((range(9), range(9), range(9), range(9)), None),
    ]
    group = {"process_group": dist.group.WORLD}
    kinds = [*product(WAYS, [{}]), *((way, group) for way in ("plain", *CLIPS, "guarded", "clip_and_check_"))]
    names = ("three meshes", "beside plain tensors")
    for name, (lacks, culprit), (way, settings), fused in every(7, names, lacking, kinds, (False, True)):
        params = layouts[name](lacks=lacks[rank], culprit=culprit)
        assert _step(params, way, fused, **settings)[1] == (culprit is None), (name, lacks, way, fused)


def test_one_norm_for_every_layout():
    """Ranks with any layout of gradients have the norm and decision of one process with the gathered gradients."""
    on_ranks(4, _compare)
