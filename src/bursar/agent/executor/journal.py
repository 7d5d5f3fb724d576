"""What an agent must not forget: what it was told to start, until when that is paid, how it ended, and what it was
acknowledged for.

One file of lines, each with its checksum; a line counts once it is synced. What a crash left half written is passed
over. The file is written anew when most of it is of the past, and when the node is wiped: what was run, and with which
environment, is then nobody's business any more.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias
from zlib import crc32

import msgspec

from bursar.agent.executor.meter import gpus
from bursar.agent.executor.placement_dir import boot_id
from bursar.agent.machine.events import PlacementEnded
from bursar.agent.machine.paid_window import PaidWindow, WindowLine, windows
from bursar.agent.machine.state import NOT_WANTED, REMEMBERED_MAX
from bursar.agent.machine.types import Place, Run, Usage
from bursar.agent.shim.clock import boot_seconds

SPARE_LINES = 2_000  # so many of the past are kept before the file is written anew
SPARE_BYTES = 4 << 20  # or so much of them


class JournalBegan(msgspec.Struct, frozen=True, tag="began"):
    """Synced before anything is done: whatever runs is known."""

    run: Run
    at: float  # seconds since 1970: a reservation outlives the machine's start
    boot: str = ""  # until then, the node's own clock counts: it never jumps
    clock: float = 0.0

    @property
    def place(self) -> Place:
        return self.run.place

    def begun_at(self, boot: str, now: float) -> float:
        """When that was, on the node's clock."""
        return self.clock if self.boot == boot else now - max(0.0, time.time() - self.at)


class JournalOver(msgspec.Struct, frozen=True, tag="over"):
    uid: str
    epoch: int
    exit_code: int | None = None
    reason: str = ""
    message: str = ""
    stopped: bool = False
    seconds: float | None = None  # how long it ran
    cpu_seconds: float = 0.0
    memory_bytes_max: int = 0

    @property
    def place(self) -> Place:
        return self.uid, self.epoch


class JournalGone(msgspec.Struct, frozen=True, tag="gone"):
    """It was acknowledged. Only that it was here is kept, so that it is never started again."""

    uid: str
    epoch: int

    @property
    def place(self) -> Place:
        return self.uid, self.epoch


class Assigned(msgspec.Struct, frozen=True, tag="user"):
    """Which user of the node is a tenant's, until the node is wiped."""

    tenant: str  # NAME@UID; the bare name where the server did not say the uid
    user: int


def bare_name(tenant: str) -> str:
    """The name alone, by which older servers told tenants apart."""
    return tenant.partition("@")[0]


class Wiped(msgspec.Struct, frozen=True, tag="wiped"):
    """Nothing of any tenant is left here but what runs: their users are nobody's again."""

    kept: tuple[str, ...] = ()  # tenants of which something runs


Line: TypeAlias = JournalBegan | JournalOver | JournalGone | WindowLine | Assigned | Wiped


@dataclass(slots=True)
class Known:
    """What the lines say together."""

    began: dict[Place, JournalBegan] = field(default_factory=dict)
    over: dict[Place, JournalOver] = field(default_factory=dict)
    gone: dict[Place, None] = field(default_factory=dict)
    escrows: dict[Place, PaidWindow] = field(default_factory=dict)
    users: dict[str, int] = field(default_factory=dict)  # by tenant

    def take(self, line: Line) -> None:
        if isinstance(line, JournalBegan):
            if line.place not in self.gone:
                self.began[line.place] = line
        elif isinstance(line, JournalOver):
            if line.place in self.began:
                self.over[line.place] = line
        elif isinstance(line, WindowLine):
            for paid in line.paid:
                if paid.place not in self.gone:
                    self.escrows[paid.place] = PaidWindow(line.boot, line.token, paid)
        elif isinstance(line, Assigned):
            if self.users.get(bare_name(line.tenant)) == line.user:
                del self.users[bare_name(line.tenant)]
            self.users[line.tenant] = line.user
        elif isinstance(line, Wiped):
            self.users = {tenant: user for tenant, user in self.users.items() if tenant in line.kept}
        else:
            self.began.pop(line.place, None)
            self.over.pop(line.place, None)
            self.escrows.pop(line.place, None)
            self.gone[line.place] = None
            while len(self.gone) > REMEMBERED_MAX:
                del self.gone[next(iter(self.gone))]

    def strip(self, live: Collection[Place]) -> None:
        """Of what does not live only that it was here, and how it ended. What was never started has ended as well: it
        could not be started any more."""
        for place, line in self.began.items():
            if place not in live:
                self.began[place] = msgspec.structs.replace(line, run=_bare(line.run))
                self.over.setdefault(place, JournalOver(*place, None, NOT_WANTED, "the node is wiped", stopped=True))

    def __len__(self) -> int:
        return len(self.gone) + len(self.began) + len(self.over) + len(self.escrows) + len(self.users)

    def lines(self) -> list[Line]:
        paid = windows(self.escrows.values())
        users = (Assigned(tenant, user) for tenant, user in self.users.items())
        return [*(JournalGone(*place) for place in self.gone), *self.began.values(), *self.over.values(), *paid, *users]


