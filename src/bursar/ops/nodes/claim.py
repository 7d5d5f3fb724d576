"""Claiming a node for sensitive work, giving it back, and having it wiped before others may use it.

Who holds a node stands with its room, under the same lock: whoever commits first has it. How many may be claimed is the
whole system's limit; who claims holds the settings' row, and counts in a later statement, so no two can both be the
last. The node's status says that it is claimed and since when, and never by whom: everybody reads it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import Struct

from bursar.core.batch.claim_billing import close_now, lacking_after, lease_of_claim
from bursar.core.batch.placement_billing import Payment, owners_of
from bursar.core.batch.unit_of_work import Sheet, begin_usage, end_usage
from bursar.core.credit.lease import Lease
from bursar.core.nodes.node import WHOLE, NodeRoom, Placement
from bursar.core.nodes.node_claim import (
    POOL,
    UID_PREFIX,
    Claim,
    State,
    held,
    in_use,
    is_of,
    not_allowed,
    not_clean,
    open_to,
    pool_exhausted,
)
from bursar.core.objects.object import Key, Origin, Stored
from bursar.core.quota.tenant_tree import Tree, lineage
from bursar.core.quota.tenant_tree import sees as sees_tenant
from bursar.core.values.access import Reach
from bursar.core.values.refusal import Code, Refusal
from bursar.core.values.replace import replace
from bursar.ops.objects.object import not_found
from bursar.ops.runtime.clock import new_uid, timestamp
from bursar.ops.runtime.command import Command, Reply, Result
from bursar.ops.runtime.runtime import Office
from bursar.ops.scheduling.bind import show_leases
from bursar.ops.workloads.allocation import drop_conditions, set_condition, status_of, unchanged, with_status
from bursar.store.db.idempotency import Claim as RequestClaim
from bursar.store.nodes import node as node_store
from bursar.wire.kinds.settings import SYSTEM
from bursar.wire.shared.document import encode

FAILED = "WipeFailed"
RELEASED = "Released"  # how the use of a claimed node ends
CLAIMED = "Claimed"  # how that of work ends whose node was claimed by its own user
SETTINGS = Key("Settings", "", SYSTEM)
NOBODYS = Reach()
TRIES_MAX = 5  # of a claim, while work of who claims comes and goes on the node


def node_key(name: str) -> Key:
    return Key("Node", "", name)


def pool_size(tree: Tree) -> int:
    """How many nodes may be claimed at once; none, unless somebody said so."""
    return tree.system.get(POOL, 0) // WHOLE


# Commands.


@dataclass(frozen=True, slots=True, kw_only=True)
class OnNode(Command):
    """What becomes of the claim of a node, which must be there."""

    def nodes(self) -> Iterable[str]:
        return (self.key.name,)

    def leases(self, sheet: Sheet) -> Iterable[int]:
        claim = self.claim_on(sheet)
        return (claim.lease,) if claim is not None and claim.lease else ()

    def decide(self, sheet: Sheet) -> Result:
        before, room = sheet.objects.get(self.key), sheet.nodes.get(self.key.name)
        if before is None or room is None:
            return not_found(self.key)
        return self.decide_on(sheet, before, room)

    def decide_on(self, sheet: Sheet, before: Stored, room: NodeRoom, /) -> Result:
        raise NotImplementedError

    def claim_on(self, sheet: Sheet) -> Claim | None:
        room = sheet.nodes.get(self.key.name)
        return room.claim if room is not None else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimNode(OnNode):
    """Take a node for one person, on which nothing is placed but their own work. Who has it already keeps it; everybody
    else is refused. Where its tenant pays beforehand, all of the node is paid for from then on, and by that what runs
    there; what was paid for that until now is settled.

    A node that is not known to be clean is wiped first. It counts against the pool from now on, and costs nothing until
    it is wiped."""

    draft: Claim
    reach: Reach  # of who asks: it decides what they are told of who holds the node
    work: tuple[Key, ...] = ()  # what is placed there, as it was read without a lock

    def claims(self) -> Iterable[str]:
        return (self.key.name,)

    def meters(self, _: Sheet) -> Iterable[str]:
        return (self.key.name,)

    def objects(self) -> Iterable[Key]:
        # The settings last: the order of keys is the order of locks.
        return (*self.work, self.key, SETTINGS)

    def pays(self, sheet: Sheet) -> Iterable[Payment]:
        return payments(sheet, self.draft, self.key.name)

    def leases(self, sheet: Sheet) -> Iterable[int]:
        return self._replaced(sheet)

    def decide_on(self, sheet: Sheet, before: Stored, room: NodeRoom) -> Result:
        if open_to(room.claim, self.draft.holder, sensitive=True) or self._is_prepared(room.claim):
            return unchanged(before)
        if refusal := self._refusal(sheet, room):
            return refusal
        lease = self._lease(sheet, room)
        if isinstance(lease, Refusal):
            return lease
        sheet.claimed += 1
        tenant = sheet.tree.tenants[self.draft.tenant]
        claim = replace(self.draft, since=timestamp(sheet.now), tenant_uid=tenant.uid)
        if room.soiled:
            return put_claim(sheet, before, room, replace(claim, state=State.WIPING, attempt=1), self.origin)
        if lease is not None:
            claim = replace(claim, lease=self._pay(sheet, lease))
        for part, _ in sheet.occupants.get(room.name, ()):
            # From now on the claim counts for all that runs there.
            end_usage(sheet, part.uid, part.node, CLAIMED)
        begin_usage(sheet, _whole(room, claim), claim.holder)
        return put_claim(sheet, before, room, claim, self.origin)

    def _is_prepared(self, claim: Claim | None) -> bool:
        return claim is not None and claim.prepares and claim.holder == self.draft.holder

    def _refusal(self, sheet: Sheet, room: NodeRoom) -> Refusal | None:
        if self.draft.tenant not in sheet.tree.tenants:
            return Refusal(Code.UNPROCESSABLE, f"there is no tenant {self.draft.tenant}")
        for tenant in lineage(sheet.tree, self.draft.tenant):
            if not sheet.tree.tenants[tenant].may_claim:
                return not_allowed(tenant)
        if room.claim is not None:
            return held(room.name, room.claim, told=sees(self.reach, sheet.tree, room.claim))
        if not room.schedulable:
            message = f"node {room.name} takes no new work: it is cordoned or not ready"
            return Refusal(Code.CONFLICT, message, f"Choose another node, or: bursar uncordon {room.name}")
        if any(room.allocated.values()) and not self._is_alone(sheet):
            return in_use(room.name, (), "claimed")
        wipes, placed = room.gate is not None and room.gate.wipes, any(room.allocated.values())
        if room.soiled and (refusal := not_clean(room.name, placed=placed, wipes=wipes)):
            return refusal
        size = pool_size(sheet.tree)
        return pool_exhausted(sheet.claimed, size) if sheet.claimed >= size else None

    def _lease(self, sheet: Sheet, room: NodeRoom) -> Lease | Refusal | None:
        """What would pay for the node, not opened yet; None where nobody pays beforehand."""
        draft = lease_of_claim(sheet, room, self.draft)
        if not isinstance(draft, Lease):
            return draft
        if any(part.lease and part.uid not in sheet.placements for part, _ in sheet.occupants.get(room.name, ())):
            return Refusal(Code.STALE, f"other work came to node {room.name} while it was being claimed")
        assert sheet.book is not None, "the account that pays was read"
        return lacking_after(sheet.book, self._replaced(sheet), draft) or draft

    def _replaced(self, sheet: Sheet) -> list[int]:
        """The leases of what is placed there: from now on the claim's pays for that."""
        return [part.lease for part, _ in sheet.occupants.get(self.key.name, ()) if part.lease]

    def _pay(self, sheet: Sheet, lease: Lease) -> int:
        """Everything was checked: hold the first window, and have it pay for what runs there."""
        assert sheet.book is not None
        for number in self._replaced(sheet):
            close_now(sheet.book, number)
        refusal = sheet.book.open(lease, started=True)
        assert refusal is None, "what was not lacking can be opened"
        for part, work in sheet.occupants.get(self.key.name, ()):
            if part.lease:
                self._hand_over(sheet, part, sheet.objects[work.key], lease)
        return lease.id

    def _hand_over(self, sheet: Sheet, part: Placement, work: Stored, lease: Lease) -> None:
        parts = sheet.placements[work.uid]
        sheet.place([replace(one, lease=lease.id) if one.node == part.node else one for one in parts])
        status = status_of(work)
        show_leases(status, {part.node: lease.id})
        sheet.put(with_status(work, status), self.origin)

    def _is_alone(self, sheet: Sheet) -> bool:
        """Whether all that is placed there is of who claims it."""
        there = sheet.occupants.get(self.key.name, ())
        return bool(there) and all(status_of(work).get("user") == self.draft.holder for _, work in there)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseNode(OnNode):
    """Give a claimed node back: from then on it is to be wiped. One that is still wiped for its new holder was never
    theirs, and is open again at once."""

    user: str  # who gives it back
    over: Reach = NOBODYS  # whose claims they may end beside their own
    claim_id: str = ""  # the claim that is meant, should the node have been given to another

    def decide_on(self, sheet: Sheet, before: Stored, room: NodeRoom) -> Result:
        if room.claim is None:
            return Refusal(Code.CONFLICT, f"node {room.name} is not claimed")
        if room.claim.id != (self.claim_id or room.claim.id):
            return Refusal(Code.STALE, f"node {room.name} has another claim by now")
        own = room.claim.holder == self.user and is_there(sheet.tree, room.claim)
        if not own and not sees(self.over, sheet.tree, room.claim):
            return Refusal(Code.FORBIDDEN, f"node {room.name} is claimed by somebody else")
        if room.claim.prepares:
            return put_claim(sheet, before, room, None, self.origin)
        if room.claim.state is not State.HELD:
            return unchanged(before)
        if any(room.allocated.values()):
            return in_use(room.name, (), "released")
        end_usage(sheet, room.claim.id, room.name, RELEASED, self.origin.reason)
        if room.claim.lease:
            assert sheet.book is not None, "the lease of what ends is read with it"
            close_now(sheet.book, room.claim.lease)
        at = timestamp(sheet.now)
        claim = replace(room.claim, state=State.WIPING, released=at, attempt=1, lease=0, unpaid="")
        return put_claim(sheet, before, room, claim, self.origin)


