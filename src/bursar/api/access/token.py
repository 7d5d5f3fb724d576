"""Handlers of bearer tokens: create, list and revoke. Only the response that creates a token contains its secret."""

from __future__ import annotations

from typing import Any

import msgspec

from bursar.api.http.body import dry_run, idempotency_key_of, read_document
from bursar.api.http.route import NO_STORE, Answer, Call, Outcome
from bursar.core.quota.tenant_tree import sees
from bursar.core.values.access import EVERY, Role, grantable, reach, tenant_name
from bursar.core.values.duration import DurationError, parse_seconds
from bursar.core.values.instant import timestamp
from bursar.core.values.refusal import Cause, Code, Refusal, invalid
from bursar.ops.access import token as ops
from bursar.ops.runtime.clock import now
from bursar.store.access.token import TokenRecord
from bursar.store.db import idempotency as request_store
from bursar.store.db.database import Connection
from bursar.store.quota import tenant_tree as tree_store
from bursar.wire.shared.approval import gate_faults
from bursar.wire.shared.document import encode

# Secrets are not stored, so a repeated request has no second effect, but cannot get the same response.
REPEATED = Refusal(
    Code.REQUEST_REUSED,
    "this request_id was used; a token's secret is shown only once",
    "Revoke the token of the lost response, and create another one with a new request_id.",
    (Cause("FieldValueDuplicate", "was used before", field="request_id"),),
)


class NewToken(msgspec.Struct, forbid_unknown_fields=True):
    role: str
    tenant: str = ""
    user: str = ""
    node: str = ""
    ttl: str | int | None = None
    single_use: bool | None = None
    tenants: list[str] = []  # of an approver: the tenants whose requests it decides; `*` is every tenant
    gates: list[str] = []  # of an approver: the gates that it decides; `*` is every gate


class TokenSpec(msgspec.Struct, rename="camel", omit_defaults=True):
    role: str
    tenant: str = ""
    user: str = ""
    node: str = ""
    single_use: bool = False
    created_by: str = ""
    expires_at: str | None = None
    revoked_at: str | None = None
    tenants: list[str] = []
    gates: list[str] = []


class TokenMeta(msgspec.Struct, rename="camel"):
    name: str
    creation_timestamp: str


class TokenStatus(msgspec.Struct, omit_defaults=True):
    state: str
    token: str | None = None


class Token(msgspec.Struct, rename="camel"):
    metadata: TokenMeta
    spec: TokenSpec
    status: TokenStatus
    kind: str = "Token"
    api_version: str = "v1"


def shown(record: TokenRecord, secret: str | None = None) -> Token:
    at = now()
    expired = record.expires_at is not None and record.expires_at <= at
    state = "Revoked" if record.revoked_at else "Expired" if expired else "Used" if record.used_at else "Active"
    return Token(
        TokenMeta(record.id, timestamp(record.created_at)),
        TokenSpec(
            record.role,
            record.tenant,
            record.user,
            record.node,
            record.single_use,
            record.created_by,
            timestamp(record.expires_at) if record.expires_at else None,
            timestamp(record.revoked_at) if record.revoked_at else None,
            [tenant_name(one)[0] for one in record.tenants],
            list(record.gates),
        ),
        TokenStatus(state, secret),
    )


async def create(call: Call) -> Outcome:
    if refusal := _dry(call):
        return refusal
    document, idempotency_key = read_document(call), idempotency_key_of(call)
    if isinstance(document, Refusal):
        return document
    if isinstance(idempotency_key, Refusal):
        return idempotency_key
    wanted = _read(document)
    if isinstance(wanted, Refusal):
        return wanted
    role = Role(wanted.role)
    if role not in grantable(call.identity):
        return Refusal(Code.FORBIDDEN, f"role {call.identity.role} may not create tokens of role {role}")
    async with call.context.database.reader() as db, db.transaction():
        if idempotency_key is not None and not await request_store.claim(db, [idempotency_key]):
            return REPEATED
        made = await _made(call, db, wanted)
        if isinstance(made, Refusal):
            if idempotency_key is not None:
                await request_store.forget(db, [idempotency_key.key])
            return made
    return Answer(201, encode(shown(*made)), headers=NO_STORE)


