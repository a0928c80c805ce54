"""Other code that reads, writes, replaces and overrides flags, private names and methods of torch's scaler."""

import copy
import pickle
import warnings
from collections import defaultdict

import pytest
import torch
from torch.amp.grad_scaler import OptState, _refresh_per_optimizer_state

from lossscale_core.errors import CheckpointError, CheckpointWarning
from lossscale_torch import GradScaler

BOTH = [GradScaler, torch.amp.GradScaler]
AGAINST_TORCH = pytest.mark.parametrize("make_scaler", BOTH, ids=["ours", "torch"])
EITHER_KIND = pytest.mark.parametrize("fused", [False, True], ids=["ordinary", "fused"])
EACH_BASE = pytest.mark.parametrize("base", BOTH, ids=["ours", "torch"])


def _one(fused=False):
    param = torch.nn.Parameter(torch.ones(1))
    return param, torch.optim.SGD([param], lr=1.0, fused=fused)


def _backward(scaler, param, finite=True):
    param.grad = None
    scaler.scale(param.sum()).backward()
    if not finite:
        param.grad.fill_(float("inf"))


def _raise_flag(scaler, optimizer):
    """Raise an optimizer's flag as an `all_reduce` over other ranks does: in place, and without a new version."""
    for flag in scaler._found_inf_per_device(optimizer).values():
        flag.detach().numpy().fill(1.0)


# -- flags -------------------------------------------------------------------------------------------------------------


@EITHER_KIND
@AGAINST_TORCH
def test_a_flag_raised_after_the_step_backs_off(make_scaler, fused):
    """The step was taken; the scale follows the flag, and the next step is clean."""
    param, optimizer = _one(fused)
    scaler = make_scaler("cpu", init_scale=1024.0)
    seen = []
    for is_raised in (True, False, False):
        _backward(scaler, param)
        scaler.step(optimizer)
        if is_raised:
            _raise_flag(scaler, optimizer)
        scaler.update()
        seen.append((param.item(), scaler.get_scale()))
    assert seen == [(0.0, 512.0), (-1.0, 512.0), (-2.0, 512.0)]


@EITHER_KIND
@pytest.mark.parametrize("clips", [False, True])
def test_a_flag_raised_before_the_step_skips(fused, clips):
    """Between unscaling, clipping and the step."""
    param, optimizer = _one(fused)
    scaler = GradScaler("cpu", init_scale=1024.0)
    _backward(scaler, param)
    scaler.unscale_and_clip_(optimizer, 10.0) if clips else scaler.unscale_(optimizer)
    _raise_flag(scaler, optimizer)
    scaler.step(optimizer)
    assert not scaler.update().applied
    assert (param.item(), scaler.get_scale()) == (1.0, 512.0)
    _backward(scaler, param)
    scaler.step(optimizer)
    assert scaler.update().applied


def test_unscaling_that_was_interrupted_raises_no_later_flag(monkeypatch):
    """Ctrl-C comes after an overflow was found in the first of two kernels; new gradients are checked by themselves."""
    params = [torch.nn.Parameter(torch.ones(1, dtype=dtype)) for dtype in (torch.float32, torch.float64)]
    optimizer = torch.optim.SGD(params, lr=1.0)
    scaler = GradScaler("cpu", init_scale=4.0)
    kernel, calls = torch._amp_foreach_non_finite_check_and_unscale_, []

    def interrupted(*args):
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return kernel(*args)

    _backward(scaler, params[0], finite=False)
    params[1].grad = torch.ones(1, dtype=torch.float64)
    monkeypatch.setattr(torch, "_amp_foreach_non_finite_check_and_unscale_", interrupted)
    with pytest.raises(KeyboardInterrupt):
        scaler.unscale_(optimizer)
    _backward(scaler, params[0])
    scaler.unscale_and_clip_(optimizer, 1.0)
    scaler.step(optimizer)
    assert scaler.update().applied
    for _ in range(2):
        _backward(scaler, params[0])
        scaler.step(optimizer)
        assert scaler.update().applied


def test_a_flag_raised_through_the_records():
    """`_per_optimizer_states[id(optimizer)]["found_inf_per_device"]` is where other packages find it."""
    param, optimizer = _one()
    scaler = GradScaler("cpu", init_scale=1024.0)
    _backward(scaler, param)
    scaler.step(optimizer)
    (flag,) = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values()
    flag.detach().numpy().fill(1.0)
    assert scaler.update().applied is False
    assert scaler.get_scale() == 512.0


