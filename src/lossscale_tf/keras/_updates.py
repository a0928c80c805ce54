"""The updates of an inner optimizer by gradients that are scaled or not, summed over replicas or not."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from lossscale_tf._step import Step, fitted, outside_of_replicas, summed_over_replicas
from lossscale_tf._verbs import Gradient, unscale_by
from lossscale_tf.keras._compiled import CompiledUpdates
from lossscale_tf.keras._inner import apply_summed, summed_by_its_own_function
from lossscale_tf.keras._scaling import Scaling


class Updates:
    """Takes the steps of one inner optimizer, whose update XLA compiles if `is_compiled`."""

    def __init__(self, inner: Any, step: Step, scaling: Scaling, is_compiled: bool) -> None:
        self._inner, self._step, self._scaling = inner, step, scaling
        self.is_compiled = is_compiled
        self._compiled = CompiledUpdates()

    def take(self, pairs: list[tuple[Gradient, Any]], is_summed: bool, may_be_scaled: bool) -> None:
        """Take a step by (gradient, variable) pairs; see `Scaling.to_apply` for what `may_be_scaled` says."""
        if not self._step.has_begun:
            outside_of_replicas(self._warn_if_resumed)
        variables = [variable for _, variable in pairs]
        grads, loss_scale = self._scaling.to_apply([grad for grad, _ in pairs], variables, may_be_scaled)
        if not is_summed:
            grads, loss_scale = self._summed(grads, variables, loss_scale)
        self._step.take(grads, variables, loss_scale, self._run, self._scaling.updated_in_graph)

    def forget_compiled(self) -> None:
        """Compile again from now on, since compiled updates hold the old values of hyperparameters."""
        self._compiled = CompiledUpdates()

    def _warn_if_resumed(self) -> None:
        with tf.init_scope():  # from within a trace, to where variables have values
            if tf.executing_eagerly():
                self._step.warn_if_resumed(self._inner.iterations)

    def _summed(
        self, grads: list[Gradient], variables: list[Any], loss_scale: tf.Tensor | None
    ) -> tuple[list[Gradient], tf.Tensor | None]:
        """Return gradients summed over replicas, and their scale; a function of the user's sums unscaled ones."""
        unscaled = grads if loss_scale is None else unscale_by(grads, loss_scale)
        summed = summed_by_its_own_function(self._inner, unscaled, variables)
        return (summed_over_replicas(grads), loss_scale) if summed is None else (summed, None)

    def _run(self, grads: Sequence[Gradient], factor: tf.Tensor | None, variables: list[Any]) -> None:
        if self.is_compiled:
            self._compiled.run(self._update, grads, factor, variables)
        else:
            self._update(grads, factor, variables)

    def _update(self, grads: Sequence[Gradient], factor: tf.Tensor | None, variables: list[Any]) -> None:
        """Apply gradients times `factor`, if there is one, in the variables' dtypes."""
        apply_summed(self._inner, fitted(grads, variables, factor), variables)
