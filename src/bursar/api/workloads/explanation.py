"""Responses of explain and simulate: the reason why work is pending, or the outcome of a dry run."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Literal

import msgspec

from bursar.core.objects.pending_reason import MEMBERS, NODES, PendingReason
from bursar.core.quota.quota_messages import dimension_label
from bursar.core.quota.visibility import ABOVE, Sees, reason_for
from bursar.core.scheduling.explain import explain_types
from bursar.core.scheduling.explain.reason_text import constraint, help, sentence  # noqa: A004
from bursar.core.values.instant import timestamp
from bursar.core.values.quantity import format_amount

# Responses.


class ResourceShort(msgspec.Struct, rename="camel"):
    resource: str
    needs: str
    has: str
    short_by: str
    nodes: int  # number of nodes with too little of it


class ExcludedNodes(msgspec.Struct, rename="camel"):
    constraint: str
    nodes: int  # number of nodes that it excludes


class QuotaShort(msgspec.Struct, rename="camel"):
    scope: str
    dimension: str
    limit: str
    bound: str
    requested: str
    short_by: str


class WaitingReason(msgspec.Struct, rename="camel", omit_defaults=True):
    """A pending reason with its numbers and remedy."""

    code: str
    message: str
    help: str = ""
    nodes: int = 0
    matching_nodes: int = 0
    short: list[ResourceShort] = []
    excluded: list[ExcludedNodes] = []
    quotas: list[QuotaShort] = []
    members: int = 0
    min_members: int = 0
    until: str = ""


class QueueAhead(msgspec.Struct, rename="camel"):
    allocations: int
    resources: dict[str, str]


class ScoreTerm(msgspec.Struct, rename="camel"):
    factor: str
    value: float
    weight: float
    points: float


class QueueScore(msgspec.Struct, rename="camel"):
    total: float
    penalty: float
    profile: str
    terms: list[ScoreTerm]


class ShareNow(msgspec.Struct, rename="camel"):
    """The tenant's actual share of the cluster, its targets, and its budget penalty."""

    tenant: str
    actual: float
    target: float
    effective_target: float
    deficit: float
    budget_penalty: float


class ReservedCapacity(msgspec.Struct, rename="camel", omit_defaults=True):
    """Capacity reserved for the allocation: from a time on, or until a time if nominated by preemption."""

    nodes: list[str]
    from_time: str = ""
    until: str = ""


class ProposedNode(msgspec.Struct, rename="camel", omit_defaults=True):
    name: str
    devices: dict[str, list[int]] = {}


class Explanation(msgspec.Struct, rename="camel", omit_defaults=True):
    """The reason why an allocation is pending; for a placed one, its nodes and the time of its start."""

    name: str
    namespace: str
    uid: str
    phase: str
    message: str
    kind: Literal["Explanation"]
    reason: WaitingReason | None = None
    other_reasons: list[WaitingReason] = []
    queue: str = ""
    queue_position: int | None = None
    overall_position: int | None = None
    ahead: QueueAhead | None = None
    estimated_start_time: str = ""
    score: QueueScore | None = None
    share: ShareNow | None = None
    reservation: ReservedCapacity | None = None
    nomination: ReservedCapacity | None = None
    nodes: list[ProposedNode] = []
    scheduled_time: str = ""
    burst: bool = False  # above its tenant's share


class WouldEvict(msgspec.Struct, rename="camel"):
    namespace: str
    name: str
    rule: str


class Cost(msgspec.Struct, rename="camel"):
    """The estimated cost of prepaid work in credits, and the available balance."""

    account: str
    per_second: str
    per_hour: str
    first_window: str  # the hold when it is placed
    window_seconds: int
    available: str


class SimulatedAllocation(msgspec.Struct, rename="camel", omit_defaults=True):
    """The simulated outcome of one allocation."""

    name: str
    would_run: bool
    message: str
    nodes: list[ProposedNode] = []
    estimated_start_time: str = ""
    evictions: list[WouldEvict] = []
    evictions_of_other_tenants: int = 0
    reason: WaitingReason | None = None
    other_reasons: list[WaitingReason] = []
    queue_position: int | None = None
    ahead: QueueAhead | None = None
    cost: Cost | None = None


class Simulation(msgspec.Struct, rename="camel", kw_only=True):
    """The result of a simulation, which changes nothing."""

    kind: str = "Simulation"
    would_run: bool  # whether all of them would run now
    allocations: list[SimulatedAllocation]


# Conversion of the leader's answers.


def why(reason: PendingReason, sees: Sees) -> WaitingReason:
    """Convert a pending reason for a reader who sees the figures of these scopes only."""
    reason = reason_for(reason, sees)
    return WaitingReason(
        code=reason.code,
        message=sentence(reason),
        help=help(reason),
        nodes=reason.nodes,
        matching_nodes=reason.matching,
        short=[
            ResourceShort(
                one.resource, _counted(one.resource, one.needs), _counted(one.resource, one.has),
                _counted(one.resource, max(0, one.needs - one.has)), one.nodes,
            )
            for one in reason.short
        ],
        excluded=[ExcludedNodes(constraint(name), count) for name, count in reason.excluded if name != "together"],
        quotas=[
            QuotaShort(
                scope, dimension_label(dimension), format_amount(dimension, hard), format_amount(dimension, bound),
                format_amount(dimension, asked), format_amount(dimension, max(0, bound + asked - hard)),
            )
            for scope, dimension, hard, bound, asked in reason.limits
            if scope != ABOVE
        ],
        members=reason.members,
        min_members=reason.members_min,
        until=time_of(reason.until or None),
    )  # fmt: skip


def _counted(resource: str, amount: int) -> str:
    """Format a count of members and whole nodes, or a measured amount."""
    return str(amount) if resource in (MEMBERS, NODES) else format_amount(resource, amount)


def queue_ahead(ahead: explain_types.Ahead) -> QueueAhead:
    amounts = {name: format_amount(name, amount) for name, amount in sorted(ahead.amounts.items())}
    return QueueAhead(ahead.allocations, amounts)


def reservation(kept: explain_types.ReservedFor | None) -> ReservedCapacity | None:
    return ReservedCapacity(list(kept.nodes), time_of(kept.at)) if kept is not None else None


def nomination(kept: explain_types.ReservedFor | None) -> ReservedCapacity | None:
    return ReservedCapacity(list(kept.nodes), until=time_of(kept.at)) if kept is not None else None


def queue_score(score: explain_types.Score | None) -> QueueScore | None:
    if score is None:
        return None
    terms = [ScoreTerm(one.factor, one.value, one.weight, one.value * one.weight) for one in score.terms]
    return QueueScore(score.total, score.penalty, score.profile, terms)


def share_now(share: explain_types.ShareFigures | None) -> ShareNow | None:
    if share is None:
        return None
    return ShareNow(share.tenant, share.actual, share.target, share.effective, share.deficit, share.penalty)


def time_of(seconds: float | None) -> str:
    return "" if seconds is None else timestamp(datetime.fromtimestamp(seconds, UTC))