@AGAINST_TORCH
def test_two_optimizers_have_flags_of_their_own(make_scaler):
    """One that is raised leaves the other's alone."""
    pairs = [_one() for _ in range(2)]
    scaler = make_scaler("cpu", init_scale=1024.0)
    for _ in range(2):
        for param, _ in pairs:
            _backward(scaler, param)
        for _, optimizer in pairs:
            scaler.unscale_(optimizer)
        _raise_flag(scaler, pairs[0][1])
        before = [param.item() for param, _ in pairs]
        for _, optimizer in pairs:
            scaler.step(optimizer)
        scaler.update()
        assert [old - param.item() for old, (param, _) in zip(before, pairs, strict=True)] == [0.0, 1.0]


@EITHER_KIND
@AGAINST_TORCH
def test_a_stage_set_back_to_ready_checks_again(make_scaler, fused):
    """What was known of the gradients before is forgotten."""
    param, optimizer = _one(fused)
    scaler = make_scaler("cpu", init_scale=1024.0)
    _backward(scaler, param)
    scaler.unscale_(optimizer)
    param.grad.fill_(float("inf"))
    scaler._per_optimizer_states[id(optimizer)]["stage"] = OptState.READY
    scaler.step(optimizer)
    scaler.update()
    assert (param.item(), scaler.get_scale()) == (1.0, 512.0)


@AGAINST_TORCH
def test_records_replaced_by_torchs_own_factory(make_scaler):
    """As subclasses do that end a step themselves."""
    param, optimizer = _one()
    scaler = make_scaler("cpu", init_scale=1024.0)
    scaler._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)
    _backward(scaler, param)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert param.item() == 0.0


# -- subclasses and replaced methods -----------------------------------------------------------------------------------


@EACH_BASE
def test_a_subclass_decides_on_the_step(base):
    """`_maybe_opt_step` is called with the record, as NeMo, Composer and torch_xla override it."""

    class Deciding(base):
        vetoes = 0

        def _maybe_opt_step(self, optimizer, optimizer_state, *args, **kwargs):
            if sum(flag.item() for flag in optimizer_state["found_inf_per_device"].values()) or self.vetoes:
                self.vetoes -= 1
                return None
            return optimizer.step(*args, **kwargs)

    param, optimizer = _one()
    scaler = Deciding("cpu", init_scale=1024.0)
    for vetoes, finite, expected in ((0, True, 1.0), (1, True, 0.0), (0, False, 0.0)):
        scaler.vetoes = vetoes
        _backward(scaler, param, finite)
        before = param.item()
        scaler.step(optimizer)
        scaler.update()
        assert before - param.item() == expected
    assert scaler.get_scale() == 512.0


@EACH_BASE
@EITHER_KIND
def test_a_subclass_adds_to_the_check(base, fused):
    """`step` calls `unscale_`, or `_check_inf_per_device` for a fused optimizer, as torch's ShardedGradScaler needs."""

    class Checking(base):
        calls = 0
        overflows_elsewhere = False

        def unscale_(self, optimizer):
            super().unscale_(optimizer)
            self._add(optimizer)

        def _check_inf_per_device(self, optimizer):
            result = super()._check_inf_per_device(optimizer)
            self._add(optimizer)
            return result

        def _add(self, optimizer):
            self.calls += 1
            for flag in self._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values():
                flag.fill_(max(flag.item(), float(self.overflows_elsewhere)))

    param, optimizer = _one(fused)
    scaler = Checking("cpu", init_scale=1024.0)
    for scaler.overflows_elsewhere in (False, True):
        _backward(scaler, param)
        scaler.step(optimizer)
        scaler.update()
    assert (scaler.calls, param.item(), scaler.get_scale()) == (2, 0.0, 512.0)


@EACH_BASE
def test_a_subclass_updates_with_torchs_own_kernel(base):
    """`update` writes the persistent tensors itself and replaces the records, as Megatron's and NeMo's do."""

    class Updating(base):
        def update(self, new_scale=None):
            scale, tracker = self._check_scale_growth_tracker("update")
            flags = [f for state in self._per_optimizer_states.values() for f in state["found_inf_per_device"].values()]
            settings = (self._growth_factor, self._backoff_factor, self._growth_interval)
            torch._amp_update_scale_(scale, tracker, sum(flags), *settings)
            self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)

    param, optimizer = _one()
    scaler = Updating("cpu", init_scale=1024.0, growth_interval=2)
    seen = []
    for finite in (True, True, True, False, True, True):
        _backward(scaler, param, finite)
        before = param.item()
        scaler.step(optimizer)
        scaler.update()
        seen.append((before - param.item(), scaler.get_scale(), scaler.state_dict()["_growth_tracker"]))
    assert seen == [(1, 1024, 1), (1, 2048, 0), (1, 2048, 1), (0, 1024, 0), (1, 1024, 1), (1, 2048, 0)]


