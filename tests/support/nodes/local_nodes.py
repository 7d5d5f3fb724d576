"""Simulated nodes inside the test process: they follow the change feed and report through the lanes.

One feed follower serves all nodes, and reports are committed in the lanes' batches. Each start adopts the placed work.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import aclosing

import msgspec

from bursar.commands.command import Written
from bursar.commands.workloads.report import Report
from bursar.core.objects.allocation import Phase
from bursar.core.objects.object import Key, Origin
from bursar.core.values.refusal import Refusal
from bursar.core.values.selector import Op, Selector, SelectorTerm
from bursar.ops.credit.agentless_billing import pay_on
from bursar.ops.objects import object as object_ops
from bursar.ops.runtime.feed import Feed, FeedLagging
from bursar.ops.runtime.lane import Closed, Overloaded
from bursar.ops.runtime.runtime import Runtime
from bursar.ops.scheduling.placement import report
from bursar.sim.drive import Answer, Drive, DriveTrouble, SimPace
from bursar.sim.node import NodeReport, Nodes
from bursar.sim.work import SimDocument, SimStatus, SimWork, places, read_work
from bursar.store.db.database import AWAY, Unavailable
from bursar.store.nodes import node as node_store
from bursar.store.objects import change as change_store
from bursar.store.objects import listing
from bursar.store.objects.change import Change
from bursar.store.objects.listing import Query
from bursar.wire.kinds.allocation import Allocation, gang_of

# Two batches of the lane in flight, and two more behind them.
PACE = SimPace(speakers=4, batch_max=256)
HEARTBEAT_SECONDS = 5.0
AWAY_SECONDS = 0.5
WAIT_SECONDS = 30.0
CATCH_UP = 1000

PLACED = Query(
    "Allocation",
    fields=Selector((SelectorTerm("status.phase", Op.IN, (Phase.RUNNING, Phase.SCHEDULED, Phase.TERMINATING)),)),
)
PASSING = (Unavailable, Overloaded, Closed)

_decode_document = msgspec.json.Decoder(SimDocument).decode
_decode_status = msgspec.json.Decoder(SimStatus).decode
_decode_allocation = msgspec.json.Decoder(Allocation).decode


class LocalNodes:
    """The named nodes, or all; `run` simulates them until cancelled."""

    def __init__(
        self,
        runtime: Runtime,
        nodes: Collection[str] | None = None,
        default_seconds: float | None = None,
        *,
        stop_seconds: float = 0.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._runtime = runtime
        self._names = None if nodes is None else sorted(nodes)
        self._nodes = Nodes(nodes, default_seconds=default_seconds, stop_seconds=stop_seconds)
        self._drive = Drive(self._nodes, self, PACE, clock)
        self._seen: int | None = None  # the last revision read; None: list everything

    @property
    def running(self) -> int:
        return self._nodes.running

    @property
    def ended(self) -> int:
        return self._nodes.ended

    async def run(self) -> None:
        feed = Feed(self._runtime.database)
        self._runtime.on_commit.append(feed.nudge)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._drive.run())
                group.create_task(self._heartbeat())
                group.create_task(self._watch(feed))
        finally:
            self._runtime.on_commit.remove(feed.nudge)
            await feed.close()

    # Allocations.

    async def _watch(self, feed: Feed) -> None:
        while True:
            try:
                if self._seen is None:
                    self._seen = await self._take_over()
                await self._follow(feed, self._seen)
            except FeedLagging:
                continue  # from the last revision read
            except AWAY:
                await asyncio.sleep(AWAY_SECONDS)

    async def _take_over(self) -> int:
        """Adopt the allocations placed on the nodes; returns the revision of the list."""
        found: set[str] = set()
        revision = 0
        reader = self._runtime.database.reader()
        async with reader as db, aclosing(listing.load_all(db, PLACED, CATCH_UP)) as pages:
            async for page in pages:
                revision = page.revision
                for item in page.items:
                    if (work := self._work(item.doc, item.status, item.revision)) is not None:
                        found.add(work.uid)
                        self._drive.see(work)
        self._nodes.keep(found)
        return revision

    async def _follow(self, feed: Feed, seen: int) -> None:
        follower = await feed.follow("Allocation", after=seen)
        try:
            if not await self._catch_up(seen, follower.after):
                self._seen = None
                return
            while True:
                self._take([one.change for one in await follower.wait(WAIT_SECONDS)])
        finally:
            feed.leave(follower)

    async def _catch_up(self, seen: int, until: int) -> bool:
        """Read the changes before the follower; False if they are no longer kept."""
        while seen < until:
            async with self._runtime.database.reader() as db:
                changes = await change_store.load_between(db, seen, until, "Allocation", "", CATCH_UP)
                # Read afterwards: the floor rises before changes are dropped.
                floor = (await change_store.load_position(db)).floor
            if seen < floor:
                return False
            self._take(changes)
            seen = changes[-1].revision if len(changes) == CATCH_UP else until
        self._seen = until
        return True

    def _take(self, changes: Sequence[Change]) -> None:
        for change in changes:
            self._seen = change.revision
            if change.type == "DELETED":
                self._nodes.forget(change.uid)
            elif change.type == "MODIFIED":  # an added allocation is not placed yet
                work = self._work(change.doc, change.status, change.revision, known=self._nodes.knows(change.uid))
                if work is not None:
                    self._drive.see(work)

    def _work(self, doc: bytes, status: bytes, revision: int, *, known: bool = False) -> SimWork | None:
        """The allocation; None if it is on none of the nodes and not known."""
        decoded = _decode_status(status)
        if not known and not self._nodes.ours(places(decoded)):
            return None
        return read_work(_decode_document(doc), decoded, revision, gang=_gang_in(doc))

    # Reports.

    async def say(self, reports: Sequence[NodeReport]) -> list[Answer]:
        commands = (report(self._runtime, _command(one)) for one in reports)
        replies = await asyncio.gather(*commands, return_exceptions=True)
        return [_answer(reply) for reply in replies]

    async def look(self, work: SimWork) -> SimWork | DriveTrouble | None:
        try:
            found = await object_ops.get(self._runtime, Key("Allocation", work.namespace, work.name))
        except PASSING:
            return DriveTrouble.PASSING
        if isinstance(found, Refusal):
            return None
        return self._work(found.doc, found.status, found.revision, known=True)

    async def _heartbeat(self) -> None:
        """Record the heartbeats of all nodes in one statement, and pay for their work."""
        while True:
            try:
                async with self._runtime.database.reader() as db:
                    names = self._names
                    if names is None:
                        names = [row["name"] for row in await db.fetch("SELECT name FROM node ORDER BY name")]
                    await node_store.save_seen(db, names)
                await pay_on(self._runtime, names)
            except AWAY:
                pass
            except PASSING:
                pass  # the next heartbeat tries again
            await asyncio.sleep(HEARTBEAT_SECONDS)


def _command(one: NodeReport) -> Report:
    work = one.work
    return Report(
        key=Key("Allocation", work.namespace, work.name),
        uid=work.uid,
        origin=Origin(f"node:{one.node}", "report"),
        phase=one.phase,
        node=one.node,
        reason=one.reason,
        exit_code=one.exit_code,
        gang=work.gang,
    )


def _answer(reply: object) -> Answer:
    match reply:
        case Written():
            return reply.revision
        case Refusal():
            return DriveTrouble.REFUSED
        case Overloaded() | Unavailable() | Closed():
            return DriveTrouble.PASSING
        case Exception():
            # A failing report does not end the simulation: it is retried a few times.
            return DriveTrouble.REFUSED
    raise AssertionError(f"not an answer to a report: {reply!r}")


def _gang_in(doc: bytes) -> str:
    """The gang of a stored allocation; empty without one."""
    if b"angScheduling" not in doc:
        return ""
    one = _decode_allocation(doc)
    gang = gang_of(one.metadata, one.spec)
    return gang.group_id if gang is not None and gang.min_members > 1 else ""
