"""The agent's gRPC server: the control plane reads logs from it and may bind, evict and take snapshots.

Mutual TLS admits the control plane only: the client certificate must be signed by the node CA and must name the control
plane. Certificates of other nodes are refused. Each new connection gets the agent's newest certificate.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import grpc
import structlog

from bursar.agent.control.codec import NO_LOAD, load_message, read_directive, status_message
from bursar.agent.control.identity import EVERYWHERE, AgentIdentity
from bursar.agent.host import logs
from bursar.agent.host.probe import Load
from bursar.agent.machine.types import ENDED, Directive, Place, PlacementStatus, Run, Stop
from bursar.core.values.certificate import is_control_plane
from bursar.wire.scheduler.v1 import node_agent_pb2 as pb
from bursar.wire.scheduler.v1.node_agent_pb2_grpc import NodeAgentServicer, add_NodeAgentServicer_to_server

log = structlog.get_logger()

STOP_SECONDS = 1.0
OPTIONS = (
    ("grpc.so_reuseport", 0),
    # Clients that follow a log send keepalive pings.
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    # Commands on this machine can connect too: without bounds they could take all descriptors of the agent.
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_allowed_incoming_connections", 256),
)


class AgentServerError(Exception):
    """The server cannot start; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The node's capacity, load and placements at this moment."""

    capacity: Mapping[str, str] = field(default_factory=dict)
    load: Load = NO_LOAD
    statuses: Sequence[PlacementStatus] = ()
    cgroups: str = ""


class Host(Protocol):
    """The node that the server answers for."""

    @property
    def name(self) -> str: ...

    def tell(self, directive: Directive) -> None: ...

    def snapshot(self) -> Snapshot: ...

    def log(self, place: Place) -> tuple[Path, Callable[[], bool]] | None:
        """The directory of a placement's output, and whether it has ended; None if no output is kept. Epoch 0 means the
        newest epoch."""


# Serving.


@asynccontextmanager
async def opened_app(host: Host, listen: str, *, identity: Callable[[], AgentIdentity] | None) -> AsyncIterator[int]:
    """Serve while the block runs; yields the port. Without an identity it serves plaintext, on loopback only."""
    server = grpc.aio.server(options=OPTIONS)
    add_NodeAgentServicer_to_server(AgentServer(host, secure=identity is not None), server)
    try:
        if identity is None:
            port = server.add_insecure_port(listen)
        else:
            port = server.add_secure_port(listen, _credentials(identity))
    except RuntimeError:
        raise AgentServerError(
            f"cannot listen on {listen}: the address is in use, or not one of this machine's;"
            " choose another with --listen HOST:PORT"
        ) from None
    await server.start()
    try:
        yield port
    finally:
        await server.stop(STOP_SECONDS)


def _credentials(identity: Callable[[], AgentIdentity]) -> grpc.ServerCredentials:
    shown: list[bytes] = []

    def newest() -> Any:
        """Called by gRPC at each connection, in its own thread; None means no change."""
        current = identity()
        if shown == [current.certificate]:
            return None
        shown[:] = [current.certificate]
        return grpc.ssl_server_certificate_configuration([(current.key, current.certificate)], current.authority)

    return grpc.dynamic_ssl_server_credentials(newest(), newest, require_client_authentication=True)


def advertised(listen: str, port: int, *, advertise: str, server: str) -> str:
    """The address that the control plane dials: `advertise` if given, else the listen address. For a wildcard it is the
    local address of the route to the control plane."""
    if advertise:
        return advertise if advertise.rpartition("]")[2].count(":") == 1 else f"{advertise}:{port}"
    host = listen.rpartition(":")[0].strip("[]")
    if host in EVERYWHERE:
        host = _own_address(server) or socket.gethostname()
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _own_address(server: str) -> str:
    """The local address of the route to a server. Connecting a UDP socket sends nothing."""
    host, _, port = server.rpartition(":")
    try:
        family, _, _, _, target = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except (OSError, ValueError):
        return ""


# Calls.


