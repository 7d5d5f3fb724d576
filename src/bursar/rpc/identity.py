"""Authentication of nodes: the caller's identity is that of its client certificate, never that of its messages.

TLS has verified the signature and the expiry before. Revocation is checked in the database: see `revoked`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import grpc

from bursar.core.values.access import unauthenticated
from bursar.core.values.certificate import NodeIdentity, identity_in
from bursar.core.values.refusal import Code, Refusal
from bursar.ops.nodes.node_ca import refused_identities
from bursar.store.db.database import Database

_ENROL = "enrol the node with a token: bursar node token --name NODE"


def identity_of(context: grpc.aio.ServicerContext[Any, Any], *, insecure: bool) -> NodeIdentity | Refusal | None:
    """The calling node, with the generation of its certificate; None without certificates."""
    if insecure:
        return None
    shown: Mapping[str, Iterable[bytes]] = context.auth_context()
    if not shown.get("x509_pem_cert"):
        return unauthenticated("the call carries no certificate", _ENROL)
    names = [name.decode(errors="replace") for name in shown.get("x509_subject_alternative_name", ())]
    identity = identity_in(names)
    if identity is None:
        return Refusal(
            Code.FORBIDDEN, "the certificate is not that of a node: only node agents may call this service", _ENROL
        )
    return identity


def other_node(identity: NodeIdentity | None, said: str) -> Refusal | None:
    """Refuse a message that names another node than the certificate; an empty name is accepted."""
    if identity is None or said in ("", identity.node):
        return None
    return Refusal(Code.FORBIDDEN, f"the certificate is of node {identity.node!r}, which may not speak for {said!r}")


async def revoked(database: Database, identity: NodeIdentity | None) -> Refusal | None:
    """The reason why the certificate is no longer valid; None if it is valid."""
    if identity is None:
        return None
    async with database.reader() as db:
        return (await refused_identities(db, [identity])).get(identity)
