"""Streams of heartbeats at the least cost for the sender: the needed part of gRPC over HTTP/2, directly on a socket.

The benchmark's agents share the machine with the server that they measure, and the client of the gRPC library costs as
much as the server. It sends the same bytes as the library; of the answers it reads frames but not headers.
"""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from typing import Any, cast

import grpc

from bursar.sim.transport import STREAMS_PER_CONNECTION
from bursar.wire.scheduler.v1 import node_agent_pb2 as pb

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
ACK, END_STREAM, END_HEADERS, PADDED = 0x1, 0x1, 0x4, 0x8
CANCEL = 8
INITIAL_WINDOW_SIZE = 4
WINDOW_BYTES = 1 << 30
WINDOW_BYTES_DEFAULT = 65_535
PATH = b"/scheduler.v1.NodeAgent/Heartbeat"

_HEAD = struct.Struct(">BHBBI")  # a frame's length in three bytes, its type, flags and stream
_PREFIX = struct.Struct(">BI")  # a message's: not compressed, and its length


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return _HEAD.pack(len(payload) >> 16, len(payload) & 0xFFFF, kind, flags, stream) + payload


def request_headers(authority: str) -> bytes:
    """The headers of a call as literals, without the dynamic table."""

    def literal(text: bytes) -> bytes:
        assert len(text) < 127, "longer ones have another form"
        return bytes([len(text)]) + text

    method_and_scheme = b"\x83\x86"  # POST, http
    path, host = b"\x04" + literal(PATH), b"\x01" + literal(authority.encode())
    content_type = b"\x0f\x10" + literal(b"application/grpc")
    return method_and_scheme + path + host + content_type + b"\x00" + literal(b"te") + literal(b"trailers")


class _Connection(asyncio.Protocol):
    def __init__(self) -> None:
        self.calls: dict[int, RawCall] = {}
        self._next_stream = 1
        self._buffer = b""
        self._unsaid_bytes = 0  # received, and not given back to the window yet
        self._unsent: list[bytes] = []
        self._loop = asyncio.get_running_loop()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        settings = frame(SETTINGS, 0, 0, struct.pack(">HI", INITIAL_WINDOW_SIZE, WINDOW_BYTES))
        wider = frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", WINDOW_BYTES - WINDOW_BYTES_DEFAULT))
        self.transport.write(PREFACE + settings + wider)

    def send(self, frame: bytes) -> None:
        """Send everything from one iteration of the loop together."""
        if not self._unsent:
            self._loop.call_soon(self._flush)
        self._unsent.append(frame)

    def _flush(self) -> None:
        frames, self._unsent = self._unsent, []
        if not self.transport.is_closing():
            self.transport.write(b"".join(frames))

    def open(self, headers: bytes) -> RawCall:
        number, self._next_stream = self._next_stream, self._next_stream + 2
        call = self.calls[number] = RawCall(self, number)
        self.send(frame(HEADERS, END_HEADERS, number, headers))
        return call

    def data_received(self, data: bytes) -> None:
        buffer, at = self._buffer + data if self._buffer else data, 0
        while len(buffer) - at >= 9:
            high, low, kind, flags, stream = _HEAD.unpack_from(buffer, at)
            end = at + 9 + (high << 16 | low)
            if len(buffer) < end:
                break
            self._take(kind, flags, stream & 0x7FFFFFFF, buffer[at + 9 : end])
            at = end
        self._buffer = buffer[at:]

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        call = self.calls.get(stream)
        if kind == DATA:
            self._unsaid_bytes += len(payload)
            if self._unsaid_bytes > WINDOW_BYTES >> 1:
                self.send(frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", self._unsaid_bytes)))
                self._unsaid_bytes = 0
            if call is not None:
                call.receive(payload[1 : len(payload) - payload[0]] if flags & PADDED else payload)
        elif kind == SETTINGS and not flags & ACK:
            self.send(frame(SETTINGS, ACK, 0, b""))
        elif kind == PING and not flags & ACK:
            self.send(frame(PING, ACK, 0, payload))
        elif kind == GOAWAY:
            self.connection_lost(None)
        if call is not None and (kind == RST_STREAM or (kind in (DATA, HEADERS) and flags & END_STREAM)):
            call.end("the server ended the stream")

    def connection_lost(self, error: Exception | None) -> None:
        for call in list(self.calls.values()):
            call.end(str(error or "the connection was lost"))


class RawCall:
    """One stream: like a call of the library, as far as simulated agents use it."""

    __slots__ = ("_buffer", "_connection", "_ended", "_messages", "_number", "_reader")

    def __init__(self, connection: _Connection, number: int) -> None:
        self._connection = connection
        self._number = number
        self._buffer = b""
        self._messages: deque[pb.HeartbeatResponse] = deque()
        self._reader: asyncio.Future[None] | None = None
        self._ended = ""

    async def write(self, request: pb.HeartbeatRequest) -> None:
        if not self._ended:
            message = request.SerializeToString()
            data = _PREFIX.pack(0, len(message)) + message
            self._connection.send(frame(DATA, 0, self._number, data))

    async def read(self) -> Any:
        while not self._messages:
            if self._ended:
                nothing = grpc.aio.Metadata()
                raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing, self._ended)
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        return self._messages.popleft()

    def cancel(self) -> bool:
        if self._ended:
            return False
        self.end("cancelled")
        self._connection.send(frame(RST_STREAM, 0, self._number, struct.pack(">I", CANCEL)))
        return True

    def receive(self, data: bytes) -> None:
        buffer, at = self._buffer + data if self._buffer else data, 0
        while len(buffer) - at >= 5:
            _, length = _PREFIX.unpack_from(buffer, at)
            if len(buffer) < at + 5 + length:
                break
            self._messages.append(pb.HeartbeatResponse.FromString(buffer[at + 5 : at + 5 + length]))
            at += 5 + length
        self._buffer = buffer[at:]
        self._wake()

    def end(self, why: str) -> None:
        self._ended = self._ended or why
        self._connection.calls.pop(self._number, None)
        self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


class RawLine:
    """A channel without TLS, for agents with trusted names, with so many streams per connection."""

    def __init__(self, address: str, streams_per_connection: int = STREAMS_PER_CONNECTION) -> None:
        self._host, _, port = address.rpartition(":")
        self._port = int(port)
        self._headers = request_headers(address)
        self._streams_per_connection = streams_per_connection
        self._connections: list[_Connection] = []
        self._opening = asyncio.Lock()

    async def dial(self, _: str) -> RawCall:
        async with self._opening:
            return (await self._connection()).open(self._headers)

    async def _connection(self) -> _Connection:
        self._connections = [one for one in self._connections if not one.transport.is_closing()]
        if self._connections and len(self._connections[-1].calls) < self._streams_per_connection:
            return self._connections[-1]
        try:
            _, made = await asyncio.get_running_loop().create_connection(_Connection, self._host, self._port)
        except OSError as error:
            nothing = grpc.aio.Metadata()
            raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing, str(error)) from error
        self._connections.append(made)
        return made

    async def close(self) -> None:
        for one in self._connections:
            one.transport.close()
