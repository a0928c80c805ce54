"""Loss scaling for float16 training, with one policy, state and checkpoint format for every framework.

`lossscale` has the names of `lossscale_core`: policies, states and the five verbs on NumPy. It also finds the class or
function that trains in each framework: `lossscale.GradScaler` for PyTorch, `lossscale.loss_scaled` for JAX and
`lossscale.LossScaleOptimizer` for TensorFlow and Keras. Their packages, `lossscale_torch`, `lossscale_jax` and
`lossscale_tf`, have the rest. `from_tool` and `state_from_tool` read the configs and checkpoints of other `tools`.
`lossscale` is also a command: `python -m lossscale`.
"""

import importlib
from typing import TYPE_CHECKING, Any

import lossscale_core

if TYPE_CHECKING:
    from lossscale.other_tools import from_tool, state_from_tool, tools
    from lossscale_core import *  # noqa: F403

__all__: list[str] = []
__all__ += lossscale_core.__all__
__all__ += ["from_tool", "state_from_tool", "tools"]
_ELSEWHERE = {"GradScaler": "lossscale_torch", "loss_scaled": "lossscale_jax", "LossScaleOptimizer": "lossscale_tf"}
_ELSEWHERE |= dict.fromkeys(("from_tool", "state_from_tool", "tools"), "lossscale.other_tools")


def __getattr__(name: str) -> Any:
    """Return a public name of the core, or import the package of the framework that has the name."""
    # A package of a framework imports it, which takes seconds, and it may not be installed.
    if name in _ELSEWHERE:
        return getattr(importlib.import_module(_ELSEWHERE[name]), name)
    if name in __all__:
        return getattr(lossscale_core, name)
    raise AttributeError(f"module 'lossscale' has no attribute {name!r}; see dir(lossscale_core) for the public names")


def __dir__() -> list[str]:
    """List the public names that need no framework."""
    return sorted({*globals(), *__all__})
