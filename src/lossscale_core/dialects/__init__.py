"""Other tools' configs and checkpoints, and ours: one table of data, read in both directions.

```python
policy = from_peer("deepspeed", {"loss_scale": 0, "initial_scale_power": 16, "hysteresis": 2})
state = state_from_peer("megatron", {"scale": 65536.0, "growth_tracker": 7, "hysteresis_tracker": 1})
to_peer("torch", policy)  # raises PolicyError: torch has no hysteresis
```

Plain dicts in and out; no framework is imported. A record (`peers()`) says of each tool which of its keys is which of
our settings, and where its checkpoint keeps which counter. `markdown(name)` and `overview()` draw the tables of
`docs/migrating.md` from it, where words say what is done otherwise here, on purpose: mostly the tool's bugs.
"""

from lossscale_core._checkpoint import number_within
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
    "number_within",
    "overview",
    "peers",
    "policy_in",
    "possible_peers",
    "state_from_peer",
    "tables",
    "to_peer",
]
