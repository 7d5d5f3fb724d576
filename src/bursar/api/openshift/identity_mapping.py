"""User identity mappings (user.openshift.io/v1): the user that an identity names.

A mapping is stored in its identity, and has the identity's name.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from bursar.api.http.body import read_document
from bursar.api.http.route import Answer, Call, Outcome
from bursar.api.objects.object import find, may_see, origin_of
from bursar.commands.command import Command, Unchanged
from bursar.commands.lifecycle.dispatch import change_command
from bursar.core.objects.object import Key, Stored
from bursar.core.values.refusal import Code, Refusal, invalid
from bursar.ops.objects import object as ops
from bursar.wire.kinds.identity import IDENTITY, ProviderIdentity, UserReference, mapped_user
from bursar.wire.kinds.user import USER, USER_API
from bursar.wire.shared.document import encode
from bursar.wire.shared.meta import ObjectMeta, Text, Wire
from bursar.wire.shared.reading import without_nulls


class IdentityReference(Wire):
    name: str
    uid: Text = UNSET
    kind: Text = UNSET
    namespace: Text = UNSET
    api_version: Text = UNSET


class UserIdentityMapping(Wire, kw_only=True):
    api_version: Text = UNSET
    kind: Text = UNSET
    metadata: ObjectMeta | UnsetType = UNSET
    identity: IdentityReference
    user: UserReference


async def create_mapping(call: Call) -> Outcome:
    document = read_document(call)
    if isinstance(document, Refusal):
        return document
    try:
        mapping = msgspec.convert(without_nulls(document), UserIdentityMapping)
    except msgspec.ValidationError as error:
        return invalid(f"UserIdentityMapping is invalid: {error}")
    call.subject = mapping.identity.name
    key = Key(IDENTITY.name, "", mapping.identity.name)
    identity = await ops.get(call.context.runtime, key)
    if isinstance(identity, Refusal):
        return identity
    if not await may_see(call, identity):
        # The caller knows that the name is taken: creating the identity says so.
        return _exists(key.name)
    user = await find(call, Key(USER.name, "", mapping.user.name))
    if isinstance(user, Refusal):
        return user
    reference = UserReference(name=user.key.name, uid=user.uid)
    reply = await ops.change(
        call.context.runtime, key, partial(_mapped, call, reference), tenant=identity.tenant, first=identity
    )
    if isinstance(reply, Unchanged):
        return _exists(key.name)
    return reply if isinstance(reply, Refusal) else _answer(201, key.name, identity.uid, reference)


def _mapped(
    call: Call, user: UserReference, before: Stored, document: dict[str, Any]
) -> Unchanged | Command | Refusal:  # fmt: skip
    one = msgspec.convert(document, ProviderIdentity)
    if mapped_user(one):
        return Unchanged(before)
    one.user = user
    return change_command(IDENTITY, before, one, origin_of(call), spec_changed=True)


async def get_mapping(call: Call) -> Outcome:
    identity = await _mapped_identity(call)
    if isinstance(identity, Refusal):
        return identity
    one = msgspec.json.decode(identity.doc, type=ProviderIdentity)
    assert isinstance(one.user, UserReference)
    return _answer(200, identity.key.name, identity.uid, one.user)


async def delete_mapping(call: Call) -> Outcome:
    identity = await _mapped_identity(call)
    if isinstance(identity, Refusal):
        return identity
    reply = await ops.change(
        call.context.runtime, identity.key, partial(_unmapped, call), tenant=identity.tenant, first=identity
    )
    if isinstance(reply, Refusal):
        return reply
    return Answer(200, encode({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}))


def _unmapped(call: Call, before: Stored, document: dict[str, Any]) -> Unchanged | Command | Refusal:
    one = msgspec.convert(document, ProviderIdentity)
    if not mapped_user(one):
        return Unchanged(before)
    one.user = UNSET
    return change_command(IDENTITY, before, one, origin_of(call), spec_changed=True)


async def _mapped_identity(call: Call) -> Stored | Refusal:
    """The identity of the path, if it is mapped to a user."""
    name = call.parameters["name"]
    found = await find(call, Key(IDENTITY.name, "", name))
    if isinstance(found, Refusal) or not mapped_user(msgspec.json.decode(found.doc, type=ProviderIdentity)):
        return Refusal(Code.NOT_FOUND, f'useridentitymappings "{name}" not found')
    return found


def _exists(name: str) -> Refusal:
    return Refusal(Code.ALREADY_EXISTS, f'useridentitymappings "{name}" already exists', "Delete it first.")


def _answer(status: int, name: str, identity_uid: str, user: UserReference) -> Answer:
    document = {
        "apiVersion": USER_API,
        "kind": "UserIdentityMapping",
        "metadata": {"name": name, "uid": identity_uid},
        "identity": {"name": name, "uid": identity_uid},
        "user": {"name": user.name, **({"uid": user.uid} if user.uid else {})},
    }
    return Answer(status, encode(document))
