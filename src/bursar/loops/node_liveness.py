"""Watching over nodes: who falls silent is NotReady, then Lost; what becomes of the work of those that are gone.

Each second all nodes are looked at in one statement, which names only those that are silent or were said to be. Any
number of controllers may run this: everything is judged again where it is committed, and doing it twice is harmless.
Nodes that are heard again are Ready at once by whoever heard them; those that were missed are welcomed here.
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
# Whoever has not looked for so long was away itself, and knows nothing of what happened meanwhile.
GAP_SECONDS_MAX = 10.0
# The database's clock goes as ours does. Where it jumped further, as when another database took over, what it says of
# the time before is not comparable with what it says now.
JUMP_SECONDS_MAX = 2.0
# The work of a node that is gone is looked at again now and then, should anything have been missed.
AGAIN_SECONDS = 30.0
SOON_SECONDS = 3.0  # and where something was refused, as by a full lane, it is tried again


@dataclass(slots=True)
class LivenessWatch:
    """What one controller knows of its own watching: since when it has been there, and since when all is calm. Times
    are those of our own clock, which never jumps."""

    since: float | None = None
    calm_since: float | None = None
    last: float | None = None
    clocks: tuple[datetime, float] | None = None  # the database's and ours, at the last look
    alarm: bool = False
    patience: Patience = Patience()  # noqa: RUF009 - it is frozen
    due: dict[tuple[str, Liveness], float] = field(default_factory=dict)  # when a node's work is looked at again

    def begin(self, now: datetime, at: float) -> None:
        """Note a look: `now` by the database's clock, `at` by ours. After too long a gap, and when the database's clock
        jumped, watching begins anew."""
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
        """The database was away: nobody could be heard."""
        self.since = None

    def watched_seconds(self) -> float:
        return _between(self.since, self.last)

    def calm_seconds(self) -> float:
        return _between(self.calm_since, self.last)

    def hear(self, verdict: LivenessVerdict) -> None:
        """Alarms are told when they begin and when they end; from the last moment of one on, calm begins anew."""
        if verdict.alarm:
            self.calm_since = self.last
        if verdict.alarm is not self.alarm:
            tell = log.error if verdict.alarm else log.info
            what = "many nodes fell silent at once: nothing is given up" if verdict.alarm else "most nodes are heard"
            tell(what, silent=verdict.silent, heartbeating=verdict.heartbeating)
        self.alarm = verdict.alarm


def _between(start: float | None, end: float | None) -> float:
    return end - start if start is not None and end is not None else 0.0


async def run_nodes(runtime: Runtime) -> None:
    """For ever. A database that is away is waited for."""
    watch = LivenessWatch()
    while True:
        try:
            await look_after(runtime, watch)
        except AWAY as error:
            watch.lose()
            log.info("nodes wait for the database", error=repr(error))
        except Exception:
            log.exception("looking after nodes failed")
        await asyncio.sleep(PAUSE_SECONDS)


async def look_after(runtime: Runtime, watch: LivenessWatch) -> LivenessVerdict:
    """One look at all nodes, and everything that follows from it. However long that takes, it is no absence."""
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
    # Those that were lost just now stand as what they were said to be.
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
            # Who is silent for how long is asked by the settings that are in force.
            watch.patience = patience
            look = await store.load_look(db, patience.not_ready_seconds)
    watch.begin(look.now, _time())
    return look


async def _say(runtime: Runtime, watch: LivenessWatch, verdict: LivenessVerdict) -> set[str]:
    """Say what became of nodes; which of them were lost just now."""
    back = [name for name, standing in verdict.transitions if standing is Liveness.READY]
    if back:
        welcomed = await node_alive(runtime, back)
        log.info("nodes are heard again", nodes=_some(welcomed), count=len(welcomed))
    falling = [one for one in verdict.transitions if one[1] is not Liveness.READY]
    if not falling:
        return set()
    why = _alarming(verdict) if verdict.alarm else ""
    replies = await set_readiness(runtime, falling, watch.patience, why)
    done = [one for one, reply in zip(falling, replies, strict=True) if not isinstance(reply, Refusal)]
    for standing in (Liveness.NOT_READY, Liveness.LOST):
        if names := [name for name, now in done if now is standing]:
            log.warning("nodes are silent", standing=str(standing), nodes=_some(names), count=len(names))
    return {name for name, standing in done if standing is Liveness.LOST}


def _alarming(verdict: LivenessVerdict) -> str:
    return f"{verdict.silent} of {verdict.heartbeating} nodes fell silent at once: nothing is given up"


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:10])
    return f"{shown}, …" if len(names) > 10 else shown


async def _settle(runtime: Runtime, watch: LivenessWatch, gone: list[Sighting], now: datetime) -> None:
    """Look at the work of those nodes that are gone where something may be due."""
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
        log.warning("work of lost nodes has ended", count=len(settled.ended))
