"""Draw the key tables of `docs/migrating.md` from the table of tools: `python docs/_site/migrating_tables.py`."""

import re
from pathlib import Path
from typing import Any

from lossscale.other_tools import table
from lossscale_core.adapters import shown_number, write_whole

PAGE = Path(__file__).parents[1] / "migrating.md"
_DRAWN = re.compile(r"(<!-- keys of (\w+), drawn [^\n]+ -->\n).*?(?=\n#|\Z)", re.DOTALL)


def drawn(text: str) -> str:
    """Return the page with its tables as they should be."""
    return _DRAWN.sub(lambda match: f"{match[1]}{_keys_of(table()[match[2]])}", text)


def _keys_of(tool: dict[str, Any]) -> str:
    others: dict[str, list[str]] = {}
    for other, key in tool.get("names", {}).items():
        others.setdefault(key, []).append(other)
    parts = []
    for keys in filter(None, (tool["keys"], tool.get("more_keys"))):
        rows = [
            f"| {', '.join(f'`{each}`' for each in (key, *others.get(key, ())))} | {_default(default)} | {how} |"
            for key, (how, default) in keys.items()
        ]
        parts.append("\n".join(["", "| key | default | here |", "|---|---|---|", *rows, ""]))
    rule = ", ".join(f"`{name}` {_default(value)}" for name, value in tool["rule"].items())
    saved = ", ".join(f"`{name}`" for name in re.findall(r"\w+", str(_names(tool["saved"]))) if name != "or")
    return "".join(parts) + f"\nAlways: {rule}. In a checkpoint: {saved}. Read from {tool['version']}.\n"


def _names(saved: dict[str, Any]) -> list[Any]:
    return [names for key, names in saved.items() if key != "within"]


def _default(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value).lower()
    return shown_number(value).replace("inf", "none") if value else "none" if isinstance(value, float) else "0"


if __name__ == "__main__":
    write_whole(PAGE, drawn(PAGE.read_text(encoding="utf-8")), overwrite=True)
