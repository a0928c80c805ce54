"""Conversion of other tools' configs and checkpoints, in both directions, from one table of data.

```python
policy = from_peer("deepspeed", {"loss_scale": 0, "initial_scale_power": 16, "hysteresis": 2})
state = state_from_peer("megatron", {"scale": 65536.0, "growth_tracker": 7, "hysteresis_tracker": 1})
to_peer("torch", policy)  # raises PolicyError: torch has no hysteresis
```

All functions take and return plain dicts; no framework is imported. For each tool a record (`peers()`) maps its keys to
the settings of this library, and the names in its checkpoints to the counters of a state. `markdown(name)` and
`overview()` generate the tables of `docs/migrating.md` and `docs/migrating/` from them. These pages also describe
the intended differences, most of which avoid bugs of the other tool.
"""

from lossscale_core.dialects._page import markdown, overview, tables
from lossscale_core.dialects._peers import peers
from lossscale_core.dialects._policies import from_peer, to_peer
from lossscale_core.dialects._record import Counter, Form, Key, Peer, Reading, Saved
from lossscale_core.dialects._states import guess_peer, policy_in, possible_peers, state_from_peer

__all__ = [
    "Counter",
    "Form",
    "Key",
    "Peer",
    "Reading",
    "Saved",
    "from_peer",
    "guess_peer",
    "markdown",
    "overview",
    "peers",
    "policy_in",
    "possible_peers",
    "state_from_peer",
    "tables",
    "to_peer",
]
