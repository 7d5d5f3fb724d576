"""Log following: copies the output of work on its nodes to our own output, one thread per node."""

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

Sink = Callable[[str, bytes], None]  # (node, bytes of its log)

# A placement reaches its node a moment after the decision.
BEGIN_SECONDS_MAX = 10.0
BEGIN_PAUSE_SECONDS = 0.2


class LineSink:
    """A sink that writes bytes as they arrive; with several nodes it writes whole lines, each after its node's name."""

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
        """Write last lines that have no end of line."""
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
    """The log of one node while it is copied."""

    node: str
    finished: Event = field(default_factory=Event)
    received_at: float = field(default_factory=time.monotonic)
    missed_bytes: int = 0
    error: BursarError | None = None


class Copying:
    """The log of one placement, on all of its nodes at once."""

    def __init__(self, allocations: Resource, name: str, sink: Sink) -> None:
        self._allocations = allocations
        self._name = name
        self._sink = sink
        self.copies: list[Copy] = []
        self.pipe_closed = False  # the reader of our output is gone

    def begin(
        self, nodes: Sequence[str], epoch: int, *, follow: bool = True, tail_lines: int | None = None
    ) -> list[Copy]:
        begun = [Copy(node) for node in nodes]
        for copy in begun:
            Thread(target=self._copy, args=(copy, epoch, follow, tail_lines), daemon=True).start()
        self.copies += begun
        return begun

    def wait(self, *, idle_seconds_max: float | None = None) -> bool:
        """Wait until all logs are complete, or none has grown for so long; return whether they are complete."""
        for copy in self.copies:
            while not copy.finished.wait(0.1):
                if idle_seconds_max is not None and time.monotonic() - copy.received_at > idle_seconds_max:
                    return False
        return True

    def gaps(self) -> list[str]:
        """Sentences about log bytes that nodes had dropped before they were read."""
        return [
            f"{copy.node or 'the node'} no longer has {counted(copy.missed_bytes, 'byte')} of the log"
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
            self.pipe_closed = True
        finally:
            copy.finished.set()

    def _read(self, copy: Copy, epoch: int, follow: bool, tail_lines: int | None) -> None:
        from bursar.client import Conflict

        until = time.monotonic() + BEGIN_SECONDS_MAX
        at = None if tail_lines is not None else 0  # the offset at which the next piece should begin
        begun = False
        while True:
            # A retry does not copy again what was copied before the refusal.
            tail = None if begun else tail_lines
            pieces = self._allocations.log(
                self._name, follow=follow, tail_lines=tail, node=copy.node, epoch=epoch, offset=at or 0
            )
            try:
                for piece in pieces:
                    copy.received_at, begun = time.monotonic(), True
                    if at is not None:
                        copy.missed_bytes += piece.offset - at
                    at = piece.offset + len(piece.data)
                    self._sink(copy.node, piece.data)
                return
            except Conflict:
                if not follow or not copy.node or time.monotonic() > until:
                    raise
            time.sleep(BEGIN_PAUSE_SECONDS)