@dataclass(frozen=True, slots=True, kw_only=True)
class WipeNode(OnNode):
    """Have a node that was given back wiped again, as when that failed."""

    def decide_on(self, sheet: Sheet, before: Stored, room: NodeRoom) -> Result:
        if refusal := _not_released(room):
            return refusal
        assert room.claim is not None
        if room.claim.state is State.WIPING:
            return unchanged(before)
        claim = replace(room.claim, state=State.WIPING, attempt=room.claim.attempt + 1, message="")
        return put_claim(sheet, before, room, claim, self.origin)


@dataclass(frozen=True, slots=True, kw_only=True)
class EndWipe(OnNode):
    """That a node was wiped, or that this failed. Without a number it is an administrator's word, which always counts,
    also of a node that nobody has claimed; a node's own counts for the attempt that it speaks of.

    A node that was wiped for its new holder is theirs from now on, and paid for."""

    claim_id: str = ""
    attempt: int = 0
    failed: str = ""

    def meters(self, _: Sheet) -> Iterable[str]:
        return (self.key.name,)

    def pays(self, sheet: Sheet) -> Iterable[Payment]:
        claim = self.claim_on(sheet)
        return payments(sheet, claim, self.key.name) if claim is not None and claim.prepares else ()

    def decide_on(self, sheet: Sheet, before: Stored, room: NodeRoom) -> Result:
        if self.claim_id and not self._is_meant(room.claim):
            return unchanged(before)
        if room.claim is None and room.soiled:
            return self._cleaned(sheet, before, room)
        if refusal := _not_released(room):
            return refusal
        assert room.claim is not None
        if self.failed:
            failed = replace(room.claim, state=State.WIPE_FAILED, message=self.failed)
            return put_claim(sheet, before, room, failed, self.origin)
        room = replace(room, soiled=False)
        assert room.claim is not None
        if room.claim.prepares:
            return self._hand_over(sheet, before, room, room.claim)
        return put_claim(sheet, before, room, None, self.origin)

    def _cleaned(self, sheet: Sheet, before: Stored, room: NodeRoom) -> Result:
        """An administrator wiped a node that nobody has claimed."""
        if any(room.allocated.values()):
            return in_use(room.name, (), "called clean")
        return put_claim(sheet, before, replace(room, soiled=False), None, self.origin)

    def _hand_over(self, sheet: Sheet, before: Stored, room: NodeRoom, claim: Claim) -> Result:
        """The node is its holder's from now on, and paid for. If nobody pays by now, the claim has ended."""
        claim = replace(claim, state=State.HELD, since=timestamp(sheet.now), attempt=0, message="")
        lease = lease_of_claim(sheet, room, claim)
        refusal = lease if isinstance(lease, Refusal) else None
        if isinstance(lease, Lease):
            assert sheet.book is not None, "the account that pays was read"
            refusal = sheet.book.open(lease, started=True)
            claim = replace(claim, lease=lease.id)
        if refusal is not None:
            origin = replace(self.origin, verb="release", reason=refusal.message)
            return put_claim(sheet, before, room, None, origin)
        begin_usage(sheet, _whole(room, claim), claim.holder)
        return put_claim(sheet, before, room, claim, self.origin)

    def _is_meant(self, claim: Claim | None) -> bool:
        return (
            claim is not None
            and claim.state is State.WIPING
            and (claim.id, claim.attempt) == (self.claim_id, self.attempt)
        )


