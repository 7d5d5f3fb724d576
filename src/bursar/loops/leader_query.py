"""Leader queries: the leader answers questions from its cluster state, between the cycles that change it.

The cluster state only changes in this thread, in code that does not await, so an answer that does not await sees it
consistently. Answers take at most a fifth of the leader's time: expensive questions wait, the scheduler does not.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from time import perf_counter, time

import msgspec
import structlog

from bursar.core.objects.ask import Ask
from bursar.core.quota.tenant_tree import lineage
from bursar.core.scheduling.cycle.plan import SchedulingPolicy
from bursar.core.scheduling.explain.explain import estimate, explain, figures, holding, simulate
from bursar.core.scheduling.explain.queue_position import QueueOrders, order_boosted
from bursar.core.scheduling.explain.wait_stats import WaitStats
from bursar.core.scheduling.state.cluster_state import ClusterState
from bursar.ops.runtime.runtime import Runtime
from bursar.ops.scheduling.leader_query import (
    ANSWER_SECONDS_MAX,
    BoostedQuestion,
    Count,
    Draft,
    Explain,
    InUse,
    LeaderAnswer,
    LookQuestion,
    Question,
    Simulate,
    decode_question,
    encode,
)
from bursar.store.db.database import AWAY, Connection
from bursar.store.scheduling import leader_query as store
from bursar.wire.to_scheduler.ask import PriorityClassView, ask_of

log = structlog.get_logger()

POLL_SECONDS = 1.0
BATCH_MAX = 64
WORK_SECONDS = 0.005  # of answering without a pause; the last answer may exceed it
REST_PER_WORK = 4.0  # seconds of rest per second of answering
REST_SECONDS_MAX = 2.0
EARLY_SECONDS = 0.002  # before a question about a revision that is not applied yet is tried again
FORGET_SECONDS = 60.0
REVISION_MAX = (1 << 63) - 1


@dataclass(slots=True)
class Answering:
    """The state that answers are read from. `cluster_of` returns None while the cluster state is being loaded."""

    cluster_of: Callable[[], ClusterState | None]
    policy_of: Callable[[], SchedulingPolicy]
    clock: Callable[[], float] = time
    waits: WaitStats = field(default_factory=WaitStats)
    revision_of: Callable[[], int] = lambda: REVISION_MAX  # the revision of the cluster state
    fence: int | None = None  # of the term in which it answers
    _orders: QueueOrders = field(default_factory=QueueOrders)

    def answer(self, raw: bytes, cluster: ClusterState) -> bytes | None:
        """The answer to a question; failures are answered too. None while the cluster state is older than the revision
        that the question is about."""
        question: Question | None = None
        try:
            question = decode_question(raw)
            if isinstance(question, LookQuestion) and question.revision > self.revision_of():
                return None
            return encode(LeaderAnswer(msgspec.Raw(encode(self._result(question, cluster)))))
        except Exception as error:
            # The question itself is not logged, because it contains a draft.
            log.exception(
                "query_failed",
                message="a question to the leader could not be answered",
                question=type(question).__name__,
            )
            return encode(LeaderAnswer(error=f"{type(error).__name__}: {error}"[:300]))

    def _result(self, question: Question, cluster: ClusterState) -> object:
        policy, now = self.policy_of(), self.clock()
        match question:
            case Explain(uid):
                return explain(cluster, uid, policy, now, self._orders.of(cluster, policy, now, uid))
            case InUse(uid):
                return holding(cluster, uid, policy, now)
            case LookQuestion(uid, namespace, job, _):
                uid = uid or _first_of(cluster, (namespace, job))
                return estimate(cluster, uid, policy, now, self._orders.of(cluster, policy, now, uid))
            case BoostedQuestion(namespace, job, priority):
                return _boosted(cluster, policy, now, (namespace, job), priority)
            case Simulate(drafts, priorities):
                asks = [cluster.as_user(_ask(one, priorities, cluster), one.user) for one in drafts]
                return simulate(cluster, asks, policy, now)
            case Count():
                return figures(cluster, self.waits, now, self.revision_of())


def _boosted(
    cluster: ClusterState, policy: SchedulingPolicy, now: float, job: tuple[str, str], priority: int
) -> int | None:
    """The position of the job's oldest pending allocation under that priority."""
    members = _members(cluster, job)
    if not members:
        return None
    first = min(members, key=lambda ask: (ask.submitted_at, ask.uid))
    line = order_boosted(cluster, policy, now, job, priority, first.owner)
    position = line.position(first, cluster.waiting[first.uid])
    return position.in_queue if position is not None else None


