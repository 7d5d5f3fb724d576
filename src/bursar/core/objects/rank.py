"""Ranks of distributed work: the order of a gang's members, or of an allocation's nodes.

A gang is ranked when it is placed: by the index of its members in their job, else by their names. A member that joins a
running gang, such as a retry, takes the rank of its predecessor, or the next one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from zlib import crc32

from bursar.core.objects.allocation import Peer

# Ports below the ephemeral range of Linux.
PORT_FIRST, PORTS = 20_000, 10_000

_DIGITS = re.compile(r"(\d+)")


def ranked(peers: Iterable[Peer]) -> tuple[Peer, ...]:
    """The peers in rank order: `m-2` comes before `m-10`."""
    return tuple(sorted(peers, key=lambda one: (one.index < 0, one.index, _natural(one.name))))


def joined(running: Sequence[Peer], coming: Iterable[Peer]) -> tuple[Peer, ...]:
    """The running peers with the new ones at their ranks."""
    peers = list(running)
    for new in ranked(coming):
        place = next((at for at, one in enumerate(peers) if one.index == new.index >= 0 or one.name == new.name), None)
        if place is None:
            peers.append(new)
        else:
            peers[place] = new
    return tuple(peers)


def rank_of(peers: Sequence[Peer], name: str) -> int | None:
    """The rank of a member on its first node; its other nodes have the next ranks. None if it is not a peer."""
    rank = 0
    for one in peers:
        if one.name == name:
            return rank
        rank += len(one.nodes)
    return None


def size_of(peers: Iterable[Peer]) -> int:
    return sum(len(one.nodes) for one in peers)


def meeting_port(name: str) -> int:
    """The rendezvous port (MASTER_PORT) of distributed work, derived from the name so that all ranks agree."""
    return PORT_FIRST + crc32(name.encode()) % PORTS


def _natural(name: str) -> list[tuple[int, int, str]]:
    parts = _DIGITS.split(name)
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in parts if part]
