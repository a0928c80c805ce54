"""Sharding that changes, partial sums, uneven inputs, communication hooks, distributed checkpoints: on gloo ranks."""

import os
import warnings
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.nn.parallel import DistributedDataParallel

from lossscale_core.errors import CallOrderError, CheckpointWarning, SyncError
from lossscale_torch import GradScaler
from tests.adapters.test_torch_distributed import _local, _on_ranks
from tests.torch_versions import needs_fsdp2_on_cpu

INF = float("inf")
_alone = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable):UserWarning")


def _layers():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 4))


def _backward(module, scaler):
    scaler.scale(module(torch.ones(2, 4)).square().mean()).backward()


def _spoil_here(module):
    """Write an infinity to a gradient that this rank holds; the other ranks do not see it."""
    _local_grad(module)[0, 0] = INF


def _local_grad(module):
    grad = next(module.parameters()).grad
    return grad.to_local() if isinstance(grad, DTensor) else grad


def _step(module, optimizer, scaler):
    """Step and update; return whether the step was applied, having checked that the parameters agree with it."""
    before = [param.detach().clone() for param in _local(module)]
    scaler.step(optimizer)
    applied = bool(scaler.update().applied)
    is_same = all(torch.equal(a, b) for a, b in zip(before, _local(module), strict=True))
    assert is_same != applied
    optimizer.zero_grad()
    return applied


# --- checkpoints of torch.distributed.checkpoint


def _torch_scaler(scale, tracker, interval):
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=interval)
    scaler.load_state_dict({**scaler.state_dict(), "_growth_tracker": tracker})
    return scaler


def _advanced(steps=7):
    scaler = GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([param], lr=0.0)
    for step in range(steps):
        scaler.scale(param.sum()).backward()
        if step == 4:
            param.grad.fill_(INF)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return scaler


@_alone
def test_a_distributed_checkpoint_restores_every_field(tmp_path):
    """Saved by this scaler, it loads into this scaler bit for bit, and into torch's own."""
    saved = _advanced()
    dcp.save({"scaler": saved}, checkpoint_id=tmp_path)
    restored, torchs = GradScaler("cpu"), torch.amp.GradScaler("cpu")
    dcp.load({"scaler": restored}, checkpoint_id=tmp_path)
    dcp.load({"scaler": torchs}, checkpoint_id=tmp_path)
    assert restored.state_dict() == saved.state_dict()
    assert torchs.state_dict() == {name: saved.state_dict()[name] for name in torchs.state_dict()}
    assert saved.state_dict()["skipped_steps"] == 1


@_alone
@pytest.mark.parametrize(("scale", "tracker", "interval"), [(512.0, 3, 7), (2.0**16, 0, 7), (2.0**16, 0, 2000)])
def test_a_distributed_checkpoint_of_torchs_scaler(scale, tracker, interval, tmp_path):
    """DCP refuses it for want of keys; loaded into torch's scaler first, or with a partial planner, it continues."""
    dcp.save({"scaler": _torch_scaler(scale, tracker, interval)}, checkpoint_id=tmp_path)
    refused = GradScaler("cpu", init_scale=4.0)
    with pytest.raises(dcp.CheckpointException, match="Missing key in checkpoint state_dict: scaler"):
        dcp.load({"scaler": refused}, checkpoint_id=tmp_path)
    assert refused.get_scale() == 4.0
    torchs, ours = torch.amp.GradScaler("cpu"), GradScaler("cpu")
    dcp.load({"scaler": torchs}, checkpoint_id=tmp_path)
    ours.load_state_dict(torchs.state_dict())
    partially = GradScaler("cpu")
    planner = DefaultLoadPlanner(allow_partial_load=True)
    with warnings.catch_warnings():  # of torch's keys next to ours, where the two differ
        warnings.simplefilter("ignore", CheckpointWarning)
        dcp.load({"scaler": partially}, checkpoint_id=tmp_path, planner=planner)
    for scaler in (ours, partially):
        state = scaler.state_dict()
        assert (state["scale"], state["growth_tracker"], state["growth_interval"]) == (scale, tracker, interval)
        assert state["policy"]["growth_interval"] == interval


