"""The scheduler's loop: catch up with what changed, decide, commit; and again as soon as anything changes.

The loop is thin. `core/scheduling/cycle/cycle.py` decides on the leader's copy of the cluster state; the commands
decide again under locks when they commit (optimistic concurrency). While one plan is being committed the next one is
made; rejected bindings are taken out of the cluster state and decided anew.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from time import time

import structlog

from bursar.core.objects.ask import Ask
from bursar.core.objects.pending_reason import UNPAID, PendingReason, ReasonCode
from bursar.core.scheduling.cycle.cycle import decide
from bursar.core.scheduling.cycle.plan import Binding, Plan, Preempting, SchedulingPolicy
from bursar.core.scheduling.explain.wait_stats import WaitStats
from bursar.core.scheduling.state.cluster_state import Blocked, ClusterState
from bursar.core.values.refusal import Code, Refusal
from bursar.loops.budget import run_budgets
from bursar.loops.credit_backoff import Unpaid
from bursar.loops.informer import FeedLost, Informer
from bursar.loops.leader_query import run_answers
from bursar.loops.plan_commands import bind_commands, fail_command, note_command, preempt_command
from bursar.ops.runtime.command import DEPOSED
from bursar.ops.runtime.gc_tuning import calm_collector
from bursar.ops.runtime.runtime import Runtime
from bursar.ops.scheduling.bind import Bind, Bound, bind, note
from bursar.ops.scheduling.commit_worker import CommitWorker
from bursar.ops.scheduling.evict import Preempt, preempt
from bursar.ops.usage.usage_rollup import load_budgets
from bursar.ops.workloads.report import report
from bursar.store.credit.ledger import CHANNEL as CREDIT_CHANNEL
from bursar.store.db.database import AWAY, Connection
from bursar.store.objects.change import CHANNEL

log = structlog.get_logger()

TICK_SECONDS = 1.0
IDLE_SECONDS = 5.0
PACE_SECONDS = 0.02  # between looks that place nothing: in a full cluster a flood of submissions is followed in gulps
HOURS_SECONDS = 10.0  # between looks at what tenants have used of their budgets
NOTES_MAX = 500  # of one tick: in a flood of submissions they are not half of all writes
NOTE_AFTER_SECONDS = 1.0  # what is placed within a second needs no reason why it was not
PLANS_IN_FLIGHT = 4
COMMIT_WORKER_FROM = 64  # allocations of one plan
COMMIT_WORKER_NODES = 256  # of a cluster that has a clerk from the start
PAUSE_SECONDS = 1.0  # before something that was refused is planned again


@dataclass(slots=True)
class Scheduler:
    """One leader at work. `fence` is its term's number, which every commit carries."""

    runtime: Runtime
    fence: int
    policy: SchedulingPolicy = field(default_factory=SchedulingPolicy)
    clock: Callable[[], float] = time
    waits: WaitStats = field(default_factory=WaitStats)
    unpaid: Unpaid = field(default_factory=Unpaid)
    informer: Informer = field(init=False)
    worker: CommitWorker = field(init=False)
    loaded: asyncio.Event = field(default_factory=asyncio.Event)
    idle: asyncio.Event = field(default_factory=asyncio.Event)  # nothing waits, and nothing is being committed
    _given: SchedulingPolicy = field(init=False)  # the policy before the settings of the system are laid over it
    _wake: asyncio.Event = field(default_factory=asyncio.Event)
    _nudged: bool = False  # there may be changes, whether the database told of them yet or not
    _told_revision: int = 0
    _commits: set[asyncio.Task[None]] = field(default_factory=set)
    _deposed: bool = False
    _noting: asyncio.Task[None] | None = None
    _counting: asyncio.Task[None] | None = None
    _noted_at: float = 0.0
    _hours_at: float = 0.0
    _limits_at: float = 0.0

    def __post_init__(self) -> None:
        self.informer = Informer(self.runtime)
        self.worker = CommitWorker(self.runtime)
        self._given = self.policy

    @property
    def cluster(self) -> ClusterState:
        return self.informer.cluster

    def nudge(self) -> None:
        """Something was committed: look now rather than when the database tells."""
        self._nudged = True
        self._wake.set()

    async def run(self) -> None:
        """Until another leads. A database that is away is waited for; a world that lost its place is loaded anew."""
        self.runtime.on_commit.append(self.nudge)
        try:
            while not self._deposed:
                try:
                    await self._follow()
                except AWAY as error:
                    log.info("the scheduler waits for the database", error=repr(error))
                    await asyncio.sleep(0.2)
                except FeedLost as error:
                    log.warning("the scheduler loads its world anew", why=str(error))
        finally:
            self.runtime.on_commit.remove(self.nudge)
            left = [*self._commits, *(one for one in (self._noting, self._counting) if one is not None)]
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)
            await self.worker.dismiss()

    async def _follow(self) -> None:
        await self._finish_commits(0)
        self.loaded.clear()
        self.informer, self._hours_at = Informer(self.runtime), self.clock()
        if await self.informer.count_nodes() >= COMMIT_WORKER_NODES:
            self.worker.call()
        await self.informer.load()
        await self._count_hours(self.informer)
        self.unpaid.restore(self.cluster, self.clock())
        calm_collector()
        self.loaded.set()
        db = await self.runtime.database.connect()
        try:
            await db.add_listener(CHANNEL, lambda *told: self._told(int(told[3])))
            await db.add_listener(CREDIT_CHANNEL, lambda *told: self._told_of_credit(told[3]))
            self._nudged, self._told_revision = True, 0
            while not self._deposed:
                if self._has_news:
                    await self._catch_up(db)
                if not self._has_news:
                    # What the database told meanwhile was among what was read. What else woke us is seen to below.
                    self._wake.clear()
                await self.unpaid.review(db, self.cluster)
                self.policy = replace(self._given, **self.informer.settings)
                await self._tick()
                if not await self._cycle():
                    await self._rest()
        finally:
            with suppress(*AWAY):
                await db.close()

    @property
    def _has_news(self) -> bool:
        return self._nudged or self._told_revision > self.informer.revision or self.informer.is_in_doubt

    async def _catch_up(self, db: Connection) -> None:
        self._nudged = False
        if self.informer.distrusts_limits:
            await self._finish_commits(0)
        await self.informer.catch_up(db)

    def _told(self, revision: int) -> None:
        """The database tells of a change. Of our own we know already."""
        self._told_revision = max(self._told_revision, revision)
        if revision > self.informer.revision:
            self._wake.set()

    def _told_of_credit(self, payload: str) -> None:
        if self.unpaid.tell(payload):
            self._wake.set()

    async def _rest(self) -> None:
        if not self.cluster.waiting and not self._commits:
            self.idle.set()
        seconds = TICK_SECONDS if self.cluster.waiting else IDLE_SECONDS
        try:
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        except TimeoutError:
            self._nudged = True  # should nobody have told us

    async def _cycle(self) -> bool:
        """Decide and start to commit; whether there is more to decide at once."""
        if not self.cluster.waiting:
            return False
        self.idle.clear()
        plan = decide(self.cluster, self.policy, self.clock())
        # What is being failed is left alone until that has ended: its changes wait for the end of all its commits, and
        # commits without a gap between them would keep it here for as long as others keep us busy.
        plan.failed = [(ask, reason) for ask, reason in plan.failed if ask.uid not in self.informer.committing]
        if plan.bindings or plan.preemptions or plan.failed:
            self._commit(plan)
        elif not plan.more:
            await asyncio.sleep(PACE_SECONDS)
        await self._finish_commits(PLANS_IN_FLIGHT if plan.more else PLANS_IN_FLIGHT + 1)
        return plan.more

    # Committing.

    def _commit(self, plan: Plan) -> None:
        uids = [ask.uid for binding in plan.bindings for ask, _ in binding.members]
        uids += [ask.uid for one in plan.preemptions for ask in one.asks]
        uids += [victim.uid for one in plan.preemptions for victim in one.victims]
        uids += [ask.uid for ask, _ in plan.failed]
        self.informer.committing.update(uids)
        # As commands now: they name the nodes as they were when this was decided.
        binds = bind_commands(self.cluster, plan.bindings, self.fence)
        preempts = [preempt_command(self.cluster, one, self.fence, self.policy) for one in plan.preemptions]
        task = asyncio.create_task(self._save(plan, binds, preempts, uids), name="commit")
        self._commits.add(task)
        task.add_done_callback(self._committed)

    def _committed(self, task: asyncio.Task[None]) -> None:
        self._commits.discard(task)
        self._wake.set()
        if task.cancelled() or (error := task.exception()) is None:
            return
        if isinstance(error, AWAY):
            log.warning("it is not known how much of a plan was committed", error=repr(error))
        else:
            log.error("a plan could not be committed", error=repr(error), exc_info=error)

    async def _finish_commits(self, at_most: int) -> None:
        while len(self._commits) > at_most:
            await asyncio.wait(self._commits, return_when=asyncio.FIRST_COMPLETED)

    async def _save(self, plan: Plan, binds: Sequence[Bind], preempts: Sequence[Preempt], uids: Sequence[str]) -> None:
        try:
            # Evictions first: whoever waits for them waits longest. Should one of these fail, the others are waited for
            # all the same: what comes back must find the world that it was decided in.
            done = await asyncio.gather(
                self._save_preemptions(plan.preemptions, preempts),
                self._save_bindings(plan.bindings, binds),
                self._fail(plan.failed),
                return_exceptions=True,
            )
            for error in done:
                if error is not None:
                    raise error
        except BaseException:
            # Nobody knows how much of it was committed.
            self.informer.lost = True
            raise
        finally:
            self._settle(uids)

    def _settle(self, uids: Sequence[str]) -> None:
        try:
            self.informer.settle(uids)
        except FeedLost as error:
            log.info("what happened meanwhile cannot be told", why=str(error))
            self.informer.lost = True

    async def _save_bindings(self, bindings: Sequence[Binding], commands: Sequence[Bind]) -> None:
        heard = self.unpaid.heard
        replies = await self._bind(commands)
        informer, now = self.informer, self.clock()
        for binding, reply in zip(bindings, replies, strict=True):
            if isinstance(reply, Refusal):
                self._take_back(binding, reply, heard)
                continue
            self.cluster.probes.paid(binding.members[0][0])
            for (ask, _), revision in zip(binding.members, reply, strict=True):
                informer.committed(ask.uid, revision)
                informer.noted.pop(ask.uid, None)
                if ask.uid in informer.returned:
                    informer.returned.discard(ask.uid)
                    self.waits.bound_again(now)
                else:
                    self.waits.bound(ask.queue, ask.submitted_at, now)

    async def _bind(self, commands: Sequence[Bind]) -> list[Bound]:
        """Here, or by the clerk where there is much of it: so much is worth a process of its own, and the detour."""
        if sum(len(command.members) for command in commands) < COMMIT_WORKER_FROM:
            return await bind(self.runtime, commands)
        self.worker.call()
        return await self.worker.bind(commands)

    def _take_back(self, binding: Binding, refusal: Refusal, heard: int) -> None:
        """It waits again, and whatever proved wrong about the world is read before the next plan."""
        self._deposed |= refusal == DEPOSED
        unpaid = PendingReason.unpaid(refusal)
        log.info("a placement came back", code=str(refusal.code), message=refusal.message)
        for ask, spots in binding.members:
            # Its node may be gone, and its place with it; it waits all the same.
            if ask.uid not in self.cluster.waiting:
                self.cluster.unassume(ask)
            if unpaid is not None:
                continue  # its nodes are as they seemed
            for spot in spots:
                self.informer.distrust_node(self.cluster.fleet.names[spot.row])
        if unpaid is not None:
            self._wait_for_credit([ask for ask, _ in binding.members], unpaid, refusal, heard)
            return
        if refusal.code is Code.QUOTA_EXCEEDED:
            self.informer.distrust_limits()
        if refusal.code is not Code.STALE:
            self._pause(binding)

    def _wait_for_credit(
        self, asks: Sequence[Ask], reason: PendingReason, refusal: Refusal, heard: int, *, keep: bool = False
    ) -> None:
        seconds = refusal.retry_after_seconds or self.policy.quota_backoff_seconds
        self.unpaid.wait(self.cluster, asks, reason, self.clock() + seconds, heard, keep=keep)

    def _pause(self, binding: Binding) -> None:
        """Read the database's figures before it is tried again: then they say why it waits. Not in a tight loop."""
        until = self.clock() + PAUSE_SECONDS
        for ask, _ in binding.members:
            key = self.cluster.unit_key(ask.uid)
            self.cluster.blocked[key] = Blocked(PendingReason(ReasonCode.NOT_TRIED), 0, 0, until, firm=True)

    async def _save_preemptions(self, preemptions: Sequence[Preempting], commands: Sequence[Preempt]) -> None:
        heard = self.unpaid.heard
        for one, reply in zip(preemptions, await preempt(self.runtime, commands), strict=True):
            if isinstance(reply, Refusal):
                self._deposed |= reply == DEPOSED
                log.info("a preemption came back", code=str(reply.code), message=reply.message)
                self.informer.lost = True
                if (unpaid := PendingReason.unpaid(reply)) is not None:
                    self._wait_for_credit(one.asks, unpaid, reply, heard, keep=True)
            else:
                for _ in one.victims:
                    self.waits.preempted(self.clock())

    async def _fail(self, failed: Sequence[tuple[Ask, PendingReason]]) -> None:
        commands = [fail_command(ask, reason, self.fence) for ask, reason in failed]
        for reply in await asyncio.gather(*(report(self.runtime, command) for command in commands)):
            if isinstance(reply, Refusal):
                self._deposed |= reply == DEPOSED
                log.info("a gang's member could not be failed", code=str(reply.code), message=reply.message)

    # Now and then.

    async def _tick(self) -> None:
        if self.informer.lost:
            raise FeedLost("a commit ended otherwise than planned")
        now = self.clock()
        due = now - self._hours_at >= HOURS_SECONDS or self.informer.lacks_hours
        if due and (self._counting is None or self._counting.done()):
            self._hours_at = now
            self._counting = asyncio.create_task(self._count_hours(self.informer), name="hours")
        if now - self._limits_at >= self.policy.quota_backoff_seconds:
            # What a part of a node was when it was bound is not known for ever: forecasts drift.
            self._limits_at = now
            if any(one.reason.why is ReasonCode.QUOTA_EXCEEDED for one in self.cluster.blocked.values()):
                self.informer.distrust_limits()
        if now - self._noted_at >= TICK_SECONDS and (self._noting is None or self._noting.done()):
            self._noted_at = now
            if news := self._news(now):
                # By themselves: nothing that can run waits for them.
                self._noting = asyncio.create_task(self._note(self.informer, news), name="notes")

    async def _count_hours(self, informer: Informer) -> None:
        """What tenants have used of their budgets. No plan waits for it: until it is known, what was known counts."""
        try:
            async with self.runtime.database.reader() as db:
                tree = await self.runtime.trees.refresh(db)
                used = await load_budgets(db, tree, past=self.runtime.past_hours)
        except AWAY as error:
            log.info("hours could not be counted", error=repr(error))
            return
        informer.set_hours({name: (one.gpu_hours, one.node_hours) for name, one in used.items()})

    async def _note(self, informer: Informer, news: Sequence[tuple[Ask, PendingReason]]) -> None:
        """Store why things wait, where that is not what is stored."""
        commands = [note_command(self.cluster.limits.tree, ask, reason, self.fence) for ask, reason in news]
        try:
            replies = await note(self.runtime, commands)
        except AWAY as error:
            log.info("reasons could not be stored", error=repr(error))
            return
        for command, reply in zip(commands, replies, strict=True):
            if isinstance(reply, Refusal):
                self._deposed |= reply == DEPOSED
            elif command.uid in informer.noted:
                informer.noted[command.uid] = command.reason

    def _news(self, now: float) -> Sequence[tuple[Ask, PendingReason]]:
        """Why things wait that have waited for a while, where another reason is stored: so many of them at a time."""
        informer, ripe = self.informer, now - NOTE_AFTER_SECONDS
        found = (
            (ask, reason)
            for ask, reason in self._reasons()
            if ask.submitted_at <= ripe
            and ask.uid not in informer.committing
            and informer.noted.get(ask.uid) != reason.code
        )
        return list(islice(found, NOTES_MAX))

    def _reasons(self) -> Iterator[tuple[Ask, PendingReason]]:
        """Of what waits: that room is being made for it, or what those that are alike wait for."""
        cluster = self.cluster
        for uid, nomination in cluster.nominated.items():
            if uid in cluster.waiting:
                yield cluster.waiting[uid].members[uid], PendingReason(ReasonCode.PREEMPTING, until=nomination.until)
        for group in cluster.groups.values():
            blocked = cluster.blocked.get(cluster.unit_of(group))
            if blocked is not None and (not blocked.firm or blocked.reason.why in UNPAID):
                yield from ((ask, blocked.reason) for uid, ask in group.members.items() if uid not in cluster.nominated)


async def run_schedule(runtime: Runtime, fence: int, *, policy: SchedulingPolicy | None = None) -> None:
    """Schedule, answer what is asked about it, and watch over budgets, for as long as we lead."""
    one = Scheduler(runtime, fence, policy or SchedulingPolicy())
    answers = run_answers(
        runtime, lambda: one.cluster if one.loaded.is_set() else None, lambda: one.policy, one.clock, one.waits,
        lambda: one.informer.revision, fence,
    )  # fmt: skip
    beside = [
        asyncio.create_task(answers, name="answers"),
        asyncio.create_task(run_budgets(runtime, fence), name="budgets"),
    ]
    try:
        await one.run()
    finally:
        for task in beside:
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)
