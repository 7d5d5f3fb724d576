"""Member: a user of a tenant, with a role there, for identities whose provider names no tenant.

Tenant and user determine the name, so that a user is a member of a tenant once, however many requests race. A member
exists no longer than its tenant.
"""

from __future__ import annotations

from msgspec import UNSET, field

from bursar.core.values.access import NAME_CHARS_MAX, OF_TENANTS, AccessGroup, KindAccess, Role, RoleGrant
from bursar.core.values.names import member_name
from bursar.core.values.refusal import Cause, field_fault
from bursar.wire.shared.kind import Fields, Kind, column
from bursar.wire.shared.meta import ObjectMeta, Text, Wire


class MemberSpec(Wire):
    tenant: str
    user: str
    role: str


class Member(Wire, kw_only=True):
    api_version: Text = UNSET
    kind: Text = UNSET
    metadata: ObjectMeta = field(default_factory=ObjectMeta)
    spec: MemberSpec


def _name(member: Member) -> str:
    return member_name(member.spec.tenant, member.spec.user)


def _check(member: Member) -> list[Cause]:
    spec, faults = member.spec, []
    if not spec.tenant:
        faults.append(field_fault("spec.tenant", "is required"))
    if not 0 < len(spec.user) <= NAME_CHARS_MAX or not spec.user.isprintable():
        faults.append(field_fault("spec.user", f"must be printable and have 1 to {NAME_CHARS_MAX} characters"))
    if spec.role not in OF_TENANTS:
        faults.append(field_fault("spec.role", f"must be one of {', '.join(OF_TENANTS)}"))
    if not faults and member.metadata.name != _name(member):
        rule = f"must be {_name(member)}, by spec.tenant and spec.user: leave it out of a new member"
        faults.append(field_fault("metadata.name", rule))
    return faults


def _fields(member: Member) -> Fields:
    return {"spec.tenant": member.spec.tenant, "spec.user": member.spec.user, "spec.role": member.spec.role}


MEMBER = Kind(
    name="Member",
    plural="members",
    type=Member,
    namespaced=False,
    description="A user of a tenant, with a role there.",
    short_names=("mb",),
    uid_prefix="member",
    access=KindAccess(
        AccessGroup.BOUNDS,
        (RoleGrant((Role.SERVICE,), ("create", "update", "patch", "delete", "deletecollection")),),
    ),
    check=_check,
    selectable=("spec.tenant", "spec.user", "spec.role"),
    fields=_fields,
    columns=(column("Tenant", "spec.tenant"), column("User", "spec.user"), column("Role", "spec.role")),
    owner=lambda one: str(one.spec.tenant),
    derived_name=_name,
    ends_with_tenant=True,
    member_field="spec.user",
    words={
        "MemberSpec.tenant": "The tenant.",
        "MemberSpec.user": "The user, as the identity provider's user claim names them.",
        "MemberSpec.role": "The role in the tenant: tenant-admin, user or viewer.",
    },
    example={"metadata": {"name": "acme.ann"}, "spec": {"tenant": "acme", "user": "ann", "role": "user"}},
)
