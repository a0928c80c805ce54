"""Properties of a wrapper that read and set attributes of its inner optimizer."""

from typing import Any


def forwarded(name: str, *default: Any) -> Any:
    """Return a property that reads and sets an attribute of the inner optimizer.

    Args:
        name: The name of an attribute or a method.
        *default: The value to return if the inner optimizer does not have this attribute. Without a default, reading
            raises `AttributeError`. Setting an attribute that does not exist always raises it.

    Returns:
        The property. Keras's constructor sets such attributes before the wrapper has an inner optimizer. The property
            ignores these values.
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
