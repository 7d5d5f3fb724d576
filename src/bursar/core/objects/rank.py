"""Ranks: who is who among those that run as one, the members of a gang or the nodes of one allocation.

A gang is ranked when it is placed, all of it at once: by the index of its members in their job, else by their names.
Whoever joins what runs already, as a retry does, takes the place of the one it follows, or the next.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from zlib import crc32

from bursar.core.objects.allocation import Peer

# Ports below those that kernels give away by themselves.
PORT_FIRST, PORTS = 20_000, 10_000

_DIGITS = re.compile(r"(\d+)")


def ranked(peers: Iterable[Peer]) -> tuple[Peer, ...]:
    """In rank order: `m-2` comes before `m-10`."""
    return tuple(sorted(peers, key=lambda one: (one.index < 0, one.index, _natural(one.name))))


def joined(running: Sequence[Peer], coming: Iterable[Peer]) -> tuple[Peer, ...]:
    """Those that were ranked before, and those that come to them."""
    peers = list(running)
    for new in ranked(coming):
        place = next((at for at, one in enumerate(peers) if one.index == new.index >= 0 or one.name == new.name), None)
        if place is None:
            peers.append(new)
        else:
            peers[place] = new
    return tuple(peers)


def rank_of(peers: Sequence[Peer], name: str) -> int | None:
    """The rank of a member on its first node; those of its other nodes follow. None where it is not among them."""
    rank = 0
    for one in peers:
        if one.name == name:
            return rank
        rank += len(one.nodes)
    return None


def size_of(peers: Iterable[Peer]) -> int:
    return sum(len(one.nodes) for one in peers)


def meeting_port(name: str) -> int:
    """The port on which those that run as one meet; the same for all that are told the same name."""
    return PORT_FIRST + crc32(name.encode()) % PORTS


def _natural(name: str) -> list[tuple[int, int, str]]:
    parts = _DIGITS.split(name)
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in parts if part]
