"""Tenant: the owner of limits, a fair share and a budget. Tenants form a tree; a limit applies to the whole subtree."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Any

from msgspec import UNSET, UnsetType

from bursar.core.quota import tenant_tree
from bursar.core.quota.quota_messages import dimension_of
from bursar.core.usage.budget import BudgetState
from bursar.core.values.access import ANY, DELEGATE, OF_TENANTS, READ, AccessGroup, KindAccess, Role, RoleGrant
from bursar.core.values.refusal import Cause, field_fault
from bursar.wire.kinds.namespace import DEFAULT_TENANT
from bursar.wire.kinds.priorityclass import priority_faults
from bursar.wire.kinds.requestable import requestable_kinds
from bursar.wire.shared.affinity import toleration_of
from bursar.wire.shared.approval import APPROVAL_POLICIES, ApprovalSpec, approval_faults, policy_in
from bursar.wire.shared.billing import Billing, billing_faults, said_in
from bursar.wire.shared.kind import Column, Fields, Kind, column
from bursar.wire.shared.limits import amounts, amounts_faults, show_amounts, warn_at_faults, warn_at_of
from bursar.wire.shared.meta import Condition, ObjectMeta, Quantity, Text, Wire
from bursar.wire.shared.scheduling import Toleration, toleration_list_faults

ENFORCEMENTS = tuple(tenant_tree.Enforcement)

ISOLATION_REQUIRED = "required"
ISOLATIONS = ("none", ISOLATION_REQUIRED)
# The flat fields of a tenant that are not limits.
SOFT_FIELDS = ("gpu_hours_budget", "node_hours_budget", "fair_share_target", "burst_allowance", "weight")
FLAT_FIELDS = (
    "tier",
    "parent",
    "enforcement",
    "display_name",
    "approval",
    "approval_policy",
    "sensitive",
    "user_priority_max",
    "tolerations",
    "isolation",
)
BILLING_MODE = "billing_mode"  # the flat name of spec.billing.mode

# Conditions of a tenant's hours budget, and the field to select by.
BUDGET_WARNING = "BudgetWarning"
BUDGET_EXHAUSTED = "BudgetExhausted"
BUDGET_FIELD = "status.budget"
# The condition of a tenant that has used much of a limit, and the field to select by.
QUOTA_WARNING = "QuotaWarning"
QUOTA_FIELD = "status.quota"


class QuotaState(StrEnum):
    """Whether a tenant has used much of a limit."""

    WITHIN = "Within"
    WARNING = "Warning"


class TenantSpec(Wire):
    parent: Text = UNSET
    tier: Text = UNSET
    limits: dict[str, Quantity] | UnsetType = UNSET
    enforcement: Text = UNSET
    display_name: Text = UNSET
    weight: int | float | UnsetType = UNSET
    fair_share_target: int | float | UnsetType = UNSET
    burst_allowance: int | float | UnsetType = UNSET
    gpu_hours_budget: int | float | UnsetType = UNSET
    node_hours_budget: int | float | UnsetType = UNSET
    billing: Billing | UnsetType = UNSET
    approval: ApprovalSpec | UnsetType = UNSET
    approval_policy: Text = UNSET  # a short form for one gate
    sensitive: bool | UnsetType = UNSET  # whether its users may claim nodes for themselves alone
    user_priority_max: int | UnsetType = UNSET  # the highest priority that its users may ask for
    tolerations: list[Toleration] | UnsetType = UNSET  # of reserved taints, which its work may have
    warn_at: dict[str, list[int]] | UnsetType = UNSET  # dimension, or * → percentages of a limit
    isolation: Text = UNSET  # required: its work, and that below it, goes only to nodes that isolate tenants


class TenantStatus(Wire):
    conditions: list[Condition] | UnsetType = UNSET
    quota_warnings: dict[str, int] | UnsetType = UNSET  # the reached mark of each limit, in percent


class Tenant(Wire, kw_only=True):
    api_version: Text = UNSET
    kind: Text = UNSET
    metadata: ObjectMeta
    spec: TenantSpec | UnsetType = UNSET
    status: TenantStatus | UnsetType = UNSET


def to_tree(tenant: Tenant) -> tenant_tree.Tenant:
    spec = tenant.spec if isinstance(tenant.spec, TenantSpec) else TenantSpec()
    return tenant_tree.Tenant(
        name=str(tenant.metadata.name),
        parent=spec.parent or "",
        tier=spec.tier or "",
        limits=amounts(spec.limits),
        enforcement=tenant_tree.Enforcement(spec.enforcement or tenant_tree.Enforcement.REJECT),
        billing=said_in(spec.billing),
        may_claim=spec.sensitive is not False,
        uid=tenant.metadata.uid or "",
        created_at=tenant.metadata.creation_timestamp or "",
        user_priority_max=spec.user_priority_max if isinstance(spec.user_priority_max, int) else None,
        tolerations=tuple(toleration_of(one) for one in spec.tolerations or ()),
        isolated=spec.isolation == ISOLATION_REQUIRED,
        approval=policy_in(spec.approval, spec.approval_policy),
        warn_at=warn_at_of(spec.warn_at),
    )


def merge_from_flat(body: Mapping[str, Any]) -> dict[str, Any] | list[Cause]:
    """A merge patch from the flat form `{"max_nodes": 250, "gpu_hours_budget": 150000}`, or its faults."""
    spec: dict[str, Any] = {}
    limits: dict[str, Any] = {}
    faults: list[Cause] = []
    for name, value in body.items():
        if name.startswith("max_"):
            limits[dimension_of(name)] = value
        elif name in SOFT_FIELDS or name in FLAT_FIELDS:
            spec[_camel(name)] = value
        elif name == BILLING_MODE:
            spec["billing"] = {"mode": value}
        else:
            faults.append(Cause("FieldValueNotFound", f"unknown field {name[:63]!r}", field=name[:63]))
    if faults:
        return faults
    return {"spec": {**spec, **({"limits": limits} if limits else {})}}


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(part.capitalize() for part in rest)


def _check(tenant: Tenant) -> list[Cause]:
    if not isinstance(tenant.spec, TenantSpec):
        return []
    spec = tenant.spec
    faults = amounts_faults("spec.limits", spec.limits) + warn_at_faults("spec.warnAt", spec.warn_at)
    if spec.enforcement is not UNSET and spec.enforcement not in ENFORCEMENTS:
        faults.append(field_fault("spec.enforcement", f"must be one of {', '.join(ENFORCEMENTS)}"))
    if spec.approval_policy is not UNSET and spec.approval_policy not in APPROVAL_POLICIES:
        faults.append(field_fault("spec.approvalPolicy", f"must be one of {', '.join(APPROVAL_POLICIES)}"))
    faults += approval_faults("spec.approval", spec.approval, requestable_kinds())
    if spec.approval is not UNSET and spec.approval_policy is not UNSET:
        faults.append(field_fault("spec.approvalPolicy", "is a short form of spec.approval: set only one"))
    if spec.isolation is not UNSET and spec.isolation not in ISOLATIONS:
        faults.append(field_fault("spec.isolation", f"must be one of {', '.join(ISOLATIONS)}"))
    if spec.parent == tenant.metadata.name:
        faults.append(field_fault("spec.parent", "a tenant cannot be its own parent"))
    for name in SOFT_FIELDS:
        value = getattr(spec, name)
        if value is not UNSET and not 0 <= value <= 1e15:
            faults.append(field_fault(f"spec.{_camel(name)}", f"must be a number from 0 on, got {value}"))
    if isinstance(spec.fair_share_target, int | float) and spec.fair_share_target > 1:
        faults.append(field_fault("spec.fairShareTarget", "is a fraction of the system: at most 1"))
    if isinstance(spec.burst_allowance, int | float) and spec.burst_allowance < 1:
        faults.append(field_fault("spec.burstAllowance", "is a factor on the share: at least 1"))
    faults += billing_faults("spec.billing", spec.billing)
    if isinstance(spec.user_priority_max, int):
        faults += priority_faults("spec.userPriorityMax", spec.user_priority_max)
    faults += toleration_list_faults("spec.tolerations", spec.tolerations)
    faults += [
        field_fault(f"spec.tolerations[{index}].key", "is required: a tenant is granted one taint's key at a time")
        for index, one in enumerate(spec.tolerations or ())
        if not one.key
    ]
    return faults


# Display.


def state_in(conditions: Iterable[Mapping[str, Any]]) -> BudgetState:
    """The state of a tenant's budget, by the conditions of its status."""
    true = {one["type"] for one in conditions if one["status"] == "True"}
    if BUDGET_EXHAUSTED in true:
        return BudgetState.EXHAUSTED
    return BudgetState.WARNING if BUDGET_WARNING in true else BudgetState.WITHIN


