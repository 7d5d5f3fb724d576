"""A receiver of webhooks on loopback: real HTTP, signatures checked as a receiver would, answers as a test plans them.

It shares no code with the sender.
"""

import asyncio
import base64
import hashlib
import hmac
import json
import ssl
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

HANG = 0  # as a status: read everything, and never answer


@dataclass(frozen=True, slots=True)
class Got:
    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes

    @property
    def event(self) -> dict[str, Any]:
        event: dict[str, Any] = json.loads(self.body)
        return event

    @property
    def id(self) -> str:
        return self.headers["webhook-id"]

    def is_signed_with(self, secret: str) -> bool:
        key = base64.b64decode(secret.removeprefix("whsec_"))
        content = f"{self.id}.{self.headers['webhook-timestamp']}.".encode() + self.body
        wanted = base64.b64encode(hmac.new(key, content, hashlib.sha256).digest()).decode()
        fresh = abs(time.time() - int(self.headers["webhook-timestamp"])) < 60
        return fresh and self.headers["webhook-signature"] == f"v1,{wanted}"


@dataclass(slots=True)
class Receiver:
    """Answers with the statuses of `plan`, one after another, and 200 after that."""

    url: str = ""
    plan: list[int] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)
    got: list[Got] = field(default_factory=list)
    _came: asyncio.Event = field(default_factory=asyncio.Event)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def ids(self) -> list[str]:
        return [one.id for one in self.got]

    async def comes(self, count: int) -> None:
        """Until so many requests have come."""
        async with asyncio.timeout(20):
            while len(self.got) < count:
                self._came.clear()
                await self._came.wait()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._answer(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        method, path, _ = head[0].split(" ")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)}
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        status = self.plan.pop(0) if self.plan else 200
        self.got.append(Got(method, path, headers, body))
        self._came.set()
        if status == HANG:
            await asyncio.Event().wait()
        more = "".join(f"{name}: {value}\r\n" for name, value in self.headers.items())
        writer.write(f"HTTP/1.1 {status} Whatever\r\n{more}content-length: 2\r\nconnection: close\r\n\r\nok".encode())
        await writer.drain()

    async def end(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@asynccontextmanager
async def receiving(*plan: int, tls: ssl.SSLContext | None = None) -> AsyncIterator[Receiver]:
    one = Receiver(plan=list(plan))
    server = await asyncio.start_server(one.serve, "127.0.0.1", 0, ssl=tls)
    port = server.sockets[0].getsockname()[1]
    one.url = f"https://localhost:{port}/hook" if tls else f"http://127.0.0.1:{port}/hook"
    try:
        yield one
    finally:
        server.close()
        await one.end()
