"""One norm for gradients on any device meshes, and the collectives of each rank, in four gloo processes."""

from functools import partial
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lossscale_core import SpikeGuard
from lossscale_core.errors import SyncError
from lossscale_torch import GradScaler, clip_and_check_, guarded
from tests.adapters.torch_ranks import on_ranks
from tests.adapters.torch_steps import ready
from tests.torch_versions import HAS_FSDP2_ON_CPU

INF, NAN = float("inf"), float("nan")
SCALE, MAX_NORM = 8.0, 0.5
RESULTS = []
"""The norms, outcomes and states of this rank."""
ORDERS = (2.0, INF, 3.0)
COLLECTIVES = {
    **{"fsdp": 1, "beside plain tensors": 1, "hsdp": 2, "tensor parallel": 2},
    **{"experts": 3, "three meshes": 3, "copied": 3, "float64 among them": 3},
}
COPIED, BY_ROW, BY_COLUMN = Replicate(), Shard(0), Shard(1)


class _FusedSGD(torch.optim.SGD):
    """SGD that takes the factor and the flag itself; torch's fused kernels refuse parameters of several meshes."""

    def __init__(self, params, lr):
        super().__init__(params, lr=lr)
        self._step_supports_amp_scaling = True

    @torch.no_grad()
    def step(self, closure=None):
        """Subtract the gradients if the flag is 0.0."""
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                grad = _local(param.grad)
                grad = grad if self.grad_scale is None else grad / self.grad_scale
                _local(param).sub_(torch.where(self.found_inf == 0.0, grad, 0.0))


class _HookedScaler(GradScaler):
    """A scaler that overrides how gradients are unscaled, as frameworks do."""

    def _unscale_grads_(self, *args, **kwargs):
        return super()._unscale_grads_(*args, **kwargs)


def _layouts():
    """Return a function for each layout that makes its parameters, some of them with an empty shard; and the meshes."""
    all_ranks, grid = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    sharded = [((5, 3), all_ranks, [BY_ROW]), ((1,), all_ranks, [BY_ROW])]
    experts = [*sharded, ((4, 6), grid, [BY_ROW, BY_COLUMN]), ((8, 3), grid, [BY_ROW, BY_ROW])]
    columns = [((4, 6), grid, [BY_ROW, BY_COLUMN]), ((3,), grid, [BY_ROW, COPIED]), ((5,), grid["a"], [BY_ROW])]
    copies = [((5, 3), grid, [COPIED, BY_ROW]), ((1,), grid, [COPIED, BY_ROW])]
    lists = {
        "fsdp": sharded,
        "experts": experts,
        "three meshes": [*experts, ((5,), grid["a"], [BY_ROW]), ((3, 2), grid["b"], [BY_ROW])],
        "hsdp": copies,
        "tensor parallel": columns,
        "beside plain tensors": [*sharded, ((4,), None, None)],
        "copied": [((4,), all_ranks, [COPIED]), *copies],
        "float64 among them": [*sharded, ((6,), grid, [BY_ROW, BY_ROW], torch.float64)],
    }
    return {name: partial(_params, specs) for name, specs in lists.items()}, all_ranks, grid


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
        next(grad for p in params if p.grad is not None and (grad := _local(p.grad)).numel()).view(-1)[0] = NAN
    return params


def _with_grad(grad):
    """Return a parameter of ones with a gradient; every rank has a whole parameter for a gradient of partial sums."""
    ones = torch.ones(grad.shape, dtype=grad.dtype)
    if isinstance(grad, DTensor):
        ones = _distributed(ones, grad.device_mesh, [COPIED] * grad.device_mesh.ndim)
    param = nn.Parameter(ones)
    param.grad = grad
    return param


def _distributed(tensor, mesh, placements):
    local = tensor
    for dim, placement in enumerate(placements):
        if placement.is_shard():
            parts = local.chunk(mesh.size(dim), placement.dim)
            here = mesh.get_local_rank(dim)
            local = parts[here] if here < len(parts) else local.narrow(placement.dim, 0, 0)
    return DTensor.from_local(local.clone(), mesh, placements, shape=tensor.shape, stride=tensor.stride())


