"""The records of all tools by name; each tool is a module that ends in its `PEERS` and is listed in `_TOOLS`."""

import difflib
from typing import Any

from lossscale_core.dialects import (
    _apex,
    _colossalai,
    _deepspeed,
    _fairseq,
    _flax,
    _jmp,
    _keras,
    _megatron,
    _mindspore,
    _paddle,
    _tensorflow,
    _torch,
)
from lossscale_core.dialects._record import Peer
from lossscale_core.errors import PolicyError
from lossscale_core.messages import shown

# Static imports, so that tools such as PyInstaller find the modules. Of tools that save the same names, the first is
# guessed.
_TOOLS: tuple[Any, ...] = (
    *(_torch, _apex, _deepspeed, _megatron, _fairseq, _colossalai),
    *(_keras, _tensorflow, _jmp, _flax, _paddle, _mindspore),
)
PEERS: dict[str, Peer] = {peer.name: peer for tool in _TOOLS for peer in tool.PEERS}
PAGES: dict[str, tuple[Peer, ...]] = {tool.__name__.rpartition("._")[2]: tool.PEERS for tool in _TOOLS}
"""The records of each page in `docs/migrating/`, by the name of the page, which is that of their module."""


def peers() -> tuple[Peer, ...]:
    """Return the records of all tools, on which conversions, warnings and tables are based.

    Returns:
        The records, in the order in which `guess_peer` prefers them.
    """
    return tuple(PEERS.values())


def find_peer(name: Any, error: type[Exception]) -> Peer:
    """Return the record of this name. Raises `error` with the nearest known name."""
    if isinstance(name, str) and name in PEERS:
        return PEERS[name]
    raise error(f"{shown(name)} is not a known tool; {nearest(name, PEERS)}known: {', '.join(PEERS)}")


def find_page(name: str) -> tuple[Peer, ...]:
    """Return the records of this page. Raises `PolicyError` with the nearest known name."""
    if name in PAGES:
        return PAGES[name]
    raise PolicyError(f"{shown(name)} is not a known page; {nearest(name, PAGES)}known: {', '.join(PAGES)}")


def nearest(name: Any, known: Any) -> str:
    """Return a question about the nearest known name, or an empty text."""
    # The time of a match grows with the product of the lengths, and the name may come from any file.
    found = difflib.get_close_matches(name[:100], list(known), n=1) if isinstance(name, str) else []
    return f"did you mean {found[0]!r}? " if found else ""
