"""The hub of agent streams in this process: it follows the change feed and pushes directives to agents.

One feed follower serves all streams. A change that concerns a node goes into the outbox of its stream, and a task that
lives only while the outbox is not empty writes it, so a slow stream delays no other. Outboxes are bounded: on overflow
the outbox is cleared, and the next answer on that stream carries the whole wanted set.

Directives are state, not messages: each carries the revision of its change, and revisions that the stream's last whole
answer already covered are skipped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import grpc
import structlog

from bursar.core.credit.billing_terms import CreditPolicy
from bursar.core.credit.shortfall import Shortfall
from bursar.core.nodes.liveness import Liveness, Patience
from bursar.core.objects.allocation import Phase
from bursar.core.objects.object import Key
from bursar.core.values.refusal import Code, Refusal
from bursar.ops.nodes.liveness import node_alive
from bursar.ops.objects import object as object_ops
from bursar.ops.runtime import metrics
from bursar.ops.runtime.clock import now
from bursar.ops.runtime.feed import FedChange, Feed, FeedLagging
from bursar.ops.runtime.runtime import Runtime
from bursar.rpc.codec import (
    PlacementReport,
    end_directive,
    order_of_change,
    run_directive,
    stop_directive,
)
from bursar.rpc.wipe import wipe_of_change
from bursar.store.db.database import AWAY
from bursar.wire.kinds.settings import SETTINGS_KEY, credit_policy_of, patience_of
from bursar.wire.scheduler.v1 import node_agent_pb2 as pb

log = structlog.get_logger()

Context: TypeAlias = grpc.aio.ServicerContext[pb.HeartbeatRequest, pb.HeartbeatResponse]

OUTBOX_MAX = 256
WAIT_SECONDS = 30.0
AWAY_SECONDS = 0.5
ALIVE_SECONDS = 1.0
SKIPPED_NUMBERS = 60_000_000  # a minute in microseconds
SPREAD_MAX = 1024  # entries before stale ones are swept

SUPERSEDED = Refusal(
    Code.CONFLICT,
    "a newer stream of this node took over",
    "Run one agent per node: if two use the same name, stop one of them.",
)
STOPPING = Refusal(Code.UNAVAILABLE, "this server is stopping", "Connect again: another one takes over.")

_BOUND = frozenset({Phase.SCHEDULED, Phase.RUNNING})


@dataclass(slots=True)
class HeldPlacement:
    """A placement on a stream's node, with its recorded state."""

    key: Key
    epoch: int
    running: bool = False
    frozen: bool = False
    short: Shortfall | None = None
    lease: int = 0  # the lease that pays for it; 0: none
    measured_at: float = float("-inf")  # when its usage was last saved


