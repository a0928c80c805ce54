"""What tests use of JAX and older versions have under another name."""

import jax
import jax.experimental
from jax import lax

enable_x64 = jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64  # before 0.8.0
reshard = jax.reshard if hasattr(jax, "reshard") else jax.sharding.reshard  # before 0.8.2


def vary(x, axis):
    """Return `x` marked as varying over a mesh axis."""
    return lax.pcast(x, axis, to="varying") if hasattr(lax, "pcast") else lax.pvary(x, axis)  # before 0.8.2
