"""An allocation as the rules see it: what it asks for, and the phases it goes through."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from msgspec import Struct

from bursar.core.objects.charge import Amounts


class Phase(StrEnum):
    PENDING = "Pending"
    SCHEDULED = "Scheduled"
    RUNNING = "Running"
    TERMINATING = "Terminating"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    CANCELLED = "Cancelled"


ENDED = frozenset({Phase.SUCCEEDED, Phase.FAILED, Phase.CANCELLED})

# What may follow what. A node reports progress; nothing comes back from an end.
NEXT: dict[Phase, frozenset[Phase]] = {
    Phase.PENDING: frozenset({Phase.SCHEDULED, Phase.FAILED, Phase.CANCELLED}),
    Phase.SCHEDULED: frozenset({Phase.RUNNING, Phase.TERMINATING, Phase.PENDING, *ENDED}),
    Phase.RUNNING: frozenset({Phase.TERMINATING, Phase.PENDING, *ENDED}),
    Phase.TERMINATING: frozenset({Phase.PENDING, *ENDED}),  # evicted work waits again
    Phase.SUCCEEDED: frozenset(),
    Phase.FAILED: frozenset(),
    Phase.CANCELLED: frozenset(),
}


@dataclass(frozen=True, slots=True)
class Gang:
    """A set placed all together or not at all; `timeout_seconds` 0 waits for ever."""

    group_id: str
    min_members: int
    timeout_seconds: int = 0


GangKey = tuple[str, str]  # (namespace, group id)


class Peer(Struct, frozen=True, array_like=True):
    """A member of a gang that was placed, and where. `index` is the one it works on in its job, else −1."""

    name: str
    index: int
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class GangRow:
    """How many members a gang has, whether they were charged as a set, and where they were placed, in rank order."""

    min_members: int
    members: int = 0
    charged: bool = False
    peers: tuple[Peer, ...] = ()


@dataclass(frozen=True, slots=True)
class ResourceRequest:
    """What is asked of each of `nodes` nodes."""

    requests: Amounts
    nodes: int = 1
    exclusive: bool = False
    sensitive: bool = False  # it goes to nodes that its user has claimed, and to no others
