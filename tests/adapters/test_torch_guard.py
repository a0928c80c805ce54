"""`GradScaler(guard=...)` and `guarded(guard=...)`: spikes, vetoes, checkpoints, recorded graphs and several ranks."""

import copy
import logging
import math
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.amp.grad_scaler import _refresh_per_optimizer_state

from lossscale_core import GuardState, SpikeGuard
from lossscale_core.errors import CheckpointError
from lossscale_torch import GradScaler, guarded
from tests.adapters.emulated_device import Emulated
from tests.adapters.recorded_graph import RecordedGraph
from tests.adapters.torch_ranks import on_ranks
from tests.adapters.torch_steps import EITHER_KIND, INF, Veto, one, take_steps, two
from tests.core.guarded_run import EXPECTED, GUARD, NORMS, POLICY

EARLY_GUARD = SpikeGuard(warmup=2)


def _setup(kind="ordinary", **settings):
    """Return two parameters, their optimizers and a scaler with a guard."""
    device = "mps" if "device" in kind else "cpu"
    params, optimizers = two(kind != "ordinary", device=device, lr=1e-3)
    return params, optimizers, GradScaler(device, init_scale=8.0, guard=EARLY_GUARD, **settings)


@pytest.mark.parametrize("kind", ["ordinary", "fused", "fused on a device"])
def test_each_optimizer_has_its_own_norms(kind):
    """An optimizer's norms do not depend on another optimizer's overflows and spikes, and survive a restart."""
    with Emulated("mps"):
        veto = Veto()
        params, optimizers, scaler = _setup(kind, hooks=[veto])
        for sizes in [(1.0, 100.0), (1.0, INF), (1.0, 100.0)]:
            take_steps(params, optimizers, scaler, *sizes)
        state = scaler.state_dict()
        # Loaded states go to the optimizers in the order of their first steps.
        for loaded in (scaler, scaler, _setup(kind, hooks=[veto])[2]):
            loaded.load_state_dict(state)
            # The guard does not learn the norm of an overflow or of a vetoed step.
            for veto.value, counts in ((1.0, [(3, 0), (2, 0)]), (0.0, [(4, 0), (3, 1)])):
                info = take_steps(params, optimizers, loaded, 1.0, 1e6)
                assert [bool(info.applied_of(optimizer)) for optimizer in optimizers] == [not veto.value, False]
                states = loaded.state_dict()["guard"]
                assert [(int(each["norms"]), int(each["spikes"])) for each in states] == counts


@pytest.mark.parametrize("value", [1.0, True, torch.tensor([1.0]), torch.tensor(True), torch.tensor(math.nan)])
def test_a_veto_is_any_nonzero_number(value):
    """A hook vetoes a step by a number other than zero, and a hook of the same name does not take the veto back."""
    veto = Veto(value=value)
    params, optimizers, scaler = _setup(hooks=[veto, Veto(value=torch.zeros(()))])
    assert not take_steps(params, optimizers, scaler, 1.0, 1.0).applied
    for veto.value in (None, False, torch.zeros_like(torch.as_tensor(value))):
        assert take_steps(params, optimizers, scaler, 1.0, 1.0).applied
    veto.value = torch.ones(2)
    with pytest.raises(TypeError, match=r"Veto.before_step returned .*; return True, or a tensor of one element"):
        take_steps(params, optimizers, scaler, 1.0, 1.0)


class _OwnStepScaler(GradScaler):
    """A subclass that overrides `_maybe_opt_step` by the lines of torch's scaler."""

    def _maybe_opt_step(self, optimizer, optimizer_state, *args, **kwargs):
        if not sum(v.item() for v in optimizer_state["found_inf_per_device"].values()):
            return optimizer.step(*args, **kwargs)
        return None


