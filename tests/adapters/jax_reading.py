"""Functions that tests of JAX share: steps, the bits of a pytree, and a check whether the host reads an array."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

READERS = ("__bool__", "__int__", "__float__", "__complex__", "__index__", "__array__", "item", "tolist")
"""The methods by which the host reads an array. JAX's transfer guard detects no read on a CPU."""
WAYS = ("apply_gradients", "update")


def step_of(optimizer, way):
    """Return a step by `apply_gradients`, or by `update` and `optax.apply_updates`."""

    def step(params, opt_state, grads):
        if way == "apply_gradients":
            return optimizer.apply_gradients(grads, opt_state, params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return step


def bits(tree):
    """Return the dtype and the bits of each leaf."""
    return [(leaf.dtype, np.asarray(leaf).tobytes()) for leaf in jax.tree.leaves(tree)]


@contextlib.contextmanager
def reads_told(report):
    """Call `report` each time that Python converts a JAX array to a number or a NumPy array."""
    kind = type(jnp.ones(()))

    def wrap(reader):
        def read(self, *args, **kwargs):
            report()
            return reader(self, *args, **kwargs)

        return read

    with pytest.MonkeyPatch.context() as patch:
        for name in READERS:
            patch.setattr(kind, name, wrap(getattr(kind, name)))
        yield


def refuse():
    """Raise an error instead of a read."""
    raise AssertionError("the host read an array")
