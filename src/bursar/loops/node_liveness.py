"""Node liveness: silent nodes become NotReady, then Lost, and the work of lost nodes is ended.

Every second, one statement reads the nodes that are silent or marked so. Any number of controllers may run this: each
transition is decided again when it commits, and is idempotent. The process that receives a heartbeat marks the node
Ready at once; this loop catches those that were missed.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from datetime import datetime

import structlog

from bursar.core.nodes.liveness import Liveness, LivenessVerdict, Patience, Sighting, judge
from bursar.core.values.refusal import Refusal
from bursar.ops.nodes.liveness import node_alive, set_readiness, settle
from bursar.ops.runtime.runtime import Runtime
from bursar.store.db.database import AWAY
from bursar.store.nodes import liveness as store
from bursar.store.nodes.liveness import LivenessLook
from bursar.wire.kinds.settings import patience_of

log = structlog.get_logger()

PAUSE_SECONDS = 1.0
# After a longer gap this process was away itself, and does not know which nodes were silent meanwhile.
GAP_SECONDS_MAX = 10.0
# Both clocks run at the same rate. After a larger jump, as after a failover of the database, earlier timestamps cannot
# be compared with current ones.
JUMP_SECONDS_MAX = 2.0
# The work of a lost node is reviewed periodically, in case anything was missed.
AGAIN_SECONDS = 30.0
SOON_SECONDS = 3.0  # after a refusal, as by a full lane


@dataclass(slots=True)
class LivenessWatch:
    """The observation window of one controller: the start of uninterrupted watching, and of the time without alarms.
    Times are of the monotonic clock."""

    since: float | None = None
    calm_since: float | None = None
    last: float | None = None
    clocks: tuple[datetime, float] | None = None  # of the database and of this process, at the last look
    alarm: bool = False
    patience: Patience = Patience()  # noqa: RUF009 - it is frozen
    due: dict[tuple[str, Liveness], float] = field(default_factory=dict)  # the time of the next review of a node's work

    def begin(self, now: datetime, at: float) -> None:
        """Record a look: `now` by the database's clock, `at` by the own one. After too long a gap, or a jump of the
        database's clock, the observation window starts again."""
        gap = at - self.last if self.last is not None else 0.0
        if self.since is None or gap > GAP_SECONDS_MAX or self._jumped(now, at):
            self.since = self.calm_since = at
        self.last, self.clocks = at, (now, at)

    def _jumped(self, now: datetime, at: float) -> bool:
        if self.clocks is None:
            return False
        before, then = self.clocks
        return abs((now - before).total_seconds() - (at - then)) > JUMP_SECONDS_MAX

    def lose(self) -> None:
        """Reset the window after the database was away, because no heartbeat could be stored."""
        self.since = None

    def watched_seconds(self) -> float:
        return _between(self.since, self.last)

    def calm_seconds(self) -> float:
        return _between(self.calm_since, self.last)

    def hear(self, verdict: LivenessVerdict) -> None:
        """Log the begin and the end of an alarm; the calm time starts again at its last moment."""
        if verdict.alarm:
            self.calm_since = self.last
        if verdict.alarm is not self.alarm:
            counts = {"silent": verdict.silent, "heartbeating": verdict.heartbeating}
            if verdict.alarm:
                log.error("nodes_alarm_raised", message="too many nodes are silent at once; no work is ended", **counts)
            else:
                log.info("nodes_alarm_cleared", message="most nodes send heartbeats again", **counts)
        self.alarm = verdict.alarm


def _between(start: float | None, end: float | None) -> float:
    return end - start if start is not None and end is not None else 0.0


async def run_nodes(runtime: Runtime) -> None:
    """Run forever; wait while the database is away."""
    watch = LivenessWatch()
    while True:
        try:
            await look_after(runtime, watch)
        except AWAY as error:
            watch.lose()
            log.info("node_liveness_waits", message="node liveness waits for the database", error=repr(error))
        except Exception:
            log.exception("node_liveness_failed", message="node liveness failed and is tried again")
        await asyncio.sleep(PAUSE_SECONDS)


