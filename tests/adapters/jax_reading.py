"""Functions that detect whether JAX's host waits for a value; on a CPU a transfer guard detects nothing."""

import contextlib

import jax.numpy as jnp

READERS = ("__bool__", "__int__", "__float__", "__complex__", "__index__", "__array__", "item", "tolist")


@contextlib.contextmanager
def reading_refused(monkeypatch):
    """Raise an error if Python makes a number or a NumPy array of a JAX array."""

    def refuse(self, *args, **kwargs):
        raise AssertionError("the host read an array")

    with monkeypatch.context() as patch:
        for name in READERS:
            patch.setattr(type(jnp.ones(())), name, refuse)
        yield
