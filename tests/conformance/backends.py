"""Every way to run `policy.update`, as data: how to place a state, how to make a flag, how to take a step."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import array_api_strict
import jax
import jax.numpy as jnp
import numpy as np
import tensorflow as tf
import torch


class Backend(NamedTuple):
    """One way to run a policy over a trace of flags, and how to read its states back."""

    name: str
    run: Callable[[Any, list[bool]], Iterator[Any]]


def _stepwise(name: str, place: Callable, flag: Callable, wrap: Callable = lambda update: update) -> Backend:
    """Return a backend that takes one step a call; `wrap` may trace or compile the step."""

    def run(policy: Any, grads_finite: list[bool]) -> Iterator[Any]:
        start = policy.init_state()
        step = wrap(policy.update)
        state = start._make(place(value) for value in start)
        for finite in grads_finite:
            state = step(state, flag(finite))
            yield state

    return Backend(name, run)


def _torch_update(update: Callable) -> Callable:
    return lambda state, finite: update(state, finite, xp=torch)


def _torch_compiled(update: Callable) -> Callable:
    torch._dynamo.reset()
    return torch.compile(_torch_update(update), backend="eager", fullgraph=True)


def _jax_update(update: Callable) -> Callable:
    return lambda state, finite: update(state, finite, xp=jnp)


def _tf_update(update: Callable) -> Callable:
    return lambda state, finite: update(state, finite, xp=tf)


def _tf_graph(**options: Any) -> Callable:
    return lambda update: tf.function(_tf_update(update), autograph=False, **options)


def _scan(policy: Any, grads_finite: list[bool]) -> Iterator[Any]:
    def step(state: Any, finite: Any) -> Any:
        new = policy.update(state, finite, xp=jnp)
        return new, new

    start = policy.init_state()
    _, states = jax.lax.scan(step, start._make(map(jnp.asarray, start)), np.asarray(grads_finite))
    for row in zip(*states, strict=True):
        yield start._make(row)


def _vmap(policy: Any, grads_finite: list[bool]) -> Iterator[Any]:
    """Yield the states of the middle one of three scalers stepped at once; its neighbours overflow at every step."""
    start = policy.init_state()
    state = start._make(jnp.stack([value] * 3) for value in start)
    step = jax.jit(jax.vmap(_jax_update(policy.update)))
    for finite in grads_finite:
        state = step(state, jnp.asarray([False, finite, False]))
        yield start._make(column[1] for column in state)


BACKENDS = [
    _stepwise("host", lambda value: value, bool),
    _stepwise("numpy", np.asarray, np.asarray),
    _stepwise("array-api-strict", array_api_strict.asarray, array_api_strict.asarray),
    _stepwise("torch-eager", torch.tensor, torch.tensor, _torch_update),
    _stepwise("torch-compile", torch.tensor, torch.tensor, _torch_compiled),
    _stepwise("jax-eager", jnp.asarray, jnp.asarray, _jax_update),
    _stepwise("jax-jit", jnp.asarray, jnp.asarray, lambda update: jax.jit(_jax_update(update))),
    Backend("jax-scan", _scan),
    Backend("jax-vmap", _vmap),
    _stepwise("tf-eager", tf.constant, tf.constant, _tf_update),
    _stepwise("tf-graph", tf.constant, tf.constant, _tf_graph()),
    _stepwise("tf-xla", tf.constant, tf.constant, _tf_graph(jit_compile=True)),
]
