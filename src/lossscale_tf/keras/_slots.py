"""The slots and weights of a Keras optimizer of any generation, found by their names if it does not list them."""

import re
from collections import defaultdict
from typing import Any

import keras


class Slots:
    """The slots of one inner optimizer.

    Legacy optimizers of tf_keras have slots of TensorFlow's own kind. Of the others, Keras 3 names a slot
    `<path>_<slot>`, and tf_keras `<slot>/<variable>`. If several variables have the same name, their slots are assigned
    in order. Slots that were added one by one are stored here.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._added: list[tuple[Any, str, Any]] = []

    def weights(self) -> list[Any]:
        """Return the inner optimizer's variables, in the order in which they were made."""
        return list(self._inner.weights if hasattr(self._inner, "_create_slots") else self._inner.variables)

    def add(self, variable: Any, name: str, initializer: Any) -> Any:
        """Add a slot for `variable`, and return its variable."""
        if hasattr(self._inner, "add_slot"):
            return self._inner.add_slot(variable, name, initializer)
        if isinstance(self._inner, keras.optimizers.Optimizer):
            slot = self._inner.add_variable_from_reference(variable, name, initializer=initializer)
        else:
            value = keras.initializers.get(initializer)(variable.shape, variable.dtype)
            slot = self._inner.add_variable_from_reference(variable, name, initial_value=value)
        self._added.append((variable, name, slot))
        return slot

    def names(self, variables: list[Any]) -> list[str]:
        """Return the names of the slots of `variables`."""
        if hasattr(self._inner, "get_slot_names"):
            return list(self._inner.get_slot_names())
        return list(dict.fromkeys(name for _, name in self._find(variables)))

    def get(self, variable: Any, name: str, variables: list[Any]) -> Any:
        """Return the slot of one of `variables`, or None."""
        if not hasattr(self._inner, "get_slot"):
            return self._find(variables).get((id(variable), name))
        try:
            return self._inner.get_slot(variable, name)
        except KeyError:  # tf_keras raises it if the slot does not exist
            return None

    def _find(self, variables: list[Any]) -> dict[tuple[int, str], Any]:
        """Return the slots by the id of their variable and their own name, in the order in which they were made."""
        owners = defaultdict(list)
        for variable in variables:
            owners[getattr(variable, "path", variable.name)].append(variable)
        alike = defaultdict(list)
        added = {id(slot) for _, _, slot in self._added}
        for slot in self.weights():
            # The longest name first: the name of a slot of `dense_kernel` also begins with `dense`.
            owner, name = _parts(slot.name, sorted(owners, key=len, reverse=True))
            if name and id(slot) not in added:
                alike[owner, name].append(slot)
        found = {
            (id(variable), name): slot
            for (owner, name), slots in alike.items()
            for variable, slot in zip(owners[owner], slots, strict=False)
        }
        return found | {(id(variable), name): slot for variable, name, slot in self._added}


def _parts(slot: str, owners: list[str]) -> tuple[str, str]:
    """Return the owner of a variable of this name and the slot's name there; an empty one if it has no owner."""
    for owner in owners:
        if slot.endswith(f"/{owner}"):
            return owner, slot.removesuffix(f"/{owner}").rpartition("/")[2]
        # Keras 3 builds the name from the owner in this way:
        # https://github.com/keras-team/keras/blob/v3.15.1/keras/src/optimizers/base_optimizer.py
        prefix = re.sub(r"[/:]", "_", owner) + "_"
        if slot.startswith(prefix):
            return owner, slot.removeprefix(prefix)
    return "", ""
