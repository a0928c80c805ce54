"""`RangeReport`: the search of the scale, what it says and draws, on gradients that NumPy makes."""

import functools
import json
import random

import ml_dtypes
import numpy as np
import pytest

from lossscale_core import DynamicScaling
from lossscale_core import adapters as ranges
from lossscale_core.adapters import NonfiniteInput, OperationRange, RangeReport, UnscaledGradient


def _record(module, values, *, scaled=True, overflowed=False):
    """Return the record of an array, as an adapter would make it."""
    return OperationRange.of(values, "matmul", module)._replace(scaled=scaled, overflowed=overflowed)


class Network:
    """Gradients that are known exactly, and what float16 makes of them at a loss scale."""

    def __init__(self, gradients, hidden=np.inf):
        self.gradients = gradients
        self.hidden = hidden
        self.scales = []

    def halves(self, loss_scale):
        with np.errstate(over="ignore"):
            return {name: (loss_scale * exact).astype(np.float16) for name, exact in self.gradients.items()}

    def backward(self, loss_scale):
        self.scales.append(loss_scale)
        for name, values in self.halves(loss_scale).items():
            if loss_scale > self.hidden:  # an overflow within an operation, which its finite results do not show
                values = np.full_like(values, np.nan)
            yield _record(name, values, overflowed=not np.isfinite(values).all())

    def report(self):
        return RangeReport.measure(lambda: (1.0, [_record("embed", np.float16([351.0]), scaled=False)]), self.backward)

    def limit(self):
        finite = [k for k in range(-126, 100) if all(np.isfinite(v).all() for v in self.halves(2.0**k).values())]
        return 2.0 ** max(finite)


def _network(magnitude):
    rng = np.random.default_rng(0)
    gradients = {f"layers.{i}": magnitude * 2.0**i * rng.standard_normal(500) for i in range(4)}
    return Network(gradients | {"embed": magnitude * rng.standard_normal(500) * 2.0 ** rng.uniform(-45, 0, 500)})


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_an_array_is_measured(dtype):
    """Exactly: each element is non-finite, zero, or counted at its exponent, also the largest and the smallest."""
    largest, smallest = np.finfo(dtype).max, np.finfo(dtype).smallest_subnormal
    values = np.array([[largest, -smallest, 0.0, -0.0], [np.nan, -np.inf, -1.5, 1.0]], dtype)
    record = OperationRange.of(values, "matmul", "layer")
    assert record[:3] == ("matmul", "layer", np.dtype(dtype).name)
    assert (record.largest, record.nonfinite, record.zeros) == (float(largest), 2, 2)
    assert record.exponents == {int(np.log2(smallest)): 1, 0: 2, int(np.frexp(largest)[1]) - 1: 1}
    assert (record.overflowed, record.scaled, record.headroom) == (False, False, 0.0)
    assert OperationRange.of(np.zeros((3, 0), dtype), "matmul", "layer").exponents == {}


def test_a_large_array_is_measured_in_parts():
    """The counts are those of the whole array; a complex number has two elements, its parts."""
    values = np.tile(np.complex64([2.0 + 4.0j, complex(0.5, -np.inf)]), 2**18)
    record = OperationRange.of(values[::-1], "fft", "layer")
    assert record.dtype == "float32"
    assert record.nonfinite == 2**18
    assert record.exponents == {-1: 2**18, 1: 2**18, 2: 2**18}


@pytest.mark.parametrize("exponent", range(-40, 60))
def test_the_search_finds_the_limit(exponent):
    """For each limit, and usually with four backward passes or fewer; the last finite one was at the limit."""
    network = _network(2.0**exponent)
    report = network.report()
    assert report.overflows_above == network.limit()
    assert report.overflows_first.module == "layers.3"
    if 1.0 <= report.overflows_above <= 2.0**32:
        assert report.init_scale == max(1.0, report.overflows_above / 2)
        assert report.loss_scale == report.overflows_above
    if report.overflows_above < 1.0:
        assert report.init_scale == report.overflows_above / 2
    if 2.0**4 <= report.overflows_above <= 2.0**30:
        assert len(network.scales) <= 4
    assert len(network.scales) <= 10


