"""Handlers of nodes' identity: the certificate of a node's key, and the certificate of the CA that signs it.

A node enrols with a single-use token, which stays valid for the same key while it lives, in case the response was lost.
A node that does not exist yet is registered as it describes itself. When it enrols again with another token, its
description is ignored: labels and taints belong to the administrators. A node with a token of its own gets another
certificate with it.
"""

from __future__ import annotations

from typing import Any

import msgspec

from bursar.api.http.action import read_action
from bursar.api.http.body import path_of
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
from bursar.wire.shared.reading import read

NO_SERVER = Refusal(
    Code.UNAVAILABLE,
    "no gRPC server for agents is configured, so certificates are of no use",
    "Start the server with --grpc HOST:PORT, or name another one with --grpc-advertise HOST:PORT.",
)


class CertificateOrder(msgspec.Struct, rename="camel", forbid_unknown_fields=True):
    """A request for a certificate: PKCS #10 in PEM, of which only the key is used: EC on P-256, or RSA of at least 2048
    bits. `node` is the node's description of itself, used only for its registration."""

    certificate_request: str
    node: dict[str, Any] = {}


class Certificate(msgspec.Struct):
    """The node's certificate, valid for 24 hours, and that of its CA, both in PEM; `address` is the agents' gRPC
    server, as host:port."""

    certificate: str
    authority: str
    address: str
    expires: str


class AuthorityAnswer(msgspec.Struct):
    """The certificate, as PEM, of the CA by which nodes and the control plane authenticate each other; `address` is the
    agents' gRPC server, empty if unknown."""

    authority: str
    expires: str
    address: str = ""


async def certify(call: Call) -> Outcome:
    """Issue a certificate for a node's key."""
    asked = read_action(call, CertificateOrder, "order")
    if isinstance(asked, Refusal):
        return asked
    order, _, dry = asked
    if dry:
        return invalid("dryRun is not supported here")
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
    """The node document for the registration; its name is that of the path."""
    described = read(kind_of(call), {"metadata": {}, **document}, path_of(call, is_new=True))
    return described if isinstance(described, Refusal) else described.object


async def _enrol(call: Call, node: Object, request: bytes) -> Outcome:
    """Register the node unless it exists, and begin a new generation of its identity."""
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
