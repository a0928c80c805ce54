"""One step of `lossscale_keras.LossScaleOptimizer`, on the backend that KERAS_BACKEND names.

On JAX the steps are `stateless_apply` under `jit`, on TensorFlow they are in a graph, and on PyTorch they are eager.
"""

import keras
import numpy as np
import pytest

from lossscale_core import DynamicScaling, FixedScaling, SpikeGuard
from lossscale_core.errors import OverflowStreakError, PolicyError
from lossscale_keras import LossScaleOptimizer, overflow_report
from tests.adapters.keras_loops import (
    BACKEND,
    EACH_WRAPPER,
    WRAPPERS,
    apply,
    apply_scaled,
    assert_same,
    value_of,
    values_of,
)

INF, NAN = float("inf"), float("nan")
pytestmark = pytest.mark.filterwarnings("ignore:.*scale.* not called before")  # gradients are made up here


def _variables(*shapes, dtype="float32"):
    return [keras.Variable(np.full(shape, 0.5, dtype), dtype=dtype) for shape in shapes or [(3,)]]


def test_the_scale_stays_within_bounds():
    """Keras's own wrapper reaches a scale of 0 after bad batches, and one good step later the weights are NaN."""
    for wrap, ends in (
        (lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(), 2.0**15, 1), (0.0, INF)),
        (lambda: LossScaleOptimizer(keras.optimizers.SGD(), DynamicScaling(growth_interval=1)), (1.0, 2.0**32)),
    ):
        for grad, end in zip((INF, 0.0), ends, strict=True):
            optimizer, variables = wrap(), _variables()
            for _ in range(300):
                apply(optimizer, variables, [np.full(3, grad, np.float32)])
            assert float(value_of(optimizer.dynamic_scale)) == end
            if grad == INF:
                apply_scaled(optimizer, variables, [np.ones(3)])
                assert np.isfinite(value_of(variables[0])).all() == (end == 1.0)


@pytest.mark.parametrize("bad", [INF, -INF, NAN])
def test_a_skipped_step_changes_nothing_else(bad):
    """Weights, slots, averages, `iterations` and the accumulated gradients stay bit for bit."""
    inner = keras.optimizers.AdamW(0.1, use_ema=True, ema_overwrite_frequency=2, weight_decay=0.1, clipvalue=0.5)
    optimizer, variables = LossScaleOptimizer(inner, global_clipnorm=1.0), _variables((3,), (2, 2))
    for size in (1.0, 2.0, 3.0):
        apply_scaled(optimizer, variables, [np.full(3, size), np.ones((2, 2))])
    before = values_of(variables, inner.variables)
    apply_scaled(optimizer, variables, [np.ones(3), [[1.0, bad], [0.0, 0.0]]])
    assert_same(values_of(variables, inner.variables), before)
    assert int(value_of(optimizer.iterations)) == 3
    assert float(optimizer.loss_scale) == 2.0**15
    assert [float(value) for value in optimizer.last_step] == [False, 2.0**16, 2.0**15, 1, True, False]
    apply_scaled(optimizer, variables, [np.ones(3), np.ones((2, 2))])
    assert optimizer.last_step.applied
    assert int(optimizer.metrics()["applied_steps"]) == 4
    assert int(value_of(optimizer.iterations)) == 4


def test_the_scale_within_a_layer():
    """A layer in float16 does not cast the scale, because 2**16 is infinite in float16."""

    class Scaled(keras.layers.Layer):
        def call(self, loss):
            return optimizer.scale_loss(loss)

    optimizer = LossScaleOptimizer(keras.optimizers.SGD())
    assert float(Scaled(dtype="mixed_float16")(keras.ops.ones(()))) == 2.0**16


def test_a_refused_step_is_not_counted():
    """If the inner optimizer raises an error, the state stays unchanged, and the step can be repeated."""

    class Refuses(keras.optimizers.SGD):
        def update_step(self, gradient, variable, learning_rate):
            raise InterruptedError

    optimizer, variables = LossScaleOptimizer(Refuses(), guard=SpikeGuard()), _variables()
    before = [*optimizer.scale_state, *optimizer.guard_state]
    with pytest.raises(InterruptedError):
        apply(optimizer, variables, [np.ones(3, np.float32)])
    assert [*map(float, [*optimizer.scale_state, *optimizer.guard_state])] == [*map(float, before)]


