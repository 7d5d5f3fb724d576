"""QuotaRequest: a request of a tenant's administrator for higher limits. Its approval raises the tenant's limits.

The tenant is that of the request's namespace. The limits change in the transaction of the approval, as limits of the
tenant's own (`Tenant.spec.limits`), whichever tier it has.
"""

from __future__ import annotations

from msgspec import UNSET, UnsetType

from bursar.core.objects.approval import MANUAL_GATE
from bursar.core.values.access import AccessGroup, KindAccess, Role, RoleGrant
from bursar.core.values.refusal import Cause, field_fault
from bursar.wire.shared.approval import SELECTABLE, ApprovalStatus
from bursar.wire.shared.kind import USER_FIELD, Column, Kind, column, read, user_field
from bursar.wire.shared.limits import amounts_faults, show_amounts
from bursar.wire.shared.meta import ObjectMeta, Quantity, Text, Wire

REASON_CHARS_MAX = 1024


class QuotaRequestSpec(Wire):
    limits: dict[str, Quantity]
    reason: Text = UNSET


class QuotaRequestStatus(Wire):
    user: Text = UNSET  # the requester
    reason: Text = UNSET
    message: Text = UNSET
    approval: ApprovalStatus | UnsetType = UNSET


class QuotaRequest(Wire, kw_only=True):
    api_version: Text = UNSET
    kind: Text = UNSET
    metadata: ObjectMeta
    spec: QuotaRequestSpec
    status: QuotaRequestStatus | UnsetType = UNSET


def _check(request: QuotaRequest) -> list[Cause]:
    spec = request.spec
    faults = amounts_faults("spec.limits", spec.limits)
    if not spec.limits:
        faults.append(field_fault("spec.limits", "names no limit: request at least one"))
    if isinstance(spec.reason, str) and len(spec.reason) > REASON_CHARS_MAX:
        faults.append(field_fault("spec.reason", f"must have at most {REASON_CHARS_MAX} characters"))
    return faults


def _user(request: QuotaRequest) -> str:
    return (request.status.user or "") if isinstance(request.status, QuotaRequestStatus) else ""


QUOTA_REQUEST = Kind(
    name="QuotaRequest",
    plural="quotarequests",
    type=QuotaRequest,
    namespaced=True,
    description="A request for higher limits of a tenant, whose approval raises them.",
    short_names=("qr",),
    uid_prefix="quotarequest",
    # Users submit work within limits; administrators of the tenant request other limits, and decide on those of the
    # tenants below theirs (commands/approval/limits.py).
    access=KindAccess(AccessGroup.BOUNDS, (RoleGrant((Role.TENANT_ADMIN,), ("approve",)),)),
    check=_check,
    selectable=(USER_FIELD, *SELECTABLE),
    fields=lambda one: user_field(_user(one)),
    columns=(
        Column("Limits", lambda document: show_amounts(read(document, "spec.limits", {}))),
        column("Approval", "status.approval.state", default="<none>"),
        column("User", "status.user", default="<none>", wide=True),
        column("Reason", "spec.reason", wide=True),
        column("Message", "status.message", wide=True),
    ),
    mutable_spec=False,
    requestable=True,
    gates=(MANUAL_GATE,),
    submitted=True,
    words={
        "QuotaRequestSpec.limits": "The requested limits by dimension; each must be above the present one.",
        "QuotaRequestSpec.reason": "The reason, which the approver reads.",
    },
    example={
        "metadata": {"name": "more-gpus", "namespace": "ml-team"},
        "spec": {"limits": {"nvidia.com/gpu": "128"}, "reason": "training of the next model in June"},
    },
)
