"""The five verbs of TensorFlow: sparse gradients, float8, replicas and the report."""

from tests.adapters.tensorflow_devices import EACH_MODE_AND_XLA, STRATEGY, traced  # noqa: I001
import numpy as np
import pytest
import tensorflow as tf

from lossscale_tf import all_finite, init_state, overflow_report, select, unscale


@EACH_MODE_AND_XLA
@pytest.mark.parametrize("value", [np.float32(3e38), np.float16(60000.0)])
def test_sparse_duplicates_are_summed_first(mode, value):
    """Two finite rows of `IndexedSlices` with the same index and an infinite sum are an overflow."""
    values = tf.constant(np.stack([[value], [value]]))
    check = mode(lambda indices: all_finite(tf.IndexedSlices(values, indices)))
    assert check(tf.constant([0, 1]))
    assert not check(tf.constant([2, 2]))
    empty = tf.IndexedSlices(tf.zeros((0, 3)), tf.zeros((0,), tf.int32), tf.constant([4, 3]))
    assert mode(lambda: all_finite(empty))()


@EACH_MODE_AND_XLA
def test_float8_leaves(mode):
    """float8 is checked in its own dtype, and unscaled in float32."""
    leaf = tf.cast(tf.constant([1.0, np.nan]), tf.dtypes.experimental.float8_e4m3fn)
    assert mode(lambda: all_finite([leaf[:1], tf.ones(2)]))()
    assert not mode(lambda: all_finite([leaf]))()
    unscaled = mode(lambda: unscale(leaf[:1], init_state(2.0**10)))()
    assert (unscaled.dtype, unscaled.numpy().tolist()) == (tf.float32, [2.0**-10])


def test_select_refuses_other_shapes():
    """It also rejects None in one structure only."""
    for new, old in ((tf.ones(2), tf.ones(3)), ([tf.ones(2)], [None])):
        with pytest.raises(ValueError, match="pass two structures alike"):
            select(tf.constant(True), new, old)


def test_flags_are_combined_over_replicas():
    """An overflow on one replica is an overflow on all replicas."""

    def check():
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        return all_finite(tf.where(replica == 1, float("inf"), 1.0), across_replicas=True)

    flags = STRATEGY.experimental_local_results(traced(lambda: STRATEGY.run(check))())
    assert [bool(flag) for flag in flags] == [False, False]


def test_overflow_report():
    """The report names the variables with non-finite gradients, of any float dtype."""
    bad = tf.constant(np.array([1.0, np.nan, np.inf, -3.0], tf.bfloat16.as_numpy_dtype))
    pairs = [(bad, tf.Variable(bad, name="w")), (None, tf.Variable(1.0)), (tf.ones(2), tf.Variable([1.0, 2.0]))]
    (report,) = overflow_report(pairs)
    assert report == ("w:0", 1, 1, 0, 3.0)
    assert overflow_report(pairs[1:]) == []
    assert overflow_report(pairs, loss=tf.constant(1.0)).verdict.startswith("finite loss: a smaller loss scale usually")
    assert overflow_report(pairs, loss=float("nan")).verdict.startswith("the loss itself is NaN or infinite")
