"""A run with a spike guard goes as the simulated run over the same norms, in every framework and from one to another.

A spike skips a step as an overflow does, and the loss scale never learns of it.
"""

import contextlib
import functools
import itertools
import json

import pytest
import tensorflow as tf

from lossscale_core import state_to_dict
from lossscale_core.errors import CheckpointWarning
from tests.conformance.travelling import NEW, jax_wrapper, tensorflow_wrapper, torch_wrapper
from tests.core.guarded_run import EXPECTED, GUARD, NORMS, POLICY
from tests.jax_names import enable_x64

SAVED_AT = 12
EAGER = {
    "torch": torch_wrapper,
    "jax": functools.partial(jax_wrapper, compiled=False),
    "keras": functools.partial(tensorflow_wrapper, wrap=lambda train: train),
}
COMPILED = {
    "torch, fused": functools.partial(torch_wrapper, fused=True),
    "torch, clipping": functools.partial(torch_wrapper, max_norm=0.5),
    "jax, jit": jax_wrapper,
    "jax, clipping": functools.partial(jax_wrapper, max_norm=0.5),
    "keras, graph": functools.partial(tensorflow_wrapper, global_clipnorm=0.5),
    "keras, XLA": functools.partial(tensorflow_wrapper, wrap=tf.function(autograph=False, jit_compile=True)),
}
"""These may round a norm less often, or otherwise, than the guard on the host."""
EACH = pytest.mark.parametrize("make", EAGER.values(), ids=EAGER)


def _guard_states():
    """Return what is saved of the guard after each step of the simulated run."""
    state = GUARD.init_state()
    for norm in NORMS:
        _, state = GUARD.check(state, norm)
        yield state_to_dict(POLICY.init_state(), guard=state)["guard"]


def _require_simulated(step, begin=0, rtol=0.0):
    """Take the steps from `begin` on, and compare each with the simulated one."""
    before = None
    for n, guard_state in list(enumerate(_guard_states()))[begin:]:
        saved, info, bits = step(NORMS[n])
        for name in ("growth_tracker", "steps", "skipped_steps", "overflow_streak"):
            assert saved[name] == getattr(EXPECTED, name)[n]
        assert saved["loss_scale"] == EXPECTED.loss_scale_after[n]
        assert saved["guard"] == pytest.approx(guard_state, rel=rtol, abs=rtol)
        spiked, overflowed = EXPECTED.spiked[n], EXPECTED.skipped[n]
        applied = not (spiked or overflowed)
        assert (bool(info.applied), bool(info.overflowed), bool(info.spiked)) == (applied, overflowed, spiked)
        assert (bits != before) == applied or before is None
        before = bits


@functools.cache
def _saved_by(framework):
    """Return the JSON text of a framework's checkpoint."""
    step = EAGER[framework](NEW, POLICY, GUARD)
    return json.dumps([step(norm).saved for norm in NORMS[:SAVED_AT]][-1])


@pytest.mark.parametrize(("origin", "target"), list(itertools.product([None, *EAGER], EAGER)))
def test_a_run_continues_as_simulated(origin, target):
    """Every state is the host's and the scale's the simulated one, bit for bit; a skipped step changes nothing else."""
    saved = json.loads(_saved_by(origin)) if origin else NEW
    _require_simulated(EAGER[target](saved, POLICY, GUARD), SAVED_AT if origin else 0)


@pytest.mark.parametrize("make", COMPILED.values(), ids=COMPILED)
def test_a_compiled_run_goes_as_simulated(make):
    """The flags are the same, and the guard's averages agree to a few ulps."""
    _require_simulated(make(NEW, POLICY, GUARD), rtol=1e-5)


@EACH
def test_a_missing_guard_starts_afresh(make):
    """A warning says so, and the norm of the next step is the first one."""
    saved = {name: value for name, value in json.loads(_saved_by("torch")).items() if name != "guard"}
    with pytest.warns(CheckpointWarning, match="no state of a spike guard"):
        step = make(saved, POLICY, GUARD)
    assert step(1.0).saved["guard"] == {"mean": 1.0, "deviation": 0.0, "norms": 1.0, "spikes": 0, "streak": 0.0}


@EACH
def test_norms_beyond_float32_are_spikes(make):
    """It is finite in float64, so that the loss scale stays; float32's largest number is checked."""
    with enable_x64(True) if make is EAGER["jax"] else contextlib.nullcontext():
        step = make(NEW, POLICY, GUARD, dtype="float64")
        for norm, spikes in ((1.0, 0), (1.0, 0), (1.0, 0), (1.0, 0), (1e100, 1), (1.0, 1)):
            saved, info, _ = step(norm)
            assert (saved["guard"]["spikes"], saved["skipped_steps"], bool(info.overflowed)) == (spikes, 0, False)
