"""A gRPC server on a real runtime, and nodes that exchange messages with it as their agents do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import asyncpg
import grpc

from bursar.api.serve import opened_context
from bursar.core.nodes.eviction import Notice
from bursar.core.objects.object import Key
from bursar.core.values.refusal import Refusal
from bursar.ops.lifecycle.bootstrap import bootstrap
from bursar.ops.nodes.x509 import OUR_LIFE
from bursar.ops.objects import object as object_ops
from bursar.ops.runtime.feed import Feed
from bursar.ops.runtime.runtime import Runtime
from bursar.ops.scheduling import placement as placement_ops
from bursar.rpc.serve import opened_grpc
from bursar.wire.scheduler.v1 import node_agent_pb2 as pb
from bursar.wire.scheduler.v1 import node_agent_pb2_grpc as pb_grpc
from bursar.wire.shared.document import decode
from support.runtime.runtime import TEST, allocation, bind, document, node

RUN, STOP = pb.DIRECTIVE_TYPE_RUN, pb.DIRECTIVE_TYPE_STOP
SECONDS_MAX = 20


@dataclass(slots=True)
class Served:
    """An API process that serves agents."""

    runtime: Runtime
    feed: Feed
    port: int
    channels: list[grpc.aio.Channel] = field(default_factory=list)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def agent(self, node: str, credentials: grpc.ChannelCredentials | None = None) -> Agent:
        """A node's agent with a connection of its own."""
        if credentials is None:
            channel = grpc.aio.insecure_channel(self.address, options=(("grpc.use_local_subchannel_pool", 1),))
        else:
            channel = grpc.aio.secure_channel(self.address, credentials)
        self.channels.append(channel)
        return Agent(pb_grpc.NodeAgentStub(channel), node)


@asynccontextmanager
async def opened_app(database_url: str, *, insecure: bool = True, life: timedelta = OUR_LIFE) -> AsyncIterator[Served]:
    async with opened_context(database_url) as context:
        await bootstrap(context.runtime)
        async with opened_grpc(context.runtime, context.feed, "127.0.0.1:0", insecure=insecure, life=life) as port:
            app = Served(context.runtime, context.feed, port)
            try:
                yield app
            finally:
                await asyncio.gather(*(one.close() for one in app.channels))


class Agent:
    """One node's side of one stream."""

    def __init__(self, stub: pb_grpc.NodeAgentAsyncStub, node: str) -> None:
        self.stub = stub
        self.node = node
        self.call: Any = stub.Heartbeat()
        self.seq = 0
        self.pushed: list[pb.SchedulingDirective] = []

    async def send(self, *statuses: pb.PodStatus, **said: Any) -> int:
        self.seq += 1
        heartbeat = {"node_id": self.node, "seq": self.seq, "protocol_version": 1, **said}
        await self.call.write(pb.HeartbeatRequest(pod_statuses=statuses, **heartbeat))
        return self.seq

    async def heartbeat(self, *statuses: pb.PodStatus, **said: Any) -> pb.HeartbeatResponse:
        """Send a heartbeat, and wait for its answer; directives pushed meanwhile are kept."""
        return await self.answer(await self.send(*statuses, **said))

    async def answer(self, seq: int) -> pb.HeartbeatResponse:
        while True:
            response = await self.read()
            if response.seq == seq:
                return response
            self.pushed.extend(response.directives)

    async def directive(self) -> pb.SchedulingDirective:
        """The next one that is pushed."""
        while not self.pushed:
            response = await self.read()
            assert response.seq == 0, response
            self.pushed.extend(response.directives)
        return self.pushed.pop(0)

    async def read(self) -> pb.HeartbeatResponse:
        async with asyncio.timeout(SECONDS_MAX):
            response = await self.call.read()
        assert isinstance(response, pb.HeartbeatResponse), await self.refused()
        return response

    async def refused(self) -> tuple[grpc.StatusCode, str]:
        """How the stream ended."""
        async with asyncio.timeout(SECONDS_MAX):
            return await self.call.code(), await self.call.details()

    async def refusal_of(self, **said: Any) -> tuple[grpc.StatusCode, str]:
        """The status with which the stream ends after a heartbeat that it refuses."""
        try:
            await self.send(**said)
            async with asyncio.timeout(SECONDS_MAX):
                while isinstance(await self.call.read(), pb.HeartbeatResponse):
                    pass
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass
        return await self.refused()


