"""The five verbs over nested structures: values, dtypes, sparse gradients, eager, in graphs and under XLA."""

from tests.adapters.tensorflow_devices import STRATEGY  # noqa: I001
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given

from lossscale_core.testing import overflow_traces, policies, simulate
from lossscale_tf import all_finite, init_state, overflow_report, scale, select, unscale
from tests.sweeping import few_examples

FLOATS = [tf.float16, tf.bfloat16, tf.float32, tf.float64]
MODES = {
    "eager": lambda function: function,
    "graph": lambda function: tf.function(function, autograph=False),
    "xla": lambda function: tf.function(function, autograph=False, jit_compile=True),
}
EACH_MODE = pytest.mark.parametrize("mode", MODES.values(), ids=MODES)


def _sparse(values, indices, rows=4):
    return tf.IndexedSlices(tf.constant(values), tf.constant(indices), tf.constant([rows, len(values[0])]))


@EACH_MODE
@pytest.mark.parametrize("dtype", FLOATS)
def test_scaling_there_and_back(mode, dtype):
    """Halves are lifted to float32, the others keep their dtype, and nothing flushes or overflows."""
    state = init_state("dynamic")
    wide = tf.float64 if dtype is tf.float64 else tf.float32
    scaled = mode(lambda loss: scale({"loss": loss}, state)["loss"])(tf.ones((2,), dtype))
    assert scaled.dtype == wide
    assert scaled.numpy().tolist() == [2.0**16] * 2
    unscaled = mode(lambda grad: unscale(grad, state))(tf.fill((2,), tf.cast(2.0**-8, dtype)))
    assert unscaled.dtype == wide
    assert unscaled.numpy().tolist() == [2.0**-24] * 2


