"""Quotas that are lowered while work runs or waits, and two who propose past one: line by line as it is promised.

With a real scheduler and nodes that act, on a real database.
"""

import asyncio
from typing import Any

import pytest
import structlog
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bursar.commands.command import Reply
from bursar.core.objects.allocation import ENDED
from bursar.core.values.refusal import Code
from bursar.ops.runtime.runtime import Runtime
from bursar.store.db.database import connect
from support.runtime.runtime import (
    allocation,
    assert_counters_equal_charges,
    bind,
    change,
    code,
    counters,
    delete,
    end,
    namespace,
    node,
    refusal,
    tenant,
)
from support.scheduling.schedulers import (
    GPU,
    HASTY,
    acting,
    history,
    is_in,
    scheduling,
    settled,
    status,
    submit,
    term,
    times_bound,
    until,
    waits_for,
)

WHOLE: dict[str, Any] = {"exclusive": True}


@pytest.fixture
async def physics(runtime: Runtime) -> Runtime:
    """A tenant of two hundred nodes."""
    assert code(await tenant(runtime, "physics", limits={"nodes": 200})) == "ok"
    assert code(await namespace(runtime, "lab", "physics")) == "ok"
    return runtime


async def nodes_asked(runtime: Runtime, name: str, count: int) -> Reply:
    return await allocation(runtime, "lab", name, spec={**WHOLE, "nodes": count}, gpu=1)


async def set_limits(runtime: Runtime, **limits: Any) -> None:
    """As an administrator does: it holds from its commit on."""
    given = {key.replace("gpu", GPU): value for key, value in limits.items()}
    assert code(await change(runtime, "Tenant", "", "physics", limits=given)) == "ok"


# Hard quotas.


async def test_max_nodes_rejects_what_would_exceed_it_with_a_clear_error(physics: Runtime) -> None:
    assert code(await nodes_asked(physics, "most", 195)) == "ok"
    refused = refusal(await nodes_asked(physics, "more", 10))
    assert refused.code is Code.QUOTA_EXCEEDED
    assert refused.message == (
        'allocation rejected: tenant "physics" would exceed max_nodes quota (current: 195, requested: 10, limit: 200)'
    )
    assert code(await nodes_asked(physics, "just", 5)) == "ok"


async def test_max_concurrent_allocations_rejects_what_would_exceed_it(physics: Runtime) -> None:
    await set_limits(physics, allocations=2)
    assert [code(await allocation(physics, "lab", f"a{n}", gpu=1)) for n in range(3)] == ["ok", "ok", "quota_exceeded"]
    refused = refusal(await allocation(physics, "lab", "again", gpu=1))
    assert refused.message == (
        'allocation rejected: tenant "physics" would exceed max_concurrent_allocations quota '
        "(current: 2, requested: 1, limit: 2)"
    )


# A witness in the database: a commit that raises what is bound above the limit is written down.
WITNESS = """
CREATE TABLE overrun (scope text, dimension text, hard bigint, bound bigint);
CREATE FUNCTION note_overrun() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.bound > OLD.bound AND NEW.bound > NEW.hard THEN
        INSERT INTO overrun VALUES (NEW.scope, NEW.dimension, NEW.hard, NEW.bound);
    END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER witness AFTER UPDATE ON quota FOR EACH ROW EXECUTE FUNCTION note_overrun();
"""


async def test_two_schedulers_proposing_past_a_hard_quota_the_first_wins_and_the_second_is_retried(
    runtime: Runtime, rival: Runtime, database_url: str
) -> None:
    """Each may propose: both carry the same fence. What is bound never passes the limit, not for a moment."""
    db = await connect(database_url)
    try:
        await db.execute(WITNESS)
        spec = {"limits": {"allocations": 2}, "enforcement": "Queue"}
        assert code(await tenant(runtime, "physics", **spec)) == "ok"
        assert code(await namespace(runtime, "lab", "physics")) == "ok"
        for name in ("n1", "n2"):
            assert code(await node(runtime, name, gpu=4)) == "ok"
        fence = await term(runtime)
        async with scheduling(runtime, fence=fence), scheduling(rival, fence=fence):
            names = [f"a{number}" for number in range(6)]
            await asyncio.gather(*(submit(runtime, name, where="lab") for name in names))
            done: set[str] = set()
            while len(done) < len(names):
                bound = await _bound(runtime, names, least=min(2, len(names) - len(done)))
                assert len(bound) <= 2
                name = min(bound)
                assert code(await end(runtime, "lab", name)) == "ok"
                done.add(name)
                for one in set(names) - done:
                    assert (await status(runtime, one, "lab"))["phase"] not in ENDED
        assert await times_bound(runtime) == dict.fromkeys(names, 1)
        assert await db.fetch("SELECT * FROM overrun") == []
        await assert_counters_equal_charges(runtime)
    finally:
        await db.close()


