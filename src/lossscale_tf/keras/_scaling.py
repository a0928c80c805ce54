"""The scaling of losses and unscaling of gradients in loops around a Keras optimizer, and checks of their calls."""

from contextlib import nullcontext
from typing import Any

import tensorflow as tf

from lossscale_core import BaseScaling
from lossscale_core.errors import CallOrderError
from lossscale_tf._origins import mark_origin, origins
from lossscale_tf._records import Records, StepRecord
from lossscale_tf._step import Step, is_overwritten
from lossscale_tf._verbs import Gradient, Tree, scale_by, times, unscale_by
from lossscale_tf._warning import warn_caller
from lossscale_tf.keras._in_flight import ScaledLosses
from lossscale_tf.keras._inner import require_no_session

_SCALE, _UNSCALE = "get_scaled_loss", "get_unscaled_gradients"


class Scaling:
    """Scales the losses of one optimizer, and finds for each gradient the scale of its own loss.

    `used_scale` is a variable that hands the scale on where gradients are unscaled in another trace than their loss.
    """

    def __init__(self, step: Step, used_scale: tf.Variable) -> None:
        self._step = step
        self._used_scale = used_scale
        self._records = Records()
        self._scaled_losses = ScaledLosses(self._records)
        self._has_warned = False
        with tf.init_scope():
            self._missing_calls = tf.Variable(
                0, trainable=False, dtype=tf.int64, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA
            )

    def scale(self, loss: Tree, by_keras: bool = False) -> Tree:
        """Return the loss scaled; raise `CallOrderError` for a loss that is scaled already."""
        record = self._records.begin(_SCALE, by_keras)
        scaled = self._scaled_losses.scale(loss, self._scale_for(loss, record))
        record.remember(_SCALE, _leaves(scaled))
        return scaled

    def unscale(self, grads: Tree) -> Tree:
        """Return gradients unscaled by the scale of their own loss; raise `CallOrderError` where they are already."""
        record = self._records.unscale()
        record.scaled_by_keras = False  # whoever unscales, scales
        leaves = _leaves(grads)
        if self._are_unscaled(record, leaves):
            raise CallOrderError("these gradients are unscaled already; call get_unscaled_gradients once a step")
        return self._unscaled(grads, self._scale_to_unscale_by(leaves, record), record)

    def differentiate(
        self, loss: Any, var_list: Any, tape: tf.GradientTape | None = None, grad_loss: Any = None
    ) -> list[tuple[Any, Any]]:
        """Return the unscaled gradients of a callable, a tensor computed under `tape`, or a tensor of this graph.

        `var_list` may be a callable, too, and is called last, since the loss may create the variables. The gradients
        come in pairs with them.
        """
        tape = tf.GradientTape() if callable(loss) and tape is None else tape
        # A tape that is closed already is entered again, as by tf_keras: it must record the multiplication, too.
        with tape or nullcontext():
            loss = loss() if callable(loss) else loss
            record = self._records.begin(_SCALE)
            loss_scale = self._scale_for(loss, record)
            scaled = scale_by(loss, loss_scale)
            record.remember(_SCALE, _leaves(scaled))
        variables = tf.nest.flatten(var_list() if callable(var_list) else var_list)
        if tape is None:
            grads = tf.gradients(scaled, variables)
        else:
            grads = tape.gradient(scaled, variables, output_gradients=_like(grad_loss, scaled))
        record.calls.add(_UNSCALE)
        return list(zip(self._unscaled(grads, loss_scale, record), variables, strict=True))

    def gradients(self, loss: Any, variables: Any) -> list[Gradient]:
        """Return the unscaled gradients of a callable or a tensor of this graph, each of which there must be."""
        require_no_session()
        if not callable(loss) and tf.executing_eagerly():
            raise ValueError("an eager tensor has no graph to differentiate; pass a callable, or use a GradientTape")
        pairs = self.differentiate(loss, variables)
        if missing := [variable.name for grad, variable in pairs if grad is None]:
            raise ValueError(f"the loss has no gradient with respect to {', '.join(missing)}")
        return [grad for grad, _ in pairs]

    def to_apply(
        self, grads: list[Gradient], variables: list[Any], may_be_scaled: bool
    ) -> tuple[list[Gradient], tf.Tensor | None]:
        """Return gradients that are about to be applied, and the scale to divide them by; None if they are unscaled.

        `may_be_scaled` says that the caller takes gradients of a scaled loss: then `CallOrderError` is raised if it
        cannot be told whether they are. Other callers are warned, once, of calls that are missing.
        """
        record = self._records.apply(variables)
        if record.scaled_by_keras or (may_be_scaled and self._are_scaled(record)):
            loss_scale: tf.Tensor | None = self._scale_of(grads)
        else:
            self._warn_of_missing_calls(record)
            grads, loss_scale = origins(grads)
        if loss_scale is None and _UNSCALE in record.calls:
            grads = [self._as_overwriting(grad, each) for grad, each in zip(grads, variables, strict=True)]
        return grads, loss_scale

    def updated_in_graph(self, *_: Any) -> None:
        """Note that a traced step updates the scale."""
        self._scaled_losses.updated_in_graph()

    def count_missing(self) -> int:
        """Return how many steps missed scaling or unscaling. Synchronises with the host."""
        return int(self._missing_calls.numpy())

    def _scale_for(self, loss: Any, record: StepRecord) -> tf.Tensor:
        """Return the scale to multiply this loss by, and leave it for gradients that are unscaled in another trace."""
        require_no_session()
        if record.has_returned(_SCALE, _leaves(loss)):
            raise CallOrderError("this loss is scaled already; scale it once a step, or leave it to minimize")
        loss_scale = self._current_scale()
        self._used_scale.assign(loss_scale)
        return loss_scale

    def _scale_to_unscale_by(self, leaves: list[Gradient], record: StepRecord) -> tf.Tensor:
        if not self._records.missing(record, [_SCALE]):
            return self._scale_of(leaves)
        loss_scale = self._scaled_losses.scale_of(leaves, waiting_only=True)  # another thread may have scaled the loss
        if loss_scale is None:
            return self._current_scale()
        record.calls.add(_SCALE)
        return loss_scale

    def _current_scale(self) -> tf.Tensor:
        return tf.convert_to_tensor(self._step.state.loss_scale)

    def _scale_of(self, grads: list[Gradient]) -> tf.Tensor:
        """Return the scale that multiplied the loss of these gradients."""
        loss_scale = self._scaled_losses.scale_of(grads)
        return tf.convert_to_tensor(self._used_scale) if loss_scale is None else loss_scale

    def _unscaled(self, grads: Tree, loss_scale: tf.Tensor, record: StepRecord) -> Tree:
        unscaled = unscale_by(grads, loss_scale)
        for leaf, grad in zip(tf.nest.flatten(unscaled), tf.nest.flatten(grads), strict=True):
            mark_origin(leaf, grad, loss_scale)
        record.remember(_UNSCALE, _leaves(unscaled))
        return unscaled

    def _are_unscaled(self, record: StepRecord, leaves: list[Gradient]) -> bool:
        before = record.returned(_UNSCALE)
        return any(one is other for one in leaves for other in before) or (
            not record.is_applied and self._scaled_losses.made_since(leaves, before)
        )

    def _are_scaled(self, record: StepRecord) -> bool:
        """Return whether the gradients given to Keras 3's entry are of a scaled loss."""
        if self._scales_nothing():
            return False
        missing = self._records.missing(record, [_SCALE, _UNSCALE])
        if missing == [_SCALE, _UNSCALE]:
            raise CallOrderError(
                "apply was given gradients, but this optimizer scaled no loss for them, so that it cannot be told "
                "whether they are scaled; scale the loss by scale_loss, or pass unscaled gradients to apply_gradients"
            )
        return _UNSCALE in missing

    def _warn_of_missing_calls(self, record: StepRecord) -> None:
        """Count a step of a user's loop that misses scaling or unscaling, and warn of the first one."""
        if self._scales_nothing():
            return
        missing = self._records.missing(record, [_SCALE, _UNSCALE])
        if not missing:
            return
        self._missing_calls.assign_add(1)  # where a traced step runs, not only where it is traced
        if not self._has_warned:
            self._has_warned = True
            warn_caller(
                f"{' and '.join(missing)} not called before apply_gradients; call get_scaled_loss before the tape's "
                "gradient and get_unscaled_gradients after it, each once a step, or use minimize"
            )

    def _scales_nothing(self) -> bool:
        return not BaseScaling.of(self._step.policy).scales_losses

    def _as_overwriting(self, grad: Gradient, variable: Any) -> Gradient:
        """Return a new value of a variable as it was before it was divided by the loss scale, like a gradient."""
        return times(grad, self._used_scale) if is_overwritten(variable) else grad


def _leaves(tree: Any) -> list[Gradient]:
    return [leaf for leaf in tf.nest.flatten(tree) if isinstance(leaf, tf.Tensor | tf.IndexedSlices)]


def _like(grad_loss: Any, scaled: Any) -> Any:
    """Return the gradient of a loss in the dtype of the scaled loss, which is wider than that of half losses."""
    if grad_loss is None:
        return None
    return tf.nest.map_structure(lambda grad, loss: tf.cast(grad, loss.dtype), grad_loss, scaled)