@EACH_MODE
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_every_position_is_checked(mode, dtype, bad):
    """One bad element anywhere; the largest number of a dtype is not bad, though its square overflows."""
    check = mode(lambda x: all_finite([x, tf.ones(3)]))
    for size in (1, 7, 5000):
        clean = np.full(size, dtype.max, dtype.as_numpy_dtype)
        assert check(tf.constant(clean))
        for position in {0, size // 2, size - 1}:
            spoilt = clean.copy()
            spoilt[position] = bad
            assert not check(tf.constant(spoilt))


def test_what_does_not_count():
    """Nothing, None, empty and integer leaves are finite; complex parts count; anything but a tensor is refused."""
    assert all_finite([])
    assert all_finite({"a": None, "b": [tf.zeros((0, 3)), tf.constant([1, 2])], "c": 1})
    assert not all_finite(tf.complex(1.0, float("inf")))
    with pytest.raises(TypeError, match="'w' is not a tensor"):
        all_finite({"a": "w"})


@EACH_MODE
@pytest.mark.parametrize("value", [np.float32(3e38), np.float16(60000.0)])
def test_sparse_duplicates_are_summed_first(mode, value):
    """Two finite halves of an infinite sum are an overflow."""
    values = tf.constant(np.stack([[value], [value]]))
    check = mode(lambda indices: all_finite(tf.IndexedSlices(values, indices)))
    assert check(tf.constant([0, 1]))
    assert not check(tf.constant([2, 2]))


@EACH_MODE
def test_scalars_of_python(mode):
    """Are taken by every verb, as tensors of shape `()`; integers hold no gradient and pass."""
    state = init_state(8.0)
    assert mode(lambda: all_finite([1.0, 2, True, np.float64(1.0), 1j]))()
    for bad in (float("inf"), float("nan"), np.float32("inf"), complex(0.0, float("nan"))):
        assert not mode(lambda bad=bad: all_finite({"loss": bad}))()
    assert float(mode(lambda: scale(1.0, state))()) == float(mode(lambda: scale(1, state))()) == 8.0
    assert float(mode(lambda: unscale(1.0, state))()) == 0.125
    assert int(mode(lambda: unscale(3, state))()) == 3
    assert float(mode(lambda: select(tf.constant(False), 1.0, 2.0))()) == 2.0


@EACH_MODE
@pytest.mark.parametrize("dtype", [tf.dtypes.experimental.float8_e4m3fn, tf.dtypes.experimental.float8_e5m2])
def test_float8_leaves(mode, dtype):
    """Are checked as what they are, and unscaled in float32, as halves are."""
    leaf = tf.cast(tf.constant([1.0, 2.0]), dtype)
    assert mode(lambda: all_finite([leaf, tf.ones(2)]))()
    assert not mode(lambda: all_finite([tf.cast(tf.constant([1.0, np.nan]), dtype)]))()
    unscaled = mode(lambda: unscale(leaf, init_state(2.0**10)))()
    assert unscaled.dtype == tf.float32
    assert unscaled.numpy().tolist() == [2.0**-10, 2.0**-9]


@EACH_MODE
def test_empty_leaves(mode):
    """Are finite and stay empty, of whatever kind they are."""
    sparse = tf.IndexedSlices(tf.zeros((0, 3)), tf.zeros((0,), tf.int32), tf.constant([4, 3]))
    empty = [np.array([]), tf.zeros((0, 3)), sparse, [], {}]
    assert mode(lambda: all_finite(empty))()
    assert mode(lambda: unscale(empty, init_state(8.0))[1])().shape == (0, 3)


def test_structure_is_kept():
    """None stays None, IndexedSlices stay sparse, integers pass."""
    grads = {"sparse": _sparse([[2.0, 4.0]], [1]), "none": None, "n": tf.constant([3])}
    unscaled = unscale(grads, init_state(2.0))
    assert isinstance(unscaled["sparse"], tf.IndexedSlices)
    assert unscaled["sparse"].values.numpy().tolist() == [[1.0, 2.0]]
    assert unscaled["none"] is None
    assert unscaled["n"].numpy().tolist() == [3]


def test_select_takes_everything_or_nothing():
    """Of nested structures, by a tensor or a Python bool; what does not match is refused."""
    new, old = {"w": tf.ones(2), "n": 2, "none": None}, {"w": tf.zeros(2), "n": 1, "none": None}
    for flag in (True, False, tf.constant(True), tf.constant(False)):
        chosen = select(flag, new, old)
        assert chosen["w"].numpy().tolist() == ([1.0, 1.0] if flag else [0.0, 0.0])
        assert int(chosen["n"]) == (2 if flag else 1)
    assert select(False, new, old)["w"] is old["w"]
    with pytest.raises(ValueError, match="shape"):
        select(tf.constant(True), tf.ones(2), tf.ones(3))


@few_examples
@given(policies(), overflow_traces(max_steps=30))
def test_the_graphs_trace_is_the_hosts(policy, grads_finite):
    """State by state, to the last bit."""
    update = tf.function(lambda state, finite: policy.update(state, finite, xp=tf), autograph=False)
    state, scales = init_state(policy), []
    for finite in grads_finite:
        state = update(state, tf.constant(finite))
        scales.append(state.loss_scale.numpy())
    np.testing.assert_array_equal(np.array(scales, np.float32), simulate(policy, grads_finite).loss_scale_after)
    assert update.experimental_get_tracing_count() <= 1


def test_flags_are_combined_over_replicas():
    """An overflow on one replica is everyone's."""

    @tf.function(autograph=False)
    def check(victim):
        def on_replica():
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            return all_finite(tf.where(replica == victim, float("inf"), 1.0), across_replicas=True)

        return STRATEGY.run(on_replica)

    for victim in (0, 1, 2):
        flags = STRATEGY.experimental_local_results(check(tf.constant(victim)))
        assert [bool(flag) for flag in flags] == [victim == 2] * 2


@pytest.mark.parametrize("dtype", FLOATS)
def test_overflow_report(dtype):
    """It names the variables with gradients that are not finite."""
    bad = tf.constant(np.array([1.0, np.nan, np.inf, -3.0], dtype.as_numpy_dtype))
    pairs = [(bad, tf.Variable(bad, name="w")), (None, tf.Variable(1.0)), (tf.ones(2), tf.Variable([1.0, 2.0]))]
    (report,) = overflow_report(pairs)
    assert report == ("w:0", 1, 1, 0, 3.0)
    assert overflow_report(pairs[1:]) == []
    assert overflow_report(pairs, loss=tf.constant(1.0)).verdict.startswith("finite loss: a smaller loss scale usually")
    assert overflow_report(pairs, loss=float("nan")).verdict.startswith("the loss itself is not finite")
