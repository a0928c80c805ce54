"""A policy's settings in the reference: their defaults as a user writes them."""

from typing import Any

import griffe


class SettingDefaults(griffe.Extension):
    """Show `setting(RULE, default)` as the default."""

    def on_attribute_instance(self, *, attr: griffe.Attribute, **_: Any) -> None:
        """Replace what a dataclass's field is assigned by its default."""
        value = attr.value
        if isinstance(value, griffe.ExprCall) and str(value.function) == "setting":
            attr.value = value.arguments[1] if len(value.arguments) > 1 else None
