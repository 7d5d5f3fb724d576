"""What work has written: how it is asked for, whoever keeps it. Nodes do, each for what ran there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from bursar.core.values.refusal import Refusal


@dataclass(frozen=True, slots=True)
class LogReading:
    """What is to be read: of one placement, from a byte on or the last so many lines."""

    uid: str
    epoch: int = 0  # 0 is the newest that the node knows
    offset: int = 0
    tail_lines: int = 0
    follow: bool = False


class OutputPiece(NamedTuple):
    data: bytes
    offset: int  # of its first byte


class LogSource(Protocol):
    """Pieces as they come. Whoever opened it closes it."""

    @property
    def offset(self) -> int:
        """Of the first byte that comes."""

    @property
    def over(self) -> bool:
        """Whether nothing comes: it has ended, and everything was read before."""

    async def next(self) -> OutputPiece | None:
        """The next piece; None at the end. Not to be cancelled: that would end it."""

    async def close(self) -> None: ...


class LogCut(Exception):
    """The rest cannot be read now; the message says why."""


class LogKeeper(Protocol):
    async def open(self, node: str, reading: LogReading) -> LogSource | Refusal | None:
        """What a node keeps; None where it keeps nothing of it."""
