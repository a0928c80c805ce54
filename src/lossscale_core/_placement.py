"""The first state of a policy, on the host or in any array-API namespace."""

from typing import Any

from lossscale_core._arrays import Namespace
from lossscale_core._config import PolicyLike, as_policy
from lossscale_core._state import ScaleState


def init_state(policy: PolicyLike, *, xp: Namespace | None = None, device: Any = None) -> ScaleState:
    """Return the state before the first step under `policy`.

    Does not synchronise with the host.

    Args:
        policy: Anything that `as_policy` accepts.
        xp: The array namespace of the state's fields; host scalars if left out.
        device: The device of the arrays, as `xp.asarray` takes it.

    Returns:
        The policy's state, a NamedTuple of float32 and int32 scalars, or of arrays of shape `()`: a `ScaleState`, or
        the type of state that the policy has in its place.

    Raises:
        PolicyError: `policy` is not a policy.
    """
    host: Any = as_policy(policy).init_state()
    state: ScaleState = host
    if xp is not None:
        # The dtype comes from the namespace: torch.asarray, for example, refuses the dtypes of NumPy.
        state = host._make(xp.asarray(value, dtype=getattr(xp, value.dtype.name), device=device) for value in host)
    return state
