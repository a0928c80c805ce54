"""`lossscale_torch.GradScaler` next to torch's own: the same where torch is right, and better where it is not."""

import copy
import io
import itertools
import math
import pickle
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.amp.grad_scaler import OptState

from lossscale_core import (
    BaseScaling,
    DynamicScaling,
    FixedScaling,
    NoScaling,
    state_from_dict,
    state_to_dict,
)
from lossscale_core.errors import CheckpointError, CheckpointWarning, OverflowStreakError, PolicyError
from lossscale_core.testing import overflow_traces, simulate
from lossscale_torch import GradScaler, overflow_report
from tests.adapters.recorded_graph import RecordedGraph
from tests.core.own_policies import AdditiveScaling, BareAdditiveScaling
from tests.torch_versions import TORCH

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "sgd-fused": lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
}
EACH_OPTIMIZER = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)


def _model(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Linear(4, 3)


def _backward(scaler, model, finite=True):
    model.zero_grad()
    scaler.scale(model(torch.ones(2, 4)).sum()).backward()
    if not finite:
        model.weight.grad[0, 0] = float("inf")


def _run(scaler, make, trace, unscale_first=False):
    """Train over a trace of flags; return the scales and every number of model and optimizer."""
    model = _model()
    optimizer = make(model.parameters())
    scales = []
    for finite in trace:
        _backward(scaler, model, finite)
        if unscale_first:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    tensors = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    return scales, [*model.parameters(), *tensors]


def _one_param(grad, value=1.0, **kwargs):
    param = torch.nn.Parameter(torch.full_like(grad.to_dense() if grad.is_sparse else grad, value))
    param.grad = grad
    return param, torch.optim.SGD([param], lr=1.0, **kwargs)


def _ready(**kwargs):
    scaler = GradScaler("cpu", **kwargs)
    scaler.scale(torch.ones(()))
    return scaler


# -- where torch is right ----------------------------------------------------------------------------------------------


@EACH_OPTIMIZER
@pytest.mark.parametrize("unscale_first", [False, True])
@given(trace=overflow_traces(max_steps=40))
@settings(max_examples=12)
def test_training_is_torchs_bit_for_bit(make, unscale_first, trace):
    """Scales, parameters and optimizer state are those of torch's own scaler over any trace."""
    kwargs = {"init_scale": 2.0**10, "growth_interval": 3}
    expected = _run(torch.amp.GradScaler("cpu", **kwargs), make, trace, unscale_first)
    actual = _run(GradScaler("cpu", **kwargs), make, trace, unscale_first)
    assert actual[0] == expected[0]
    for a, b in zip(actual[1], expected[1], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@EACH_OPTIMIZER
@pytest.mark.parametrize("policy", [DynamicScaling(growth_interval=3, hysteresis=2), FixedScaling(8.0), NoScaling()])
def test_any_policy_runs_as_it_simulates(make, policy):
    """The scale of every step is the policy's, and fixed policies skip too."""
    trace = [True, True, True, False, True, False, False, True] * 4
    scales, tensors = _run(GradScaler("cpu", policy=policy), make, trace)
    assert scales == simulate(policy, trace).loss_scale_after.tolist()
    assert all(torch.isfinite(tensor).all() for tensor in tensors)


def test_semi_private_names_are_there():
    """The names that other packages read: before a loss, after one, and after a step."""
    scaler = GradScaler("cpu", init_scale=8.0)
    assert (scaler._init_scale, scaler._growth_factor, scaler._backoff_factor) == (8.0, 2.0, 0.5)
    assert (scaler._growth_interval, scaler._init_growth_tracker, scaler._enabled, scaler._device) == (
        2000,
        0,
        True,
        "cpu",
    )
    assert scaler._scale is None is scaler._growth_tracker
    scaler._lazy_init_scale_growth_tracker("cpu")
    assert scaler._scale.item() == 8.0
    assert scaler._growth_tracker.dtype == torch.int32
    param, optimizer = _one_param(torch.tensor([8.0, float("inf")]))
    scaler.scale(torch.ones(()))
    assert scaler._found_inf_per_device(optimizer) == {}
    assert scaler._check_inf_per_device(optimizer)[torch.device("cpu")].item() == 1.0
    assert scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY
    found = scaler._unscale_grads_(optimizer, torch.tensor(0.125), torch.zeros(()), False)
    assert found[torch.device("cpu")].item() == 1.0
    assert param.grad[0].item() == 1.0
    assert scaler._get_scale_async() is scaler._scale
    assert scaler._get_growth_tracker() == 0


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda s, o: s.step(o), AssertionError, "Attempted step but _scale is None."),
        (lambda s, o: s.unscale_(o), AssertionError, "Attempted unscale_ but _scale is None."),
        (lambda s, o: s.update(), AssertionError, "Attempted update but _scale is None."),
        (
            lambda s, o: (s.scale(torch.ones(())), s.update()),
            AssertionError,
            "No inf checks were recorded prior to update.",
        ),
        (
            lambda s, o: (s.scale(torch.ones(())), s.unscale_(o), s.unscale_(o)),
            RuntimeError,
            "unscale_() has already been called on this optimizer since the last update().",
        ),
        (
            lambda s, o: (s.scale(torch.ones(())), s.step(o), s.unscale_(o)),
            RuntimeError,
            "unscale_() is being called after step().",
        ),
        (
            lambda s, o: (s.scale(torch.ones(())), s.step(o), s.step(o)),
            RuntimeError,
            "step() has already been called since the last update().",
        ),
        (
            lambda s, o: (s.scale(torch.ones(())), s.step(o, closure=lambda: 1)),
            RuntimeError,
            "Closure use is not currently supported if GradScaler is enabled.",
        ),
        (lambda s, o: s.scale(5), ValueError, "outputs must be a Tensor or an iterable of Tensors"),
        (lambda s, o: s.load_state_dict({}), RuntimeError, "The source state dict is empty"),
        (lambda s, o: s.load_state_dict({"scale": 1.0}), KeyError, "growth_factor"),
        (
            lambda s, o: (s.scale(torch.ones(())), s.update(torch.ones(2))),
            AssertionError,
            "new_scale should be a float",
        ),
        (lambda s, o: (s.scale(torch.ones(())), s.unscale_(o), pickle.dumps(s)), AssertionError, "may only be pickled"),
        (lambda s, o: GradScaler("cpu", growth_factor=1.0), AssertionError, "The growth factor must be > 1.0."),
        (lambda s, o: GradScaler("cpu", backoff_factor=1.0), AssertionError, "The backoff factor must be < 1.0."),
    ],
)
@pytest.mark.parametrize("make_scaler", [GradScaler, torch.amp.GradScaler], ids=["ours", "torch"])
def test_errors_are_torchs(make_scaler, call, error, message):
    """The same type and the same words, from torch's scaler and from ours."""
    _, optimizer = _one_param(torch.ones(2))
    with pytest.raises(error) as caught:
        call(make_scaler("cpu"), optimizer)
    assert message in str(caught.value)


