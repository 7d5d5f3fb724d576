"""User: a person, registered by a portal under the name that the identity provider gives.

It gives no rights: a Member does. The tenant of the portal that registered the user owns it, so that portals do not see
each other's users.
"""

from __future__ import annotations

from msgspec import UNSET, UnsetType

from bursar.core.values.access import DELEGATE, READ, WRITE, AccessGroup, KindAccess, Role, RoleGrant
from bursar.core.values.names import path_segment
from bursar.core.values.refusal import Cause, field_fault
from bursar.wire.kinds.namespace import adopt_by_label, keep_label, tenant_of
from bursar.wire.shared.kind import Kind, column
from bursar.wire.shared.meta import ObjectMeta, Text, Wire

USER_API = "user.openshift.io/v1"
# Portals register users; tenants see their own members instead.
REGISTER_ACCESS = KindAccess(
    AccessGroup.SYSTEM,
    (RoleGrant((Role.SERVICE, DELEGATE), WRITE), RoleGrant((DELEGATE,), (*READ, "explain"))),
)


class RegisteredUser(Wire, kw_only=True):
    api_version: Text = UNSET
    kind: Text = UNSET
    metadata: ObjectMeta
    full_name: Text = UNSET
    identities: list[str] | UnsetType = UNSET  # joined when it is read
    groups: list[str] | UnsetType = UNSET


def _check(user: RegisteredUser) -> list[Cause]:
    if ":" in str(user.metadata.name):
        return [field_fault("metadata.name", "must not contain a colon, which ends the provider in identities")]
    return []


def _without_joined(user: RegisteredUser) -> None:
    user.identities = UNSET


USER = Kind(
    name="User",
    plural="users",
    type=RegisteredUser,
    namespaced=False,
    description="A person, registered by a portal; it gives no rights.",
    api_version=USER_API,
    uid_prefix="user",
    access=REGISTER_ACCESS,
    check=_check,
    normalise=_without_joined,
    columns=(column("Full Name", "fullName"),),
    owner=tenant_of,
    adopt=adopt_by_label,
    keep=keep_label,
    name_faults=path_segment,
    ends_with_tenant=True,
    words={
        "RegisteredUser.fullName": "The person's name.",
        "RegisteredUser.identities": "The identities that are mapped to the user.",
        "RegisteredUser.groups": "Stored as given.",
    },
    example={"metadata": {"name": "ann@example.org"}, "fullName": "Ann Example"},
)