def test_a_restored_interval_replaces_one_that_no_policy_can_hold():
    """A growth interval of 0 is forgotten when a state that says nothing of intervals is loaded."""
    scaler = GradScaler("cpu", growth_interval=0)
    state = GradScaler("cpu", growth_interval=5).state_dict()
    for name in ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"):
        del state[name]
    scaler.load_state_dict(state)
    assert scaler.get_growth_interval() == 5
    assert scaler.state_dict()["growth_interval"] == 5


# --- the dummy step with which torch.distributed.checkpoint makes an optimizer allocate its state


def _restore_under_accelerate(rank, world_size, folder):
    """Save and load a state with Accelerate; its optimizers call the scaler in their dummy step."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
    from accelerate.utils import DistributedType

    ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    os.environ.update(ranks, MASTER_ADDR="127.0.0.1", MASTER_PORT="0", OMP_NUM_THREADS="1")
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        state_dict_type="SHARDED_STATE_DICT",
        reshard_after_forward=True,
        cpu_ram_efficient_loading=False,
    )
    accelerator = Accelerator(cpu=True)
    # Accelerate takes FSDP2 up on accelerators only; from here on all of it runs, on gloo
    PartialState().distributed_type = accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin

    def prepare(kind, fused):
        accelerator.free_memory()
        accelerator.scaler = kind("cpu", init_scale=1024.0, growth_interval=1)
        module = _layers()
        return accelerator.prepare(module, torch.optim.AdamW(module.parameters(), lr=1e-3, fused=fused))

    for kind in (GradScaler, torch.amp.GradScaler):
        for fused in (False, True):
            place = f"{folder}/{kind.__module__}-{fused}"
            module, optimizer = prepare(kind, fused)
            for _ in range(2):
                accelerator.backward(module(torch.ones(2, 4)).square().mean())
                optimizer.step()
                optimizer.zero_grad()
            accelerator.save_state(place)
            saved, saved_params = accelerator.scaler.state_dict(), [each.detach().clone() for each in _local(module)]
            saved_steps = [each["step"].item() for each in optimizer.state.values()]
            module, optimizer = prepare(kind, fused)
            accelerator.load_state(place)
            restored = accelerator.scaler.state_dict()
            assert all(torch.equal(a, b) for a, b in zip(saved_params, _local(module), strict=True))
            assert [each["step"].item() for each in optimizer.state.values()] == saved_steps == [2.0] * 4
            if kind is GradScaler:
                assert restored == saved
                assert restored["scale"] == 4096.0
            else:
                assert (saved["scale"], restored["scale"]) == (4096.0, 8192.0)


@needs_fsdp2_on_cpu
def test_loading_under_accelerate_and_fsdp2_keeps_the_loss_scale(tmp_path):
    """Scale and counters are those saved, fused or not; torch's own scaler counts the dummy step."""
    _on_ranks(2, partial(_restore_under_accelerate, folder=tmp_path))


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("kind", "expected"), [(GradScaler, 1024.0), (torch.amp.GradScaler, 2048.0)])
def test_the_dummy_step_of_a_distributed_checkpoint_is_not_counted(kind, expected, fused):
    """An optimizer that Accelerate prepared is filled by torch's own loader; the loss scale stays as it was."""
    from accelerate import Accelerator

    scaler = kind("cpu", init_scale=1024.0, growth_interval=1)
    accelerator = Accelerator(cpu=True)
    accelerator.scaler = scaler
    module = _layers()
    optimizer = accelerator.prepare(torch.optim.AdamW(module.parameters(), fused=fused))
    scaler._lazy_init_scale_growth_tracker("cpu")  # as Accelerate does before it loads
    before = scaler.state_dict()
    state = get_optimizer_state_dict(module, optimizer)
    set_optimizer_state_dict(module, optimizer, state)
    assert optimizer.state[next(module.parameters())]["step"].item() == 1.0
    assert scaler.get_scale() == expected
    assert (scaler.state_dict() == before) == (kind is GradScaler)
    if kind is GradScaler:
        assert scaler.last_step.applied
        optimizer.optimizer.zero_grad()
        _backward(module, scaler)
        with pytest.warns(CheckpointWarning, match="pass it to scaler.load_state_dict"):  # which was not called
            optimizer.step()


