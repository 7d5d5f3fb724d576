"""Connection limits: their number, the time to receive a request, and the time until a response is read.

uvicorn bounds none of this. Each connection counts the bytes of the request that it is receiving, and is authenticated
by its first valid token. The gate counts unauthenticated connections by address, and scans all connections every second
or two. An ordinary request costs only a few additions more.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections import Counter, deque
from dataclasses import dataclass
from typing import Any, ClassVar

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from bursar.api.http import metrics
from bursar.api.http.problem import answer_of
from bursar.core.values.refusal import Code, Refusal

HEADER_BYTES_MAX = 65_536  # of the request line and all headers
HEADERS_MAX = 100
URL_BYTES_MAX = 16_384
# Body bytes accepted after the request was answered, or between two chunks.
UNREAD_BYTES_MAX = 16 << 20
# A client that takes less than this in its time limit counts as not reading.
PROGRESS_BYTES_MIN = 4_096
CONNECTIONS_MAX = 20_000
CONNECTIONS_PER_ADDRESS_MAX = 512
# Joining head and body costs less than a second write, unless the body is large.
JOINED_BYTES_MAX = 65_536

_CLOSE = (b"connection", b"close")
_NO_TRAILERS: deque[tuple[bytes, bytes]] = deque(maxlen=0)  # discards everything
# A direct reference, because `super()` costs more and this is called for each request.
_parse = HttpToolsProtocol.data_received
_begin = HttpToolsProtocol.on_headers_complete
_complete = HttpToolsProtocol.on_message_complete

_PHRASES = {400: "Bad Request", 408: "Request Timeout", 414: "URI Too Long", 431: "Request Header Fields Too Large"}


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits of connections; operators may set the counts, tests the seconds."""

    connections: int = CONNECTIONS_MAX
    connections_per_address: int = CONNECTIONS_PER_ADDRESS_MAX
    header_seconds: float = 10.0
    unread_seconds: float = 30.0
    look_seconds: float = 2.0


@dataclass(frozen=True, slots=True, eq=False)
class Handshake:
    """A connection whose TLS handshake is in progress. It counts as an unauthenticated one."""

    address: str
    since: float


class ConnectionGate:
    """All connections of a process, with counts of the unauthenticated ones by address."""

    def __init__(self, bounds: Bounds | None = None) -> None:
        self.bounds = bounds or Bounds()
        self._open: set[HttpConnection] = set()
        self._unknown: Counter[str] = Counter()
        self._handshakes: set[Handshake] = set()

    def __len__(self) -> int:
        return len(self._open)

    def unknown(self, address: str) -> int:
        """The number of unauthenticated connections of an address."""
        return self._unknown[address]

    def begin(self, one: Handshake) -> str:
        """Accept a connection for its TLS handshake; return the reason if it is refused."""
        if refused := self._refuses(one.address):
            return refused
        self._handshakes.add(one)
        self._unknown[one.address] += 1
        return ""

    def end(self, one: Handshake) -> None:
        """End a handshake: it is complete, has failed, or took too long."""
        if one in self._handshakes:
            self._handshakes.discard(one)
            self._forget(one.address)

    def enter(self, one: HttpConnection) -> str:
        """Accept a connection, over TLS in place of its handshake; return the reason if it is refused."""
        if one.handshake is not None:
            self.end(one.handshake)
        if refused := self._refuses(one.address):
            return refused
        self._open.add(one)
        self._unknown[one.address] += 1
        metrics.CONNECTIONS.set(len(self._open))
        return ""

    def _refuses(self, address: str) -> str:
        if len(self._open) + len(self._handshakes) >= self.bounds.connections:
            return "all"
        return "address" if self._unknown[address] >= self.bounds.connections_per_address else ""

    def know(self, one: HttpConnection) -> None:
        """Mark a connection as authenticated: its tenant's rate limit applies, no longer that of its address."""
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
        """Close the connections that exceed a time limit."""
        for one in tuple(self._open):
            one.look(now)

    async def keep_looking(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self.bounds.look_seconds)
            self.look(loop.time())

    def protocol(self) -> type[HttpConnection]:
        """The protocol class that uvicorn instantiates for each connection."""
        return type("GatedConnection", (HttpConnection,), {"gate": self})


