"""Which streams this process holds, and what is pushed on them.

One follower of the feed serves all streams, whatever their number: what concerns a node goes into its stream's outbox,
and is written by a task that lives only while there is something to write. So a slow stream makes nobody wait. An
outbox is bounded: one that runs over is emptied, and the next answer on that stream names everything that is wanted.

What a node was told is state, not messages: a directive has the revision of the change that it is of, and those that
the stream's last whole answer already knew are passed over.
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
    Spoken,
    end_directive,
    order_of_change,
    run_directive,
    stop_directive,
)
from bursar.rpc.wipe import wipe_of_change
from bursar.store.db.database import AWAY
from bursar.wire.kinds.settings import SYSTEM, credit_policy_of, patience_of
from bursar.wire.scheduler.v1 import node_agent_pb2 as pb

log = structlog.get_logger()

Context: TypeAlias = grpc.aio.ServicerContext[pb.HeartbeatRequest, pb.HeartbeatResponse]

OUTBOX_MAX = 256
WAIT_SECONDS = 30.0
AWAY_SECONDS = 0.5
ALIVE_SECONDS = 1.0
SKIPPED_NUMBERS = 60_000_000  # a minute of them
SPREAD_MAX = 1024  # after so many it is looked which are of the past

SUPERSEDED = Refusal(
    Code.CONFLICT,
    "a younger stream of this node took over",
    "One agent per node: if two use the same name, stop one of them.",
)
STOPPING = Refusal(Code.UNAVAILABLE, "this server is stopping", "Connect again: another one takes over.")

_BOUND = frozenset({Phase.SCHEDULED, Phase.RUNNING})


@dataclass(slots=True)
class HeldPlacement:
    """A placement that its node knows of, as far as this stream has heard."""

    key: Key
    epoch: int
    running: bool = False  # it is known that it runs
    frozen: bool = False  # that it stands still is recorded
    short: Shortfall | None = None  # that no more of its time is paid for is recorded
    lease: int = 0  # what pays for it; 0 where nobody does
    measured_at: float = float("-inf")  # when its use was last saved


@dataclass(slots=True, eq=False)
class AgentStream:
    """One node's stream: what it was told, and what it is still to be told."""

    node: str
    session: str
    context: Context
    task: asyncio.Task[Any]
    places: dict[str, HeldPlacement] = field(default_factory=dict)  # by uid
    unsaid: dict[tuple[str, int], Spoken] = field(default_factory=dict)  # what could not be recorded yet
    # Beats of leases are numbered from when the stream began, in microseconds of the database's clock: higher than
    # those of any earlier stream, which did not beat once a microsecond.
    began: int = 0
    nonce: str = ""  # the agent's own word for it: what is signed names it
    features: tuple[str, ...] = ()  # what the agent can do that older ones cannot
    keys_told: tuple[str, ...] = ()  # by which the agent believes what is signed
    whole_due: bool = True  # whether the next answer names everything that is wanted
    wiping: bool = False  # whether it was told to wipe its node
    ended: Refusal | None = None
    _since: int = -1  # the revision of the last whole answer
    _held_back: bool = True  # while a whole answer is being made, the first one too, nothing is pushed
    _outbox: dict[str, tuple[int, pb.SchedulingDirective]] = field(default_factory=dict)  # by uid: the newest counts
    _writing: asyncio.Lock = field(default_factory=asyncio.Lock)
    _pusher: asyncio.Task[None] | None = None

    def next_number(self) -> int:
        """Of a beat of leases."""
        self.began += 1
        return self.began

    def skip_numbers(self) -> None:
        """Somebody was further: the database's clock has gone back, as when another takes its place."""
        self.began += SKIPPED_NUMBERS

    def knows(self, revision: int) -> bool:
        """Whether the last whole answer was of this revision or a later one."""
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
        """What is wanted is about to be read. What changes from then on must not overtake the answer, which does not
        name it: the agent would stop it again."""
        self.whole_due = False
        self._held_back = True

    async def answer(self, response: pb.HeartbeatResponse, *, since: int | None = None) -> None:
        """Answer a beat; with `since` it is a whole answer of that revision."""
        async with self._writing:
            if since is not None:
                self._since, self._held_back = since, False
                self._outbox = {uid: one for uid, one in self._outbox.items() if one[0] > since}
            self._forget_past(response.acknowledgements)
            response.directives.extend(self._take())
            await self.context.write(response)

    def end(self, why: Refusal) -> None:
        """End it with these words, whatever it is doing."""
        if self.ended is None:
            self.ended = why
            self.task.cancel()

    def close(self) -> None:
        if self._pusher is not None:
            self._pusher.cancel()

    async def _push_all(self) -> None:
        """For as long as there is something to say. Who cannot be written to has left, and its reader knows."""
        try:
            while self._outbox and not self._held_back:
                async with self._writing:
                    if not self._held_back and (directives := self._take()):
                        await self.context.write(pb.HeartbeatResponse(directives=directives))
        except Exception as error:
            log.debug("a stream could not be written to", node=self.node, error=repr(error))
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
        """Nothing is said of what is acknowledged in the same breath: it would be started again."""
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
        self._arriving: set[AgentStream] = set()  # of whom it is not known yet whether they may speak
        # Work on several nodes, by uid: once it waits again, nothing says any more where it was.
        self._spread: dict[str, tuple[str, ...]] = {}
        self._spread_max = SPREAD_MAX
        # By name, as of the change that is being told: changes come in their order, and names are given anew.
        self._tenant_uids: dict[str, str] = {}
        self._followed = asyncio.Event()
        self._follower: asyncio.Task[None] | None = None
        self._returning: set[str] = set()
        self._welcoming: asyncio.Task[None] | None = None
        self._closed = False
        self.patience = Patience()
        self.credits = CreditPolicy()

    @property
    def nodes(self) -> Collection[str]:
        return self._streams.keys()

    async def enter(self, stream: AgentStream) -> None:
        """A stream that may become its node's, for which the feed is followed."""
        self._arriving.add(stream)
        if self._closed:
            stream.end(STOPPING)
        elif self._follower is None or self._follower.done():
            self._follower = asyncio.create_task(self._follow_for_ever(), name="hub")
        await self._followed.wait()

    def take_over(self, stream: AgentStream) -> None:
        """The first beat was heard: this is the node's stream, and the older one that it may have here ends. Not
        before: whoever comes with a certificate that was revoked ends nobody's. What is wanted is read after this, and
        changes are pushed from now on: nothing falls between."""
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
        """A node that was not thought to be ready has spoken. Those who return together are welcomed together."""
        if standing == Liveness.READY or self._closed:
            return
        self._returning.add(node)
        if self._welcoming is None:
            self._welcoming = asyncio.create_task(self._welcome(), name="nodes-alive")

    def spread(self, uid: str, nodes: Collection[str]) -> None:
        if len(nodes) > 1:
            if len(self._spread) >= self._spread_max:
                self._sweep()
            self._spread[uid] = tuple(nodes)

    def _sweep(self) -> None:
        """What none of these streams knows is told to nobody: its end came before its beginning, or its nodes left."""
        held = {uid for stream in self._streams.values() for uid in stream.places}
        self._spread = {uid: nodes for uid, nodes in self._spread.items() if uid in held}
        self._spread_max = max(SPREAD_MAX, 2 * len(self._spread))

    async def close(self) -> None:
        self._closed = True
        streams = [*self._streams.values(), *self._arriving]
        for stream in streams:
            stream.end(STOPPING)
        await asyncio.gather(*(one.task for one in streams), return_exceptions=True)
        for task in (self._follower, self._welcoming):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    async def _welcome(self) -> None:
        try:
            while self._returning:
                names, self._returning = sorted(self._returning), set()
                try:
                    await node_alive(self._runtime, names)
                except Exception as error:
                    # Their next beats say it again.
                    log.warning("nodes could not be said to be alive", nodes=len(names), error=repr(error))
                    await asyncio.sleep(ALIVE_SECONDS)
        finally:
            self._welcoming = None

    # What happens.

    async def _follow_for_ever(self) -> None:
        """While there are any. Whenever something may have been missed, every stream is told everything."""
        while self._streams or self._arriving:
            try:
                await self._follow()
            except FeedLagging:
                log.warning("the streams fell behind the feed", streams=len(self._streams))
            except AWAY as error:
                log.info("the streams wait for the database", error=repr(error))
                await asyncio.sleep(AWAY_SECONDS)
            except Exception:
                log.exception("following the feed failed")
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
            # One change that cannot be told must not keep the others back: its nodes are told everything instead.
            log.exception("a change could not be told", key=fed.change.key)
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
            # It is wiped, or somebody said so: then others' work may be there soon, and no hook may still be at it.
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
        """It is bound nowhere any more. Its nodes have said so themselves, or somebody else has: then they must hear
        of it."""
        change = fed.change
        for node in self._spread.pop(change.uid, (first,)):
            stream = self._streams.get(node)
            if stream is None or stream.knows(change.revision):
                continue
            if (place := stream.places.pop(change.uid, None)) is not None:
                stream.push(change.revision, end_directive(change.uid, place.epoch, "Released", "it is bound no more"))

    async def _read_settings(self) -> None:
        stored = await object_ops.get(self._runtime, Key("Settings", "", SYSTEM))
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
    return Refusal(Code.FORBIDDEN, f"there is no node {node!r}", f"Enrol it: bursar node token --name {node}")
