"""The table: every tool's record by its name."""

import difflib
from typing import Any

from lossscale_core._words import shown
from lossscale_core.dialects import _others, _pytorch, _tensorflow
from lossscale_core.dialects._record import Peer

PEERS: dict[str, Peer] = {peer.name: peer for peer in (*_pytorch.PEERS, *_tensorflow.PEERS, *_others.PEERS)}


def peers() -> tuple[Peer, ...]:
    """Return the record of every tool, from which its tables, conversions and warnings are drawn."""
    return tuple(PEERS.values())


def find_peer(name: Any, error: type[Exception]) -> Peer:
    """Return the record of this name, or raise `error` with the nearest known one."""
    if isinstance(name, str) and name in PEERS:
        return PEERS[name]
    raise error(f"{shown(name)} is no tool known here; {nearest(name, PEERS)}known: {', '.join(PEERS)}")


def nearest(name: Any, known: Any) -> str:
    """Return a question about the nearest known name, or nothing."""
    found = difflib.get_close_matches(name[:100], list(known), n=1) if isinstance(name, str) else []
    return f"did you mean {found[0]!r}? " if found else ""
