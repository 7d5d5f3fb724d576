"""Whether nodes are alive, and what may become of the work of those that are not.

A node that was never heard is left alone. One that falls silent is NotReady after a while and takes no new work, then
Lost. Its work is started elsewhere only when none of it can still be running: because the lease that it runs on has run
out, or because an administrator says so. What was silent while nobody listened, or together with very many others, is
more likely our fault than the nodes': then nothing is given up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

from msgspec import Struct

# More than so many of the nodes at once do not die by themselves; but a single one may, also where there are few.
SILENT_FRACTION_MAX = 0.3
SILENT_NODES_MIN = 2

LEASE_EXPIRED = "LeaseExpired"  # why an agent says that leased work has ended: it was granted nothing in time
# Why an agent says that work has ended of which nobody knows how: with the node, or with what watched over it.
NODE_RESTARTED, SHIM_LOST = "NodeRestarted", "ShimLost"
WENT_WITH_ITS_NODE = frozenset({NODE_RESTARTED, SHIM_LOST})


class Liveness(StrEnum):
    """What was said of a node last. Fenced is Lost by an administrator's word: nothing runs there any more."""

    READY = "Ready"
    NOT_READY = "NotReady"
    LOST = "Lost"
    FENCED = "Fenced"

    @property
    def phase(self) -> str:
        return Liveness.LOST if self is Liveness.FENCED else self

    @property
    def gone(self) -> bool:
        return self in (Liveness.LOST, Liveness.FENCED)


class OnLost(StrEnum):
    """What an allocation wants when its node is lost."""

    KEEP = ""  # to stay where it is, for as long as nobody knows
    REQUEUE = "requeue"  # to wait again: it runs on a lease, so that there is an end to not knowing
    FAIL = "fail"

    @property
    def leased(self) -> bool:
        return self is OnLost.REQUEUE


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a silent node is waited for, and for how long its leased work may go on."""

    heartbeat_seconds: int = 5
    not_ready_seconds: int = 15
    lost_seconds: int = 60
    run_lease_seconds: int = 120
    kill_grace_seconds: int = 30
    clock_skew_seconds: int = 5


class SeenHeartbeat(Struct, frozen=True):
    """When a node was last heard, and until when its leased work may be alive at the latest: until the end of its
    lease, and of the grace in which it is killed. All by the database's clock."""

    at: datetime
    now: datetime
    granted_until: datetime | None = None  # None: it was never granted a lease

    @property
    def silent_seconds(self) -> float:
        return (self.now - self.at).total_seconds()


class Sighting(Struct, frozen=True):
    """A node as it stands. `since` is when it was last heard before it was said to be silent."""

    node: str
    standing: Liveness = Liveness.READY
    heartbeat: SeenHeartbeat | None = None  # None: it was never heard
    since: datetime | None = None

    @property
    def heard_since(self) -> bool:
        return self.heartbeat is not None and self.since is not None and self.heartbeat.at > self.since

    @property
    def silent_seconds(self) -> float:
        return 0.0 if self.heartbeat is None else self.heartbeat.silent_seconds


@dataclass(frozen=True, slots=True)
class LivenessVerdict:
    """What is to be said of which nodes. `alarm`: so many are silent at once that nothing is given up."""

    transitions: tuple[tuple[str, Liveness], ...] = ()
    heartbeating: int = 0  # nodes that were ever heard, and are not lost
    silent: int = 0  # those of them that are silent
    alarm: bool = False

    @property
    def silent_fraction(self) -> float:
        return self.silent / self.heartbeating if self.heartbeating else 0.0


def judge(
    sightings: Sequence[Sighting], heard: int, *, watched_seconds: float, calm_seconds: float, patience: Patience
) -> LivenessVerdict:
    """What is to be said of nodes that are silent or were said to be; `heard` counts all that ever beat.

    `watched_seconds` is for how long we ourselves have been listening: before that nobody could be heard.
    `calm_seconds` is for how long, besides, there was no alarm.
    """
    known = [one for one in sightings if one.heartbeat is not None]
    heartbeating = heard - sum(one.standing.gone and not one.heard_since for one in known)
    silent = sum(
        not one.standing.gone and observed_silence(one, watched_seconds) >= patience.not_ready_seconds for one in known
    )
    alarm = is_alarming(silent, heartbeating)
    may_lose = not alarm and calm_seconds >= patience.lost_seconds
    transitions = [
        (one.node, after)
        for one in sightings
        if (after := _standing_after(one, watched_seconds, patience, may_lose=may_lose)) is not one.standing
    ]
    return LivenessVerdict(tuple(transitions), heartbeating, silent, alarm)


def is_alarming(silent: int, heartbeating: int) -> bool:
    """Whether so many are silent at once that the fault is hardly theirs."""
    return silent >= SILENT_NODES_MIN and silent > SILENT_FRACTION_MAX * heartbeating


def observed_silence(one: Sighting, watched_seconds: float) -> float:
    """For how long we have listened and not heard it."""
    return min(one.silent_seconds, watched_seconds)


def _standing_after(one: Sighting, watched_seconds: float, patience: Patience, *, may_lose: bool) -> Liveness:
    if one.heard_since:
        return Liveness.READY
    if one.heartbeat is None or one.standing.gone:
        return one.standing
    silence = observed_silence(one, watched_seconds)
    if silence >= patience.lost_seconds and may_lose:
        return Liveness.LOST
    if silence >= patience.not_ready_seconds:
        return Liveness.NOT_READY
    return one.standing


# The work of nodes that are gone.


def gone_at(on_lost: OnLost, heartbeat: SeenHeartbeat | None, patience: Patience) -> datetime | None:
    """From when on nothing of an allocation can be running on a node that is not heard; None: that is not known."""
    if not on_lost.leased or heartbeat is None or heartbeat.granted_until is None:
        return None
    return heartbeat.granted_until + timedelta(seconds=patience.clock_skew_seconds)


def seconds_to_wait(
    standing: Liveness,
    on_lost: OnLost,
    heartbeat: SeenHeartbeat | None,
    patience: Patience,
    *,
    calm_seconds: float = math.inf,
    watched_seconds: float = math.inf,
) -> float:
    """How long the work of a silent node must still be left alone: 0 is now; infinity, until somebody speaks: the node,
    or an administrator.

    The database's clock may have jumped forward, as when another takes its place: so for as long as the node was
    granted, we must also have listened ourselves, by our own clock.
    """
    if standing is Liveness.FENCED:
        return 0.0
    at = gone_at(on_lost, heartbeat, patience)
    if standing is not Liveness.LOST or at is None or heartbeat is None:
        return math.inf
    unwatched_seconds = (at - heartbeat.at).total_seconds() - watched_seconds
    return max(0.0, (at - heartbeat.now).total_seconds(), unwatched_seconds, patience.lost_seconds - calm_seconds)


def requeues(on_lost: OnLost) -> bool:
    """Whether work that is known to be gone with its node waits again: unless it asked to fail, as when evicted."""
    return on_lost is not OnLost.FAIL
