"""A load generator that costs little: prepared bytes out, a status and a length in, over kept-alive connections.

It shares the machine with what it measures, so it does the least a client can do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

ANSWER_SECONDS_MAX = 60.0  # for what was sent last


@dataclass(slots=True)
class Result:
    """The results of a run: answers, latencies, and any unexpected answer."""

    count: int = 0
    seconds: float = 0.0
    latencies: list[float] = field(default_factory=list)
    unwanted: list[bytes] = field(default_factory=list)

    @property
    def per_second(self) -> float:
        return self.count / self.seconds if self.seconds else 0.0

    def percentile_ms(self, fraction: float) -> float:
        ordered = sorted(self.latencies)
        return 1000 * ordered[min(len(ordered) - 1, int(len(ordered) * fraction))] if ordered else 0.0


class _Connection(asyncio.Protocol):
    def __init__(
        self, next_request: Callable[[], bytes | None], wanted: bytes, result: Result, done: asyncio.Future[None]
    ) -> None:
        self._next_request = next_request
        self._wanted = wanted
        self._result = result
        self._done = done
        self._buffer = b""
        self._sent_at = 0.0
        self._loop = asyncio.get_running_loop()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.WriteTransport", transport)
        self._send()

    def _send(self) -> None:
        request = self._next_request()
        if request is None:
            self._transport.close()
            if not self._done.done():
                self._done.set_result(None)
            return
        self._sent_at = self._loop.time()
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        self._buffer = self._buffer + data if self._buffer else data
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return
        at = self._buffer.find(b"content-length: ", 0, end)
        length = int(self._buffer[at + 16 : self._buffer.index(b"\r\n", at)])
        if len(self._buffer) < end + 4 + length:
            return
        if self._buffer[9:12] != self._wanted and len(self._result.unwanted) < 5:
            self._result.unwanted.append(self._buffer)
        self._buffer = b""
        self._result.count += 1
        self._result.latencies.append(self._loop.time() - self._sent_at)
        self._send()

    def connection_lost(self, error: Exception | None) -> None:
        if not self._done.done():
            self._done.set_exception(error or ConnectionError("the server closed the connection"))


async def run_load(
    url: str, next_request: Callable[[], bytes | None], *, wanted: int, connections: int, seconds: float
) -> Result:
    """Keep so many connections busy for so long; raise if an answer has another status than `wanted`."""
    parts = urlsplit(url)
    result = Result()
    loop = asyncio.get_running_loop()
    stop_at = loop.time() + seconds

    def bounded() -> bytes | None:
        return next_request() if loop.time() < stop_at else None

    started = loop.time()
    ends = [loop.create_future() for _ in range(connections)]
    for end in ends:
        await loop.create_connection(
            lambda end=end: _Connection(bounded, b"%d" % wanted, result, end),  # type: ignore[misc]
            parts.hostname or "127.0.0.1",
            parts.port or 80,
        )
    async with asyncio.timeout(seconds + ANSWER_SECONDS_MAX):
        await asyncio.gather(*ends)
    result.seconds = loop.time() - started
    if result.unwanted:
        raise RuntimeError(f"unexpected answer: {result.unwanted[0][:600].decode(errors='replace')}")
    return result


def request_bytes(method: str, path: str, token: str, body: bytes = b"", media_type: str = "application/json") -> bytes:
    head = f"{method} {path} HTTP/1.1\r\nHost: bench\r\nAuthorization: Bearer {token}\r\n"
    if body:
        head += f"Content-Type: {media_type}\r\nContent-Length: {len(body)}\r\n"
    return head.encode() + b"\r\n" + body