def test_update_takes_a_new_scale():
    """A float, an int (which torch refuses) or a one-element tensor, kept within float32's good range."""
    scaler = _ready()
    scaler.update(32.0)
    assert scaler.get_scale() == 32.0
    scaler.update(4)
    assert scaler.get_scale() == 4.0
    scaler.update(torch.tensor([2.0]))
    assert scaler._scale.item() == 2.0
    for bad in (0.0, -1.0, float("nan"), "8", True, torch.ones(2), torch.ones(1, requires_grad=True)):
        with pytest.raises(
            AssertionError, match=r"^new_scale should be a float .*=False\. It is .* pass a positive"
        ) as e:
            scaler.update(bad)
        assert f" It is {'a tensor of shape' if isinstance(bad, torch.Tensor) else repr(bad)}" in str(e.value)


@EACH_OPTIMIZER
def test_a_scale_set_by_hand_outlives_reading_it(make):
    """A fixed policy's scale may be set, and stays set on the host and on the device."""
    scaler = GradScaler("cpu", policy=8.0)
    scaler.scale(torch.ones(()))
    scaler.update(32.0)
    assert _run(scaler, make, [True, False, True])[0] == [32.0] * 3


def test_setters_replace_the_policy():
    """torch's setters work, obey the rules, and lowering the interval below the count works."""
    scaler = _ready(growth_interval=100)
    _, optimizer = _one_param(torch.ones(1))
    for _ in range(10):
        scaler.scale(torch.ones(()))
        scaler.step(optimizer)
        scaler.update()
    scaler.set_growth_interval(5)
    scaler.set_growth_factor(4.0)
    scaler.set_backoff_factor(0.25)
    assert (scaler.get_growth_interval(), scaler.get_growth_factor(), scaler.get_backoff_factor()) == (5, 4.0, 0.25)
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**18
    with pytest.raises(PolicyError):
        scaler.set_growth_factor(0.5)
    with pytest.raises(PolicyError, match="has no growth_interval"):
        GradScaler("cpu", policy="none").set_growth_interval(3)