WIDE = [("float64", 1e39), ("float64", 1e200)] if BACKEND != "jax" else []
TOO_WIDE = [("float32", 8.0, 1e100), ("complex64", 8.0, 1e100j)] if BACKEND != "jax" else []  # it has no float64


@EACH_WRAPPER
def test_the_inner_optimizer_keeps_its_settings(wrapper):
    """After steps of the wrapper, the inner optimizer has the same config and clips as before."""
    for clip in ("clipnorm", "clipvalue", "global_clipnorm"):
        inner, (variable,) = keras.optimizers.SGD(1.0, weight_decay=0.0, **{clip: 1.0}), _variables((1,))
        before = inner.get_config()
        for optimizer, grad in ((wrapper(inner, 8.0), 80.0), (inner, 10.0)):
            optimizer.apply([keras.ops.full((1,), grad)], [variable])
            assert inner.get_config() == before
        assert value_of(variable)[0] == -1.5
    (variable,) = _variables((1,))
    wrapper(keras.optimizers.SGD(1.0, clipvalue=0.25), 8.0, global_clipnorm=1.0).apply(
        [keras.ops.ones(1) * 80.0], [variable]
    )
    assert value_of(variable)[0] == 0.25


@EACH_WRAPPER
def test_every_public_name_of_keras_optimizer(wrapper):
    """The wrapper defines each public name itself. An inherited one would act on the wrapper's own variables."""
    settings = {"weight_decay": 0.5, "clipnorm": 0.5, "clipvalue": 0.5, "use_ema": True, "ema_momentum": 0.5}
    settings |= {"ema_overwrite_frequency": 3, "gradient_accumulation_steps": 2, "learning_rate": 0.5}
    inner = keras.optimizers.SGD(0.1)
    optimizer = wrapper(inner)
    for name in dir(keras.optimizers.Optimizer(0.1)):
        owner = next((base for base in type(optimizer).__mro__ if name in vars(base)), None)
        assert name.startswith("_") or owner is None or owner.__name__ == "LossScaleOptimizer", name
    for name, value in settings.items():
        setattr(optimizer, name, value)
        assert value_of(getattr(inner, name)) == value_of(getattr(optimizer, name)) == value
    own = len(optimizer.variables) - len(inner.variables)
    optimizer.build(_variables())
    assert len(optimizer.variables) - len(inner.variables) == own  # it makes no averages of its own
    for name in ("add_variable", "assign_add", "update_step", "exclude_from_weight_decay"):
        assert getattr(optimizer, name) == getattr(inner, name)
    with pytest.raises(AttributeError, match=r"loss_scale_factor=8\.0 cannot be set, .* another policy"):
        optimizer.loss_scale_factor = 8.0
    optimizer, variables = wrapper(keras.optimizers.SGD(0.5), 8.0), _variables()
    assert int(optimizer.apply_gradients([(keras.ops.ones(3), variables[0])])) == 1
    optimizer.set_weights([value_of(variable) for variable in getattr(optimizer, "weights", optimizer.variables)])


