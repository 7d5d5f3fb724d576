"""Log sources: the interface for reading the output of work from the node that keeps it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from bursar.core.values.refusal import Refusal


@dataclass(frozen=True, slots=True)
class LogReading:
    """A request to read the log of one placement, from a byte offset or the last lines."""

    uid: str
    epoch: int = 0  # 0: the newest that the node has
    offset: int = 0
    tail_lines: int = 0
    follow: bool = False


class OutputPiece(NamedTuple):
    data: bytes
    offset: int  # of the first byte


class LogSource(Protocol):
    """An open log, read piece by piece. The caller that opened it closes it."""

    @property
    def offset(self) -> int:
        """The offset of the first byte."""

    @property
    def over(self) -> bool:
        """Whether the log has ended, and all of it was read before."""

    async def next(self) -> OutputPiece | None:
        """The next piece; None at the end. Not to be cancelled: that would end it."""

    async def close(self) -> None: ...


class LogCut(Exception):
    """The rest of the log cannot be read now; the message says why."""


class LogKeeper(Protocol):
    async def open(self, node: str, reading: LogReading) -> LogSource | Refusal | None:
        """Open the log that a node keeps; None if it keeps none."""
