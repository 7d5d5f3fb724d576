"""Node claims: claim a node for sensitive work, release it, and have it wiped before others may use it.

The holder is stored with the node's capacity, under the same lock: the first claim to commit gets the node. The number
of claimed nodes is limited for the whole system; a claim locks the settings' row, and counts in a later statement, so
no two claims can both be the last. The node's status shows that it is claimed and since when, but never its holder,
because every user can read it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from bursar.commands.command import Command, Result
from bursar.commands.objects.object import not_found
from bursar.commands.objects.status import drop_conditions, set_condition, status_of, unchanged
from bursar.commands.scheduling.bind import show_leases
from bursar.commands.workloads.allocation import with_status
from bursar.core.batch.claim_billing import close_now, lacking_after, lease_of_claim
from bursar.core.batch.placement_billing import PlacementPayer, payer_of
from bursar.core.batch.unit_of_work import UnitOfWork, begin_usage, end_usage
from bursar.core.credit.lease import Lease
from bursar.core.nodes.node import WHOLE, NodeCapacity, Placement
from bursar.core.nodes.node_claim import (
    POOL,
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
from bursar.core.values.instant import timestamp
from bursar.core.values.refusal import Code, Refusal
from bursar.core.values.replace import replace
from bursar.wire.kinds.settings import SETTINGS_KEY
from bursar.wire.shared.document import encode

FAILED = "WipeFailed"
RELEASED = "Released"  # the end of a claimed node's usage
CLAIMED = "Claimed"  # the end of the usage of work whose node was claimed by its own user
NOBODYS = Reach()


def pool_size(tree: Tree) -> int:
    """The number of nodes that may be claimed at once; 0 by default."""
    return tree.system.get(POOL, 0) // WHOLE


@dataclass(frozen=True, slots=True, kw_only=True)
class OnNode(Command):
    """A command on the claim of a node, which must exist."""

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
    """Claim a node for one user, on which nothing but their own work is placed. A repeated claim by the holder changes
    nothing; all others are refused. For a prepaid tenant, the claim's lease pays for the whole node and all work there
    from now on; the leases of running work are settled.

    A node that may not be clean is wiped first. It counts against the pool from now on, and costs nothing until it is
    wiped."""

    draft: NodeClaim
    reach: Reach  # of the caller: it decides whether a refusal names the holder
    work: tuple[Key, ...] = ()  # the work placed there, as read without a lock

    def claimed_nodes(self) -> Iterable[str]:
        return (self.key.name,)

    def meters(self, _: UnitOfWork) -> Iterable[str]:
        return (self.key.name,)

    def objects(self) -> Iterable[Key]:
        # The settings last: the order of keys is the order of locks.
        return (*self.work, self.key, SETTINGS_KEY)

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
        if capacity.dirty:
            return put_claim(batch, before, capacity, replace(claim, state=ClaimState.WIPING, attempt=1), self.origin)
        if lease is not None:
            claim = replace(claim, lease=self._pay(batch, lease))
        for part, _ in batch.occupants.get(capacity.name, ()):
            # From now on the usage of the claim includes all work there.
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
        if capacity.dirty and (refusal := not_clean(capacity.name, placed=placed, wipes=wipes)):
            return refusal
        size = pool_size(batch.tree)
        return pool_exhausted(batch.claimed, size) if batch.claimed >= size else None

    def _lease(self, batch: UnitOfWork, capacity: NodeCapacity) -> Lease | Refusal | None:
        """The lease that would pay for the node, not opened yet; None if its tenant is not prepaid."""
        draft = lease_of_claim(batch, capacity, self.draft)
        if not isinstance(draft, Lease):
            return draft
        if any(part.lease and part.uid not in batch.placements for part, _ in batch.occupants.get(capacity.name, ())):
            return Refusal(Code.STALE, f"other work was placed on node {capacity.name} while it was being claimed")
        assert batch.ledger is not None, "the account that pays was read"
        return lacking_after(batch.ledger, self._replaced(batch), draft) or draft

    def _replaced(self, batch: UnitOfWork) -> list[int]:
        """The leases of the work placed there, which the claim's lease replaces."""
        return [part.lease for part, _ in batch.occupants.get(self.key.name, ()) if part.lease]

    def _pay(self, batch: UnitOfWork, lease: Lease) -> int:
        """Open the claim's lease after all checks, and have it pay for the work there."""
        assert batch.ledger is not None
        for number in self._replaced(batch):
            close_now(batch.ledger, number)
        refusal = batch.ledger.open(lease, started=True)
        assert refusal is None, "the check for lacking credit allows to open it"
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
        """Whether all work placed there is the claiming user's."""
        there = batch.occupants.get(self.key.name, ())
        return bool(there) and all(status_of(work).get("user") == self.draft.holder for _, work in there)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseNode(OnNode):
    """Release a claimed node: it is wiped next. A node that is still being wiped for its holder is unclaimed at
    once."""

    user: str  # the user who releases it
    over: Reach = NOBODYS  # the reach within which they may also release claims of others
    claim_id: str = ""  # the expected claim, in case the node has another one now

    def decide_on(self, batch: UnitOfWork, before: Stored, capacity: NodeCapacity) -> Result:
        if capacity.claim is None:
            return Refusal(Code.CONFLICT, f"node {capacity.name} is not claimed")
        if capacity.claim.id != (self.claim_id or capacity.claim.id):
            return Refusal(Code.STALE, f"node {capacity.name} now has another claim")
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
            assert batch.ledger is not None, "a claim's lease is read with it"
            close_now(batch.ledger, capacity.claim.lease)
        at = timestamp(batch.now)
        claim = replace(capacity.claim, state=ClaimState.WIPING, released=at, attempt=1, lease=0, unpaid="")
        return put_claim(batch, before, capacity, claim, self.origin)


