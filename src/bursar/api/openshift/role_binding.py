"""Role bindings (rbac.authorization.k8s.io/v1): the members of a namespace's tenant, by role.

Every namespace has the bindings `admin`, `edit` and `view`, whose subjects are the members with the role tenant-admin,
user and viewer. A member is one subject of one binding, so adding a user to a binding of a lesser role changes nothing.
Namespaces of the same tenant have the same bindings.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import msgspec
from msgspec import UNSET, UnsetType

from bursar.api.http.body import read_document
from bursar.api.http.route import Answer, Call, Outcome
from bursar.api.objects import edit
from bursar.api.objects.object import origin_of, tenant_of_namespace
from bursar.commands.command import Command, Unchanged
from bursar.commands.lifecycle.dispatch import change_command, delete_command
from bursar.commands.objects.object import DeletePreconditions
from bursar.core.objects.object import Key, Stored
from bursar.core.values.access import NAME_CHARS_MAX, Role, lesser_role
from bursar.core.values.names import member_name, quoted
from bursar.core.values.patch import PatchError, TestFailed, json_patch, merge, strategic
from bursar.core.values.refusal import Cause, Code, Refusal, field_fault, invalid
from bursar.core.values.selector import parse_fields
from bursar.ops.lifecycle.create import create_command
from bursar.ops.objects import object as ops
from bursar.store.objects import listing
from bursar.store.objects.listing import Query
from bursar.wire.kinds.member import MEMBER, Member, MemberSpec
from bursar.wire.shared.document import encode
from bursar.wire.shared.meta import ObjectMeta, Text, Wire
from bursar.wire.shared.reading import without_nulls

RBAC_GROUP: Final = "rbac.authorization.k8s.io"
RBAC_API: Final = f"{RBAC_GROUP}/v1"
CLUSTER_ROLE: Final = "ClusterRole"
ROLES: Final = {"admin": Role.TENANT_ADMIN, "edit": Role.USER, "view": Role.VIEWER}
SUBJECTS_MAX: Final = 1000
CHANGES: Final = tuple(media for media in edit.PATCHES if media != edit.APPLY_PATCH)

_VERSION_DIGITS: Final = 15


class Subject(Wire, kw_only=True):
    kind: str
    name: str
    api_group: Text = UNSET
    namespace: Text = UNSET


class RoleRef(Wire, kw_only=True):
    kind: str
    name: str
    api_group: Text = UNSET


class RoleBinding(Wire, kw_only=True):
    api_version: Text = UNSET
    kind: Text = UNSET
    metadata: ObjectMeta
    subjects: list[Subject] | UnsetType = UNSET
    role_ref: RoleRef


# Reading.


async def list_bindings(call: Call) -> Outcome:
    tenant = await tenant_of_namespace(call)
    if isinstance(tenant, Refusal):
        return tenant
    members = await _members(call, tenant)
    items = [_document(call, name, members) for name in ROLES]
    body = {"kind": "RoleBindingList", "apiVersion": RBAC_API, "metadata": {"resourceVersion": "0"}, "items": items}
    return Answer(200, encode(body))


async def get_binding(call: Call) -> Outcome:
    tenant = await tenant_of_namespace(call)
    if isinstance(tenant, Refusal):
        return tenant
    name = call.parameters["name"]
    return _answer(call, 200, name, await _members(call, tenant)) if name in ROLES else _not_found(name)


async def _members(call: Call, tenant: str) -> dict[str, Role]:
    """The members of a tenant, by user in order of names."""
    of_tenant = parse_fields(f"spec.tenant={tenant}", MEMBER.selectable)
    async with call.context.database.reader() as db:
        page = await listing.load_page(db, Query(MEMBER.name, fields=of_tenant))
    specs = [msgspec.json.decode(item.doc, type=Member).spec for item in page.items]
    return {spec.user: Role(spec.role) for spec in sorted(specs, key=lambda one: one.user)}


def _document(call: Call, name: str, members: dict[str, Role]) -> dict[str, Any]:
    users = [user for user, role in members.items() if role is ROLES[name]]
    namespace = call.parameters["namespace"]
    return {
        "apiVersion": RBAC_API,
        "kind": "RoleBinding",
        "metadata": {
            "name": name,
            "namespace": namespace,
            "uid": f"rolebinding-{namespace}-{name}",
            "resourceVersion": _version(users),
        },
        "roleRef": {"apiGroup": RBAC_GROUP, "kind": CLUSTER_ROLE, "name": name},
        "subjects": [{"kind": "User", "apiGroup": RBAC_GROUP, "name": user} for user in users],
    }


def _version(users: Sequence[str]) -> str:
    """A version that is the same for the same subjects: members have revisions, their list has none."""
    digest = hashlib.sha256(encode(users)).digest()
    return str(int.from_bytes(digest[:8], "big") % 10**_VERSION_DIGITS)


def _answer(call: Call, status: int, name: str, members: dict[str, Role]) -> Answer:
    return Answer(status, encode(_document(call, name, members)))


def _not_found(name: str) -> Refusal:
    return Refusal(Code.NOT_FOUND, f'rolebindings "{name}" not found', f"Every namespace has {', '.join(ROLES)}.")


# Writing.


async def create_binding(call: Call) -> Outcome:
    """Fill a binding that has no subjects."""
    tenant = await tenant_of_namespace(call)
    if isinstance(tenant, Refusal):
        return tenant
    document = read_document(call)
    if isinstance(document, Refusal):
        return document
    binding = _read(call, document)
    if isinstance(binding, Refusal):
        return binding
    name = call.subject = str(binding.metadata.name)
    members = await _members(call, tenant)
    if ROLES[name] in members.values():
        return Refusal(
            Code.ALREADY_EXISTS, f'rolebindings "{name}" already exists', "Change the subjects of the existing one."
        )
    return await _bind(call, tenant, name, members, _users(binding), status=201)


async def change_binding(call: Call) -> Outcome:
    """PUT and PATCH: the subjects become the members with the binding's role."""
    tenant = await tenant_of_namespace(call)
    if isinstance(tenant, Refusal):
        return tenant
    if (name := call.parameters["name"]) not in ROLES:
        return _not_found(name)
    body = read_document(call)
    if isinstance(body, Refusal):
        return body
    members = await _members(call, tenant)
    current = _document(call, name, members)
    wanted = body if call.route.method == "PUT" else _patched(call.media_type, current, body)
    if isinstance(wanted, Refusal):
        return wanted
    binding = _read(call, wanted)
    if isinstance(binding, Refusal):
        return binding
    version = binding.metadata.resource_version or current["metadata"]["resourceVersion"]
    if version != current["metadata"]["resourceVersion"]:
        return Refusal(
            Code.CONFLICT,
            f'Operation cannot be fulfilled on rolebindings "{name}": its subjects were changed meanwhile',
            "Read the object again and apply the change to its latest version.",
        )
    return await _bind(call, tenant, name, members, _users(binding))


