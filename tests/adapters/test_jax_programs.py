"""Random programs with `loss_scaled`, compared with a plain loop of the wrapped optimizer without loss scaling."""

import functools
import pickle
import random
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lossscale_core import DynamicScaling, FixedScaling, NoScaling, SpikeGuard, state_to_dict
from lossscale_jax import LossScaledState, get_last_step, get_scale_state, load_scale_state, loss_scaled
from tests.adapters.jax_reading import bits, numbers

PROGRAMS = 16
SELECTING_PROGRAMS = 6
UNFUSED = {"xla_disable_hlo_passes": "fusion"}
TOLERANCE = {"float16": 2e-3, "bfloat16": 2e-2}
INNERS = {
    "sgd": lambda: optax.sgd(0.125),
    "momentum": lambda: optax.sgd(0.125, momentum=0.5),
    "adamw": lambda: optax.adamw(0.1, weight_decay=0.01),
    "chain": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.scale_by_adam(), optax.scale(-0.1)),
    "schedule": lambda: optax.sgd(lambda count: 0.5 / (count + 1)),
    "injected": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=lambda count: 0.1 / (count + 1)),
    "MultiSteps": lambda: optax.MultiSteps(optax.sgd(0.125), 2).gradient_transformation(),
    "noise": lambda: optax.chain(optax.add_noise(0.1, 0.5, 0), optax.sgd(0.1)),
    "half moments": lambda: optax.adam(0.1, mu_dtype="bfloat16"),
}
AROUND = {
    "nothing": lambda scaled: scaled,
    "chain": lambda scaled: optax.chain(optax.identity(), scaled),
    "masked": lambda scaled: optax.masked(scaled, lambda tree: jax.tree.map(lambda _: True, tree)),
    "partition": lambda scaled: optax.partition({"all": scaled}, lambda tree: jax.tree.map(lambda _: "all", tree)),
    "injected": lambda scaled: optax.inject_hyperparams(lambda unused: scaled)(unused=1.0),
}
MODES = ["jit", "two calls", "eager", "donated", "scan", "vmap", "checkpoint", "resumed"]
POLICIES = [
    DynamicScaling(init_scale=16.0, growth_interval=2, max_scale=2.0**8),
    DynamicScaling(init_scale=64.0, growth_interval=1, hysteresis=2, max_scale=2.0**8),
    FixedScaling(2.0**-3),
    NoScaling(),
]


class Program(NamedTuple):
    """A random program."""

    params: dict
    inner: str
    around: str
    policy: object
    settings: dict
    mode: str
    batches: list
    """Pairs of the unscaled gradients and a flag whether they overflow."""
    bad: float


KINDS = {
    **{dtype: lambda numbers, dtype=dtype: jnp.asarray(numbers, dtype) for dtype in ("float32", "float16", "bfloat16")},
    "empty": lambda numbers: jnp.zeros((0, 3)),
    "none": lambda numbers: None,
    "scalar": lambda numbers: jnp.float32(numbers[0, 0]),
    "nested": lambda numbers: [jnp.asarray(numbers), {"half": jnp.asarray(numbers[0], jnp.float16)}],
    "complex": lambda numbers: jnp.asarray(numbers * (1.0 - 0.5j)),
    "integer": lambda numbers: jnp.arange(3),
}


def _numbers(draw, shape):
    return np.random.default_rng(draw.getrandbits(32)).choice([-2.0, -0.5, -0.0, 0.25, 1.0], size=shape)


def _gradients(draw, params):
    gradient = lambda param: jnp.asarray(_numbers(draw, param.shape) * _is_float(param), param.dtype)  # noqa: E731
    return jax.tree.map(gradient, params)


