"""Copying what work writes on its nodes to our own output, one thread for each node."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import Event, Lock, Thread
from typing import IO, TYPE_CHECKING

from bursar.core.values.wording import counted

if TYPE_CHECKING:
    from bursar.client import BursarError, Resource

Sink = Callable[[str, bytes], None]  # (node, what was written there)

# What has been placed is not yet there for a moment.
BEGIN_SECONDS_MAX = 10.0
BEGIN_PAUSE_SECONDS = 0.2


class LineSink:
    """Writes bytes as they come; where there are several nodes, whole lines with the name of theirs before each."""

    def __init__(self, *, named: bool, out: IO[bytes] | None = None) -> None:
        self._named = named
        self._out = out or sys.stdout.buffer
        self._rest: dict[str, bytes] = {}
        self._lock = Lock()

    def __call__(self, node: str, data: bytes) -> None:
        with self._lock:
            if self._named:
                *lines, self._rest[node] = (self._rest.get(node, b"") + data).split(b"\n")
                data = b"".join(_named(node, line) for line in lines)
            self._out.write(data)
            self._out.flush()

    def finish(self) -> None:
        """What had no end of line yet."""
        with self._lock:
            for node, line in self._rest.items():
                if line:
                    self._out.write(_named(node, line))
            self._rest.clear()
            self._out.flush()


def _named(node: str, line: bytes) -> bytes:
    return b"[%s] %s\n" % (node.encode(), line)


@dataclass(slots=True)
class Copy:
    """One node's part."""

    node: str
    over: Event = field(default_factory=Event)
    heard_at: float = field(default_factory=time.monotonic)
    missed_bytes: int = 0
    error: BursarError | None = None


class Copying:
    """The log of one placement, on all of its nodes at once."""

    def __init__(self, allocations: Resource, name: str, sink: Sink) -> None:
        self._allocations = allocations
        self._name = name
        self._sink = sink
        self.copies: list[Copy] = []
        self.left = False  # nobody reads our output any more

    def begin(
        self, nodes: Sequence[str], epoch: int, *, follow: bool = True, tail_lines: int | None = None
    ) -> list[Copy]:
        begun = [Copy(node) for node in nodes]
        for copy in begun:
            Thread(target=self._copy, args=(copy, epoch, follow, tail_lines), daemon=True).start()
        self.copies += begun
        return begun

    def wait(self, *, idle_seconds_max: float | None = None) -> bool:
        """Until everything was said, or nothing was for so long. Whether it was everything."""
        for copy in self.copies:
            while not copy.over.wait(0.1):
                if idle_seconds_max is not None and time.monotonic() - copy.heard_at > idle_seconds_max:
                    return False
        return True

    def gaps(self) -> list[str]:
        """What the nodes had dropped before it was read, in words."""
        return [
            f"{copy.node or 'the node'} no longer keeps {counted(copy.missed_bytes, 'byte')} of the log"
            for copy in self.copies
            if copy.missed_bytes
        ]

    def _copy(self, copy: Copy, epoch: int, follow: bool, tail_lines: int | None) -> None:
        from bursar.client import BursarError

        try:
            self._read(copy, epoch, follow, tail_lines)
        except BursarError as error:
            copy.error = error
        except BrokenPipeError:
            self.left = True
        finally:
            copy.over.set()

    def _read(self, copy: Copy, epoch: int, follow: bool, tail_lines: int | None) -> None:
        from bursar.client import Conflict

        until = time.monotonic() + BEGIN_SECONDS_MAX
        at = None if tail_lines is not None else 0  # where the next piece should begin
        begun = False
        while True:
            # What was copied before it was refused is not copied again.
            tail = None if begun else tail_lines
            pieces = self._allocations.log(
                self._name, follow=follow, tail_lines=tail, node=copy.node, epoch=epoch, offset=at or 0
            )
            try:
                for piece in pieces:
                    copy.heard_at, begun = time.monotonic(), True
                    if at is not None:
                        copy.missed_bytes += piece.offset - at
                    at = piece.offset + len(piece.data)
                    self._sink(copy.node, piece.data)
                return
            except Conflict:
                if not follow or not copy.node or time.monotonic() > until:
                    raise
            time.sleep(BEGIN_PAUSE_SECONDS)