async def delete_binding(call: Call) -> Outcome:
    """Remove the subjects; the binding itself stays."""
    tenant = await tenant_of_namespace(call)
    if isinstance(tenant, Refusal):
        return tenant
    if (name := call.parameters["name"]) not in ROLES:
        return _not_found(name)
    return await _bind(call, tenant, name, await _members(call, tenant), [])


def _patched(media: str, current: dict[str, Any], patch: Any) -> Any:
    patches: dict[str, Callable[[Any, Any], Any]] = {
        edit.JSON_PATCH: json_patch,
        edit.MERGE_PATCH: merge,
        edit.STRATEGIC_PATCH: lambda document, change: strategic(document, change, {}),
    }
    if media not in patches:
        return Refusal(
            Code.UNSUPPORTED_MEDIA, f"a patch of type {media[:80]!r} is not understood", f"Send {', '.join(CHANGES)}."
        )
    try:
        return patches[media](current, patch)
    except TestFailed as error:
        return Refusal(Code.UNPROCESSABLE, f"the patch's test failed: {error}")
    except PatchError as error:
        return invalid(f"the patch cannot be applied: {error}")


def _read(call: Call, document: Any) -> RoleBinding | Refusal:
    try:
        binding = msgspec.convert(without_nulls(document), RoleBinding)
    except msgspec.ValidationError as error:
        return invalid(f"RoleBinding is invalid: {error}")
    causes = _faults(call, binding)
    if causes:
        listed = "; ".join(f"{one.field}: {one.message}" for one in causes[:10])
        return Refusal(Code.INVALID, f"RoleBinding is invalid: {listed}", causes=tuple(causes[:50]))
    return binding