def test_an_overflow_that_no_result_predicts_is_found():
    """The predicted scale is tried, and halved if it overflows."""
    network = _network(2.0**-8)
    network.hidden = 2.0**18
    report = network.report()
    assert network.limit() > 2.0**18
    assert report.overflows_above == 2.0**18
    assert report.overflows_first.overflowed


def test_no_scale_fits_a_loss_that_is_not_finite():
    """No backward pass is run, and the first operation that overflowed is named."""
    forward = [
        _record("mask", np.float16([-np.inf, 1.0]), scaled=False),
        _record("layers.1", np.float16([np.inf, 1.0]), scaled=False, overflowed=True),
        _record("layers.2", np.float16([np.nan, 1.0]), scaled=False),
    ]
    report = RangeReport.measure(lambda: (float("nan"), forward), lambda _: pytest.fail("a backward pass"))
    assert not report.forward_finite
    assert (report.overflows_above, report.init_scale) == (None, None)
    assert report.overflows_first.module == "layers.1"
    assert str(report).splitlines() == [
        "forward: overflows in layers.1 (matmul); the loss is nan",
        "backward: not run, since the loss is not finite before it is scaled",
        "look at the inputs and at the forward pass first",
    ]


def test_the_first_that_is_given_infinity_is_named_where_nothing_overflows():
    """As a constant is infinite that its dtype cannot hold; without any, the loss alone is reported."""
    forward = [
        _record("layers.1", np.float16([1.0, 2.0]), scaled=False),
        _record("layers.2", np.float16([-np.inf, 1.0]), scaled=False),
        _record("layers.3", np.float16([np.nan, 1.0]), scaled=False),
    ]
    report = RangeReport.measure(lambda: (float("inf"), forward), lambda _: pytest.fail("a backward pass"))
    assert report.overflows_first.module == "layers.2"
    assert str(report).splitlines() == [
        "forward: the loss is inf, and layers.2 (matmul) is the first to be given infinity or NaN",
        "backward: not run, since the loss is not finite before it is scaled",
        "look at the inputs and constants of that operation first; a number too large for float16 is infinite",
    ]
    finite = RangeReport.measure(lambda: (float("inf"), forward[:1]), lambda _: pytest.fail("a backward pass"))
    assert str(finite).splitlines()[::2] == [
        "forward: the loss is inf, and no operation in low precision has made it so",
        "look at the inputs and at the forward pass first",
    ]


def test_a_scale_below_one_fits_where_one_overflows():
    """The report says at which scale the gradients fit, and a policy that begins there and may go further down."""
    report = _network(2.0**12).report()
    assert report.overflows_above == 0.5
    assert report.loss_scale == report.overflows_above
    assert report.init_scale == 0.25
    lines = str(report).splitlines()
    assert lines[1] == "backward: overflows above a loss scale of 2**-1, first in layers.3 (matmul)"
    policy = eval(lines[-1].removeprefix("use "), {"DynamicScaling": DynamicScaling})
    assert (policy.init_scale, policy.min_scale) == (0.25, 2.0**-10)


def test_the_scale_of_a_policy_may_fall_to_the_smallest_there_is():
    """However small the first scale is, the policy that the report recommends is valid."""
    lines = str(_network(2.0**136).report()).splitlines()
    policy = eval(lines[-1].removeprefix("use "), {"DynamicScaling": DynamicScaling})
    assert (policy.init_scale, policy.min_scale) == (2.0**-126, 2.0**-126)


def test_no_scale_fits_where_every_scale_overflows():
    """The loss is finite, and the operation that overflows is named."""
    report = Network({"root": np.array([np.inf, 1.0])}).report()
    assert report.forward_finite
    assert (report.overflows_above, report.init_scale, report.loss_scale) == (None, None, 1.0)
    assert "backward: overflows even at a loss scale of 1, first in root (matmul)" in str(report)


def test_no_scale_fits_where_only_zeros_are_finite():
    """An operation that overflows if its result is not zero does so at each useful scale."""
    network = Network({"root": np.ones(4)}, hidden=2.0**-40)
    report = network.report()
    assert (report.overflows_above, report.init_scale, report.loss_scale) == (None, None, 1.0)