def _not_released(room: NodeRoom) -> Refusal | None:
    if room.claim is None:
        return Refusal(Code.CONFLICT, f"node {room.name} is not claimed, and is clean: there is nothing to wipe")
    if room.claim.state is State.HELD:
        message = f"node {room.name} is claimed, and was not given back"
        return Refusal(Code.CONFLICT, message, f"Release it first: bursar node release {room.name}")
    return None


def payments(sheet: Sheet, claim: Claim, node: str) -> list[Payment]:
    """What must be read before a claimed node can be paid for."""
    if claim.tenant not in sheet.tree.prepaid or node not in sheet.nodes:
        return []
    return [Payment(owners_of(claim.tenant, claim.holder), (node,))]


def put_claim(sheet: Sheet, before: Stored, room: NodeRoom, claim: Claim | None, origin: Origin) -> Result:
    """The node with its claim as it is now. Plans that were made for it before are stale."""
    at = timestamp(sheet.now)
    sheet.set_node(replace(room, generation=room.generation + 1, claim=claim))
    status = status_of(before)
    status.pop("claim", None)
    if claim is not None:
        status["claim"] = shown(claim)
    if claim is not None and claim.state is State.WIPE_FAILED:
        set_condition(status, FAILED, "True", "WipeHookFailed", claim.message, at)
    elif any(one["type"] == FAILED for one in status.get("conditions", ())):
        drop_conditions(status, FAILED)
    return sheet.put(replace(before, status=encode(status)), origin)