@pytest.mark.parametrize("is_inner", [False, True])
@pytest.mark.parametrize(("dtype", "size"), [("float32", 3.0), ("float32", 1e30), ("float32", 1e-3), *WIDE])
def test_clipping_equals_two_passes(is_inner, dtype, size):
    """Gradients are unscaled, then clipped by the norm of all gradients, even if their squares overflow."""
    shapes, norm = [(1,), (2,), (2, 2), (0, 2)], 19.0**0.5 * size
    grads = [np.full(shape, -2.0 * size if shape == (2, 2) else size, dtype) for shape in shapes]
    variables = _variables(*shapes, dtype=dtype)
    inner = keras.optimizers.SGD(1.0, global_clipnorm=2.0 if is_inner else None)
    scale = 2.0**10 if size == 1e30 else 2.0**16
    optimizer = LossScaleOptimizer(inner, scale, global_clipnorm=None if is_inner else 2.0, guard=SpikeGuard())
    assert (inner.global_clipnorm, optimizer.global_clipnorm) == (2.0 if is_inner else None, 2.0)
    apply(optimizer, variables, [grad * np.array(scale, dtype) for grad in grads])
    for variable, grad in zip(variables, grads, strict=True):
        np.testing.assert_allclose(0.5 - value_of(variable), grad * min(1.0, 2.0 / norm), rtol=1e-5, atol=1e-7)


def test_the_parts_of_complex_gradients():
    """Both parts count in the check, in the norm and in the clip."""
    for grad, after in ((1j * INF, 0.0), (NAN, 0.0), (6.0 + 8.0j, -0.6 - 0.8j)):
        variable = keras.Variable(np.zeros(1, "complex64"), dtype="complex64")
        optimizer = LossScaleOptimizer(keras.optimizers.SGD(1.0), 2.0, global_clipnorm=1.0)
        with np.errstate(invalid="ignore"):
            apply(optimizer, [variable], [np.array([grad], "complex64")])
        np.testing.assert_allclose(value_of(variable), after, rtol=1e-6)


@pytest.mark.skipif(BACKEND == "jax", reason="JAX has no float64 unless it is switched on")
def test_the_norm_includes_both_dtypes():
    """The norm includes the gradients of both dtypes."""
    variables = [*_variables((1,)), *_variables((1,), dtype="float64")]
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(1.0), 8.0, global_clipnorm=1.0)
    apply(optimizer, variables, [np.full(1, 24.0, "float32"), np.full(1, 32.0, "float64")])
    np.testing.assert_allclose([value_of(variable)[0] for variable in variables], [0.5 - 0.6, 0.5 - 0.8], rtol=1e-6)


def test_gradients_without_elements_are_applied():
    """The norm of gradients without elements is 0."""
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(1.0), 8.0, global_clipnorm=1.0)
    apply(optimizer, _variables((0, 2), dtype="float16"), [np.zeros((0, 2), np.float32)])
    assert bool(optimizer.last_step.applied)


def test_global_clipnorm_can_be_set():
    """Steps use the norm that was set. A norm beyond float32 clips nothing, and a negative norm is an error."""
    optimizer, variables = LossScaleOptimizer(keras.optimizers.SGD(1.0), 2.0, global_clipnorm=1.0), _variables((1,))
    for norm, after in ((1.0, -0.5), (0.25, -0.75), (None, -4.75), (1e300, -8.75), (INF, -12.75)):
        optimizer.global_clipnorm = norm
        assert optimizer.global_clipnorm == norm
        vars(optimizer).pop("_jitted_by_test", None)
        vars(optimizer).pop("_graph_by_test", None)
        apply(optimizer, variables, [np.full(1, 8.0, np.float32)])
        np.testing.assert_allclose(value_of(variables[0]), after, rtol=1e-6)
    with pytest.raises(PolicyError, match="global_clipnorm=-1"):
        optimizer.global_clipnorm = -1
    assert optimizer.global_clipnorm == INF


@pytest.mark.parametrize(
    ("rate", "arguments", "grad", "after"),
    [
        (1.0, {"policy": 1.0}, 1e30, -1e30),
        (1e-30, {"policy": "none", "guard": SpikeGuard()}, 3e38, -3e8),  # the norm is above float32's largest number
        (1.0, {"policy": "none", "global_clipnorm": 1.0}, 3e38, 0.5),  # no float32 is small enough to clip to 1, but 0
        (1.0, {"policy": 2.0**-30}, 1e30, None),
        (1.0, {"policy": 2.0**-30}, 2.0**-30, -0.5),
    ],
)
def test_large_finite_gradients_are_applied(rate, arguments, grad, after):
    """1e30 is applied although its square overflows. 1e30 divided by 2**-30 is infinite, and the step is skipped."""
    optimizer, variables = LossScaleOptimizer(keras.optimizers.SGD(rate), **arguments), _variables()
    apply(optimizer, variables, [np.full(3, grad, np.float32)])
    assert bool(optimizer.last_step.applied) == (after is not None)
    np.testing.assert_allclose(value_of(variables[0]), 0.5 if after is None else after, rtol=1e-6)


