"""Eviction and preemption: stopping placed work, so that it is pending again.

An evicted allocation gets a deadline. It keeps its requested quota and its submission time; its nodes and its bound
quota are released only when the last of its nodes has confirmed that it is gone (`Report`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from bursar.commands.command import Command, Result
from bursar.commands.objects.object import conflict, not_found
from bursar.commands.objects.status import status_of
from bursar.commands.workloads.allocation import PLACED, phase_of, request_in, waits_no_more, with_status
from bursar.commands.workloads.stop import members_of, stop, stop_members
from bursar.core.batch.placement_billing import PlacementPayer, leases_of, payment_of
from bursar.core.batch.unit_of_work import UnitOfWork
from bursar.core.credit.lease import Lease
from bursar.core.nodes.eviction import STOPPABLE, EvictionRule, Notice
from bursar.core.objects.allocation import GangKey, ResourceRequest
from bursar.core.objects.charge import Amounts, Charge
from bursar.core.objects.object import Key, Origin, Stored
from bursar.core.values.instant import timestamp
from bursar.core.values.refusal import Code, Refusal
from bursar.wire.to_scheduler.ask import may_cross_tenants


@dataclass(frozen=True, slots=True)
class EvictionVictim:
    """A victim, with its stop notice. The placed members of its gang are evicted with it."""

    key: Key
    uid: str
    notice: Notice
    gang: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evict(Command):
    """Stop a placed allocation and the placed members of its gang: a gang runs as a whole or not at all."""

    notice: Notice
    uid: str = ""  # the expected allocation, in case another one has the name now
    gang: str = ""

    def gangs(self) -> dict[GangKey, int]:
        return {(self.key.namespace, self.gang): 0} if self.gang else {}

    def placed(self, batch: UnitOfWork) -> Iterable[Key]:
        return (self.key, *members_of(batch, self.gangs()))

    def charges(self, _: UnitOfWork) -> Iterable[tuple[str, Charge]]:
        return ()  # Nothing is released before it is gone.

    def decide(self, batch: UnitOfWork) -> Result:
        before = batch.objects.get(self.key)
        if before is None:
            return not_found(self.key)
        if self.uid not in ("", before.uid):
            return conflict(self.key, f"its uid is {before.uid}, not {self.uid}")
        if before.gang != self.gang:
            return conflict(self.key, "it was deleted and created again")
        if phase_of(before) not in STOPPABLE:
            return not_placed(before)
        stop_id = batch.new_uid("preempt")
        written = stop(batch, before, self.notice, stop_id, self.origin)
        for gang in self.gangs():
            stop_members(batch, gang, self.notice, stop_id, self.origin)
        return written


@dataclass(frozen=True, slots=True)
class Nominee:
    """A pending allocation, and the nodes whose capacity is reserved for it until then."""

    key: Key
    uid: str
    nodes: tuple[str, ...]
    until: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Preempt(Command):
    """Stop victims and reserve their capacity for a pending allocation, the nominee: all of it, or nothing.

    `key` is the nominee's; `with_it` are the others of its gang. The nomination is written with the evictions, so
    the next leader does not evict again. Victims that ended, or are ending, since the plan was made are skipped.
    """

    uid: str
    nominated: tuple[str, ...]  # the nodes whose capacity is reserved for it
    until: datetime
    victims: tuple[EvictionVictim, ...]
    with_it: tuple[Nominee, ...] = ()

    def objects(self) -> Iterable[Key]:
        return (self.key, *(one.key for one in self.with_it), *(one.key for one in self.victims))

    def gangs(self) -> dict[GangKey, int]:
        return {(one.key.namespace, one.gang): 0 for one in self.victims if one.gang}

    @property
    def nominees(self) -> tuple[Nominee, ...]:
        return (Nominee(self.key, self.uid, self.nominated, self.until), *self.with_it)

    def placed(self, batch: UnitOfWork) -> Iterable[Key]:
        return (*self.objects(), *members_of(batch, self.gangs()))

    def charges(self, _: UnitOfWork) -> Iterable[tuple[str, Charge]]:
        return ()

    def pays(self, batch: UnitOfWork) -> Iterable[PlacementPayer]:
        there = [(batch.objects[one.key], one.nodes) for one in self.nominees if one.key in batch.objects]
        return [found for one, nodes in there if (found := payment_of(batch, one, nodes)) is not None]

    def decide(self, batch: UnitOfWork) -> Result:
        nominees = self.nominees
        for one in nominees:
            if refusal := _outrun(batch, one):
                return refusal
        if refusal := _unpayable(batch, nominees):
            return refusal
        for victim in self.victims:
            there = batch.objects.get(victim.key)
            if there is not None and there.uid != victim.uid:
                return Refusal(Code.STALE, f"{victim.key.name} was deleted and created again")
            if there is not None and not _may_evict(batch, nominees, there, victim.notice.rule):
                return Refusal(Code.STALE, f"{self.key.name} may not evict other tenants' work by its priority")
        stop_id = batch.new_uid("preempt")
        stopped = [one for one in self.victims if stop_if_placed(batch, one, stop_id, self.origin)]
        for gang, notice in {(one.key.namespace, one.gang): one.notice for one in stopped if one.gang}.items():
            stop_members(batch, gang, notice, stop_id, self.origin)
        writes = [_nominate(batch, one, self.origin) for one in nominees]
        return writes[0]


def _outrun(batch: UnitOfWork, one: Nominee) -> Refusal | None:
    there = batch.objects.get(one.key)
    if there is None or there.uid != one.uid:
        return Refusal(Code.STALE, f"{one.key.name}, the nominee, no longer exists")
    return waits_no_more(there)


def _may_evict(batch: UnitOfWork, nominees: Iterable[Nominee], victim: Stored, rule: str) -> bool:
    """Whether an eviction for lower priority is still allowed: across tenants only if the classes of all nominees
    permit it, and their tenants may still use these classes."""
    asking = [batch.objects[one.key] for one in nominees]
    if rule != EvictionRule.LOWER_PRIORITY or batch.tenant_of(asking[0]) == batch.tenant_of(victim):
        return True
    return all(_crosses(batch, one) for one in asking)


def _crosses(batch: UnitOfWork, one: Stored) -> bool:
    exempt = bool(status_of(one).get("permittedBy"))
    return may_cross_tenants(one.doc, batch.tree, batch.tenant_of(one), uid=one.uid, exempt=exempt)


def _unpayable(batch: UnitOfWork, nominees: Iterable[Nominee]) -> Refusal | None:
    """The refusal of nominees that could not pay for the nodes; no credit is held yet."""
    if batch.ledger is None:
        return None
    leases: list[Lease] = []
    for one in nominees:
        there = batch.objects[one.key]
        request = request_in(there.doc)
        found = leases_of(batch, there, [(node, _taken(batch, node, request)) for node in one.nodes])
        if isinstance(found, Refusal):
            return found
        leases += found
    return batch.ledger.lacking(leases)


def _taken(batch: UnitOfWork, node: str, request: ResourceRequest) -> Amounts:
    """The amounts that a request takes of a node: all of it if it is exclusive."""
    return batch.nodes[node].allocatable if request.exclusive and node in batch.nodes else request.requests


def _nominate(batch: UnitOfWork, one: Nominee, origin: Origin) -> Result:
    before, until = batch.objects[one.key], timestamp(one.until)
    status = {**status_of(before), "nominated": [{"node": node, "until": until} for node in one.nodes]}
    return batch.put(with_status(before, status), origin)


def not_placed(one: Stored) -> Refusal:
    return Refusal(
        Code.STALE,
        f"{one.key.name} is {phase_of(one)}: there is nothing to stop",
        "Only a Scheduled or Running allocation can be preempted; delete one that should not run at all.",
    )


def stop_if_placed(batch: UnitOfWork, victim: EvictionVictim, id_: str, origin: Origin) -> bool:
    there = batch.objects.get(victim.key)
    if there is None or there.uid != victim.uid or phase_of(there) not in PLACED:
        return False
    stop(batch, there, victim.notice, id_, origin)
    return True
