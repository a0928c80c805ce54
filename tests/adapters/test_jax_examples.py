"""The JAX examples learn in float16, although their first steps overflow and are skipped."""

import runpy
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytestmark = pytest.mark.filterwarnings("default:::orbax")  # warnings of Orbax are not about this library

EXAMPLES = Path(__file__).parents[2] / "examples"
HELD_BACK = {
    "jax_plain": lambda training: training,
    "jax_flax_linen": lambda state: (state.params, state.batch_stats, state.step, state.opt_state.inner_state),
    "jax_flax_nnx": lambda params: params,
    "jax_equinox": lambda model: model,
    "jax_orbax": lambda training: (training.weights, training.opt_state.inner_state),
    "jax_sharded": lambda state: (state.params, state.step, state.opt_state.inner_state),
}
"""The parts of `training` that a skipped step must not change, by example."""


def _main(name):
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]


def _numbers(tree):
    """Return the leaves as NumPy arrays, without activation functions."""
    return [np.asarray(jnp.asarray(leaf)) for leaf in jax.tree.leaves(tree) if not callable(leaf)]


@pytest.mark.parametrize("name", sorted(path.stem for path in EXAMPLES.glob("jax_*.py")))
def test_it_learns(name):
    """An example classifies over 90 % of the digits; its first steps overflow, and its float32 weights stay finite."""
    result = _main(name)()
    assert result.accuracy > 0.9
    assert result.scale_state.steps == 200
    assert 0 < result.scale_state.skipped_steps < 20
    numbers = _numbers(HELD_BACK[name](result.training))
    assert {number.dtype for number in numbers} <= {np.dtype(np.float32), np.dtype(np.int32)}
    assert all(np.isfinite(number).all() for number in numbers)


@pytest.mark.parametrize("name", ["jax_flax_linen", "jax_sharded"])  # these count steps or keep averages, too
def test_an_overflow_changes_the_scale_only(name):
    """If the first step overflows, all trained values are the same as before, bit for bit."""
    before, after = (_main(name)(steps) for steps in (0, 1))
    assert after.scale_state.skipped_steps == 1
    assert after.scale_state.loss_scale == before.scale_state.loss_scale / 2
    final, initial = (_numbers(HELD_BACK[name](result.training)) for result in (after, before))
    assert [number.tobytes() for number in final] == [number.tobytes() for number in initial]


def test_a_resumed_run():
    """A resumed run has the same bits as an uninterrupted run, in the counters of policy and guard, too."""
    main = _main("jax_orbax")
    resumed, uninterrupted = (main(60, resumes=resumes).training for resumes in (True, False))
    assert resumed.opt_state.scale_state.growth_tracker > 0
    assert resumed.opt_state.guard_state.norms > 0
    assert [leaf.tobytes() for leaf in _numbers(resumed)] == [leaf.tobytes() for leaf in _numbers(uninterrupted)]
