"""PriorityClass: a named priority."""

from __future__ import annotations

from typing import Any

from msgspec import UNSET, UnsetType

from bursar.core.quota import tenant_tree
from bursar.core.values.access import AccessGroup, KindAccess
from bursar.core.values.refusal import Cause, field_fault
from bursar.wire.shared.kind import Column, Kind, TenantGrant, column
from bursar.wire.shared.meta import ObjectMeta, Text, Wire

PRIORITY_MAX = 1_000_000_000
TENANTS_MAX = 1000


class PriorityClass(Wire, kw_only=True):
    api_version: Text = UNSET
    kind: Text = UNSET
    metadata: ObjectMeta
    value: int
    global_default: bool | UnsetType = UNSET
    preemption_policy: Text = UNSET
    description: Text = UNSET
    admin_only: bool | UnsetType = UNSET  # only administrators may use it
    allowed_tenants: list[str] | UnsetType = UNSET  # only these tenants and their descendants may use it
    cross_tenant: bool | UnsetType = UNSET  # may preempt other tenants' work by priority alone


def to_tree(one: PriorityClass) -> tenant_tree.PriorityClass:
    return tenant_tree.PriorityClass(
        str(one.metadata.name),
        one.value,
        one.admin_only is True,
        frozenset(one.allowed_tenants or ()),
        one.cross_tenant is True,
        one.global_default is True,
    )


def _check(one: PriorityClass) -> list[Cause]:
    faults = priority_faults("value", one.value)
    if one.preemption_policy not in (UNSET, "PreemptLowerPriority", "Never"):
        faults.append(field_fault("preemptionPolicy", "must be PreemptLowerPriority or Never"))
    tenants = one.allowed_tenants or []
    if len(tenants) > TENANTS_MAX:
        faults.append(field_fault("allowedTenants", f"may have at most {TENANTS_MAX} entries, got {len(tenants)}"))
    if one.admin_only is True and tenants:
        faults.append(field_fault("allowedTenants", "must be empty with adminOnly: no tenant may use the class"))
    if one.global_default is True and (one.admin_only is True or tenants):
        faults.append(field_fault("globalDefault", "is for work of all tenants: allow the class to all of them"))
    return faults


def priority_faults(field: str, value: int) -> list[Cause]:
    if not -PRIORITY_MAX <= value <= PRIORITY_MAX:
        return [field_fault(field, f"must be between -{PRIORITY_MAX} and {PRIORITY_MAX}, got {value}")]
    return []


def _named_tenants(document: dict[str, Any]) -> str:
    if document.get("adminOnly"):
        return "administrators"
    return ",".join(document.get("allowedTenants") or ()) or "<all>"


PRIORITY_CLASS = Kind(
    name="PriorityClass",
    plural="priorityclasses",
    type=PriorityClass,
    namespaced=False,
    description="A named priority.",
    short_names=("pc",),
    uid_prefix="pc",
    access=KindAccess(AccessGroup.CATALOGUE),
    check=_check,
    columns=(
        column("Value", "value", type="integer"),
        column("Global-Default", "globalDefault", default="False"),
        Column("For", _named_tenants),
        column("Cross-Tenant", "crossTenant", wide=True, default="False"),
    ),
    in_tree=True,
    names_tenants=TenantGrant("allowedTenants"),
)