@pytest.mark.parametrize("fused", [False, True])
def test_a_warm_up_that_begins_at_a_rate_of_zero_is_counted(fused):
    """Steps with gradients count although they move nothing: finite ones let the scale grow, others back it off."""
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([param], lr=1.0, fused=fused)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 2))
    scaler = GradScaler("cpu", init_scale=8.0, growth_interval=1)
    for bad, expected in ((True, 4.0), (False, 8.0), (False, 16.0)):
        scaler.scale(param.sum()).backward()
        if bad:
            param.grad[0] = float("nan")
        scaler.step(optimizer)
        assert bool(scaler.update().applied) != bad
        assert scaler.get_scale() == expected
        optimizer.zero_grad()
        if not bad:
            schedule.step()
    assert int(scaler.metrics()["steps"]) == 3
    assert param[0].item() < 1.0


def _warm_up_sharded(rank, world_size):
    """Take a step at a rate of zero in which only one rank's shard has gradients other than zero."""
    for fused in (False, True):
        module = fully_shard(torch.nn.Linear(4, 4, bias=False), mesh=init_device_mesh("cpu", (world_size,)))
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.0, fused=fused)
        scaler = GradScaler("cpu", init_scale=8.0, growth_interval=1)
        for owner, expected in ((0, 16.0), (1, 32.0), (None, 64.0)):
            _backward(module, scaler)  # a scaled loss counts, whatever its gradients are
            _local_grad(module).mul_(float(rank == owner))
            scaler.step(optimizer)
            assert scaler.update().applied
            assert scaler.get_scale() == expected
            optimizer.zero_grad()


@needs_fsdp2_on_cpu
def test_ranks_agree_whether_a_step_is_a_dummy():
    """A step after a scaled loss is not one; it does not matter which rank holds gradients."""
    _on_ranks(2, _warm_up_sharded)


# --- parameters that are sharded, and gradients that are summed, after the optimizer was made


def _shard_later(rank, world_size):
    """Shard a module after its optimizer has stepped, and give the optimizer's groups the new parameters."""
    mesh = init_device_mesh("cpu", (world_size,))
    for fused in (False, True):
        module = _layers()
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, fused=fused)
        scaler = GradScaler("cpu", init_scale=2.0**10)
        plain = list(module.parameters())
        _backward(module, scaler)
        assert _step(module, optimizer, scaler)
        fully_shard(module, mesh=mesh)
        optimizer.param_groups[0]["params"] = list(module.parameters())
        for bad in (False, True, False):
            _backward(module, scaler)
            if bad and rank == 1:
                _spoil_here(module)
            assert _step(module, optimizer, scaler) != bad
        scaler.check_sync()
        optimizer.param_groups[0]["params"] = plain
        scaler.scale(torch.ones(()))
        for param in plain:
            param.grad = torch.full_like(param, INF if rank == 1 else 1.0)
        scaler.step(optimizer)
        assert bool(scaler.update().applied) == (rank == 0)  # no rank communicates any more


@needs_fsdp2_on_cpu
def test_ranks_decide_together_from_the_step_on_in_which_parameters_are_sharded():
    """`fully_shard` after the optimizer was made, and groups that get other parameters, are followed at once."""
    _on_ranks(2, _shard_later)


