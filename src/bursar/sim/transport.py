"""gRPC transports of simulated agents: plaintext on loopback, or mutual TLS.

Plaintext streams share connections, because heartbeats name their node. With TLS the certificate names the node, so
each agent has its own connection.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Protocol

import grpc

from bursar.wire.scheduler.v1.node_agent_pb2_grpc import NodeAgentStub

if TYPE_CHECKING:
    from bursar.wire.scheduler.v1 import node_agent_pb2 as pb
    from bursar.wire.scheduler.v1.node_agent_pb2_grpc import NodeAgentAsyncStub

STREAMS_PER_CONNECTION = 100
# No sharing of connections between channels, and fast reconnects after a restart of the server.
OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 5000),
    ("grpc.keepalive_time_ms", 60_000),
)


class RpcCall(Protocol):
    """One heartbeat stream. `read` raises AioRpcError if it broke, and returns grpc.aio.EOF at its end."""

    async def write(self, request: pb.HeartbeatRequest, /) -> None: ...
    async def read(self) -> Any: ...
    def cancel(self) -> bool: ...


class Transport(Protocol):
    async def dial(self, name: str, /) -> RpcCall:
        """Open a stream for the named node."""

    async def close(self) -> None: ...


class PlainTransport:
    """Plaintext, for loopback only: the server trusts the node name."""

    def __init__(self, address: str, streams_per_connection: int = STREAMS_PER_CONNECTION) -> None:
        self._address = address
        self._streams_per_connection = streams_per_connection
        self._channels: list[grpc.aio.Channel] = []
        self._stubs: dict[str, NodeAgentAsyncStub] = {}

    async def dial(self, name: str) -> RpcCall:
        """Open a stream on the node's channel, which reconnects by itself."""
        if name not in self._stubs:
            if len(self._stubs) % self._streams_per_connection == 0:
                self._channels.append(grpc.aio.insecure_channel(self._address, OPTIONS))
                self._latest = NodeAgentStub(self._channels[-1])
            self._stubs[name] = self._latest
        return self._stubs[name].Heartbeat()

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()


@dataclass(frozen=True, slots=True)
class SimCredentials:
    """The certificate and key of a node."""

    certificate: bytes
    authority: bytes
    renew_at: datetime
    key: bytes = field(repr=False)


class SecureTransport:
    """Mutual TLS, one connection per node. `enrol` returns credentials, and new ones when they are due."""

    def __init__(self, address: str, enrol: Callable[[str], Awaitable[SimCredentials]]) -> None:
        self._address = address
        self._enrol = enrol
        self._lines: dict[str, tuple[SimCredentials, grpc.aio.Channel]] = {}

    async def dial(self, name: str) -> RpcCall:
        known = self._lines.get(name)
        if known is not None and datetime.now(UTC) < known[0].renew_at:
            return NodeAgentStub(known[1]).Heartbeat()
        credentials = await self._enrol(name)
        if known is not None:
            await known[1].close()
        channel_credentials = grpc.ssl_channel_credentials(
            credentials.authority, credentials.key, credentials.certificate
        )
        channel = grpc.aio.secure_channel(self._address, channel_credentials, OPTIONS)
        self._lines[name] = credentials, channel
        return NodeAgentStub(channel).Heartbeat()

    async def close(self) -> None:
        for _, channel in self._lines.values():
            await channel.close()
