"""Updates that XLA compiles, each once for the variables it is of."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf


class CompiledUpdates:
    """Compiles `update(grads, factor, variables)` with XLA, once for each list of variables."""

    def __init__(self) -> None:
        self._compiled: dict[tuple[int, ...], Callable[..., None]] = {}

    def run(self, update: Callable[..., None], grads: Any, factor: Any, variables: list[Any]) -> None:
        """Run `update`, compiled; raises `ValueError` under a strategy of several replicas."""
        if tf.distribute.get_strategy().num_replicas_in_sync > 1:
            raise ValueError(
                f"{type(tf.distribute.get_strategy()).__name__} updates variables across replicas, where XLA cannot "
                "compile; leave jit_compile=True out"
            )
        key = tuple(map(id, variables))
        if key not in self._compiled:  # what is compiled keeps the variables alive, so that no id comes again

            def of_variables(grads: Any, factor: Any) -> None:
                update(grads, factor, variables)

            self._compiled[key] = tf.function(of_variables, autograph=False, jit_compile=True)
        self._compiled[key](tuple(grads), factor)
