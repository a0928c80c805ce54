"""Write the table of settings in `docs/migrating.md` from the table of tools; run this file to update the page."""

import re
from pathlib import Path
from typing import Any

from lossscale.other_tools import table
from lossscale_core.adapters import format_number
from lossscale_core.files import write_whole

PAGE = Path(__file__).parents[1] / "migrating.md"
_DRAWN = re.compile(r"(<!-- drawn by docs/_site/migrating_tables.py -->\n).*", re.DOTALL)
_HEADER = "| tool | keys with defaults: the setting here | always | in a checkpoint |\n|---|---|---|---|"


def drawn(text: str) -> str:
    """Return the text of the page with an up-to-date table."""
    rows = "\n".join(_row(name, tool) for name, tool in table().items())
    return _DRAWN.sub(lambda match: f"{match[1]}\n{_HEADER}\n{rows}\n", text)


def _row(name: str, tool: dict[str, Any]) -> str:
    others: dict[str, list[str]] = {}
    for other, key in tool.get("names", {}).items():
        others.setdefault(key, []).append(f"`{other}`")
    forms = "<br><br>".join(
        "<br>".join(
            ", ".join([*others.get(key, ()), f"`{key}{_default(default)}`{f': {how}' if how != key else ''}"])
            for key, (how, default) in keys.items()
        )
        for keys in filter(None, (tool["keys"], tool.get("more_keys")))
    )
    entries = (name for name in re.findall(r"\w+", str(_names(tool["saved"]))) if name != "or")
    in_checkpoint = "<br>".join(f"`{name}`" for name in entries)
    rule = "<br>".join(f"`{setting}{_default(value)}`" for setting, value in tool["rule"].items())
    return f"| `{name}`: {tool['version']} | {forms} | {rule} | {in_checkpoint} |"


def _names(checkpoint: dict[str, Any]) -> list[Any]:
    return [names for key, names in checkpoint.items() if key != "within"]


def _default(value: Any) -> str:
    if value == "required":
        return ""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return f"={str(value).lower()}"
    return "=" + (format_number(value).replace("inf", "none") if value else "none" if isinstance(value, float) else "0")


if __name__ == "__main__":
    write_whole(PAGE, drawn(PAGE.read_text(encoding="utf-8")), overwrite=True)
