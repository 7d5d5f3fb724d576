"""ResourceClaim: a claim on amounts of anything that can be limited, which an operator outside of Bursar fulfils.

The keys of `spec.resources` are dimensions of quotas; a new one needs no code. An operator watches approved claims,
provides what `status.granted` says, writes what became of it to the status, and holds the claim by a finalizer until it
has taken everything back: until then the claim is charged.
"""

from __future__ import annotations

from typing import Any

from msgspec import UNSET, UnsetType

from bursar.core.objects.approval import PENDING_REQUESTS
from bursar.core.objects.charge import Amounts, Charge
from bursar.core.values.access import AccessGroup, KindAccess, Role, RoleGrant
from bursar.core.values.quantity import format_amount
from bursar.core.values.refusal import Cause, field_fault
from bursar.wire.shared.approval import SELECTABLE, ApprovalStatus
from bursar.wire.shared.kind import USER_FIELD, Column, Fields, Kind, column, read, user_field
from bursar.wire.shared.limits import amounts, amounts_faults, show_amounts
from bursar.wire.shared.meta import Condition, ObjectMeta, Quantity, Text, Wire

TYPE_CHARS_MAX = 63
TEXT_CHARS_MAX = 4096


class ResourceClaimSpec(Wire):
    resources: dict[str, Quantity]
    type: Text = UNSET
    description: Text = UNSET
    parameters: dict[str, str] | UnsetType = UNSET


class GrantedAmounts(Wire):
    resources: dict[str, Quantity] | UnsetType = UNSET


class ResourceClaimStatus(Wire):
    user: Text = UNSET  # the requester
    reason: Text = UNSET
    message: Text = UNSET
    approval: ApprovalStatus | UnsetType = UNSET
    granted: GrantedAmounts | UnsetType = UNSET  # the amounts in force; absent until the claim is approved
    external_id: Text = UNSET
    state: Text = UNSET
    conditions: list[Condition] | UnsetType = UNSET


class ResourceClaim(Wire, kw_only=True):
    api_version: Text = UNSET
    kind: Text = UNSET
    metadata: ObjectMeta
    spec: ResourceClaimSpec
    status: ResourceClaimStatus | UnsetType = UNSET


def _check(claim: ResourceClaim) -> list[Cause]:
    spec = claim.spec
    faults = amounts_faults("spec.resources", spec.resources)
    if faults:
        return faults
    if PENDING_REQUESTS in amounts(spec.resources):
        faults.append(field_fault("spec.resources", f"{PENDING_REQUESTS} counts requests, and cannot be claimed"))
    if not spec.resources:
        faults.append(field_fault("spec.resources", "names no resource: claim at least one"))
    if isinstance(spec.type, str) and not 0 < len(spec.type) <= TYPE_CHARS_MAX:
        faults.append(field_fault("spec.type", f"must have between 1 and {TYPE_CHARS_MAX} characters"))
    if isinstance(spec.description, str) and len(spec.description) > TEXT_CHARS_MAX:
        faults.append(field_fault("spec.description", f"must have at most {TEXT_CHARS_MAX} characters"))
    return faults


def _fields(claim: ResourceClaim) -> Fields:
    status = claim.status if isinstance(claim.status, ResourceClaimStatus) else ResourceClaimStatus()
    return {"spec.type": claim.spec.type or "", "status.state": status.state or "", **user_field(status.user or "")}


def _charge(claim: ResourceClaim) -> Charge:
    return Charge(accepted=amounts(claim.spec.resources))


def _granted(held: Amounts) -> dict[str, Any]:
    return {"granted": {"resources": {name: format_amount(name, value) for name, value in sorted(held.items())}}}


RESOURCE_CLAIM = Kind(
    name="ResourceClaim",
    plural="resourceclaims",
    type=ResourceClaim,
    namespaced=True,
    description="A claim on amounts of anything that can be limited, fulfilled by an operator outside of Bursar.",
    short_names=("rc", "claim"),
    uid_prefix="claim",
    access=KindAccess(
        AccessGroup.WORK,
        (RoleGrant((Role.SERVICE,), ("update", "patch"), ("", "status")),),
    ),
    check=_check,
    selectable=("spec.type", "status.state", USER_FIELD, *SELECTABLE),
    fields=_fields,
    charge=_charge,
    columns=(
        column("Type", "spec.type", default="<none>"),
        Column("Resources", lambda document: show_amounts(read(document, "spec.resources", {}))),
        column("Approval", "status.approval.state", default="<none>"),
        column("State", "status.state", default="<none>"),
        column("External-Id", "status.externalId", default="<none>", wide=True),
        column("Message", "status.message", wide=True),
    ),
    merge_keys={"status.conditions": "type"},
    requestable=True,
    granted=_granted,
    refused=lambda reason, message, _: {"reason": reason, "message": message},
    charged_until_gone=True,
    submitted=True,
    has_status=True,
    in_all=True,
    words={
        "ResourceClaimSpec.type": "What is claimed, for the operator that provides it: cluster, baremetal, vm.",
        "ResourceClaimSpec.resources": "Amounts by dimension; any name that can be limited.",
        "ResourceClaimSpec.parameters": "Parameters for the operator, which Bursar does not read.",
        "ResourceClaimStatus.granted": "The amounts in force, which the operator provides.",
        "ResourceClaimStatus.externalId": "The operator's id of what it provided.",
        "ResourceClaimStatus.state": "The operator's word for its progress: Provisioning, Ready, Failed.",
    },
    example={
        "metadata": {"name": "training-cluster", "namespace": "ml-team"},
        "spec": {"type": "cluster", "resources": {"clusters": 1, "baremetal-hosts": 5}},
    },
)
