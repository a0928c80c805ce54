"""The scaling of losses and unscaling of gradients around a Keras optimizer, and checks of their calls."""

from contextlib import nullcontext
from typing import Any

import tensorflow as tf

from lossscale_core import BaseScaling
from lossscale_core.errors import CallOrderError
from lossscale_tf._calls import Calls, Record, mark_gradient, mark_loss, origins
from lossscale_tf._step import Step, is_overwritten
from lossscale_tf._verbs import Gradient, Tree, is_gradient, scale_by, times, unconverted, unscale_by
from lossscale_tf._warning import warn_caller
from lossscale_tf.keras._inner import as_tensorflow, require_no_session


class Scaling:
    """The scaling of one optimizer's losses, and the division of gradients by the scale of their own loss.

    `used_scale` is a variable that passes the scale to another trace, if gradients are unscaled there.
    """

    def __init__(self, step: Step, used_scale: tf.Variable) -> None:
        self._step = step
        self._used_scale = used_scale
        self._calls = Calls()
        self._updates = 0
        self._has_warned = False
        with tf.init_scope():
            self._missing_calls = tf.Variable(
                0, trainable=False, dtype=tf.int64, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA
            )

    @unconverted
    def scale(self, loss: Tree, by_keras: bool = False) -> Tree:
        """Return the scaled loss.

        Raises `CallOrderError` if the loss is scaled already, or if gradients of a loss with another scale were not
        applied yet.
        """
        require_no_session()
        scaled, loss_scale = self._scaled(loss)
        record = self._calls.scale(loss_scale, self._updates, by_keras)
        self._used_scale.assign(loss_scale)
        for leaf in tf.nest.flatten(scaled):
            mark_loss(leaf, record)
        return scaled

    def unscale(self, grads: Tree) -> Tree:
        """Return gradients unscaled by the scale of their own loss; raise `CallOrderError` if they already are."""
        leaves = tf.nest.flatten(grads)
        for leaf in leaves:
            found = self._calls.mark_of(leaf)
            if found is not None and found.kind == "unscaled":
                self._calls.forget_here()
                raise CallOrderError("these gradients are unscaled already; call get_unscaled_gradients once a step")
        record = self._calls.unscale(leaves)
        return self._unscaled(grads, self._scale_of(record), record)

    def differentiate(
        self, loss: Any, var_list: Any, tape: tf.GradientTape | None = None, grad_loss: Any = None
    ) -> list[tuple[Any, Any]]:
        """Return the unscaled gradients of a callable, a tensor computed under `tape`, or a tensor of this graph.

        `var_list` may be a callable, too, and is called last, since the loss may create the variables. The result is
        (gradient, variable) pairs.
        """
        require_no_session()
        tape = tf.GradientTape() if callable(loss) and tape is None else tape
        # A tape that is closed already is entered again, as in tf_keras, since it must record the multiplication, too.
        with tape or nullcontext():
            value = loss() if callable(loss) else loss
            scaled, loss_scale = self._scaled(value)
        variables = tf.nest.flatten(var_list() if callable(var_list) else var_list)
        if tape is None:
            grads = tf.gradients(scaled, variables)
        else:
            grads = tape.gradient(scaled, variables, output_gradients=_like(grad_loss, scaled))
        record = self._calls.scale_and_unscale(loss_scale, as_tensorflow(variables))
        unscaled = self._unscaled(grads, loss_scale, record)
        return list(zip(unscaled, variables, strict=True))

    def gradients(self, loss: Any, variables: Any) -> list[Gradient]:
        """Return the unscaled gradients of a callable or a tensor of this graph; raise `ValueError` if one is None."""
        if not callable(loss) and tf.executing_eagerly():
            raise ValueError("an eager tensor has no graph to differentiate; pass a callable, or use a GradientTape")
        pairs = self.differentiate(loss, variables)
        if missing := [variable.name for grad, variable in pairs if grad is None]:
            raise ValueError(f"the loss has no gradient with respect to {', '.join(missing)}")
        return [grad for grad, _ in pairs]

    def to_apply(
        self, grads: list[Gradient], variables: list[Any], may_be_scaled: bool
    ) -> tuple[list[Gradient], tf.Tensor | None]:
        """Return gradients that are about to be applied, and their scale; None if they are unscaled.

        `may_be_scaled` says that the caller accepts gradients of a scaled loss; `CallOrderError` is raised if it is
        unknown whether they are scaled. For other callers, missing calls cause one warning.
        """
        marks = [self._calls.mark_of(grad) for grad in grads]
        records = {each.record for each in marks if each is not None and each.kind == "unscaled"}
        for record in records:
            record.apply(as_tensorflow(variables))
        are_as_before = not records and None not in marks  # unscaled for another purpose, such as their norm
        if not records:
            record = self._calls.apply(as_tensorflow(variables), grads)
            if self._are_scaled(record, may_be_scaled, are_as_before):
                record = self._calls.of(grads, record)
                return grads, self._scale_of(record)
        self._warn_of_missing_calls(record, are_as_before)
        if record.is_unscaled and any(map(is_overwritten, variables)):  # new values were divided, too
            factor = self._scale_of(record)
            pairs = zip(grads, variables, strict=True)
            return [times(grad, factor) if is_overwritten(each) else grad for grad, each in pairs], None
        return origins(grads)

    def updated_in_graph(self, *_: Any) -> None:
        """Note that a traced step updates the scale, so that losses after it may have another scale."""
        self._updates += 1

    def forget(self) -> None:
        """Drop the records of losses that eager code has scaled, as after another state is loaded."""
        self._calls.forget_eager()

    def count_missing(self) -> int:
        """Return how many steps missed scaling or unscaling. Synchronises with the host."""
        return int(self._missing_calls.numpy())

    @unconverted
    def _scaled(self, loss: Tree) -> tuple[Tree, tf.Tensor]:
        """Return the scaled loss and the current scale; raise `CallOrderError` if the loss is scaled already."""
        for leaf in tf.nest.flatten(loss):
            found = self._calls.mark_of(leaf)
            if found is not None and found.kind == "loss":
                self._calls.forget_here()
                raise CallOrderError("this loss is scaled already; scale it once a step, or leave it to minimize")
        loss_scale = tf.convert_to_tensor(self._step.state.loss_scale)
        return scale_by(loss, loss_scale), loss_scale

    def _scale_of(self, record: Record) -> tf.Tensor:
        """Return the scale of a record; for a record from another graph or thread, the last scale that was used."""
        loss_scale = record.loss_scale()
        if loss_scale is not None:
            return loss_scale
        used = tf.convert_to_tensor(self._used_scale)
        return tf.where(used > 0.0, used, tf.convert_to_tensor(self._step.state.loss_scale))  # none was used yet

    @unconverted
    def _unscaled(self, grads: Tree, loss_scale: tf.Tensor, record: Record) -> Tree:
        unscaled = unscale_by(grads, loss_scale)
        for leaf, grad in zip(tf.nest.flatten(unscaled), tf.nest.flatten(grads), strict=True):
            if is_gradient(leaf):
                mark_gradient(leaf, record, grad, loss_scale)
        return unscaled

    def _are_scaled(self, record: Record, may_be_scaled: bool, are_as_before: bool) -> bool:
        """Return whether gradients are still scaled: Keras scaled the loss, or Keras 3 called `apply`."""
        if record.by_keras:
            return are_as_before or not record.is_unscaled
        if not may_be_scaled or self._scales_nothing():
            return False
        no_loss_scaled, not_unscaled = self._calls.is_missing(record)
        if no_loss_scaled and not_unscaled:
            raise CallOrderError(
                "apply was given gradients, but this optimizer scaled no loss for them, so that it is unknown "
                "whether they are scaled; scale the loss by scale_loss, or pass unscaled gradients to apply_gradients"
            )
        return are_as_before or not_unscaled

    def _warn_of_missing_calls(self, record: Record, are_as_before: bool) -> None:
        """Count a step of a user's loop that misses scaling or unscaling, and warn of the first one."""
        no_loss_scaled, not_unscaled = self._calls.is_missing(record)
        missing = no_loss_scaled, not_unscaled or are_as_before
        if not any(missing) or self._scales_nothing():
            return
        self._missing_calls.assign_add(1)  # when a traced step runs, not only when it is traced
        if not self._has_warned:
            self._has_warned = True
            names = zip(missing, ("get_scaled_loss", "get_unscaled_gradients"), strict=True)
            warn_caller(
                f"{' and '.join(name for is_missing, name in names if is_missing)} not called before apply_gradients; "
                "call get_scaled_loss before the tape's gradient and get_unscaled_gradients after it, each once a "
                "step, or use minimize"
            )

    def _scales_nothing(self) -> bool:
        return not BaseScaling.of(self._step.policy).scales_losses


def _like(grad_loss: Any, scaled: Any) -> Any:
    """Return the gradient of a loss in the dtype of the scaled loss, which is wider than that of half losses."""
    if grad_loss is None:
        return None
    return tf.nest.map_structure(lambda grad, loss: tf.cast(grad, loss.dtype), grad_loss, scaled)
