"""Tier: default limits for the tenants that name it."""

from __future__ import annotations

from msgspec import UNSET, UnsetType

from bursar.core.quota import tenant_tree
from bursar.core.values.access import AccessGroup, KindAccess, Role, RoleGrant
from bursar.core.values.refusal import Cause, field_fault
from bursar.wire.kinds.priorityclass import priority_faults
from bursar.wire.kinds.requestable import requestable_kinds
from bursar.wire.shared.approval import ApprovalSpec, approval_faults, policy_in
from bursar.wire.shared.billing import Billing, billing_faults, said_in
from bursar.wire.shared.kind import Column, Kind
from bursar.wire.shared.limits import amounts, amounts_faults, show_amounts, warn_at_faults, warn_at_of
from bursar.wire.shared.meta import ObjectMeta, Quantity, Text, Wire


class TierSpec(Wire):
    limits: dict[str, Quantity] | UnsetType = UNSET
    weight: int | float | UnsetType = UNSET
    description: Text = UNSET
    billing: Billing | UnsetType = UNSET
    user_priority_max: int | UnsetType = UNSET  # the highest priority that users of its tenants may ask for
    approval: ApprovalSpec | UnsetType = UNSET
    warn_at: dict[str, list[int]] | UnsetType = UNSET  # dimension, or * → percentages of a limit


class Tier(Wire, kw_only=True):
    api_version: Text = UNSET
    kind: Text = UNSET
    metadata: ObjectMeta
    spec: TierSpec | UnsetType = UNSET


def to_tree(tier: Tier) -> tenant_tree.Tier:
    spec = tier.spec if isinstance(tier.spec, TierSpec) else TierSpec()
    most = spec.user_priority_max
    return tenant_tree.Tier(
        str(tier.metadata.name),
        amounts(spec.limits),
        said_in(spec.billing),
        most if isinstance(most, int) else None,
        policy_in(spec.approval),
        warn_at_of(spec.warn_at),
    )


def _check(tier: Tier) -> list[Cause]:
    if not isinstance(tier.spec, TierSpec):
        return []
    spec = tier.spec
    faults = [*amounts_faults("spec.limits", spec.limits), *billing_faults("spec.billing", spec.billing)]
    faults += warn_at_faults("spec.warnAt", spec.warn_at)
    faults += approval_faults("spec.approval", spec.approval, requestable_kinds())
    if isinstance(spec.weight, int | float) and not 0 <= spec.weight <= 1e15:
        faults.append(field_fault("spec.weight", f"must be a number from 0 on, got {spec.weight}"))
    if isinstance(spec.user_priority_max, int):
        faults += priority_faults("spec.userPriorityMax", spec.user_priority_max)
    return faults


TIER = Kind(
    name="Tier",
    plural="tiers",
    type=Tier,
    namespaced=False,
    description="Default limits for the tenants that name it.",
    uid_prefix="tier",
    access=KindAccess(AccessGroup.CATALOGUE, (RoleGrant((Role.SERVICE,), ("create", "update", "patch")),)),
    check=_check,
    columns=(Column("Limits", lambda document: show_amounts((document.get("spec") or {}).get("limits"))),),
    in_tree=True,
)
