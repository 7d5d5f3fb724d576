"""The agent's write-ahead journal: starts, paid time, ends, acknowledgements, and the uids of tenants.

One file of JSON lines, each with a CRC-32; a line counts once it is synced, and a torn line is skipped. The file is
compacted when most of it is obsolete, and when the node is wiped, so that commands and environments do not outlive a
wipe.
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

SPARE_LINES = 2_000  # obsolete lines before the file is compacted
SPARE_BYTES = 4 << 20  # or bytes of them


class JournalBegan(msgspec.Struct, frozen=True, tag="began"):
    """A placement was accepted. Synced before it starts, so that no running command is unknown."""

    run: Run
    at: float  # seconds since 1970: a reservation outlives a reboot
    boot: str = ""  # within this boot `clock` counts, which never jumps
    clock: float = 0.0

    @property
    def place(self) -> Place:
        return self.run.place

    def begun_at(self, boot: str, now: float) -> float:
        """`at` on the node's monotonic clock."""
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
    """The end was acknowledged. The place stays known, so that the placement is never started again."""

    uid: str
    epoch: int

    @property
    def place(self) -> Place:
        return self.uid, self.epoch


class Assigned(msgspec.Struct, frozen=True, tag="user"):
    """The uid of a tenant on this node, until the node is wiped."""

    tenant: str  # NAME@UID; the bare name if the server did not send the tenant's uid
    user: int


def bare_name(tenant: str) -> str:
    """The tenant's name alone, by which older servers identified tenants."""
    return tenant.partition("@")[0]


class Wiped(msgspec.Struct, frozen=True, tag="wiped"):
    """The node was wiped: the uids of all tenants but `kept` are free."""

    kept: tuple[str, ...] = ()  # tenants with running placements


Line: TypeAlias = JournalBegan | JournalOver | JournalGone | WindowLine | Assigned | Wiped


@dataclass(slots=True)
class Known:
    """The state that the lines add up to."""

    began: dict[Place, JournalBegan] = field(default_factory=dict)
    over: dict[Place, JournalOver] = field(default_factory=dict)
    gone: dict[Place, None] = field(default_factory=dict)
    paid_windows: dict[Place, PaidWindow] = field(default_factory=dict)
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
                    self.paid_windows[paid.place] = PaidWindow(line.boot, line.token, paid)
        elif isinstance(line, Assigned):
            if self.users.get(bare_name(line.tenant)) == line.user:
                del self.users[bare_name(line.tenant)]
            self.users[line.tenant] = line.user
        elif isinstance(line, Wiped):
            self.users = {tenant: user for tenant, user in self.users.items() if tenant in line.kept}
        else:
            self.began.pop(line.place, None)
            self.over.pop(line.place, None)
            self.paid_windows.pop(line.place, None)
            self.gone[line.place] = None
            while len(self.gone) > REMEMBERED_MAX:
                del self.gone[next(iter(self.gone))]

    def strip(self, live: Collection[Place]) -> None:
        """Reduce placements that do not live to their place and their end. A placement that never started has ended as
        well: its command is gone."""
        for place, line in self.began.items():
            if place not in live:
                self.began[place] = msgspec.structs.replace(line, run=_bare(line.run))
                self.over.setdefault(place, JournalOver(*place, None, NOT_WANTED, "the node is wiped", stopped=True))

    def __len__(self) -> int:
        return len(self.gone) + len(self.began) + len(self.over) + len(self.paid_windows) + len(self.users)

    def lines(self) -> list[Line]:
        paid = windows(self.paid_windows.values())
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
            # The disk may be full: the old file stays readable, and can be appended to later.
            self._fd, self._torn = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600), True

    def append(self, lines: Iterable[Line]) -> None:
        """Append lines; they are synced when this returns."""
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
        """Remove commands and environments of ended placements from the file. Raises OSError if that fails."""
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
    """The fields that the report of its end needs."""
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
    """A new name is durable only when its directory is synced."""
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
    """The lines; None for a torn one."""
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
