"""The updates of an inner optimizer, with gradients that are summed over replicas first."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from lossscale_tf._step import cast_to_variables, summed_over_replicas
from lossscale_tf._verbs import Gradient, unscale_by
from lossscale_tf.keras._inner import apply_summed, own_aggregator


class Updates:
    """The updates of one inner optimizer."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

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
        apply_summed(self._inner, cast_to_variables(grads, variables, factor), variables)
