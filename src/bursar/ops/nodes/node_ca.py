"""The node certificate authority: it signs the certificates of nodes, and checks which ones are still valid.

Instead of a revocation list, each certificate has the generation of its node's identity, and the database has the valid
one: enrolling a node again, disowning or deleting it starts the next generation, and older certificates are refused.
"""

from __future__ import annotations

from collections.abc import Collection

from bursar.commands.objects.object import not_found
from bursar.core.values.access import unauthenticated
from bursar.core.values.certificate import NodeIdentity
from bursar.core.values.refusal import Code, Refusal
from bursar.ops.nodes.x509 import Authority, Issued, fingerprint, new_authority, read_authority, read_request, sign_node
from bursar.ops.runtime.clock import now
from bursar.store.db.database import Connection, Database
from bursar.store.nodes import node_ca as store
from bursar.wire.kinds.node import node_key

NAME = "Bursar node authority"
ENROL_HINT = "enrol it again with a new token: bursar node token --name {}"
OVERTAKEN = Refusal(
    Code.CONFLICT,
    "the node was deleted, or enrolled by another request, at the same time",
    "Try again, with a new token.",
)


async def ensure_authority(database: Database) -> Authority:
    """The authority; the first process creates it."""
    async with database.reader() as db:
        record = await store.load(db) or await _make(db)
    return read_authority(record.certificate.encode(), record.key.encode())


async def _make(db: Connection) -> store.AuthorityRecord:
    async with db.transaction():
        await store.lock(db)
        # Another process may have created it while this one waited for the lock.
        if record := await store.load(db):
            return record
        made = new_authority(NAME, now())
        record = store.AuthorityRecord(made.pem.decode(), made.key_pem.decode())
        await store.save(db, record)
        return record


async def enrol(database: Database, node: str, request: bytes, *, token_id: str = "") -> Issued | Refusal:
    """A first certificate for an existing node. Its earlier certificates become invalid, except those for the same key
    and the same token: that answer may have been lost."""
    key = read_request(request)
    if isinstance(key, Refusal):
        return key
    authority = await ensure_authority(database)
    async with database.reader() as db:
        generation = await store.enrol(db, node, token_id, fingerprint(key))
    if generation is None:
        return OVERTAKEN if token_id else not_found(node_key(node))
    return sign_node(authority, key, NodeIdentity(node, generation), now())


async def renew(database: Database, identity: NodeIdentity, request: bytes) -> Issued | Refusal:
    """The next certificate for a node that has presented one. The current one stays valid until it expires."""
    key = read_request(request)
    if isinstance(key, Refusal):
        return key
    authority = await ensure_authority(database)
    async with database.reader() as db:
        refused = await refused_identities(db, [identity])
    return refused.get(identity) or sign_node(authority, key, identity, now())


async def issue(database: Database, node: str, request: bytes) -> Issued | Refusal:
    """A certificate for a node that has presented its own token; its current certificates stay valid."""
    key = read_request(request)
    if isinstance(key, Refusal):
        return key
    authority = await ensure_authority(database)
    async with database.reader() as db:
        generation = await store.ensure_generation(db, node)
    if generation is None:
        return not_found(node_key(node))
    return sign_node(authority, key, NodeIdentity(node, generation), now())


async def refused_identities(db: Connection, identities: Collection[NodeIdentity]) -> dict[NodeIdentity, Refusal]:
    """The invalid identities, each with its refusal: the node was deleted, disowned, or enrolled again since."""
    counting = await store.load_generations(db, {one.node for one in identities})
    refused: dict[NodeIdentity, Refusal] = {}
    for one in identities:
        hint = ENROL_HINT.format(one.node)
        if one.node not in counting:
            refused[one] = unauthenticated(f"node {one.node!r} no longer exists", hint)
        elif one.generation != counting[one.node]:
            message = (
                f"this certificate of node {one.node!r} was revoked: the node was deleted, disowned or enrolled again"
            )
            refused[one] = unauthenticated(message, hint)
    return refused
