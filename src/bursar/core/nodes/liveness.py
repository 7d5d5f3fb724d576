"""Node liveness: failure detection by heartbeats, and when the work of a lost node may be started elsewhere.

A node that never sent a heartbeat is left alone. Without heartbeats a node becomes NotReady, takes no new work, and is
Lost later. Its work starts elsewhere only when it cannot be running any more: its run-lease has expired, or an
administrator has fenced the node. Silence while no server was listening, or of very many nodes at once, is more likely
a fault of the server or the network: then no node is declared Lost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

from msgspec import Struct

# The alarm: more nodes than this fraction do not fail at once by themselves. A single node never raises it.
SILENT_FRACTION_MAX = 0.3
SILENT_NODES_MIN = 2

LEASE_EXPIRED = "LeaseExpired"  # an agent's reason: the run-lease was not extended in time
# An agent's reasons for work that ended without an exit code: the node restarted, or the shim was lost.
NODE_RESTARTED, SHIM_LOST = "NodeRestarted", "ShimLost"
WENT_WITH_ITS_NODE = frozenset({NODE_RESTARTED, SHIM_LOST})


class Liveness(StrEnum):
    """The liveness of a node, as its status shows it."""

    READY = "Ready"  # heartbeats arrive
    NOT_READY = "NotReady"  # no heartbeats for a while; the node takes no new work
    LOST = "Lost"  # no heartbeats for so long that its work is treated as lost
    FENCED = "Fenced"  # an administrator guarantees that nothing runs on the lost node any more

    @property
    def phase(self) -> str:
        return Liveness.LOST if self is Liveness.FENCED else self

    @property
    def gone(self) -> bool:
        return self in (Liveness.LOST, Liveness.FENCED)


class OnLost(StrEnum):
    """The policy of an allocation for a lost node (`onNodeLost`)."""

    KEEP = ""  # it stays bound to the node until the node returns or is fenced
    REQUEUE = "requeue"  # it runs on a run-lease, and is pending again when that has expired
    FAIL = "fail"  # it fails once it is known to be gone

    @property
    def leased(self) -> bool:
        return self is OnLost.REQUEUE


@dataclass(frozen=True, slots=True)
class Patience:
    """The timeouts of failure detection: heartbeat interval, NotReady, Lost, run-leases and clock skew."""

    heartbeat_seconds: int = 5
    not_ready_seconds: int = 15
    lost_seconds: int = 60
    run_lease_seconds: int = 120
    kill_grace_seconds: int = 30
    clock_skew_seconds: int = 5


class SeenHeartbeat(Struct, frozen=True):
    """The last heartbeat of a node, and the latest time at which its leased work may be alive.

    `granted_until` includes the grace period of the kill. All times are by the database's clock.
    """

    at: datetime
    now: datetime
    granted_until: datetime | None = None  # None: no run-lease was ever granted

    @property
    def silent_seconds(self) -> float:
        return (self.now - self.at).total_seconds()


class Sighting(Struct, frozen=True):
    """A node's recorded liveness and its last heartbeat. `since` is its last heartbeat before it became NotReady."""

    node: str
    standing: Liveness = Liveness.READY
    heartbeat: SeenHeartbeat | None = None  # None: it never sent one
    since: datetime | None = None

    @property
    def heard_since(self) -> bool:
        return self.heartbeat is not None and self.since is not None and self.heartbeat.at > self.since

    @property
    def silent_seconds(self) -> float:
        return 0.0 if self.heartbeat is None else self.heartbeat.silent_seconds


@dataclass(frozen=True, slots=True)
class LivenessVerdict:
    """The transitions of nodes. With `alarm` so many are silent at once that no node is declared Lost."""

    transitions: tuple[tuple[str, Liveness], ...] = ()
    heartbeating: int = 0  # nodes that ever sent a heartbeat, and are not lost
    silent: int = 0  # those of them without recent heartbeats
    alarm: bool = False


def judge(
    sightings: Sequence[Sighting], heard: int, *, watched_seconds: float, calm_seconds: float, patience: Patience
) -> LivenessVerdict:
    """Decide the transitions of nodes that are silent or recorded as such; `heard` counts all with any heartbeat.

    `watched_seconds` is how long this process has been listening: it could not observe heartbeats before.
    `calm_seconds` is how long there has been no alarm.
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
    """Whether so many nodes are silent at once that a fault of the server or network is more likely."""
    return silent >= SILENT_NODES_MIN and silent > SILENT_FRACTION_MAX * heartbeating


def observed_silence(one: Sighting, watched_seconds: float) -> float:
    """The time for which this process has listened without a heartbeat of the node."""
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


# The work of lost nodes.


def gone_at(on_lost: OnLost, heartbeat: SeenHeartbeat | None, patience: Patience) -> datetime | None:
    """The time from which an allocation cannot be running on a silent node any more; None if that is unknown."""
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
    """The seconds until the work of a silent node may be started elsewhere; infinite without a run-lease.

    The database's clock may jump forward, for instance at a failover. So this process must also have listened for the
    length of the grant by its own clock.
    """
    if standing is Liveness.FENCED:
        return 0.0
    at = gone_at(on_lost, heartbeat, patience)
    if standing is not Liveness.LOST or at is None or heartbeat is None:
        return math.inf
    unwatched_seconds = (at - heartbeat.at).total_seconds() - watched_seconds
    return max(0.0, (at - heartbeat.now).total_seconds(), unwatched_seconds, patience.lost_seconds - calm_seconds)


def requeues(on_lost: OnLost) -> bool:
    """Whether work that is gone with its node is pending again, as after an eviction."""
    return on_lost is not OnLost.FAIL
