"""Spools: responses that are too long for memory are written to files until clients have read them.

A response is spooled as fast as the database delivers it, so that a slow client holds neither a connection nor a seat.
Small ones stay in memory, as long as all of them together are small. The files have no name, so they vanish with the
process; threads read and write them.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import IO

from bursar.api.http import metrics
from bursar.core.values.refusal import Code, Refusal

MEMORY_BYTES_EACH = 4 << 20
MEMORY_BYTES_ALL = 64 << 20
FILE_BYTES_EACH = 512 << 20  # of one tenant
FILE_BYTES_ALL = 2 << 30
PIECE_BYTES = 256 << 10


class SpoolFull(Exception):
    """The spool has no free space for more unread answers, in all or for this tenant."""

    def __init__(self, bytes_max: int) -> None:
        super().__init__(bytes_max)
        self.refusal = Refusal(
            Code.OVERLOADED,
            f"responses of {bytes_max >> 20} MiB are still unread",
            "Read them, or list fewer objects at a time with limit and continue.",
            retry_after_seconds=10,
        )


class Spools:
    """Memory and disk use of all spools of the process."""

    def __init__(
        self,
        *,
        memory_each: int = MEMORY_BYTES_EACH,
        memory_all: int = MEMORY_BYTES_ALL,
        file_each: int = FILE_BYTES_EACH,
        file_all: int = FILE_BYTES_ALL,
    ) -> None:
        self.memory_each = memory_each
        self._memory_all = memory_all
        self._file_each = file_each
        self._file_all = file_all
        self.memory_bytes = 0
        self.file_bytes: Counter[str] = Counter()  # by party

    def open(self, party: str) -> Spool:
        return Spool(self, party)

    def take_memory(self, count: int) -> bool:
        if self.memory_bytes + count > self._memory_all:
            return False
        self.memory_bytes += count
        return True

    def take_file(self, party: str, count: int) -> None:
        if self.file_bytes[party] + count > self._file_each:
            raise SpoolFull(self._file_each)
        if self.file_bytes.total() + count > self._file_all:
            raise SpoolFull(self._file_all)
        self.file_bytes[party] += count
        metrics.SPOOLED.set(self.file_bytes.total())

    def give_back(self, party: str, memory: int, file: int) -> None:
        self.memory_bytes -= memory
        self.file_bytes[party] -= file
        if not self.file_bytes[party]:
            del self.file_bytes[party]
        metrics.SPOOLED.set(self.file_bytes.total())


class Spool:
    """Bytes that are written once, and then read once from the beginning."""

    def __init__(self, spools: Spools, party: str) -> None:
        self._spools = spools
        self._party = party
        self._pieces: list[bytes] = []
        self._memory = 0
        self._in_file = 0
        self._file: IO[bytes] | None = None
        self._is_closed = False

    @property
    def size(self) -> int:
        return self._memory + self._in_file

    async def write(self, piece: bytes) -> None:
        is_small = self._file is None and self._memory + len(piece) <= self._spools.memory_each
        if is_small and self._spools.take_memory(len(piece)):
            self._pieces.append(piece)
            self._memory += len(piece)
            return
        self._spools.take_file(self._party, len(piece))
        self._in_file += len(piece)
        if self._file is None:
            self._file = await asyncio.to_thread(_file_without_name)
        await asyncio.to_thread(self._file.write, piece)

    async def read(self) -> AsyncGenerator[bytes, None]:
        """Read everything in pieces of bounded size; memory is freed as it is read."""
        self._pieces.reverse()
        while self._pieces:
            piece = self._pieces.pop()
            for at in range(0, len(piece), PIECE_BYTES):
                yield piece[at : at + PIECE_BYTES]
        if self._file is None:
            return
        await asyncio.to_thread(self._file.seek, 0)
        while piece := await asyncio.to_thread(self._file.read, PIECE_BYTES):
            yield piece

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._pieces.clear()
        if self._file is not None:
            self._file.close()
        self._spools.give_back(self._party, self._memory, self._in_file)


def _file_without_name() -> IO[bytes]:
    return tempfile.TemporaryFile(prefix="bursar-spool-")


class SpooledPieces:
    """The pieces of a response whose middle is in a spool. The spool is closed at the end, also if reading never
    begins."""

    def __init__(self, head: bytes, spool: Spool, tail: bytes) -> None:
        self._spool = spool
        self._pieces = _pieces(head, spool, tail)

    def __aiter__(self) -> SpooledPieces:
        return self

    async def __anext__(self) -> bytes:
        return await anext(self._pieces)

    async def aclose(self) -> None:
        try:
            await self._pieces.aclose()
        finally:
            self._spool.close()


async def _pieces(head: bytes, spool: Spool, tail: bytes) -> AsyncGenerator[bytes, None]:
    if head:
        yield head
    async with aclosing(spool.read()) as pieces:
        async for piece in pieces:
            yield piece
    if tail:
        yield tail