def test_disabled_is_a_pass_through():
    """Every method is a no-op, the getters included."""
    scaler = GradScaler("cpu", enabled=False)
    loss = torch.ones(())
    param, optimizer = _one_param(torch.ones(2))
    assert scaler.scale(loss) is loss
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert scaler.update().applied
    assert param.tolist() == [0.0, 0.0]
    assert (scaler.state_dict(), scaler.get_scale(), scaler.is_enabled()) == ({}, 1.0, False)
    scaler.load_state_dict({})
    assert scaler.get_growth_factor() == 2.0
    assert scaler.diagnose().startswith("disabled")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA; there the warning is not due")
def test_without_cuda_it_disables_itself_as_torch_does():
    """torch's warning, in its words."""
    with pytest.warns(UserWarning, match="CUDA is not available.  Disabling."):
        assert not GradScaler().is_enabled()


# -- losses ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64])
@pytest.mark.parametrize("shape", [(), (2,), (2, 2)])
def test_losses_of_every_dtype_and_shape(dtype, shape):
    """Half losses are lifted, one-dimensional ones too; float64 stays."""
    scaled = GradScaler("cpu").scale(torch.full(shape, 2, dtype=dtype))
    assert scaled.dtype == (torch.float64 if dtype is torch.float64 else torch.float32)
    assert (scaled == 2.0**17).all()


def test_nested_losses():
    """Containers keep their type, dicts scale their values, and other iterables stay lazy."""
    scaler = GradScaler("cpu", init_scale=4.0)
    one = torch.ones(())
    nested = scaler.scale({"a": [one, (one,)]})
    assert nested["a"][1][0].item() == 4.0
    assert [t.item() for t in scaler.scale(iter([one, one]))] == [4.0, 4.0]
    result = scaler.scale(torch.return_types.max((one, one)))
    assert type(result) is torch.return_types.max


# -- gradients ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.complex64])
@pytest.mark.parametrize("bad", [None, float("inf"), float("-inf"), float("nan")])
def test_gradients_of_every_dtype(dtype, bad):
    """They are unscaled in place, and one bad element skips."""
    param, optimizer = _one_param(torch.full((5,), 2.0, dtype=dtype))
    if bad is not None:
        param.grad[3] = bad
    scaler = _ready(init_scale=2.0)
    scaler.step(optimizer)
    info = scaler.update()
    assert bool(info.applied) == (bad is None)
    assert (param == (0.0 if bad is None else 1.0)).all()


def test_mixed_dtypes_and_layouts_in_one_optimizer():
    """Buckets of their own, one decision."""
    params = [
        torch.nn.Parameter(torch.ones(3, dtype=dtype)) for dtype in (torch.float32, torch.float64, torch.bfloat16)
    ]
    params.append(torch.nn.Parameter(torch.ones(4, 2)))
    for param in params[:3]:
        param.grad = torch.full_like(param, 4.0)
    params[3].grad = torch.sparse_coo_tensor([[1]], [[4.0, 4.0]], (4, 2), check_invariants=True)
    scaler = _ready(init_scale=4.0)
    optimizer = torch.optim.SGD(params, lr=1.0)
    scaler.unscale_(optimizer)
    assert [param.grad.dtype for param in params] == [param.dtype for param in params]
    assert all((param.grad == 1.0).all() for param in params[:3])
    assert params[3].grad.to_dense()[1].tolist() == [1.0, 1.0]
    params[2].grad[0] = 1.0
    scaler.step(optimizer)
    assert scaler.update().applied


def test_sparse_duplicates_are_summed_before_the_check():
    """Two finite entries with an infinite sum are an overflow; torch misses it in float32."""
    grad = torch.sparse_coo_tensor([[0, 0]], [[3e38], [3e38]], (2, 1), check_invariants=True)
    param, optimizer = _one_param(grad)
    scaler = _ready(init_scale=1.0)
    scaler.step(optimizer)
    assert not scaler.update().applied
    assert (param == 1.0).all()


def test_float16_gradients_are_refused_by_name():
    """torch's sentence first, then which parameters, and the remedy; on request they are unscaled."""
    model = torch.nn.Linear(2, 2).half()
    optimizer = torch.optim.SGD(model.named_parameters(), lr=1.0)
    for param in model.parameters():
        param.grad = torch.full_like(param, 8.0)
    scaler = _ready(init_scale=8.0)
    with pytest.raises(ValueError, match=r"^Attempting to unscale FP16 gradients\.") as caught:
        scaler.unscale_(optimizer)
    for word in ("weight (torch.float16, shape (2, 2))", "bias", "torch.autocast", "half_gradients=True"):
        assert word in str(caught.value)
    allowed = _ready(init_scale=8.0, half_gradients=True)
    allowed.unscale_(optimizer)
    assert (model.weight.grad == 1.0).all()