def test_no_scale_fits_a_gradient_that_overflows_when_it_is_unscaled():
    """A scale below 1 makes the gradient of a parameter in float16 larger than it was, and so infinite again."""

    def backward(loss_scale):
        with np.errstate(over="ignore"):
            values = (loss_scale * np.array([2.0**18, 1.0])).astype(np.float16)
        return [_record("head.weight", values, overflowed=not np.isfinite(values).all())._replace(operation="gradient")]

    report = RangeReport.measure(lambda: (1.0, []), backward)
    assert (report.overflows_above, report.init_scale) == (None, None)
    assert report.overflows_first.module == "head.weight"
    assert str(report).splitlines()[1:] == [
        "backward: no scale fits; "
        "head.weight (gradient) is finite at a loss scale of 2**-3, and overflows when unscaled",
        "give the loss a smaller weight, or compute what overflows in float32 or bfloat16",
    ]


def test_a_mask_of_the_forward_pass_is_not_blamed_for_the_backward_pass():
    """The loss is finite, so that the infinity which the mask writes does no harm."""
    mask = _record("mask", np.float16([-np.inf, 1.0]), scaled=False)
    report = RangeReport.measure(lambda: (1.0, [mask]), Network({"root": np.array([np.inf])}).backward)
    assert report.overflows_above is None
    assert report.overflows_first.module == "root"


def test_gradients_that_do_not_depend_on_the_scale_set_no_limit():
    """What a checkpoint computes again in the backward pass is as large at every scale."""
    recomputed = _record("recomputed", np.float16([60000.0]), scaled=False)
    network = _network(2.0**-8)
    report = RangeReport.measure(lambda: (1.0, []), lambda scale: [recomputed, *network.backward(scale)])
    assert report.overflows_above == network.limit()


def test_gradients_of_zero_set_no_limit():
    """After a few passes the search gives up, at the largest scale that a policy reaches."""
    network = Network({"unused": np.zeros(4)})
    report = network.report()
    assert report.overflows_above == np.inf
    assert report.init_scale == DynamicScaling().max_scale
    assert len(network.scales) <= 3
    assert "every gradient in low precision is zero" in str(report)


@pytest.mark.parametrize("exponent", range(-14, 16))
def test_the_share_that_flushes_is_counted(exponent):
    """It is a lower bound of the true share, and exact but for elements that round to the smallest number or not."""
    network = _network(2.0**-12)
    report = network.report()
    scale = 2.0**exponent
    before, after = (np.concatenate(list(network.halves(s).values())) for s in (report.loss_scale, scale))
    share = ((after == 0) & (before != 0)).sum() / (before != 0).sum()
    assert report.flushed(scale) == pytest.approx(share, abs=1e-3)
    assert report.flushed(report.loss_scale) == 0.0


def test_the_report_in_four_lines():
    """What overflows first, how much flushes and where, and what to do; the module of each is named."""
    network = _network(2.0**-3)
    report = network.report()
    lines = str(report).splitlines()
    assert lines[0] == "forward: finite; largest 351 in embed (7.5 bits of room)"
    assert lines[1] == "backward: overflows above a loss scale of 2**14, first in layers.3 (matmul)"
    assert lines[2] == (
        "at 2**13: at least 0 % and at most 4.1 % of the gradient elements flush to zero, most in embed (21 %)"
    )
    assert lines[3] == "use DynamicScaling(init_scale=2**13)"


@pytest.mark.parametrize("loss_scale", [0.0, -2.0, float("inf"), float("nan")])
def test_what_is_not_a_loss_scale_is_refused(loss_scale):
    with pytest.raises(ValueError, match="must be a positive, finite number"):
        _network(2.0**-8).report().flushed(loss_scale)


def test_the_repr_is_short():
    """For any number of operations."""
    assert len(repr(_network(2.0**-8).report())) < 1000


def test_a_report_goes_through_json():
    """As plain numbers, and back."""
    report = _network(2.0**-8).report()
    assert RangeReport.from_dict(json.loads(json.dumps(report.to_dict()))) == report


