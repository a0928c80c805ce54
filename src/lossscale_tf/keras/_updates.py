"""The updates of an inner optimizer, with gradients that are summed over replicas first."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from lossscale_tf._step import cast_to_variables, summed_over_replicas
from lossscale_tf._verbs import Gradient, unscale_by
from lossscale_tf.keras._inner import apply_summed, own_aggregator


class Updates:
    """The updates of one inner optimizer; XLA compiles them if `is_compiled`."""

    def __init__(self, inner: Any, is_compiled: bool) -> None:
        self._inner = inner
        self.is_compiled = is_compiled
        self._compiled: dict[tuple[int, ...], Callable[..., None]] = {}

    def summed(
        self, grads: list[Gradient], variables: list[Any], loss_scale: tf.Tensor | None
    ) -> tuple[list[Gradient], tf.Tensor | None]:
        """Return gradients summed over replicas, and their remaining scale."""
        aggregate = own_aggregator(self._inner)
        if aggregate is None:
            return summed_over_replicas(grads), loss_scale
        return aggregate(grads if loss_scale is None else unscale_by(grads, loss_scale), variables), None

    def run(self, grads: Sequence[Gradient], factor: tf.Tensor | None, variables: list[Any]) -> None:
        """Apply gradients times `factor`, if it is not None, in the variables' dtypes."""
        if self.is_compiled:
            self._compiled_for(variables)(tuple(grads), factor)
        else:
            apply_summed(self._inner, cast_to_variables(grads, variables, factor), variables)

    def forget_compiled(self) -> None:
        """Discard compiled updates, which contain the old values of hyperparameters."""
        self._compiled = {}

    def _compiled_for(self, variables: list[Any]) -> Callable[..., None]:
        """Return the update of these variables, compiled; raise `ValueError` under several replicas."""
        if tf.distribute.get_strategy().num_replicas_in_sync > 1:
            raise ValueError(
                f"{type(tf.distribute.get_strategy()).__name__} updates variables across replicas, where XLA cannot "
                "compile; leave jit_compile=True out"
            )
        key = tuple(map(id, variables))
        if key not in self._compiled:  # the compiled update keeps the variables alive, so that their ids stay unique

            def update(grads: Any, factor: Any) -> None:
                apply_summed(self._inner, cast_to_variables(grads, variables, factor), variables)

            self._compiled[key] = tf.function(update, autograph=False, jit_compile=True)
        return self._compiled[key]
