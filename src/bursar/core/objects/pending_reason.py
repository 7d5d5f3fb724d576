"""Why something waits: a closed list, in order of precedence, each with its numbers and with what would help.

A pending reason is stored as its code; the numbers are worked out when somebody asks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from bursar.core.values.refusal import Refusal


class ReasonCode(StrEnum):
    """In order of precedence: the first that applies is the dominant one. `no_capacity` names its resource."""

    GANG_INCOMPLETE = "gang_incomplete"
    QUOTA_EXCEEDED = "quota_exceeded"
    UNPRICED = "unpriced"
    ACCOUNT_INACTIVE = "account_inactive"
    INSUFFICIENT_CREDIT = "insufficient_credit"
    CONCURRENCY_EXCEEDED = "concurrency_exceeded"
    DAILY_CAP_EXCEEDED = "daily_cap_exceeded"
    SPEND_RATE_EXCEEDED = "spend_rate_exceeded"
    NO_NODES_ACTIVE = "no_nodes_active"
    NO_CLAIMED_NODES = "no_claimed_nodes"
    NO_MATCHING_NODES = "no_matching_nodes"
    AFFINITY = "pod_affinity"
    ANTI_AFFINITY = "pod_anti_affinity"
    SPREAD = "topology_spread"
    NO_CAPACITY = "no_capacity"
    HELD = "room_reserved"
    PREEMPTING = "waiting_for_preemption"
    NOT_TRIED = "not_yet_tried"


# What only the account can tell: found when it was to be paid for, and true until the account changes.
UNPAID: Final = frozenset(
    {
        ReasonCode.UNPRICED,
        ReasonCode.ACCOUNT_INACTIVE,
        ReasonCode.INSUFFICIENT_CREDIT,
        ReasonCode.CONCURRENCY_EXCEEDED,
        ReasonCode.DAILY_CAP_EXCEEDED,
        ReasonCode.SPEND_RATE_EXCEEDED,
    }
)

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
class PendingReason:
    why: ReasonCode
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
    closed: tuple[tuple[str, str], ...] = ()  # (node, why it takes no work): matching nodes that could help
    said: str = ""  # by whoever refused it, with its numbers
    hint: str = ""

    @classmethod
    def unpaid(cls, refusal: Refusal) -> PendingReason | None:
        """Why something could not be paid for; None where it was refused for something else."""
        code = str(refusal.code)
        return cls(ReasonCode(code), said=refusal.message, hint=refusal.hint) if code in UNPAID else None

    @property
    def code(self) -> str:
        return f"{self.why}_{self.resource}" if self.why is ReasonCode.NO_CAPACITY and self.resource else str(self.why)