class AgentServer(NodeAgentServicer):
    """The calls of `NodeAgent` that an agent serves; callers other than the control plane are refused."""

    def __init__(self, host: Host, *, secure: bool) -> None:
        self._host = host
        self._secure = secure

    async def _admit(self, context: Any, node: str) -> None:
        if self._secure:
            names = context.auth_context().get("x509_subject_alternative_name", ())
            if not is_control_plane([name.decode(errors="replace") for name in names]):
                await context.abort(grpc.StatusCode.PERMISSION_DENIED, "only the control plane may ask this of a node")
        if node and node != self._host.name:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"this is node {self._host.name!r}, and not {node!r}")

    async def Heartbeat(self, request_iterator: Any, context: Any) -> AsyncIterator[pb.HeartbeatResponse]:  # noqa: N802
        del request_iterator
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "agents serve no heartbeats: send them to the control plane")
        yield pb.HeartbeatResponse()  # makes this an async generator

    async def PrepareAllocation(self, request: pb.PrepareRequest, context: Any) -> pb.PrepareResponse:  # noqa: N802
        del request
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "agents do not serve this: call the control plane")
        return pb.PrepareResponse()

    async def BindAllocation(self, request: pb.BindRequest, context: Any) -> pb.BindResponse:  # noqa: N802
        await self._admit(context, request.node_id)
        run = read_directive(request.directive)
        if not isinstance(run, Run) or run.uid != request.allocation_id:
            return pb.BindResponse(
                failure_reason="Invalid", error_message="`directive` must be of type RUN, for this allocation"
            )
        self._host.tell(run)
        status = self._status(run.place)
        if status is None:
            return pb.BindResponse(failure_reason="Stale", error_message="this node has seen a newer epoch")
        if status.state in ENDED:
            return pb.BindResponse(failure_reason="Ended", error_message=f"it has ended here: {status.state}")
        return pb.BindResponse(success=True)

    async def EvictAllocation(self, request: pb.EvictRequest, context: Any) -> pb.EvictResponse:  # noqa: N802
        await self._admit(context, request.node_id)
        known = [one for one in self._host.snapshot().statuses if one.uid == request.allocation_id]
        meant = [one.place for one in known if request.epoch in (0, one.epoch)]
        if not meant:
            return pb.EvictResponse(failure_reason="NotFound", error_message="no such placement is here")
        self._host.tell(Stop(*max(meant), max(0, request.grace_period_seconds), request.reason))
        return pb.EvictResponse(success=True)

    async def GetResourceSnapshot(self, request: pb.SnapshotRequest, context: Any) -> pb.ResourceSnapshot:  # noqa: N802
        await self._admit(context, request.node_id)
        now = self._host.snapshot()
        return pb.ResourceSnapshot(
            node_id=self._host.name,
            timestamp=time.time_ns() // 1_000_000,
            capacity=now.capacity,
            usage=load_message(now.load),
            pod_statuses=[status_message(one) for one in now.statuses],
            cgroups=now.cgroups,
        )

    async def ReadLog(self, request: pb.ReadLogRequest, context: Any) -> AsyncIterator[pb.ReadLogResponse]:  # noqa: N802
        await self._admit(context, "")
        found = self._host.log((request.allocation_id, request.epoch))
        if found is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "this node keeps no output of it")
            return
        folder, ended = found
        over, at = ended(), max(0, request.offset)
        if request.follow and not over and await asyncio.to_thread(logs.read_piece, folder, at, 1) is None:
            # Confirm at once that the log exists: the first output may be a long time coming.
            yield pb.ReadLogResponse(offset=at)
        async for piece in logs.read(
            folder, offset=at, tail_lines=max(0, request.tail_lines), follow=request.follow, ended=ended
        ):
            at = piece.offset + len(piece.data)
            yield pb.ReadLogResponse(data=piece.data, offset=piece.offset)
        # A follower has read to the end; another reader has only if the placement had ended before the read.
        yield pb.ReadLogResponse(offset=at, end=over or request.follow)

    def _status(self, place: Place) -> PlacementStatus | None:
        return next((one for one in self._host.snapshot().statuses if one.place == place), None)
