"""Rules of requests for higher limits: each limit must be above the present one, and within the headroom of a parent
whose administrator grants it."""

from __future__ import annotations

from collections.abc import Mapping

from bursar.core.quota.quota_messages import dimension_label
from bursar.core.quota.tenant_tree import Tree, children_of, limit_on, limits_of, with_tenant
from bursar.core.values.quantity import UNLIMITED, format_amount
from bursar.core.values.refusal import Cause, Code, Refusal
from bursar.core.values.replace import replace


def not_higher(tree: Tree, tenant: str, wanted: Mapping[str, int]) -> Refusal | None:
    """The refusal of a request for limits that are not above the present ones."""
    causes = tuple(
        _not_above(dimension, limit, asked)
        for dimension, asked in sorted(wanted.items())
        if (limit := present_limit(tree, tenant, dimension)) >= asked
    )
    if not causes:
        return None
    message = "; ".join(one.message for one in causes)
    return Refusal(Code.UNPROCESSABLE, message, "Request more than the present limit: bursar quota", causes)


def _not_above(dimension: str, limit: int, asked: int) -> Cause:
    shown = format_amount(dimension, limit)
    label, wanted = dimension_label(dimension), format_amount(dimension, asked)
    message = (
        f"the tenant has no limit on {label}: there is nothing to raise"
        if limit == UNLIMITED
        else f"the limit on {label} is {shown} already, requested {wanted}"
    )
    field = f"spec.limits[{dimension}]"
    return Cause("FieldValueInvalid", message, field=field, dimension=label, limit=shown, requested_delta=wanted)


def raised(tree: Tree, tenant: str, wanted: Mapping[str, int]) -> dict[str, int]:
    """The requested limits that are above the present ones: others were raised or removed meanwhile."""
    return {name: asked for name, asked in wanted.items() if present_limit(tree, tenant, name) < asked}


def shortages(tree: Tree, tenant: str, parent: str, wanted: Mapping[str, int]) -> Refusal | None:
    """The refusal of limits beyond the headroom of the parent: its own limit minus those of its other children."""
    owner, before = tree.tenants[tenant], limits_of(tree, tenant)
    after = limits_of(with_tenant(tree, replace(owner, limits={**owner.limits, **wanted})), tenant)
    causes = tuple(
        cause
        for dimension, asked in sorted(after.items())
        if asked != before.get(dimension) and (cause := _shortage(tree, tenant, parent, dimension, asked))
    )
    if not causes:
        return None
    hint = f"Approve less, lower another tenant's limit, or ask a system admin to raise the limits of {parent}."
    return Refusal(Code.QUOTA_EXCEEDED, "; ".join(one.message for one in causes), hint, causes)


def _shortage(tree: Tree, tenant: str, parent: str, dimension: str, asked: int) -> Cause | None:
    """The lack of headroom on one dimension. Children without a limit of their own are given nothing."""
    limit = present_limit(tree, parent, dimension)
    given = [present_limit(tree, name, dimension) for name in children_of(tree).get(parent, ()) if name != tenant]
    others = sum(one for one in given if one != UNLIMITED)
    if limit == UNLIMITED or others + asked <= limit:
        return None
    shown, used, wanted = (format_amount(dimension, one) for one in (limit, others, asked))
    label = dimension_label(dimension)
    return Cause(
        "QuotaExceeded",
        f"tenant {parent} has {label} limit {shown}, the other tenants below it are given {used}, requested {wanted}",
        dimension=label, scope=f"tenant:{parent}", limit=shown, current_usage=used, requested_delta=wanted,
    )  # fmt: skip


def present_limit(tree: Tree, tenant: str, name: str) -> int:
    """The limit on a dimension, or in a unit in which the tenant's limits are written; UNLIMITED without one."""
    owner = tree.tenants[tenant]
    if name not in tree.quota_policy.units:
        return limit_on(tree, owner, name).value
    tier = tree.tiers.get(owner.tier)
    return owner.limits.get(name, tier.limits.get(name, UNLIMITED) if tier is not None else UNLIMITED)
