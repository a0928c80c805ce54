"""Draw the tables of `docs/migrating.md` and `docs/migrating/`: `python docs/_site/migrating_tables.py`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lossscale.dialects import from_tool
from lossscale.dialects._record import Form, Saved, Tool
from lossscale.dialects._tools import PAGES
from lossscale_core import policy_to_dict
from lossscale_core.adapters import shown_number, write_whole

DOCS = Path(__file__).parents[1]
MARK = "<!-- drawn by python docs/_site/migrating_tables.py -->\n"
_EXAMPLES: dict[str, dict[str, Any]] = {
    "jmp": {"loss_scale": 2.0**15},
}
"""An example config for the tool that has a setting without a default."""


_KEY_BY_KEY = '<a id="key-by-key"></a>The page of each tool lists its keys with their defaults, and its checkpoints.'


def tables(page: str = "") -> str:
    """Return the drawn part of a page in `docs/migrating/`, such as "megatron", or of the overview of all tools."""
    if page:
        sections = [f"### {tool.name}\n\n{_tables_of(tool)}\n" for tool in PAGES[page]]
        return "\n".join(["\n## Keys and checkpoints\n", *sections])
    note = f"`jmp` has no default for the first scale; the table shows an example. {_KEY_BY_KEY}"
    return f"\n## Every tool at a glance\n\n{_overview()}\n\n{note}\n"


def draw(path: Path, text: str) -> None:
    """Replace what stands below the mark."""
    write_whole(path, path.read_text(encoding="utf-8").partition(MARK)[0] + MARK + text, overwrite=True)


def _overview() -> str:
    """Return a table that compares the tools' rules under their own defaults, with a link to the page of each."""
    head = "| | first scale | grows on finite step | by | falls on overflow | by | floor | ceiling |"
    rows = [_defaults(tool, page) for page, tools in PAGES.items() for tool in tools]
    return "\n".join([head, "|---|---|---|---|---|---|---|---|", *rows])


def _tables_of(tool: Tool) -> str:
    """Return the tables of one tool: its keys and its checkpoints."""
    parts = [f"{tool.title} ({tool.version})."]
    parts += ["\n".join(_form_table(form)) for form in tool.forms]
    parts += [_saved_table(saved) for saved in tool.saved]
    return "\n\n".join(parts)


def _defaults(tool: Tool, page: str) -> str:
    policy = policy_to_dict(from_tool(tool.name, _EXAMPLES.get(tool.name, {}), warn=False))
    later = policy.get("cooldown", 0)
    grows = f"{policy['growth_interval'] + later}{', then every ' + str(policy['growth_interval']) if later else ''}"
    cells = [
        f'<a id="{tool.name}"></a>[`{tool.name}`](migrating/{page}.md#{tool.name})',
        shown_number(policy["init_scale"]),
        grows,
        f"{policy['growth_factor']:g}",
        _falls(policy),
        f"{policy['backoff_factor']:g}",
        shown_number(policy["min_scale"]),
        shown_number(policy["max_scale"]),
    ]
    return f"| {' | '.join(cells)} |"


def _falls(policy: dict[str, Any]) -> str:
    if policy["hysteresis"] == 1:
        return "each"
    start = "growth" if not policy["refill_on_backoff"] else "a change"
    later = "" if policy["refill_on_backoff"] else ", then each"
    return f"no. {policy['hysteresis']} since {start}{later}"


def _form_table(form: Form) -> Iterator[str]:
    yield f"| {form.title} | default | here |"
    yield "|---|---|---|"
    for key in form.keys:
        names = ", ".join(f"`{name}`" for name in key.names)
        yield f"| {names} | {_default_text(key.default)} | {key.reading.text} |"
    for setting, value in form.settings.items():
        if setting != "kind":
            text = shown_number(value) if setting in ("min_scale", "max_scale") else str(value)
            yield f"| (always) | {text} | `{setting}` |"


def _default_text(value: Any) -> str:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return shown_number(value) if is_number and value >= 2**15 else str(value)


def _saved_table(saved: Saved) -> str:
    head = [f"| {saved.title} | here |", "|---|---|", f"| {_names(saved.scale)} | `loss_scale` |"]
    return "\n".join([*head, *_counter_rows(saved)])


def _counter_rows(saved: Saved) -> Iterator[str]:
    for field, counter in saved.counters.items():
        names = ", ".join(_names(names) for names in counter.names)
        how = "" if counter.text == "the same" else f" = {counter.text}"
        yield f"| {names}{' (if there)' if counter.optional else ''} | `{field}`{how} |"


def _names(names: tuple[str, ...]) -> str:
    return " or ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    draw(DOCS / "migrating.md", tables())
    for name in PAGES:
        draw(DOCS / f"migrating/{name}.md", tables(name))
