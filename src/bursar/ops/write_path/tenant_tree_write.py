"""Writes to the tenant tree: tenants, tiers, namespaces, quotas, system limits.

Each change holds the tree's lock exclusively, so no charges are made meanwhile. Counters are recounted from existing
counters, never from all objects, except when a ResourceQuota starts to count its namespace. Queues are no part of the
tree but are changed in the same way, so that nothing is submitted to a queue while its profile is being removed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bursar.commands.command import Command, Reply, Result, encode_reply
from bursar.commands.objects import removal
from bursar.commands.objects.object import plural_of
from bursar.commands.quota.tenant_tree import (
    UNUSED,
    TreePlan,
    TreeUse,
    find_quota,
    is_moved,
    no_capacity,
    recount_quota,
    recount_tenants,
    set_limits,
    touched_scopes,
    tree_refusal,
)
from bursar.commands.quota.tree_documents import applied
from bursar.core.batch.unit_of_work import UnitOfWork
from bursar.core.nodes.node_claim import holds
from bursar.core.nodes.queue import bares_its_work, still_sensitive
from bursar.core.objects.object import Key, Stored, Write
from bursar.core.quota.quota import Counter, Counters, count_quota, needs_recount
from bursar.core.quota.tenant_tree import Row, Tree, TreeChange, quota_scope
from bursar.core.values.refusal import Code, Refusal
from bursar.ops.access.audit import token_note
from bursar.ops.quota.tenant_tree import TreeCache
from bursar.ops.runtime.clock import new_uid, now
from bursar.ops.runtime.idempotency import claim, remember
from bursar.ops.write_path.batch import counters_of, decide, finished, save
from bursar.store.access.token import TokenRecord
from bursar.store.credit import ledger as ledger_store
from bursar.store.db.database import Connection
from bursar.store.nodes import node as node_store
from bursar.store.objects import object as object_store
from bursar.store.objects.change import save_notes
from bursar.store.objects.departure import file_away
from bursar.store.quota import quota as quota_store
from bursar.store.quota import tenant_tree as tree_store
from bursar.store.scheduling import queue as queue_store
from bursar.wire.kinds.registry import BY_NAME, KINDS
from bursar.wire.shared.document import finalizers_of, is_ending
from bursar.wire.to_scheduler.ask import queue_profile_of

DELETED = "its tenant was deleted"


class TreeWriteBatch:
    """Decides one change of the tree at a time."""

    def __init__(self, trees: TreeCache) -> None:
        self._trees = trees

    async def __call__(self, db: Connection, commands: Sequence[Command]) -> Sequence[Reply]:
        claimed, remembered = await claim(db, commands)
        tree = await self._trees.at(db, await tree_store.lock_exclusive(db))
        batch = UnitOfWork(now(), tree, Counters(tree, {}), new_uid)
        keys = {key for command in commands for key in command.objects()}
        batch.objects = await object_store.lock(db, keys)
        batch.counters = await _locked_counters(db, batch, commands)
        results: list[Result] = decide(batch, commands, remembered)
        revoked = await self._reshape(db, batch) if batch.writes else ()
        if isinstance(revoked, Refusal):
            # The change itself is valid, but not its effect on the counters.
            batch.writes.clear()
            results = [revoked]
        else:
            await save(db, batch)
            await save_notes(db, [token_note(one, "DELETED", "revoke", "system", DELETED) for one in revoked])
        replies = [finished(result) for result in results]
        await remember(db, commands, claimed, replies, encode_reply)
        return replies

    async def _reshape(self, db: Connection, batch: UnitOfWork) -> Refusal | Sequence[TokenRecord]:
        """Apply the change's effects beyond its own object; return the tokens that it revokes."""
        # A decision writes the request beside the tenant; the request is no part of the tree.
        shaping = [one for one in batch.writes if BY_NAME[one.key.kind].in_tree]
        if not shaping:
            return ()
        (write,) = shaping
        if write.key.kind == "Queue":
            return await _change_queue(db, write) or ()
        change = TreeChange(write.key, write.after is None, write.shown.doc)
        new = applied(batch.tree, change)
        if _is_marked_now(write):
            # It is removed later, after its finalizers; whether it may be removed is decided now.
            without = applied(batch.tree, TreeChange(write.key, True, write.shown.doc))
            if refusal := await _check(db, batch.tree, without, write.key, None):
                return refusal
        if refusal := await _check(db, batch.tree, new, write.key, write.after):
            return refusal
        plan = await _recounted(db, batch.tree, new, write.key)
        if plan.exceeded:
            return no_capacity(write.key, plan.exceeded)
        if plan.put:
            await quota_store.put(db, plan.put)
        if plan.removed:
            await quota_store.remove(db, plan.removed)
        await tree_store.bump(db)
        if write.key.kind == "Tenant" and write.after is None:
            if refusal := await _end_owned(db, batch, write):
                return refusal
            return await file_away(db, write.key.name, batch.tree.tenants[write.key.name].uid)
        return ()


