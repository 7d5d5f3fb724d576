"""The tree in memory: read once, kept up to date from the feed, trusted only under the tree's lock."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from bursar.core.credit.billing_terms import CreditPolicy
from bursar.core.quota import tenant_tree as rules
from bursar.core.quota.tenant_tree import Tree
from bursar.store.db.database import Connection
from bursar.store.quota import tenant_tree as store
from bursar.store.quota.tenant_tree import TreeChange
from bursar.wire.kinds import namespace, priorityclass, resourcequota, settings, tenant, tier

# A cache that fell this far behind is read anew.
BEHIND_MAX = 2_000_000

_namespace = msgspec.json.Decoder(namespace.Namespace)
_class = msgspec.json.Decoder(priorityclass.PriorityClass)
_quota = msgspec.json.Decoder(resourcequota.ResourceQuota)
_settings = msgspec.json.Decoder(settings.Settings)
_tenant = msgspec.json.Decoder(tenant.Tenant)
_tier = msgspec.json.Decoder(tier.Tier)


@dataclass(frozen=True, slots=True)
class _Cached:
    version: int
    revision: int
    tree: Tree


class TreeCache:
    def __init__(self) -> None:
        self._cached = _Cached(-1, 0, Tree())

    @property
    def latest(self) -> Tree:
        """The tree as last seen: for reading, never for charging."""
        return self._cached.tree

    async def at(self, db: Connection, version: int) -> Tree:
        """The tree of this version, which the caller holds locked."""
        if self._cached.version == version:
            return self._cached.tree
        known = self._cached
        position = await store.load_position(db)
        behind = position.revision - known.revision
        if known.version < 0 or known.revision < position.floor or not 0 <= behind <= BEHIND_MAX:
            tree = _build(await store.load_all(db), await store.load_ended(db))
        else:
            tree = known.tree
            for change in await store.load_since(db, known.revision):
                tree = applied(tree, change)
        self._cached = _Cached(version, position.revision, tree)
        return tree

    async def refresh(self, db: Connection) -> Tree:
        """The tree as it is now, for those who only read."""
        position = await store.load_position(db)
        return await self.at(db, position.version)


def _build(rows: Iterable[TreeChange], deletions: Iterable[tuple[str, int]] = ()) -> Tree:
    """All at once: applying thousands of changes one by one would copy the tree as often."""
    tenants, tiers, namespaces, system, policy = {}, {}, {}, {}, CreditPolicy()
    quotas: dict[str, list[rules.ResourceQuota]] = {}
    classes: dict[str, rules.PriorityClass] = {}
    permits = rules.PermitPolicy()
    for row in rows:
        match row.key.kind:
            case "Tenant":
                tenants[row.key.name] = tenant.to_tree(_tenant.decode(row.doc))
            case "Tier":
                tiers[row.key.name] = tier.to_tree(_tier.decode(row.doc))
            case "Namespace":
                namespaces[row.key.name] = namespace.to_tree(_namespace.decode(row.doc))
            case "ResourceQuota":
                quotas.setdefault(row.key.namespace, []).append(resourcequota.to_tree(_quota.decode(row.doc)))
            case "PriorityClass":
                classes[row.key.name] = priorityclass.to_tree(_class.decode(row.doc))
            case "Settings":
                said = _settings.decode(row.doc)
                system, policy = settings.to_tree(said), settings.credit_policy_of(row.doc)
                permits = settings.permit_policy_of(said)
    ordered = {name: tuple(sorted(group, key=lambda one: one.name)) for name, group in quotas.items()}
    ended: dict[str, tuple[int, int]] = {}
    for name, revision in deletions:
        ended[name] = (ended.get(name, (0, 0))[1], revision)
    return Tree(tenants, tiers, namespaces, ordered, system, policy, ended, classes, permits)


def applied(tree: Tree, change: TreeChange) -> Tree:
    """The tree after one change of one of its objects."""
    if change.deleted:
        return _without(tree, change)
    match change.key.kind:
        case "Tenant":
            return rules.with_tenant(tree, tenant.to_tree(_tenant.decode(change.doc)))
        case "Tier":
            return rules.with_tier(tree, tier.to_tree(_tier.decode(change.doc)))
        case "Namespace":
            return rules.with_namespace(tree, namespace.to_tree(_namespace.decode(change.doc)))
        case "ResourceQuota":
            return rules.with_quota(tree, resourcequota.to_tree(_quota.decode(change.doc)))
        case "PriorityClass":
            return rules.with_class(tree, priorityclass.to_tree(_class.decode(change.doc)))
    policy, said = settings.credit_policy_of(change.doc), _settings.decode(change.doc)
    return rules.with_system(tree, settings.to_tree(said), policy, settings.permit_policy_of(said))


def _without(tree: Tree, change: TreeChange) -> Tree:
    key = change.key
    match key.kind:
        case "Tenant":
            return rules.without_tenant(tree, key.name, change.revision)
        case "Tier":
            return rules.without_tier(tree, key.name)
        case "Namespace":
            return rules.without_namespace(tree, key.name)
        case "ResourceQuota":
            return rules.without_quota(tree, key.namespace, key.name)
        case "PriorityClass":
            return rules.without_class(tree, key.name)
    return rules.with_system(tree, {})
