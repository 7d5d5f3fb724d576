"""HTTP/1.1 as bytes on kept connections: cheap enough for thousands of requests, and free to send what no client
would."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import urlsplit

ANSWER_SECONDS_MAX = 60.0

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class RawAnswer:
    """What came back: status 0 where the server closed the connection without an answer."""

    status: int
    head: bytes = b""
    body: bytes = b""

    @property
    def is_json(self) -> bool:
        return b"content-type: application/json" in self.head.lower()


def request(
    method: str, path: str, headers: Iterable[tuple[str, str]] = (), body: bytes | None = None, *, host: str = "bursar"
) -> bytes:
    """A request that is well-formed as far as its parts are."""
    lines = [f"{method} {path} HTTP/1.1", f"Host: {host}", *(f"{name}: {value}" for name, value in headers)]
    if body is not None:
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1", "replace") + (body or b"")


class Wire:
    """One connection, opened when it is needed and opened again after the server closed it."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self.where = parts.hostname or "", parts.port or 0
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, raw: bytes, *, end: bool = False) -> RawAnswer:
        """Send bytes and read one answer. `end` says that nothing more will be sent, and closes the connection."""
        if self._streams is None:
            self._streams = await asyncio.open_connection(*self.where, limit=1 << 22)
        reader, writer = self._streams
        keep = False
        try:
            async with asyncio.timeout(ANSWER_SECONDS_MAX):
                writer.write(raw)
                if end:
                    writer.write_eof()
                answer, keep = await _read(reader, head_only=raw.startswith(b"HEAD "))
                return answer
        except (ConnectionError, asyncio.IncompleteReadError) as error:
            return RawAnswer(0, body=repr(error).encode())
        finally:
            if end or not keep:
                await self.close()

    async def close(self) -> None:
        if self._streams is not None:
            (_, writer), self._streams = self._streams, None
            writer.close()


async def _read(reader: asyncio.StreamReader, *, head_only: bool) -> tuple[RawAnswer, bool]:
    """An answer, and whether the connection goes on."""
    head = await reader.readuntil(b"\r\n\r\n")
    status, low = int(head.split(b" ", 2)[1]), head.lower()
    goes_on = b"\r\nconnection: close" not in low
    if head_only or status in (204, 304):
        return RawAnswer(status, head), goes_on
    if b"\r\ntransfer-encoding: chunked" in low:
        return RawAnswer(status, head, b"".join([piece async for piece in _chunks(reader)])), goes_on
    _, found, rest = low.partition(b"\r\ncontent-length:")
    if not found:
        return RawAnswer(status, head, await reader.read()), False
    return RawAnswer(status, head, await reader.readexactly(int(rest.split(b"\r\n", 1)[0]))), goes_on


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while size := int(await reader.readuntil(b"\n"), 16):
        yield await reader.readexactly(size)
        await reader.readexactly(2)
    await reader.readline()


@asynccontextmanager
async def wires(url: str, count: int) -> AsyncIterator[list[Wire]]:
    opened = [Wire(url) for _ in range(count)]
    try:
        yield opened
    finally:
        for one in opened:
            await one.close()


async def ask_all(
    url: str, requests: Iterable[T], ask: Callable[[Wire, T], Awaitable[R]], *, at_once: int = 24
) -> list[R]:
    """What `ask` makes of each request, in their order; so many connections take one after another."""
    waiting = enumerate(requests)
    done: dict[int, R] = {}

    async def take(wire: Wire) -> None:
        for number, one in waiting:
            done[number] = await ask(wire, one)

    async with wires(url, at_once) as opened, asyncio.TaskGroup() as group:
        for wire in opened:
            group.create_task(take(wire))
    return [done[number] for number in sorted(done)]
