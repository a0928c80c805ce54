"""Loss scaling for float16 training, with one policy, state and checkpoint format for every framework.

`lossscale` has the names of `lossscale_core`: policies, states and the five verbs on NumPy. What trains is in the
packages of the frameworks: `lossscale_torch`, `lossscale_jax`, `lossscale_keras` and `lossscale_tf`. `from_tool` and
`state_from_tool` read the configs and checkpoints of other `tools`. `lossscale` is also a command.
"""

from typing import TYPE_CHECKING, Any

import lossscale_core

if TYPE_CHECKING:
    from lossscale.other_tools import from_tool, state_from_tool, tools
    from lossscale_core import *  # noqa: F403

__all__: list[str] = []
__all__ += lossscale_core.__all__
__all__ += ["from_tool", "state_from_tool", "tools"]
_PACKAGES = {"GradScaler": "lossscale_torch", "loss_scaled": "lossscale_jax", "LossScaleOptimizer": "lossscale_keras"}


def __getattr__(name: str) -> Any:
    """Return a public name of the core or of the translator, which is imported when it is used first."""
    if name in lossscale_core.__all__:
        return getattr(lossscale_core, name)
    if name in __all__:
        from lossscale import other_tools

        return getattr(other_tools, name)
    hint = f"import it from {_PACKAGES[name]}" if name in _PACKAGES else "see dir(lossscale) for the public names"
    raise AttributeError(f"module 'lossscale' has no attribute {name!r}; {hint}")


def __dir__() -> list[str]:
    """List the public names."""
    return sorted({*globals(), *__all__})
