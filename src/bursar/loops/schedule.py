"""The scheduler's loop: catch up with what changed, decide, commit; and again as soon as anything changes.

The loop is thin. `core/scheduling/cycle/cycle.py` decides on the leader's copy of the cluster state; the commands
decide again under locks when they commit (optimistic concurrency). While one plan is being committed the next one is
made; rejected bindings are taken out of the cluster state and decided again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from time import time

import structlog

from bursar.commands.command import DEPOSED
from bursar.commands.scheduling.bind import Bind
from bursar.commands.scheduling.evict import Preempt
from bursar.core.objects.ask import Ask
from bursar.core.objects.pending_reason import UNPAID, PendingReason, ReasonCode
from bursar.core.scheduling.cycle.cycle import decide
from bursar.core.scheduling.cycle.plan import Binding, Plan, Preempting, SchedulingPolicy
from bursar.core.scheduling.explain.wait_stats import WaitStats
from bursar.core.scheduling.state.cluster_state import ClusterState
from bursar.core.scheduling.state.scheduler_memory import Blocked
from bursar.core.values.refusal import Code, Refusal
from bursar.loops.budget import run_budgets
from bursar.loops.credit_backoff import Unpaid
from bursar.loops.informer import FeedLost, Informer
from bursar.loops.leader_query import run_answers
from bursar.loops.quota_warning import run_quota_warnings
from bursar.ops.runtime.gc_tuning import calm_collector
from bursar.ops.runtime.runtime import Runtime
from bursar.ops.scheduling.commit_worker import CommitWorker
from bursar.ops.scheduling.placement import Bound, bind, note, preempt, report
from bursar.ops.scheduling.plan_commands import bind_commands, fail_command, note_command, preempt_command
from bursar.ops.usage.usage_rollup import load_budgets
from bursar.store.credit.ledger import CHANNEL as CREDIT_CHANNEL
from bursar.store.db.database import AWAY, Connection
from bursar.store.objects.change import CHANNEL

log = structlog.get_logger()

TICK_SECONDS = 1.0
IDLE_SECONDS = 5.0
PACE_SECONDS = (
    0.02  # between cycles without placements, so that a full cluster handles a flood of submissions in batches
)
HOURS_SECONDS = 10.0  # between reads of the used budgets of tenants
NOTES_MAX = 500  # per tick, so that reasons are no large part of all writes in a flood of submissions
NOTE_AFTER_SECONDS = 1.0  # work that is placed within a second needs no pending reason
PLANS_IN_FLIGHT = 4
COMMIT_WORKER_FROM = 64  # allocations of one plan
COMMIT_WORKER_NODES = 256  # nodes from which a commit worker is started at once
PAUSE_SECONDS = 1.0  # before a rejected binding is planned again


@dataclass(slots=True)
class Scheduler:
    """The scheduler of one leader. Every commit carries `fence`, the number of its term."""

    runtime: Runtime
    fence: int
    policy: SchedulingPolicy = field(default_factory=SchedulingPolicy)
    clock: Callable[[], float] = time
    waits: WaitStats = field(default_factory=WaitStats)
    unpaid: Unpaid = field(default_factory=Unpaid)
    informer: Informer = field(init=False)
    worker: CommitWorker = field(init=False)
    loaded: asyncio.Event = field(default_factory=asyncio.Event)
    idle: asyncio.Event = field(default_factory=asyncio.Event)  # nothing is pending, and no commit is in flight
    _given: SchedulingPolicy = field(init=False)  # the policy without the settings of the system
    _wake: asyncio.Event = field(default_factory=asyncio.Event)
    _nudged: bool = False  # there may be changes without a notification of the database
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
        """Read changes now, because something was committed, without waiting for the notification."""
        self._nudged = True
        self._wake.set()

    async def run(self) -> None:
        """Run until another leads; wait while the database is away, and reload when the feed position is lost."""
        self.runtime.on_commit.append(self.nudge)
        try:
            while not self._deposed:
                try:
                    await self._follow()
                except AWAY as error:
                    log.info("scheduler_waits", message="the scheduler waits for the database", error=repr(error))
                    await asyncio.sleep(0.2)
                except FeedLost as error:
                    log.warning(
                        "cluster_state_reloaded",
                        message="the scheduler loads its cluster state again",
                        error=str(error),
                    )
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
                    # Changes notified meanwhile were just read. Other reasons to wake are handled below.
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
        """Handle a notification of a change; own changes are known already."""
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
            self._nudged = True  # in case a notification was missed

    async def _cycle(self) -> bool:
        """Decide and start to commit; true if there is more to decide at once."""
        if not self.cluster.waiting:
            return False
        self.idle.clear()
        plan = decide(self.cluster, self.policy, self.clock())
        # Skip allocations that are being failed already. Their changes are deferred until all their commits end, so
        # commits without a gap would keep them here for as long as other work keeps the loop busy.
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
        # Build the commands now: they name the generations of nodes at the time of the decision.
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
            log.warning(
                "commit_unknown",
                message="the connection was lost, and it is unknown how much of a plan was committed",
                error=repr(error),
            )
        else:
            log.error("commit_failed", message="a plan could not be committed", error=repr(error), exc_info=error)

    async def _finish_commits(self, at_most: int) -> None:
        while len(self._commits) > at_most:
            await asyncio.wait(self._commits, return_when=asyncio.FIRST_COMPLETED)

    async def _save(self, plan: Plan, binds: Sequence[Bind], preempts: Sequence[Preempt], uids: Sequence[str]) -> None:
        try:
            # Evictions first, because preemptors wait longest. If one of these fails, the others are awaited all the
            # same: rejected work must find the cluster state in which it was decided.
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
            # It is unknown how much of it was committed.
            self.informer.lost = True
            raise
        finally:
            self._settle(uids)

    def _settle(self, uids: Sequence[str]) -> None:
        try:
            self.informer.settle(uids)
        except FeedLost as error:
            log.info("changes_lost", message="changes that arrived during a commit cannot be applied", error=str(error))
            self.informer.lost = True

    async def _save_bindings(self, bindings: Sequence[Binding], commands: Sequence[Bind]) -> None:
        heard = self.unpaid.heard
        replies = await self._bind(commands)
        informer, now = self.informer, self.clock()
        for binding, reply in zip(bindings, replies, strict=True):
            if isinstance(reply, Refusal):
                self._take_back(binding, reply, heard)
                continue
            self.cluster.memory.probes.paid(binding.members[0][0])
            for (ask, _), revision in zip(binding.members, reply, strict=True):
                informer.committed(ask.uid, revision)
                informer.noted.pop(ask.uid, None)
                if ask.uid in informer.returned:
                    informer.returned.discard(ask.uid)
                    self.waits.bound_again(now)
                else:
                    self.waits.bound(ask.queue, ask.submitted_at, now)

    async def _bind(self, commands: Sequence[Bind]) -> list[Bound]:
        """Commit in this process, or in the commit worker if there is enough to be worth the detour."""
        if sum(len(command.members) for command in commands) < COMMIT_WORKER_FROM:
            return await bind(self.runtime, commands)
        self.worker.call()
        return await self.worker.bind(commands)

    def _take_back(self, binding: Binding, refusal: Refusal, heard: int) -> None:
        """Requeue a rejected binding, and read outdated state again before the next plan."""
        self._deposed |= refusal == DEPOSED
        unpaid = PendingReason.unpaid(refusal)
        log.info(
            "bind_rejected",
            message="a binding was rejected, and its allocation is pending again",
            code=str(refusal.code),
            error=refusal.message,
        )
        for ask, spots in binding.members:
            # Its node may be removed, and the placement with it: it is pending all the same.
            if ask.uid not in self.cluster.waiting:
                self.cluster.unassume(ask)
            if unpaid is not None:
                continue  # its nodes are not outdated
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
        """Delay the next attempt, so that current figures explain why it is pending, and no tight loop arises."""
        until = self.clock() + PAUSE_SECONDS
        for ask, _ in binding.members:
            key = self.cluster.unit_key(ask.uid)
            self.cluster.memory.blocked[key] = Blocked(PendingReason(ReasonCode.NOT_TRIED), 0, 0, until, firm=True)

    async def _save_preemptions(self, preemptions: Sequence[Preempting], commands: Sequence[Preempt]) -> None:
        heard = self.unpaid.heard
        for one, reply in zip(preemptions, await preempt(self.runtime, commands), strict=True):
            if isinstance(reply, Refusal):
                self._deposed |= reply == DEPOSED
                log.info(
                    "preemption_rejected",
                    message="a preemption was rejected, and nothing was evicted",
                    code=str(reply.code),
                    error=reply.message,
                )
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
                log.info(
                    "gang_failure_rejected",
                    message="a member of a gang that timed out could not be failed",
                    code=str(reply.code),
                    error=reply.message,
                )

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
            # The bound part of a node is not known exactly after a reload: forecasts drift.
            self._limits_at = now
            if any(one.reason.why is ReasonCode.QUOTA_EXCEEDED for one in self.cluster.memory.blocked.values()):
                self.informer.distrust_limits()
        if now - self._noted_at >= TICK_SECONDS and (self._noting is None or self._noting.done()):
            self._noted_at = now
            if news := self._news(now):
                # In a task of their own, so that no placement waits for them.
                self._noting = asyncio.create_task(self._note(self.informer, news), name="notes")

    async def _count_hours(self, informer: Informer) -> None:
        """Read the use of budgets. No plan waits for it: until then the known figures count."""
        try:
            async with self.runtime.database.reader() as db:
                tree = await self.runtime.trees.refresh(db)
                used = await load_budgets(db, tree, past=self.runtime.past_hours)
        except AWAY as error:
            log.info(
                "hours_not_counted",
                message="the use of budgets could not be read; the known figures count",
                error=repr(error),
            )
            return
        informer.set_hours({name: (one.gpu_hours, one.node_hours) for name, one in used.items()})

    async def _note(self, informer: Informer, news: Sequence[tuple[Ask, PendingReason]]) -> None:
        """Store changed pending reasons."""
        commands = [note_command(self.cluster.limits.tree, ask, reason, self.fence) for ask, reason in news]
        try:
            replies = await note(self.runtime, commands)
        except AWAY as error:
            log.info("reasons_not_stored", message="pending reasons could not be stored", error=repr(error))
            return
        for command, reply in zip(commands, replies, strict=True):
            if isinstance(reply, Refusal):
                self._deposed |= reply == DEPOSED
            elif command.uid in informer.noted:
                informer.noted[command.uid] = command.reason

    def _news(self, now: float) -> Sequence[tuple[Ask, PendingReason]]:
        """Pending reasons that differ from the stored ones, of work that has waited for a while; a limited number."""
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
        """The reason of each pending allocation: its nomination, or the reason of its equivalence class."""
        cluster = self.cluster
        for uid, nomination in cluster.nominated.items():
            if uid in cluster.waiting:
                yield cluster.waiting[uid].members[uid], PendingReason(ReasonCode.PREEMPTING, until=nomination.until)
        for group in cluster.groups.values():
            blocked = cluster.memory.blocked.get(cluster.unit_of(group))
            if blocked is not None and (not blocked.firm or blocked.reason.why in UNPAID):
                yield from ((ask, blocked.reason) for uid, ask in group.members.items() if uid not in cluster.nominated)


async def run_schedule(runtime: Runtime, fence: int, *, policy: SchedulingPolicy | None = None) -> None:
    """Schedule, answer queries and review budgets and limits, while this process leads."""
    one = Scheduler(runtime, fence, policy or SchedulingPolicy())
    answers = run_answers(
        runtime, lambda: one.cluster if one.loaded.is_set() else None, lambda: one.policy, one.clock, one.waits,
        lambda: one.informer.revision, fence,
    )  # fmt: skip
    beside = [
        asyncio.create_task(answers, name="answers"),
        asyncio.create_task(run_budgets(runtime, fence), name="budgets"),
        asyncio.create_task(run_quota_warnings(runtime, fence), name="quota warnings"),
    ]
    try:
        await one.run()
    finally:
        for task in beside:
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)