# Short words for what tests do.


async def placed(runtime: Runtime, name: str, *nodes: str, spec: Any = None, **requests: Any) -> str:
    """A new allocation that is placed there; its uid."""
    await allocation(runtime, "default", name, spec=spec, **(requests or {"cpu": 1}))
    return str(document(await bind(runtime, "default", name, *nodes))["metadata"]["uid"])


async def evict(runtime: Runtime, name: str, grace_seconds: int = 30) -> None:
    stored = await object_ops.get(runtime, Key("Allocation", "default", name))
    notice = Notice("Preempted", "Admin", "user:test", "make room", grace_seconds)
    document(await placement_ops.evict(runtime, stored, notice, TEST))  # type: ignore[arg-type]


async def shown(runtime: Runtime, name: str, space: str = "default") -> Any:
    stored = await object_ops.get(runtime, Key("Allocation", space, name))
    return None if isinstance(stored, Refusal) else decode(stored.doc, stored.status, stored.revision)


async def joined(app: Served, name: str = "n1") -> Agent:
    """A node's agent whose stream is open."""
    if isinstance(await object_ops.get(app.runtime, Key("Node", "", name)), Refusal):
        await node(app.runtime, name, cpu=64)
    agent = app.agent(name)
    await agent.heartbeat(inventory=True)
    return agent


async def node_shown(runtime: Runtime, name: str = "n1") -> Any:
    stored = await object_ops.get(runtime, Key("Node", "", name))
    assert not isinstance(stored, Refusal)
    return decode(stored.doc, stored.status, stored.revision)


def status(uid: str, phase: Any, epoch: int = 1, **said: Any) -> pb.PodStatus:
    return pb.PodStatus(allocation_id=uid, epoch=epoch, phase=phase, **said)


def running(uid: str, epoch: int = 1, **said: Any) -> pb.PodStatus:
    return status(uid, pb.POD_PHASE_RUNNING, epoch, **said)


def ended(uid: str, epoch: int = 1, **said: Any) -> pb.PodStatus:
    return status(uid, pb.POD_PHASE_SUCCEEDED, epoch, **{"exit_code": 0, **said})


def stopped(uid: str, epoch: int = 1, **said: Any) -> pb.PodStatus:
    return status(uid, pb.POD_PHASE_STOPPED, epoch, **said)


def acknowledged(answer: pb.HeartbeatResponse) -> list[tuple[str, int]]:
    return [(one.allocation_id, one.epoch) for one in answer.acknowledgements]


def orders(directives: Any) -> list[tuple[int, str, int]]:
    return sorted((one.type, one.allocation_id, one.epoch) for one in directives)


class Outage:
    """Block new connections to a database and terminate the present ones, until the block ends."""

    def __init__(self, admin_url: str, database_url: str) -> None:
        self._admin_url = admin_url
        self._name = database_url.rpartition("@/")[2].partition("?")[0]

    async def __aenter__(self) -> None:
        await self._execute(f"ALTER DATABASE {self._name} CONNECTION LIMIT 0")
        await self._execute(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{self._name}'")

    async def __aexit__(self, *_: object) -> None:
        await self._execute(f"ALTER DATABASE {self._name} CONNECTION LIMIT -1")

    async def _execute(self, statement: str) -> None:
        db = await asyncpg.connect(self._admin_url)
        try:
            await db.execute(statement)
        finally:
            await db.close()