def _program(seed):
    draw, kinds = random.Random(seed), list(KINDS)
    inner = list(INNERS)[seed % len(INNERS)]
    names = draw.sample(kinds[:-1], draw.randint(0, 3))
    names += ["integer"] if inner == "sgd" else []  # others make floats of integers
    params = {"first": KINDS[draw.choice(kinds[:3])](_numbers(draw, (2, 3)))}
    params |= {name: KINDS[name](_numbers(draw, (2, 3))) for name in names}
    settings = {"accumulation_steps": draw.choice([1, 1, 2, 3]), "max_norm": draw.choice([None, None, 0.5])}
    steps = settings["accumulation_steps"]
    flags = [draw.random() < 0.3 for _ in range(steps * draw.randint(2, 4))] + [False] * steps
    batches = [(_gradients(draw, params), overflows) for overflows in flags]
    mode = MODES[seed % len(MODES)]
    bad = draw.choice([np.inf, -np.inf, np.nan])
    around = list(AROUND)[(seed + 2) % len(AROUND)]  # inject_hyperparams refuses float16 next to bfloat16, as in seed 3
    return Program(params, inner, around, POLICIES[seed // 4 % 4], settings, mode, batches, bad)


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
    """The same training without loss scaling: a Python loop, a list for a window, and the policy on the host."""

    def __init__(self, program):
        self.program, self.inner, self.params = program, INNERS[program.inner](), program.params
        self.inner_state = self.inner.init(_in_float32(program.params))
        self.scale_state, self.window = program.policy.init_state(), []
        self.applied, self.overflowed, self.norm = False, False, 0.0

    def step(self, grads, overflows):
        settings, policy = self.program.settings, self.program.policy
        self.window.append(None if overflows else _in_float32(grads))
        self.applied, self.overflowed = False, None in self.window
        if len(self.window) < settings["accumulation_steps"]:
            return
        is_whole = None not in self.window
        self.scale_state = policy.update(self.scale_state, is_whole)
        if is_whole:
            mean = lambda *leaves: sum(leaves) / len(leaves) if _is_float(leaves[0]) else leaves[0]  # noqa: E731
            self._apply(jax.tree.map(mean, *self.window))
        self.window = []

    def _apply(self, grads):
        if self.program.settings["max_norm"] is not None:
            self.norm = np.linalg.norm([np.linalg.norm(leaf) for leaf in jax.tree.leaves(grads) if _is_float(leaf)])
            shrink = np.float32(min(1.0, self.program.settings["max_norm"] / max(self.norm, 1e-30)))
            grads = jax.tree.map(lambda leaf: leaf * shrink if _is_float(leaf) else leaf, grads)
        updates, self.inner_state = self.inner.update(grads, self.inner_state, _in_float32(self.params))
        self.params, self.applied = _apply_updates(self.params, updates), True


def _optimizer(program):
    scaled = loss_scaled(INNERS[program.inner](), program.policy, **program.settings)
    return AROUND[program.around](scaled)


def _overflow(grads, overflows, bad):
    """Return gradients with a non-finite element if they overflow."""
    first = grads["first"].ravel()
    return {**grads, "first": jnp.where(overflows, first.at[-1].set(bad), first).reshape(grads["first"].shape)}


def _step(program, optimizer):
    def scaled(grads, opt_state):
        loss_scale = get_scale_state(opt_state).loss_scale
        return jax.tree.map(lambda leaf: leaf * loss_scale.astype(leaf.dtype) if _is_float(leaf) else leaf, grads)

    def step(carry, batch):
        (params, opt_state), (grads, overflows) = carry, batch
        grads = _overflow(scaled(grads, opt_state), overflows, program.bad)
        if hasattr(optimizer, "apply_gradients") and program.mode != "two calls":
            return optimizer.apply_gradients(grads, opt_state, params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return _apply_updates(params, updates), opt_state

    return step


def _resume(program, carry):
    """Return `carry` after a pickle, and its scale state after `state_to_dict` and `load_scale_state`."""
    guard_state = optax.tree.get(carry[1], "guard_state")
    saved = state_to_dict(get_scale_state(carry[1]), program.policy, guard=guard_state)
    params, opt_state = jax.tree.map(jnp.asarray, pickle.loads(pickle.dumps(jax.device_get(carry))))
    return params, load_scale_state(opt_state, saved, program.policy)


def _inner_state(opt_state):
    is_state = lambda node: isinstance(node, LossScaledState)  # noqa: E731
    (state,) = filter(is_state, jax.tree.leaves(opt_state, is_leaf=is_state))
    return state.inner_state


def _run(program, **jit_options):
    """Run the program in its mode; yield parameters, inner state, scale state and outcome after each step."""
    jit = functools.partial(jax.jit, **jit_options)
    optimizer = _optimizer(program)
    step, params = _step(program, optimizer), jax.tree.map(jnp.copy, program.params)
    carry = params, optimizer.init(params)
    seen = lambda carry: (carry[0], _inner_state(carry[1]), get_scale_state(carry[1]), get_last_step(carry[1]))  # noqa: E731
    stacked = lambda *trees: jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)  # noqa: E731
    batches = [(grads, jnp.asarray(overflows)) for grads, overflows in program.batches]
    if program.mode == "scan":
        every = lambda carry, batch: (lambda after: (after, seen(after)))(step(carry, batch))  # noqa: E731
        _, results = jit(lambda carry: jax.lax.scan(every, carry, stacked(*batches)))(carry)
        yield from (jax.tree.map(lambda leaf, n=n: leaf[n], results) for n in range(len(batches)))
        return
    if program.mode == "vmap":  # next to a member with gradients that are always finite
        both, carry = jit(jax.vmap(step)), stacked(carry, carry)
        for grads, overflows in batches:
            carry = both(carry, stacked((grads, overflows), (grads, jnp.asarray(False))))
            yield seen(jax.tree.map(lambda leaf: leaf[0], carry))
        return
    wraps = {"eager": lambda f: f, "donated": lambda f: jit(f, donate_argnums=0)}
    wraps["checkpoint"] = lambda f: jit(jax.checkpoint(f))
    wrapped = wraps.get(program.mode, jit)(step)
    for batch in batches:
        carry = wrapped(carry, batch)
        yield jax.device_get(seen(carry))
        carry = _resume(program, carry) if program.mode == "resumed" else carry
    assert program.mode == "eager" or wrapped._cache_size() == 1


def _require_close(tree, expected):
    """Require the structure, the dtypes, the shapes and about the numbers of `expected`."""
    assert jax.tree.structure(tree) == jax.tree.structure(expected)
    for ours, theirs in zip(numbers(tree), numbers(expected), strict=True):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        tolerance = TOLERANCE.get(str(ours.dtype), 2e-5)
        np.testing.assert_allclose(ours.astype(complex), theirs.astype(complex), rtol=tolerance, atol=tolerance / 10)


@pytest.mark.parametrize("seed", range(PROGRAMS))
def test_a_program_equals_training_without_scaling(seed):
    """After each step, parameters, states and outcome equal the loop without scaling, in dtypes, too.

    A call that applies no step leaves parameters and inner state unchanged, bit for bit.
    """
    program = _program(seed)
    reference, before = Reference(program), None
    for (grads, overflows), (params, inner_state, scale_state, last_step) in zip(
        program.batches, _run(program), strict=True
    ):
        reference.step(grads, overflows)
        assert reference.applied or before in (None, bits((params, inner_state)))
        before = bits((params, inner_state))
        assert [float(number) for number in scale_state] == [float(number) for number in reference.scale_state]
        assert (last_step.applied, last_step.overflowed) == (reference.applied, reference.overflowed)
        assert last_step.norm is None or last_step.norm == pytest.approx(reference.norm, rel=1e-5)
        assert (last_step.norm is None) == (program.settings["max_norm"] is None)
        _require_close((params, inner_state), (reference.params, reference.inner_state))


@pytest.mark.parametrize("seed", range(SELECTING_PROGRAMS))
def test_select_and_cond_agree(seed):
    """`skip_by="select"` gives the bits of `skip_by="cond"` if XLA fuses no product with a sum."""
    program = _program(seed)
    guard = SpikeGuard(threshold=1.5, memory=4, warmup=2) if seed % 2 else None
    runs = {}
    for skip_by in ("cond", "select"):
        settings = program.settings | {"skip_by": skip_by, "guard": guard}
        run = _run(program._replace(settings=settings), compiler_options=UNFUSED)
        runs[skip_by] = [bits(step) for step in run]
    assert runs["select"] == runs["cond"]