def test_a_cast_to_infinity_overflows():
    """A finite gradient overflows if the cast to the dtype of its variable makes it infinite."""
    for dtype, policy, grad in (("float16", "none", np.float32(1e6)), *TOO_WIDE):
        optimizer, variables = LossScaleOptimizer(keras.optimizers.SGD(1.0), policy), _variables(dtype=dtype)
        apply(optimizer, variables, [np.full(3, grad)])
        assert optimizer.last_step.overflowed
    optimizer, variables = LossScaleOptimizer(keras.optimizers.SGD(1.0), 0.25), _variables(dtype="float16")
    apply(optimizer, variables, [np.array([2.0**15, 0, 0], np.float16)])
    assert optimizer.last_step.overflowed
    apply(optimizer, variables, [np.array([0.125, 0, 0], np.float16)])
    assert list(value_of(variables[0])) == [0.0, 0.5, 0.5]


def test_overwritten_variables_get_their_gradients_unchanged():
    """Keras marks the scales of float8 layers. They are not unscaled and not part of the norm."""
    variables = _variables((3,), (2,))
    variables[1].overwrite_with_gradient = True
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(1.0), FixedScaling(8.0), global_clipnorm=100.0)
    apply(optimizer, variables, [np.full(3, 8.0, np.float32), np.array([7.0, 1e6], np.float32)])
    assert [list(value_of(variable)) for variable in variables] == [[-0.5] * 3, [7.0, 1e6]]
    for bad in ([np.full(3, INF), np.zeros(2)], [np.ones(3), [INF, 0.0]]):
        apply(optimizer, variables, [np.asarray(grad, np.float32) for grad in bad])
        assert list(value_of(variables[1])) == [7.0, 1e6]
        assert optimizer.last_step.overflowed


def test_a_spike_keeps_the_scale():
    """The guard sees the norm before clipping, and its state is in the state dict."""
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.1), guard=SpikeGuard(warmup=4), global_clipnorm=1.0)
    variables = _variables()
    for size in (1.0, 1.1, 0.9, 1.0, 1.05, INF):
        apply_scaled(optimizer, variables, [np.full(3, size)])
    before, state = values_of(variables, optimizer.inner_optimizer.variables), optimizer.state_dict()
    apply_scaled(optimizer, variables, [np.full(3, 1000.0)])
    assert_same(values_of(variables, optimizer.inner_optimizer.variables), before)
    after = optimizer.state_dict()
    assert (after.pop("guard")["spikes"], state.pop("guard")["spikes"]) == (1.0, 0.0)
    assert after == state
    info = optimizer.last_step
    assert (bool(info.spiked), bool(info.overflowed), bool(info.applied)) == (True, False, False)
    assert int(optimizer.metrics()["spikes"]) == 1
    assert "1 spike" in optimizer.diagnose()


def test_an_overflow_leaves_its_window():
    """The mean contains the finite micro-batches only, and the window gets one more micro-batch."""
    inner = keras.optimizers.SGD(1.0, gradient_accumulation_steps=2, global_clipnorm=100.0)
    optimizer, variables = LossScaleOptimizer(inner), _variables()
    assert inner.global_clipnorm == 100.0  # of the mean, which only the inner optimizer knows
    for size in (1.0, INF, 3.0):
        apply_scaled(optimizer, variables, [np.full(3, size)])
    assert list(value_of(variables[0])) == [-1.5] * 3
    assert int(optimizer.iterations) == 1


