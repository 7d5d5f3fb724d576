"""Handlers of nodes beside the common ones: registration with a bootstrap token, and a node's word about itself."""

from __future__ import annotations

from typing import Any

import msgspec

from bursar.api.body import read_object
from bursar.api.edit import patch_object, replace_object
from bursar.api.object import create_object, kind_of
from bursar.api.route import Answer, Call, Outcome
from bursar.core.access import Role
from bursar.core.refusal import Code, Refusal
from bursar.ops import token as token_ops
from bursar.ops.office import now
from bursar.store import node as node_store
from bursar.wire.document import encode
from bursar.wire.meta import given


async def register(call: Call) -> Outcome:
    """Create a node. One that joins with a bootstrap token gets its own token, once, in the answer."""
    body = read_object(call, kind_of(call))
    if isinstance(body, Refusal):
        return body
    identity = call.identity
    if not identity.bootstrap:
        return await _registered(call, await create_object(call, kind_of(call), body))
    if body.object.metadata.name != identity.node:
        return Refusal(Code.FORBIDDEN, f"this token is for node {identity.node!r}, not {body.object.metadata.name!r}")
    async with call.house.database.reader() as db:
        if not await token_ops.consume_token(db, identity.token_id, now()):
            return Refusal(
                Code.UNAUTHENTICATED, "this bootstrap token was used before", "Ask for a new one: bursar node token"
            )
    outcome = await create_object(call, kind_of(call), body)
    if isinstance(outcome, Refusal):
        # Nothing was registered: the token is still good.
        async with call.house.database.reader() as db:
            await token_ops.restore_token(db, identity.token_id)
    else:
        call.house.authenticator.forget(identity.token_id)
    return await _registered(call, outcome)


async def _registered(call: Call, outcome: Outcome) -> Outcome:
    if not isinstance(outcome, Answer) or outcome.status != 201:
        return outcome
    document: dict[str, Any] = msgspec.json.decode(outcome.body)
    if document.get("kind") != "Node" or call.query.get("dryRun"):
        return outcome
    name = document["metadata"]["name"]
    async with call.house.database.reader() as db:
        made = await token_ops.create_token(
            db, role=Role.NODE, node=name, user=name, created_by=call.identity.actor, now=now()
        )
    if isinstance(made, Refusal):
        return made
    document.setdefault("status", {})["token"] = made[1]
    return Answer(201, encode(document))


def _others_node(call: Call) -> Refusal | None:
    if call.identity.role is Role.NODE and call.parameters["name"] != call.identity.node:
        return Refusal(Code.FORBIDDEN, f"node {call.identity.node!r} may speak only for itself")
    return None


async def patch_status(call: Call) -> Outcome:
    """A status from the node itself is its heartbeat."""
    if refusal := _others_node(call):
        return refusal
    outcome = await (replace_object(call) if call.route.method == "PUT" else patch_object(call))
    if isinstance(outcome, Answer) and given(call.identity.node):
        async with call.house.database.reader() as db:
            await node_store.save_seen(db, [call.parameters["name"]])
    return outcome
