"""Why something waits: a closed list, in order of precedence, each with its numbers and with what would help.

A pending reason is stored as its code; the numbers are worked out when somebody asks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final


class Why(StrEnum):
    """In order of precedence: the first that applies is the dominant one. `no_capacity` names its resource."""

    GANG_INCOMPLETE = "gang_incomplete"
    QUOTA_EXCEEDED = "quota_exceeded"
    NO_NODES_ACTIVE = "no_nodes_active"
    NO_MATCHING_NODES = "no_matching_nodes"
    AFFINITY = "pod_affinity"
    ANTI_AFFINITY = "pod_anti_affinity"
    SPREAD = "topology_spread"
    NO_CAPACITY = "no_capacity"
    HELD = "room_reserved"
    MAKING_ROOM = "waiting_for_preemption"
    NOT_TRIED = "not_yet_tried"


# What is short when the parts of a whole have no room together: how many of them find it. The rest is measured.
MEMBERS: Final = "members"
NODES: Final = "nodes"


@dataclass(frozen=True, slots=True)
class Short:
    """One resource that is short: what is needed on a node, the most that one has, and on how many it is too little.

    Of members or nodes that must be placed together: how many they are, for how many there is room, and on how many
    nodes there is none.
    """

    resource: str
    needs: int
    has: int
    nodes: int
    most_nodes: int = 0  # how many have that most


@dataclass(frozen=True, slots=True)
class Reason:
    why: Why
    resource: str = ""
    nodes: int = 0  # how many nodes there are
    excluded: tuple[tuple[str, int], ...] = ()  # (constraint, nodes that it keeps out)
    short: tuple[Short, ...] = ()
    members: int = 0  # of a gang that is not complete
    members_min: int = 0
    limits: tuple[tuple[str, str, int, int, int], ...] = field(default=())  # (scope, dimension, hard, bound, asked)
    until: float = 0.0
    absent: str = ""  # the topology in which nobody is that it must be near
    matching: int = 0  # nodes that take work and are right by labels and taints

    @property
    def code(self) -> str:
        return f"{self.why}_{self.resource}" if self.why is Why.NO_CAPACITY and self.resource else str(self.why)