@dataclass(slots=True, eq=False)
class AgentStream:
    """The stream of one node: its known placements, and its outbox of directives."""

    node: str
    session: str
    context: Context
    task: asyncio.Task[Any]
    places: dict[str, HeldPlacement] = field(default_factory=dict)  # by uid
    unsaid: dict[tuple[str, int], PlacementReport] = field(default_factory=dict)  # not recorded yet
    # Sequence number of lease extensions. It starts at the stream's start in microseconds of the database's clock, and
    # is therefore higher than that of any earlier stream.
    began: int = 0
    nonce: str = ""  # chosen by the agent; lease tokens of this stream contain it
    features: tuple[str, ...] = ()  # of the agent, beyond the oldest protocol
    keys_told: tuple[str, ...] = ()  # ids of the signing keys that the agent trusts
    whole_due: bool = True  # the next answer carries the whole wanted set
    wiping: bool = False  # the agent was directed to wipe its node
    ended: Refusal | None = None
    _since: int = -1  # the revision of the last whole answer
    _held_back: bool = True  # nothing is pushed while a whole answer is being built
    _outbox: dict[str, tuple[int, pb.SchedulingDirective]] = field(default_factory=dict)  # by uid; the newest counts
    _writing: asyncio.Lock = field(default_factory=asyncio.Lock)
    _pusher: asyncio.Task[None] | None = None

    def next_number(self) -> int:
        """The next sequence number of a lease extension."""
        self.began += 1
        return self.began

    def skip_numbers(self) -> None:
        """Skip numbers after a higher one was seen: the database's clock went back, as after a failover."""
        self.began += SKIPPED_NUMBERS

    def knows(self, revision: int) -> bool:
        """Whether the last whole answer covered this revision."""
        return revision <= self._since

    def push(self, revision: int, directive: pb.SchedulingDirective) -> None:
        if self.knows(revision) or self.ended is not None:
            return
        uid = directive.allocation_id
        if len(self._outbox) >= OUTBOX_MAX and uid not in self._outbox:
            self._outbox.clear()
            self.whole_due = True
            return
        self._outbox[uid] = (revision, directive)
        if not self._held_back and self._pusher is None:
            self._pusher = asyncio.create_task(self._push_all(), name="directives")

    def begin_whole(self) -> None:
        """Hold back pushes before the wanted set is read. A later change must not overtake the answer: the agent would
        stop a placement that the complete answer does not name."""
        self.whole_due = False
        self._held_back = True

    async def answer(self, response: pb.HeartbeatResponse, *, since: int | None = None) -> None:
        """Answer a heartbeat; with `since` it is a whole answer of that revision."""
        async with self._writing:
            if since is not None:
                self._since, self._held_back = since, False
                self._outbox = {uid: one for uid, one in self._outbox.items() if one[0] > since}
            self._forget_past(response.acknowledgements)
            response.directives.extend(self._take())
            await self.context.write(response)

    def end(self, why: Refusal) -> None:
        """End the stream with this status, whatever it is doing."""
        if self.ended is None:
            self.ended = why
            self.task.cancel()

    def close(self) -> None:
        if self._pusher is not None:
            self._pusher.cancel()

    async def _push_all(self) -> None:
        """Write the outbox until it is empty. A failed write means that the stream has ended, which its reader sees."""
        try:
            while self._outbox and not self._held_back:
                async with self._writing:
                    if not self._held_back and (directives := self._take()):
                        await self.context.write(pb.HeartbeatResponse(directives=directives))
        except Exception as error:
            log.debug("stream_write_failed", message="a stream cannot be written to", node=self.node, error=repr(error))
        finally:
            self._pusher = None

    def _take(self) -> list[pb.SchedulingDirective]:
        if not self._outbox:
            return []
        taken = [directive for _, directive in self._outbox.values()]
        self._outbox.clear()
        metrics.AGENT_DIRECTIVES.inc(len(taken))
        return taken

    def _forget_past(self, past: Iterable[pb.Acknowledgement]) -> None:
        """Drop directives for placements that the same answer acknowledges: they would start again."""
        for one in past:
            waiting = self._outbox.get(one.allocation_id)
            if waiting is not None and waiting[1].epoch == one.epoch:
                del self._outbox[one.allocation_id]


