"""What the scheduler decides, as the commands that commit it: each with the fence of its term.

They name the nodes as they were when it was decided; whether that still holds is seen under locks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from functools import lru_cache

from bursar.core.allocation import Phase, Request
from bursar.core.ask import Ask, Shape
from bursar.core.eviction import Notice, Rule
from bursar.core.eviction import Reason as Stopped
from bursar.core.object import Key, Origin
from bursar.core.placing import Target
from bursar.core.plan import Binding, Policy, Preempting
from bursar.core.reason import Reason
from bursar.core.running import Spot
from bursar.core.telling import sentence
from bursar.core.world import World
from bursar.loops.world import BINDER
from bursar.ops.bind import Bind, Member, Note
from bursar.ops.evict import Nominee, Preempt, Victim
from bursar.ops.report import Report

SCHEDULER = Origin(BINDER, "bind")
PREEMPTING = Origin(BINDER, "preempt")
FAILING = Origin(BINDER, "fail")
NOTING = Origin(BINDER, "note")


def bind_commands(world: World, bindings: Iterable[Binding], fence: int) -> list[Bind]:
    names = {column: name for name, column in world.fleet.device_column_of.items()}
    return [
        Bind.unit([_member(world, names, ask, spots) for ask, spots in binding.members], SCHEDULER, fence)
        for binding in bindings
    ]


def _member(world: World, names: Mapping[int, str], ask: Ask, spots: Iterable[Spot]) -> Member:
    fleet = world.fleet
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
    return Member(_key(ask), targets, _request(ask.shape), _gang_name(ask), ask.uid)


@lru_cache(1024)
def _request(shape: Shape) -> Request:
    return Request(dict(shape.requests), shape.nodes, shape.exclusive, shape.where.sensitive)


def preempt_command(world: World, one: Preempting, fence: int, policy: Policy) -> Preempt:
    nominees = [
        Nominee(_key(ask), ask.uid, nomination.nodes, datetime.fromtimestamp(nomination.until, UTC))
        for ask, nomination in zip(one.asks, one.nominations, strict=True)
    ]
    first, *others = nominees
    by = f"{first.key.namespace}/{first.key.name}"
    victims = tuple(
        Victim(
            _key(world.placed[victim.uid].ask),
            victim.uid,
            Notice(Stopped.PREEMPTED, victim.rule, by, _told(victim.rule, by, one.priority), int(policy.grace_seconds)),
            _gang_name(world.placed[victim.uid].ask),
        )
        for victim in one.victims
        if victim.uid in world.placed
    )
    return Preempt(
        key=first.key, uid=first.uid, nominated=first.nodes, until=first.until, with_it=tuple(others),
        victims=victims, origin=PREEMPTING, fence=fence,
    )  # fmt: skip


def _told(rule: Rule, by: str, priority: int) -> str:
    if rule is Rule.BURST:
        return f"Preempted by {by}, which is within its tenant's fair share; this ran beyond its own tenant's"
    return f"Preempted by {by}, which has the higher priority {priority}"


def fail_command(ask: Ask, reason: Reason, fence: int) -> Report:
    """Of a gang that was not complete in time; should it be by now, it stays."""
    return Report(
        key=_key(ask), origin=FAILING, phase=Phase.FAILED, uid=ask.uid, fence=fence, gang=_gang_name(ask),
        unless_complete=True, reason="GangTimeout", message=sentence(reason),
    )  # fmt: skip


def note_command(ask: Ask, reason: Reason, fence: int) -> Note:
    return Note(key=_key(ask), origin=NOTING, fence=fence, uid=ask.uid, reason=reason.code, message=sentence(reason))


def _key(ask: Ask) -> Key:
    return Key("Allocation", ask.namespace, ask.name)


def _gang_name(ask: Ask) -> str:
    return ask.gang.group_id if ask.gang is not None else ""
