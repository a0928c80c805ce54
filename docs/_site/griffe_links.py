"""A griffe extension that links public names in docstrings to their entries in the reference."""

import re
from pathlib import Path
from typing import Any

import griffe

_REFERENCE = Path(__file__).parents[1] / "reference"
_ENTRIES = [name for page in _REFERENCE.glob("*.md") for name in re.findall(r"^::: (\S+)", page.read_text(), re.M)]
_WITHOUT_FENCES = re.compile(r"(^```.*?^```$)", re.M | re.S)
# Matches `as_policy` and `lossscale_core.metrics`, but not `scale`, which may be the name of a parameter.
_PUBLIC_NAME = re.compile(r"`((?:lossscale_\w+\.)+\w+|(?:\w+\.)*\w*(?:[A-Z]\w*|\w_\w+))`(?!\])")


class DocstringLinks(griffe.Extension):
    """Link each name in backticks to its entry; if several packages have an entry, to the nearest one."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Add the links to a docstring when it is loaded."""
        if obj.docstring is not None:
            parts = _WITHOUT_FENCES.split(obj.docstring.value)
            parts[::2] = [_PUBLIC_NAME.sub(lambda match: _link(match[1], obj.path), part) for part in parts[::2]]
            obj.docstring.value = "".join(parts)


def _link(name: str, path: str) -> str:
    package = path.partition(".")[0]
    candidates = [entry for entry in _ENTRIES if f".{entry}".endswith(f".{name}")]
    near = [entry for entry in candidates if entry.startswith(package)] or [
        entry for entry in candidates if entry.startswith("lossscale_core")
    ]
    return f"[`{name}`][{min(near, key=len)}]" if near else f"`{name}`"
