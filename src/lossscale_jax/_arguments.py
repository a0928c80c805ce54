"""Arguments in the wrong place: one sentence that says what belongs there."""

from typing import Any

from lossscale_jax._types import HasLossScale


def loss_scale_of(state: HasLossScale, call: str) -> Any:
    """Return the loss scale of `state`; raise `TypeError` that shows the `call` where it is something else."""
    # The optimizer state of `loss_scaled` has none, but says by itself where its scale state is.
    if hasattr(state, "loss_scale") or hasattr(state, "scale_state"):
        return state.loss_scale
    raise TypeError(
        f"{type(state).__name__} is not a scale state, since it has no loss_scale; call {call}, with a state that "
        "init_state or get_scale_state returned"
    )


def require_function(fun: Any, call: str) -> None:
    """Raise `TypeError` that shows the `call` where `fun` is not a function."""
    if not callable(fun):
        raise TypeError(f"fun is a {type(fun).__name__} and must be a function that returns the loss; call {call}")


def require_optimizer(inner: Any) -> None:
    """Raise `TypeError` where `inner` is not an optimizer that has been made."""
    if isinstance(inner, type) or not (hasattr(inner, "init") and hasattr(inner, "update")):
        raise TypeError(
            f"inner={inner!r} must be an optimizer with init and update; pass one that is made, such as "
            "optax.adamw(1e-3), and the policy after it"
        )
