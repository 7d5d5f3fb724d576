"""A control plane for one test: it speaks the agents' protocol over real gRPC, and does as the test says."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc

from bursar.agent.control import identity as credentials
from bursar.agent.control.certificates import NoCredentials
from bursar.agent.control.identity import AgentIdentity
from bursar.agent.control.stream import ControlStream
from bursar.agent.daemon import Daemon
from bursar.agent.host.probe import Probe
from bursar.agent.machine.types import Directive, PlacementStatus
from bursar.core.values.certificate import NodeIdentity
from bursar.core.values.refusal import Refusal
from bursar.ops.nodes import x509
from bursar.ops.nodes.x509 import Authority, new_authority, read_request, sign_node
from bursar.wire.scheduler.v1 import node_agent_pb2 as pb
from bursar.wire.scheduler.v1.node_agent_pb2_grpc import NodeAgentServicer, add_NodeAgentServicer_to_server
from support.nodes.directive_messages import directive_message, read_statuses

NODE = "node-1"

if TYPE_CHECKING:
    Context = grpc.aio.ServicerContext[Any, Any]

    class Servicer: ...
else:
    Context = Any
    Servicer = NodeAgentServicer  # Only one of its calls is the control plane's.


@dataclass(slots=True)
class Control(Servicer):
    """Answers each heartbeat, unless `silent`; `wanted` is the wanted set in the first answer of a stream."""

    wanted: list[Directive] = field(default_factory=list)
    lease_seconds: int = 0
    beat_seconds: int = 1
    silent: bool = False
    refusal: tuple[grpc.StatusCode, str] | None = None
    authority: Authority | None = None
    acknowledges: bool = True
    heartbeats: list[pb.HeartbeatRequest] = field(default_factory=list)
    streams: int = 0
    address: str = ""
    callers: list[dict[str, list[bytes]]] = field(default_factory=list)
    calls: list[Context] = field(default_factory=list)
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def Heartbeat(self, request_iterator: AsyncIterator[pb.HeartbeatRequest], context: Context) -> None:  # noqa: N802
        self.streams += 1
        if self.refusal is not None:
            await context.abort(*self.refusal)
        self.calls.append(context)
        # Only while the call lasts may it be asked.
        self.callers.append({name: list(values) for name, values in context.auth_context().items()})
        async for heartbeat in request_iterator:
            self.heartbeats.append(heartbeat)
            async with self.changed:
                self.changed.notify_all()
            if not self.silent:
                await self.write(context, self.answer(heartbeat))

    def answer(self, heartbeat: pb.HeartbeatRequest) -> pb.HeartbeatResponse:
        ended = [pb.POD_PHASE_SUCCEEDED, pb.POD_PHASE_FAILED, pb.POD_PHASE_STOPPED]
        over = [one for one in heartbeat.pod_statuses if one.phase in ended and self.acknowledges]
        return pb.HeartbeatResponse(
            seq=heartbeat.seq,
            directives=[directive_message(one) for one in self.wanted] if heartbeat.inventory else [],
            complete=heartbeat.inventory,
            acknowledgements=[pb.Acknowledgement(allocation_id=one.allocation_id, epoch=one.epoch) for one in over],
            lease_duration_seconds=self.lease_seconds,
            beat_seconds=self.beat_seconds,
            certificate=self.signed(heartbeat.certificate_request, heartbeat.node_id)
            if heartbeat.certificate_request
            else b"",
        )

    def signed(self, request: bytes, node: str) -> bytes:
        assert self.authority is not None
        return node_certificate(self.authority, request, node)

    async def say(self, *directives: Directive) -> None:
        """Without being asked."""
        message = pb.HeartbeatResponse(directives=[directive_message(one) for one in directives])
        await self.write(self.calls[-1], message)

    async def write(self, call: Context, message: pb.HeartbeatResponse) -> None:
        """One after the other, as gRPC demands."""
        async with self.writing:
            await call.write(message)

    async def until(self, what: Any, seconds: float = 20.0) -> Any:
        """Wait for heartbeats that make it true."""
        async with asyncio.timeout(seconds), self.changed:
            while not (result := what(self)):
                await self.changed.wait()
            return result

    def statuses(self, uid: str) -> list[PlacementStatus]:
        said = [one for heartbeat in self.heartbeats for one in read_statuses(heartbeat.pod_statuses)]
        return [one for one in said if one.uid == uid]


@asynccontextmanager
async def serving(control: Control, address: str = "127.0.0.1:0") -> AsyncIterator[Control]:
    server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
    add_NodeAgentServicer_to_server(control, server)  # type: ignore[arg-type]
    host = address.rpartition(":")[0]
    if control.authority is None:
        port = server.add_insecure_port(address)
    else:
        port = server.add_secure_port(address, server_credentials(control.authority))
    control.address = f"{host}:{port}"
    await server.start()
    try:
        yield control
    finally:
        await server.stop(None)


@asynccontextmanager
async def living(home: Path, control: Control, *, probe: Probe | None = None) -> AsyncIterator[Daemon]:
    """A whole agent in this process, which speaks with this control plane."""
    daemon = Daemon(NODE, home / "work", probe or Probe(home, fake_gpus=2))
    await daemon.open()
    stream = ControlStream(NODE, NoCredentials([control.address]), daemon)
    tasks = [asyncio.create_task(stream.run()), asyncio.create_task(daemon.run(stream.poke))]
    try:
        yield daemon
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await daemon.close()


def server_credentials(authority: Authority, hosts: Sequence[str] = ("localhost", "127.0.0.1")) -> Any:
    pair = x509.sign_server(authority, hosts, datetime.now(UTC))
    return grpc.ssl_server_credentials([(pair.key, pair.certificate)], authority.pem, require_client_auth=True)


def authority() -> Authority:
    return new_authority("test", datetime.now(UTC))


def node_certificate(authority: Authority, request: bytes, node: str, *, now: datetime | None = None) -> bytes:
    key = read_request(request)
    assert not isinstance(key, Refusal), key
    issued = sign_node(authority, key, NodeIdentity(node, 1), now or datetime.now(UTC))
    return issued.certificate


def joined(
    directory: Path, authority: Authority, node: str, addresses: Sequence[str] = (), *, ago: timedelta = timedelta()
) -> AgentIdentity:
    """The papers of a node that joined so long ago, in the directory."""
    key = credentials.ensure_key(directory)
    request = credentials.certificate_request(key, node)
    pem = node_certificate(authority, request, node, now=datetime.now(UTC) - ago)
    made = credentials._identity(node, key, pem, authority.pem, addresses)
    credentials.save(directory, made)
    return made
