"""A griffe extension that shows the defaults of a policy's settings as plain values."""

from typing import Any

import griffe


class SettingDefaults(griffe.Extension):
    """Show `setting(RULE, default)` as the default."""

    def on_attribute_instance(self, *, attr: griffe.Attribute, **_: Any) -> None:
        """Replace the call of `setting` in a dataclass field by the default."""
        value = attr.value
        if isinstance(value, griffe.ExprCall) and str(value.function) == "setting":
            attr.value = value.arguments[1] if len(value.arguments) > 1 else None