def test_a_schedule_follows_applied_steps():
    """The schedule of the inner optimizer does not count skipped steps."""
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([0], [1.0, 0.25])
    optimizer, variables = LossScaleOptimizer(keras.optimizers.SGD(schedule)), _variables()
    for size in (INF, 1.0, INF, 1.0):
        apply_scaled(optimizer, variables, [np.full(3, size)])
    assert list(value_of(variables[0])) == [0.5 - 1.25] * 3


def test_limits_end_an_eager_loop():
    """The step that reaches `max_overflow_streak` or the guard's `max_streak` raises an error."""
    for error, arguments, sizes in (
        (OverflowStreakError, {"policy": DynamicScaling(max_overflow_streak=2)}, (1.0, INF, INF)),
        (OverflowStreakError, {"guard": SpikeGuard(warmup=1, max_streak=2)}, (1.0, 1e4, 1e4)),
    ):
        optimizer, variables = LossScaleOptimizer(keras.optimizers.SGD(0.1), **arguments), _variables()
        for size in sizes[:-1]:
            optimizer.apply([optimizer.scale_loss(keras.ops.full((3,), size))], variables)
        with pytest.raises(error):
            optimizer.apply([optimizer.scale_loss(keras.ops.full((3,), sizes[-1]))], variables)


def test_bad_arguments_are_named():
    """Each error contains the value, the rule and what to do."""
    sgd = keras.optimizers.SGD
    wrapped, built = LossScaleOptimizer(sgd()), LossScaleOptimizer(sgd())
    built.build(_variables((3,), (2,)))
    for error, words, make in (
        (TypeError, "is not a Keras optimizer; pass one", lambda: LossScaleOptimizer("sgd")),
        (TypeError, "wrap it once", lambda: LossScaleOptimizer(LossScaleOptimizer(sgd()))),
        (TypeError, "wrap it once", lambda: LossScaleOptimizer(keras.optimizers.LossScaleOptimizer(sgd()))),
        (ValueError, "is already wrapped by a LossScaleOptimizer", lambda: LossScaleOptimizer(wrapped.inner_optimizer)),
        (ValueError, "on the inner optimizer alone",
         lambda: LossScaleOptimizer(sgd(global_clipnorm=1.0), global_clipnorm=2.0)),
        (ValueError, "gradient_accumulation_steps=2",
         lambda: LossScaleOptimizer(sgd(gradient_accumulation_steps=2), global_clipnorm=2.0)),
        (ValueError, "loss_scale_factor=8.0, .* as its policy", lambda: LossScaleOptimizer(sgd(loss_scale_factor=8.0))),
        (PolicyError, "global_clipnorm=-1", lambda: LossScaleOptimizer(sgd(), global_clipnorm=-1)),
        (PolicyError, "guard=8.0", lambda: LossScaleOptimizer(sgd(), guard=8.0)),
        (PolicyError, "'dynamo'", lambda: LossScaleOptimizer(sgd(), "dynamo")),
        (AttributeError, "'get_scaled_loss'; lossscale_tf.LossScaleOptimizer has it", lambda: wrapped.get_scaled_loss),
        (AttributeError, "has no attribute 'momentum'$", lambda: wrapped.momentum),
        (ValueError, r"call optimizer\.build", lambda: LossScaleOptimizer(sgd()).stateless_apply([], [], [])),
        (ValueError, "1 gradients came for 2 variables", lambda: built.stateless_apply([], [keras.ops.ones(3)], [])),
    ):  # fmt: skip
        with pytest.raises(error, match=words):
            make()


def test_an_overflow_report_names_the_variable():
    """The report contains the counts, and says whether the loss is the cause."""
    variables = _variables((3,), (2,))
    grads = [keras.ops.convert_to_tensor(np.array([1.0, INF, NAN], "float16")), None]
    report = overflow_report(zip(grads, variables, strict=True), loss=keras.ops.convert_to_tensor(1.0))
    assert [row[1:] for row in report] == [(1, 1, 0, 1.0)]
    assert report[0].name == variables[0].path
    assert report.verdict.startswith("finite loss: a smaller loss scale usually")


