"""Group: a named list of users, stored for portals. It gives no rights: a Member does."""

from __future__ import annotations

from typing import Any

from msgspec import UNSET

from bursar.core.values.access import NAME_CHARS_MAX
from bursar.core.values.names import path_segment
from bursar.core.values.refusal import Cause, field_fault
from bursar.wire.kinds.namespace import adopt_by_label, keep_label, tenant_of
from bursar.wire.kinds.user import REGISTER_ACCESS, USER_API
from bursar.wire.shared.kind import Column, Kind
from bursar.wire.shared.meta import ObjectMeta, Text, Wire

USERS_MAX = 10_000


class Group(Wire, kw_only=True):
    api_version: Text = UNSET
    kind: Text = UNSET
    metadata: ObjectMeta
    users: list[str] | None = None


def _check(group: Group) -> list[Cause]:
    users = group.users or []
    if len(users) > USERS_MAX:
        return [field_fault("users", f"may have at most {USERS_MAX} entries, got {len(users)}")]
    return [
        field_fault(f"users[{index}]", f"must be printable and have 1 to {NAME_CHARS_MAX} characters")
        for index, user in enumerate(users)
        if not 0 < len(user) <= NAME_CHARS_MAX or not user.isprintable()
    ]


def _users(document: dict[str, Any]) -> str:
    return ", ".join(document.get("users") or ())


GROUP = Kind(
    name="Group",
    plural="groups",
    type=Group,
    namespaced=False,
    description="A named list of users, stored for portals; it gives no rights.",
    api_version=USER_API,
    uid_prefix="group",
    access=REGISTER_ACCESS,
    check=_check,
    columns=(Column("Users", _users),),
    owner=tenant_of,
    adopt=adopt_by_label,
    keep=keep_label,
    name_faults=path_segment,
    ends_with_tenant=True,
    words={"Group.users": "The names of its users."},
    example={"metadata": {"name": "physics"}, "users": ["ann@example.org"]},
)
