"""The names that a wrapper shares with its inner optimizer, and the exceptions."""

from typing import Any

from lossscale_tf.keras._inner import is_keras_3

_CLIPPING = ("clipnorm", "clipvalue", "global_clipnorm")
_AVERAGES = ("ema_momentum", "ema_overwrite_frequency")
SETTINGS: dict[str, Any] = dict.fromkeys([*_CLIPPING, *_AVERAGES, "gradient_accumulation_steps", "weight_decay"])
SETTINGS["use_ema"] = False
"""Settings to read, with defaults for an inner optimizer without them, and for the wrapper's construction."""
_BASE_ARGUMENTS = {**SETTINGS, "ema_momentum": 0.99, "loss_scale_factor": None}
"""Arguments of every Keras optimizer without an effect on a wrapper; Keras 3.0 to 3.11 save them with these values."""
REMEDIES = {
    "loss_scale": "since the policy changes the scale; make the optimizer with another policy, or pass load_state_dict "
    "a state_dict() with another loss_scale",
    "inner_optimizer": "since what is built belongs to the one before; make another LossScaleOptimizer around it, and "
    "pass its load_state_dict this one's state_dict()",
    "initial_scale": "since it is the policy's; make the optimizer with another policy",
}
_HYPERPARAMETERS = {"learning_rate", "lr", "beta_1", "beta_2", "momentum", "rho", "decay"}
READ = {*SETTINGS, "add_weight", "aggregate_gradients", "gradient_aggregator"}
"""Names that are read from the inner optimizer, and that the user must set there: settings, and methods of tf_keras's
optimizers that do not concern scaling."""
NAMES = {*_HYPERPARAMETERS, *READ, *REMEDIES, "dynamic_growth_steps"}
"""All names that Keras's constructor must not set in the wrapper."""


def require_no_base_arguments(arguments: dict[str, Any]) -> None:
    """Raise `ValueError`, in Keras's words, for arguments that belong on the inner optimizer, and for unknown ones."""
    if unknown := [name for name in arguments if name not in _BASE_ARGUMENTS]:
        raise ValueError(f"LossScaleOptimizer does not support arguments: `{'`, `'.join(unknown)}`")
    for name, value in arguments.items():
        if value != _BASE_ARGUMENTS[name]:
            raise ValueError(
                f"LossScaleOptimizer does not support `{name}`. Instead, set `{name}` on the `inner_optimizer`."
            )


def is_hyperparameter(wrapper: Any, name: str) -> bool:
    """Return whether a name is read from and set on the inner optimizer.

    A legacy optimizer keeps hyperparameters, also those of users, in `_hyper`.
    """
    if name in NAMES:
        return name in _HYPERPARAMETERS
    return name in _legacy_hyperparameters(wrapper.inner_optimizer) and not hasattr(type(wrapper), name)


def spelled(name: str) -> str:
    """Return the name that all optimizers have for a hyperparameter."""
    return "learning_rate" if name == "lr" else name


def set_iterations(inner: Any, value: Any) -> None:
    """Set the count of applied steps, which each generation of Keras stores in another way."""
    if is_keras_3(inner):
        # Keras 3 counts micro-batches in it, and divides by their number in a step when it is read:
        # https://github.com/keras-team/keras/blob/v3.15.1/keras/src/optimizers/base_optimizer.py
        inner._iterations.assign(value * (inner.gradient_accumulation_steps or 1))
    else:
        inner.iterations = value


def listed(names: Any, inner: Any) -> list[str]:
    """Return the names for `dir`: the wrapper's own `names`, and those that it reads from `inner`."""
    of_inner = dir(inner)
    shared = {*NAMES, *_legacy_hyperparameters(inner)}
    names = {*names, *SETTINGS, *(name for name in shared if spelled(name) in of_inner)}
    # TensorFlow's checkpoints search every object that lists this name for untracked slots: the inner optimizer's are
    # found there, and would be saved twice.
    return sorted(names - {"get_slot_names"})


def _legacy_hyperparameters(inner: Any) -> Any:
    return vars(inner).get("_hyper", ())


class CallableList(list[Any]):
    """A list that returns itself when it is called, as `variables` of tf_keras's optimizers."""

    def __call__(self) -> "CallableList":
        return self