@AGAINST_TORCH
@pytest.mark.parametrize("clips", [False, True])
def test_unscaling_that_is_replaced_on_the_instance(make_scaler, clips):
    """As trainers in full float16 do, which let float16 gradients pass."""
    model = torch.nn.Linear(1, 1, bias=False).half()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = make_scaler("cpu", init_scale=8.0)
    original = scaler._unscale_grads_
    scaler._unscale_grads_ = lambda optimizer, inverse, found, _: original(optimizer, inverse, found, True)
    scaler.scale(torch.ones(()))
    model.weight.grad = torch.full_like(model.weight, 8.0)
    if clips and make_scaler is GradScaler:
        scaler.unscale_and_clip_(optimizer, 0.5)
        assert model.weight.grad.item() == pytest.approx(0.5, rel=1e-3)
    else:
        scaler.unscale_(optimizer)
        assert model.weight.grad.item() == 1.0
    scaler.step(optimizer)
    scaler.update()


# -- private names -----------------------------------------------------------------------------------------------------


@AGAINST_TORCH
def test_what_is_written_in_place_is_seen_at_once(make_scaler):
    """By `get_scale`, by `state_dict` and by the next loss, whatever was updated before."""
    param, optimizer = _one()
    scaler = make_scaler("cpu", init_scale=1024.0, growth_interval=4)
    for _ in range(2):
        _backward(scaler, param)
        scaler.step(optimizer)
        scaler.update()
    scaler._growth_tracker.fill_(3)
    assert scaler.state_dict()["_growth_tracker"] == 3
    scaler._scale.fill_(32.0)
    assert scaler.get_scale() == scaler.state_dict()["scale"] == 32.0
    assert scaler.scale(torch.ones(())).item() == 32.0
    _backward(scaler, param)
    scaler.step(optimizer)
    scaler.update()
    assert (scaler.get_scale(), scaler._growth_tracker.item(), param.item()) == (64.0, 0, -2.0)


@AGAINST_TORCH
def test_a_scale_written_without_a_new_version(make_scaler):
    """As a broadcast from another rank writes it."""
    param, optimizer = _one()
    scaler = make_scaler("cpu", init_scale=1024.0)
    _backward(scaler, param)
    scaler.step(optimizer)
    scaler.update()
    scaler._scale.data.fill_(512.0)
    assert scaler.get_scale() == scaler.state_dict()["scale"] == 512.0
    param.grad = None
    (param.sum() * scaler.get_scale()).backward()
    scaler.step(optimizer)
    assert param.item() == -1.0


@AGAINST_TORCH
def test_what_a_state_was_loaded_with_is_what_it_began_with(make_scaler):
    """As torch's own tests of checkpoints read it."""
    scaler = make_scaler("cpu", init_scale=6.0)
    scaler._init_growth_tracker = 7
    scaler.scale(torch.ones(()))
    scaler.load_state_dict(make_scaler("cpu", init_scale=3.0).state_dict())
    assert (scaler._init_growth_tracker, scaler._init_scale, scaler._get_growth_tracker()) == (0, 3.0, 0)


@AGAINST_TORCH
def test_what_a_scaler_begins_with_can_be_set(make_scaler):
    """`_init_scale` and `_init_growth_tracker` count until the first loss, and not after it."""
    scaler = make_scaler("cpu", init_scale=1024.0)
    scaler._init_scale, scaler._init_growth_tracker = 8.0, 3
    assert scaler.scale(torch.ones(())).item() == 8.0
    assert scaler._growth_tracker.item() == 3
    scaler._init_scale, scaler._init_growth_tracker = 2.0, 1
    assert (scaler.get_scale(), scaler._init_scale, scaler._init_growth_tracker) == (8.0, 2.0, 1)
    assert scaler.state_dict()["_growth_tracker"] == 3