def _fields(tenant: Tenant) -> Fields:
    spec = tenant.spec if isinstance(tenant.spec, TenantSpec) else TenantSpec()
    status = tenant.status if isinstance(tenant.status, TenantStatus) else TenantStatus()
    conditions = [{"type": one.type, "status": one.status} for one in status.conditions or ()]
    return {
        "spec.parent": spec.parent or "",
        "spec.tier": spec.tier or "",
        BUDGET_FIELD: state_in(conditions),
        QUOTA_FIELD: QuotaState.WARNING if status.quota_warnings else QuotaState.WITHIN,
    }


def _parent(tenant: Tenant) -> str:
    return (tenant.spec.parent or "") if isinstance(tenant.spec, TenantSpec) else ""


def _budget(document: Mapping[str, Any]) -> str:
    """The budget's state; empty for a tenant without a budget."""
    spec = document.get("spec") or {}
    state = state_in((document.get("status") or {}).get("conditions") or ())
    limited = "gpuHoursBudget" in spec or "nodeHoursBudget" in spec
    return str(state) if limited or state is not BudgetState.WITHIN else "<none>"


TENANT = Kind(
    name="Tenant",
    plural="tenants",
    type=Tenant,
    namespaced=False,
    description="The owner of limits, a fair share, a budget and credit.",
    short_names=("tn",),
    uid_prefix="tenant",
    access=KindAccess(
        AccessGroup.SYSTEM,
        (
            RoleGrant(OF_TENANTS, (*READ, "explain"), ("", ANY)),
            RoleGrant((Role.BILLING_ADMIN,), READ, ("", ANY)),
            RoleGrant((Role.SERVICE, DELEGATE), ("create", "update", "patch")),
            RoleGrant((DELEGATE,), (*READ, "explain"), ("", ANY)),
            RoleGrant((Role.SERVICE, DELEGATE), ("update", "delete"), ("limits",)),
        ),
    ),
    check=_check,
    selectable=("spec.parent", "spec.tier", BUDGET_FIELD, QUOTA_FIELD),
    fields=_fields,
    columns=(
        column("Parent", "spec.parent", default="<none>"),
        column("Tier", "spec.tier", default="<none>"),
        Column("Budget", _budget),
        Column("Limits", lambda document: show_amounts((document.get("spec") or {}).get("limits"))),
        column("GPU-hours", "spec.gpuHoursBudget", wide=True, default="<none>"),
        column("Node-hours", "spec.nodeHoursBudget", wide=True, default="<none>"),
        column("Billing", "spec.billing.mode", wide=True, default="<none>"),
    ),
    merge_keys={"status.conditions": "type"},
    in_tree=True,
    built_in=frozenset({DEFAULT_TENANT}),
    has_status=True,
    owner=lambda one: str(one.metadata.name),
    above=_parent,
    words={
        "TenantSpec.parent": "The parent tenant, whose limits apply to it too.",
        "TenantSpec.tier": "The tier with its default limits.",
        "TenantSpec.warnAt": "Percentages of a limit at which to warn, by dimension; `*` is every other one.",
        "TenantStatus.quotaWarnings": "The reached mark of each limit, in percent.",
    },
)
