"""Permits: the priorities, priority classes, reserved tolerations and device fractions that a tenant's work may use.

Permits come from the tenant tree in memory, so a check costs no statement. Work is checked when it is submitted or
changed, when the scheduler reads it, and when it is bound, because permits may be revoked. Administrators may submit
work beyond a permit; its status records that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain

from msgspec import Struct

from bursar.core.nodes.node import WHOLE, NodeGate, is_isolated, is_open_to
from bursar.core.nodes.node_affinity import is_reserved, untolerated
from bursar.core.objects.ask import Effect, Shape, Taint, Toleration
from bursar.core.quota.tenant_tree import PriorityClass, Tenant, Tree, lineage
from bursar.core.values.quantity import is_device
from bursar.core.values.refusal import Cause, Code, Refusal
from bursar.core.values.replace import replace


@dataclass(frozen=True, slots=True)
class Permit:
    """The limits on the priorities, tolerations and nodes of a tenant's work."""

    lineage: tuple[str, ...] = ()  # the tenant, its parent, and so on
    priority_max: int = 0
    tolerations: tuple[Toleration, ...] = ()  # of reserved taints
    reserved: tuple[str, ...] = ()
    isolated: bool = False  # its work runs only on nodes that isolate tenants
    whole_only: bool = False  # nodes that do not say take no fractions of devices


class Asking(Struct, frozen=True):
    """The parts of a spec that need a permit, each with its field."""

    priorities: tuple[tuple[str, int], ...] = ()
    classes: tuple[tuple[str, str], ...] = ()
    tolerations: tuple[tuple[str, Toleration], ...] = ()
    fractions: tuple[tuple[str, str, int], ...] = ()  # (field, resource, thousandths) of a device


NOTHING_ASKED = Asking()


def together(some: Iterable[Asking]) -> Asking:
    """The union of several."""
    distinct = list(dict.fromkeys(some))
    if len(distinct) == 1:
        return distinct[0]
    each = [(one.priorities, one.classes, one.tolerations, one.fractions) for one in distinct]
    return Asking(*(tuple(dict.fromkeys(chain.from_iterable(parts))) for parts in zip(*each, strict=True)))


def permit_of(tree: Tree, tenant: str) -> Permit:
    """The permit of a tenant, with the tolerations and the isolation of its ancestors."""
    known: Permit | None = tree.known_permits.get(tenant)
    if known is None:
        path = tuple(lineage(tree, tenant))
        granted = tuple(dict.fromkeys(one for name in path for one in tree.tenants[name].tolerations))
        isolated = any(tree.tenants[name].isolated for name in path)
        policy = tree.permits
        known = Permit(path, _priority_max(tree, path), granted, policy.reserved, isolated, policy.whole_only)
        tree.known_permits[tenant] = known
    return known


def _priority_max(tree: Tree, path: Iterable[str]) -> int:
    """The nearest value: of the tenant, its tier, its parent, the parent's tier, and so on; else the system's."""
    for name in path:
        value = _own_priority_max(tree, tree.tenants[name])
        if value is not None:
            return value
    return tree.permits.user_priority_max


def _own_priority_max(tree: Tree, tenant: Tenant) -> int | None:
    if tenant.user_priority_max is not None:
        return tenant.user_priority_max
    tier = tree.tiers.get(tenant.tier)
    return tier.user_priority_max if tier is not None else None


# Submitting.


def missing_classes(tree: Tree, asking: Asking) -> list[tuple[str, str]]:
    """(field, name) of priority classes that do not exist."""
    return [(field, name) for field, name in asking.classes if name not in tree.classes]


def too_small(tree: Tree, asking: Asking) -> Refusal | None:
    """Refuse fractions of a device below the system's minimum, which also binds administrators."""
    least = tree.permits.fraction_min
    causes = tuple(
        Cause(
            "FieldValueInvalid",
            f"{_part(amount)} of a device is less than the smallest fraction allowed, {_part(least)}",
            field=field, dimension=resource, limit=_part(least), requested_delta=_part(amount),
        )
        for field, resource, amount in asking.fractions
        if amount < least
    )  # fmt: skip
    if not causes:
        return None
    hint = f"Ask for {_part(least)} or more."
    return Refusal(Code.INVALID, "; ".join(one.message for one in causes), hint, causes)


def _part(amount: int) -> str:
    return f"{amount / WHOLE:g}"


def beyond(tree: Tree, tenant: str, asking: Asking) -> Refusal | None:
    """Refuse the parts of a spec beyond the tenant's permit, which only an administrator may submit."""
    if asking is NOTHING_ASKED:
        return None
    permit = permit_of(tree, tenant)
    causes = [
        *(_too_high(permit, field, value) for field, value in asking.priorities if value > permit.priority_max),
        *(
            Cause("Forbidden", why, field=field)
            for field, name in asking.classes
            if (why := _not_for(permit, tree.classes.get(name)))
        ),
        *(
            Cause("Forbidden", _not_granted(one), field=field)
            for field, one in asking.tolerations
            if not is_granted(permit, one)
        ),
    ]
    if not causes:
        return None
    hint = f"Ask for priority {permit.priority_max} or less, or ask a system admin."
    if not any(one.field.endswith(("priority", "priorityClass")) for one in causes):
        hint = "Leave the toleration out, or ask a system admin to grant it to the tenant."
    return Refusal(Code.FORBIDDEN, "; ".join(one.message for one in causes), hint, tuple(causes))