@AGAINST_TORCH
@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy])
def test_a_copy_has_a_scale_of_its_own(make_scaler, duplicate):
    """A shallow one, too."""
    scaler = make_scaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    twin = duplicate(scaler)
    twin.scale(torch.ones(()))
    twin.update(64.0)
    assert (scaler.get_scale(), twin.get_scale()) == (4.0, 64.0)


def test_a_parameter_that_joined_a_named_group():
    """The message about its float16 gradients knows it by its place."""
    model = torch.nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.named_parameters(), lr=1.0)
    late = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
    optimizer.param_groups[0]["params"].append(late)
    late.grad = torch.ones_like(late)
    scaler = GradScaler("cpu")
    scaler.scale(torch.ones(()))
    with pytest.raises(ValueError, match=r"parameter 1 of group 0 \(torch\.float16, shape \(2,\)\)"):
        scaler.unscale_(optimizer)


@pytest.mark.parametrize("scale", [0.0, -4.0, float("inf"), float("-inf"), float("nan"), True, "64", None])
@pytest.mark.parametrize("is_torchs", [False, True])
def test_a_dead_scale_is_not_gone_on_with(scale, is_torchs):
    """What is not a positive finite number is refused, and the scaler is as it was; torch takes it."""
    saved = (torch.amp.GradScaler if is_torchs else GradScaler)("cpu").state_dict()
    scaler = GradScaler("cpu", init_scale=8.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)  # of keys that contradict each other
        with pytest.raises(CheckpointError, match="must be a positive finite number"):
            scaler.load_state_dict(
                {**saved, "scale": scale} if is_torchs else {**saved, "loss_scale": scale, "scale": scale}
            )
    assert scaler.get_scale() == 8.0
    assert scaler.get_growth_interval() == 2000


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("scale", 1e-40, 2.0**-126),
        ("scale", 1e300, 2.0**126),
        ("growth_factor", 0.5, 1.0),
        ("backoff_factor", 2.0, 1.0),
    ],
)
def test_what_is_out_of_bounds_is_brought_within_them(key, value, expected):
    """A warning names the key and both numbers."""
    scaler = GradScaler("cpu")
    with pytest.warns(CheckpointWarning, match=f"{key} of the saved state was .* and becomes") as caught:
        scaler.load_state_dict({**torch.amp.GradScaler("cpu").state_dict(), key: value})
    assert scaler.state_dict()[key] == pytest.approx(expected)
    assert caught[0].filename == __file__


@pytest.mark.parametrize("value", [0, -2.0, float("nan"), float("inf"), True, "2", None, [2.0]])
def test_a_factor_that_is_not_positive_and_finite_is_refused(value):
    """The error names it as torch does."""
    with pytest.raises(CheckpointError, match=r"growth_factor=.* must be a positive finite number"):
        GradScaler("cpu").load_state_dict({**torch.amp.GradScaler("cpu").state_dict(), "growth_factor": value})


def test_a_record_of_torchs_stays_the_one_that_others_hold():
    """An `update` that was refused leaves it in its place, so that a flag that is put into it counts."""
    _, optimizer = _one()
    scaler = GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.ones(()))
    record = _refresh_per_optimizer_state()
    scaler._per_optimizer_states = defaultdict(_refresh_per_optimizer_state, {id(optimizer): record})
    with pytest.raises(AssertionError, match="No inf checks"):
        scaler.update()
    record.update(found_inf_per_device={torch.device("cpu"): torch.ones(())}, stage=OptState.STEPPED)
    scaler.update()
    assert scaler.get_scale() == 512.0


def test_a_copy_is_made_by_a_subclasss_own_methods():
    """`__getstate__` and `__setstate__`, as `pickle` uses them."""

    class Logging(GradScaler):
        log = ("old",)

        def __getstate__(self):
            return {**super().__getstate__(), "log": ("copied",)}

    for copied in (copy.copy(Logging("cpu")), copy.deepcopy(Logging("cpu"))):
        assert copied.log == ("copied",)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_every_protocol_of_pickle(protocol):
    """The oldest refuses classes with `__slots__`."""
    scaler = pickle.loads(pickle.dumps(GradScaler("cpu", init_scale=8.0), protocol))
    assert scaler.get_scale() == 8.0


def test_copies_of_a_disabled_scaler_skip_by_themselves():
    """A `skip` is of one of them."""
    _, optimizer = _one()
    scaler = GradScaler("cpu", enabled=False)
    copied = copy.copy(scaler)
    scaler.skip(optimizer)
    assert copied.update().applied
    assert not scaler.update().applied
