"""Every tool's records, by name. A tool is one file, which ends in its `PEERS`; it is added to `_TOOLS` here."""

import difflib
from typing import Any

from lossscale_core._words import shown
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

# Imported by name, so that what freezes an application finds them; where several save the same names, the first counts.
_TOOLS: tuple[Any, ...] = (
    *(_torch, _apex, _deepspeed, _megatron, _fairseq, _colossalai),
    *(_keras, _tensorflow, _jmp, _flax, _paddle, _mindspore),
)
PEERS: dict[str, Peer] = {peer.name: peer for tool in _TOOLS for peer in tool.PEERS}


def peers() -> tuple[Peer, ...]:
    """Return the record of every tool, from which its tables, conversions and warnings are drawn."""
    return tuple(PEERS.values())


def find_peer(name: Any, error: type[Exception]) -> Peer:
    """Return the record of this name, or raise `error` with the nearest known one."""
    if isinstance(name, str) and name in PEERS:
        return PEERS[name]
    raise error(f"{shown(name)} is not a known tool; {nearest(name, PEERS)}known: {', '.join(PEERS)}")


def nearest(name: Any, known: Any) -> str:
    """Return a question about the nearest known name, or nothing."""
    found = difflib.get_close_matches(name[:100], list(known), n=1) if isinstance(name, str) else []
    return f"did you mean {found[0]!r}? " if found else ""
