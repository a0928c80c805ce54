"""Names of a wrapper that belong to its inner optimizer."""

from typing import Any


def forwarded(name: str, *default: Any) -> Any:
    """Return a property that reads a name of the inner optimizer, and sets it there.

    Args:
        name: The name of an attribute or a method.
        *default: The value to read where the inner optimizer does not have this name; without one, reading raises
            `AttributeError`, as setting does.

    Returns:
        The property. While Keras's constructor runs, before the wrapper has an inner optimizer, it ignores what is set.
    """

    def read(wrapper: Any) -> Any:
        return getattr(vars(wrapper).get("inner_optimizer"), name, *default)

    def write(wrapper: Any, value: Any) -> None:
        inner = vars(wrapper).get("inner_optimizer")
        if inner is not None and not hasattr(inner, name):
            raise AttributeError(f"'{type(inner).__name__}' object has no attribute '{name}'")
        if inner is not None:
            setattr(inner, name, value)

    return property(read, write, doc=f"`{name}` of the inner optimizer.")