@pytest.mark.skipif(BACKEND != "torch", reason="counts what torch copies to the host")
@pytest.mark.parametrize(("arguments", "reads"), [({}, 1), ({"global_clipnorm": 1.0}, 1), ({"guard": SpikeGuard()}, 2)])
def test_a_torch_step_reads_one_flag(arguments, reads):
    """A step reads one bool, like Keras's wrapper. A guard and an overflow each add one read."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class Reads(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.count += func is torch.ops.aten._local_scalar_dense.default
            return func(*args, **(kwargs or {}))

    def reads_of(optimizer, size):
        variables = _variables()
        optimizer.build(variables)
        with Reads() as recorded:
            optimizer.apply([torch.full((3,), size)], variables)
        return recorded.count

    inner = reads_of(keras.optimizers.SGD(), 1.0)
    assert reads_of(LossScaleOptimizer(keras.optimizers.SGD(), **arguments), 1.0) - inner == reads
    assert reads_of(LossScaleOptimizer(keras.optimizers.SGD(), **arguments), INF) == 2
    assert reads_of(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()), 1.0) - inner >= 1


@pytest.mark.skipif(BACKEND != "jax", reason="only JAX has a second method for jit")
def test_apply_under_jit_names_stateless_apply():
    """`apply` would read a flag that has no value under `jit`."""
    import jax

    optimizer, variables = LossScaleOptimizer(keras.optimizers.SGD()), _variables()
    with pytest.raises(RuntimeError, match="call stateless_apply there"):
        jax.jit(lambda grad: optimizer.apply([grad], variables))(np.ones(3, np.float32))


@pytest.mark.filterwarnings("error:scale_loss was not called", "error:get_scaled_loss not called")
def test_an_unscaled_loss_warns_once():
    """The first step of such a loop warns, and later steps do not."""
    optimizer, (variable,) = LossScaleOptimizer(keras.optimizers.SGD(0.1), 8.0), _variables()
    optimizer.build([variable])
    with pytest.warns(UserWarning, match=r"differentiate optimizer\.scale_loss\(loss\)") as warned:
        optimizer.apply([keras.ops.ones(3)])
    assert [w.filename for w in warned] == [__file__]
    optimizer.apply([keras.ops.ones(3)])
    with pytest.warns(UserWarning, match="scale_loss was not called"):
        apply(LossScaleOptimizer(keras.optimizers.SGD(0.1)), _variables(), [np.ones(3, np.float32)])
    for wrapper in WRAPPERS:  # there is nothing to warn of
        wrapper(keras.optimizers.SGD(0.1), "none").apply([keras.ops.ones(3)], _variables())


@pytest.mark.skipif(BACKEND != "tensorflow", reason="only TensorFlow has them")
def test_sparse_gradients_clip_like_dense_gradients():
    """Duplicate rows are summed before the norm, and before Adam squares the gradient of an embedding row."""
    import tensorflow as tf

    ends, inner = [], lambda: keras.optimizers.Adam(0.1, global_clipnorm=1.0)
    for optimizer, factor, is_dense in ((inner(), 1.0, True), (LossScaleOptimizer(inner(), 4.0), 4.0, False)):
        variable = keras.Variable(np.ones((4, 2)))
        for row in (1, 2, 1):
            values = tf.constant([[1.0, 2.0], [3.0, -1.0]]) * factor
            grad = tf.IndexedSlices(values, tf.constant([row, 1]), tf.constant([4, 2]))
            optimizer.apply([tf.convert_to_tensor(grad) if is_dense else grad], [variable])
        ends.append(value_of(variable))
    np.testing.assert_allclose(ends[1], ends[0], rtol=1e-6)


def test_variables_are_named_after_the_optimizer():
    """Common prefixes keep the variables together in `model.get_state_tree()`."""
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.1, name="inner"), 8.0, guard=SpikeGuard(), name="scaled")
    assert repr(optimizer) == f"LossScaleOptimizer(SGD, policy=FixedScaling(init_scale=8.0), guard={SpikeGuard()})"
    assert {variable.path.partition("/")[0] for variable in optimizer.variables} == {"scaled", "inner"}
