"""Commands that commit a plan, each with the fence of the term.

They name the generations of nodes at the time of the decision; the commit checks them under locks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from functools import lru_cache

from bursar.commands.scheduling.bind import Bind, BindMember, NotePending
from bursar.commands.scheduling.evict import EvictionVictim, Nominee, Preempt
from bursar.commands.workloads.report import Report
from bursar.core.nodes.bind_check import Target
from bursar.core.nodes.eviction import EvictionReason as Stopped
from bursar.core.nodes.eviction import EvictionRule, Notice
from bursar.core.objects.allocation import Phase, ResourceRequest
from bursar.core.objects.ask import Ask, Shape
from bursar.core.objects.object import Key, Origin
from bursar.core.objects.pending_reason import PendingReason
from bursar.core.quota.tenant_tree import Tree
from bursar.core.quota.visibility import reason_for, sight
from bursar.core.scheduling.cycle.plan import Binding, Preempting, SchedulingPolicy
from bursar.core.scheduling.explain.reason_text import sentence
from bursar.core.scheduling.state.cluster_state import ClusterState
from bursar.core.scheduling.state.placed_columns import Spot

BINDER = "system:scheduler"  # who binds, in the audit log
SCHEDULER = Origin(BINDER, "bind")
PREEMPTING = Origin(BINDER, "preempt")
FAILING = Origin(BINDER, "fail")
NOTING = Origin(BINDER, "note")

STRANGER = "work of another tenant"


def bind_commands(cluster: ClusterState, bindings: Iterable[Binding], fence: int) -> list[Bind]:
    names = {column: name for name, column in cluster.fleet.device_column_of.items()}
    return [
        Bind.unit([_member(cluster, names, ask, spots) for ask, spots in binding.members], SCHEDULER, fence)
        for binding in bindings
    ]


def _member(cluster: ClusterState, names: Mapping[int, str], ask: Ask, spots: Iterable[Spot]) -> BindMember:
    fleet = cluster.fleet
    targets = tuple(
        [
            Target(
                fleet.names[spot.row],
                fleet.generation[spot.row],
                {names[column]: indices for column, indices in spot.devices} or None,
            )
            for spot in spots
        ]
    )
    return BindMember(_key(ask), targets, _request(ask.shape), _gang_name(ask), ask.uid)


@lru_cache(1024)
def _request(shape: Shape) -> ResourceRequest:
    return ResourceRequest(dict(shape.requests), shape.nodes, shape.exclusive, shape.where.sensitive)


def preempt_command(cluster: ClusterState, one: Preempting, fence: int, policy: SchedulingPolicy) -> Preempt:
    nominees = [
        Nominee(_key(ask), ask.uid, nomination.nodes, datetime.fromtimestamp(nomination.until, UTC))
        for ask, nomination in zip(one.asks, one.nominations, strict=True)
    ]
    first, *others = nominees
    victims = tuple(
        EvictionVictim(
            _key(gone),
            victim.uid,
            _notice(victim.rule, one.asks[0], gone, one.priority, int(policy.grace_seconds)),
            _gang_name(gone),
        )
        for victim in one.victims
        if victim.uid in cluster.placed
        for gone in (cluster.placed[victim.uid].ask,)
    )
    return Preempt(
        key=first.key, uid=first.uid, nominated=first.nodes, until=first.until, with_it=tuple(others),
        victims=victims, origin=PREEMPTING, fence=fence,
    )  # fmt: skip


def _notice(rule: EvictionRule, asker: Ask, victim: Ask, priority: int, grace_seconds: int) -> Notice:
    """The eviction notice of a victim. It hides the name and the priority of another tenant's work."""
    own = asker.tenant == victim.tenant
    by = f"{asker.namespace}/{asker.name}" if own else STRANGER
    if rule is EvictionRule.BURST:
        why = "which is within its tenant's fair share; this ran beyond its own tenant's"
    else:
        why = f"which has the higher priority {priority}" if own else "which has a higher priority"
    return Notice(Stopped.PREEMPTED, rule, by, f"Preempted by {by}, {why}", grace_seconds)


def fail_command(ask: Ask, reason: PendingReason, fence: int) -> Report:
    """Fail a member of a gang that was not complete in time, unless it is complete by now."""
    return Report(
        key=_key(ask), origin=FAILING, phase=Phase.FAILED, uid=ask.uid, fence=fence, gang=_gang_name(ask),
        unless_complete=True, reason="GangTimeout", message=sentence(reason),
    )  # fmt: skip


def note_command(tree: Tree, ask: Ask, reason: PendingReason, fence: int) -> NotePending:
    """Store a pending reason. All users of the tenant read it, so it contains no figures of tenants above."""
    message = sentence(reason_for(reason, sight(tree, ask.tenant)))
    return NotePending(key=_key(ask), origin=NOTING, fence=fence, uid=ask.uid, reason=reason.code, message=message)


def _key(ask: Ask) -> Key:
    return Key("Allocation", ask.namespace, ask.name)


def _gang_name(ask: Ask) -> str:
    return ask.gang.group_id if ask.gang is not None else ""
