"""A proxy in front of PostgreSQL that loses connections at the worst moment, as its plan says."""

import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from itertools import repeat
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

PORT = 5432


class Proxy:
    """Sits between asyncpg and PostgreSQL, and does to each COMMIT what its plan says.

    pass      let it through
    before    cut the connection before the COMMIT reaches the server
    after     let the server answer, and cut the connection before the answer reaches the client
    during    send it on and cut at once, so that the client may be back before the server is done
    stall     cut the client at once, and send the COMMIT on only when `release` is set
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        self._server = Path(query["host"]) / f".s.PGSQL.{query.get('port', PORT)}"
        self._directory = Path(tempfile.mkdtemp(prefix="bursar-proxy-"))
        self.url = f"{parts.scheme}://{parts.username}@{parts.path}?host={self._directory}&port={PORT}"
        self.plan: Iterator[str] = repeat("pass")
        self.cuts: list[str] = []
        self.release = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> "Proxy":
        path = self._directory / f".s.PGSQL.{PORT}"
        self._listening = await asyncio.start_unix_server(self._accept, path)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._listening.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        shutil.rmtree(self._directory)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        from_server, to_server = await asyncio.open_unix_connection(self._server)
        answers = asyncio.create_task(_pour(from_server, writer))
        try:
            await self._forward(reader, to_server, from_server, writer, answers)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            answers.cancel()
            for end in (writer, to_server):
                end.close()

    async def _forward(
        self,
        reader: asyncio.StreamReader,
        to_server: asyncio.StreamWriter,
        from_server: asyncio.StreamReader,
        to_client: asyncio.StreamWriter,
        answers: asyncio.Task[None],
    ) -> None:
        length = await reader.readexactly(4)  # the start-up message has no type
        to_server.write(length + await reader.readexactly(int.from_bytes(length) - 4))
        while True:
            head = await reader.readexactly(5)
            body = await reader.readexactly(int.from_bytes(head[1:]) - 4)
            deed = next(self.plan, "pass") if head[:1] == b"Q" and body.startswith(b"COMMIT") else "pass"
            if deed == "pass":
                to_server.write(head + body)
                continue
            self.cuts.append(deed)
            answers.cancel()
            await asyncio.gather(answers, return_exceptions=True)
            if deed in ("during", "stall"):
                to_client.close()
            if deed == "stall":
                await self.release.wait()
            if deed != "before":
                to_server.write(head + body)
                await to_server.drain()
            if deed in ("after", "stall"):
                await from_server.readuntil(b"Z\0\0\0\5")  # ready for the next: this one is done
            return


async def _pour(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while some := await source.read(65536):
            sink.write(some)
            await sink.drain()
    sink.close()