class HttpConnection(HttpToolsProtocol):
    """One HTTP/1.1 connection. Receiving a head begins when the connection is accepted or the previous request is
    complete, and ends when all headers are there."""

    gate: ClassVar[ConnectionGate]

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.address = ""
        self.handshake: Handshake | None = None
        self.is_known = False
        self._is_refused = False
        self._in_head = True
        self._head_bytes = 0
        self._head_since = 0.0  # begin of receiving a request; 0: none
        self._body_since = 0.0  # since when a body continues after its answer; 0: it does not
        self._unread_bytes = 0
        self._unsent_bytes = 0
        self._unsent_since = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.address = address_of(self.client)
        self._head_since = self.handshake.since if self.handshake is not None else self.loop.time()
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

    # Receiving.

    def data_received(self, data: bytes) -> None:
        head_bytes = self._head_bytes + len(data)
        if not self._in_head or self._is_refused or head_bytes > HEADER_BYTES_MAX:
            self._receive_bounded(data)
            return
        # Most requests arrive in one piece and need no clock.
        self._head_bytes = head_bytes
        _parse(self, data)
        if self._head_bytes and not self._head_since and self._in_head:
            self._head_since = self.loop.time()

    def _receive_bounded(self, data: bytes) -> None:
        # A closing connection consumes no more bytes, so the loop must end here or it would never end.
        while data and not self.transport.is_closing():
            if self._is_refused or not self._in_head:
                self._unread_bytes += len(data)
                if self._unread_bytes > UNREAD_BYTES_MAX:
                    self._end("body")
                elif not self._is_refused:
                    _parse(self, data)
                return
            # Parse at most the maximum size of a head, until its end is found.
            capacity = HEADER_BYTES_MAX - self._head_bytes
            self._head_bytes = min(HEADER_BYTES_MAX, self._head_bytes + len(data))
            _parse(self, data[:capacity])
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
        self._body_since = 0.0
        _begin(self)
        # Data after a chunked body must not become headers of this request.
        self.headers = _NO_TRAILERS  # type: ignore[assignment]

    def on_body(self, body: bytes) -> None:
        if not self._is_refused:
            super().on_body(body)

    def on_chunk_header(self) -> None:
        """Reset the counter between chunks, except for an answered request, whose unread body counts as a whole."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._unread_bytes = 0

    def on_message_complete(self) -> None:
        if self._is_refused:
            return
        self._in_head = True
        self._head_bytes = 0
        self._head_since = 0.0
        _complete(self)

    # Answering.

    def answer(self, scope: object, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> bool:
        """Send a complete response in one write; return False, with nothing sent, if uvicorn has to send it.

        uvicorn writes head and body separately and matches two regular expressions per header, which is half of the
        work for a small response. Here one check of all lines proves that no header contains a line break.
        """
        cycle = self.cycle
        if cycle is None or cycle.scope is not scope or cycle.response_started or cycle.disconnected:
            return False  # only the last pipelined request is the connection's cycle
        if not cycle.keep_alive:
            headers = [*headers, _CLOSE]
        head = b"".join([STATUS_LINE[status], *[b"%s: %s\r\n" % header for header in headers], b"\r\n"])
        lines = len(headers) + 2
        if self.flow.write_paused or head.count(b"\n") != lines or head.count(b"\r") != lines or b"\0" in head:
            return False
        cycle.response_started = cycle.response_complete = True
        cycle.waiting_for_100_continue = False
        if len(body) <= JOINED_BYTES_MAX:
            self.transport.write(head + body)
        else:
            self.transport.writelines((head, body))
        cycle.message_event.set()
        if not cycle.keep_alive:
            self.transport.close()
        cycle.on_response()
        return True

    # Refusing.

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 — uvicorn's signature
        """Refuse bytes that the parser does not accept as HTTP, in the same form as every other refusal."""
        self._refuse("malformed", Refusal(Code.INVALID, "this is not a valid HTTP/1.1 request", "Check the client."))

    def _refuse(self, bound: str, refusal: Refusal) -> None:
        """Refuse bytes that are no request, after the previous request is answered, and stop parsing."""
        metrics.CONNECTIONS_REFUSED.labels(bound).inc()
        self._is_refused = True
        self._unread_bytes = 0
        cycle = self.cycle
        is_answered = cycle is None or cycle.response_complete
        if not is_answered and self._in_head:
            cycle.keep_alive = False  # The previous request is complete: its response ends the connection.
            return
        if is_answered or not cycle.response_started:
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

    # Timeouts.

    def look(self, now: float) -> None:
        """Close it if its head stays incomplete, a body continues after its answer, or the client does not read."""
        bounds = self.gate.bounds
        if not self._is_refused:
            if self._in_head and self._head_since and now - self._head_since > bounds.header_seconds:
                self._refuse("slow_headers", _too_slow(bounds.header_seconds))
            is_answered = not self._in_head and self.cycle is not None and self.cycle.response_complete
            if is_answered:
                self._body_since = self._body_since or now
                if now - self._body_since > bounds.unread_seconds + bounds.header_seconds:
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
    """The key that connections are counted by: an IPv4 address, or the /64 network of an IPv6 address."""
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
    return Refusal(Code.URL_TOO_LONG, f"the URL is longer than {URL_BYTES_MAX} bytes", "Request less at once.")


def _too_slow(seconds: float) -> Refusal:
    return Refusal(Code.TIMEOUT, f"the headers did not come within {seconds:g} seconds", "Send the request at once.")
