"""What an answer grants, proven: the token of its leases, and the keys by which the agent believes it."""

from __future__ import annotations

from bursar.ops.nodes.signing import Granted
from bursar.ops.runtime.runtime import Runtime
from bursar.rpc.hub import AgentStream
from bursar.store.db.database import AWAY
from bursar.wire.scheduler.v1 import node_agent_pb2 as pb


async def sign(runtime: Runtime, stream: AgentStream, answer: pb.HeartbeatResponse) -> None:
    """Agents believe what is signed, with the keys that their stream was told. What only ends work needs no proof."""
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
        return  # It has what it was granted before.
    if ring.ids != stream.keys_told:
        keys = ring.public_keys().items()
        answer.signing_keys.extend(pb.SigningKey(id=key_id, public_key=raw) for key_id, raw in keys)
        stream.keys_told = ring.ids
    answer.lease_token = ring.sign(stream.node, stream.nonce, answer.seq, granted)
