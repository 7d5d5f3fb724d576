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
from bursar.core.batch.placement_billing import PlacementPayer, owners_of
from bursar.core.batch.unit_of_work import UnitOfWork, begin_usage, end_usage
from bursar.core.credit.lease import Lease
from bursar.core.nodes.node import WHOLE, NodeCapacity, Placement
from bursar.core.nodes.node_claim import (
    POOL,
    UID_PREFIX,
    ClaimState,
    NodeClaim,
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
from bursar.ops.runtime.runtime import Runtime
from bursar.ops.scheduling.bind import show_leases
from bursar.ops.workloads.allocation import drop_conditions, set_condition, status_of, unchanged, with_status
from bursar.store.db.idempotency import IdempotencyKey as RequestClaim
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

    def leases(self, batch: UnitOfWork) -> Iterable[int]:
        claim = self.claim_on(batch)
        return (claim.lease,) if claim is not None and claim.lease else ()

    def decide(self, batch: UnitOfWork) -> Result:
        before, capacity = batch.objects.get(self.key), batch.nodes.get(self.key.name)
        if before is None or capacity is None:
            return not_found(self.key)
        return self.decide_on(batch, before, capacity)

    def decide_on(self, batch: UnitOfWork, before: Stored, capacity: NodeCapacity, /) -> Result:
        raise NotImplementedError

    def claim_on(self, batch: UnitOfWork) -> NodeClaim | None:
        capacity = batch.nodes.get(self.key.name)
        return capacity.claim if capacity is not None else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimNode(OnNode):
    """Take a node for one person, on which nothing is placed but their own work. Who has it already keeps it; everybody
    else is refused. Where its tenant pays beforehand, all of the node is paid for from then on, and by that what runs
    there; what was paid for that until now is settled.

    A node that is not known to be clean is wiped first. It counts against the pool from now on, and costs nothing until
    it is wiped."""

    draft: NodeClaim
    reach: Reach  # of who asks: it decides what they are told of who holds the node
    work: tuple[Key, ...] = ()  # what is placed there, as it was read without a lock

    def claims(self) -> Iterable[str]:
        return (self.key.name,)

    def meters(self, _: UnitOfWork) -> Iterable[str]:
        return (self.key.name,)

    def objects(self) -> Iterable[Key]:
        # The settings last: the order of keys is the order of locks.
        return (*self.work, self.key, SETTINGS)

    def pays(self, batch: UnitOfWork) -> Iterable[PlacementPayer]:
        return payments(batch, self.draft, self.key.name)

    def leases(self, batch: UnitOfWork) -> Iterable[int]:
        return self._replaced(batch)

    def decide_on(self, batch: UnitOfWork, before: Stored, capacity: NodeCapacity) -> Result:
        if open_to(capacity.claim, self.draft.holder, sensitive=True) or self._is_prepared(capacity.claim):
            return unchanged(before)
        if refusal := self._refusal(batch, capacity):
            return refusal
        lease = self._lease(batch, capacity)
        if isinstance(lease, Refusal):
            return lease
        batch.claimed += 1
        tenant = batch.tree.tenants[self.draft.tenant]
        claim = replace(self.draft, since=timestamp(batch.now), tenant_uid=tenant.uid)
        if capacity.soiled:
            return put_claim(batch, before, capacity, replace(claim, state=ClaimState.WIPING, attempt=1), self.origin)
        if lease is not None:
            claim = replace(claim, lease=self._pay(batch, lease))
        for part, _ in batch.occupants.get(capacity.name, ()):
            # From now on the claim counts for all that runs there.
            end_usage(batch, part.uid, part.node, CLAIMED)
        begin_usage(batch, _whole(capacity, claim), claim.holder)
        return put_claim(batch, before, capacity, claim, self.origin)

    def _is_prepared(self, claim: NodeClaim | None) -> bool:
        return claim is not None and claim.prepares and claim.holder == self.draft.holder

    def _refusal(self, batch: UnitOfWork, capacity: NodeCapacity) -> Refusal | None:
        if self.draft.tenant not in batch.tree.tenants:
            return Refusal(Code.UNPROCESSABLE, f"there is no tenant {self.draft.tenant}")
        for tenant in lineage(batch.tree, self.draft.tenant):
            if not batch.tree.tenants[tenant].may_claim:
                return not_allowed(tenant)
        if capacity.claim is not None:
            return held(capacity.name, capacity.claim, told=sees(self.reach, batch.tree, capacity.claim))
        if not capacity.schedulable:
            message = f"node {capacity.name} takes no new work: it is cordoned or not ready"
            return Refusal(Code.CONFLICT, message, f"Choose another node, or: bursar uncordon {capacity.name}")
        if any(capacity.allocated.values()) and not self._is_alone(batch):
            return in_use(capacity.name, (), "claimed")
        wipes, placed = capacity.gate is not None and capacity.gate.wipes, any(capacity.allocated.values())
        if capacity.soiled and (refusal := not_clean(capacity.name, placed=placed, wipes=wipes)):
            return refusal
        size = pool_size(batch.tree)
        return pool_exhausted(batch.claimed, size) if batch.claimed >= size else None

    def _lease(self, batch: UnitOfWork, capacity: NodeCapacity) -> Lease | Refusal | None:
        """What would pay for the node, not opened yet; None where nobody pays beforehand."""
        draft = lease_of_claim(batch, capacity, self.draft)
        if not isinstance(draft, Lease):
            return draft
        if any(part.lease and part.uid not in batch.placements for part, _ in batch.occupants.get(capacity.name, ())):
            return Refusal(Code.STALE, f"other work came to node {capacity.name} while it was being claimed")
        assert batch.ledger is not None, "the account that pays was read"
        return lacking_after(batch.ledger, self._replaced(batch), draft) or draft

    def _replaced(self, batch: UnitOfWork) -> list[int]:
        """The leases of what is placed there: from now on the claim's pays for that."""
        return [part.lease for part, _ in batch.occupants.get(self.key.name, ()) if part.lease]

    def _pay(self, batch: UnitOfWork, lease: Lease) -> int:
        """Everything was checked: hold the first window, and have it pay for what runs there."""
        assert batch.ledger is not None
        for number in self._replaced(batch):
            close_now(batch.ledger, number)
        refusal = batch.ledger.open(lease, started=True)
        assert refusal is None, "what was not lacking can be opened"
        for part, work in batch.occupants.get(self.key.name, ()):
            if part.lease:
                self._hand_over(batch, part, batch.objects[work.key], lease)
        return lease.id

    def _hand_over(self, batch: UnitOfWork, part: Placement, work: Stored, lease: Lease) -> None:
        parts = batch.placements[work.uid]
        batch.place([replace(one, lease=lease.id) if one.node == part.node else one for one in parts])
        status = status_of(work)
        show_leases(status, {part.node: lease.id})
        batch.put(with_status(work, status), self.origin)

    def _is_alone(self, batch: UnitOfWork) -> bool:
        """Whether all that is placed there is of who claims it."""
        there = batch.occupants.get(self.key.name, ())
        return bool(there) and all(status_of(work).get("user") == self.draft.holder for _, work in there)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseNode(OnNode):
    """Give a claimed node back: from then on it is to be wiped. One that is still wiped for its new holder was never
    theirs, and is open again at once."""

    user: str  # who gives it back
    over: Reach = NOBODYS  # whose claims they may end beside their own
    claim_id: str = ""  # the claim that is meant, should the node have been given to another

    def decide_on(self, batch: UnitOfWork, before: Stored, capacity: NodeCapacity) -> Result:
        if capacity.claim is None:
            return Refusal(Code.CONFLICT, f"node {capacity.name} is not claimed")
        if capacity.claim.id != (self.claim_id or capacity.claim.id):
            return Refusal(Code.STALE, f"node {capacity.name} has another claim by now")
        own = capacity.claim.holder == self.user and is_there(batch.tree, capacity.claim)
        if not own and not sees(self.over, batch.tree, capacity.claim):
            return Refusal(Code.FORBIDDEN, f"node {capacity.name} is claimed by somebody else")
        if capacity.claim.prepares:
            return put_claim(batch, before, capacity, None, self.origin)
        if capacity.claim.state is not ClaimState.HELD:
            return unchanged(before)
        if any(capacity.allocated.values()):
            return in_use(capacity.name, (), "released")
        end_usage(batch, capacity.claim.id, capacity.name, RELEASED, self.origin.reason)
        if capacity.claim.lease:
            assert batch.ledger is not None, "the lease of what ends is read with it"
            close_now(batch.ledger, capacity.claim.lease)
        at = timestamp(batch.now)
        claim = replace(capacity.claim, state=ClaimState.WIPING, released=at, attempt=1, lease=0, unpaid="")
        return put_claim(batch, before, capacity, claim, self.origin)


@dataclass(frozen=True, slots=True, kw_only=True)
class WipeNode(OnNode):
    """Have a node that was given back wiped again, as when that failed."""

    def decide_on(self, batch: UnitOfWork, before: Stored, capacity: NodeCapacity) -> Result:
        if refusal := _not_released(capacity):
            return refusal
        assert capacity.claim is not None
        if capacity.claim.state is ClaimState.WIPING:
            return unchanged(before)
        claim = replace(capacity.claim, state=ClaimState.WIPING, attempt=capacity.claim.attempt + 1, message="")
        return put_claim(batch, before, capacity, claim, self.origin)


@dataclass(frozen=True, slots=True, kw_only=True)
class EndWipe(OnNode):
    """That a node was wiped, or that this failed. Without a number it is an administrator's word, which always counts,
    also of a node that nobody has claimed; a node's own counts for the attempt that it speaks of.

    A node that was wiped for its new holder is theirs from now on, and paid for."""

    claim_id: str = ""
    attempt: int = 0
    failed: str = ""

    def meters(self, _: UnitOfWork) -> Iterable[str]:
        return (self.key.name,)

    def pays(self, batch: UnitOfWork) -> Iterable[PlacementPayer]:
        claim = self.claim_on(batch)
        return payments(batch, claim, self.key.name) if claim is not None and claim.prepares else ()

    def decide_on(self, batch: UnitOfWork, before: Stored, capacity: NodeCapacity) -> Result:
        if self.claim_id and not self._is_meant(capacity.claim):
            return unchanged(before)
        if capacity.claim is None and capacity.soiled:
            return self._cleaned(batch, before, capacity)
        if refusal := _not_released(capacity):
            return refusal
        assert capacity.claim is not None
        if self.failed:
            failed = replace(capacity.claim, state=ClaimState.WIPE_FAILED, message=self.failed)
            return put_claim(batch, before, capacity, failed, self.origin)
        capacity = replace(capacity, soiled=False)
        assert capacity.claim is not None
        if capacity.claim.prepares:
            return self._hand_over(batch, before, capacity, capacity.claim)
        return put_claim(batch, before, capacity, None, self.origin)

    def _cleaned(self, batch: UnitOfWork, before: Stored, capacity: NodeCapacity) -> Result:
        """An administrator wiped a node that nobody has claimed."""
        if any(capacity.allocated.values()):
            return in_use(capacity.name, (), "called clean")
        return put_claim(batch, before, replace(capacity, soiled=False), None, self.origin)

    def _hand_over(self, batch: UnitOfWork, before: Stored, capacity: NodeCapacity, claim: NodeClaim) -> Result:
        """The node is its holder's from now on, and paid for. If nobody pays by now, the claim has ended."""
        claim = replace(claim, state=ClaimState.HELD, since=timestamp(batch.now), attempt=0, message="")
        lease = lease_of_claim(batch, capacity, claim)
        refusal = lease if isinstance(lease, Refusal) else None
        if isinstance(lease, Lease):
            assert batch.ledger is not None, "the account that pays was read"
            refusal = batch.ledger.open(lease, started=True)
            claim = replace(claim, lease=lease.id)
        if refusal is not None:
            origin = replace(self.origin, verb="release", reason=refusal.message)
            return put_claim(batch, before, capacity, None, origin)
        begin_usage(batch, _whole(capacity, claim), claim.holder)
        return put_claim(batch, before, capacity, claim, self.origin)

    def _is_meant(self, claim: NodeClaim | None) -> bool:
        return (
            claim is not None
            and claim.state is ClaimState.WIPING
            and (claim.id, claim.attempt) == (self.claim_id, self.attempt)
        )


def _not_released(capacity: NodeCapacity) -> Refusal | None:
    if capacity.claim is None:
        return Refusal(Code.CONFLICT, f"node {capacity.name} is not claimed, and is clean: there is nothing to wipe")
    if capacity.claim.state is ClaimState.HELD:
        message = f"node {capacity.name} is claimed, and was not given back"
        return Refusal(Code.CONFLICT, message, f"Release it first: bursar node release {capacity.name}")
    return None


def payments(batch: UnitOfWork, claim: NodeClaim, node: str) -> list[PlacementPayer]:
    """What must be read before a claimed node can be paid for."""
    if claim.tenant not in batch.tree.prepaid or node not in batch.nodes:
        return []
    return [PlacementPayer(owners_of(claim.tenant, claim.holder), (node,))]


def put_claim(
    batch: UnitOfWork, before: Stored, capacity: NodeCapacity, claim: NodeClaim | None, origin: Origin
) -> Result:
    """The node with its claim as it is now. Plans that were made for it before are stale."""
    at = timestamp(batch.now)
    batch.set_node(replace(capacity, generation=capacity.generation + 1, claim=claim))
    status = status_of(before)
    status.pop("claim", None)
    if claim is not None:
        status["claim"] = shown(claim)
    if claim is not None and claim.state is ClaimState.WIPE_FAILED:
        set_condition(status, FAILED, "True", "WipeHookFailed", claim.message, at)
    elif any(one["type"] == FAILED for one in status.get("conditions", ())):
        drop_conditions(status, FAILED)
    return batch.put(replace(before, status=encode(status)), origin)


def _whole(capacity: NodeCapacity, claim: NodeClaim) -> Placement:
    """What a claim counts for, used or idle: a placement of the whole node, that is stored nowhere else."""
    return Placement(
        capacity.name, claim.id, "", capacity.name, claim.tenant, 1, True, capacity.allocatable, {}, True, claim.lease
    )


def shown(claim: NodeClaim) -> dict[str, Any]:
    """What a node's status says of its claim: all that is for everybody, and nothing else."""
    told: dict[str, Any] = {"id": claim.id, "state": str(claim.state), "since": claim.since}
    if claim.released:
        told["released"] = claim.released
    if claim.attempt:
        told["attempt"] = claim.attempt
    return told


def sees(reach: Reach, tree: Tree, claim: NodeClaim) -> bool:
    """Whether somebody may know, or decide, whose claim this is. What is left of a tenant that is gone is an
    administrator's."""
    return reach.everything or (is_there(tree, claim) and sees_tenant(tree, reach, claim.tenant))


def is_there(tree: Tree, claim: NodeClaim) -> bool:
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
    runtime: Runtime,
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
    draft = NodeClaim(new_uid(UID_PREFIX), tenant, user, "", origin.actor, reason)
    lane = runtime.trying if dry_run else runtime.changing
    for _ in range(TRIES_MAX):
        async with runtime.database.reader() as db:
            placements = await node_store.load_placements_on(db, [name])
        work = tuple(Key("Allocation", one.namespace, one.name) for one in placements if one.lease)
        command = ClaimNode(key=node_key(name), origin=origin, claim=claim, draft=draft, reach=reach, work=work)
        reply = await lane.submit(command, tenant)
        if not isinstance(reply, Refusal) or reply.code is not Code.STALE:
            break
    return await _with_names(runtime, name, reply, reach, "claimed")


async def release_node(runtime: Runtime, command: ReleaseNode, reach: Reach, *, dry_run: bool = False) -> Reply:
    """Give a node back. It is refused while work is placed there."""
    reply = await (runtime.trying if dry_run else runtime.changing).submit(command, "")
    return await _with_names(runtime, command.key.name, reply, reach, "released")


async def wipe_node(runtime: Runtime, name: str, origin: Origin, *, dry_run: bool = False) -> Reply:
    command = WipeNode(key=node_key(name), origin=origin)
    return await (runtime.trying if dry_run else runtime.changing).submit(command, "")


async def end_wipe(
    runtime: Runtime,
    name: str,
    origin: Origin,
    *,
    claim_id: str = "",
    attempt: int = 0,
    failed: str = "",
    dry_run: bool = False,
) -> Reply:
    command = EndWipe(key=node_key(name), origin=origin, claim_id=claim_id, attempt=attempt, failed=failed)
    return await (runtime.trying if dry_run else runtime.changing).submit(command, "")


async def _with_names(runtime: Runtime, name: str, reply: Reply, reach: Reach, what: str) -> Reply:
    """What is placed there, by name, as far as the caller may know."""
    if not isinstance(reply, Refusal) or reply.code is not Code.IN_USE:
        return reply
    async with runtime.database.reader() as db:
        placements = await node_store.load_placements_on(db, [name])
    tree = runtime.trees.latest
    seen = [f"{one.namespace}/{one.name}" for one in placements if sees_tenant(tree, reach, one.tenant)]
    return in_use(name, seen, what)


class Pool(Struct, frozen=True):
    """How many nodes may be claimed, how many are, and those whose holder the caller may know."""

    size: int
    claimed: int
    claims: tuple[tuple[str, NodeClaim], ...]  # by node


async def load_pool(runtime: Runtime, reach: Reach) -> Pool:
    async with runtime.database.reader() as db:
        capacities = await node_store.load_claimed(db)
        tree = await runtime.trees.refresh(db)
    claims = [(name, capacity.claim) for name, capacity in sorted(capacities.items()) if capacity.claim is not None]
    return Pool(pool_size(tree), len(claims), tuple(_visible(claims, reach, tree)))


def _visible(claims: Sequence[tuple[str, NodeClaim]], reach: Reach, tree: Tree) -> list[tuple[str, NodeClaim]]:
    return [(name, claim) for name, claim in claims if sees(reach, tree, claim)]
