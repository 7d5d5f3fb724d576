"""Changing the tree: tenants, tiers, namespaces, quotas, system limits.

Each change holds the tree alone, so nobody is charging meanwhile; counters are recounted from those that stand, never
from all objects, except where a ResourceQuota begins to count its own namespace. Queues are no part of the tree, but
are changed in the same way: nobody submits to a queue while it is decided whether its work may lose its profile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from bursar.core.batch.unit_of_work import UnitOfWork
from bursar.core.credit.account import left_behind
from bursar.core.nodes.node_claim import holds, still_claimed
from bursar.core.nodes.queue import bares_its_work, still_sensitive
from bursar.core.objects.object import Key, Stored, Write
from bursar.core.quota.permit import still_granted, unknown_tenants
from bursar.core.quota.quota import (
    Counter,
    Counters,
    Exceeded,
    count_quota,
    needs_recount,
    overrun,
    recount,
    recounted_dimensions,
)
from bursar.core.quota.quota_messages import quota_refusal
from bursar.core.quota.tenant_tree import (
    SYSTEM_SCOPE,
    ResourceQuota,
    Row,
    Tree,
    hard_of,
    limits_of,
    quota_scope,
    soft_of,
    tenant_scope,
)
from bursar.core.values.refusal import Cause, Code, Refusal
from bursar.ops.access.audit import token_note
from bursar.ops.quota.tenant_tree import TreeCache, applied
from bursar.ops.runtime.command import Command, Reply, Result, encode_reply
from bursar.ops.runtime.idempotency import claim, remember
from bursar.ops.write_path.batch import decide, finished, save
from bursar.store.access.token import TokenRecord
from bursar.store.credit import ledger as ledger_store
from bursar.store.db.database import Connection
from bursar.store.nodes import node as node_store
from bursar.store.objects import object as object_store
from bursar.store.objects.change import save_notes
from bursar.store.objects.departure import file_away
from bursar.store.quota import quota as quota_store
from bursar.store.quota import tenant_tree as tree_store
from bursar.store.quota.tenant_tree import TreeChange
from bursar.store.scheduling import queue as queue_store
from bursar.wire.kinds.registry import KINDS
from bursar.wire.shared.document import is_ending
from bursar.wire.to_scheduler.ask import queue_profile_of

DELETED = "its tenant was deleted"
NAMESPACED = [kind.name for kind in KINDS if kind.namespaced]


class TreeWriteBatch:
    """Decides one change of the tree at a time."""

    def __init__(self, trees: TreeCache) -> None:
        self._trees = trees

    async def __call__(self, db: Connection, commands: Sequence[Command]) -> Sequence[Reply]:
        claimed, remembered = await claim(db, commands)
        tree = await self._trees.at(db, await tree_store.lock_exclusive(db))
        batch = UnitOfWork(datetime.now(UTC), tree, Counters(tree, {}))
        keys = {key for command in commands for key in command.objects()}
        batch.objects = await object_store.lock(db, keys)
        results: list[Result] = decide(batch, commands, remembered)
        revoked = await self._reshape(db, batch) if batch.writes else ()
        if isinstance(revoked, Refusal):
            # The change itself was fine; what it would do to the counters is not.
            batch.writes.clear()
            results = [revoked]
        else:
            await save(db, batch)
            await save_notes(db, [token_note(one, "DELETED", "revoke", "system", DELETED) for one in revoked])
        replies = [finished(result) for result in results]
        await remember(db, commands, claimed, replies, encode_reply)
        return replies

    async def _reshape(self, db: Connection, batch: UnitOfWork) -> Refusal | Sequence[TokenRecord]:
        """What the change does beside its own object; the tokens that are revoked by it."""
        (write,) = batch.writes
        if write.key.kind == "Queue":
            return await _change_queue(db, write) or ()
        change = TreeChange(write.key, write.after is None, write.shown.doc)
        new = applied(batch.tree, change)
        if _is_marked_now(write):
            # It goes later, once its finalizers are gone; whether it may go at all is decided now.
            without = applied(batch.tree, TreeChange(write.key, True, write.shown.doc))
            if refusal := await check(db, batch.tree, without, write.key, None):
                return refusal
        if refusal := await check(db, batch.tree, new, write.key, write.after):
            return refusal
        plan = await _recounted(db, batch.tree, new, write.key)
        if plan.exceeded:
            return _no_capacity(write.key, plan.exceeded)
        if plan.put:
            await quota_store.put(db, plan.put)
        if plan.removed:
            await quota_store.remove(db, plan.removed)
        await tree_store.bump(db)
        if write.key.kind == "Tenant" and write.after is None:
            return await file_away(db, write.key.name, batch.tree.tenants[write.key.name].uid)
        return ()


def _is_marked_now(write: Write) -> bool:
    """Whether it is being deleted and has finalizers. Namespaces are marked in any case, and emptied first."""
    if write.key.kind == "Namespace" or write.before is None or write.after is None:
        return False
    return is_ending(write.after.doc) and not is_ending(write.before.doc)


async def _change_queue(db: Connection, write: Write) -> Refusal | None:
    """With a new version of the tree, whoever knew the queue from before looks again."""
    before, after = (queue_profile_of(one.doc) if one is not None else None for one in (write.before, write.after))
    if before is not None and bares_its_work(before, after):
        there = await queue_store.count_in(db, write.key.name)
        if refusal := still_sensitive(write.key.name, there, deleted=after is None):
            return refusal
    await tree_store.bump(db)
    return None


# Whether the new tree makes sense.


# Everything without an owner falls to these.
_KEPT = frozenset({Key("Tenant", "", "default"), Key("Namespace", "", "default"), Key("Settings", "", "system")})


async def check(db: Connection, old: Tree, new: Tree, key: Key, after: Stored | None) -> Refusal | None:
    if key in _KEPT and (after is None or after.fields.get("status.phase") == "Terminating"):
        return Refusal(Code.FORBIDDEN, f"{key.kind} {key.name!r} is built in and cannot be deleted")
    match key.kind:
        case "Tenant" if after is None:
            return await _check_tenant_gone(db, old, key.name)
        case "Tenant":
            return _check_tenant(new, key.name) or await _check_tenant_new(db, old, key.name)
        case "Tier":
            return None if after else _check_tier_gone(old, key.name)
        case "Namespace":
            return await _check_namespace(db, old, new, key.name, after)
        case "ResourceQuota":
            return _check_quota(new, key) if after else None
        case "PriorityClass" if after is not None:
            before = old.classes[key.name].allowed_tenants if key.name in old.classes else frozenset()
            return unknown_tenants(new, "allowedTenants", new.classes[key.name].allowed_tenants - before)
    return None


def _check_tenant(tree: Tree, name: str) -> Refusal | None:
    tenant = tree.tenants[name]
    if tenant.parent and tenant.parent not in tree.tenants:
        return _dangling("spec.parent", "Tenant", tenant.parent)
    if tenant.tier and tenant.tier not in tree.tiers:
        return _dangling("spec.tier", "Tier", tenant.tier)
    seen = {name}
    above = tenant.parent
    while above:
        if above in seen:
            return Refusal(
                Code.INVALID,
                f'tenant "{name}" cannot be below "{tenant.parent}", which is below it',
                causes=(Cause("FieldValueInvalid", "would close a circle", field="spec.parent"),),
            )
        seen.add(above)
        above = tree.tenants[above].parent
    return None


def _dangling(field: str, kind: str, name: str) -> Refusal:
    message = f"{kind} {name!r} does not exist"
    return Refusal(Code.INVALID, message, "Create it first.", (Cause("FieldValueNotFound", message, field=field),))


async def _check_tenant_new(db: Connection, old: Tree, name: str) -> Refusal | None:
    """Grants may name a tenant that is not there, where they are older than the rule that they must not."""
    if name in old.tenants:
        return None
    return still_granted(old, name, await node_store.list_kept_for(db, name))


async def _check_tenant_gone(db: Connection, tree: Tree, name: str) -> Refusal | None:
    below = sorted(one.name for one in tree.tenants.values() if one.parent == name)
    living = sorted(one.name for one in tree.namespaces.values() if one.tenant == name)
    if below or living:
        what = f"tenants {', '.join(below[:5])}" if below else f"namespaces {', '.join(living[:5])}"
        return Refusal(Code.IN_USE, f'tenants "{name}" still has {what}', "Delete or move them first.")
    if refusal := still_granted(tree, name, await node_store.list_kept_for(db, name)):
        return refusal
    held = sorted(
        capacity.name for capacity in (await node_store.load_claimed(db)).values() if holds(capacity.claim, name)
    )
    return still_claimed(name, held) or left_behind(name, await ledger_store.lock_of_tenant(db, name))


def _check_tier_gone(tree: Tree, name: str) -> Refusal | None:
    users = sorted(one.name for one in tree.tenants.values() if one.tier == name)
    if users:
        return Refusal(
            Code.IN_USE, f'tiers "{name}" is used by tenants {", ".join(users[:5])}', "Give them another tier first."
        )
    return None


async def _check_namespace(db: Connection, old: Tree, new: Tree, name: str, after: Stored | None) -> Refusal | None:
    if after is None:
        if await object_store.is_used(db, name, NAMESPACED):
            return Refusal(Code.IN_USE, f'namespaces "{name}" is not empty')
        return None
    tenant = new.namespaces[name].tenant
    if tenant not in new.tenants:
        return _dangling("metadata.labels[bursar.io/tenant]", "Tenant", tenant)
    before = old.namespaces.get(name)
    if before is not None and before.tenant != tenant and await object_store.is_used(db, name, NAMESPACED):
        return Refusal(
            Code.IN_USE,
            f'namespaces "{name}" belongs to tenant "{before.tenant}" and is in use: its tenant cannot be changed',
            "Empty the namespace first, or create another one for the new tenant.",
        )
    return None


def _check_quota(tree: Tree, key: Key) -> Refusal | None:
    if key.namespace not in tree.namespaces:
        return Refusal(Code.NOT_FOUND, f'namespaces "{key.namespace}" not found', "Create it first.")
    return None


def _no_capacity(key: Key, exceeded: list[Exceeded]) -> Refusal:
    refusal = quota_refusal(f'moving {key.kind.lower()} "{key.name}"', exceeded)
    return Refusal(Code.IN_USE, refusal.message, refusal.hint, refusal.causes)


# What the counters become.


@dataclass(frozen=True, slots=True)
class TreePlan:
    put: dict[Row, Counter]
    removed: set[Row]
    exceeded: list[Exceeded]


async def _recounted(db: Connection, old: Tree, new: Tree, key: Key) -> TreePlan:
    if key.kind == "ResourceQuota":
        return await _recount_quota(db, old, new, key)
    if key.kind == "Namespace":
        return TreePlan({}, set(), [])
    if key.kind == "PriorityClass":
        return await _recount_class(db, old, new, key.name)
    if needs_recount(old, new):
        dimensions = recounted_dimensions(old, new)
        rows = await quota_store.load_tenants(db)
        before = {row: counter for row, counter in rows.items() if row[1] in dimensions}
        after = recount(old, new, before)
        changed = {row: counter for row, counter in after.items() if before.get(row) != counter}
        return TreePlan(changed, set(before) - set(after), overrun(old, new, before, after))
    return await _relimited(db, old, new)


async def _recount_quota(db: Connection, old: Tree, new: Tree, key: Key) -> TreePlan:
    """Counted from the namespace's objects, unless it counts the same things as before."""
    was, quota = _find(old, key), _find(new, key)
    before = await quota_store.load_scopes(db, [quota_scope(key.namespace, key.name)])
    if quota is None:
        return TreePlan({}, set(before), [])
    if was is not None and (was.terms, was.dimensions) == (quota.terms, quota.dimensions):
        return TreePlan({row: _limited(new, row, counter) for row, counter in before.items()}, set(), [])
    charges = await object_store.load_charges_in(db, key.namespace, NAMESPACED)
    after = count_quota(quota, charges, new.classes)
    return TreePlan(after, set(before) - set(after), [])


