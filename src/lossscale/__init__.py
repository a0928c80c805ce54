"""The `lossscale` command, and a translator of the configs and checkpoints of other tools.

`from_tool` and `state_from_tool` read configs and checkpoints of the tools in `tools()`. Policies, states and the five
verbs on NumPy are in `lossscale_core`. Functions for training are in the packages of the frameworks: `lossscale_torch`,
`lossscale_jax`, `lossscale_keras` and `lossscale_tf`.
"""

from lossscale.other_tools import from_tool, state_from_tool, tools
from lossscale_core import __version__

__all__ = ["__version__", "from_tool", "state_from_tool", "tools"]