@EITHER_KIND
def test_subclasses_with_own_steps_are_guarded(fused):
    """The guard flags spikes for the subclass, and checks each norm once, before `clip_grad_norm_` changes it."""
    param, optimizer = one(fused)
    scaler = _OwnStepScaler("cpu", policy=POLICY, guard=GUARD)
    prepare = [(scaler.unscale_, optimizer), (torch.nn.utils.clip_grad_norm_, [param], 0.1)]
    for step, norm in enumerate(NORMS):
        before = param.item()
        info = take_steps([param], [optimizer], scaler, float(norm), prepare=prepare)
        assert (bool(info.spiked), bool(info.overflowed)) == (EXPECTED.spiked[step], EXPECTED.skipped[step])
        assert bool(info.applied) == (param.item() != before) == (not (info.spiked or info.overflowed))
    assert scaler.metrics()["spikes"] == EXPECTED.spiked.sum()
    assert f"refused {EXPECTED.spiked.sum()} spikes" in scaler.diagnose()


@pytest.mark.parametrize("order", [2.0, 3.0])
def test_a_spike_skips_all_clipped_optimizers(order):
    """A spike of the common norm skips every optimizer and keeps the loss scale, for norms of order 2 and 3."""
    params, optimizers, scaler = _setup()
    prepare = [(scaler.unscale_and_clip_, optimizers, 1.0, order)]
    for size in [1.0] * 8 + [100.0]:
        info = take_steps(params, optimizers, scaler, size, 1.0, prepare=prepare)
    assert (info.spiked, info.overflowed, scaler.get_scale()) == (True, False, 8.0)
    assert [info.applied_of(optimizer) for optimizer in optimizers] == [False, False]


@pytest.mark.parametrize("is_guarded", [False, True], ids=["scaler", "guarded"])
def test_a_replayed_graph_checks_the_norms(is_guarded):
    """Each replay of a captured step compares its norm with earlier replays, also after a checkpoint was loaded."""
    param, optimizer = one(fused=True)
    owner = scaler = GradScaler("cpu", init_scale=2.0**10, guard=GUARD)
    scaler.place_on("cpu")
    param.grad = torch.ones(1)

    def step():
        scaler.unscale_and_clip_(optimizer, INF)
        scaler.step(optimizer)
        scaler.update()

    if is_guarded:
        owner, scaler = guarded(optimizer, guard=GUARD, max_streak=1), GradScaler("cpu", policy="none")
        step = optimizer.step
    saved = copy.deepcopy(owner.state_dict())
    step()  # creates the guard's state, on the host
    with RecordedGraph() as graph:
        step()
    owner.load_state_dict(saved)
    applied = []
    for size in [1.0] * 8 + [50.0, INF, 1.0]:
        param.grad.fill_(size * scaler.get_scale())
        before = param.item()
        graph.replay()
        applied.append(param.item() != before)
    assert applied == [True] * 8 + [False, False, True]
    assert [int(owner.metrics()[name]) for name in ("spikes", "skipped_steps", "steps")] == [1, 1, 10]


@pytest.mark.parametrize("is_guarded", [False, True], ids=["scaler", "guarded"])
def test_a_bad_guard_state_changes_nothing(is_guarded):
    """If the guard rejects its entry, all settings, counters and hooks stay unchanged."""
    param, optimizer = one(momentum=0.9)
    if is_guarded:
        param.grad = torch.ones(1)
        owner = guarded(optimizer, guard=EARLY_GUARD)
        owner.step()
        other = guarded(torch.optim.SGD([param], lr=0.5), guard=EARLY_GUARD).state_dict()
        other["param_groups"][0]["guarded_mean"] = "large"
    else:
        owner = GradScaler("cpu", init_scale=8.0, hooks=[Veto()], guard=EARLY_GUARD)
        take_steps([param], [optimizer], owner, 1.0)
        other = GradScaler("cpu", init_scale=2.0, growth_interval=7).state_dict()
        other |= {"veto": 5, "guard": {"mean": "large"}}
    before, policy = str(owner.state_dict()), getattr(owner, "policy", None)
    with pytest.raises(CheckpointError):
        owner.load_state_dict(other)
    assert (str(owner.state_dict()), getattr(owner, "policy", None)) == (before, policy)