@EACH_OPTIMIZER
def test_the_scale_neither_vanishes_nor_becomes_infinite(make):
    """300 overflows end at 2**-126, 300 growths at 2**126, and nothing becomes NaN."""
    for finite, end in ((False, 2.0**-126), (True, 2.0**126)):
        scales, tensors = _run(GradScaler("cpu", init_scale=2.0, growth_interval=1), make, [finite] * 140)
        assert scales[-1] == end
        assert all(torch.isfinite(tensor).all() for tensor in tensors)


def test_a_skipped_first_step_leaves_no_garbage_in_fused_momentum():
    """torch's fused SGD allocates momentum and then skips: what it left unwritten is zeroed."""
    trace = [False, True, True, False, True]
    fused, unfused = (
        _run(GradScaler("cpu"), lambda p, f=f: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=f), trace)
        for f in (True, False)
    )
    for a, b in zip(fused[1], unfused[1], strict=True):
        torch.testing.assert_close(a, b)


def test_any_positive_init_scale_is_taken():
    """What torch accepts is accepted, brought to where float32 keeps the scale and its reciprocal."""
    for large, taken in ((1e38, 2.0**126), (1e-44, 2.0**-126)):
        with pytest.warns(UserWarning, match="is beyond the range of policies"):
            assert GradScaler("cpu", init_scale=large).get_scale() == taken
    with pytest.raises(PolicyError, match="init_scale=inf must be finite"):
        GradScaler("cpu", init_scale=float("inf"))
    with pytest.raises(PolicyError, match="init_scale"):
        GradScaler("cpu", init_scale=0.0)


# -- optimizers --------------------------------------------------------------------------------------------------------


@EACH_OPTIMIZER
def test_an_optimizer_without_gradients_is_a_finite_no_op(make):
    """Nothing is checked, so nothing changes; the reason can be asked for."""
    param = torch.nn.Parameter(torch.ones(2))
    optimizer = make([param])
    scaler = _ready()
    scaler.step(optimizer)
    info = scaler.update()
    assert info.applied
    assert (scaler.get_scale(), scaler.metrics()["steps"]) == (2.0**16, 0)
    assert "no gradients" in scaler.diagnose()


def test_closures_are_refused_positionally_too():
    """A positional None, as Accelerate passes it, is not a closure."""
    _, optimizer = _one_param(torch.ones(2))
    scaler = _ready()
    with pytest.raises(RuntimeError, match="Closure use"):
        scaler.step(optimizer, lambda: 1)
    scaler.step(optimizer, None)


def test_two_optimizers_skip_each_by_itself_and_back_off_once():
    """One flag for the scale, one decision for each optimizer."""
    good, good_optimizer = _one_param(torch.full((2,), 2.0))
    bad, bad_optimizer = _one_param(torch.full((2,), float("inf")))
    worse, worse_optimizer = _one_param(torch.full((2,), float("nan")))
    scaler = _ready(init_scale=2.0)
    for optimizer in (bad_optimizer, good_optimizer, worse_optimizer):
        scaler.step(optimizer)
    info = scaler.update()
    assert not info.applied
    assert (good.tolist(), bad.tolist(), worse.tolist()) == ([0.0, 0.0], [1.0, 1.0], [1.0, 1.0])
    assert scaler.get_scale() == 1.0


def test_the_scale_may_be_set_through_torchs_private_tensor():
    """Assigned or written in place, it multiplies the next loss and divides its gradients."""
    scaler = _ready(init_scale=64.0)
    scaler._scale = torch.tensor(128.0)
    assert scaler.scale(torch.ones(())).item() == scaler.get_scale() == 128.0
    param, optimizer = _one_param(torch.ones(1))
    scaler.step(optimizer)
    scaler.update()
    scaler._scale.fill_(16.0)
    optimizer.zero_grad()
    scaler.scale(param.sum()).backward()
    assert param.grad.item() == 16.0
    scaler.unscale_(optimizer)
    assert param.grad.item() == 1.0
    assert scaler.get_scale() == 16.0


@pytest.mark.parametrize("flag", [2.0, float("nan")])
@pytest.mark.parametrize("fused", [False, True])
def test_a_flag_raised_by_others_skips(flag, fused):
    """Any flag but 0 is an overflow, and a fused kernel receives it as 1.0."""
    param, optimizer = _one_param(torch.ones(1), fused=fused)
    scaler = _ready(init_scale=2.0)
    scaler.unscale_(optimizer)
    for each in scaler._found_inf_per_device(optimizer).values():
        each.fill_(flag)
    scaler.step(optimizer)
    assert not scaler.update().applied
    assert param.item() == 1.0


