"""Functions that tests of JAX share: steps, the bits of a pytree, and a context in which the host reads nothing."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

READERS = ("__bool__", "__int__", "__float__", "__complex__", "__index__", "__array__", "item", "tolist")
"""The methods by which the host reads an array. JAX's transfer guard detects no read on a CPU."""
WRAPS = {"eager": lambda function: function, "jit": jax.jit}


def step_of(optimizer, way):
    """Return a step by `apply_gradients`, or by `update` and `optax.apply_updates`."""

    def step(params, opt_state, grads):
        if way == "apply_gradients":
            return optimizer.apply_gradients(grads, opt_state, params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return step


def numbers(tree):
    """Return the leaves as NumPy arrays, PRNG keys as their numbers."""
    is_key = lambda leaf: jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)  # noqa: E731
    return [np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf) for leaf in jax.tree.leaves(tree)]


def bits(tree):
    """Return the dtype and the bits of each leaf."""
    return [(leaf.dtype, leaf.tobytes()) for leaf in numbers(tree)]


def times(tree, factor):
    """Multiply each leaf."""
    return jax.tree.map(lambda leaf: leaf * factor, tree)


@contextlib.contextmanager
def reads_refused():
    """Raise an error if the host reads a JAX array."""

    def refuse(*_):
        raise AssertionError("the host read an array")

    with pytest.MonkeyPatch.context() as patch:
        for name in READERS:
            patch.setattr(type(jnp.ones(())), name, refuse)
        yield
