"""Binding units of work to nodes as the scheduler planned, and noting why something is pending.

A unit is placed as a whole or not at all: one allocation, or the members of a gang. Capacity, quota and credit are
checked again under locks; a refused unit changes nothing, and the rest of the plan is committed.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from typing import Any, TypeAlias

from msgspec import Struct

from bursar.commands.command import Command, Result
from bursar.commands.objects.gate import awaits_approval
from bursar.commands.objects.object import not_found, sight_of
from bursar.commands.objects.status import set_condition, status_of, unchanged
from bursar.commands.workloads.allocation import PLACED, phase_of, waits_no_more, with_status
from bursar.core.batch.placement_billing import PlacementPayer, leases_of, paid_by, payment_of
from bursar.core.batch.unit_of_work import UnitOfWork
from bursar.core.credit.lease import Lease, lease_name
from bursar.core.nodes.bind_check import BindCheck, Target, bound_charge, place
from bursar.core.nodes.eviction import EvictionReason as Stopped
from bursar.core.nodes.node import NodeCapacity, Placement, keeps_off
from bursar.core.nodes.node_claim import kept_off
from bursar.core.objects.allocation import GangKey, Peer, Phase, ResourceRequest
from bursar.core.objects.charge import Charge
from bursar.core.objects.object import Key, Origin, Write
from bursar.core.objects.rank import joined, rank_of, ranked, size_of
from bursar.core.quota.permit import Permit, kept_out, permit_of
from bursar.core.quota.quota import Move
from bursar.core.quota.quota_messages import quota_refusal
from bursar.core.values.instant import timestamp
from bursar.core.values.quantity import format_granted
from bursar.core.values.refusal import Cause, Code, Refusal
from bursar.core.values.wording import listed
from bursar.wire.kinds.allocation import job_index_in
from bursar.wire.to_scheduler.ask import tolerations_in

STOPPED = frozenset(Stopped)

# Status fields of pending work only.
WAITING = ("reason", "message", "nominated", "queuePosition")

# Epochs reserved for each era, so that a new era begins above all epochs of the one before.
ERA_EPOCHS = 1000

Ranked: TypeAlias = tuple[int, int]  # its rank in its gang, and the gang's size

# Plans repeat the same few amounts.
_text = lru_cache(4096)(format_granted)


class BindMember(Struct, frozen=True):
    """One allocation of a unit, with its target nodes. An empty uid matches any allocation of the name."""

    key: Key
    targets: tuple[Target, ...]
    request: ResourceRequest
    gang: str = ""
    uid: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bind(Command):
    """Place a unit of pending allocations on nodes: all its members or none. The reply has one entry per member."""

    members: tuple[BindMember, ...]

    @classmethod
    def unit(cls, members: Sequence[BindMember], origin: Origin, fence: int | None = None) -> Bind:
        assert len({member.key for member in members}) == len(members) > 0, "a unit names each of its members once"
        return cls(key=members[0].key, origin=origin, fence=fence, members=tuple(members))

    @classmethod
    def one(
        cls,
        *,
        key: Key,
        origin: Origin,
        targets: tuple[Target, ...],
        request: ResourceRequest,
        gang: str = "",
        uid: str = "",
        fence: int | None = None,
    ) -> Bind:
        """A unit of one allocation."""
        return cls(key=key, origin=origin, fence=fence, members=(BindMember(key, targets, request, gang, uid),))

    def objects(self) -> Iterable[Key]:
        return [member.key for member in self.members]

    def nodes(self) -> Iterable[str]:
        return [target.node for member in self.members for target in member.targets]

    def gangs(self) -> dict[GangKey, int]:
        return {(member.key.namespace, member.gang): 0 for member in self.members if member.gang}

    def charges(self, batch: UnitOfWork) -> Iterable[tuple[str, Charge]]:
        for member in self.members:
            if before := batch.objects.get(member.key):
                yield member.key.namespace, bound_charge(before.charge, 0)

    def decide(self, batch: UnitOfWork) -> Result:
        for member in self.members:
            if refusal := _outrun(batch, member) or _kept_off(batch, member):
                return self._naming_member(member, refusal)
        for gang in self.gangs() if batch.gangs else ():
            if refusal := self._torn(batch, gang):
                return refusal
        placings = self._place(batch)
        if isinstance(placings, Refusal):
            return placings
        leases = self._leases(batch, placings)
        if isinstance(leases, Refusal):
            return leases
        moves = [
            Move(member.key.namespace, batch.objects[member.key].charge, placing.charge)
            for member, placing in zip(self.members, placings, strict=True)
        ]
        if exceeded := batch.counters.move(moves):
            return quota_refusal("allocation", exceeded, sight_of(batch, self))
        # All checks are done: from here on nothing is refused.
        if batch.ledger is not None:
            for lease in chain.from_iterable(leases):
                refusal = batch.ledger.open(lease, started=False)
                assert refusal is None, "the check for lacking credit allows to open it"
        ranks = self._rank(batch) if batch.gangs else {}
        saving = zip(self.members, placings, leases, strict=True)
        return tuple([_save(batch, self.origin, *one, ranks.get(one[0].key)) for one in saving])

    def _rank(self, batch: UnitOfWork) -> dict[Key, Ranked]:
        """The rank of each member in its gang. A gang is placed all at once, so its members can learn of each other."""
        ranks: dict[Key, Ranked] = {}
        for gang in self.gangs():
            if (row := batch.gangs.get(gang)) is None:
                continue
            members = [one for one in self.members if (one.key.namespace, one.gang) == gang]
            coming = [
                Peer(one.key.name, job_index_in(batch.objects[one.key].doc), tuple(at.node for at in one.targets))
                for one in members
            ]
            runs = any(phase_of(one) in PLACED for one in batch.members(*gang))
            peers = joined(row.peers, coming) if runs else ranked(coming)
            batch.set_gang(gang, replace(row, peers=peers))
            size = size_of(peers)
            ranks |= {one.key: (rank_of(peers, one.key.name) or 0, size) for one in members}
        return ranks

    def pays(self, batch: UnitOfWork) -> Iterable[PlacementPayer]:
        for member in self.members:
            before = batch.objects.get(member.key)
            nodes = [target.node for target in member.targets]
            if before is not None and (found := payment_of(batch, before, nodes)) is not None:
                yield found

    def _leases(self, batch: UnitOfWork, placings: Sequence[BindCheck]) -> Sequence[Sequence[Lease]] | Refusal:
        """The leases of each member, not opened yet. The unit is paid for as a whole, or not at all."""
        if batch.ledger is None:
            return [()] * len(self.members)
        drafts: list[list[Lease]] = []
        for member, placing in zip(self.members, placings, strict=True):
            taken = [(target.node, fit.resources) for target, fit in zip(member.targets, placing.fits, strict=True)]
            found = leases_of(batch, batch.objects[member.key], taken)
            if isinstance(found, Refusal):
                return self._naming_member(member, found)
            drafts.append(found)
        return batch.ledger.lacking(chain.from_iterable(drafts)) or drafts

    def _torn(self, batch: UnitOfWork, gang: GangKey) -> Refusal | None:
        """The refusal of an incomplete gang: it starts with `minMembers`, or with all that are left of fewer.
        A member that joins running ones may start alone; members that are being stopped do not count as running."""
        row = batch.gangs.get(gang)
        if row is None:
            return None
        together = sum(1 for member in self.members if (member.key.namespace, member.gang) == gang)
        needed = min(row.min_members, row.members)
        if together < needed and not any(phase_of(one) in PLACED for one in batch.members(*gang)):
            return Refusal(Code.STALE, f"the plan places {together} of the {needed} members of gang {gang[1]}")
        return None

    def _place(self, batch: UnitOfWork) -> list[BindCheck] | Refusal:
        """Place one member after another, each on the capacity left by those before it."""
        if len(self.members) == 1:
            (member,) = self.members
            placing = place(batch.nodes, member.request, member.targets, batch.objects[member.key].charge)
            return placing if isinstance(placing, Refusal) else [placing]
        capacities: MutableMapping[str, NodeCapacity] = ChainMap({}, batch.nodes)
        placings: list[BindCheck] = []
        for member in self.members:
            placing = place(capacities, member.request, member.targets, batch.objects[member.key].charge)
            if isinstance(placing, Refusal):
                return self._naming_member(member, placing)
            capacities.update({capacity.name: capacity for capacity in placing.capacities})
            placings.append(placing)
        return placings

    def _naming_member(self, member: BindMember, refusal: Refusal) -> Refusal:
        """The refusal of a unit, naming the member that could not be placed."""
        if len(self.members) == 1:
            return refusal
        cause = Cause(str(refusal.code), refusal.message, field=f"members[{self.members.index(member)}]")
        message = f"{member.key.name}: {refusal.message}"
        return replace(refusal, message=message, causes=(cause, *refusal.causes))


def _outrun(batch: UnitOfWork, member: BindMember) -> Refusal | None:
    before = batch.objects.get(member.key)
    if before is None:
        return not_found(member.key)
    if before.uid != (member.uid or before.uid) or before.gang != member.gang:
        return Refusal(Code.STALE, f"{member.key.name} was deleted and created again")
    if refusal := waits_no_more(before):
        return refusal
    if awaits_approval(before):
        return Refusal(Code.STALE, f"{member.key.name} awaits approval")
    if before.charge.due:
        return Refusal(Code.STALE, f"the gang of {member.key.name} is not complete")
    return None


def _kept_off(batch: UnitOfWork, member: BindMember) -> Refusal | None:
    """The refusal of a target that does not admit the member. A claimed node is for its holder only, and sensitive work
    needs a node claimed by its user. A node's gate (taints, dedicated tenants, whole devices, isolation) is checked
    again, because it may have changed since the plan."""
    permit = permit_of(batch.tree, batch.tenant_of(batch.objects[member.key]))
    strict = permit.isolated or permit.whole_only
    for target in member.targets:
        capacity = batch.nodes.get(target.node)
        terms = capacity is not None and (strict or keeps_off(capacity.gate))
        if capacity is not None and terms and (refusal := _gate_refusal(batch, member, capacity, permit)):
            return refusal
        if capacity is not None and (capacity.claim is not None or member.request.sensitive):
            user = status_of(batch.objects[member.key]).get("user", "")
            if refusal := kept_off(capacity.name, capacity.claim, user, sensitive=member.request.sensitive):
                return refusal
    return None


def _gate_refusal(batch: UnitOfWork, member: BindMember, capacity: NodeCapacity, permit: Permit) -> Refusal | None:
    """Check the gate with the allocation's current tolerations and its tenant's current permissions."""
    work = batch.objects[member.key]
    asked, fractional = tolerations_in(work.doc)
    exempt = bool(status_of(work).get("permittedBy"))
    return kept_out(capacity.name, capacity.gate, permit, asked, exempt=exempt, fractional=fractional)


def _save(
    batch: UnitOfWork,
    origin: Origin,
    member: BindMember,
    placing: BindCheck,
    leases: Sequence[Lease],
    place: Ranked | None,
) -> Write:
    before = batch.objects[member.key]
    status = status_of(before)
    # Higher than the epoch of any earlier placement, so that late reports are recognised. After a restore from a backup
    # it is also higher than lost epochs: an agent must not take the work it ran then for the new placement.
    epoch = max(status.get("epoch", 0), batch.era * ERA_EPOCHS) + 1
    for capacity in placing.capacities:
        batch.use_node(capacity)
    paid: Mapping[str, int] = {}
    if leases or any(capacity.claim is not None for capacity in placing.capacities):
        paid = paid_by(batch, before, [target.node for target in member.targets], leases)
    batch.place([
        Placement(
            target.node, before.uid, member.key.namespace, member.key.name, before.tenant, epoch,
            member.request.exclusive, taken.resources, taken.devices, lease=paid.get(target.node, 0),
        )
        for target, taken in zip(member.targets, placing.fits, strict=True)
    ])  # fmt: skip
    _set_bound(status, member, placing, epoch, timestamp(batch.now))
    if paid:
        show_leases(status, paid)
    if place is not None:
        status["rank"], status["size"] = place
    return batch.put(with_status(before, status, node=member.targets[0].node, charge=placing.charge), origin)


def show_leases(status: dict[str, Any], paid: Mapping[str, int]) -> None:
    """Write to the status which lease pays for it on each node, from which its nodes learn that it is prepaid."""
    for shown in status["nodes"]:
        if number := paid.get(shown["name"], 0):
            shown["lease"] = lease_name(number)


def _set_bound(status: dict[str, Any], member: BindMember, placing: BindCheck, epoch: int, at: str) -> None:
    for name in WAITING:
        status.pop(name, None)
    first = placing.capacities[0]
    status["phase"] = Phase.SCHEDULED
    status["nodeName"] = first.name
    if first.uid:
        status["nodeId"] = first.uid
    status["nodes"] = [
        {"name": capacity.name, "devices": taken.devices}
        for capacity, taken in zip(placing.capacities, placing.fits, strict=True)
    ]
    requests = member.request.requests
    count = len(placing.capacities)
    status["allocatedResources"] = {name: _text(name, value * count) for name, value in requests.items()}
    status["epoch"] = epoch
    status["scheduledTime"] = at
    where = listed([capacity.name for capacity in placing.capacities], "node")
    set_condition(status, "Scheduled", "True", "Bound", f"Placed on {where}", at)


@dataclass(frozen=True, slots=True, kw_only=True)
class NotePending(Command):
    """Record why an allocation is pending. Only another reason is a change, because its numbers change all the time.

    The reason and message of an evicted allocation keep saying why it was stopped until it is placed again; its
    condition `Scheduled` says why it is pending now.
    """

    uid: str
    reason: str
    message: str

    def charges(self, _: UnitOfWork) -> Iterable[tuple[str, Charge]]:
        return ()

    def decide(self, batch: UnitOfWork) -> Result:
        before = batch.objects.get(self.key)
        if before is None or before.uid != self.uid:
            return Refusal(Code.STALE, f"{self.key.name} no longer exists")
        if refusal := waits_no_more(before):
            return refusal
        status = status_of(before)
        if self.reason in (status.get("reason"), _waits_for(status)):
            return unchanged(before)
        if status.get("reason") not in STOPPED:
            status |= {"reason": self.reason, "message": self.message}
        set_condition(status, "Scheduled", "False", self.reason, self.message, timestamp(batch.now))
        return batch.put(with_status(before, status), self.origin)


def _waits_for(status: Mapping[str, Any]) -> str:
    """The reason of the condition `Scheduled`, if the allocation is not placed."""
    found = (one for one in status.get("conditions", ()) if one["type"] == "Scheduled" and one["status"] == "False")
    return str(next((one.get("reason") for one in found), ""))