class Hub:
    """The streams of this process, by node."""

    def __init__(self, runtime: Runtime, feed: Feed) -> None:
        self._runtime = runtime
        self._feed = feed
        self._streams: dict[str, AgentStream] = {}
        self._arriving: set[AgentStream] = set()  # not admitted yet
        # Nodes of multi-node work, by uid: once it is pending again, its status no longer names them.
        self._spread: dict[str, tuple[str, ...]] = {}
        self._spread_max = SPREAD_MAX
        # Tenant uids by name, as of the change that is being processed: names may be reused later.
        self._tenant_uids: dict[str, str] = {}
        self._followed = asyncio.Event()
        self._follower: asyncio.Task[None] | None = None
        self._returning: set[str] = set()
        self._reviving: asyncio.Task[None] | None = None
        self._closed = False
        self.patience = Patience()
        self.credits = CreditPolicy()

    @property
    def nodes(self) -> Collection[str]:
        return self._streams.keys()

    async def enter(self, stream: AgentStream) -> None:
        """Register an arriving stream, and start following the feed."""
        self._arriving.add(stream)
        if self._closed:
            stream.end(STOPPING)
        elif self._follower is None or self._follower.done():
            self._follower = asyncio.create_task(self._follow_for_ever(), name="hub")
        await self._followed.wait()

    def take_over(self, stream: AgentStream) -> None:
        """After its first recorded heartbeat the stream replaces an older stream of the node. Not earlier: a revoked
        certificate must not end a valid stream. The wanted set is read after this, and changes are pushed from now on,
        so that no change is missed."""
        self._arriving.discard(stream)
        older = self._streams.get(stream.node)
        self._streams[stream.node] = stream
        metrics.AGENT_STREAMS.set(len(self._streams))
        if older is not None:
            older.end(SUPERSEDED)

    def leave(self, stream: AgentStream) -> None:
        self._arriving.discard(stream)
        if self._streams.get(stream.node) is stream:
            del self._streams[stream.node]
            metrics.AGENT_STREAMS.set(len(self._streams))
        stream.close()

    def heard(self, node: str, standing: str) -> None:
        """A node that was not Ready sent a heartbeat; nodes that return together are recorded in one batch."""
        if standing == Liveness.READY or self._closed:
            return
        self._returning.add(node)
        if self._reviving is None:
            self._reviving = asyncio.create_task(self._revive(), name="nodes-alive")

    def spread(self, uid: str, nodes: Collection[str]) -> None:
        if len(nodes) > 1:
            if len(self._spread) >= self._spread_max:
                self._sweep()
            self._spread[uid] = tuple(nodes)

    def _sweep(self) -> None:
        """Remove entries of allocations that no stream of this process holds."""
        held = {uid for stream in self._streams.values() for uid in stream.places}
        self._spread = {uid: nodes for uid, nodes in self._spread.items() if uid in held}
        self._spread_max = max(SPREAD_MAX, 2 * len(self._spread))

    async def close(self) -> None:
        self._closed = True
        streams = [*self._streams.values(), *self._arriving]
        for stream in streams:
            stream.end(STOPPING)
        await asyncio.gather(*(one.task for one in streams), return_exceptions=True)
        for task in (self._follower, self._reviving):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    async def _revive(self) -> None:
        try:
            while self._returning:
                names, self._returning = sorted(self._returning), set()
                try:
                    await node_alive(self._runtime, names)
                except Exception as error:
                    # The next heartbeats try again.
                    log.warning(
                        "liveness_write_failed", message="the heartbeats of nodes cannot be recorded",
                        nodes=len(names), error=repr(error),
                    )  # fmt: skip
                    await asyncio.sleep(ALIVE_SECONDS)
        finally:
            self._reviving = None

    # The change feed.

    async def _follow_for_ever(self) -> None:
        """Follow the feed while there are streams. After a gap every stream gets its whole wanted set."""
        while self._streams or self._arriving:
            try:
                await self._follow()
            except FeedLagging:
                log.warning(
                    "streams_resynced", message="the change feed was lost: every stream gets its wanted set again",
                    streams=len(self._streams),
                )  # fmt: skip
            except AWAY as error:
                log.info("streams_waiting", message="the streams wait for the database", error=repr(error))
                await asyncio.sleep(AWAY_SECONDS)
            except Exception:
                log.exception("feed_following_failed", message="the streams cannot follow the change feed")
                await asyncio.sleep(AWAY_SECONDS)

    async def _follow(self) -> None:
        follower = await self._feed.follow("")
        for stream in self._streams.values():
            stream.whole_due = True
        try:
            await self._read_settings()
            await self._read_tenants()
            self._followed.set()
            while self._streams or self._arriving:
                for fed in await follower.wait(WAIT_SECONDS):
                    self._take(fed)
        finally:
            self._followed.clear()
            self._spread.clear()
            self._feed.leave(follower)

    def _take(self, fed: FedChange) -> None:
        try:
            match fed.change.key.kind:
                case "Allocation":
                    self._take_allocation(fed)
                case "Node":
                    self._take_node(fed)
                case "Settings":
                    self._take_settings(fed.change.doc)
                case "Tenant" if fed.change.type == "DELETED":
                    self._tenant_uids.pop(fed.change.key.name, None)
                case "Tenant":
                    self._tenant_uids[fed.change.key.name] = fed.change.uid
        except Exception:
            # One bad change must not block the others: its nodes get their whole wanted set instead.
            log.exception("change_push_failed", message="a change cannot be sent to its nodes", key=fed.change.key)
            named = {fed.change.key.name} if fed.change.key.kind == "Node" else set[str]()
            for node in {*named, *fed.nodes, *fed.before_nodes, *self._spread.get(fed.change.uid, ())}:
                if stream := self._streams.get(node):
                    stream.whole_due = True

    def _take_node(self, fed: FedChange) -> None:
        stream = self._streams.get(fed.change.key.name)
        if stream is None:
            return
        if fed.change.type == "DELETED":
            stream.end(not_registered(fed.change.key.name))
        elif wipe := wipe_of_change(fed.change):
            stream.wiping = True
            stream.push(fed.change.revision, wipe)
        elif stream.wiping:
            # The wipe is over or was confirmed by hand: a whole answer stops a hook that still runs.
            stream.wiping, stream.whole_due = False, True

    def _take_allocation(self, fed: FedChange) -> None:
        if fed.change.type == "ADDED":
            return
        before = fed.before_fields or {}
        phase, first = fed.fields.get("status.phase"), fed.fields.get("spec.nodeName")
        if fed.change.type == "DELETED" or not first:
            if before.get("spec.nodeName"):
                self._gone(fed, before["spec.nodeName"])
        elif phase == Phase.TERMINATING:
            self._stop(fed)
        elif phase in _BOUND and not before.get("spec.nodeName"):
            self._run(fed)

    def _run(self, fed: FedChange) -> None:
        here = [self._streams[node] for node in fed.nodes if node in self._streams]
        if not here:
            return
        order = order_of_change(fed.change, self._tenant_uids.get(fed.change.tenant, ""))
        self.spread(order.uid, order.nodes)
        for stream in here:
            if not stream.knows(fed.change.revision):
                stream.places[order.uid] = HeldPlacement(order.key, order.epoch, lease=order.lease_on(stream.node))
                stream.push(fed.change.revision, run_directive(order, stream.node, self.patience.kill_grace_seconds))

    def _stop(self, fed: FedChange) -> None:
        here = [self._streams[node] for node in fed.nodes if node in self._streams]
        if not here:
            return
        order = order_of_change(fed.change)
        self.spread(order.uid, order.nodes)
        for stream in here:
            if stream.node in order.nodes_left and not stream.knows(fed.change.revision):
                stream.places.setdefault(
                    order.uid, HeldPlacement(order.key, order.epoch, lease=order.lease_on(stream.node))
                )
                stream.push(fed.change.revision, stop_directive(order, now()))

    def _gone(self, fed: FedChange, first: str) -> None:
        """The allocation is no longer bound: direct its former nodes to stop it, unless they reported its end."""
        change = fed.change
        for node in self._spread.pop(change.uid, (first,)):
            stream = self._streams.get(node)
            if stream is None or stream.knows(change.revision):
                continue
            if (place := stream.places.pop(change.uid, None)) is not None:
                stream.push(
                    change.revision, end_directive(change.uid, place.epoch, "Released", "it is no longer placed here")
                )

    async def _read_settings(self) -> None:
        stored = await object_ops.get(self._runtime, SETTINGS_KEY)
        if not isinstance(stored, Refusal):
            with suppress(ValueError):
                self._take_settings(stored.doc)

    async def _read_tenants(self) -> None:
        async with self._runtime.database.reader() as db:
            tree = await self._runtime.trees.refresh(db)
        self._tenant_uids = {one.name: one.uid for one in tree.tenants.values()}

    def _take_settings(self, doc: bytes) -> None:
        self.patience, self.credits = patience_of(doc), credit_policy_of(doc)


def not_registered(node: str) -> Refusal:
    return Refusal(Code.FORBIDDEN, f"node {node!r} does not exist", f"Enrol it: bursar node token --name {node}")
