"""Places a state: on the host, or in any array-API namespace."""

from typing import Any

from lossscale_core._config import as_policy


def init_state(policy: Any, *, xp: Any = None, device: Any = None) -> Any:
    """Return the state before the first step under `policy`, which is anything `as_policy` takes.

    Host scalars by default; with `xp`, arrays of shape `()` in that namespace, on `device`. Does not synchronise.
    """
    state = as_policy(policy).init_state()
    if xp is None:
        return state
    return state._make(xp.asarray(value, dtype=getattr(xp, value.dtype.name), device=device) for value in state)