def _local(tensor):
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def _whole(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def _exact(grads, order):
    return torch.linalg.vector_norm(torch.cat([grad.double().flatten() for grad in grads]) / SCALE, order).item()


# --- the ways to take a step


def _by_scaler(params, make, calls=(), is_joint=False, make_scaler=GradScaler, **settings):
    optimizers = [make([param], lr=1.0) for param in params] if is_joint else [make(params, lr=1.0)]
    scaler, norm = ready(make_scaler, init_scale=SCALE, **settings), None
    for name, *arguments in calls:
        norm = getattr(scaler, name)(optimizers if is_joint else optimizers[0], *arguments)
    for optimizer in optimizers:
        scaler.step(optimizer)
    applied, state = bool(scaler.update().applied), scaler.state_dict()
    return torch.tensor(state["guard"]["mean"]) if "guard" in settings else norm, applied, state


def _by_guarded(params, make, **settings):
    optimizer = guarded(make(params, lr=1.0), **settings)
    optimizer.step()
    return optimizer.last_step.norm, bool(optimizer.last_step), _numbers(optimizer)


def _numbers(optimizer):
    return {name: float(number) for name, number in optimizer.metrics().items()}


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
    "hooked clip": (2.0, partial(_by_scaler, calls=[CLIP], make_scaler=_HookedScaler)),
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
    before, grads = ([_local(tensor).clone() for tensor in tensors] for tensors in (having, _grads(having)))
    _, take = WAYS[way]
    norm, applied, state = take(params, _FusedSGD if fused else torch.optim.SGD, **settings)
    has_scale = getattr(take, "func", take) is _by_scaler
    factor = min(1.0, MAX_NORM / (norm.item() + 1e-6)) if "clip" in way else 1.0
    factor = factor / (SCALE if has_scale else 1.0) if applied else 0.0
    for param, was, grad in zip(having, before, grads, strict=True):
        change = was - _local(param)
        torch.testing.assert_close(change, factor * grad if applied else change * 0.0, rtol=1e-4, atol=1e-6)
        if not applied and "clip" in way and way != "hooked clip":
            torch.testing.assert_close(_local(param.grad), grad, rtol=0.0, atol=0.0, equal_nan=True)
    assert norm is None or type(norm) is torch.Tensor
    norm = None if norm is None else norm.item()
    RESULTS.append(repr((norm, applied, state)))
    return None if norm is None else norm / (1.0 if has_scale else SCALE), applied


def _grads(params):
    return [param.grad for param in params]


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
    layouts, all_ranks, grid = _layouts()
    for (name, make), by in product(layouts.items(), (1.0, 1e30)):
        whole = [_whole(param.grad) for param in make(by=by)]
        for way, fused in product(CLIPS, (False, True)):
            order = CLIPS[way][0]
            exact = pytest.approx(_exact(whole, order), rel=1e-6)
            _require_norm(partial(make, by=by), whole, way, fused)
            assert _step([_with_grad(grad.clone()) for grad in whole], way, fused) == (exact, True)  # one process
            optimizer, scaler = (_FusedSGD if fused else torch.optim.SGD)(make(by=by), 1.0), GradScaler("cpu")
            scaler.scale(torch.ones(()))
            with CommDebugMode() as calls:  # as in a graph that is recorded, a fused optimizer is not read
                norm = scaler.unscale_and_clip_(optimizer, MAX_NORM, order)
                scaler.step(optimizer)
            assert norm.item() * 2.0**16 / SCALE == exact
            assert calls.get_total_counts() == COLLECTIVES[name]
    _use_elsewhere(layouts)
    _reduce_partial_sums(grid)
    _leave_gradients_after_an_error(layouts["fsdp"])
    _join_stages(rank, grid)
    _combine_flags_alone(rank)
    if HAS_FSDP2_ON_CPU:
        _wrap_modules(all_ranks, grid)
    _require_same_on_ranks()


def _use_elsewhere(layouts):
    """Take the other steps: with a guard, by a guarded optimizer, with several optimizers, or with another scaler."""
    names, others = ("three meshes", "hsdp", "beside plain tensors"), WAYS.keys() - CLIPS.keys()
    for name, by, fused, way in product(names, (1.0, 1e30), (False, True), sorted(others)):
        whole = [_whole(param.grad) for param in layouts[name](by=by)]
        settings = {"process_group": dist.group.WORLD} if by == 1.0 else {}
        _require_norm(partial(layouts[name], by=by), whole, way, fused, **settings)


def _reduce_partial_sums(grid):
    """Step by gradients that are summands: of a row, over the ranks of a column, and over all."""
    layouts = (([Partial(), COPIED], 2), ([Partial(), Partial()], 4), ([COPIED, Partial()], 2))
    calls = (None, "unscale_", *ORDERS)
    for (placements, summed), call, fused, size in product(layouts, calls, (False, True), (SCALE, 2e38)):
        param = _with_grad(DTensor.from_local(torch.full((4,), size), grid, placements))
        optimizer = torch.optim.AdamW([param], betas=(0.0, 0.0), fused=fused)
        scaler = ready(init_scale=SCALE)
        if call == "unscale_":
            scaler.unscale_(optimizer)
        elif call is not None:
            norm = scaler.unscale_and_clip_(optimizer, 1e3, call)
            assert size > SCALE or norm.item() == pytest.approx(summed * 4 ** (1 / call), rel=1e-6)
        scaler.step(optimizer)
        applied = bool(scaler.update().applied)  # large summands are finite, and their sum is not
        assert applied == (size == SCALE) != torch.equal(_local(param), torch.ones(4))
        assert not applied or optimizer.state[param]["exp_avg"].to_local().tolist() == [summed] * 4


def _leave_gradients_after_an_error(make):
    """Clip beside a gradient that is refused, on ranks outside of the group, and as a connection breaks."""
    half = _with_grad(torch.ones(2, dtype=torch.float16))
    pair = dist.new_group([0, 1])
    outside = SyncError if dist.get_rank() > 1 else ConnectionError
    cases = [([half], {}, ValueError), ([], {"norm_group": pair}, outside), ([], {}, ConnectionError)]
    for more, settings, error in cases:
        params, reduce = make(), dist.all_reduce
        before = [_local(param.grad).clone() for param in params]
        scaler = ready(init_scale=SCALE, **settings)
        optimizers = [torch.optim.SGD(group, lr=1.0) for group in (params, more) if group]
        dist.all_reduce = _break
        with pytest.raises(error):
            scaler.unscale_and_clip_(optimizers, MAX_NORM)
        dist.all_reduce = reduce
        assert all(torch.equal(_local(p.grad), was) for p, was in zip(params, before, strict=True))


def _break(*_, **__):
    raise ConnectionError


def _join_stages(rank, grid):
    """Clip two sharded stages of a pipeline by the norm of both, and four stages without meshes."""
    pairs = [((5 + rank // 2, 3), grid["b"], [BY_ROW]), *[((1,), grid["b"], [BY_ROW])] * (rank // 2)]
    stages = {grid.get_group("a"): pairs, dist.group.WORLD: [((2 + rank,), None, None)]}
    for (group, specs), by, way, fused in product(stages.items(), (1.0, 1e30), WAYS, (False, True)):
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


def _wrap_modules(all_ranks, grid):
    """Clip modules under `fully_shard`, on one mesh, two, with tensor parallelism, and offloaded, as in one process."""
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    wraps = {
        "fsdp": partial(fully_shard, mesh=all_ranks),
        "hsdp": partial(fully_shard, mesh=grid),
        "offload": partial(fully_shard, mesh=all_ranks, offload_policy=CPUOffloadPolicy(pin_memory=False)),
        "tp": lambda module: fully_shard(parallelize_module(module, grid["b"], plan), mesh=grid["a"]),
    }
    for fused, (name, wrap), way in product((False, True), wraps.items(), CLIPS):
        norms = []
        for is_wrapped in (True, False):
            torch.manual_seed(0)
            module = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 1))
            if is_wrapped:
                wrap(module)
            module(torch.full((2, 5), 2.0)).square().mean().mul(SCALE * 1e3).backward()
            norms.append(_step([*module.parameters()], way, fused))
        assert norms[0] == (pytest.approx(norms[1][0], rel=2e-6), True), (name, way)


def test_one_norm_for_every_layout():
    """A single process with the gathered gradients has the same norm and decision, for every order."""
    on_ranks(4, _compare)


# --- the calls of each rank


def _record(rank, world_size):
    """Take a step of each kind, and compare what the members of each group have called in it."""
    layouts, *_ = _layouts()
    calls, reduce = [], dist.all_reduce

    def all_reduce(tensor, op=dist.ReduceOp.SUM, group=None, async_op=False):
        calls.append((tuple(dist.get_process_group_ranks(group)), str(op), tensor.shape, tensor.dtype))
        return reduce(tensor, op, group, async_op)

    dist.all_reduce = all_reduce
    everyone, group = [], {"process_group": dist.group.WORLD}
    kinds = [*product(WAYS, [{}]), *((way, group) for way in ("plain", *CLIPS, "guarded", "clip_and_check_"))]
    lacking = [  # the missing gradients of each rank, and the rank with a gradient that is not finite
        (((), (), (), ()), 2),
        (((), range(9), (), ()), 2),
        (((), (0,), (0, 1), ()), None),
        ((range(9), range(9), (), range(9)), 2),
        ((range(9), range(9), range(9), range(9)), None),
    ]
    names = ("experts", "three meshes", "hsdp", "beside plain tensors", "float64 among them")
    for name, (lacks, culprit), (way, settings), fused in product(names, lacking, kinds, (False, True)):
        params = layouts[name](lacks=lacks[rank], culprit=culprit)
        calls.clear()
        assert _step(params, way, fused, **settings)[1] == (culprit is None), (name, lacks, way, fused)
        everyone.append(((name, lacks, way, len(settings), fused), [*calls]))
    of_ranks = [None] * world_size
    dist.all_gather_object(of_ranks, everyone)
    for (case, *_), *lists in zip(of_ranks[0], *([calls for _, calls in steps] for steps in of_ranks), strict=True):
        groups = {group for calls in lists for group, *_ in calls}
        assert groups, case
        for group in groups:
            of_members = [[call for call in lists[member] if call[0] == group] for member in group]
            assert all(calls == of_members[0] for calls in of_members), (case, group, of_members)


def test_the_members_of_each_group_make_the_same_calls():
    """The collectives do not depend on the gradients that a rank has, for every kind of step."""
    on_ranks(4, _record)
