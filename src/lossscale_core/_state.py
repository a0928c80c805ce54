"""The state of loss scaling between two steps: the meaning, dtype and shape of each field."""

from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeAlias

import numpy as np

from lossscale_core._messages import describe
from lossscale_core._settings import LARGEST_COUNT

if TYPE_CHECKING:
    # A default allows `ScaleState` without brackets under `mypy --strict`: https://peps.python.org/pep-0696/.
    # Type checkers include typing_extensions; typing has defaults from Python 3.13 on.
    from typing_extensions import TypeVar

    ArrayT_co = TypeVar("ArrayT_co", covariant=True, default=Any)
    FlagT_co = TypeVar("FlagT_co", covariant=True, default=Any)
    StateT = TypeVar("StateT", default=Any)
else:
    from typing import TypeVar

    ArrayT_co = TypeVar("ArrayT_co", covariant=True)
    FlagT_co = TypeVar("FlagT_co", covariant=True)
    StateT = TypeVar("StateT")

Array: TypeAlias = Any
"""An array or scalar of the framework in use; on the host, an `np.float32` or `np.int32` scalar."""

Namespace: TypeAlias = Any
"""A module or object with the functions of the array API."""

HostScalar: TypeAlias = np.float32 | np.int32
"""A field of a state on the host."""


class ScaleState(NamedTuple, Generic[ArrayT_co]):
    """The loss scale and its counters, each of shape `()`, on the device of the gradients.

    On the host the fields are `np.float32` and `np.int32` scalars, which round like the arrays of every framework. An
    int32 counter that reaches 2**31 - 1 stays there. `ScaleState[jax.Array]` tells a type checker the type of the
    fields; at run time it is the same class.
    """

    loss_scale: ArrayT_co
    """float32: the factor that multiplies the next loss and divides its gradients."""
    growth_tracker: ArrayT_co
    """int32: finite steps in a row that count toward growth; negative while a cooldown lasts."""
    hysteresis_tracker: ArrayT_co
    """int32: overflows left before the scale backs off."""
    steps: ArrayT_co
    """int32: steps so far, applied and skipped."""
    skipped_steps: ArrayT_co
    """int32: steps that overflowed and were skipped."""
    overflow_streak: ArrayT_co
    """int32: overflows in a row; 0 after a finite step."""


def saturating_increment(counter: Array, *, xp: Namespace | None = None) -> Array:
    """Return a counter plus 1; a full counter stays full, because int32 would wrap around.

    Use it in the `update` of your own policy. Does not synchronise with the host.

    Args:
        counter: int32, shape `()`, on the host or in an array of any framework.
        xp: The array namespace of the counter; without it the function needs five operations instead of three.

    Returns:
        The new count, at most 2**31 - 1, with the dtype and on the device of `counter`.
    """
    # 1 is added last, since a full counter plus 1 would wrap around.
    if xp is not None:
        return xp.where(counter < LARGEST_COUNT, counter, LARGEST_COUNT - 1) + 1
    # The quotient is 1 for a full counter, and -2, -1 or 0 for others.
    return counter - (counter // LARGEST_COUNT + 2) // 3 + 1


def loss_scale_of(state: Any, call: str, source: str = "init_state or update") -> Any:
    """Return the loss scale of a state.

    Args:
        state: A state, or any other value.
        call: The right call, for the error, such as `unscale(grads, state)`.
        source: The functions that return a state, for the error.

    Returns:
        The loss scale, on the device of the state.

    Raises:
        TypeError: `state` is not a state.
    """
    try:
        return state.loss_scale
    except AttributeError as error:
        fault = f"state={describe(state)} is not a state, since it has no loss_scale"
        hint = f"a state that {source} returned"
        if hasattr(state, "scale_state"):
            fault, hint = f"the {type(state).__name__} is not a state of a policy, but holds one", "its scale_state"
        raise TypeError(f"{fault}; call {call}, with {hint}") from error


def require_one_state(state: Any, call: str) -> None:
    """Raise `TypeError` if a value is not a state, or holds several states along a leading axis.

    Args:
        state: A state, or any other value.
        call: The right call, for the error, such as `metrics(state)`.
    """
    scale = loss_scale_of(state, call)
    if getattr(scale, "ndim", 0):  # None for a tensor of TensorFlow with an unknown rank
        raise TypeError(
            f"the state has a leading axis of {scale.shape[0]}, like the state of an ensemble under vmap or of "
            f"replicas; call {call} with one member at a time, such as state._make(field[0] for field in state)"
        )


def read(number: Array) -> float:
    """Return a number of a state as a Python float. Synchronises with the host.

    Raises `TypeError` for a traced number, which has no value while a framework compiles a function.
    """
    try:
        return float(number)
    except TypeError as error:
        if getattr(number, "shape", None) != ():
            raise
        raise TypeError(
            f"the state is traced, and a {type(number).__name__} has no value while a function is compiled; call this "
            "outside of it, with the state that it returns"
        ) from error
