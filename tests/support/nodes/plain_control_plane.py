"""A control plane that a test plays, for agents that speak the real protocol without certificates."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from bursar.agent.machine.types import ENDED, Directive, Place, PlacementState
from bursar.wire.scheduler.v1 import node_agent_pb2 as pb
from support.nodes.directive_messages import directive_message, read_statuses


class Plane:
    """A control plane for agents without certificates: it wants what the test says, and remembers what it is told."""

    def __init__(self) -> None:
        self.wanted: dict[str, list[Directive]] = {}
        self.first: dict[str, list[pb.HeartbeatRequest]] = {}
        self.heartbeats: dict[str, list[int]] = {}
        self.states: dict[Place, PlacementState] = {}
        self.contexts: dict[str, Any] = {}
        self.refusal: tuple[grpc.StatusCode, str] | None = None
        self.beat_seconds = 1
        self.mute = False
        self._writing = asyncio.Lock()  # on a stream one word at a time

    async def heartbeat(self, request_iterator: Any, context: Any) -> None:
        async for heartbeat in request_iterator:
            if self.refusal is not None:
                await context.abort(*self.refusal)
            if heartbeat.seq == 1:
                self.first.setdefault(heartbeat.node_id, []).append(heartbeat)
                self.contexts[heartbeat.node_id] = context
            self.heartbeats.setdefault(heartbeat.node_id, []).append(heartbeat.seq)
            statuses = read_statuses(heartbeat.pod_statuses)
            self.states |= {one.place: one.state for one in statuses}
            if not self.mute:
                answer = self._answer(heartbeat, [one.place for one in statuses if one.state in ENDED])
                async with self._writing:
                    await context.write(answer)

    def _answer(self, heartbeat: pb.HeartbeatRequest, ended: list[Place]) -> pb.HeartbeatResponse:
        answer = pb.HeartbeatResponse(seq=heartbeat.seq, complete=heartbeat.inventory, beat_seconds=self.beat_seconds)
        answer.acknowledgements.extend(pb.Acknowledgement(allocation_id=uid, epoch=epoch) for uid, epoch in ended)
        if heartbeat.inventory:
            answer.directives.extend(directive_message(one) for one in self.wanted.get(heartbeat.node_id, ()))
        return answer

    async def push(self, node: str, *directives: Directive) -> None:
        message = pb.HeartbeatResponse(directives=[directive_message(one) for one in directives])
        async with self._writing:
            await self.contexts[node].write(message)


@asynccontextmanager
async def played(plane: Plane, port: int = 0) -> AsyncIterator[str]:
    server = grpc.aio.server()
    heartbeat = grpc.stream_stream_rpc_method_handler(
        plane.heartbeat,
        request_deserializer=pb.HeartbeatRequest.FromString,
        response_serializer=pb.HeartbeatResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("scheduler.v1.NodeAgent", {"Heartbeat": heartbeat}),)
    )
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)