async def look_after(runtime: Runtime, watch: LivenessWatch) -> LivenessVerdict:
    """Review all nodes once and act on it. The time that acting takes does not count as a gap."""
    look = await _look(runtime, watch)
    try:
        return await _act(runtime, watch, look)
    finally:
        watch.last = _time()


def _time() -> float:
    return asyncio.get_running_loop().time()


async def _act(runtime: Runtime, watch: LivenessWatch, look: LivenessLook) -> LivenessVerdict:
    verdict = judge(
        look.sightings,
        look.heard,
        watched_seconds=watch.watched_seconds(),
        calm_seconds=watch.calm_seconds(),
        patience=watch.patience,
    )
    watch.hear(verdict)
    said = await _say(runtime, watch, verdict)
    gone = [one for one in look.sightings if one.standing.gone and not one.heard_since]
    # Nodes that were just marked Lost count as Lost.
    gone += [
        Sighting(one.node, Liveness.LOST, one.heartbeat, one.heartbeat.at if one.heartbeat else None)
        for one in look.sightings
        if one.node in said
    ]
    await _settle(runtime, watch, gone, look.now)
    return verdict


async def _look(runtime: Runtime, watch: LivenessWatch) -> LivenessLook:
    async with runtime.database.reader() as db:
        look = await store.load_look(db, watch.patience.not_ready_seconds)
        patience = patience_of(look.settings) if look.settings else Patience()
        if patience != watch.patience:
            # Read again with the patience that is in force.
            watch.patience = patience
            look = await store.load_look(db, patience.not_ready_seconds)
    watch.begin(look.now, _time())
    return look


async def _say(runtime: Runtime, watch: LivenessWatch, verdict: LivenessVerdict) -> set[str]:
    """Commit the transitions of nodes; return those that were just marked Lost."""
    back = [name for name, standing in verdict.transitions if standing is Liveness.READY]
    if back:
        welcomed = await node_alive(runtime, back)
        log.info("nodes_returned", message="nodes send heartbeats again", nodes=_some(welcomed), count=len(welcomed))
    falling = [one for one in verdict.transitions if one[1] is not Liveness.READY]
    if not falling:
        return set()
    why = _alarming(verdict) if verdict.alarm else ""
    replies = await set_readiness(runtime, falling, watch.patience, why)
    done = [one for one, reply in zip(falling, replies, strict=True) if not isinstance(reply, Refusal)]
    for standing in (Liveness.NOT_READY, Liveness.LOST):
        if names := [name for name, now in done if now is standing]:
            log.warning(
                "nodes_silent",
                message="nodes send no heartbeats",
                standing=str(standing),
                nodes=_some(names),
                count=len(names),
            )
    return {name for name, standing in done if standing is Liveness.LOST}


def _alarming(verdict: LivenessVerdict) -> str:
    away = f"{verdict.silent} of {verdict.heartbeating} nodes lost contact at once"
    return f"{away}: their work is kept (likely a network fault)"


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:10])
    return f"{shown}, …" if len(names) > 10 else shown


async def _settle(runtime: Runtime, watch: LivenessWatch, gone: list[Sighting], now: datetime) -> None:
    """End the work of lost nodes where that is due."""
    keys = {(one.node, one.standing) for one in gone}
    watch.due = {key: at for key, at in watch.due.items() if key in keys}
    looked_at = _time()
    due = [one for one in gone if watch.due.get((one.node, one.standing), looked_at) <= looked_at]
    if not due:
        return
    settled = await settle(
        runtime, due, watch.patience, calm_seconds=watch.calm_seconds(), watched_seconds=watch.watched_seconds()
    )
    for one in due:
        at = settled.next_at.get(one.node)
        left = AGAIN_SECONDS if at is None else min(AGAIN_SECONDS, (at - now).total_seconds())
        watch.due[one.node, one.standing] = looked_at + (SOON_SECONDS if one.node in settled.unsettled else left)
    if settled.ended:
        log.warning("lost_work_ended", message="work on lost nodes was ended", count=len(settled.ended))
