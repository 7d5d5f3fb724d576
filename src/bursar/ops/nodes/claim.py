"""Verbs on claims of nodes: claim, release, wipe, end a wipe; and the pool of nodes that may be claimed."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from bursar.commands.command import Reply
from bursar.commands.nodes.claim import ClaimNode, EndWipe, ReleaseNode, WipeNode, pool_size, sees
from bursar.core.nodes.node_claim import UID_PREFIX, NodeClaim, in_use
from bursar.core.objects.object import Origin
from bursar.core.quota.tenant_tree import Tree
from bursar.core.quota.tenant_tree import sees as sees_tenant
from bursar.core.values.access import Reach
from bursar.core.values.idempotency import IdempotencyKey
from bursar.core.values.refusal import Code, Refusal
from bursar.ops.runtime.clock import new_uid
from bursar.ops.runtime.runtime import Runtime
from bursar.store.nodes import node as node_store
from bursar.wire.kinds.node import node_key

TRIES_MAX = 5  # of a claim, while work of its user starts and ends on the node


async def claim_node(
    runtime: Runtime,
    name: str,
    origin: Origin,
    reach: Reach,
    *,
    tenant: str,
    user: str,
    reason: str = "",
    idempotency_key: IdempotencyKey | None = None,
    dry_run: bool = False,
) -> Reply:
    """Claim a node for a user."""
    draft = NodeClaim(new_uid(UID_PREFIX), tenant, user, "", origin.actor, reason)
    lane = runtime.trying if dry_run else runtime.changing
    for _ in range(TRIES_MAX):
        async with runtime.database.reader() as db:
            placements = await node_store.load_placements_on(db, [name])
        work = tuple(one.key for one in placements if one.lease)
        command = ClaimNode(
            key=node_key(name), origin=origin, idempotency_key=idempotency_key, draft=draft, reach=reach, work=work
        )
        reply = await lane.submit(command, tenant)
        if not isinstance(reply, Refusal) or reply.code is not Code.STALE:
            break
    return await _with_names(runtime, name, reply, reach, "claimed")


async def release_node(runtime: Runtime, command: ReleaseNode, reach: Reach, *, dry_run: bool = False) -> Reply:
    """Release a claimed node. It is refused while work is placed there."""
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
    """The refusal with the names of the placed work, as far as the caller may see them."""
    if not isinstance(reply, Refusal) or reply.code is not Code.IN_USE:
        return reply
    async with runtime.database.reader() as db:
        placements = await node_store.load_placements_on(db, [name])
    tree = runtime.trees.latest
    seen = [f"{one.namespace}/{one.name}" for one in placements if sees_tenant(tree, reach, one.tenant)]
    return in_use(name, seen, what)


class Pool(Struct, frozen=True):
    """The claim pool: how many nodes may be claimed, how many are, and the claims whose holder the caller may see."""

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
