"""Connections: how many there are, how long a request may take to come, and how long an answer may wait to be read.

uvicorn bounds none of this. Each connection counts the bytes of the request that it is receiving, and is known once a
token on it was good; the gate counts those that are not known by their address, and looks at all of them every second
or two. So nothing is added to what an ordinary request costs but a few additions.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections import Counter, deque
from dataclasses import dataclass
from typing import Any, ClassVar

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from bursar.api.http import metrics
from bursar.api.http.problem import answer_of
from bursar.core.values.refusal import Code, Refusal

HEADER_BYTES_MAX = 65_536  # of the request line and all headers
HEADERS_MAX = 100
URL_BYTES_MAX = 16_384
# What may come of a body after its request was answered, or between two of its chunks.
UNREAD_BYTES_MAX = 16 << 20
# A reader that takes less than this in the time that it has does not read.
PROGRESS_BYTES_MIN = 4_096
CONNECTIONS_MAX = 20_000
CONNECTIONS_PER_ADDRESS_MAX = 512

_NO_TRAILERS: deque[tuple[bytes, bytes]] = deque(maxlen=0)  # takes everything, and keeps nothing
_PHRASES = {400: "Bad Request", 408: "Request Timeout", 414: "URI Too Long", 431: "Request Header Fields Too Large"}


@dataclass(frozen=True, slots=True)
class Bounds:
    """What an operator may want to set; the seconds are for tests."""

    connections: int = CONNECTIONS_MAX
    connections_per_address: int = CONNECTIONS_PER_ADDRESS_MAX
    header_seconds: float = 10.0
    unread_seconds: float = 30.0
    look_seconds: float = 2.0


class ConnectionGate:
    """All connections of a process, and those of them that have shown no token yet by address."""

    def __init__(self, bounds: Bounds | None = None) -> None:
        self.bounds = bounds or Bounds()
        self._open: set[HttpConnection] = set()
        self._unknown: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._open)

    def unknown(self, address: str) -> int:
        """How many connections of an address have shown no token."""
        return self._unknown[address]

    def enter(self, one: HttpConnection) -> str:
        """Let a connection in; else why not."""
        if len(self._open) >= self.bounds.connections:
            return "all"
        if self._unknown[one.address] >= self.bounds.connections_per_address:
            return "address"
        self._open.add(one)
        self._unknown[one.address] += 1
        metrics.CONNECTIONS.set(len(self._open))
        return ""

    def know(self, one: HttpConnection) -> None:
        """A token on it was good: whose it is, is known, and what it may do is counted by other means."""
        if one.is_known or one not in self._open:
            return
        one.is_known = True
        self._forget(one.address)

    def leave(self, one: HttpConnection) -> None:
        if one not in self._open:
            return
        self._open.discard(one)
        if not one.is_known:
            self._forget(one.address)
        metrics.CONNECTIONS.set(len(self._open))

    def _forget(self, address: str) -> None:
        self._unknown[address] -= 1
        if not self._unknown[address]:
            del self._unknown[address]

    def look(self, now: float) -> None:
        """End the connections whose time is up."""
        for one in tuple(self._open):
            one.look(now)

    async def keep_looking(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self.bounds.look_seconds)
            self.look(loop.time())

    def protocol(self) -> type[HttpConnection]:
        """What uvicorn makes for each connection."""
        return type("GatedConnection", (HttpConnection,), {"gate": self})


class HttpConnection(HttpToolsProtocol):
    """One connection of HTTP/1.1. It is in the head of a request from the moment it opens, or from when the last
    request is complete, until all headers are there."""

    gate: ClassVar[ConnectionGate]

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.address = ""
        self.is_known = False
        self._is_refused = False
        self._in_head = True
        self._head_bytes = 0
        self._head_since = 0.0  # when the request began to come; 0 while none does
        self._body_since = 0.0
        self._unread_bytes = 0
        self._unsent_bytes = 0
        self._unsent_since = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.address = address_of(self.client)
        self._head_since = self.loop.time()
        # Each request's scope has a copy of this.
        self.app_state = {"connection": self}
        if bound := self.gate.enter(self):
            metrics.CONNECTIONS_REFUSED.labels(bound).inc()
            self._is_refused = True
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.gate.leave(self)
        self.app_state = {}
        super().connection_lost(exc)

    def know(self) -> None:
        self.gate.know(self)

    # What comes in.

    def data_received(self, data: bytes) -> None:
        # A closing connection consumes no more bytes, so the loop must end here or it would never end.
        while not self._is_refused and not self.transport.is_closing():
            if not self._in_head:
                self._unread_bytes += len(data)
                if self._unread_bytes > UNREAD_BYTES_MAX:
                    self._end("body")
                    return
                super().data_received(data)
                return
            if not self._head_since:
                self._head_since = self.loop.time()
            capacity = HEADER_BYTES_MAX - self._head_bytes
            if len(data) <= capacity:
                self._head_bytes += len(data)
                super().data_received(data)
                return
            # Only as much as may belong to the head is parsed before it is known whether it ends there.
            self._head_bytes = HEADER_BYTES_MAX
            super().data_received(data[:capacity])
            if self._in_head and self._head_bytes >= HEADER_BYTES_MAX and not self.transport.is_closing():
                self._refuse("headers", _headers_too_large())
            data = data[capacity:]

    def on_headers_complete(self) -> None:
        if len(self.url) > URL_BYTES_MAX:
            self._refuse("url", _url_too_long())
            return
        if len(self.headers) > HEADERS_MAX:
            self._refuse("headers", _headers_too_large())
            return
        self._in_head = False
        self._unread_bytes = 0
        self._body_since = self.loop.time()
        super().on_headers_complete()
        # What comes after a body in chunks is no header: it would be taken for one of this request.
        self.headers = _NO_TRAILERS  # type: ignore[assignment]

    def on_body(self, body: bytes) -> None:
        if not self._is_refused:
            super().on_body(body)

    def on_chunk_header(self) -> None:
        """Between chunks there is little; what is unread of an answered request still counts as a whole."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._unread_bytes = 0

    def on_message_complete(self) -> None:
        if self._is_refused:
            return
        self._in_head = True
        self._head_bytes = 0
        self._head_since = 0.0
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 — uvicorn's signature
        """Refuse bytes that the parser does not accept as HTTP, in the same form as every other refusal."""
        self._refuse("malformed", Refusal(Code.INVALID, "this is not a valid HTTP/1.1 request", "Check the client."))

    def _refuse(self, bound: str, refusal: Refusal) -> None:
        """Answer what is not even a request, and hear no more of it."""
        metrics.CONNECTIONS_REFUSED.labels(bound).inc()
        self._is_refused = True
        if self.cycle is None or self.cycle.response_complete:
            answer = answer_of(refusal, "")
            self.transport.write(
                b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
                b"x-content-type-options: nosniff\r\nconnection: close\r\n\r\n%s"
                % (answer.status, _PHRASES[answer.status].encode(), len(answer.body), answer.body)
            )
        self.transport.close()

    def _end(self, bound: str) -> None:
        metrics.CONNECTIONS_REFUSED.labels(bound).inc()
        self._is_refused = True
        self.transport.abort()

    # What does not go on.

    def look(self, now: float) -> None:
        """End it if a head does not get complete, a body goes on after its answer, or nobody reads what was sent."""
        bounds = self.gate.bounds
        if not self._is_refused:
            if self._in_head and self._head_since and now - self._head_since > bounds.header_seconds:
                self._refuse("slow_headers", _too_slow(bounds.header_seconds))
            is_answered = not self._in_head and self.cycle is not None and self.cycle.response_complete
            if is_answered and now - self._body_since > bounds.unread_seconds + bounds.header_seconds:
                self._end("slow_body")
        self._look_at_unsent(now, bounds.unread_seconds)

    def _look_at_unsent(self, now: float, seconds: float) -> None:
        unsent = self.transport.get_write_buffer_size()
        if not unsent:
            self._unsent_bytes, self._unsent_since = 0, 0.0
            return
        progress = abs(self._unsent_bytes - unsent) >= PROGRESS_BYTES_MIN
        if not self._unsent_since or progress:
            self._unsent_bytes, self._unsent_since = unsent, now
        elif now - self._unsent_since > seconds:
            self._end("unread")


def address_of(client: tuple[str, int] | None) -> str:
    """What connections are counted by: an IPv4 address, or the network of an IPv6 address, which has 2^64 of them."""
    host = client[0] if client else ""
    if ":" not in host:
        return host
    try:
        address = ipaddress.IPv6Address(host.partition("%")[0])
    except ValueError:
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(address) >> 64 << 64, 64)))


def _headers_too_large() -> Refusal:
    return Refusal(
        Code.HEADERS_TOO_LARGE,
        f"a request may have {HEADERS_MAX} headers, and {HEADER_BYTES_MAX} bytes of them with its first line",
        "Send fewer or shorter headers.",
    )


def _url_too_long() -> Refusal:
    return Refusal(Code.URL_TOO_LONG, f"the URL is longer than {URL_BYTES_MAX} bytes", "Ask for less at once.")


def _too_slow(seconds: float) -> Refusal:
    return Refusal(Code.TIMEOUT, f"the headers did not come within {seconds:g} seconds", "Send the request at once.")