def _sum_partial(rank, world_size):
    """Give a replicated parameter gradients that are summands over the ranks, each finite by itself."""
    mesh = init_device_mesh("cpu", (world_size,))

    def plain(scaler, optimizer):
        scaler.step(optimizer)

    def unscaled(scaler, optimizer):
        scaler.unscale_(optimizer)
        scaler.step(optimizer)

    def clipped(scaler, optimizer):
        norm = scaler.unscale_and_clip_(optimizer, 100.0)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        assert not torch.isfinite(norm) or norm.item() == pytest.approx(6.0)
        scaler.step(optimizer)

    def clipped_and_stepped(scaler, optimizer):
        scaler.clip_and_step(optimizer, 100.0)

    for fused in (False, True):
        for how in (plain, unscaled, clipped, clipped_and_stepped):
            for summand, is_finite in ((8.0 * (1 + rank), True), (3e38, False)):
                param = torch.nn.Parameter(DTensor.from_local(torch.ones(4), mesh, [Replicate()]))
                optimizer = torch.optim.AdamW([param], betas=(0.0, 0.0), fused=fused)
                scaler = GradScaler("cpu", init_scale=8.0)
                scaler.scale(torch.ones(()))
                param.grad = DTensor.from_local(torch.full((4,), summand), mesh, [Partial()])
                how(scaler, optimizer)
                assert bool(scaler.update().applied) == is_finite
                assert torch.equal(param.to_local(), torch.ones(4)) != is_finite
                if is_finite:
                    assert optimizer.state[param]["exp_avg"].to_local().tolist() == [3.0] * 4
                scaler.check_sync()


def test_a_sum_over_ranks_that_overflows_skips_everywhere():
    """Partial gradients are summed before they are checked; a finite sum is applied as it is."""
    _on_ranks(2, _sum_partial)


# --- uneven inputs


def _after(policy, finite):
    state = policy.init_state()
    for each in finite:
        state = policy.update(state, np.bool_(each))
    return {name: float(value) for name, value in state._asdict().items()}


def _require_everyone_has(scaler, finite):
    scaler.check_sync()
    expected = _after(scaler.policy, finite)
    assert {name: float(scaler.state_dict()[name]) for name in expected} == expected


def _require_same_weights(module, world_size):
    for param in module.parameters():
        everyone = [torch.empty_like(param) for _ in range(world_size)]
        dist.all_gather(everyone, param.detach())
        assert all(torch.equal(param, other) for other in everyone)


def _run_out_of_inputs(rank, world_size, counts, fused):
    """Train two optimizers under `Join`, with an overflow in one step."""
    module = DistributedDataParallel(_layers())
    optimizers = [torch.optim.SGD(layer.parameters(), lr=1e-2, fused=fused) for layer in module.module]
    scaler = GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    finite = [step != 3 for step in range(max(counts))]
    with Join([module, scaler]):
        for step in range(counts[rank]):
            images = torch.full((2, 4), 1.0 + rank)
            if step == 3 and rank == 1:
                images[0, 0] = INF
            scaler.scale(module(images).square().mean()).backward()
            for optimizer in optimizers:
                scaler.step(optimizer)
            assert bool(scaler.update().applied) == finite[step]
            module.zero_grad()
    _require_everyone_has(scaler, finite)
    _require_same_weights(module, world_size)
    scaler.scale(module(torch.ones(2, 4)).square().mean()).backward()  # and on, without Join
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    _require_everyone_has(scaler, [*finite, True])


def _join_in_all_ways(rank, world_size):
    for counts, fused in (((2, 6, 5), False), ((0, 6, 6), True)):
        _run_out_of_inputs(rank, world_size, counts, fused)


def test_a_rank_without_inputs_decides_and_continues_with_the_others():
    """`Join([model, scaler])`: in the end all states are those of the last rank that had inputs."""
    _on_ranks(3, _join_in_all_ways)


