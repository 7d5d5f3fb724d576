"""A gRPC client for the agents' own servers, with a bounded pool of channels; it reads logs.

Agents advertise their address in heartbeats. The address is not trusted: a host name is resolved here, the result is
checked like a literal address, and exactly that address is called. The server there must present the certificate of
that node. Idle channels are kept for reuse. Without certificates only agents on this machine are called.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import structlog

from bursar.core.values.address import at_number, host_of, is_callable, is_loopback, is_number, may_resolve_to
from bursar.core.values.refusal import Code, Refusal
from bursar.ops.workloads.log_source import LogCut, LogReading, LogSource, OutputPiece
from bursar.rpc.tls import Calling, calling, channel_options
from bursar.store.db.database import Database
from bursar.store.nodes import heartbeat as store
from bursar.wire.scheduler.v1 import node_agent_pb2 as pb
from bursar.wire.scheduler.v1.node_agent_pb2_grpc import NodeAgentStub

log = structlog.get_logger()

IDLE_MAX = 64
IN_USE_MAX = 4096
FIRST_SECONDS_MAX = 10.0
UNUSABLE = "its address is loopback, link-local, multicast or reserved"
OPTIONS = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # Reconnect soon to a node that was away for long.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)

Resolve = Callable[[str], Awaitable[Sequence[str]]]


async def resolved(host: str) -> Sequence[str]:
    """The IP addresses that a host name resolves to on this machine; none if it cannot be resolved."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return ()
    return [str(address[0]) for *_, address in found]


@dataclass(slots=True)
class AgentConnection:
    """A channel to one agent."""

    node: str
    address: str  # with a literal IP address, so that gRPC resolves nothing again
    channel: grpc.aio.Channel
    credentials: grpc.ChannelCredentials | None = None
    users: int = 0
    stub: Any = field(init=False)

    def __post_init__(self) -> None:
        self.stub = NodeAgentStub(self.channel)


class Agents:
    """The channel pool, by node."""

    def __init__(
        self,
        database: Database,
        *,
        insecure: bool = False,
        credentials: Calling | None = None,
        resolve: Resolve = resolved,
    ) -> None:
        self._database = database
        self._resolve = resolve
        self._insecure = insecure
        self._credentials = credentials
        self._credentials_lock = asyncio.Lock()
        self._lines: dict[str, AgentConnection] = {}  # least recently used first
        self._in_use = 0

    async def open(self, node: str, reading: LogReading) -> LogSource | Refusal | None:
        """Read an allocation's log on a node; None if the node keeps no output of it."""
        line = await self._take(node)
        if isinstance(line, Refusal):
            return line
        call = line.stub.ReadLog(
            pb.ReadLogRequest(
                allocation_id=reading.uid,
                epoch=reading.epoch,
                offset=reading.offset,
                tail_lines=reading.tail_lines,
                follow=reading.follow,
            )
        )
        try:
            # An agent answers at once with the offset, however long the first output takes.
            async with asyncio.timeout(FIRST_SECONDS_MAX):
                first = await call.read()
        except BaseException as error:
            call.cancel()
            await self.give_back(line)
            if isinstance(error, grpc.aio.AioRpcError) and error.code() is grpc.StatusCode.NOT_FOUND:
                return None
            if isinstance(error, grpc.aio.AioRpcError | TimeoutError):
                return _unreachable(line, error)
            raise
        if not isinstance(first, pb.ReadLogResponse):
            await self.give_back(line)
            return None
        return AgentOutput(self, line, call, first)

    async def close(self) -> None:
        lines, self._lines = list(self._lines.values()), {}
        await asyncio.gather(*(line.channel.close() for line in lines))

    # Channels.

    async def _take(self, node: str) -> AgentConnection | Refusal:
        async with self._database.reader() as db:
            address = await store.load_address(db, node)
        if refusal := self._no_way(node, address):
            return refusal
        if not is_number(address):
            found = await self._number(node, address)
            if isinstance(found, Refusal):
                return found
            address = found
        credentials = None if self._insecure else await self._channel_credentials()
        line = self._lines.pop(node, None)
        if line is not None and (line.address != address or line.credentials is not credentials):
            # The address or our certificate changed. Open calls keep the old channel.
            await self._drop(line)
            line = None
        if line is None:
            line = AgentConnection(node, address, _channel(node, address, credentials), credentials)
        self._lines[node] = line
        line.users += 1
        self._in_use += 1
        return line

    def _no_way(self, node: str, address: str) -> Refusal | None:
        if not address:
            return Refusal(
                Code.UNAVAILABLE, f"node {node} runs no agent, so logs are unavailable",
                "Logs are read from nodes that run `bursar agent`.",
            )  # fmt: skip
        if not is_callable(address) or (self._insecure and not is_loopback(address)):
            insecure = "without certificates only agents on this machine are called"
            return _not_called(node, address, insecure if self._insecure else UNUSABLE)
        if self._in_use >= IN_USE_MAX:
            return Refusal(Code.OVERLOADED, f"this server reads {IN_USE_MAX} logs already", "Try again later.",
                           retry_after_seconds=10)  # fmt: skip
        return None

    async def _number(self, node: str, address: str) -> str | Refusal:
        """The address with the IP address that its name resolves to now, if that may be called."""
        try:
            async with asyncio.timeout(FIRST_SECONDS_MAX):
                numbers = await self._resolve(host_of(address))
        except TimeoutError:
            numbers = ()
        if not numbers:
            return _not_called(node, address, "its host name cannot be resolved")
        allowed = [one for one in numbers if may_resolve_to(address, one)]
        if not allowed:
            return _not_called(node, f"{address} ({', '.join(numbers)})", UNUSABLE)
        return at_number(address, allowed[0])

    async def _channel_credentials(self) -> grpc.ChannelCredentials:
        async with self._credentials_lock:
            if self._credentials is None:
                self._credentials = await calling(self._database)
            return self._credentials.newest()

    async def give_back(self, line: AgentConnection) -> None:
        """Return a channel after a call."""
        line.users -= 1
        self._in_use -= 1
        if self._lines.get(line.node) is not line:
            await self._drop(line)
        idle = [one for one in self._lines.values() if not one.users]
        for one in idle[: max(0, len(idle) - IDLE_MAX)]:
            del self._lines[one.node]
            await self._drop(one)

    async def _drop(self, line: AgentConnection) -> None:
        if not line.users:
            await line.channel.close()