def _whole(room: NodeRoom, claim: Claim) -> Placement:
    """What a claim counts for, used or idle: a placement of the whole node, that is stored nowhere else."""
    return Placement(room.name, claim.id, "", room.name, claim.tenant, 1, True, room.allocatable, {}, True, claim.lease)


def shown(claim: Claim) -> dict[str, Any]:
    """What a node's status says of its claim: all that is for everybody, and nothing else."""
    told: dict[str, Any] = {"id": claim.id, "state": str(claim.state), "since": claim.since}
    if claim.released:
        told["released"] = claim.released
    if claim.attempt:
        told["attempt"] = claim.attempt
    return told


def sees(reach: Reach, tree: Tree, claim: Claim) -> bool:
    """Whether somebody may know, or decide, whose claim this is. What is left of a tenant that is gone is an
    administrator's."""
    return reach.everything or (is_there(tree, claim) and sees_tenant(tree, reach, claim.tenant))


def is_there(tree: Tree, claim: Claim) -> bool:
    """Whether the tenant of a claim is there; one that was given its name later is another."""
    tenant = tree.tenants.get(claim.tenant)
    return tenant is not None and is_of(claim, tenant.uid)


def keep_claim(before: Stored, after: Stored) -> Stored:
    """The next version of a node, with what is said of its claim as it was."""
    if b'"claim"' not in before.status and b'"claim"' not in after.status:
        return after
    status, claim = status_of(after), status_of(before).get("claim")
    status.pop("claim", None)
    if claim:
        status["claim"] = claim
    return replace(after, status=encode(status))


