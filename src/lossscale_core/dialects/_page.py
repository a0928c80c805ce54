"""Markdown tables of the records."""

import math
from collections.abc import Iterator
from typing import Any

from lossscale_core._config import policy_to_dict
from lossscale_core.dialects._peers import PAGES, find_page, find_peer
from lossscale_core.dialects._policies import translate
from lossscale_core.dialects._record import REQUIRED, Form, Peer, Saved
from lossscale_core.errors import PolicyError

_EXAMPLES: dict[str, dict[str, Any]] = {
    "jmp": {"loss_scale": 2.0**15},
    "tf-contrib": {"init_loss_scale": 2.0**15, "incr_every_n_steps": 2000},
}
"""Example configs for the tools that have a setting without a default."""


_KEY_BY_KEY = '<a id="key-by-key"></a>The page of each tool lists its keys with their defaults, and its checkpoints.'


def tables(page: str = "") -> str:
    """Return the generated part of a page of the documentation.

    Args:
        page: The name of a file in `docs/migrating/`, such as "megatron"; without it, the overview of all tools.

    Returns:
        A text in Markdown.

    Raises:
        PolicyError: There is no such page.
    """
    if page:
        sections = [f"### {peer.name}\n\n{markdown(peer.name)}\n" for peer in find_page(page)]
        return "\n".join(["\n## Keys and checkpoints\n", *sections])
    without = " and ".join(f"`{name}`" for name in _EXAMPLES)
    note = f"{without} have no default for the first scale; the table shows an example. {_KEY_BY_KEY}"
    return f"\n## Every tool at a glance\n\n{overview()}\n\n{note}\n"


def overview() -> str:
    """Return a table that compares the tools' rules under their own defaults, with a link to the page of each.

    Returns:
        A table in Markdown.
    """
    head = "| | first scale | grows on finite step | by | falls on overflow | by | floor | ceiling |"
    rows = [_defaults(peer, page) for page, tools in PAGES.items() for peer in tools]
    return "\n".join([head, "|---|---|---|---|---|---|---|---|", *rows])


def markdown(name: str) -> str:
    """Return the tables of one tool: its keys and its checkpoints.

    Args:
        name: The name of the tool, one of `peers()`.

    Returns:
        A text in Markdown.

    Raises:
        PolicyError: The tool is unknown.
    """
    peer = find_peer(name, PolicyError)
    parts = [f"{peer.title} ({peer.version})."]
    parts += ["\n".join(_form_table(form)) for form in peer.forms]
    parts += [_saved_table(saved) for saved in peer.saved]
    return "\n\n".join(parts)


def _defaults(peer: Peer, page: str) -> str:
    policy = policy_to_dict(translate(peer, _EXAMPLES.get(peer.name, {}))[0])
    later = policy.get("cooldown", 0)
    grows = f"{policy['growth_interval'] + later}{', then every ' + str(policy['growth_interval']) if later else ''}"
    cells = [
        f'<a id="{peer.name}"></a>[`{peer.name}`](migrating/{page}.md#{peer.name})',
        _scale_text(policy["init_scale"]),
        grows,
        f"{policy['growth_factor']:g}",
        _falls(policy),
        f"{policy['backoff_factor']:g}",
        _scale_text(policy["min_scale"]),
        _scale_text(policy["max_scale"]),
    ]
    return f"| {' | '.join(cells)} |"


def _falls(policy: dict[str, Any]) -> str:
    if policy["kind"] == "tolerant" or policy["hysteresis"] == 1:
        return "each"
    start = "growth" if not policy["refill_on_backoff"] else "a change"
    later = "" if policy["refill_on_backoff"] else ", then each"
    return f"no. {policy['hysteresis']} since {start}{later}"


def _scale_text(value: Any) -> str:
    """Return a number as text, as a power of two if that is shorter."""
    mantissa, exponent = math.frexp(value)
    return f"2**{exponent - 1}" if mantissa == 0.5 and not 0 <= exponent - 1 <= 3 else f"{value:g}"


def _form_table(form: Form) -> Iterator[str]:
    yield f"| {form.title} | default | here |"
    yield "|---|---|---|"
    for key in form.keys:
        names = ", ".join(f"`{name}`" for name in key.names)
        yield f"| {names} | {_default_text(key.default)} | {key.reading.text} |"
    for setting, value in form.settings.items():
        if setting != "kind":
            text = _scale_text(value) if setting in ("min_scale", "max_scale") else str(value)
            yield f"| (always) | {text} | `{setting}` |"


def _default_text(value: Any) -> str:
    if value is REQUIRED:
        return "required"
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return _scale_text(value) if is_number and value >= 2**15 else str(value)


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
