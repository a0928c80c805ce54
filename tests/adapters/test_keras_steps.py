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


@EACH_WRAPPER
@pytest.mark.parametrize("clip", ["clipnorm", "clipvalue", "global_clipnorm"])
def test_the_inner_optimizer_keeps_its_settings(wrapper, clip):
    """After a step of the wrapper, the inner optimizer has the same config and clips as before."""
    inner, (variable,) = keras.optimizers.SGD(1.0, weight_decay=0.0, **{clip: 1.0}), _variables((1,))
    before = inner.get_config()
    for optimizer, grad in ((wrapper(inner, 8.0), 80.0), (inner, 10.0)):
        optimizer.apply([keras.ops.full((1,), grad)], [variable])
        assert inner.get_config() == before
    assert value_of(variable)[0] == -1.5


@EACH_WRAPPER
def test_every_public_name_of_keras_optimizer(wrapper):
    """The wrapper defines each public name of Keras's `Optimizer` itself, and hands settings to the inner optimizer."""
    settings = {"weight_decay": 0.5, "clipnorm": 0.5, "clipvalue": 0.5, "use_ema": True, "ema_momentum": 0.5}
    settings |= {"ema_overwrite_frequency": 3, "gradient_accumulation_steps": 2, "learning_rate": 0.5}
    inner = keras.optimizers.SGD(0.1)
    optimizer = wrapper(inner, global_clipnorm=1.0)
    # An inherited name would act on the wrapper's own variables.
    for name in dir(keras.optimizers.Optimizer(0.1)):
        owner = next((base for base in type(optimizer).__mro__ if name in vars(base)), None)
        assert name.startswith("_") or owner is None or owner.__name__ == "LossScaleOptimizer", name
    optimizer.global_clipnorm = 0.25
    assert (optimizer.global_clipnorm, inner.global_clipnorm) == (0.25, None)
    for name, value in settings.items():
        setattr(optimizer, name, value)
        assert value_of(getattr(inner, name)) == value_of(getattr(optimizer, name)) == value
    own = len(optimizer.variables) - len(inner.variables)
    optimizer.build(_variables())
    assert len(optimizer.variables) - len(inner.variables) == own  # it makes no averages of its own
    assert optimizer.assign_add == inner.assign_add
    optimizer.set_weights([value_of(variable) for variable in getattr(optimizer, "weights", optimizer.variables)])


@pytest.mark.parametrize("is_inner", [False, True])
@pytest.mark.parametrize(("dtype", "size"), [("float32", 3.0), ("float32", 1e30), ("float32", 1e-3), *WIDE])
def test_clipping_equals_two_passes(is_inner, dtype, size):
    """Gradients are unscaled, then clipped by the norm of all gradients, even if their squares overflow."""
    shapes, norm = [(1,), (2,), (2, 2), (0, 2)], 19.0**0.5 * size
    grads = [np.full(shape, -2.0 * size if shape == (2, 2) else size, dtype) for shape in shapes]
    variables, scale = _variables(*shapes, dtype=dtype), 2.0**10 if size == 1e30 else 2.0**16
    inner = keras.optimizers.SGD(1.0, global_clipnorm=2.0 if is_inner else None)
    optimizer = LossScaleOptimizer(inner, scale, global_clipnorm=None if is_inner else 2.0, guard=SpikeGuard())
    apply(optimizer, variables, [grad * np.array(scale, dtype) for grad in grads])
    for variable, grad in zip(variables, grads, strict=True):
        np.testing.assert_allclose(0.5 - value_of(variable), grad * min(1.0, 2.0 / norm), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("policy", "arguments", "dtype", "grad", "after"),
    [
        (1.0, {}, "float32", np.float32(1e30), -1e30),
        ("none", {"guard": SpikeGuard()}, "float32", np.float32(3e38), -3e38),  # the norm is above float32's largest
        ("none", {"global_clipnorm": 1.0}, "float32", np.float32(3e38), 0.5),  # the only clipped number in float32 is 0
        (2.0**-30, {}, "float32", np.float32(1e30), None),
        ("none", {}, "float16", np.float32(1e6), None),
        (0.25, {}, "float16", np.float16(2.0**15), None),
        (0.25, {}, "float16", np.float16(0.125), 0.0),
        *[("none", {}, "float32", np.float64(1e100), None) for _ in WIDE[:1]],
    ],
)
def test_large_finite_gradients(policy, arguments, dtype, grad, after):
    """A gradient overflows if it is infinite after it is unscaled and cast, but not if only its square is infinite."""
    optimizer, variables = LossScaleOptimizer(keras.optimizers.SGD(1.0), policy, **arguments), _variables(dtype=dtype)
    apply(optimizer, variables, [np.full(3, grad)])
    assert bool(optimizer.last_step.applied) == (after is not None)
    np.testing.assert_allclose(value_of(variables[0]), 0.5 if after is None else after, rtol=1e-6)


