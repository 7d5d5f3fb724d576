"""An allocation as a simulated node reads it: its nodes, phase, run time and exit code. Nothing else is decoded."""

from __future__ import annotations

import math
from datetime import datetime
from functools import lru_cache

import msgspec

from bursar.core.objects.allocation import ENDED, Phase
from bursar.core.values.duration import DurationError, parse_seconds

SECONDS = "bursar.io/sim-seconds"  # how long it runs
EXIT = "bursar.io/sim-exit"  # the exit code with which it ends

EVICTED = "Evicted"
# Size of the caches: thousands of allocations have few different values.
KEPT = 256


class SimWork(msgspec.Struct, frozen=True):
    """One version of an allocation. `nodes` are those on which it has not ended."""

    namespace: str
    name: str
    uid: str
    revision: int
    phase: Phase
    nodes: tuple[str, ...]
    epoch: int = 0  # each placement has a higher one
    seconds: float | None = None
    ttl_seconds: int | None = None
    exit_code: int = 0
    started_at: float | None = None
    deleted: bool = False
    grace_seconds: float | None = None
    reason: str = ""  # why it is stopped
    gang: str = ""


class Metadata(msgspec.Struct, rename="camel"):
    name: str
    uid: str
    namespace: str = ""
    resource_version: str = "0"
    annotations: dict[str, str] = {}
    deletion_timestamp: str | None = None
    deletion_grace_period_seconds: float | None = None


class Spec(msgspec.Struct, frozen=True):
    ttl: str | int | None = None


class SimPlaced(msgspec.Struct):
    name: str
    phase: str = ""  # its end on this node, while it still runs on others


class SimEviction(msgspec.Struct, rename="camel"):
    reason: str = ""
    grace_period_seconds: float | None = None


class SimStatus(msgspec.Struct, rename="camel", frozen=True):
    phase: str = Phase.PENDING
    reason: str = ""
    nodes: list[SimPlaced] = []
    epoch: int = 0
    start_time: str = ""
    eviction: SimEviction | None = None


class SimDocument(msgspec.Struct):
    """Metadata and spec, as stored."""

    metadata: Metadata
    spec: Spec = Spec()


class Whole(SimDocument):
    """An object as the API returns it."""

    status: SimStatus = SimStatus()


def places(status: SimStatus) -> tuple[str, ...]:
    """The nodes on which it has not ended."""
    if status.phase in ENDED or status.phase == Phase.PENDING:
        return ()
    return tuple([one.name for one in status.nodes if not one.phase])


_PHASES = {str(phase): phase for phase in Phase}


def read_work(document: SimDocument, status: SimStatus, revision: int, *, gang: str = "") -> SimWork:
    metadata = document.metadata
    phase = _PHASES[status.phase]
    return SimWork(
        metadata.namespace,
        metadata.name,
        metadata.uid,
        revision,
        phase,
        places(status),
        status.epoch,
        seconds=read_seconds(metadata.annotations.get(SECONDS)),
        ttl_seconds=_ttl_seconds(document.spec.ttl),
        exit_code=read_exit_code(metadata.annotations.get(EXIT)),
        started_at=_instant(status.start_time),
        deleted=metadata.deletion_timestamp is not None,
        grace_seconds=_grace_seconds(metadata, status),
        reason=_reason(status) if phase is Phase.TERMINATING else "",
        gang=gang,
    )


@lru_cache(KEPT)
def read_seconds(text: str | None) -> float | None:
    """The seconds; None, for the default, if the text is not a number."""
    try:
        seconds = float(text) if text and text.isascii() else math.nan
    except ValueError:
        return None
    return seconds if math.isfinite(seconds) and seconds >= 0 else None


@lru_cache(KEPT)
def read_exit_code(text: str | None) -> int:
    return int(text) if text and text.isascii() and text.isdigit() and int(text[:9]) <= 255 else 0


@lru_cache(KEPT)
def _ttl_seconds(ttl: str | int | None) -> int | None:
    try:
        return None if ttl is None else parse_seconds(ttl)
    except DurationError:
        return None


@lru_cache(KEPT)
def _instant(text: str) -> float | None:
    try:
        return datetime.fromisoformat(text).timestamp() if text else None
    except ValueError:
        return None


def _grace_seconds(metadata: Metadata, status: SimStatus) -> float | None:
    """The grace; the shorter one if it was both evicted and deleted."""
    told = (metadata.deletion_grace_period_seconds, status.eviction.grace_period_seconds if status.eviction else None)
    return min((one for one in told if one is not None), default=None)


def _reason(status: SimStatus) -> str:
    return (status.eviction.reason if status.eviction else "") or status.reason or EVICTED
