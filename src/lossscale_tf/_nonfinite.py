"""The reactions to an update, or to a loss, that is NaN or infinite: `on_nonfinite_update=`, `on_nonfinite_loss=`."""

import functools
import operator
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import keras
import tensorflow as tf

from lossscale_core import (
    OnNonfiniteLoss,
    OnNonfiniteUpdate,
    check_nonfinite_streak,
    init_nonfinite_state,
    nonfinite_update,
)
from lossscale_core.adapters import check_setting
from lossscale_tf._protect import SavedValues
from lossscale_tf._state import StateVariables
from lossscale_tf._verbs import all_replicas, finite_when_unscaled, is_gradient


class Nonfinite:
    """The reactions of one optimizer, and the counters of such steps in variables, if they are needed.

    `state_of` returns the variables of the wrapped optimizer. An update is checked by one read of the parameters and
    these variables after it; a variable that was not finite before a step does not count.
    """

    def __init__(
        self,
        on_update: OnNonfiniteUpdate,
        on_loss: OnNonfiniteLoss,
        state_of: Callable[[], list[Any]],
        make_variable: Callable[[str, Any], tf.Variable],
    ) -> None:
        self.on_update = on_update
        self.on_loss = on_loss
        self._state_of = state_of
        counts = on_update == "skip" or on_loss == "hold"
        start = SimpleNamespace(init_state=init_nonfinite_state)
        self.counters = StateVariables(start, make_variable) if counts else None
        # For "raise": the variables of the steps up to now, and those that were not finite when they were read last.
        self._known: list[tuple[str, tf.Variable]] = []
        self._not_finite: list[tf.Variable] = []

    @classmethod
    def of(cls, on_update: Any, on_loss: Any, *arguments: Any) -> "Nonfinite | None":
        """Return the reactions, or None if both are the defaults; raise `PolicyError` for another value."""
        check_setting("on_nonfinite_update", on_update)
        check_setting("on_nonfinite_loss", on_loss)
        return None if (on_update, on_loss) == ("ignore", "back_off") else cls(on_update, on_loss, *arguments)

    def apply_on_host(self, apply: Callable[[], Any], parameters: list[Any]) -> str | None:
        """Call `apply`, and return the name of the first variable that it made NaN or infinite; "skip" restores all.

        Synchronises with the host.
        """
        if self.on_update == "ignore":
            apply()
            return None
        names, variables = self._written_by_a_step(parameters)
        if self.on_update == "raise":
            self._remember(names, variables)
            apply()
            return self._first_not_finite()
        before = SavedValues(variables, [])
        apply()
        flags = [] if bool(_all_finite(variables)) else _stay_finite(before)
        bad = [name for name, flag in zip(names, flags, strict=False) if not bool(flag)]
        if bool(_on_all_replicas(tf.constant(not bad))):
            return None
        before.restore()
        return bad[0] if bad else "a variable of another worker"

    def apply_in_graph(
        self, accepted: tf.Tensor, apply: Callable[[], tf.Tensor], parameters: list[Any]
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Call `apply` if the step is accepted; return whether it was called, and whether its update was finite.

        "skip" restores everything if it was not. For "raise", `check` reads the variables later.
        """
        names, variables = ([], []) if self.on_update == "ignore" else self._written_by_a_step(parameters)
        if self.on_update == "raise":
            with tf.init_scope():  # leaves the trace, since variables have values only outside of it
                if tf.executing_eagerly():
                    self._remember(names, variables)
        if self.on_update != "skip":
            return tf.cond(accepted, apply, lambda: tf.constant(False)), tf.constant(True)
        before = SavedValues(variables, [])

        def apply_and_check() -> tf.Tensor:
            with tf.control_dependencies([apply()]):
                is_finite = _all_finite(variables)
            return tf.cond(is_finite, lambda: tf.constant(True), lambda: _all(_stay_finite(before)))

        is_finite = _on_all_replicas(tf.cond(accepted, apply_and_check, lambda: tf.constant(True)))
        before.restore_unless(is_finite)
        return accepted, is_finite

    def check_streak(self, policy: Any) -> None:
        """Raise the error of too many such steps in a row. Synchronises with the host."""
        if self.counters is not None:
            check_nonfinite_streak(policy, self.counters.read_on_host())

    def check(self, policy: Any) -> None:
        """Raise the error of a streak or, for "raise", of a variable that has become NaN or infinite. Eager only.

        Synchronises with the host.
        """
        self.check_streak(policy)
        if self.on_update == "raise" and (name := self._first_not_finite()):
            raise nonfinite_update(name)

    def _written_by_a_step(self, parameters: list[Any]) -> tuple[list[str], list[tf.Variable]]:
        """Return the names and variables that a step may write, on every device of this process."""
        strategy = tf.distribute.get_strategy()
        if strategy.num_replicas_in_sync > 1 and not tf.distribute.in_cross_replica_context():
            raise ValueError(
                f"on_nonfinite_update={self.on_update!r} cannot check the replicas of {type(strategy).__name__} "
                "together; leave on_nonfinite_update out"
            )
        names, variables = {}, {}
        for each in (*parameters, *self._state_of()):
            variable = each.value if isinstance(each, keras.Variable) else each
            for part in strategy.experimental_local_results(variable):
                names[id(part)], variables[id(part)] = getattr(each, "path", each.name), part
        return list(names.values()), list(variables.values())

    def _remember(self, names: list[str], variables: list[tf.Variable]) -> None:
        """Note the variables of a step before it; those that are new and not finite will not be reported."""
        known = {id(variable) for _, variable in self._known}
        for name, variable in zip(names, variables, strict=True):
            if id(variable) not in known:
                self._known.append((name, variable))
                if bool(variable.is_initialized()) and not bool(_all_finite([variable])):
                    self._not_finite.append(variable)

    def _first_not_finite(self) -> str | None:
        """Return the name of the first variable that was finite when it was read last, and is not now."""
        before = {id(variable) for variable in self._not_finite}
        if not before and bool(_all_finite([variable for _, variable in self._known])):
            return None
        bad = [(name, variable) for name, variable in self._known if not bool(_all_finite([variable]))]
        self._not_finite = [variable for _, variable in bad]
        return next((name for name, variable in bad if id(variable) not in before), None)


def _all_finite(variables: list[tf.Variable]) -> tf.Tensor:
    """Return whether all variables of floats are finite, each read on its device."""
    by_device: dict[str, list[tf.Tensor]] = {}
    for variable in variables:
        if is_gradient(variable):
            by_device.setdefault(variable.device, []).append(tf.convert_to_tensor(variable))
    flags = []
    for device, values in by_device.items():
        with tf.device(device if len(by_device) > 1 else None):
            flags.append(finite_when_unscaled(values))
    return _all(flags)


def _stay_finite(before: SavedValues) -> list[tf.Tensor]:
    """Return for each variable whether it is finite now, or was not before."""
    flags = []
    for variable, value in before.values:
        if is_gradient(variable):
            with tf.device(variable.device):
                flags.append(finite_when_unscaled([tf.convert_to_tensor(variable)]) | ~finite_when_unscaled([value]))
        else:
            flags.append(tf.constant(True))
    return flags


def _all(flags: list[tf.Tensor]) -> tf.Tensor:
    return functools.reduce(operator.and_, flags, tf.constant(True))


def _on_all_replicas(flag: tf.Tensor) -> tf.Tensor:
    """Return whether `flag`, which is known for all replicas of this process, is true on those of the others, too."""
    if not tf.distribute.in_cross_replica_context():
        return flag
    strategy = tf.distribute.get_strategy()
    combined = strategy.extended.call_for_each_replica(lambda: all_replicas(flag))
    return strategy.experimental_local_results(combined)[0]