async def _bound(runtime: Runtime, names: list[str], least: int) -> set[str]:
    """Those that are placed, once there are so many."""
    async with asyncio.timeout(60):
        while True:
            found = {name for name in names if (await status(runtime, name, "lab")).get("phase") == "Scheduled"}
            if len(found) >= least:
                return found
            await asyncio.sleep(0.01)


async def test_the_proposal_that_comes_second_is_refused_and_leaves_no_trace(runtime: Runtime, rival: Runtime) -> None:
    assert code(await tenant(runtime, "physics", limits={"allocations": 1}, enforcement="Queue")) == "ok"
    assert code(await namespace(runtime, "lab", "physics")) == "ok"
    for name in ("n1", "n2"):
        assert code(await node(runtime, name, gpu=1)) == "ok"
    for name in ("a", "b"):
        assert code(await allocation(runtime, "lab", name, gpu=1)) == "ok"
    replies = await asyncio.gather(bind(runtime, "lab", "a", "n1"), bind(rival, "lab", "b", "n2"))
    assert sorted(map(code, replies)) == ["ok", "quota_exceeded"]
    assert (await counters(runtime))["tenant:physics", "allocations"].bound == 1000
    await assert_counters_equal_charges(runtime)


# A hard quota that is reduced.


async def test_running_allocations_are_not_preempted_when_a_hard_quota_is_reduced(runtime: Runtime) -> None:
    assert code(await tenant(runtime, "physics", limits={"nodes": 3})) == "ok"
    assert code(await namespace(runtime, "lab", "physics")) == "ok"
    for name in ("n1", "n2", "n3"):
        assert code(await node(runtime, name, gpu=1)) == "ok"
    async with acting(runtime), scheduling(runtime, HASTY) as scheduler:
        for name in ("a", "b", "c"):
            await submit(runtime, name, where="lab", spec=WHOLE)
        for name in ("a", "b", "c"):
            await until(runtime, name, is_in("Running"), "lab")
        await set_limits(runtime, nodes=1)
        await settled(scheduler)
        for name in ("a", "b", "c"):
            assert await history(runtime, name, "lab") == ["Pending", "Scheduled", "Running"]
        assert code(await allocation(runtime, "lab", "more", spec=WHOLE, gpu=1)) == "quota_exceeded"


async def test_all_new_ones_are_rejected_until_usage_drops_below_the_reduced_limit(physics: Runtime) -> None:
    for name in ("first", "second", "third"):
        assert code(await nodes_asked(physics, name, 50)) == "ok"
    await set_limits(physics, nodes=100)
    refused = refusal(await nodes_asked(physics, "new", 1))
    assert refused.message == (
        'allocation rejected: tenant "physics" exceeds max_nodes quota\n'
        "  Current usage: 150 nodes\n"
        "  New limit: 100 nodes\n"
        "  Hint: Wait for running allocations to complete, or contact your tenant admin."
    )
    assert refused.hint == "Wait for running allocations to complete, or contact your tenant admin."
    assert code(await delete(physics, "Allocation", "lab", "first")) == "ok"
    # Usage is at the limit now, and no longer above it.
    assert refusal(await nodes_asked(physics, "new", 1)).message == (
        'allocation rejected: tenant "physics" would exceed max_nodes quota (current: 100, requested: 1, limit: 100)'
    )
    assert code(await delete(physics, "Allocation", "lab", "second")) == "ok"
    assert code(await nodes_asked(physics, "new", 1)) == "ok"


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(before=st.integers(1, 4), after=st.integers(0, 4), asked=st.integers(1, 4))
async def test_a_reduction_never_stops_anything(physics: Runtime, before: int, after: int, asked: int) -> None:
    """After any limit and any use: admitted work stays, and new work is admitted if there is headroom."""
    names = [f"a{number}" for number in range(before)]
    try:
        await set_limits(physics, nodes=before)
        for name in names:
            assert code(await nodes_asked(physics, name, 1)) == "ok"
        await set_limits(physics, nodes=after)
        for name in names:
            assert (await status(physics, name, "lab"))["phase"] == "Pending"
        expected = "ok" if before + asked <= after else "quota_exceeded"
        assert code(await nodes_asked(physics, "new", asked)) == expected
        await assert_counters_equal_charges(physics)
    finally:
        for name in (*names, "new"):
            await delete(physics, "Allocation", "lab", name)


