"""The slots of a Keras optimizer of any generation: its variables for each trained variable, such as Adam's moments."""

import re
from collections import defaultdict
from typing import Any

import keras


class Slots:
    """The slots of one inner optimizer.

    Legacy optimizers of tf_keras have a method for their slots. Other optimizers only name them: Keras 3 uses
    `<path>_<slot>`, and tf_keras `<slot>/<variable>`. If several variables have the same name, their slots are assigned
    in order. This object stores the slots that `add` has added.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._added: list[tuple[Any, str, Any]] = []

    def weights(self) -> list[Any]:
        """Return the inner optimizer's variables, in the order in which it created them."""
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
        """Return the slots by the id of their variable and the name of the slot, in the order of their creation."""
        owners = defaultdict(list)
        for variable in variables:
            owners[getattr(variable, "path", variable.name)].append(variable)
        groups = defaultdict(list)
        added = {id(slot) for _, _, slot in self._added}
        for slot in self.weights():
            # The longest name first, because the name of a slot of `dense_kernel` also begins with `dense`.
            owner, name = _split_name(slot.name, sorted(owners, key=len, reverse=True))
            if name and id(slot) not in added:
                groups[owner, name].append(slot)
        slots_of_inner = {
            (id(variable), name): slot
            for (owner, name), slots in groups.items()
            for variable, slot in zip(owners[owner], slots, strict=False)
        }
        return slots_of_inner | {(id(variable), name): slot for variable, name, slot in self._added}


def _split_name(slot: str, owners: list[str]) -> tuple[str, str]:
    """Return the owner of a variable named `slot`, and the name of the slot; two empty names without an owner."""
    for owner in owners:
        if slot.endswith(f"/{owner}"):
            return owner, slot.removesuffix(f"/{owner}").rpartition("/")[2]
        # Keras 3 builds the name from the owner in this way:
        # https://github.com/keras-team/keras/blob/v3.15.1/keras/src/optimizers/base_optimizer.py
        prefix = re.sub(r"[/:]", "_", owner) + "_"
        if slot.startswith(prefix):
            return owner, slot.removeprefix(prefix)
    return "", ""