async def _made(call: Call, db: Connection, wanted: NewToken) -> tuple[TokenRecord, str] | Refusal:
    role = Role(wanted.role)
    tenant_uid = await _tenant_uid(call, db, wanted.tenant) if wanted.tenant else ""
    if isinstance(tenant_uid, Refusal):
        return tenant_uid
    tenants: list[str] = []
    for name in wanted.tenants:
        uid = "" if name == EVERY else await _tenant_uid(call, db, name)
        if isinstance(uid, Refusal):
            return uid
        tenants.append(f"{name}@{uid}" if uid else name)
    return await ops.create_token(
        db,
        role=role,
        tenant=wanted.tenant,
        tenant_uid=tenant_uid,
        user=wanted.user,
        node=wanted.node,
        ttl_seconds=parse_seconds(wanted.ttl) if wanted.ttl is not None else None,
        single_use=role is Role.NODE if wanted.single_use is None else wanted.single_use,
        created_by=call.identity.actor,
        now=now(),
        tenants=tenants,
        gates=wanted.gates,
    )


async def _tenant_uid(call: Call, db: Connection, tenant: str) -> str | Refusal:
    """Resolve the uid of a tenant that the caller sees, and lock it against deletion: a token must not remain for a
    name that another tenant can get."""
    tree = await call.context.runtime.trees.at(db, await tree_store.lock_shared(db))
    if tenant not in tree.tenants or not sees(tree, reach(call.identity), tenant):
        return Refusal(Code.NOT_FOUND, f'tenants "{tenant[:63]}" not found')
    return tree.tenants[tenant].uid


def _dry(call: Call) -> Refusal | None:
    """Refuse options of other writes that tokens do not support."""
    dry = dry_run(call)
    if isinstance(dry, Refusal):
        return dry
    return invalid("dryRun is not supported here") if dry else None


def _read(document: Any) -> NewToken | Refusal:
    try:
        wanted = msgspec.convert(document, NewToken)
    except msgspec.ValidationError as error:
        return invalid(f"the token is invalid: {error}")
    if wanted.role not in tuple(Role):
        return invalid(
            f"unknown role {wanted.role[:63]!r}",
            Cause("FieldValueNotSupported", f"must be one of {', '.join(Role)}", field="role"),
            hint=f"Roles: {', '.join(Role)}.",
        )
    if fault := _approver_fault(wanted):
        return fault
    if wanted.ttl is not None:
        try:
            if parse_seconds(wanted.ttl) <= 0:
                return invalid("ttl must be more than 0")
        except DurationError as error:
            return invalid(f"ttl: {error}")
    return wanted


def _approver_fault(wanted: NewToken) -> Refusal | None:
    """Tokens of approvers name tenants and gates, those of services may name tenants; others have neither."""
    if wanted.role != Role.APPROVER and wanted.gates:
        return invalid("gates are for tokens of role approver")
    if wanted.role not in (Role.APPROVER, Role.SERVICE) and wanted.tenants:
        return invalid("tenants are for tokens of the roles approver and service; others belong to one: tenant")
    if wanted.role != Role.APPROVER:
        return None
    if not wanted.tenants:
        return invalid(
            "a token of role approver names the tenants that it sees, and the gates that it decides for them",
            hint='For all of them: "tenants": ["*"], "gates": ["*"]. Without gates it decides nothing.',
        )
    causes = tuple(gate_faults("gates", wanted.gates, EVERY))
    return invalid("; ".join(one.message for one in causes), *causes) if causes else None


async def list_tokens(call: Call) -> Outcome:
    tenants = await call.context.visible_tenants(call.identity)
    async with call.context.database.reader() as db:
        records = await ops.list_tokens(db, tenants)
    items = [shown(one) for one in records]
    return Answer(200, encode({"kind": "TokenList", "apiVersion": "v1", "metadata": {}, "items": items}))


async def revoke(call: Call) -> Outcome:
    if refusal := _dry(call):
        return refusal
    name = call.parameters["name"]
    missing = Refusal(Code.NOT_FOUND, f'tokens "{name}" not found')
    async with call.context.database.reader() as db:
        record = (await ops.find_tokens(db, [name])).get(name)
    if record is None or not (record.tenant or call.identity.role is Role.SYSTEM_ADMIN):
        return missing
    if not await call.context.sees(call.identity, record.tenant):
        return missing
    if record.role not in grantable(call.identity):
        return Refusal(Code.FORBIDDEN, f"role {call.identity.role} may not revoke tokens of role {record.role}")
    async with call.context.database.reader() as db:
        revoked = await ops.revoke_token(db, name, now(), by=call.identity.actor)
    call.context.authenticator.forget(name)
    return Answer(200, encode(shown(revoked))) if revoked else missing