async def _recount_class(db: Connection, old: Tree, new: Tree, name: str) -> TreePlan:
    """Which numbers count in the scope of a class follows from its value."""
    was, now = old.classes.get(name), new.classes.get(name)
    put: dict[Row, Counter] = {}
    if (was.value if was else None) != (now.value if now else None):
        for namespace, quotas in new.quotas.items():
            named = [one for one in quotas if any(name in term.values for term in one.terms)]
            if named:
                charges = await object_store.load_charges_in(db, namespace, NAMESPACED)
                for quota in named:
                    put |= count_quota(quota, charges, new.classes)
    return TreePlan(put, set(), [])


def _limited(tree: Tree, row: Row, counter: Counter) -> Counter:
    """The same counter under the limits that the tree sets now."""
    return Counter(hard_of(tree, row), soft_of(tree, row), counter.accepted, counter.bound)


def _find(tree: Tree, key: Key) -> ResourceQuota | None:
    return next((one for one in tree.quotas.get(key.namespace, ()) if one.name == key.name), None)


async def _relimited(db: Connection, old: Tree, new: Tree) -> TreePlan:
    """Only limits changed: the counters keep what they count."""
    gone = [name for name in old.tenants if name not in new.tenants]
    touched = [name for name in new.tenants if limits_of(old, name) != limits_of(new, name)]
    scopes = [tenant_scope(name) for name in (*gone, *touched)] + [SYSTEM_SCOPE]
    before = await quota_store.load_scopes(db, scopes)
    wanted = {(tenant_scope(name), dimension) for name in touched for dimension in limits_of(new, name)}
    wanted |= {(SYSTEM_SCOPE, dimension) for dimension in new.system}
    wanted |= {row for row in before if row[0].partition(":")[2] in touched}
    removed = {row for row in before if row[0].partition(":")[2] in gone}
    after = {row: _limited(new, row, before.get(row, Counter())) for row in wanted}
    changed = {row: counter for row, counter in after.items() if before.get(row) != counter}
    return TreePlan(changed, removed, [])