def test_steps_with_replaced_records():
    """If a package replaces a record, as NeMo's scaler does, the guard does not learn the norm of this step."""
    params, optimizers, scaler = _setup()
    scaler.scale(sum(param.sum() for param in params)).backward()
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler._per_optimizer_states[id(optimizers[0])] = _refresh_per_optimizer_state()
    assert scaler.update().applied
    assert [state["norms"] for state in scaler.state_dict()["guard"]] == [0, 1]


def test_a_new_optimizer_starts_without_norms():
    """An optimizer does not inherit the norms of a deleted optimizer, even if Python reuses its `id`."""
    param, scaler = torch.nn.Parameter(torch.ones(2)), GradScaler("cpu", policy=8.0, guard=EARLY_GUARD)
    for size in (1.0, 1e4, 1e8):
        optimizer = torch.optim.SGD([param], lr=1e-3)
        for _ in range(4):
            assert take_steps([param], [optimizer], scaler, size).applied
        del optimizer


def _by_scaler(optimizer, veto, group):
    """Return a function that takes a step, one that returns the guard's state, and the steps that are skipped."""
    (param,) = optimizer.param_groups[0]["params"]
    scaler = GradScaler("cpu", init_scale=8.0, process_group=group, hooks=[veto], guard=EARLY_GUARD)

    def state():
        scaler.check_sync()
        # Of a veto, a spike and an overflow, only the overflow lowers the loss scale.
        assert scaler.get_scale() == 4.0
        return scaler.state_dict()["guard"]

    return partial(take_steps, [param], [optimizer], scaler), state, ("overflow", "spike", "veto")


def _by_guarded(optimizer, veto, group):
    (param,) = optimizer.param_groups[0]["params"]
    guarded(optimizer, guard=EARLY_GUARD, process_group=group)

    def take(size):
        param.grad = torch.full((1,), size)
        optimizer.step()
        return optimizer.last_step

    def state():
        numbers = optimizer.state_dict()["param_groups"][0]
        return {name: numbers[f"guarded_{name}"] for name in GuardState._fields}

    return take, state, ("overflow", "spike")


def _have_one_bad_rank(rank, world_size):
    group, lines, handler = dist.group.WORLD, [], logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("lossscale").addHandler(handler)
    for make, fused in ((_by_scaler, False), (_by_scaler, True), (_by_guarded, False)):
        veto, (param, optimizer) = Veto(), one(fused, lr=1e-3)
        take, state, skipped = make(optimizer, veto, group)
        for bad in (None, None, "overflow", "spike", "veto", None):
            # The norms differ between the ranks, as they do if the optimizer reduces the gradients.
            size, before = {"spike": 1e4, "overflow": (1.0, INF)[rank]}.get(bad, 1.0), param.item()
            veto.value = float(bad == "veto" and rank == 1)
            info, is_skipped = take(size * (rank + 1)), bad in skipped
            assert (bool(info.applied), param.item() == before) == (not is_skipped, is_skipped)
            assert (bool(info.spiked), bool(info.overflowed)) == (bad == "spike", bad == "overflow")
        # The guards of all ranks learn the largest norm, except of a step that overflowed or was vetoed on any rank.
        states = [None] * world_size
        dist.all_gather_object(states, state())
        assert states[0] == states[1]
        assert (states[0]["norms"], states[0]["spikes"]) == (7 - len(skipped), 1)
    # The first rank logs the first skipped step of a guarded optimizer, even if another rank has the bad gradients.
    words = "step 3 of GuardedSGD was skipped: the gradients of another rank are not finite"
    assert [line.split(";")[0] for line in lines] == [words] * (rank == 0)
    veto.value, (param, optimizer) = float(rank == 1), one()
    scaler = GradScaler("cpu", norm_group=group, hooks=[veto])
    clip = scaler.unscale_and_clip_, optimizer, INF  # combines the flags of the ranks before the hook sets its veto
    assert not take_steps([param], [optimizer], scaler, 1.0, prepare=[clip]).applied


def test_one_bad_rank_skips_everywhere():
    """A veto, a spike or an overflow on one rank skips the step on all ranks."""
    on_ranks(2, _have_one_bad_rank)
