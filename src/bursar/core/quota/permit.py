"""What work of a tenant may ask for: priorities, priority classes, tolerations of reserved taints, parts of devices.

Everything here comes from the tree, which is in memory: asking costs no statement. It is asked when something is
submitted or changed, when the scheduler reads it, and again when it is bound: what was allowed may not be any more.
Administrators may let work in beyond it; that they did stands in its status.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain

from msgspec import Struct

from bursar.core.nodes.node import WHOLE, NodeGate, is_device, is_isolated
from bursar.core.nodes.node_affinity import is_reserved, untolerated
from bursar.core.objects.ask import Effect, Shape, Taint, Toleration
from bursar.core.quota.tenant_tree import PriorityClass, Tenant, Tree, lineage
from bursar.core.values.refusal import Cause, Code, Refusal
from bursar.core.values.replace import replace


@dataclass(frozen=True, slots=True)
class Permit:
    """What a tenant's work may ask for."""

    lineage: tuple[str, ...] = ()  # the tenant, its parent, and so on
    priority_max: int = 0
    tolerations: tuple[Toleration, ...] = ()  # of reserved taints
    reserved: tuple[str, ...] = ()
    isolated: bool = False  # its work goes only to nodes that isolate tenants


class Asking(Struct, frozen=True):
    """What a spec asks for that has to be permitted, each with its field."""

    priorities: tuple[tuple[str, int], ...] = ()
    classes: tuple[tuple[str, str], ...] = ()
    tolerations: tuple[tuple[str, Toleration], ...] = ()
    fractions: tuple[tuple[str, str, int], ...] = ()  # (field, resource, thousandths) of parts of devices


NOTHING_ASKED = Asking()


def together(some: Iterable[Asking]) -> Asking:
    """What several ask for, each thing once."""
    distinct = list(dict.fromkeys(some))
    if len(distinct) == 1:
        return distinct[0]
    each = [(one.priorities, one.classes, one.tolerations, one.fractions) for one in distinct]
    return Asking(*(tuple(dict.fromkeys(chain.from_iterable(parts))) for parts in zip(*each, strict=True)))


def permit_of(tree: Tree, tenant: str) -> Permit:
    known: Permit | None = tree.known_permits.get(tenant)
    if known is None:
        path = tuple(lineage(tree, tenant))
        granted = tuple(dict.fromkeys(one for name in path for one in tree.tenants[name].tolerations))
        isolated = any(tree.tenants[name].isolated for name in path)
        known = Permit(path, _priority_max(tree, path), granted, tree.permits.reserved, isolated)
        tree.known_permits[tenant] = known
    return known


def _priority_max(tree: Tree, path: Iterable[str]) -> int:
    """The nearest that is said: of the tenant, its tier, its parent, that one's tier, and so on; else the system's."""
    for name in path:
        said = _said(tree, tree.tenants[name])
        if said is not None:
            return said
    return tree.permits.user_priority_max


def _said(tree: Tree, tenant: Tenant) -> int | None:
    if tenant.user_priority_max is not None:
        return tenant.user_priority_max
    tier = tree.tiers.get(tenant.tier)
    return tier.user_priority_max if tier is not None else None


# Submitting.


def missing_classes(tree: Tree, asking: Asking) -> list[tuple[str, str]]:
    """(field, name) of classes that are not there."""
    return [(field, name) for field, name in asking.classes if name not in tree.classes]