def test_random_states_are_put_back():
    """Those of Python and of NumPy, also where the forward pass raises."""
    python, numpys = random.getstate(), np.random.get_state()[1].tolist()

    def forward():
        random.random(), np.random.rand()
        raise KeyError

    with pytest.raises(KeyError):
        RangeReport.measure(forward, lambda _: [])
    assert random.getstate() == python
    assert np.random.get_state()[1].tolist() == numpys


# -- inputs ------------------------------------------------------------------------------------------------------------


def _held(name, *values, dtype=np.float32):
    return NonfiniteInput.of(np.array(values, dtype), name)


def _report_with(inputs, *, loss=float("nan"), forward=(), backward=()):
    return RangeReport.measure(lambda: (loss, forward), lambda _: backward, nonfinite_inputs=lambda: inputs)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, ml_dtypes.bfloat16, ml_dtypes.float8_e5m2])
def test_what_is_not_finite_is_counted(dtype):
    """NaN, infinity and negative infinity; an array that is finite or has no floats is not named."""
    assert _held("x", 1.0, np.nan, np.inf, -np.inf, -np.inf, dtype=dtype) == ("x", 5, 1, 1, 2)
    assert _held("x", 1.0, 2.0, dtype=dtype) is None
    assert NonfiniteInput.of(np.arange(3), "x") is NonfiniteInput.of(np.array(["a"]), "x") is None
    assert NonfiniteInput.of(np.complex64([complex(1, np.inf)]), "x") == ("x", 2, 0, 1, 0)


def test_the_first_sentence_names_what_held_nan_before():
    """Each with what it holds and how much of it, and the last line says to begin there."""
    inputs = [_held("x of loss_fn", 1.0, np.nan), _held("weight head.weight", np.inf), _held("y", np.nan, -np.inf, 1.0)]
    forward = [_record("head", np.float16([np.nan]), scaled=False)]
    report = _report_with(inputs, loss=float("inf"), forward=forward)
    lines = str(report).splitlines()
    assert lines[0] == (
        "before the forward pass: x of loss_fn holds NaN in 1 of its 2 elements, "
        "weight head.weight holds infinity in its one element, y holds NaN and infinity in 2 of its 3 elements"
    )
    assert lines[1].startswith("forward: the loss is inf")
    assert lines[-1] == "replace NaN and infinity there first"
    assert str(_report_with(2 * inputs)).splitlines()[0] == f"{lines[0]}, and 3 more do"
    assert RangeReport.from_dict(json.loads(json.dumps(report.to_dict()))) == report


def test_a_mask_is_named_only_where_it_may_do_harm():
    """Negative infinity is a mask if the loss is finite, and if an operation with finite inputs overflows."""
    mask = [_held("mask", 0.0, -np.inf)]
    overflow = _record("loud", np.float16([np.inf]), scaled=False, overflowed=True)
    assert str(_report_with(mask, loss=1.0, backward=[_record("head", np.float16([1.0]))])).startswith("forward: ")
    assert str(_report_with(mask, forward=[overflow])).startswith("forward: overflows in loud")
    assert str(_report_with(mask)).startswith("before the forward pass: mask holds infinity in 1 of its 2 elements")
    bound = [_held("bound", np.inf)]
    assert str(_report_with(bound, forward=[overflow])).startswith("forward: overflows in loud")
    assert str(_report_with(bound)).startswith("before the forward pass: bound holds infinity")
    with_label = [*mask, _held("y", np.nan)]
    assert str(_report_with(with_label)).startswith("before the forward pass: y holds NaN in its one element")


def test_nan_is_named_although_the_loss_is_finite():
    """As in labels of which a part does not count; the advice is about the scale."""
    lines = str(
        _report_with([_held("y", np.nan)], loss=1.0, backward=[_record("head", np.float16([1.0]))])
    ).splitlines()
    assert lines[0] == "before the forward pass: y holds NaN in its one element"
    assert lines[-1].startswith("use DynamicScaling(")


def test_a_report_of_before_has_no_inputs():
    """A dict that an older version wrote is read."""
    plain = _network(2.0**-8).report().to_dict()
    del plain["nonfinite_inputs"]
    assert RangeReport.from_dict(plain).nonfinite_inputs == ()