def test_an_optimizer_of_the_old_contract_gets_the_scaler():
    """As with torch: a step that takes `grad_scaler` receives it, with a warning at the line that steps."""

    class Old(torch.optim.SGD):
        _step_supports_amp_scaling = True

        def step(self, closure=None, *, grad_scaler=None):
            grad_scaler.unscale_(self)
            self.given = grad_scaler

    param = torch.nn.Parameter(torch.ones(1))
    param.grad = torch.ones(1)
    optimizer = Old([param], lr=1.0)
    scaler = _ready()
    with pytest.warns(FutureWarning, match="stop passing itself") as told:
        scaler.step(optimizer)
    if TORCH >= (2, 7):  # earlier versions have a wrapper in between
        assert told[0].filename == __file__
    assert optimizer.given is scaler
    assert scaler.update().applied


def test_gradients_without_elements_are_finite():
    """At any scale, fused or not, clipped or not."""
    for fused, clip, init_scale in itertools.product((False, True), (False, True), (0.5, 2.0)):
        param = torch.nn.Parameter(torch.ones(0))
        param.grad = torch.ones(0)
        optimizer = torch.optim.SGD([param], lr=1.0, fused=fused)
        scaler = _ready(init_scale=init_scale)
        if clip:
            assert scaler.unscale_and_clip_(optimizer, 1.0).item() == 0.0
        scaler.step(optimizer)
        assert scaler.update().applied


def test_a_gan_with_two_losses():
    """Two losses, two optimizers, an update each: every true gradient arrives, and an overflow skips its own."""
    scaler = GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
    generator, discriminator = torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 1, bias=False)
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.0) for module in (discriminator, generator)]
    noise = torch.ones(1, 2)
    for step in range(6):
        for module, optimizer in zip((discriminator, generator), optimizers, strict=True):
            image = generator(noise)
            loss = discriminator(image.detach() if module is discriminator else image).sum()
            module.zero_grad()
            expected = torch.autograd.grad(loss, list(module.parameters()), retain_graph=True)[0].clone()
            scaler.scale(loss).backward(inputs=list(module.parameters()))
            if step == 3 and module is generator:
                module.weight.grad[0, 0] = float("inf")
            scaler.step(optimizer)
            applied = bool(scaler.update().applied)
            assert applied == (step != 3 or module is discriminator)
            if applied:
                torch.testing.assert_close(module.weight.grad, expected)
    assert scaler.metrics()["skipped_steps"] == 1


@pytest.mark.parametrize("make_scaler", [GradScaler, torch.amp.GradScaler], ids=["ours", "torch"])
@pytest.mark.parametrize("fused", [False, True])
def test_a_check_after_unscaling_divides_nothing_again(make_scaler, fused):
    """`_check_inf_per_device` looks at the gradients only, whatever stage they are in."""
    param, optimizer = _one_param(torch.full((2,), 1024.0), fused=fused)
    scaler = make_scaler("cpu", init_scale=1024.0)
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)
    scaler._check_inf_per_device(optimizer)
    scaler.step(optimizer)
    assert param.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("is_on_device", [False, True])
def test_losses_within_functional_transforms(is_on_device):
    """`torch.func.grad`, `grad_and_value` and `vmap` of it scale as eager code does, on the host and on the device."""
    scaler = _ready(init_scale=8.0)
    if is_on_device:
        _, optimizer = _one_param(torch.ones(1), fused=True)
        with RecordedGraph():
            scaler.step(optimizer)
            scaler.update()
    values = torch.tensor([1.0, 2.0])

    def loss(weight):
        return scaler.scale((weight * weight).sum())

    assert torch.func.grad(loss)(values).tolist() == [16.0, 32.0]
    assert torch.func.grad_and_value(loss)(values)[1].item() == 40.0
    assert torch.func.vmap(torch.func.grad(loss))(values).tolist() == [16.0, 32.0]


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda scaler, model: scaler.step(model), r"step\(\) was given a Linear"),
        (lambda scaler, model: scaler.unscale_(model), r"unscale_\(\) was given a Linear"),
        (lambda scaler, model: scaler.skip(model), r"skip\(\) was given a Linear"),
        (
            lambda scaler, model: scaler.unscale_and_clip_(model.parameters(), 1.0),
            r"unscale_and_clip_\(\) was given a generator",
        ),
    ],
)
def test_what_is_not_an_optimizer_is_named(call, named):
    """With what belongs there; nothing has happened."""
    scaler = _ready()
    with pytest.raises(TypeError, match=rf"{named}, which has no param_groups; it takes an optimizer; pass the torch"):
        call(scaler, torch.nn.Linear(1, 1))
    with pytest.raises(AssertionError, match="No inf checks"):
        scaler.update()


