"""A run with a spike guard goes as the simulated run over the same norms, in every framework and from one to another.

A spike skips a step as an overflow does, and the loss scale never learns of it.
"""

import contextlib
import functools
import itertools
import json
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest
import tensorflow as tf
import torch

from lossscale_core import StepInfo, state_to_dict, step_info
from lossscale_core.errors import CheckpointWarning
from lossscale_jax import get_scale_state, load_scale_state, loss_scaled
from lossscale_tf import LossScaleOptimizer
from lossscale_torch import GradScaler
from tests.core.guarded_run import EXPECTED, GUARD, NORMS, OVERFLOWS, POLICY, SPIKES
from tests.jax_names import enable_x64

SAVED_AT = 12


class Step(NamedTuple):
    """What a step with gradients of a given norm did."""

    saved: dict[str, Any]
    info: StepInfo
    bits: list[bytes]
    """Of all that a skipped step must leave as it was."""


def _bits(values):
    return [np.asarray(value).tobytes() for value in values]


def _in_torch(saved=None, *, dtype="float32", max_norm=None, fused=False):
    """Return a function that takes a step with gradients of a norm; through `GradScaler`."""
    scaler = GradScaler("cpu", policy=POLICY, guard=GUARD)
    if saved:
        scaler.load_state_dict(saved)
    param = torch.nn.Parameter(torch.tensor([0.5, -0.0], dtype=getattr(torch, dtype)))
    optimizer = torch.optim.Adam([param], lr=0.1, fused=fused)

    def step(norm):
        optimizer.zero_grad()
        scaler.scale(param[0] * float(norm)).backward()
        if max_norm:
            scaler.unscale_and_clip_(optimizer, max_norm)
        scaler.step(optimizer)
        info = scaler.update()
        values = [param, *(value for state in optimizer.state.values() for value in state.values())]
        return Step(scaler.state_dict(), info, _bits(value.detach() for value in values))

    return step


def _in_jax(saved=None, *, dtype="float32", compiled=False, **settings):
    """Do the same through `loss_scaled`; compiled with everything donated."""
    optimizer = loss_scaled(optax.adam(0.1), POLICY, guard=GUARD, **settings)
    params = jnp.array([0.5, -0.0], dtype)
    opt_state = optimizer.init(params)
    if saved:
        opt_state = load_scale_state(opt_state, saved, POLICY)

    def train(params, opt_state, norm):
        grads = jnp.stack([norm, jnp.zeros_like(norm)]) * get_scale_state(opt_state).loss_scale
        return optimizer.apply_gradients(grads, opt_state, params)

    compiled_train = jax.jit(train, donate_argnums=(0, 1)) if compiled else train

    def step(norm):
        nonlocal params, opt_state
        before = jax.device_get(opt_state)
        params, opt_state = compiled_train(params, opt_state, jnp.asarray(norm, dtype))
        state, spiked = opt_state.scale_state, opt_state.guard_state.spikes > before.guard_state.spikes
        return Step(
            state_to_dict(state, POLICY, guard=opt_state.guard_state),
            step_info(before.scale_state, state, spiked=spiked),
            _bits(jax.tree.leaves((params, opt_state.inner_state))),
        )

    return step


def _in_keras(saved=None, *, dtype="float32", wrap=lambda train: train, **settings):
    """Do the same through TensorFlow's `LossScaleOptimizer`."""
    optimizer = LossScaleOptimizer(keras.optimizers.Adam(0.1), policy=POLICY, guard=GUARD, **settings)
    if saved:
        optimizer.load_state_dict(saved)
    variable = tf.Variable(tf.constant([0.5, -0.0], dtype))
    optimizer.build([variable])
    train = wrap(lambda norm: optimizer.minimize(lambda: variable[0] * norm, [variable]))

    def step(norm):
        train(tf.constant(norm, dtype))
        values = [variable, *(each.value for each in optimizer.inner_optimizer.variables)]
        return Step(optimizer.state_dict(), optimizer.last_step, _bits(values))

    return step


FRAMEWORKS = {"torch": _in_torch, "jax": _in_jax, "keras": _in_keras}
COMPILED = {
    "torch, fused": functools.partial(_in_torch, fused=True),
    "torch, clipping": functools.partial(_in_torch, max_norm=0.5),
    "jax, jit": functools.partial(_in_jax, compiled=True),
    "jax, clipping": functools.partial(_in_jax, compiled=True, max_norm=0.5),
    "jax, keeping dtypes": functools.partial(_in_jax, compiled=True, keep_dtypes=True),
    "keras, clipping": functools.partial(_in_keras, global_clipnorm=0.5),
    "keras, graph": functools.partial(_in_keras, wrap=tf.function(autograph=False), global_clipnorm=0.5),
    "keras, XLA": functools.partial(_in_keras, wrap=tf.function(autograph=False, jit_compile=True)),
}
"""These may round a norm less often, or otherwise, than the guard on the host."""
EACH = pytest.mark.parametrize("make", FRAMEWORKS.values(), ids=FRAMEWORKS)


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
    step = FRAMEWORKS[framework]()
    return json.dumps([step(norm).saved for norm in NORMS[:SAVED_AT]][-1])


def test_the_run_is_not_trivial():
    """A spike lies on either side of the checkpoint, which is in the middle of a streak."""
    assert list(np.flatnonzero(EXPECTED.spiked)) == SPIKES
    assert list(np.flatnonzero(EXPECTED.skipped)) == OVERFLOWS
    assert json.loads(_saved_by("torch"))["guard"]["streak"] == 2.0


@pytest.mark.parametrize(("origin", "target"), list(itertools.product([None, *FRAMEWORKS], FRAMEWORKS)))
def test_a_run_goes_as_simulated_and_continues_in_another_framework(origin, target):
    """Every state is the host's and the scale's the simulated one, bit for bit; a skipped step changes nothing else."""
    saved = json.loads(_saved_by(origin)) if origin else None
    _require_simulated(FRAMEWORKS[target](saved), SAVED_AT if origin else 0)


@pytest.mark.parametrize("make", COMPILED.values(), ids=COMPILED)
def test_a_run_goes_as_simulated_however_it_is_compiled(make):
    """The flags are the same, and the guard's averages agree to a few ulps."""
    _require_simulated(make(), rtol=1e-5)


@EACH
def test_a_checkpoint_without_a_guard_starts_it_afresh(make):
    """A warning says so, and the norm of the next step is the first one."""
    saved = {name: value for name, value in json.loads(_saved_by("torch")).items() if name != "guard"}
    with pytest.warns(CheckpointWarning, match="no state of a spike guard"):
        step = make(saved)
    assert step(1.0).saved["guard"] == {"mean": 1.0, "deviation": 0.0, "norms": 1.0, "spikes": 0, "streak": 0.0}


@EACH
def test_a_norm_beyond_float32_is_a_spike(make):
    """It is finite in float64, so that the loss scale stays; float32's largest number is checked."""
    with enable_x64(True) if make is _in_jax else contextlib.nullcontext():
        step = make(dtype="float64")
        for norm, spikes in ((1.0, 0), (1.0, 0), (1.0, 0), (1.0, 0), (1e100, 1), (1.0, 1)):
            saved, info, _ = step(norm)
            assert (saved["guard"]["spikes"], saved["skipped_steps"], bool(info.overflowed)) == (spikes, 0, False)
