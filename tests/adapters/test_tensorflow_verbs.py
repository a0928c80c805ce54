"""The five verbs over nested structures: values, dtypes, sparse gradients, eager, in graphs and under XLA."""

from tests.adapters.tensorflow_devices import EACH_MODE_AND_XLA, STRATEGY  # noqa: I001
from tests.strategies import overflow_traces, policies
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given

from lossscale_core.testing import simulate
from lossscale_tf import all_finite, init_state, overflow_report, select, unscale
from tests.sweeping import few_examples


def test_both_parts_of_a_complex_number_count():
    """Of Python's, too."""
    assert not all_finite([complex(0.0, float("nan"))])
    assert all_finite([1j])


@EACH_MODE_AND_XLA
@pytest.mark.parametrize("value", [np.float32(3e38), np.float16(60000.0)])
def test_sparse_duplicates_are_summed_first(mode, value):
    """Two finite halves of an infinite sum are an overflow."""
    values = tf.constant(np.stack([[value], [value]]))
    check = mode(lambda indices: all_finite(tf.IndexedSlices(values, indices)))
    assert check(tf.constant([0, 1]))
    assert not check(tf.constant([2, 2]))


@EACH_MODE_AND_XLA
@pytest.mark.parametrize("dtype", [tf.dtypes.experimental.float8_e4m3fn, tf.dtypes.experimental.float8_e5m2])
def test_float8_leaves(mode, dtype):
    """Are checked as what they are, and unscaled in float32, as halves are."""
    leaf = tf.cast(tf.constant([1.0, 2.0]), dtype)
    assert mode(lambda: all_finite([leaf, tf.ones(2)]))()
    assert not mode(lambda: all_finite([tf.cast(tf.constant([1.0, np.nan]), dtype)]))()
    unscaled = mode(lambda: unscale(leaf, init_state(2.0**10)))()
    assert unscaled.dtype == tf.float32
    assert unscaled.numpy().tolist() == [2.0**-10, 2.0**-9]


@EACH_MODE_AND_XLA
def test_empty_leaves(mode):
    """Are finite and stay empty, of whatever kind they are."""
    sparse = tf.IndexedSlices(tf.zeros((0, 3)), tf.zeros((0,), tf.int32), tf.constant([4, 3]))
    empty = [np.array([]), tf.zeros((0, 3)), sparse, [], {}]
    assert mode(lambda: all_finite(empty))()
    assert mode(lambda: unscale(empty, init_state(8.0))[1])().shape == (0, 3)


def test_select_refuses_other_shapes():
    """And None in one of the two."""
    for new, old in ((tf.ones(2), tf.ones(3)), ([tf.ones(2)], [None])):
        with pytest.raises(ValueError, match="pass two structures alike"):
            select(tf.constant(True), new, old)


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


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16, tf.float32, tf.float64])
def test_overflow_report(dtype):
    """It names the variables with gradients that are not finite."""
    bad = tf.constant(np.array([1.0, np.nan, np.inf, -3.0], dtype.as_numpy_dtype))
    pairs = [(bad, tf.Variable(bad, name="w")), (None, tf.Variable(1.0)), (tf.ones(2), tf.Variable([1.0, 2.0]))]
    (report,) = overflow_report(pairs)
    assert report == ("w:0", 1, 1, 0, 3.0)
    assert overflow_report(pairs[1:]) == []
    assert overflow_report(pairs, loss=tf.constant(1.0)).verdict.startswith("finite loss: a smaller loss scale usually")
    assert overflow_report(pairs, loss=float("nan")).verdict.startswith("the loss itself is NaN or infinite")