def test_a_device_that_torch_does_not_know():
    """Other than torch's scaler, which takes any text, and is then enabled where nothing is."""
    with pytest.raises(ValueError, match=r"device='gpu' is not a device type of torch; .* pass 'cuda'"):
        GradScaler("gpu")
    for known in ("cpu", "meta", torch.device("cpu"), "cuda:0" if torch.cuda.is_available() else "xpu"):
        assert GradScaler(known).is_enabled()


# -- what happened -----------------------------------------------------------------------------------------------------


@EACH_OPTIMIZER
def test_step_info_is_right_and_schedules_follow_applied_steps_only(make):
    """`if info.applied: scheduler.step()`, fused or not, without torch's warning about the order of the two."""
    model = _model()
    optimizer = make(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    scaler = GradScaler("cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for finite in (False, True, False, True):
            _backward(scaler, model, finite)
            scaler.step(optimizer)
            info = scaler.update()
            assert bool(info.applied) == finite
            if info.applied:
                scheduler.step()
    assert scheduler.get_last_lr() == [0.1 / 4]
    assert float(info.loss_scale_after) == scaler.get_scale() == 2.0**14


def test_metrics_and_diagnose():
    """The core's numbers and sentences."""
    scaler = GradScaler("cpu")
    _run(scaler, OPTIMIZERS["sgd"], [True] * 5 + [False] * 6)
    numbers = scaler.metrics()
    assert (int(numbers["applied_steps"]), int(numbers["skipped_steps"])) == (5, 6)
    assert scaler.diagnose().startswith("skipping too often")


def test_a_limit_on_the_streak():
    """The error comes where the host knows; a fused optimizer's flag stays on its device."""
    policy = DynamicScaling(max_overflow_streak=3)
    with pytest.raises(OverflowStreakError, match="max_overflow_streak=3"):
        _run(GradScaler("cpu", policy=policy), OPTIMIZERS["sgd"], [False] * 3)


def test_overflow_report_names_the_parameters():
    """NaN and infinities apart, and the largest finite magnitude; finite gradients are not in it."""
    model = _model()
    model.weight.grad = torch.tensor([[1.0, -9.0, float("nan"), float("inf")]] * 3)
    model.bias.grad = torch.ones(3)
    (report,) = overflow_report(model.named_parameters())
    assert report == ("weight", 3, 3, 0, 9.0)
    model.bias.grad = torch.tensor([float("-inf")] * 3)
    assert overflow_report(model.named_parameters())[1] == ("bias", 0, 0, 3, 0.0)


def test_nan_without_infinity_may_be_a_scale_that_is_too_large():
    """In float16 attention the backward pass of the softmax subtracts two infinities; half the scale fixes it."""
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({name: torch.nn.Linear(16, 16, bias=False) for name in ("query", "key")})
    images, values = torch.randn(8, 16), 300.0 * torch.randn(8, 16)
    reports = {}
    for init_scale in (4096.0, 2048.0):
        model.zero_grad()
        with torch.autocast("cpu", torch.float16):
            weights = torch.softmax(model["query"](images) @ model["key"](images).T / 4, dim=-1)
            loss = (weights.half() @ values.half()).float().mean()
        GradScaler("cpu", init_scale=init_scale).scale(loss).backward()
        reports[init_scale] = overflow_report(model.named_parameters(), loss=loss)
    assert reports[4096.0] == [("query.weight", 256, 0, 0, 0.0), ("key.weight", 256, 0, 0, 0.0)]
    assert reports[4096.0].verdict == "finite loss: a smaller loss scale fixes this"
    assert reports[2048.0] == []
    assert reports[2048.0].verdict == "every gradient is finite"


@pytest.mark.parametrize("loss", [torch.tensor(float("nan")), float("inf"), torch.tensor([1.0, float("-inf")])])
def test_a_loss_that_is_not_finite_is_the_cause(loss):
    """Whatever the gradients hold; the text has a line for each of them and one for the cause."""
    model = _model()
    model.weight.grad = torch.full_like(model.weight, float("nan"))
    report = overflow_report(model.named_parameters(), loss=loss)
    assert report.verdict.startswith("the loss itself is not finite")
    assert str(report) == f"weight: 12 NaN, 0 +inf, 0 -inf, largest finite 0\n{report.verdict}"
    assert "pass loss=" in overflow_report(model.named_parameters()).verdict


@pytest.mark.parametrize(
    ("make", "given"),
    [
        (lambda model: model, "Linear"),
        (lambda model: torch.nn.Sequential(model), "Sequential"),
        (lambda model: None, "NoneType"),
        (lambda model: model.parameters(), "an iterable of Parameter"),
        (lambda model: dict(model.named_parameters()), "an iterable of str"),
        (lambda model: {"wb": model.weight}, "an iterable of str"),
        (lambda model: [(model.weight, "weight")], "an iterable of tuple"),
    ],
    ids=["module", "sequence", "nothing", "parameters", "dict", "short names", "turned round"],
)
def test_overflow_report_says_what_to_pass(make, given):
    """The message says what was given, what belongs there and what to write."""
    with pytest.raises(TypeError) as raised:
        overflow_report(make(_model()))
    assert str(raised.value) == (
        f"overflow_report was given {given}; it takes pairs of a name and a parameter; pass model.named_parameters()"
    )


@settings(deadline=None)
@given(
    st.lists(st.sampled_from([True] * 8 + [False, "interval", "factor", "scale", "load"]), max_size=200),
    st.sampled_from([DynamicScaling(growth_interval=5, growth_factor=1.7, cooldown=2), DynamicScaling(hysteresis=3)]),
)
def test_every_state_is_the_policys(events, policy):
    """Whatever is set, loaded or overflows between runs of finite steps of any length, bit for bit."""
    param, optimizer = _one_param(torch.ones(2))
    scaler = GradScaler("cpu", policy=policy)
    scaler.scale(torch.ones(()))
    expected = policy.init_state()
    for event in events:
        if event == "interval":
            scaler.set_growth_interval(3 + policy.growth_interval % 5)
        elif event == "factor":
            scaler.set_growth_factor(1.0 + policy.growth_factor / 2)
        elif event == "scale":
            scaler._scale = torch.tensor(3.0)
            expected = expected._replace(loss_scale=np.float32(3.0))
        elif event == "load":
            scaler.load_state_dict(state_to_dict(policy.init_state(), policy))
            expected = policy.init_state()
        else:
            param.grad = torch.tensor([1.0, 1.0 if event else math.inf])
            scaler.scale(torch.ones(()))
            scaler.step(optimizer)
            before, expected = expected, policy.update(expected, event)
            info = scaler.update()
            assert info[:6] == (
                event,
                before.loss_scale,
                expected.loss_scale,
                expected.overflow_streak,
                not event,
                False,
            )
        policy = scaler.policy
    assert state_from_dict(scaler.state_dict(), policy) == expected


@pytest.mark.parametrize("base", [object, BaseScaling, DynamicScaling])
def test_a_policy_may_change_between_two_steps(base):
    """One of a user's own decides each step as it is then."""

    class Adjustable(base):
        factor = 1.0

        def init_state(self):
            return DynamicScaling(init_scale=8.0).init_state()

        def update(self, state, grads_finite, *, xp=None):
            return state._replace(loss_scale=state.loss_scale * type(self).factor)

    scaler = GradScaler("cpu", policy=Adjustable())
    _, optimizer = _one_param(torch.ones(2))
    for Adjustable.factor in [1.0] * 20 + [2.0] * 3:
        scaler.scale(torch.ones(()))
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 64.0


# -- checkpoints -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", [GradScaler, torch.amp.GradScaler])
@pytest.mark.parametrize("target", [GradScaler, torch.amp.GradScaler])
def test_checkpoints_load_in_torch_and_ours(source, target):
    """Through `torch.save` and `weights_only` loading: the next scales are those of the uninterrupted run."""
    trace = [True, True, False, True, True, True, True, False, True, True] * 3
    kwargs = {"init_scale": 2.0**10, "growth_interval": 4, "backoff_factor": 0.25}
    whole, _ = _run(torch.amp.GradScaler("cpu", **kwargs), OPTIMIZERS["sgd"], trace)
    first = source("cpu", **kwargs)
    _run(first, OPTIMIZERS["sgd"], trace[:17])
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second = target("cpu")
    second.load_state_dict(torch.load(file, weights_only=True))
    rest, _ = _run(second, OPTIMIZERS["sgd"], trace[17:])
    assert rest == whole[17:]


@pytest.mark.parametrize("make", [OPTIMIZERS["sgd"], OPTIMIZERS["sgd-fused"]], ids=["host", "device"])
def test_a_checkpoint_is_the_cores_state_too(make):
    """The core restores it with all counters from the same dict, of a state on the host or on the device."""
    policy = DynamicScaling(growth_interval=3, cooldown=1)
    scaler = GradScaler("cpu", policy=policy)
    trace = [True, False, True, True, True, False]
    _run(scaler, make, trace)
    expected = policy.init_state()
    for finite in trace:
        expected = policy.update(expected, finite)
    assert state_from_dict(scaler.state_dict(), policy) == expected
    again = GradScaler("cpu", policy=policy)
    again.load_state_dict(scaler.state_dict())
    assert again.state_dict() == scaler.state_dict()


def test_loading_into_a_live_scaler_takes_effect_at_once():
    """The tensor that multiplies the next loss is the restored one."""
    scaler = _ready()
    scaler.load_state_dict({**torch.amp.GradScaler("cpu").state_dict(), "scale": 2.0})
    assert scaler.scale(torch.ones(())).item() == 2.0


def test_a_policy_given_is_a_policy_kept():
    """A checkpoint does not override it, and a warning names the difference; a broken checkpoint is refused."""
    scaler = GradScaler("cpu", policy=DynamicScaling(growth_interval=7))
    with pytest.warns(CheckpointWarning, match="growth_interval was 2000 and is 7"):
        scaler.load_state_dict(GradScaler("cpu", policy="dynamic").state_dict())
    assert scaler.get_growth_interval() == 7
    with pytest.raises(CheckpointError, match=r"growth_tracker=0\.5"):
        scaler.load_state_dict({**torch.amp.GradScaler("cpu").state_dict(), "_growth_tracker": 0.5})
    with pytest.raises(CheckpointError, match="loss_scale='big'"):
        scaler.load_state_dict({**scaler.state_dict(), "loss_scale": "big"})


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))], ids=["copy", "pickle"])
@EACH_OPTIMIZER
def test_a_copy_continues_in_the_same_way(make, duplicate):
    """Between iterations; what the copy does leaves the original alone."""
    scaler = GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    _run(scaler, make, [True, False, True, True])
    twin = duplicate(scaler)
    trace = [True, True, False, True, True, True]
    assert _run(twin, make, trace)[0] == _run(scaler, make, trace)[0]
    assert np.float32(twin.get_scale()) == scaler.get_scale()


