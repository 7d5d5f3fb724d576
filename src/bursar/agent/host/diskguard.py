"""The disk guard: it stops placements that exceed their disk limit or fill the node's disk.

It measures in its own thread, because large directories take long. A placement above its limit ends. If the disk runs
short and no placement is above its limit, the one without a limit that grew most since the last measurement ends.
Placements that do not grow are never chosen, however large they are.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bursar.agent.host.disk_quota import disk_use
from bursar.agent.host.scratch import Scratches
from bursar.agent.machine.types import Place

LIMIT_EXCEEDED = "DiskLimitExceeded"
DISK_FULL = "DiskFull"
RESERVE_BYTES = 4 << 30  # the reserve is this, or RESERVE_FRACTION of the disk if that is less
RESERVE_FRACTION = 0.05
FILES_FRACTION = 0.02
GROWTH_BYTES_MIN = 16 << 20  # smaller growth is never the cause
GROWTH_FILES_MIN = 10_000
LOOK_SECONDS = 1.0  # between two checks of the disk's free space
MEASURE_SECONDS = 10.0  # between two measurements of all placements, or longer:
MEASURE_FACTOR = 20.0  # times the duration of the last measurement


@dataclass(frozen=True, slots=True)
class DiskUse:
    """A placement's disk usage now and at the last measurement."""

    place: Place
    size_bytes: int
    files: int = 0
    bytes_max: int | None = None
    bytes_before: int = 0
    files_before: int = 0


@dataclass(frozen=True, slots=True)
class Disk:
    bytes_short: int = 0  # by how much free space is below the reserve
    files_short: int = 0


@dataclass(frozen=True, slots=True)
class Culprit:
    place: Place
    reason: str
    message: str


def decide_culprits(kept: Iterable[DiskUse], disk: Disk) -> list[Culprit]:
    """The placements to stop: all above their limit; else, if the disk is short, the one that grew most."""
    kept = list(kept)
    over = [one for one in kept if one.bytes_max is not None and one.size_bytes > one.bytes_max]
    if over:
        return [
            Culprit(
                one.place, LIMIT_EXCEEDED, f"it used {_size(one.size_bytes)} of {_size(one.bytes_max or 0)} on disk"
            )
            for one in over
        ]
    unlimited = [one for one in kept if one.bytes_max is None]
    if disk.bytes_short > 0 and unlimited:
        most = max(unlimited, key=lambda one: one.size_bytes - one.bytes_before)
        if most.size_bytes - most.bytes_before >= GROWTH_BYTES_MIN:
            return [Culprit(most.place, DISK_FULL, f"it filled the node's disk, with {_size(most.size_bytes)}")]
    if disk.files_short > 0 and kept:
        most = max(kept, key=lambda one: one.files - one.files_before)
        if most.files - most.files_before >= GROWTH_FILES_MIN:
            return [Culprit(most.place, DISK_FULL, f"it filled the node's disk, with {most.files} files")]
    return []


def _size(count: int) -> str:
    return f"{count / (1 << 20):.0f}Mi"


@dataclass(slots=True)
class DiskGuard:
    scratches: Scratches
    reserve_bytes: int | None = None  # None: the default above
    _measured_at: float = field(default=-math.inf, init=False)
    _pause_seconds: float = field(default=MEASURE_SECONDS, init=False)
    _before: dict[Place, tuple[int, int]] = field(default_factory=dict, init=False)

    def look(self, placements: Mapping[Place, tuple[str, int | None]]) -> list[Culprit]:
        """Check the free space; measure all placements if it is short or a measurement is due. Each placement has a
        directory name and possibly a limit."""
        disk = look_at(self.scratches.folder, self.reserve_bytes)
        now = time.monotonic()
        if disk == Disk() and now < self._measured_at + self._pause_seconds:
            return []
        found = {place: disk_use(self.scratches.of(mark).path) for place, (mark, _) in placements.items()}
        kept = [
            DiskUse(place, *found[place], bytes_max, *self._before.get(place, (0, 0)))
            for place, (_, bytes_max) in placements.items()
        ]
        self._measured_at = time.monotonic()
        self._pause_seconds = max(MEASURE_SECONDS, MEASURE_FACTOR * (self._measured_at - now))
        culprits = decide_culprits(kept, disk)
        if disk == Disk() or culprits:
            self._before = found  # while the disk is short, growth counts from before that
        return culprits


def look_at(folder: Path, reserve_bytes: int | None = None) -> Disk:
    found = os.statvfs(folder)
    size, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    wanted = min(RESERVE_BYTES, int(size * RESERVE_FRACTION)) if reserve_bytes is None else reserve_bytes
    files_wanted = int(found.f_files * FILES_FRACTION)  # 0 on filesystems that allocate inodes on demand
    return Disk(max(0, wanted - free), max(0, files_wanted - found.f_favail) if found.f_files else 0)