class AgentOutput:
    """One call of ReadLog that was accepted."""

    def __init__(self, agents: Agents, line: AgentConnection, call: Any, first: pb.ReadLogResponse) -> None:
        self._agents = agents
        self._line = line
        self._call = call
        self._first: pb.ReadLogResponse | None = first
        self._open = True
        self.offset = first.offset
        self.over = first.end and not first.data

    async def next(self) -> OutputPiece | None:
        while True:
            message = await self._read()
            if message is None or (message.end and not message.data):
                return None
            if message.data:
                return OutputPiece(message.data, message.offset)

    async def _read(self) -> pb.ReadLogResponse | None:
        if (first := self._first) is not None:
            self._first = None
            return first
        try:
            message = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise LogCut(_unreachable(self._line, error).message) from error
        return message if isinstance(message, pb.ReadLogResponse) else None

    async def close(self) -> None:
        if self._open:
            self._open = False
            self._call.cancel()
            await self._agents.give_back(self._line)


def _channel(node: str, address: str, credentials: grpc.ChannelCredentials | None) -> grpc.aio.Channel:
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=OPTIONS)
    return grpc.aio.secure_channel(address, credentials, options=(*OPTIONS, *channel_options(node)))


def _not_called(node: str, address: str, why: str) -> Refusal:
    log.warning(
        "agent_address_refused", message="the address that a node advertises is not called",
        node=node, address=address, error=why,
    )  # fmt: skip
    return Refusal(Code.UNAVAILABLE, f"the agent of node {node} cannot be called: {why}",
                   "See --advertise of `bursar agent`.", retry_after_seconds=5)  # fmt: skip


def _unreachable(line: AgentConnection, error: grpc.aio.AioRpcError | TimeoutError) -> Refusal:
    why = error.details() or error.code().name if isinstance(error, grpc.aio.AioRpcError) else "it does not answer"
    log.info("agent_unreachable", message="an agent does not answer", node=line.node, address=line.address, error=why)
    return Refusal(
        Code.UNAVAILABLE,
        f"the agent of node {line.node} does not answer",
        "The node may be offline; its logs can be read when it is back.",
        retry_after_seconds=2,
    )