def test_a_policy_goes_to_its_own_argument():
    """Not in the place of the device, and not next to torch's four settings, which would be ignored."""
    with pytest.raises(TypeError, match=r"must name a device type, .*policy="):
        GradScaler({"kind": "dynamic"})
    with pytest.raises(PolicyError, match="pass either policy= or init_scale"):
        GradScaler("cpu", init_scale=8.0, policy="dynamic")


def test_a_policy_that_counts_in_python_numbers():
    """A policy of the user's own may return any numbers."""

    class Counting:
        def init_state(self):
            return DynamicScaling(init_scale=8.0).init_state()

        def update(self, state, grads_finite, *, xp=None):
            return state._replace(steps=state.steps + 1, overflow_streak=0 if grads_finite else 1)

    param = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([param], lr=1.0)
    scaler = GradScaler("cpu", policy=Counting())
    scaler.scale(param.sum()).backward()
    scaler.step(optimizer)
    assert scaler.update() == (True, 8.0, 8.0, 0, False, False)


class Twisted(DynamicScaling):
    """A subclass with a rule of its own, and no kind of its own."""

    def update(self, state, grads_finite, *, xp=None):
        """Lower the scale after every step."""
        return DynamicScaling.update(self, state, grads_finite & False, xp=xp)


OWN = {"derived": AdditiveScaling(), "bare": BareAdditiveScaling(), "a subclass": Twisted(init_scale=1024.0)}


@pytest.mark.parametrize("policy", OWN.values(), ids=OWN)
def test_a_policy_of_ones_own_tells_torch_nothing_false(policy):
    """Torch's scaler refuses the dict and stays as it was; a scaler with the policy continues from it."""
    scaler = GradScaler("cpu", policy=policy)
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    for factor in (1.0, float("nan"), 1.0):
        scaler.scale((parameter * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    saved = scaler.state_dict()
    assert saved.keys().isdisjoint({"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"})
    torchs = torch.amp.GradScaler("cpu")
    before = torchs.state_dict()
    with pytest.raises(KeyError, match="scale"):
        torchs.load_state_dict(saved)
    assert torchs.state_dict() == before
    again = GradScaler("cpu", policy=policy)
    again.load_state_dict(saved)
    assert again.state_dict() == saved
    assert again.get_scale() == scaler.get_scale() < policy.init_state().loss_scale


def test_without_scaling_nothing_is_lost_by_a_new_scaler():
    """An optimizer that continues needs no warning of a loss scale."""
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([parameter], lr=0.1)
    for _ in range(2):  # warnings are errors here
        scaler = GradScaler("cpu", policy="none")
        scaler.scale(parameter.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