def too_small(tree: Tree, asking: Asking) -> Refusal | None:
    """Parts of a device that are smaller than anybody may ask for, administrators included."""
    least = tree.permits.fraction_min
    causes = tuple(
        Cause(
            "FieldValueInvalid",
            f"{_part(amount)} of a device is less than the smallest part that may be asked for, {_part(least)}",
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
    """What of this only an administrator may let in; None where the tenant's own users may ask for all of it."""
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
        f"priority {value} is above {permit.priority_max}, the highest that users of this tenant may ask for",
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
    return f"priority class {one.name} has value {one.value}, and users of this tenant may ask for {most} at most"


def _not_granted(one: Toleration) -> str:
    value = "" if one.exists else f"={one.value}"
    return f"the taint {one.key}{value} is reserved, and this tenant was not granted to tolerate it"


def may_name(permit: Permit, one: PriorityClass) -> bool:
    """Whether users of a tenant may name a class. One that allows tenants grants its value to them, however high."""
    if one.admin_only:
        return False
    if one.allowed_tenants:
        return not one.allowed_tenants.isdisjoint(permit.lineage)
    return one.value <= permit.priority_max


def priority_in_force(permit: Permit, number: int | None, one: PriorityClass | None, default: int) -> int:
    """The priority that work counts with: what it asks for, or as much of it as it may."""
    if number is not None:
        return min(number, permit.priority_max)
    if one is None:
        return default
    return one.value if may_name(permit, one) else min(one.value, permit.priority_max)


# Names of tenants in grants. They are names: a tenant cannot go while one names it, and none names a tenant to come.

NAMES_TOLD_MAX = 5


def unknown_tenants(tree: Tree, field: str, names: Iterable[str]) -> Refusal | None:
    """Why a node or a priority class cannot name these tenants: some do not exist, and whoever is given such a name
    later would get what was granted to it."""
    absent = sorted({name for name in names if name not in tree.tenants})[:NAMES_TOLD_MAX]
    if not absent:
        return None
    causes = tuple(Cause("FieldValueNotFound", f"Tenant {name[:63]!r} does not exist", field=field) for name in absent)
    return Refusal(Code.INVALID, "; ".join(one.message for one in causes), "Create it first.", causes)


def still_granted(tree: Tree, tenant: str, nodes: Sequence[str]) -> Refusal | None:
    """Why a tenant can neither be deleted nor created: nodes (`nodes`, in order) or priority classes name it, and the
    next tenant of this name would inherit them."""
    classes = sorted(one.name for one in tree.classes.values() if tenant in one.allowed_tenants)
    named = [("node", "spec.tenants", nodes), ("priorityclass", "allowedTenants", classes)]
    told = [f"{field} of {kind} {', '.join(names[:NAMES_TOLD_MAX])}" for kind, field, names in named if names]
    if not told:
        return None
    kind, field, names = next(one for one in named if one[2])
    return Refusal(
        Code.IN_USE,
        f'tenants "{tenant}" is named by {" and by ".join(told)}',
        f"Take the name out first: bursar edit {kind} {names[0]}. An empty {field} is for all tenants.",
    )


# Taints.


def is_granted(permit: Permit, asked: Toleration) -> bool:
    """Whether a tenant's work may have a toleration. One without a key is no claim on reserved taints, and harmless."""
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
    """The same with the tolerations that are granted, and isolated where its tenant demands that. A toleration without
    a key leaves reserved taints alone, whoever asks."""
    where = shape.where
    kept = tuple(one for one in where.tolerations if exempt or is_granted(permit, one))
    reserved = permit.reserved if any(not one.key for one in kept) else ()
    if (kept, reserved, permit.isolated) == (where.tolerations, where.reserved, where.isolated):
        return shape
    return replace(shape, where=replace(where, tolerations=kept, reserved=reserved, isolated=permit.isolated))


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
    """Why a plan for this node is out of date: by its taints, the tenants it is for, what it takes, or because it
    isolates nothing. It names no tenant: it may be told to another."""
    if permit.isolated and not is_isolated(gate):
        return Refusal(Code.STALE, f"node {node} does not isolate tenants from each other")
    if gate is None:
        return None
    if gate.tenants and set(permit.lineage).isdisjoint(gate.tenants):
        return Refusal(Code.STALE, f"node {node} is kept for other tenants")
    if fractional and gate.whole_only:
        return Refusal(Code.STALE, f"node {node} takes no work that asks for a part of a device")
    granted = tuple(one for one in tolerations if exempt or is_granted(permit, one))
    taints = [Taint(key, value, Effect(effect)) for key, value, effect in gate.taints]
    if left := untolerated(granted, taints, permit.reserved):
        return Refusal(Code.STALE, f"node {node} has the taint {left[0].key}, which is not tolerated")
    return None


def has_fractions(requests: Iterable[tuple[str, int]]) -> bool:
    return any(0 < amount < WHOLE and is_device(name) for name, amount in requests)