@dataclass(frozen=True, slots=True, kw_only=True)
class WipeNode(OnNode):
    """Wipe a released node again, for example after a failure."""

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
    """End a wipe, successful or failed. Without a claim id it comes from an administrator and always counts, even for
    an unclaimed node; a report from the node counts for its attempt only.

    A node that was wiped for its new holder is theirs, and paid for, from now on."""

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
        if capacity.claim is None and capacity.dirty:
            return self._cleaned(batch, before, capacity)
        if refusal := _not_released(capacity):
            return refusal
        assert capacity.claim is not None
        if self.failed:
            failed = replace(capacity.claim, state=ClaimState.WIPE_FAILED, message=self.failed)
            return put_claim(batch, before, capacity, failed, self.origin)
        capacity = replace(capacity, dirty=False)
        assert capacity.claim is not None
        if capacity.claim.prepares:
            return self._hand_over(batch, before, capacity, capacity.claim)
        return put_claim(batch, before, capacity, None, self.origin)

    def _cleaned(self, batch: UnitOfWork, before: Stored, capacity: NodeCapacity) -> Result:
        """Mark an unclaimed node as clean, after an administrator wiped it."""
        if any(capacity.allocated.values()):
            return in_use(capacity.name, (), "marked clean")
        return put_claim(batch, before, replace(capacity, dirty=False), None, self.origin)

    def _hand_over(self, batch: UnitOfWork, before: Stored, capacity: NodeCapacity, claim: NodeClaim) -> Result:
        """Hand the wiped node over to its holder, and open the lease. If no account can pay, the claim ends."""
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
        message = f"node {capacity.name} is claimed, and was not released"
        return Refusal(Code.CONFLICT, message, f"Release it first: bursar node release {capacity.name}")
    return None


def payments(batch: UnitOfWork, claim: NodeClaim, node: str) -> list[PlacementPayer]:
    """The rows that paying for a claimed node needs."""
    payer = payer_of(batch, claim.tenant, claim.holder)
    return [PlacementPayer(payer.owners, (node,))] if payer.owners and node in batch.nodes else []


def put_claim(
    batch: UnitOfWork, before: Stored, capacity: NodeCapacity, claim: NodeClaim | None, origin: Origin
) -> Result:
    """Store the node with this claim. Earlier plans for the node become stale."""
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
    """The placement that represents a claim in the usage: the whole node, used or idle. It is not stored."""
    return Placement(
        capacity.name, claim.id, "", capacity.name, claim.tenant, 1, True, capacity.allocatable, {}, True, claim.lease
    )


def shown(claim: NodeClaim) -> dict[str, Any]:
    """The claim as shown in a node's status: only fields that every user may see."""
    told: dict[str, Any] = {"id": claim.id, "state": str(claim.state), "since": claim.since}
    if claim.released:
        told["released"] = claim.released
    if claim.attempt:
        told["attempt"] = claim.attempt
    return told


def sees(reach: Reach, tree: Tree, claim: NodeClaim) -> bool:
    """Whether a caller may see and manage a claim. Only administrators may for claims of deleted tenants."""
    return reach.everything or (is_there(tree, claim) and sees_tenant(tree, reach, claim.tenant))


def is_there(tree: Tree, claim: NodeClaim) -> bool:
    """Whether the tenant of a claim exists; a later tenant of the same name is another one."""
    tenant = tree.tenants.get(claim.tenant)
    return tenant is not None and is_of(claim, tenant.uid)


def keep_claim(before: Stored, after: Stored) -> Stored:
    """The next version of a node, with its claim unchanged."""
    if b'"claim"' not in before.status and b'"claim"' not in after.status:
        return after
    status, claim = status_of(after), status_of(before).get("claim")
    status.pop("claim", None)
    if claim:
        status["claim"] = claim
    return replace(after, status=encode(status))
