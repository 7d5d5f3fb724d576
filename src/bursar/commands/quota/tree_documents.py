"""Build the tenant tree from the documents of its objects: all of them at once, or one change after another."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from bursar.core.credit.billing_terms import CreditPolicy
from bursar.core.quota import tenant_tree as rules
from bursar.core.quota.tenant_tree import Tree, TreeChange
from bursar.core.quota.units import QuotaPolicy
from bursar.wire.kinds import namespace, priorityclass, resourcequota, settings, tenant, tier

_namespace = msgspec.json.Decoder(namespace.Namespace)
_class = msgspec.json.Decoder(priorityclass.PriorityClass)
_quota = msgspec.json.Decoder(resourcequota.ResourceQuota)
_settings = msgspec.json.Decoder(settings.Settings)
_tenant = msgspec.json.Decoder(tenant.Tenant)
_tier = msgspec.json.Decoder(tier.Tier)


def tree_of(rows: Iterable[TreeChange], deletions: Iterable[tuple[str, int]] = ()) -> Tree:
    """The tree of all objects at once: applying thousands of changes one by one would copy it as often."""
    tenants, tiers, namespaces, system, policy = {}, {}, {}, {}, CreditPolicy()
    quotas: dict[str, list[rules.ResourceQuota]] = {}
    classes: dict[str, rules.PriorityClass] = {}
    permits, quota_policy = rules.PermitPolicy(), QuotaPolicy()
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
                permits, quota_policy = settings.permit_policy_of(said), settings.quota_policy_of(said)
    ordered = {name: tuple(sorted(group, key=lambda one: one.name)) for name, group in quotas.items()}
    ended: dict[str, tuple[int, int]] = {}
    for name, revision in deletions:
        ended[name] = (ended.get(name, (0, 0))[1], revision)
    return Tree(tenants, tiers, namespaces, ordered, system, policy, ended, classes, permits, quota_policy)


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
    permits, quotas = settings.permit_policy_of(said), settings.quota_policy_of(said)
    return rules.with_system(tree, settings.to_tree(said), policy, permits, quotas)


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