class Journal:
    def __init__(self, path: Path) -> None:
        self._path = path
        self.known = Known()
        self.bad_lines = 0
        for line in _read(path):
            if line is None:
                self.bad_lines += 1
            else:
                self.known.take(line)
        self._lines = self._bytes = self._bytes_kept = 0
        self._fd = -1
        self._torn = False  # the last line may not be whole, so the next begins on a line of its own
        try:
            self._compact()
        except OSError:
            # The disk is full, perhaps: what is there can be read, and may be added to when there is room.
            self._fd, self._torn = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600), True

    def append(self, lines: Iterable[Line]) -> None:
        """They are on the disk when this returns."""
        written = list(lines)
        if not written:
            return
        torn, self._torn = self._torn, True
        data = b"\n" * torn + b"".join(_encode(line) for line in written)
        _put(self._fd, data)
        self._torn = False
        for line in written:
            self.known.take(line)
        self._lines += len(written)
        self._bytes += len(data)
        if self._lines > 2 * len(self.known) + SPARE_LINES or self._bytes > 2 * self._bytes_kept + SPARE_BYTES:
            with suppress(OSError):
                self._compact()

    def strip(self, live: Collection[Place]) -> None:
        """Nothing in the file says any more what those have run that do not live. OSError where it cannot be written"""
        self.known.strip(live)
        self._compact()

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _compact(self) -> None:
        lines = self.known.lines()
        data = b"".join(_encode(line) for line in lines)
        new = self._path.with_suffix(".new")
        fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            _put(fd, data)
            new.replace(self._path)
            sync_folder(self._path.parent)
        except OSError:
            os.close(fd)
            raise
        self.close()
        self._fd, self._lines, self._bytes, self._bytes_kept = fd, len(lines), len(data), len(data)


def _bare(run: Run) -> Run:
    """What a report of its end needs."""
    return Run(run.uid, run.epoch, "", "", devices=run.devices)


def began(run: Run) -> JournalBegan:
    return JournalBegan(run, time.time(), boot_id(), boot_seconds())


def over(end: PlacementEnded) -> JournalOver:
    used = end.usage
    use = (None,) if used is None else (used.seconds, used.cpu_seconds, used.memory_bytes_max)
    return JournalOver(*end.place, end.exit_code, end.reason, end.message, end.stopped, *use)


def used_in(run: Run, end: JournalOver) -> Usage | None:
    if end.seconds is None:
        return None
    return Usage(end.seconds, end.cpu_seconds, 0, end.memory_bytes_max, end.seconds * gpus(run))


def sync_folder(folder: Path) -> None:
    """A name is on the disk only when its folder is."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _put(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]
    os.fsync(fd)


def _encode(line: Line) -> bytes:
    body = msgspec.json.encode(line)
    return b"%08x %b\n" % (crc32(body), body)


_DECODER: msgspec.json.Decoder[Line] = msgspec.json.Decoder(Line)


def _read(path: Path) -> list[Line | None]:
    """None for a line that is not whole."""
    try:
        return [_decode(line) for line in path.read_bytes().split(b"\n") if line]
    except FileNotFoundError:
        return []


def _decode(line: bytes) -> Line | None:
    checksum, _, body = line.partition(b" ")
    if checksum != b"%08x" % crc32(body):
        return None
    try:
        return _DECODER.decode(body)
    except msgspec.MsgspecError:
        return None
