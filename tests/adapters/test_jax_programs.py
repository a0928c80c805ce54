"""Random programs with `loss_scaled`, compared with a plain loop of the wrapped optimizer without loss scaling."""

import pickle
import random
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lossscale_core import DynamicScaling, FixedScaling, NoScaling, SpikeGuard
from lossscale_jax import get_last_step, get_scale_state, loss_scaled
from tests.adapters.jax_reading import bits, numbers
from tests.sweeping import IS_SWEEP

PROGRAMS = 18 * (10 if IS_SWEEP else 1)
SPIKE = 64.0
TOLERANCE = {"float16": 2e-3, "bfloat16": 2e-2}
INNERS = {
    "sgd": lambda: optax.sgd(0.125),
    "adamw": lambda: optax.adamw(0.1, weight_decay=0.01),
    "chain": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.scale_by_adam(), optax.scale(-0.1)),
    "injected": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=lambda count: 0.1 / (count + 1)),
    "noise": lambda: optax.chain(optax.add_noise(0.1, 0.5, 0), optax.sgd(0.1)),
    "schedule": lambda: optax.sgd(lambda count: 0.5 / (count + 1)),
}
POLICIES = [
    DynamicScaling(init_scale=16.0, growth_interval=2, max_scale=2.0**8),
    DynamicScaling(init_scale=64.0, growth_interval=1, hysteresis=2, max_scale=2.0**8),
    FixedScaling(2.0**-3),
    NoScaling(),
]
KINDS = {
    **{dtype: lambda numbers, dtype=dtype: jnp.asarray(numbers, dtype) for dtype in ("float32", "float16", "bfloat16")},
    "empty": lambda numbers: jnp.zeros((0, 3)),
    "none": lambda numbers: None,
    "nested": lambda numbers: [jnp.float32(numbers[0, 0]), {"half": jnp.asarray(numbers[0], jnp.float16)}],
    "complex": lambda numbers: jax.lax.complex(*[jnp.asarray(numbers, jnp.float32)] * 2),
    "integer": lambda numbers: jnp.arange(3),
}


def _stacked(*trees):
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def _in_scan(step):
    body = lambda carry, batch: (step(carry, batch), None)  # noqa: E731
    return jax.jit(lambda carry, batch: jax.lax.scan(body, carry, _stacked(batch))[0])


def _beside_another(step):
    """Take the step next to one with gradients that are finite."""

    def both(carry, batch):
        results = jax.vmap(step)(_stacked(carry, carry), _stacked(batch, (batch[0], jnp.asarray(False))))
        return jax.tree.map(lambda leaf: leaf[0], results)

    return jax.jit(both)


def _resumed(step):
    """Take the step, and return its result as it is in a file."""
    step = jax.jit(step)
    return lambda carry, batch: pickle.loads(pickle.dumps(step(carry, batch)))


MODES = {"jit": jax.jit, "two calls": jax.jit, "eager": lambda step: step, "resumed": _resumed}
MODES |= {"scan": _in_scan, "vmap": _beside_another}


def _numbers(draw, shape):
    return np.random.default_rng(draw.getrandbits(32)).choice([-2.0, -0.5, -0.0, 0.25, 1.0], size=shape)


def _gradients(draw, params):
    size = draw.choice([1.0, 1.0, 1.0, SPIKE])
    gradient = lambda param: jnp.asarray(_numbers(draw, param.shape) * size * _is_float(param), param.dtype)  # noqa: E731
    return jax.tree.map(gradient, params)