# Pending work when a hard quota is reduced.


async def test_pending_allocations_are_not_cancelled_and_wait_for_quota_headroom(runtime: Runtime) -> None:
    assert code(await tenant(runtime, "physics", limits={GPU: 4})) == "ok"
    assert code(await namespace(runtime, "lab", "physics")) == "ok"
    async with acting(runtime), scheduling(runtime) as scheduler:
        await submit(runtime, "runs", where="lab", gpu=2)
        await submit(runtime, "waits", where="lab", gpu=2)
        await until(runtime, "waits", waits_for("no_nodes_active"), "lab")
        await set_limits(runtime, gpu=2)
        assert code(await node(runtime, "n1", gpu=8)) == "ok"
        await until(runtime, "runs", is_in("Running"), "lab")
        told = await until(runtime, "waits", waits_for("quota_exceeded"), "lab")
        assert told["message"] == f"waiting for quota headroom: tenant physics has 2 of 2 {GPU} bound, 2 asked"
        assert await history(runtime, "waits", "lab") == ["Pending"]
        # It is not proposed again while there is no headroom, however often the scheduler looks.
        with structlog.testing.capture_logs() as logs:
            for number in range(3):
                await submit(runtime, f"other-{number}")
                await until(runtime, f"other-{number}", is_in("Running"))
        assert not [one for one in logs if one["event"] == "bind_rejected"]
        assert [one.reason.code for one in scheduler.cluster.memory.blocked.values()] == ["quota_exceeded"]
        assert (await times_bound(runtime)).get("waits") is None
        await set_limits(runtime, gpu=4)
        now = await until(runtime, "waits", is_in("Running"), "lab")
        assert "message" not in now


async def test_what_was_proposed_before_the_reduction_is_rejected_by_it(runtime: Runtime) -> None:
    """The plan was made under the old limit; the commit is decided under the new one."""
    assert code(await tenant(runtime, "physics", limits={GPU: 4})) == "ok"
    assert code(await namespace(runtime, "lab", "physics")) == "ok"
    assert code(await node(runtime, "n1", gpu=8)) == "ok"
    for name in ("a", "b"):
        assert code(await allocation(runtime, "lab", name, gpu=2)) == "ok"
    await set_limits(runtime, gpu=2)
    assert code(await bind(runtime, "lab", "a", "n1")) == "ok"
    assert code(await bind(runtime, "lab", "b", "n1")) == "quota_exceeded"
    assert (await status(runtime, "b", "lab"))["phase"] == "Pending"


async def test_what_waits_for_headroom_runs_as_soon_as_something_ends(runtime: Runtime) -> None:
    assert code(await tenant(runtime, "physics", limits={"allocations": 2})) == "ok"
    assert code(await namespace(runtime, "lab", "physics")) == "ok"
    async with acting(runtime), scheduling(runtime):
        for name in ("a", "b"):
            await submit(runtime, name, where="lab")
        await set_limits(runtime, allocations=1)
        assert code(await node(runtime, "n1", gpu=8)) == "ok"
        await until(runtime, "a", is_in("Running"), "lab")
        await until(runtime, "b", waits_for("quota_exceeded"), "lab")
        assert code(await delete(runtime, "Allocation", "lab", "a")) == "ok"
        await until(runtime, "b", is_in("Running"), "lab")