def _faults(call: Call, binding: RoleBinding) -> list[Cause]:
    faults: list[Cause] = []
    name, metadata = call.parameters.get("name") or binding.metadata.name, binding.metadata
    known = ", ".join(ROLES)
    if (binding.api_version or RBAC_API) != RBAC_API or (binding.kind or "RoleBinding") != "RoleBinding":
        faults.append(field_fault("kind", f"this path is for RoleBinding of {RBAC_API}"))
    if (metadata.namespace or call.parameters["namespace"]) != call.parameters["namespace"]:
        faults.append(field_fault("metadata.namespace", "is not the namespace of the path"))
    if (metadata.name or name) != name:
        faults.append(field_fault("metadata.name", "is not the name of the path"))
    if binding.role_ref.kind != CLUSTER_ROLE or binding.role_ref.name not in ROLES:
        faults.append(field_fault("roleRef", f"must be a {CLUSTER_ROLE}: {known}"))
    elif binding.role_ref.name != name:
        faults.append(field_fault("metadata.name", f"must be the name of the role, {binding.role_ref.name}"))
    subjects = binding.subjects or []
    if len(subjects) > SUBJECTS_MAX:
        faults.append(field_fault("subjects", f"may have at most {SUBJECTS_MAX} entries, got {len(subjects)}"))
    for index, one in enumerate(subjects[:SUBJECTS_MAX]):
        if one.kind != "User":
            rule = f"must be User, not {quoted(one.kind)}: bind the users of a group one by one"
            faults.append(field_fault(f"subjects[{index}].kind", rule))
        elif not 0 < len(one.name) <= NAME_CHARS_MAX or not one.name.isprintable():
            rule = f"must be printable and have 1 to {NAME_CHARS_MAX} characters"
            faults.append(field_fault(f"subjects[{index}].name", rule))
    return faults


def _users(binding: RoleBinding) -> list[str]:
    return list(dict.fromkeys(one.name for one in binding.subjects or ()))


async def _bind(
    call: Call, tenant: str, name: str, members: dict[str, Role], users: Sequence[str], *, status: int = 200
) -> Outcome:
    """Make these users, and no others, the members with the role of a binding. It is repeatable after a fault."""
    namespace = (await call.context.tree(fresh=True)).namespaces.get(call.parameters["namespace"])
    added = [user for user in users if members.get(user) is not ROLES[name]]
    if added and (namespace is None or namespace.terminating):
        return Refusal(
            Code.TERMINATING,
            f'unable to add members to namespace "{call.parameters["namespace"]}" because it is being terminated',
            "Wait until it is removed and create it again.",
        )
    for user in added:
        if refusal := await _add(call, tenant, user, ROLES[name]):
            return refusal
    for user in (one for one, role in members.items() if role is ROLES[name] and one not in users):
        if refusal := await _remove(call, tenant, user, ROLES[name]):
            return refusal
    return _answer(call, status, name, await _members(call, tenant))


async def _add(call: Call, tenant: str, user: str, role: Role) -> Refusal | None:
    """Make a user a member, or raise the role of one."""
    spec = MemberSpec(tenant=tenant, user=user, role=role)
    one = Member(metadata=ObjectMeta(name=member_name(tenant, user)), spec=spec)
    runtime, key = call.context.runtime, Key(MEMBER.name, "", member_name(tenant, user))
    reply = await ops.submit(runtime, create_command(MEMBER, one, origin_of(call)), tenant=tenant)
    if isinstance(reply, Refusal) and reply.code is Code.ALREADY_EXISTS:
        reply = await ops.change(runtime, key, partial(_raised, call, role), tenant=tenant)
    return reply if isinstance(reply, Refusal) else None


def _raised(call: Call, role: Role, before: Stored, document: dict[str, Any]) -> Unchanged | Command | Refusal:
    one = msgspec.convert(document, Member)
    if lesser_role(Role(one.spec.role), role) is role:
        return Unchanged(before)
    one.spec.role = role
    return change_command(MEMBER, before, one, origin_of(call), spec_changed=True)


async def _remove(call: Call, tenant: str, user: str, role: Role) -> Refusal | None:
    """Remove a member, unless its role has changed meanwhile."""
    found = await ops.get(call.context.runtime, Key(MEMBER.name, "", member_name(tenant, user)))
    if isinstance(found, Refusal) or found.fields.get("spec.role") != role:
        return None
    command = delete_command(MEMBER, found, origin_of(call), preconditions=DeletePreconditions(revision=found.revision))
    reply = await ops.submit(call.context.runtime, command, tenant=tenant)
    return reply if isinstance(reply, Refusal) and reply.code is not Code.NOT_FOUND else None
