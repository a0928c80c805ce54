"""Links in the reference: a public name in a docstring leads to its own entry."""

import re
from pathlib import Path
from typing import Any

import griffe

_REFERENCE = Path(__file__).parents[1] / "reference"
_ENTRIES = [name for page in _REFERENCE.glob("*.md") for name in re.findall(r"^::: (\S+)", page.read_text(), re.M)]
_WITHOUT_FENCES = re.compile(r"(^```.*?^```$)", re.M | re.S)
# `as_policy` and `lossscale_core.metrics`, but not `scale`: that may be a parameter.
_TELLING = re.compile(r"`((?:lossscale_\w+\.)+\w+|(?:\w+\.)*\w*(?:[A-Z]\w*|\w_\w+))`(?!\])")


class DocstringLinks(griffe.Extension):
    """Make a link of each name in backticks that the reference has an entry for, the nearest if several have it."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite a docstring as it is loaded."""
        if obj.docstring is not None:
            parts = _WITHOUT_FENCES.split(obj.docstring.value)
            parts[::2] = [_TELLING.sub(lambda match: _linked(match[1], obj.path), part) for part in parts[::2]]
            obj.docstring.value = "".join(parts)


def _linked(name: str, path: str) -> str:
    package = path.partition(".")[0]
    candidates = [entry for entry in _ENTRIES if f".{entry}".endswith(f".{name}")]
    near = [entry for entry in candidates if entry.startswith(package)] or [
        entry for entry in candidates if entry.startswith("lossscale_core")
    ]
    return f"[`{name}`][{min(near, key=len)}]" if near else f"`{name}`"