def _too_high(permit: Permit, field: str, value: int) -> Cause:
    return Cause(
        "Forbidden",
        f"priority {value} is above {permit.priority_max}, the highest that users of this tenant may use",
        field=field, limit=str(permit.priority_max), requested_delta=str(value),
    )  # fmt: skip


def _not_for(permit: Permit, one: PriorityClass | None) -> str:
    if one is None or may_name(permit, one):
        return ""
    if one.admin_only:
        return f"priority class {one.name} is for administrators only"
    if one.allowed_tenants:
        return f"priority class {one.name} is not for this tenant"
    most = permit.priority_max
    return f"priority class {one.name} has value {one.value}; users of this tenant may use at most {most}"


def _not_granted(one: Toleration) -> str:
    value = "" if one.exists else f"={one.value}"
    return f"the taint {one.key}{value} is reserved, and this tenant has no grant to tolerate it"


def may_name(permit: Permit, one: PriorityClass) -> bool:
    """Whether users of a tenant may use a class. A class that lists tenants grants its value to them, however high."""
    if one.admin_only:
        return False
    if one.allowed_tenants:
        return not one.allowed_tenants.isdisjoint(permit.lineage)
    return one.value <= permit.priority_max


def priority_in_force(permit: Permit, number: int | None, one: PriorityClass | None, default: int) -> int:
    """The effective priority of work: the requested one, capped at the tenant's maximum."""
    if number is not None:
        return min(number, permit.priority_max)
    if one is None:
        return default
    return one.value if may_name(permit, one) else min(one.value, permit.priority_max)


# Names of tenants in grants. Grants name existing tenants only, and a named tenant cannot be deleted.

NAMES_TOLD_MAX = 5


def unknown_tenants(tree: Tree, field: str, names: Iterable[str]) -> Refusal | None:
    """Refuse a grant to tenants that do not exist, which a later tenant of that name would inherit."""
    absent = sorted({name for name in names if name not in tree.tenants})[:NAMES_TOLD_MAX]
    if not absent:
        return None
    causes = tuple(Cause("FieldValueNotFound", f"Tenant {name[:63]!r} does not exist", field=field) for name in absent)
    return Refusal(Code.INVALID, "; ".join(one.message for one in causes), "Create it first.", causes)


def still_granted(tree: Tree, tenant: str, nodes: Sequence[str]) -> Refusal | None:
    """Refuse to delete or create a tenant that nodes (`nodes`, in order) or priority classes name, because the next
    tenant of this name would inherit the grants."""
    classes = sorted(one.name for one in tree.classes.values() if tenant in one.allowed_tenants)
    named = [("node", "spec.tenants", nodes), ("priorityclass", "allowedTenants", classes)]
    told = [f"{field} of {kind} {', '.join(names[:NAMES_TOLD_MAX])}" for kind, field, names in named if names]
    if not told:
        return None
    kind, field, names = next(one for one in named if one[2])
    return Refusal(
        Code.IN_USE,
        f'tenants "{tenant}" is named by {" and by ".join(told)}',
        f"Remove the name first: bursar edit {kind} {names[0]}. An empty {field} means all tenants.",
    )


# Taints.


def is_granted(permit: Permit, asked: Toleration) -> bool:
    """Whether a tenant's work may have a toleration. One without a key never matches a reserved taint."""
    if not asked.key or not is_reserved(permit.reserved, asked.key):
        return True
    return any(_covers(one, asked) for one in permit.tolerations)


def _covers(grant: Toleration, asked: Toleration) -> bool:
    return (
        grant.key == asked.key
        and grant.effect in ("", asked.effect)
        and (grant.exists or (not asked.exists and grant.value == asked.value))
    )


@lru_cache(4096)
def permitted(shape: Shape, permit: Permit, exempt: bool) -> Shape:
    """The shape with the granted tolerations only, isolated if its tenant requires that, and kept off nodes that do
    not say whether they take fractions if the settings refuse those. A toleration without a key never matches reserved
    taints, not even for administrators."""
    where = shape.where
    whole_only = where.fractional and permit.whole_only
    kept = tuple(one for one in where.tolerations if exempt or is_granted(permit, one))
    reserved = permit.reserved if any(not one.key for one in kept) else ()
    now = replace(where, tolerations=kept, reserved=reserved, isolated=permit.isolated, whole_only=whole_only)
    return shape if now == where else replace(shape, where=now)


# Binding.


def kept_out(
    node: str,
    gate: NodeGate | None,
    permit: Permit,
    tolerations: Iterable[Toleration],
    *,
    exempt: bool,
    fractional: bool,
) -> Refusal | None:
    """Refuse a bind to a node by its taints, tenants, fractions of devices or isolation. The message names no tenant,
    because another tenant may read it."""
    if permit.isolated and not is_isolated(gate):
        return Refusal(Code.STALE, f"node {node} does not isolate tenants from each other")
    said = gate.whole_only if gate is not None else None
    if fractional and (permit.whole_only if said is None else said):
        return Refusal(Code.STALE, f"node {node} takes no work that requests a fraction of a device")
    if gate is None:
        return None
    if not is_open_to(gate.tenants, permit.lineage):
        return Refusal(Code.STALE, f"node {node} is reserved for other tenants")
    granted = tuple(one for one in tolerations if exempt or is_granted(permit, one))
    taints = [Taint(key, value, Effect(effect)) for key, value, effect in gate.taints]
    if left := untolerated(granted, taints, permit.reserved):
        return Refusal(Code.STALE, f"node {node} has the taint {left[0].key}, which is not tolerated")
    return None


def has_fractions(requests: Iterable[tuple[str, int]]) -> bool:
    return any(0 < amount < WHOLE and is_device(name) for name, amount in requests)
