"""Which of an optimizer's variables are slots, and whose: told by their names, where the optimizer does not tell."""

import re
from collections import defaultdict
from typing import Any


class Slots:
    """Finds the slots of an optimizer of Keras 3, or of a new one of tf_keras, by their variable and name.

    Keras 3 names a slot `<path>_<slot>`, tf_keras `<slot>/<variable>`. Of several variables with one name the first has
    the first of their slots; those that were added one by one are remembered.
    """

    def __init__(self) -> None:
        self._added: list[tuple[Any, str, Any]] = []

    def add(self, variable: Any, name: str, slot: Any) -> None:
        """Remember a slot that was added for `variable`."""
        self._added.append((variable, name, slot))

    def find(self, optimizer_variables: list[Any], variables: list[Any]) -> dict[tuple[int, str], Any]:
        """Return the slots by the id of their variable and their own name, in the order in which they were made."""
        owners = defaultdict(list)
        for variable in variables:
            owners[getattr(variable, "path", variable.name)].append(variable)
        alike = defaultdict(list)
        added = {id(slot) for _, _, slot in self._added}
        for slot in optimizer_variables:
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
    """Return whose slot a variable of this name is and its name there; an empty one if it is nobody's."""
    for owner in owners:
        if slot.endswith(f"/{owner}"):
            return owner, slot.removesuffix(f"/{owner}").rpartition("/")[2]
        prefix = re.sub(r"[/:]", "_", owner) + "_"
        if slot.startswith(prefix):
            return owner, slot.removeprefix(prefix)
    return "", ""