def _first_of(cluster: ClusterState, job: tuple[str, str]) -> str:
    """The oldest pending allocation of a job."""
    members = _members(cluster, job)
    return min(members, key=lambda ask: (ask.submitted_at, ask.uid)).uid if members else ""


def _members(cluster: ClusterState, job: tuple[str, str]) -> list[Ask]:
    return [
        ask
        for group in cluster.groups.values()
        if group.key.job == job[1]
        for ask in group.members.values()
        if ask.namespace == job[0] and ask.owner
    ]


def _ask(draft: Draft, priorities: Mapping[str, PriorityClassView], cluster: ClusterState) -> Ask:
    """The ask of a draft. Its permissions were checked before, so it is exempt."""
    tree = cluster.limits.tree
    ask = ask_of(
        bytes(draft.doc), uid=draft.uid, tenant=draft.tenant, labels=draft.labels, priorities=priorities,
        tree=tree, exempt=True,
    )  # fmt: skip
    return cluster.as_tenant(ask, tuple(lineage(tree, draft.tenant)))


async def run_answers(
    runtime: Runtime,
    cluster_of: Callable[[], ClusterState | None],
    policy_of: Callable[[], SchedulingPolicy],
    clock: Callable[[], float] = time,
    waits: WaitStats | None = None,
    revision_of: Callable[[], int] = lambda: REVISION_MAX,
    fence: int | None = None,
) -> None:
    """Answer questions while this process leads; wait while the database is away."""
    answering = Answering(cluster_of, policy_of, clock, waits if waits is not None else WaitStats(), revision_of, fence)
    while True:
        try:
            await _follow(runtime, answering)
        except AWAY as error:
            log.info("answers_wait", message="answers of the leader wait for the database", error=repr(error))
            await asyncio.sleep(POLL_SECONDS)


async def _follow(runtime: Runtime, answering: Answering) -> None:
    wake = asyncio.Event()
    db = await runtime.database.connect()
    try:
        await db.add_listener(store.ASKED, lambda *_: wake.set())
        while True:
            wake.clear()
            await store.forget(db, FORGET_SECONDS)
            while await _answer_some(db, answering):
                pass
            with suppress(TimeoutError):
                async with asyncio.timeout(POLL_SECONDS):
                    await wake.wait()
    finally:
        with suppress(*AWAY):
            await db.close()


async def _answer_some(db: Connection, answering: Answering) -> bool:
    """Answer the oldest questions, a few at a time; true if there may be more."""
    if answering.cluster_of() is None:
        return False
    asked = await store.load_unanswered(db, BATCH_MAX, ANSWER_SECONDS_MAX)
    waiting, early = deque(asked), False
    while waiting and (cluster := answering.cluster_of()) is not None:
        began, done = perf_counter(), list[tuple[int, bytes]]()
        while waiting and perf_counter() - began < WORK_SECONDS:
            one = waiting.popleft()
            answer = answering.answer(one.question, cluster)
            if answer is None:
                early = True
            else:
                done.append((one.id, answer))
        rest = REST_PER_WORK * (perf_counter() - began)
        await store.answer(db, done, answering.fence)
        await asyncio.sleep(min(REST_SECONDS_MAX, max(rest, EARLY_SECONDS if early else 0.0)))
    return early or len(asked) == BATCH_MAX
