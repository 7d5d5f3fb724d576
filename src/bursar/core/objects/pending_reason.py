"""Pending reasons: why an allocation is not placed, a closed list in order of precedence, with numbers and a hint.

The status of an allocation stores the code; `explain` computes the numbers on request.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from bursar.core.values.refusal import Refusal


class ReasonCode(StrEnum):
    """The code of a pending reason, in order of precedence: the first that applies is the dominant one.

    `no_capacity` is followed by its resource: `no_capacity_nvidia.com/gpu`.
    """

    AWAITING_APPROVAL = "awaiting_approval"  # an approver or a service decides first
    GANG_INCOMPLETE = "gang_incomplete"  # members of the gang are still missing
    QUOTA_EXCEEDED = "quota_exceeded"  # a hard limit of a quota has no headroom
    UNPRICED = "unpriced"  # a resource of prepaid work has no price in force
    ACCOUNT_INACTIVE = "account_inactive"  # the paying account is suspended or closed
    INSUFFICIENT_CREDIT = "insufficient_credit"  # the paying account has too little available credit
    CONCURRENCY_EXCEEDED = "concurrency_exceeded"  # the paying account would use more GPUs at once than allowed
    DAILY_CAP_EXCEEDED = "daily_cap_exceeded"  # the paying account would spend more today than allowed
    SPEND_RATE_EXCEEDED = "spend_rate_exceeded"  # the paying account would spend faster than its rate limit
    NO_NODES_ACTIVE = "no_nodes_active"  # no node is ready and schedulable
    NO_CLAIMED_NODES = "no_claimed_nodes"  # the work is sensitive and its user has claimed no node
    NO_MATCHING_NODES = "no_matching_nodes"  # no node matches by labels, taints, tenants and isolation
    AFFINITY = "pod_affinity"  # no matching node is near the allocations that it must be near
    ANTI_AFFINITY = "pod_anti_affinity"  # every matching node is near allocations that it must be apart from
    SPREAD = "topology_spread"  # every matching node would exceed a topology spread constraint
    NO_CAPACITY = "no_capacity"  # no matching node has enough free of a resource
    HELD = "room_reserved"  # the free capacity is reserved for a job ahead of it in the queue (backfill)
    PREEMPTING = "waiting_for_preemption"  # victims of its preemption are still ending
    NOT_TRIED = "not_yet_tried"  # no scheduling cycle has considered it yet


# Reasons that only the paying account knows: found when a bind opens the lease, and true until the account changes.
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

# Pseudo resources of `Short`, for members or nodes that must be placed together.
MEMBERS: Final = "members"
NODES: Final = "nodes"


@dataclass(frozen=True, slots=True)
class Short:
    """A resource that is short: the amount needed on a node, the most free on one node, and the nodes short of it.

    For members or nodes that must be placed together: their number, the number that would fit, and the nodes on which
    none would.
    """

    resource: str
    needs: int
    has: int
    nodes: int
    most_nodes: int = 0  # nodes that have this most free


@dataclass(frozen=True, slots=True)
class PendingReason:
    """Why an allocation is pending: the code, with the numbers that explain it."""

    why: ReasonCode
    resource: str = ""
    nodes: int = 0  # of the cluster
    excluded: tuple[tuple[str, int], ...] = ()  # (constraint, nodes that it excludes)
    short: tuple[Short, ...] = ()
    members: int = 0  # of an incomplete gang
    members_min: int = 0
    limits: tuple[tuple[str, str, int, int, int], ...] = field(default=())  # (scope, dimension, hard, bound, asked)
    until: float = 0.0
    absent: str = ""  # the topology of a pod affinity that no allocation satisfies
    matching: int = 0  # schedulable nodes that match by labels and taints
    closed: tuple[tuple[str, str], ...] = ()  # (node, why it is not schedulable): matching nodes that could help
    said: str = ""  # the message of the refusal
    hint: str = ""

    @classmethod
    def unpaid(cls, refusal: Refusal) -> PendingReason | None:
        """The reason of a refusal by the paying account; None for other refusals."""
        code = str(refusal.code)
        return cls(ReasonCode(code), said=refusal.message, hint=refusal.hint) if code in UNPAID else None

    @property
    def code(self) -> str:
        return f"{self.why}_{self.resource}" if self.why is ReasonCode.NO_CAPACITY and self.resource else str(self.why)
