"""Allocations: their phases (a state machine), resource requests and gangs."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from msgspec import Struct

from bursar.core.objects.charge import Amounts


class Phase(StrEnum):
    """The phase of an allocation."""

    PENDING = "Pending"  # it has no nodes yet
    SCHEDULED = "Scheduled"  # it is bound to nodes, and does not run yet
    RUNNING = "Running"  # it runs on its nodes
    TERMINATING = "Terminating"  # it is being stopped
    SUCCEEDED = "Succeeded"  # it ended with exit code 0 on every node
    FAILED = "Failed"  # it ended with a failure
    CANCELLED = "Cancelled"  # a user or its job cancelled it


ENDED = frozenset({Phase.SUCCEEDED, Phase.FAILED, Phase.CANCELLED})

# The state machine: the phases that may follow each phase. The last three are final.
NEXT: dict[Phase, frozenset[Phase]] = {
    Phase.PENDING: frozenset({Phase.SCHEDULED, Phase.FAILED, Phase.CANCELLED}),
    Phase.SCHEDULED: frozenset({Phase.RUNNING, Phase.TERMINATING, Phase.PENDING, *ENDED}),
    Phase.RUNNING: frozenset({Phase.TERMINATING, Phase.PENDING, *ENDED}),
    Phase.TERMINATING: frozenset({Phase.PENDING, *ENDED}),  # evicted work is requeued
    Phase.SUCCEEDED: frozenset(),
    Phase.FAILED: frozenset(),
    Phase.CANCELLED: frozenset(),
}


@dataclass(frozen=True, slots=True)
class Gang:
    """A gang: allocations that are placed all together or not at all. `timeout_seconds` 0 means no timeout."""

    group_id: str
    min_members: int
    timeout_seconds: int = 0


GangKey = tuple[str, str]  # (namespace, group id)


class Peer(Struct, frozen=True, array_like=True):
    """A placed member of a gang and its nodes. `index` is its index in its job, or −1 outside of jobs."""

    name: str
    index: int
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class GangRow:
    """The stored state of a gang: the number of members, whether they are charged, and its peers in rank order."""

    min_members: int
    members: int = 0
    charged: bool = False
    peers: tuple[Peer, ...] = ()


@dataclass(frozen=True, slots=True)
class ResourceRequest:
    """The resources that an allocation requests on each of `nodes` nodes."""

    requests: Amounts
    nodes: int = 1
    exclusive: bool = False
    sensitive: bool = False  # it runs only on nodes that its user has claimed