# Verbs.


async def claim_node(
    office: Office,
    name: str,
    origin: Origin,
    reach: Reach,
    *,
    tenant: str,
    user: str,
    reason: str = "",
    claim: RequestClaim | None = None,
    dry_run: bool = False,
) -> Reply:
    """Claim a node for a user."""
    draft = Claim(new_uid(UID_PREFIX), tenant, user, "", origin.actor, reason)
    lane = office.trying if dry_run else office.changing
    for _ in range(TRIES_MAX):
        async with office.database.reader() as db:
            placements = await node_store.load_placements_on(db, [name])
        work = tuple(Key("Allocation", one.namespace, one.name) for one in placements if one.lease)
        command = ClaimNode(key=node_key(name), origin=origin, claim=claim, draft=draft, reach=reach, work=work)
        reply = await lane.submit(command, tenant)
        if not isinstance(reply, Refusal) or reply.code is not Code.STALE:
            break
    return await _with_names(office, name, reply, reach, "claimed")


async def release_node(office: Office, command: ReleaseNode, reach: Reach, *, dry_run: bool = False) -> Reply:
    """Give a node back. It is refused while work is placed there."""
    reply = await (office.trying if dry_run else office.changing).submit(command, "")
    return await _with_names(office, command.key.name, reply, reach, "released")


async def wipe_node(office: Office, name: str, origin: Origin, *, dry_run: bool = False) -> Reply:
    command = WipeNode(key=node_key(name), origin=origin)
    return await (office.trying if dry_run else office.changing).submit(command, "")


async def end_wipe(
    office: Office,
    name: str,
    origin: Origin,
    *,
    claim_id: str = "",
    attempt: int = 0,
    failed: str = "",
    dry_run: bool = False,
) -> Reply:
    command = EndWipe(key=node_key(name), origin=origin, claim_id=claim_id, attempt=attempt, failed=failed)
    return await (office.trying if dry_run else office.changing).submit(command, "")


async def _with_names(office: Office, name: str, reply: Reply, reach: Reach, what: str) -> Reply:
    """What is placed there, by name, as far as the caller may know."""
    if not isinstance(reply, Refusal) or reply.code is not Code.IN_USE:
        return reply
    async with office.database.reader() as db:
        placements = await node_store.load_placements_on(db, [name])
    tree = office.trees.latest
    seen = [f"{one.namespace}/{one.name}" for one in placements if sees_tenant(tree, reach, one.tenant)]
    return in_use(name, seen, what)


class Pool(Struct, frozen=True):
    """How many nodes may be claimed, how many are, and those whose holder the caller may know."""

    size: int
    claimed: int
    claims: tuple[tuple[str, Claim], ...]  # by node


async def load_pool(office: Office, reach: Reach) -> Pool:
    async with office.database.reader() as db:
        rooms = await node_store.load_claimed(db)
        tree = await office.trees.refresh(db)
    claims = [(name, room.claim) for name, room in sorted(rooms.items()) if room.claim is not None]
    return Pool(pool_size(tree), len(claims), tuple(_visible(claims, reach, tree)))


def _visible(claims: Sequence[tuple[str, Claim]], reach: Reach, tree: Tree) -> list[tuple[str, Claim]]:
    return [(name, claim) for name, claim in claims if sees(reach, tree, claim)]
