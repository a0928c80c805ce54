"""Conversion of other tools' configs and checkpoints, from one table of data.

```python
policy = from_tool("deepspeed", {"loss_scale": 0, "initial_scale_power": 16, "hysteresis": 2})
state = state_from_tool("megatron", {"scale": 65536.0, "growth_tracker": 7, "hysteresis_tracker": 1})
```

All functions take and return plain dicts; no framework is imported. For each tool a record maps its keys to
the settings of this library, and the names in its checkpoints to the counters of a state. The tables of
`docs/migrating/` are drawn from these records. These pages also describe the intended differences, most of which avoid
bugs of the other tool.
"""

from lossscale.dialects._policies import from_tool
from lossscale.dialects._states import guess_tool, possible_tools, state_from_tool

__all__ = ["from_tool", "guess_tool", "possible_tools", "state_from_tool"]
