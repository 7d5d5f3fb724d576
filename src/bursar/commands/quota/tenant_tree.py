"""Changes of the tenant tree: validation of the new tree, and the counters under it.

Data about the rest of the system comes as a value (`TreeUse`, counters): the write path reads it under the tree's lock.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from msgspec import Struct

from bursar.commands.objects.object import no_namespace
from bursar.core.credit.account import Account, left_behind
from bursar.core.nodes.node_claim import still_claimed
from bursar.core.objects.object import Key, Stored
from bursar.core.quota.permit import still_granted, unknown_tenants
from bursar.core.quota.quota import (
    Counter,
    Exceeded,
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
    soft_of,
    tenant_scope,
)
from bursar.core.values.refusal import Cause, Code, Refusal
from bursar.wire.kinds.registry import BY_NAME


class TreeUse(Struct, frozen=True):
    """The use of an object of the tree by the rest of the system, which may forbid to delete or move it."""

    has_objects: bool = False  # of a namespace
    kept_for: tuple[str, ...] = ()  # nodes that are dedicated to a tenant, by name
    claimed: tuple[str, ...] = ()  # nodes that its users hold
    accounts: tuple[Account, ...] = ()


UNUSED = TreeUse()


def tree_refusal(old: Tree, new: Tree, key: Key, after: Stored | None, use: TreeUse = UNUSED) -> Refusal | None:
    """The refusal of changing the tree to the new one, in which this object differs; None if the change is valid."""
    if key.name in BY_NAME[key.kind].built_in and (after is None or after.fields.get("status.phase") == "Terminating"):
        return Refusal(Code.FORBIDDEN, f"{key.kind} {key.name!r} is built in and cannot be deleted")
    match key.kind:
        case "Tenant" if after is None:
            return _check_tenant_gone(old, key.name, use)
        case "Tenant":
            # Old grants may name a missing tenant: they were stored before that was forbidden.
            granted = still_granted(old, key.name, use.kept_for) if key.name not in old.tenants else None
            return _check_tenant(new, key.name) or granted
        case "Tier":
            return None if after else _check_tier_gone(old, key.name)
        case "Namespace":
            return _check_namespace(old, new, key.name, after, use)
        case "ResourceQuota":
            return _check_quota(new, key) if after else None
        case "Settings":
            return _check_units(new)
        case "PriorityClass" if after is not None:
            before = old.classes[key.name].allowed_tenants if key.name in old.classes else frozenset()
            return unknown_tenants(new, "allowedTenants", new.classes[key.name].allowed_tenants - before)
    return None


def is_moved(old: Tree, new: Tree, namespace: str) -> bool:
    """Whether a namespace is given to another tenant."""
    return namespace in old.namespaces and old.namespaces[namespace].tenant != new.namespaces[namespace].tenant


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
                causes=(Cause("FieldValueInvalid", "would create a cycle", field="spec.parent"),),
            )
        seen.add(above)
        above = tree.tenants[above].parent
    return None


def _dangling(field: str, kind: str, name: str) -> Refusal:
    message = f"{kind} {name!r} does not exist"
    return Refusal(Code.INVALID, message, "Create it first.", (Cause("FieldValueNotFound", message, field=field),))


def _check_tenant_gone(tree: Tree, name: str, use: TreeUse) -> Refusal | None:
    below = sorted(one.name for one in tree.tenants.values() if one.parent == name)
    living = sorted(one.name for one in tree.namespaces.values() if one.tenant == name)
    if below or living:
        what = f"tenants {', '.join(below[:5])}" if below else f"namespaces {', '.join(living[:5])}"
        return Refusal(Code.IN_USE, f'tenants "{name}" still has {what}', "Delete or move them first.")
    return (
        still_granted(tree, name, use.kept_for) or still_claimed(name, use.claimed) or left_behind(name, use.accounts)
    )


def _check_tier_gone(tree: Tree, name: str) -> Refusal | None:
    users = sorted(one.name for one in tree.tenants.values() if one.tier == name)
    if users:
        return Refusal(
            Code.IN_USE, f'tiers "{name}" is used by tenants {", ".join(users[:5])}', "Give them another tier first."
        )
    return None


def _check_namespace(old: Tree, new: Tree, name: str, after: Stored | None, use: TreeUse) -> Refusal | None:
    if after is None:
        return Refusal(Code.IN_USE, f'namespaces "{name}" is not empty') if use.has_objects else None
    tenant = new.namespaces[name].tenant
    if tenant not in new.tenants:
        return _dangling("metadata.labels[bursar.io/tenant]", "Tenant", tenant)
    if is_moved(old, new, name) and use.has_objects:
        owner = old.namespaces[name].tenant
        return Refusal(
            Code.IN_USE,
            f'namespaces "{name}" belongs to tenant "{owner}" and is in use: its tenant cannot be changed',
            "Empty the namespace first, or create another one for the new tenant.",
        )
    return None


def _check_quota(tree: Tree, key: Key) -> Refusal | None:
    if key.namespace not in tree.namespaces:
        return no_namespace(key.namespace)
    quota = find_quota(tree, key)
    if quota is not None and (named := sorted(quota.dimensions & tree.quota_policy.units.keys())):
        return _in_units(f"spec.hard[{named[0]}]", named[0], tree)
    return None


def _check_units(tree: Tree) -> Refusal | None:
    """Refuse units under which the system or a ResourceQuota has a limit, which would count nothing from then on."""
    units = tree.quota_policy.units.keys()
    if named := sorted(units & tree.system.keys()):
        return _in_units(f"spec.limits[{named[0]}]", named[0], tree)
    for quota in (one for group in tree.quotas.values() for one in group):
        if named := sorted(units & quota.dimensions):
            field, whose = f"spec.quotas.units[{named[0]}]", f"ResourceQuota {quota.namespace}/{quota.name}"
            message = f"{named[0]} is a dimension with a limit in {whose}: it cannot be a unit"
            hint = "Remove that limit first, or give the unit another name."
            return Refusal(Code.INVALID, message, hint, (Cause("FieldValueInvalid", message, field=field),))
    return None


def _in_units(field: str, name: str, tree: Tree) -> Refusal:
    parts = ", ".join(sorted(tree.quota_policy.units[name]))
    message = f"{name} is a unit: only limits of tenants and tiers are given in units"
    hint = f"Limit its parts: {parts}."
    return Refusal(Code.INVALID, message, hint, (Cause("FieldValueInvalid", message, field=field),))


def no_capacity(key: Key, exceeded: Sequence[Exceeded]) -> Refusal:
    refusal = quota_refusal(f'moving {key.kind.lower()} "{key.name}"', exceeded)
    return Refusal(Code.IN_USE, refusal.message, refusal.hint, refusal.causes)


# Counters after a change.


@dataclass(frozen=True, slots=True)
class TreePlan:
    """Counters to store and rows to remove; `exceeded` is why the change is refused."""

    put: dict[Row, Counter] = field(default_factory=dict)
    removed: set[Row] = field(default_factory=set)
    exceeded: Sequence[Exceeded] = ()


def recount_tenants(old: Tree, new: Tree, rows: Mapping[Row, Counter]) -> TreePlan:
    """Sum the counters of tenants again whose children or dimensions have changed."""
    dimensions = recounted_dimensions(old, new)
    before = {row: counter for row, counter in rows.items() if row[1] in dimensions}
    after = recount(old, new, before)
    return TreePlan(_changed(before, after), set(before) - set(after), overrun(old, new, before, after))


def touched_scopes(old: Tree, new: Tree) -> list[str]:
    """Scopes whose limits changed, or that were removed, without a change of what they count."""
    touched = [name for name in new.tenants if limits_of(old, name) != limits_of(new, name)]
    gone = [name for name in old.tenants if name not in new.tenants]
    return [tenant_scope(name) for name in (*gone, *touched)] + [SYSTEM_SCOPE]


def set_limits(new: Tree, scopes: Collection[str], before: Mapping[Row, Counter]) -> TreePlan:
    """Set new limits of scopes; the counters keep their sums."""
    wanted = {(SYSTEM_SCOPE, dimension) for dimension in new.system}
    removed: set[Row] = set()
    for scope in scopes:
        name = scope.partition(":")[2]
        there = {row for row in before if row[0] == scope and scope != SYSTEM_SCOPE}
        if name in new.tenants:
            wanted |= there | {(scope, dimension) for dimension in limits_of(new, name)}
        else:
            removed |= there
    after = {row: limited(new, row, before.get(row, Counter())) for row in wanted}
    return TreePlan(_changed(before, after), removed)


def recount_quota(old: Tree, new: Tree, key: Key, before: Mapping[Row, Counter]) -> TreePlan | None:
    """The plan for a ResourceQuota that was deleted, or counts the same as before; None if it must be counted from the
    charges of its namespace."""
    was, quota = find_quota(old, key), find_quota(new, key)
    if quota is None:
        return TreePlan(removed=set(before))
    if was is not None and (was.terms, was.dimensions) == (quota.terms, quota.dimensions):
        return TreePlan({row: limited(new, row, counter) for row, counter in before.items()})
    return None


def _changed(before: Mapping[Row, Counter], after: Mapping[Row, Counter]) -> dict[Row, Counter]:
    return {row: counter for row, counter in after.items() if before.get(row) != counter}


def limited(tree: Tree, row: Row, counter: Counter) -> Counter:
    """The counter with the limits of this tree."""
    return Counter(hard_of(tree, row), soft_of(tree, row), counter.accepted, counter.bound)


def find_quota(tree: Tree, key: Key) -> ResourceQuota | None:
    return next((one for one in tree.quotas.get(key.namespace, ()) if one.name == key.name), None)
