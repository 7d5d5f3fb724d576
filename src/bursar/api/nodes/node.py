"""Handlers of nodes beside the common ones: registration with a bootstrap token, and status updates of nodes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from bursar.api.http.body import dry_run, read_object
from bursar.api.http.route import JSON, NO_STORE, Answer, Call, Outcome
from bursar.api.objects.edit import patch_object, replace_object
from bursar.api.objects.object import create_object, get, kind_of
from bursar.commands.lifecycle.edit import as_it_is
from bursar.core.values.access import Role
from bursar.core.values.refusal import Code, Refusal
from bursar.ops.access import token as token_ops
from bursar.ops.credit.agentless_billing import pay_on
from bursar.ops.nodes.capacity import cap
from bursar.ops.nodes.liveness import node_alive
from bursar.ops.runtime.clock import now
from bursar.store.db.database import Connection
from bursar.store.nodes import node as node_store
from bursar.wire.shared.document import encode
from bursar.wire.shared.reading import Body


async def register(call: Call) -> Outcome:
    """Create a node. Only this response contains the node's token."""
    body, dry = await read_object(call, kind_of(call)), dry_run(call)
    if isinstance(body, Refusal):
        return body
    if isinstance(dry, Refusal):
        return dry
    identity, name = call.identity, body.object.metadata.name
    if identity.bootstrap and name != identity.node:
        return Refusal(Code.FORBIDDEN, f"this token is for node {identity.node!r}, not {name!r}")
    # A table has no column for the token.
    call.headers = {**call.headers, "accept": JSON}
    if dry:
        return await create_object(call, kind_of(call), body)
    return await (use_up_token(call, lambda: _create(call, body)) if identity.bootstrap else _create(call, body))


async def use_up_token(call: Call, act: Callable[[], Awaitable[Outcome]], key: bytes | None = None) -> Outcome:
    """Do what a bootstrap token is for, which uses it up; whatever goes wrong, it is good again. Used for a key, of
    which this is the fingerprint, it is good for that key once more: the answer may not have arrived."""
    token_id = call.identity.token_id
    async with call.context.database.reader() as db:
        first = await token_ops.consume_token(db, token_id, now(), key)
        if not first and not await token_ops.is_used_for(db, token_id, now(), key):
            return await _used_up(db, token_id)
    outcome: Outcome | None = None
    try:
        outcome = await act()
    finally:
        if first and (outcome is None or isinstance(outcome, Refusal)):
            async with call.context.database.reader() as db:
                await token_ops.restore_token(db, token_id)
    call.context.authenticator.forget(token_id)
    return outcome


async def _used_up(db: Connection, token_id: str) -> Refusal:
    record = (await token_ops.find_tokens(db, [token_id])).get(token_id)
    used_at = record.used_at if record is not None else None
    unusable = "the token has expired, was revoked or was already used"
    message = token_ops.token_use(used_at) if used_at is not None else unusable
    return Refusal(Code.UNAUTHENTICATED, message, "Ask for a new one: bursar node token")


async def _create(call: Call, body: Body) -> Outcome:
    outcome = await create_object(call, kind_of(call), body)
    if not isinstance(outcome, Answer):
        return outcome
    document: dict[str, Any] = msgspec.json.decode(outcome.body)
    # The answer to a repeated request shows what was made before, with another uid: its token was issued
    # then. A joining node has used up a bootstrap token, and gets one.
    if document["metadata"]["uid"] != body.object.metadata.uid and not call.identity.bootstrap:
        return outcome
    name = document["metadata"]["name"]
    async with call.context.database.reader() as db:
        made = await token_ops.create_token(
            db, role=Role.NODE, node=name, user=name, created_by=call.identity.actor, now=now()
        )
    if isinstance(made, Refusal):
        return made
    document.setdefault("status", {})["token"] = made[1]
    return Answer(outcome.status, encode(document), headers={**outcome.headers, **NO_STORE})


def others_node(call: Call) -> Refusal | None:
    if call.identity.role is Role.NODE and call.parameters["name"] != call.identity.node:
        return Refusal(Code.FORBIDDEN, f"node {call.identity.node!r} may report only for itself")
    return None


async def patch_status(call: Call) -> Outcome:
    """Store a status; from the node itself it is a heartbeat."""
    if refusal := others_node(call):
        return refusal
    # A token may be stolen: the resources of its node were set by the administrator who registered it.
    settle = cap if call.identity.role is Role.NODE else as_it_is
    outcome = await (replace_object(call, settle) if call.route.method == "PUT" else patch_object(call, settle))
    if isinstance(outcome, Answer) and call.identity.role is Role.NODE and dry_run(call) is False:
        async with call.context.database.reader() as db:
            await node_store.save_seen(db, [call.parameters["name"]])
        await pay_on(call.context.runtime, [call.parameters["name"]])
        if b'"silentSince"' in outcome.body and await node_alive(call.context.runtime, [call.parameters["name"]]):
            return await get(call)
    return outcome