def _accumulate_unevenly(rank, world_size):
    """Accumulate gradients over two batches, of which one rank has fewer, and save what each rank then knows."""
    for joins_scaler in (True, False):
        module = DistributedDataParallel(_layers())
        optimizer = torch.optim.SGD(module.parameters(), lr=1e-2)
        scaler = GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        with Join([module, scaler] if joins_scaler else [module]):
            for _ in range(1 + 2 * rank):
                with module.no_sync():
                    _backward(module, scaler)
                _backward(module, scaler)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        _require_same_weights(module, world_size)
        if joins_scaler:
            _require_everyone_has(scaler, [True] * 3)
        else:
            assert int(scaler.metrics()["steps"]) == 1 + 2 * rank
            with pytest.raises(SyncError, match=r"ranks \[1\] differ from rank 0's"):
                scaler.check_sync()


def _join_wrongly(rank, world_size):
    module = DistributedDataParallel(_layers())
    with pytest.raises(CallOrderError, match=r"write Join\(\[model, scaler\]\)"):
        Join([GradScaler("cpu"), module])
    with pytest.raises(CallOrderError, match=r"waits for every rank at each step.*without process_group="):
        Join([module, GradScaler("cpu", process_group=dist.group.WORLD)])


def _leave_join_off(rank, world_size):
    """Pass the scaler to a `Join` that is switched off."""
    module = DistributedDataParallel(_layers())
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-2)
    scaler = GradScaler("cpu", init_scale=8.0, process_group=dist.group.WORLD)
    with Join([module, scaler], enable=False):
        _backward(module, scaler)
        if rank == 1:
            _spoil_here(module)
        assert not _step(module, optimizer, scaler)
    assert scaler.get_scale() == 4.0


def _join_otherwise(rank, world_size):
    for work in (_accumulate_unevenly, _leave_join_off):
        work(rank, world_size)


def test_uneven_inputs_with_accumulation_and_without_the_scaler():
    """Any loop joins; a scaler that is left out falls behind; a `Join` that is off changes nothing."""
    _on_ranks(2, _join_otherwise)


def test_joins_that_would_hang_are_refused():
    """A scaler before its model, and one that asks a group at each step."""
    _on_ranks(1, _join_wrongly)


# --- communication hooks of DistributedDataParallel


def _applied(rank, hook, state, process_group=None, steps=6):
    """Train with an overflow in step 3 on rank 1, and return which steps were applied."""
    torch.manual_seed(0)
    module = DistributedDataParallel(torch.nn.Linear(32, 32, bias=False))
    module.register_comm_hook(state, hook)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    scaler = GradScaler("cpu", init_scale=2.0**8, process_group=process_group)
    applied = []
    for step in range(steps):
        images = torch.full((2, 32), 1.0 + rank)
        if step == 3 and rank == 1:
            images[0, 0] = INF
        scaler.scale(module(images).square().mean()).backward()
        applied.append(_step(module, optimizer, scaler))
    return applied


def _train_with_hooks(rank, world_size):
    once = [True, True, True, False, True, True]
    assert _applied(rank, fp16_compress_hook, None) == once
    compress = partial(PowerSGDState, None, start_powerSGD_iter=2, min_compression_rate=0.5)
    forgetful = compress(use_error_feedback=False, warm_start=False)
    assert _applied(rank, powerSGD_hook, forgetful) == once
    assert _applied(rank, powerSGD_hook, compress()) == [True, True, True, False, False, False]
    each_alone, _ = dist.new_subgroups(group_size=1)
    local = partial(PostLocalSGDState, None, each_alone, start_localSGD_iter=1)
    assert _applied(rank, post_localSGD_hook, local()) == (once if rank == 1 else [True] * 6)
    assert _applied(rank, post_localSGD_hook, local(), process_group=dist.group.WORLD) == once


def test_which_communication_hooks_need_a_group():
    """Compressed gradients are alike on all ranks; post-local SGD's are not, and PowerSGD remembers an overflow."""
    _on_ranks(2, _train_with_hooks)


