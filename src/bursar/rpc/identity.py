"""Which node is calling: what its certificate says, and never what its messages say.

TLS has checked that the certificate is of our authority and has not expired, before any of this is asked. Whether it
has been revoked only the database knows: see `revoked`.
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
    """The node that calls, with the generation of its certificate; None where the door is insecure."""
    if insecure:
        return None
    shown: Mapping[str, Iterable[bytes]] = context.auth_context()
    if not shown.get("x509_pem_cert"):
        return unauthenticated("the call carries no certificate", _ENROL)
    names = [name.decode(errors="replace") for name in shown.get("x509_subject_alternative_name", ())]
    identity = identity_in(names)
    if identity is None:
        return Refusal(Code.FORBIDDEN, "the certificate is not a node's: only nodes' agents call here", _ENROL)
    return identity


def other_node(identity: NodeIdentity | None, said: str) -> Refusal | None:
    """A node that speaks for another is refused; one that leaves its name out is who its certificate says."""
    if identity is None or said in ("", identity.node):
        return None
    return Refusal(Code.FORBIDDEN, f"the certificate is of node {identity.node!r}, which may not speak for {said!r}")


async def revoked(database: Database, identity: NodeIdentity | None) -> Refusal | None:
    """Why a certificate that TLS believed counts no more; None while it does."""
    if identity is None:
        return None
    async with database.reader() as db:
        return (await refused_identities(db, [identity])).get(identity)
