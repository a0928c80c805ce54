"""The library's own kinds of policies; a config of another tool is always read as one of them."""

import dataclasses

from lossscale_core import DynamicScaling, FixedScaling, NoScaling

_KINDS = {kind.kind: kind for kind in (NoScaling, FixedScaling, DynamicScaling)}


def adapts(kind: str) -> bool:
    """Return whether a policy of this kind changes its loss scale."""
    return _KINDS[kind].adapts


def settings_of(kind: str) -> list[str]:
    """Return the names of the settings of this kind."""
    return [field.name for field in dataclasses.fields(_KINDS[kind])]


SETTINGS = {name for kind in _KINDS for name in settings_of(kind)}
"""The names of the settings of all kinds."""
