"""`PrepareAllocation`: the peers (rank, size, addresses) and the standard input that a command needs before its start.

An agent may ask only for placements on its own node. Members of a gang are placed together, so each can be given the
addresses of all others. They share a namespace, and therefore a tenant.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct

from bursar.core.objects.allocation import Peer
from bursar.core.objects.rank import meeting_port, rank_of
from bursar.core.values.address import host_of, is_address
from bursar.core.values.names import dns_subdomain
from bursar.core.values.refusal import Code, Refusal, invalid
from bursar.ops.runtime.runtime import Runtime
from bursar.rpc.identity import identity_of, other_node, revoked
from bursar.rpc.problem import STATUS
from bursar.store.db.database import Unavailable
from bursar.store.nodes import heartbeat as store
from bursar.store.nodes.heartbeat import Needed
from bursar.wire.scheduler.v1 import node_agent_pb2 as pb
from bursar.wire.scheduler.v1 import node_agent_pb2_grpc as pb_grpc

_AWAY = Refusal(Code.UNAVAILABLE, "the database is unreachable", "Try again.")


class PreparingService(pb_grpc.NodeAgentServicer):
    """The part of the service that serves PrepareAllocation."""

    _runtime: Runtime
    _insecure: bool

    async def PrepareAllocation(self, request: pb.PrepareRequest, context: Any) -> pb.PrepareResponse:  # noqa: N802
        answer = await self._prepare(request, context)
        if isinstance(answer, Refusal):
            await context.abort(STATUS[answer.code], answer.message)
            raise AssertionError("abort does not return")
        return answer

    async def _prepare(self, request: pb.PrepareRequest, context: Any) -> pb.PrepareResponse | Refusal:
        identity = identity_of(context, insecure=self._insecure)
        if isinstance(identity, Refusal):
            return identity
        if refusal := other_node(identity, request.node_id):
            return refusal
        node = request.node_id if identity is None else identity.node
        if faults := dns_subdomain(node):
            return invalid(f"node_id {faults[0]}")
        try:
            if refusal := await revoked(self._runtime.database, identity):
                return refusal
            return await prepared(self._runtime, node, request.allocation_id, request.epoch)
        except Unavailable:
            return _AWAY


async def prepared(runtime: Runtime, node: str, uid: str, epoch: int) -> pb.PrepareResponse | Refusal:
    """The peers and standard input of one placement on a node."""
    async with runtime.database.reader() as db:
        needed = await store.load_needed(db, node, uid)
        if needed is None or needed.epoch != epoch:
            return Refusal(Code.STALE, f"{uid} is not placed on node {node} in epoch {epoch}")
        peers = _peers(needed)
        addresses = await store.load_addresses(db, {one for peer in peers for one in peer.nodes}) if peers else {}
    answer = _together(needed, peers, addresses, node, uid)
    if _decode_document(needed.doc).spec.stdin:
        answer.wait, answer.stdin = needed.stdin is None, needed.stdin or b""
    return answer


class _Placed(Struct):
    name: str


class _Status(Struct):
    nodes: list[_Placed] = []


class _Spec(Struct):
    stdin: bool = False


class _Document(Struct):
    spec: _Spec


_decode_status = msgspec.json.Decoder(_Status).decode
_decode_document = msgspec.json.Decoder(_Document).decode


def _peers(needed: Needed) -> tuple[Peer, ...]:
    """The members of its gang; else itself if it runs on several nodes; else none."""
    if rank_of(needed.peers, needed.key.name) is not None:
        return needed.peers
    nodes = tuple(one.name for one in _decode_status(needed.status).nodes)
    return (Peer(needed.key.name, -1, nodes),) if len(nodes) > 1 else ()


def _together(
    needed: Needed, peers: tuple[Peer, ...], addresses: Mapping[str, str], node: str, uid: str
) -> pb.PrepareResponse:
    if not peers:
        return pb.PrepareResponse()
    own = next(one for one in peers if one.name == needed.key.name)
    first = (rank_of(peers, own.name) or 0) + (own.nodes.index(node) if node in own.nodes else 0)
    # Unique per attempt: the first member of a gang has a new name, multi-node work a new epoch.
    meeting = f"{needed.key.namespace}/{peers[0].name}" if len(peers) > 1 else f"{uid}/{needed.epoch}"
    return pb.PrepareResponse(
        peers=[
            pb.Peer(allocation=one.name, node=at, address=_host(addresses.get(at, "")) or at)
            for one in peers
            for at in one.nodes
        ],
        rank=first,
        port=meeting_port(meeting),
    )


def _host(address: str) -> str:
    """The host of an address; agents report HOST:PORT, administrators may omit the port."""
    return host_of(address) if is_address(address) else address
