"""Reads a command's output as its shim stores it: the newest two files, each named after the offset of its first byte.

Offsets are absolute, whatever was dropped before, so a reader resumes where it stopped.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

CHUNK_BYTES = 1 << 16
# A follower polls; the pause doubles while nothing is written.
LOOK_SECONDS_MIN, LOOK_SECONDS_MAX = 0.01, 0.2


@dataclass(frozen=True, slots=True)
class FilePiece:
    data: bytes
    offset: int  # of its first byte


async def read(
    folder: Path,
    *,
    offset: int = 0,
    tail_lines: int = 0,
    follow: bool = False,
    ended: Callable[[], bool] = lambda: True,
) -> AsyncIterator[FilePiece]:
    """Read from the offset, or the last `tail_lines` lines. With `follow`, read on until the placement has ended."""
    at = await asyncio.to_thread(tail_offset, folder, tail_lines) if tail_lines > 0 else offset
    pause = LOOK_SECONDS_MIN
    while True:
        over = ended()  # asked before reading, so that output written before the end is not missed
        while (piece := await asyncio.to_thread(read_piece, folder, at)) is not None:
            yield piece
            at = piece.offset + len(piece.data)
            pause = LOOK_SECONDS_MIN
        if over or not follow:
            return
        await asyncio.sleep(pause)
        pause = min(2 * pause, LOOK_SECONDS_MAX)


def read_piece(folder: Path, offset: int, bytes_max: int = CHUNK_BYTES) -> FilePiece | None:
    """The output at the offset, or at the first later byte that is still kept; None at the end."""
    for start, path in _files(folder):
        try:
            with path.open("rb") as file:
                file.seek(max(0, offset - start))
                data = file.read(bytes_max)
        except FileNotFoundError:
            continue  # it has just been rotated away
        if data:
            return FilePiece(data, max(offset, start))
    return None


def tail_offset(folder: Path, lines: int) -> int:
    """The offset of the last `lines` lines. An unterminated last line counts as one."""
    wanted, last, at = lines + 1, True, end_offset(folder)
    for offset, data in _blocks_from_end(folder, at):
        if last:
            last = False
            wanted -= not data.endswith(b"\n")
        found = len(data)
        while wanted and (found := data.rfind(b"\n", 0, found)) >= 0:
            wanted -= 1
        if not wanted:
            return offset + found + 1
        at = offset
    return at


def _blocks_from_end(folder: Path, end: int) -> Iterator[tuple[int, bytes]]:
    """Blocks from the end backwards, read lazily: the last lines are a small part of a large output."""
    for start, path in reversed(_files(folder)):
        try:
            with path.open("rb") as file:
                at = min(end, start + os.fstat(file.fileno()).st_size)
                while at > start:
                    at, size = max(start, at - CHUNK_BYTES), min(CHUNK_BYTES, at - start)
                    file.seek(at - start)
                    yield at, file.read(size)
        except FileNotFoundError:
            return  # it has just been rotated away


def end_offset(folder: Path) -> int:
    for start, path in reversed(_files(folder)):
        try:
            return start + path.stat().st_size
        except FileNotFoundError:
            continue  # it has just been removed
    return 0


def _files(folder: Path) -> list[tuple[int, Path]]:
    return sorted((int(path.suffix[1:]), path) for path in folder.glob("output.*") if path.suffix[1:].isdigit())
