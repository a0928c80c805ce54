"""Places a state where JAX's arrays live."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from lossscale_core import as_policy


def init_state(policy: Any, *, device: Any = None) -> Any:
    """Return the state before the first step under `policy`: arrays of shape `()`, and so a pytree.

    `policy` is anything `as_policy` takes; `device` is a `jax.Device` or a `jax.sharding.Sharding`. The leaves are
    strongly typed float32 and int32, and stay so: one compilation serves the whole run. Does not synchronise.
    """

    def placed(value: Any) -> Array:
        dtype = getattr(value, "dtype", jnp.float32 if isinstance(value, float) else jnp.int32)
        return jnp.asarray(value, dtype, device=device)

    return jax.tree.map(placed, as_policy(policy).init_state())
