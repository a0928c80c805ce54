"""The JAX examples, run for real: they learn in float16, although their first steps overflow and are skipped."""

import runpy
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytestmark = pytest.mark.filterwarnings("default:::orbax")  # what Orbax warns of is Orbax's

EXAMPLES = Path(__file__).parents[2] / "examples"
HELD_BACK = {
    "jax_plain": lambda training: training,
    "jax_flax_linen": lambda state: (state.params, state.batch_stats, state.step, state.opt_state.inner_state),
    "jax_flax_nnx": lambda params: params,
    "jax_equinox": lambda model: model,
    "jax_orbax": lambda training: (training.weights, training.opt_state.inner_state),
    "jax_sharded": lambda state: (state.params, state.step, state.opt_state.inner_state),
}
"""What a skipped step must leave alone, in what an example's `main` returns as `training`."""
COUNTS = {
    "jax_plain": lambda training: training.applied_steps,
    "jax_flax_linen": lambda state: state.step,
    "jax_sharded": lambda state: state.step,
}
"""What counts steps, such as a schedule: it must count those that were applied."""


def _main(name):
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]


def _numbers(tree):
    """Return the leaves that are not activation functions."""
    return [np.asarray(jnp.asarray(leaf)) for leaf in jax.tree.leaves(tree) if not callable(leaf)]


def test_no_example_is_left_out():
    """Each example has a line here."""
    assert {path.stem for path in EXAMPLES.glob("jax_*.py")} == HELD_BACK.keys()


@pytest.mark.parametrize("name", HELD_BACK)
def test_it_learns(name, capsys):
    """More than nine digits in ten are read, the start overflowed, and the float32 weights are all finite."""
    result = _main(name)()
    assert result.accuracy > 0.9
    assert result.scale_state.steps == 200
    assert 0 < result.scale_state.skipped_steps < 20
    if name in COUNTS:
        assert COUNTS[name](result.training) == result.scale_state.steps - result.scale_state.skipped_steps
    numbers = _numbers(HELD_BACK[name](result.training))
    assert {number.dtype for number in numbers} <= {np.dtype(np.float32), np.dtype(np.int32)}
    assert all(np.isfinite(number).all() for number in numbers)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("accuracy 0.9")
    assert "; healthy: " in line


@pytest.mark.parametrize("name", HELD_BACK)
def test_an_overflow_changes_nothing_but_the_scale(name):
    """The first step overflows: whatever is trained is as it was before it, bit for bit."""
    before, after = (_main(name)(steps) for steps in (0, 1))
    assert after.scale_state.skipped_steps == 1
    assert after.scale_state.loss_scale == before.scale_state.loss_scale / 2
    kept, initial = (_numbers(HELD_BACK[name](result.training)) for result in (after, before))
    assert [number.tobytes() for number in kept] == [number.tobytes() for number in initial]


def test_a_resumed_run_is_one_that_was_never_interrupted():
    """Bit for bit, with the scale's counters and the guard's, which have both seen overflows and growth."""
    main = _main("jax_orbax")
    resumed, uninterrupted = (main(60, resumes=resumes).training for resumes in (True, False))
    assert resumed.opt_state.scale_state.growth_tracker > 0
    assert resumed.opt_state.guard_state.norms > 0
    assert [leaf.tobytes() for leaf in _numbers(resumed)] == [leaf.tobytes() for leaf in _numbers(uninterrupted)]


def test_the_sharded_example_is_sharded():
    """Weights and moments are split over all devices, and stay so."""
    training = _main("jax_sharded")(1).training
    for leaf in jax.tree.leaves((training.params, training.opt_state.inner_state[0].mu)):
        assert {shard.data.shape[0] for shard in leaf.addressable_shards} == {leaf.shape[0] // jax.device_count()}
    assert jax.device_count() == 8
