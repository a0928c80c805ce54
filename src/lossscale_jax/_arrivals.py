"""The gradients that arrive at `unscale` and at `loss_scaled`, for a check that looks at them."""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, TypeAlias

from lossscale_jax._types import PyTree

_Observer: TypeAlias = Callable[[PyTree, Any], None]
_OBSERVER: ContextVar[_Observer | None] = ContextVar("lossscale_jax_observer", default=None)


def show(grads: PyTree, loss_scale: Any) -> None:
    """Pass scaled gradients, and the loss scale by which they will be divided, to the check that runs, if any."""
    observer = _OBSERVER.get()
    if observer is not None:
        observer(grads, loss_scale)


@contextlib.contextmanager
def shown_to(observer: _Observer) -> Iterator[None]:
    """Pass gradients to `observer` within the context."""
    token = _OBSERVER.set(observer)
    try:
        yield
    finally:
        _OBSERVER.reset(token)
