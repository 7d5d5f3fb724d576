"""Asking the leader through a real PostgreSQL: askers with connections of their own, a leader that answers or not."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import msgspec
import pytest

from bursar.core.objects.ask import Ask, Shape
from bursar.core.objects.pending_reason import ReasonCode
from bursar.core.scheduling.cycle.plan import SchedulingPolicy
from bursar.core.scheduling.explain.explain_types import ExplainAnswer, Figures
from bursar.core.scheduling.explain.wait_stats import WaitStats
from bursar.core.scheduling.state.cluster_state import ClusterState
from bursar.core.values.refusal import Code, Refusal
from bursar.loops.leader_query import run_answers
from bursar.ops.runtime.runtime import Runtime
from bursar.ops.scheduling import leader_query as inquiry_ops
from bursar.ops.scheduling.leader import stand
from bursar.ops.scheduling.leader_query import Draft, Explain, LeaderQueries, LookQuestion, Simulate
from bursar.store.db.database import Connection, Database, connect
from bursar.store.scheduling import leader_query as store
from support.api.site import eventually

GPU = "nvidia.com/gpu"
NOW = 1_000_000.0


def small_cluster(*names: str) -> ClusterState:
    cluster = ClusterState()
    cluster.put_node("n0", {"cpu": 8000, GPU: 4000}, labels={})
    for name in names:
        cluster.wait(Ask(name, "team", name, "physics", Shape((("cpu", 1000), (GPU, 8000))), NOW - 60))
    return cluster


@asynccontextmanager
async def leading(
    runtime: Runtime, cluster: ClusterState | None, waits: WaitStats | None = None
) -> AsyncIterator[None]:
    """A leader with this cluster state, which answers."""
    assert await stand(runtime.database, "test", 60.0) is not None
    task = asyncio.create_task(run_answers(runtime, lambda: cluster, SchedulingPolicy, lambda: NOW, waits))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
async def leader_queries(runtime: Runtime) -> AsyncIterator[LeaderQueries]:
    asker = LeaderQueries(runtime.database)
    yield asker
    await asker.close()


async def left(runtime: Runtime) -> int:
    async with runtime.database.reader() as db:
        return int(await db.fetchval("SELECT count(*) FROM inquiry"))


async def nothing_left(runtime: Runtime) -> bool:
    return not await left(runtime)


async def something_left(runtime: Runtime) -> bool:
    return bool(await left(runtime))


async def test_without_a_leader_nobody_waits_and_nothing_is_asked(
    runtime: Runtime, leader_queries: LeaderQueries
) -> None:
    refused = await leader_queries.explain("a")
    assert isinstance(refused, Refusal)
    assert (refused.code, refused.retry_after_seconds) == (Code.UNAVAILABLE, 2)
    assert "no scheduler is active" in refused.message
    assert "bursar controller" in refused.hint
    assert await left(runtime) == 0


async def test_a_term_that_has_run_out_leads_no_more(runtime: Runtime, leader_queries: LeaderQueries) -> None:
    await stand(runtime.database, "gone", 60.0)
    async with runtime.database.reader() as db:
        await db.execute("UPDATE leader SET until = clock_timestamp() - interval '1 second'")
    assert await leader_queries.figures() is inquiry_ops.NO_LEADER


async def test_an_answer_arrives_and_leaves_nothing_behind(runtime: Runtime, leader_queries: LeaderQueries) -> None:
    async with leading(runtime, small_cluster("a")):
        found = await leader_queries.explain("a")
        assert isinstance(found, ExplainAnswer)
        assert (found.reason.code, found.position, found.queue) == (f"no_capacity_{GPU}", 1, "default")
        assert found.reason.short[0].needs == 8000
        assert await leader_queries.explain("nobody") is None
        assert await left(runtime) == 0


async def test_askers_of_several_processes_get_each_their_own(database_url: str, runtime: Runtime) -> None:
    names = [f"a{index}" for index in range(20)]
    other = await Database.open(database_url)
    askers = [LeaderQueries(runtime.database), LeaderQueries(other)]
    try:
        async with leading(runtime, small_cluster(*names)):
            asked = [(asker, name) for asker in askers for name in names]
            found = await asyncio.gather(*(asker.explain(name) for asker, name in asked))
        for (_, name), one in zip(asked, found, strict=True):
            assert isinstance(one, ExplainAnswer)
            assert one.uid == name
        assert await left(runtime) == 0
    finally:
        for asker in askers:
            await asker.close()
        await other.close()


async def test_a_question_that_fails_is_answered_with_an_error_and_the_next_one_is_answered(
    runtime: Runtime, leader_queries: LeaderQueries
) -> None:
    async with leading(runtime, small_cluster("a")):
        broken = Simulate([Draft("u", "physics", {}, msgspec.Raw(b'{"metadata":{},"spec":7}'))], {})
        refused = await leader_queries.ask(broken, seconds=60)
        assert isinstance(refused, Refusal)
        assert (refused.code, "could not answer" in refused.message) == (Code.UNAVAILABLE, True)
        async with runtime.database.reader() as db:
            await db.execute("INSERT INTO inquiry (question) VALUES ('[\"not a question\"]')")
        assert not isinstance(await leader_queries.ask(Explain("a"), seconds=60), Refusal)


async def test_a_question_that_was_given_up_while_it_was_put_is_withdrawn(
    runtime: Runtime, leader_queries: LeaderQueries, monkeypatch: pytest.MonkeyPatch
) -> None:
    await stand(runtime.database, "silent", 60.0)
    go_on, asked, put = asyncio.Event(), asyncio.Event(), store.ask

    async def slowly(db: Connection, questions: Sequence[bytes]) -> Sequence[int]:
        ids = await put(db, questions)
        asked.set()
        await go_on.wait()
        return ids

    monkeypatch.setattr(store, "ask", slowly)
    asking = asyncio.create_task(leader_queries.ask(Explain("a"), seconds=0.05))
    await asked.wait()
    assert await asking is inquiry_ops.SILENT
    assert await left(runtime) == 1
    go_on.set()
    await eventually(lambda: nothing_left(runtime))


@pytest.mark.parametrize("turns", range(6))
async def test_an_asker_ends_when_it_is_closed_whatever_it_hears_at_that_moment(runtime: Runtime, turns: int) -> None:
    await stand(runtime.database, "silent", 60.0)
    asker = LeaderQueries(runtime.database)
    asking = asyncio.create_task(asker.ask(Explain("a"), seconds=60))
    await eventually(lambda: is_listening(asker))
    asker._wake.set()
    for _ in range(turns):
        await asyncio.sleep(0)
    async with asyncio.timeout(10):
        await asker.close()
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)


async def is_listening(asker: LeaderQueries) -> bool:
    return bool(asker._waiting and asker._wake._waiters)


async def test_a_leader_that_is_silent_is_given_up(
    runtime: Runtime, leader_queries: LeaderQueries, monkeypatch: pytest.MonkeyPatch
) -> None:
    await stand(runtime.database, "silent", 60.0)
    refused = await leader_queries.ask(Explain("a"), seconds=0.05)
    assert refused is inquiry_ops.SILENT
    # An estimate does not wait for it again.
    monkeypatch.setattr(inquiry_ops, "ESTIMATE_SECONDS_MAX", 60.0)
    async with asyncio.timeout(10):
        assert await leader_queries.estimate(LookQuestion("a")) is None
    # What was given up is withdrawn.
    await eventually(lambda: nothing_left(runtime))


async def test_a_leader_that_is_loading_its_cluster_state_answers_when_it_has_it(
    runtime: Runtime, leader_queries: LeaderQueries
) -> None:
    cluster_states: list[ClusterState] = []
    await stand(runtime.database, "test", 60.0)
    task = asyncio.create_task(
        run_answers(runtime, lambda: cluster_states[0] if cluster_states else None, SchedulingPolicy, lambda: NOW)
    )
    try:
        asking = asyncio.create_task(leader_queries.explain("a"))
        await eventually(lambda: something_left(runtime))
        cluster_states.append(small_cluster("a"))
        assert isinstance(await asking, ExplainAnswer)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_an_estimate_has_the_position(
    runtime: Runtime, leader_queries: LeaderQueries, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inquiry_ops, "ESTIMATE_SECONDS_MAX", 60.0)
    async with leading(runtime, small_cluster("a", "b")):
        seen = await leader_queries.estimate(LookQuestion("b"))
        assert seen is not None
        assert seen.position == 2
        assert await leader_queries.estimate(LookQuestion("gone")) is None
        assert await leader_queries.estimate(LookQuestion(namespace="team", job="none")) is None


async def test_the_figures_come_from_what_the_leader_remembers(runtime: Runtime, leader_queries: LeaderQueries) -> None:
    waits = WaitStats()
    waits.bound("default", NOW - 30, NOW - 20)
    async with leading(runtime, small_cluster("a"), waits):
        found = await leader_queries.figures()
    assert isinstance(found, Figures)
    assert (found.waiting, found.waiting_by_reason) == (1, {str(ReasonCode.NOT_TRIED): 1})
    assert (found.queues[0].depth, found.queues[0].wait.avg_seconds) == (1, 10)


async def test_where_a_job_would_stand_with_another_priority(runtime: Runtime, leader_queries: LeaderQueries) -> None:
    cluster = small_cluster("first")
    cluster.wait(Ask("mine", "team", "mine", "physics", Shape((("cpu", 1000),)), NOW, job="train", owner="job-1"))
    async with leading(runtime, cluster):
        assert await leader_queries.boosted("team", "train", 1_000_000) == 1
        assert await leader_queries.boosted("team", "train", -1_000_000) == 2
        assert await leader_queries.boosted("team", "nobody", 1) is None


async def test_answers_survive_a_listener_that_was_cut_off(
    runtime: Runtime, leader_queries: LeaderQueries, postgres_admin: str
) -> None:
    async with leading(runtime, small_cluster("a")):
        assert isinstance(await leader_queries.explain("a"), ExplainAnswer)
        admin = await connect(postgres_admin)
        try:
            async with runtime.database.reader() as db:
                name = await db.fetchval("SELECT current_database()")
            # The last statement of a backend shows its client: here the one that collected the answer.
            cut = await admin.fetchval(
                "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity"
                " WHERE datname = $1 AND query LIKE 'DELETE FROM inquiry WHERE id = ANY%RETURNING%'", name,
            )  # fmt: skip
            assert cut == 1
        finally:
            await admin.close()
        assert isinstance(await leader_queries.explain("a"), ExplainAnswer)


async def test_what_nobody_waits_for_is_forgotten_by_who_answers(runtime: Runtime) -> None:
    async with runtime.database.reader() as db:
        await db.execute("INSERT INTO inquiry (question, asked_at) VALUES ('{}', now() - interval '2 minutes')")
    async with leading(runtime, small_cluster()):
        await eventually(lambda: nothing_left(runtime))