async def _end_owned(db: Connection, batch: UnitOfWork, write: Write) -> Refusal | None:
    """Remove the objects that end with their tenant, before it. Their finalizers keep the tenant."""
    owned = await object_store.lock_owned(db, write.key.name, [kind.name for kind in KINDS if kind.ends_with_tenant])
    if held := [one.key.name for one in owned if finalizers_of(one.doc)]:
        return Refusal(
            Code.IN_USE,
            f'tenants "{write.key.name}" still has {plural_of(owned[0].key)} with finalizers: {", ".join(held[:5])}',
            "Delete them first.",
        )
    batch.objects |= {one.key: one for one in owned}
    for one in owned:
        removal.finish(batch, one, write.origin)
    batch.writes.append(batch.writes.pop(0))
    return None


async def _locked_counters(db: Connection, batch: UnitOfWork, commands: Sequence[Command]) -> Counters:
    """The counters that deciding may change, beside those that a change of the tree computes again."""
    rows = counters_of(batch, commands)
    if not rows:
        return batch.counters
    await quota_store.ensure(db, batch.tree, rows)
    return Counters(batch.tree, await quota_store.lock(db, rows))


async def _change_queue(db: Connection, write: Write) -> Refusal | None:
    """Write a queue with a new version of the tree, which makes cached queues stale."""
    before, after = (queue_profile_of(one.doc) if one is not None else None for one in (write.before, write.after))
    if before is not None and bares_its_work(before, after):
        there = await queue_store.count_in(db, write.key.name)
        if refusal := still_sensitive(write.key.name, there, deleted=after is None):
            return refusal
    await tree_store.bump(db)
    return None


def _namespaced() -> list[str]:
    return [kind.name for kind in KINDS if kind.namespaced]


def _is_marked_now(write: Write) -> bool:
    """Whether this write marks the object as deleted because of its finalizers. Namespaces are always marked first."""
    if write.key.kind == "Namespace" or write.before is None or write.after is None:
        return False
    return is_ending(write.after.doc) and not is_ending(write.before.doc)


async def _check(db: Connection, old: Tree, new: Tree, key: Key, after: Stored | None) -> Refusal | None:
    return tree_refusal(old, new, key, after, await _load_use(db, old, new, key, gone=after is None))


async def _load_use(db: Connection, old: Tree, new: Tree, key: Key, *, gone: bool) -> TreeUse:
    """Read the use of the object that may forbid the change, if the change can be forbidden."""
    if key.kind == "Namespace" and (gone or is_moved(old, new, key.name)):
        return TreeUse(has_objects=await object_store.is_used(db, key.name, _namespaced()))
    if key.kind != "Tenant" or (not gone and key.name in old.tenants):
        return UNUSED
    kept_for = tuple(await node_store.list_kept_for(db, key.name))
    if not gone:
        return TreeUse(kept_for=kept_for)
    capacities = (await node_store.load_claimed(db)).values()
    claimed = tuple(sorted(one.name for one in capacities if holds(one.claim, key.name)))
    return TreeUse(kept_for=kept_for, claimed=claimed, accounts=tuple(await ledger_store.lock_of_tenant(db, key.name)))


async def _recounted(db: Connection, old: Tree, new: Tree, key: Key) -> TreePlan:
    if key.kind == "ResourceQuota":
        before = await quota_store.load_scopes(db, [quota_scope(key.namespace, key.name)])
        return recount_quota(old, new, key, before) or await _count_quota(db, new, key, before)
    if key.kind == "Namespace":
        return TreePlan()
    if key.kind == "PriorityClass":
        return await _recount_class(db, old, new, key.name)
    if needs_recount(old, new):
        return recount_tenants(old, new, await quota_store.load_tenants(db))
    scopes = touched_scopes(old, new)
    return set_limits(new, scopes, await quota_store.load_scopes(db, scopes))


async def _count_quota(db: Connection, new: Tree, key: Key, before: Mapping[Row, Counter]) -> TreePlan:
    """Count a quota from the objects of its namespace."""
    quota = find_quota(new, key)
    assert quota is not None, "a deleted quota counts nothing"
    after = count_quota(quota, await object_store.load_charges_in(db, key.namespace, _namespaced()), new.classes)
    return TreePlan(after, set(before) - set(after))


async def _recount_class(db: Connection, old: Tree, new: Tree, name: str) -> TreePlan:
    """Recount the scope of a priority class, which depends on the value of the class."""
    was, now = old.classes.get(name), new.classes.get(name)
    put: dict[Row, Counter] = {}
    if (was.value if was else None) != (now.value if now else None):
        for namespace, quotas in new.quotas.items():
            named = [one for one in quotas if any(name in term.values for term in one.terms)]
            if named:
                charges = await object_store.load_charges_in(db, namespace, _namespaced())
                for quota in named:
                    put |= count_quota(quota, charges, new.classes)
    return TreePlan(put)