def test_values_have_the_names_by_which_a_function_refers_to_them():
    """Those of a closure, of a module, of defaults and of what a partial binds; a structure that holds itself ends."""
    batch = {"x": np.ones(2), "labels": [np.zeros(1)]}
    batch["itself"] = batch

    ones = np.ones(3)

    def loss_fn(weight=ones):
        return batch["x"].sum() * json.loads("1") * weight

    names = [name for name, value in ranges.named_values(loss_fn) if isinstance(value, np.ndarray)]
    assert names[:3] == ["weight", "batch['x']", "batch['labels'][0]"]
    bound = dict(ranges.named_values(functools.partial(lambda x, *, y: x + y, 1, y=2)))
    assert (bound["x"], bound["y"]) == (1, 2)


def test_an_array_is_found_by_what_it_is_or_by_its_shape():
    """A framework makes a tensor of an array, and then only the shape and the NaN are alike."""
    x, y, z = np.ones(2), np.array([1.0, np.nan]), np.array([np.nan])
    assert ranges.name_of(y.copy(), lambda: x + y + z) == "y"
    assert ranges.name_of(x, lambda: x + y + z) == "x"
    assert ranges.name_of(np.full(4, np.nan), lambda: x + y + z) is None


# -- gradients that do not follow the loss scale -----------------------------------------------------------------------


def _causes(norm_at, **more):
    """Return the cause for each gradient, of which each is a function of the factor of the loss."""
    functions = {"w": norm_at, **more}
    found = ranges.unscaled_gradients(lambda factor: {name: f(factor) for name, f in functions.items()}, 1024.0)
    return {each.name: each.cause for each in found}


def test_a_gradient_follows_the_scale_if_it_is_zero_without_the_loss_and_grows():
    """What is not zero for a loss of zero is inside; what a hook clamps, normalises or divides does not grow."""
    assert _causes(lambda factor: 0.1 * factor) == {}
    assert _causes(lambda factor: 0.1 * factor + 1e-9) == {"w": "inside"}
    assert _causes(lambda factor: min(0.1 * factor, 60.0)) == {"w": "nonlinear"}
    assert _causes(lambda factor: float(factor > 0.0)) == {"w": "nonlinear"}
    assert _causes(lambda factor: 1.0 if factor else float("nan")) == {"w": "nonlinear"}
    assert _causes(lambda factor: 0.0, clamped=lambda factor: min(factor, 1.0)) == {"clamped": "nonlinear"}


def test_rounding_and_random_passes_are_not_named():
    """A gradient of few units in the last place may double at half the scale; dropout may be drawn again."""
    unit = 1024.0 / 1.2
    assert _causes(lambda factor: round(factor / unit)) == {}
    numbers = iter([1.0, 3.0, 0.0, 3.0, 2.0])
    assert _causes(lambda factor: factor * next(numbers)) == {}


def test_gradients_that_do_not_follow_the_scale_are_lines_of_the_report():
    """One for each cause, with the number and the first name; the scale is the largest confirmed one."""
    causes = [("router", "inside"), ("clamped", "nonlinear"), ("gate", "inside"), ("late", "early")]
    scales = []

    def unscaled(scale):
        scales.append(scale)
        return [UnscaledGradient(*each) for each in causes]

    records = [_record("head", np.float16([1.0]))]
    report = RangeReport.measure(lambda: (1.0, ()), lambda _: records, unscaled_gradients=unscaled)
    assert scales == [report.loss_scale]
    lines = str(report).splitlines()[-4:-1]
    assert lines == [
        "2 gradients do not follow the loss scale, first router, not zero for a loss of zero: see attach, if a loss is "
        "added within the graph",
        "1 gradient does not follow the loss scale, first clamped, which does not grow with the scale: look for hooks "
        "that clamp or normalise gradients",
        "1 gradient does not follow the loss scale, first late, there before the backward pass: return the loss, and "
        "leave its backward pass to the report",
    ]
    assert RangeReport.from_dict(json.loads(json.dumps(report.to_dict()))) == report


def test_without_a_scale_that_fits_the_gradients_are_not_compared():
    """Their differences would be those of NaN."""
    overflow = [_record("head", np.float16([np.inf]))]
    report = RangeReport.measure(lambda: (1.0, ()), lambda _: overflow, unscaled_gradients=lambda _: 1 / 0)
    assert report.unscaled_gradients == ()
