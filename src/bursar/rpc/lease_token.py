"""Signs the grants of an answer: the lease token, and the public keys that verify it."""

from __future__ import annotations

from bursar.ops.nodes.signing import Granted
from bursar.ops.runtime.runtime import Runtime
from bursar.rpc.hub import AgentStream
from bursar.store.db.database import AWAY
from bursar.wire.scheduler.v1 import node_agent_pb2 as pb


async def sign(runtime: Runtime, stream: AgentStream, answer: pb.HeartbeatResponse) -> None:
    """Add the token, and the keys if they changed. Grants of zero seconds only end work and need no signature."""
    granted = [
        Granted(one.lease, one.allocation_id, one.epoch, one.seconds, one.rate_per_sec, one.expires_at, one.final)
        for one in answer.leases
        if one.seconds
    ]
    if not granted:
        return
    try:
        ring = await runtime.signing.ring()
    except AWAY:
        return  # earlier grants stay valid
    if ring.ids != stream.keys_told:
        keys = ring.public_keys().items()
        answer.signing_keys.extend(pb.SigningKey(id=key_id, public_key=raw) for key_id, raw in keys)
        stream.keys_told = ring.ids
    answer.lease_token = ring.sign(stream.node, stream.nonce, answer.seq, granted)
