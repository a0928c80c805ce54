"""Loss scaling for float16 training, with one policy, state and checkpoint format for every framework.

`lossscale` has the names of `lossscale_core`: policies, states and the five verbs on NumPy. It also finds the class or
function that trains in each framework: `lossscale.GradScaler` for PyTorch, `lossscale.loss_scaled` for JAX and
`lossscale.LossScaleOptimizer` for TensorFlow and Keras. Their packages, `lossscale_torch`, `lossscale_jax` and
`lossscale_tf`, have the rest. `lossscale.dialects` reads and writes other tools' configs and checkpoints.
`lossscale` is also a command: `python -m lossscale`.
"""

import importlib
from typing import TYPE_CHECKING, Any

import lossscale_core

if TYPE_CHECKING:
    from lossscale_core import *  # noqa: F403

__all__: list[str] = []
__all__ += lossscale_core.__all__
_IN_FRAMEWORKS = {"GradScaler": "lossscale_torch", "loss_scaled": "lossscale_jax", "LossScaleOptimizer": "lossscale_tf"}


def __getattr__(name: str) -> Any:
    """Return a public name of the core, or import the package of the framework that has the name."""
    # Each of these packages imports its framework, which takes seconds and may not be installed.
    if name in _IN_FRAMEWORKS:
        return getattr(importlib.import_module(_IN_FRAMEWORKS[name]), name)
    if name == "dialects":
        return importlib.import_module("lossscale.dialects")
    if name in __all__:
        return getattr(lossscale_core, name)
    raise AttributeError(f"module 'lossscale' has no attribute {name!r}; see dir(lossscale_core) for the public names")


def __dir__() -> list[str]:
    """List the public names that need no framework."""
    return sorted({*globals(), *__all__, "dialects"})
