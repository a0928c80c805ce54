"""The observer that `check_train_step` sets, which receives the scaled gradients of `unscale` and `loss_scaled`."""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, TypeAlias

from lossscale_jax._types import PyTree

_Observer: TypeAlias = Callable[[PyTree, Any], None]
_OBSERVER: ContextVar[_Observer | None] = ContextVar("lossscale_jax_observer", default=None)


def pass_to_observer(grads: PyTree, loss_scale: Any) -> None:
    """Pass scaled gradients, and the loss scale that will divide them, to the observer, if one is set."""
    observer = _OBSERVER.get()
    if observer is not None:
        observer(grads, loss_scale)


@contextlib.contextmanager
def observed_by(observer: _Observer) -> Iterator[None]:
    """Set the observer within the context."""
    token = _OBSERVER.set(observer)
    try:
        yield
    finally:
        _OBSERVER.reset(token)
