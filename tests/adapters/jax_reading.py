"""What the host reads of JAX: the bits of a tree, and whether it waits; a CPU's transfer guard detects nothing."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np

READERS = ("__bool__", "__int__", "__float__", "__complex__", "__index__", "__array__", "item", "tolist")


def bits(tree):
    """Return the dtype and the bits of each leaf."""
    return [(leaf.dtype, np.asarray(leaf).tobytes()) for leaf in jax.tree.leaves(tree)]


@contextlib.contextmanager
def reading_refused(monkeypatch):
    """Raise an error if Python makes a number or a NumPy array of a JAX array."""

    def refuse(self, *args, **kwargs):
        raise AssertionError("the host read an array")

    with monkeypatch.context() as patch:
        for name in READERS:
            patch.setattr(type(jnp.ones(())), name, refuse)
        yield
