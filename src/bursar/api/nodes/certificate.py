"""Handlers of nodes' identity: the certificate of a node's key, and the certificate of the authority that signs it.

A node comes with a token that is good for one use, and for the same key again while it lives, should the answer have
been lost. If the node does not exist yet it is registered, as it describes itself;
what it says of itself later, on coming again with another token, changes nothing: labels and taints are the
administrators'. A node that has a token of its own gets another certificate with it.
"""

from __future__ import annotations

from typing import Any

import msgspec

from bursar.api.http.action import read_action
from bursar.api.http.body import check, convert, identify, name_faults
from bursar.api.http.body import faulty_causes as faulty
from bursar.api.http.route import Answer, Call, Outcome
from bursar.api.nodes.node import others_node, use_up_token
from bursar.api.objects.object import key_of, kind_of, origin_of
from bursar.core.values.access import Role
from bursar.core.values.instant import timestamp
from bursar.core.values.refusal import Code, Refusal, invalid
from bursar.ops.lifecycle.create import create_command
from bursar.ops.nodes import node_ca as ops
from bursar.ops.nodes.x509 import Issued, fingerprint, read_request
from bursar.ops.objects import object as object_ops
from bursar.wire.kinds.node import Node, describe_itself
from bursar.wire.shared.document import encode
from bursar.wire.shared.kind import Object

NO_SERVER = Refusal(
    Code.UNAVAILABLE,
    "this server does not know where agents are served: there is nothing to use a certificate for",
    "Start it with --grpc HOST:PORT, or name the one that serves them with --grpc-advertise HOST:PORT.",
)


class CertificateOrder(msgspec.Struct, rename="camel", forbid_unknown_fields=True):
    """The request is PKCS #10 in PEM, and only its key counts: EC on P-256, or RSA from 2048 bits on. `node` is the
    node as it describes itself; it is used when the node is registered, and never again."""

    certificate_request: str
    node: dict[str, Any] = {}


class Certificate(msgspec.Struct):
    """The node's certificate, good for 24 hours, and that of the authority that signed it, both in PEM; `address` is
    where agents are served, as host:port."""

    certificate: str
    authority: str
    address: str
    expires: str


class AuthorityAnswer(msgspec.Struct):
    """The certificate, as PEM, by which nodes and the control plane know each other; `address` is where agents are
    served, empty where that is not known."""

    authority: str
    expires: str
    address: str = ""


async def certify(call: Call) -> Outcome:
    """A certificate for a node's key."""
    asked = read_action(call, CertificateOrder, "order")
    if isinstance(asked, Refusal):
        return asked
    order, _, dry = asked
    if dry:
        return invalid("dryRun is not offered here")
    if refusal := others_node(call):
        return refusal
    node, request = _described(call, order.node), order.certificate_request.encode()
    if isinstance(node, Refusal):
        return node
    if isinstance(key := read_request(request), Refusal):
        return key
    if not call.context.grpc_address:
        return NO_SERVER
    if call.identity.role is Role.NODE and not call.identity.bootstrap:
        return _answer(call, await ops.issue(call.context.database, node.metadata.name, request))
    if call.identity.bootstrap:
        return await use_up_token(call, lambda: _enrol(call, node, request), fingerprint(key))
    return await _enrol(call, node, request)


def _described(call: Call, document: dict[str, Any]) -> Object | Refusal:
    """The node as it would be registered; its name is the path's."""
    kind = kind_of(call)
    described = convert(call, kind, {"metadata": {}, **document})
    if isinstance(described, Refusal):
        return described
    one = described.object
    causes = [*identify(call, kind, one), *name_faults(one.metadata), *check(kind, one)]
    return faulty(kind, causes) if causes else one


async def _enrol(call: Call, node: Object, request: bytes) -> Outcome:
    """Register the node, unless it is there, and begin its identity anew."""
    runtime = call.context.runtime
    if call.identity.bootstrap:
        assert isinstance(node, Node)
        describe_itself(node)
    if isinstance(await object_ops.get(runtime, key_of(call)), Refusal):
        reply = await object_ops.submit(runtime, create_command(kind_of(call), node, origin_of(call)), tenant="")
        if isinstance(reply, Refusal) and reply.code is not Code.ALREADY_EXISTS:
            return reply
    token_id = call.identity.token_id if call.identity.bootstrap else ""
    return _answer(call, await ops.enrol(call.context.database, key_of(call).name, request, token_id=token_id))


def _answer(call: Call, issued: Issued | Refusal) -> Outcome:
    if isinstance(issued, Refusal):
        return issued
    answer = Certificate(
        issued.certificate.decode(), issued.authority.decode(), call.context.grpc_address, timestamp(issued.expires_at)
    )
    return Answer(201, encode(answer))


async def show_authority(call: Call) -> Outcome:
    authority = await ops.ensure_authority(call.context.database)
    until = timestamp(authority.certificate.not_valid_after_utc)
    return Answer(200, encode(AuthorityAnswer(authority.pem.decode(), until, call.context.grpc_address)))