def _program(seed):
    draw, kinds = random.Random(seed), list(KINDS)
    inner = list(INNERS)[seed % len(INNERS)]
    names = draw.sample(kinds[:-1], draw.randint(0, 3)) + (["integer"] if inner == "sgd" else [])
    # Other optimizers make floats of integers, and optax's injection makes real numbers of complex ones.
    names = [name for name in names if (inner, name) != ("injected", "complex")]
    params = {"first": KINDS[draw.choice(kinds[:3])](_numbers(draw, (2, 3)))}
    params |= {name: KINDS[name](_numbers(draw, (2, 3))) for name in names}
    choices = {
        "accumulation_steps": [1, 1, 2, 3],
        "max_norm": [None, None, 0.5],
        "guard": [None, SpikeGuard(threshold=2.0, memory=4, warmup=1)],
        "skip_by": ["cond", "select"],
    }
    settings = {name: draw.choice(values) for name, values in choices.items()}
    steps = settings["accumulation_steps"]
    flags = [draw.random() < 0.3 for _ in range(steps * draw.randint(3, 6))] + [False] * steps
    return SimpleNamespace(
        params=params,
        make_inner=INNERS[inner],
        policy=draw.choice(POLICIES),
        settings=settings,
        mode=list(MODES)[(seed + seed // len(INNERS)) % len(MODES)],  # another one for each inner optimizer in turn
        batches=[(_gradients(draw, params), overflows) for overflows in flags],
        bad=draw.choice([np.inf, np.nan]),
    )


def _is_float(leaf):
    return jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)


def _in_float32(tree):
    return jax.tree.map(
        lambda leaf: leaf.astype(jnp.promote_types(leaf.dtype, "float32")) if _is_float(leaf) else leaf, tree
    )


def _apply_updates(params, updates):
    """Add `updates`, which must be float32 or complex, to `params`; keep the dtypes of `params`."""
    assert all(leaf.dtype in ("float32", "complex64", "int32") for leaf in jax.tree.leaves(updates))
    return jax.tree.map(
        lambda param, wide, update: (wide + update).astype(param.dtype), params, _in_float32(params), updates
    )


class Reference:
    """The same training without loss scaling: a Python loop, a list for a window, policy and guard on the host."""

    def __init__(self, program):
        self.program, self.inner, self.params = program, program.make_inner(), program.params
        self.inner_state = self.inner.init(_in_float32(program.params))
        self.guard, self.max_norm = program.settings["guard"], program.settings["max_norm"]
        self.guard_state = self.guard and self.guard.init_state()
        self.scale_state, self.window, self.norm = program.policy.init_state(), [], 0.0

    def step(self, grads, overflows):
        self.window.append(None if overflows else _in_float32(grads))
        self.applied, self.overflowed, self.spiked = False, None in self.window, False
        if len(self.window) == self.program.settings["accumulation_steps"]:
            self._end_window(self.window)
            self.window = []

    def _end_window(self, window):
        grads, norm = None, np.inf
        if not self.overflowed:
            mean = lambda *leaves: sum(leaves) / len(leaves) if _is_float(leaves[0]) else leaves[0]  # noqa: E731
            grads = jax.tree.map(mean, *window)
            norm = np.linalg.norm([np.linalg.norm(leaf) for leaf in jax.tree.leaves(grads) if _is_float(leaf)])
        if self.guard is not None:
            accepted, self.guard_state = self.guard.check(self.guard_state, norm)
            self.spiked = not (self.overflowed or accepted)
        if not self.spiked:
            self.scale_state = self.program.policy.update(self.scale_state, not self.overflowed)
        self.applied = not (self.overflowed or self.spiked)
        if not self.applied:
            return
        self.norm = norm
        if self.max_norm is not None:
            shrink = np.float32(min(1.0, self.max_norm / max(norm, 1e-30)))
            grads = jax.tree.map(lambda leaf: leaf * shrink if _is_float(leaf) else leaf, grads)
        updates, self.inner_state = self.inner.update(grads, self.inner_state, _in_float32(self.params))
        self.params = _apply_updates(self.params, updates)


def _step(program, optimizer):
    def step(carry, batch):
        (params, opt_state), (grads, overflows) = carry, batch
        loss_scale = get_scale_state(opt_state).loss_scale
        grads = jax.tree.map(lambda leaf: leaf * loss_scale.astype(leaf.dtype) if _is_float(leaf) else leaf, grads)
        first = grads["first"]
        grads |= {"first": jnp.where(overflows, first.at[-1, -1].set(program.bad), first)}
        if program.mode != "two calls":
            return optimizer.apply_gradients(grads, opt_state, params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return _apply_updates(params, updates), opt_state

    return step


def _require_close(tree, expected):
    """Require the structure, the dtypes, the shapes and about the numbers of `expected`."""
    assert jax.tree.structure(tree) == jax.tree.structure(expected)
    for ours, theirs in zip(numbers(tree), numbers(expected), strict=True):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        tolerance = TOLERANCE.get(str(ours.dtype), 2e-5)
        np.testing.assert_allclose(ours.astype(complex), theirs.astype(complex), rtol=tolerance, atol=tolerance / 10)


@pytest.mark.parametrize("seed", range(PROGRAMS))
def test_a_program_equals_training_without_scaling(seed):
    """After each step of a random program, parameters, states and outcome equal those of the loop without scaling."""
    program = _program(seed)
    reference = Reference(program)
    optimizer = loss_scaled(program.make_inner(), program.policy, **program.settings)
    step = MODES[program.mode](_step(program, optimizer))
    params, state = program.params, optimizer.init(program.params)
    before = bits((params, state.inner_state))
    for grads, overflows in program.batches:
        params, state = step((params, state), (grads, jnp.asarray(overflows)))
        reference.step(grads, overflows)
        last_step = get_last_step(state)
        assert (last_step.applied, last_step.overflowed) == (reference.applied, reference.overflowed)
        assert last_step.spiked == reference.spiked
        after = bits((params, state.inner_state))
        assert reference.applied or after == before
        before = after
        assert [float(number) for number in state.scale_state] == [float(number) for number in reference.scale_state]
        _require_close(state.guard_state, reference.guard_state)
        assert last_step.norm is None or last_step.norm == pytest.approx(reference.norm, rel=1e-5)
        assert (last_step.norm is None) == (reference.guard is reference.max_norm is None)
        _require_close((params, state.inner_state), (reference.params, reference.inner_state))
    assert program.mode in ("eager", "resumed") or step._cache_size() == 1