def test_overwritten_variables_get_their_gradients_unchanged():
    """The gradients of overwritten variables are not unscaled, and are not part of the norm."""
    variables = _variables((3,), (2,))
    # Keras marks the scales of float8 layers in this way.
    variables[1].overwrite_with_gradient = True
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(1.0), FixedScaling(8.0), global_clipnorm=100.0)
    apply(optimizer, variables, [np.full(3, 8.0, np.float32), np.array([7.0, 1e6], np.float32)])
    assert [list(value_of(variable)) for variable in variables] == [[-0.5] * 3, [7.0, 1e6]]
    for bad in ([np.full(3, INF), np.zeros(2)], [np.ones(3), [INF, 0.0]]):
        apply(optimizer, variables, [np.asarray(grad, np.float32) for grad in bad])
        assert list(value_of(variables[1])) == [7.0, 1e6]
        assert optimizer.last_step.overflowed


def test_a_spike_keeps_the_scale():
    """A spike of the norm before clipping skips the step, and changes only the count of spikes."""
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


@pytest.mark.parametrize(
    ("arguments", "bad"),
    [({"policy": DynamicScaling(max_overflow_streak=2)}, INF), ({"guard": SpikeGuard(warmup=1, max_streak=2)}, 1e4)],
)
def test_limits_end_an_eager_loop(arguments, bad):
    """The step that reaches `max_overflow_streak` or the guard's `max_streak` raises an error."""
    optimizer, variables = LossScaleOptimizer(keras.optimizers.SGD(0.1), **arguments), _variables()
    step = lambda size: optimizer.apply([optimizer.scale_loss(keras.ops.full((3,), size))], variables)  # noqa: E731
    step(1.0)
    step(bad)
    with pytest.raises(OverflowStreakError):
        step(bad)


def test_bad_arguments_are_named():
    """Each error says what to do."""
    sgd = keras.optimizers.SGD
    wrapped = LossScaleOptimizer(sgd())
    for error, words, make in (
        (TypeError, "is not a Keras optimizer; pass one", lambda: LossScaleOptimizer("sgd")),
        (TypeError, "wrap it once", lambda: LossScaleOptimizer(keras.optimizers.LossScaleOptimizer(sgd()))),
        (ValueError, "is already wrapped by a LossScaleOptimizer", lambda: LossScaleOptimizer(wrapped.inner_optimizer)),
        (PolicyError, "global_clipnorm=-1", lambda: setattr(wrapped, "global_clipnorm", -1)),
        (ValueError, "on the inner optimizer alone",
         lambda: LossScaleOptimizer(sgd(gradient_accumulation_steps=2), global_clipnorm=2.0)),
        (ValueError, "loss_scale_factor=8.0, .* as its policy", lambda: LossScaleOptimizer(sgd(loss_scale_factor=8.0))),
        (AttributeError, r"loss_scale_factor=8\.0 cannot be set, .* another policy",
         lambda: setattr(wrapped, "loss_scale_factor", 8.0)),
        (AttributeError, "'get_scaled_loss'; lossscale_tf.LossScaleOptimizer has it", lambda: wrapped.get_scaled_loss),
        (ValueError, r"call optimizer\.build", lambda: wrapped.stateless_apply([], [], [])),
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
    """On PyTorch, a step reads one flag from the device, or two with a guard or after an overflow."""
    import torch

    optimizer, variables = LossScaleOptimizer(keras.optimizers.SGD(), **arguments), _variables()
    optimizer.build(variables)
    # Keras's SGD reads another flag in an applied step.
    for size, expected in ((1.0, reads + 1), (INF, 2)):
        with torch.profiler.profile() as profile:
            optimizer.apply([torch.full((3,), size)], variables)
        assert [event.name for event in profile.events()].count("aten::_local_scalar_dense") == expected


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
    optimizer, variables = LossScaleOptimizer(keras.optimizers.SGD(0.1), 8.0), _variables()
    with pytest.warns(UserWarning, match=r"differentiate optimizer\.scale_loss\(loss\)") as warned:
        optimizer.apply([keras.ops.ones(3)], variables)
    assert [w.filename for w in warned] == [__file__]
    optimizer.apply([keras.ops.ones(3)])
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
    assert {variable.path.partition("/")[0] for variable in optimizer.variables} == {"scaled", "inner"}