# -- the flags of several ranks ----------------------------------------------------------------------------------------


def _two_optimizers(fused=False):
    params = [torch.nn.Parameter(torch.ones(size)) for size in (2, 3)]
    return params, [torch.optim.SGD([param], lr=1.0, fused=fused) for param in params]


def _step_in_order(scaler, params, optimizers, order):
    for param in params:
        param.grad = None
    scaler.scale(sum(param.sum() for param in params)).backward()
    for i in order:
        scaler.step(optimizers[i])
    scaler.update()


def _step_stages(rank, world_size):
    params = [torch.nn.Parameter(torch.ones(size + rank)) for size in (2, 3)]
    optimizers = [torch.optim.SGD([params[0]], lr=1.0), torch.optim.AdamW([params[1]], lr=1.0)]
    scaler = GradScaler("cpu", init_scale=8.0, process_group=dist.group.WORLD)
    for _ in range(3):
        _step_in_order(scaler, params, optimizers, (0, 1))
    assert scaler.metrics()["steps"] == 3


def test_ranks_may_hold_other_parameters():
    """As stages of a pipeline do, which decide together on optimizers of different shapes."""
    _on_ranks(2, _step_stages)


def _step_with_a_frozen_stage(rank, world_size):
    for fused in (False, True):
        param = torch.nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([param], lr=1.0 if rank else 0.0, fused=fused)
        scaler = GradScaler("cpu", init_scale=8.0, growth_interval=1, process_group=dist.group.WORLD)
        for _ in range(3):
            optimizer.zero_grad()
            scaler.scale(param.sum() * rank).backward()
            scaler.step(optimizer)
            assert scaler.update().applied
        assert (param.item(), scaler.get_scale()) == (1.0 - 3.0 * rank, 64.0)
        scaler.check_sync()


def test_one_rank_with_rates_and_gradients_of_zero():
    """Its step counts with the others'; only a step that rehearses on every rank does not."""
    _on_ranks(2, _step_with_a_frozen_stage)


def _renew_an_optimizer(rank, world_size):
    param = torch.nn.Parameter(torch.ones(1))
    scaler = GradScaler("cpu", init_scale=8.0, process_group=dist.group.WORLD)
    kept = []
    for _ in range(5):
        optimizer = torch.optim.SGD([param], lr=1.0)
        kept += [optimizer] if rank else []
        optimizer.zero_grad()
        scaler.scale(param.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        del optimizer
    assert param.item() == -4.0


def test_an_optimizer_for_each_phase():
    """One rank frees the old one and another keeps it: the order is the same."""
    _on_ranks(2, _renew_an_optimizer)


def _stand_outside(rank, world_size):
    group = dist.new_group([0])
    scaler = GradScaler("cpu", init_scale=2.0 ** (3 + rank), process_group=group)
    params, optimizers = _two_optimizers()
    if rank == 0:
        _step_in_order(scaler, params, optimizers, (0, 1))
        scaler.check_sync()
        return
    with pytest.raises(SyncError, match="rank 1 is not in the process_group of its scaler"):
        _step_in_order(scaler, params, optimizers, (0, 1))
    with pytest.raises(SyncError, match="rank 1 is not in the process_group of its scaler"):
        scaler.check_sync()


def test_a_rank_outside_of_the_group():
    """It would step alone, and a comparison would compare nothing."""
    _on_ranks(2, _stand_outside)


def _load_on_one_rank(rank, world_size):
    scaler = GradScaler("cpu", init_scale=8.0)
    if rank == 1:
        scaler.load_state_dict(GradScaler("cpu", init_scale=64.0).state_dict())
    with pytest.raises(SyncError, match=r"rank 0: 8, rank 1: 64"):
        scaler.check_sync()


def test_a_state_loaded_on_one_rank_alone():
    """One call after loading raises an error, before the ranks' steps differ."""
    _on_ranks(2, _load_on_one_rank)
