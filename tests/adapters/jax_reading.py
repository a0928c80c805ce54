"""Functions that detect whether JAX's host waits for a value; on a CPU a transfer guard detects nothing."""

import contextlib

import jax
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


@jax.jit
def _slow(matrix):
    return jax.lax.fori_loop(0, 1200, lambda _, power: jnp.tanh(power @ matrix), matrix)[0, :4]


def late_gradients():
    """Return four gradients that the device needs about half a second for, before they are there."""
    matrix = jnp.full((200, 200), 0.01, jnp.float32)
    _slow(matrix).block_until_ready()
    return _slow(matrix)
