"""The controller of approvals on a real database: a time that has passed takes effect once, in every process."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import msgspec
import pytest
from prometheus_client import REGISTRY

from bursar.api.site.gauges import show_approvals
from bursar.core.objects.allocation import Phase
from bursar.core.objects.object import Key
from bursar.core.values.instant import timestamp
from bursar.loops.approvals import keep_times, run_approvals
from bursar.ops.approval.decide import run_timer, timer_command
from bursar.ops.objects import object as object_ops
from bursar.ops.runtime.clock import now
from bursar.ops.runtime.runtime import Runtime
from bursar.ops.workloads.job_controller import step
from bursar.store.objects import approval as store
from support.api.site import eventually
from support.approval.requests import approval, claim, decide, gated, status, used
from support.runtime.postgres_proxy import Proxy
from support.runtime.runtime import (
    allocation,
    assert_counters_equal_charges,
    bind,
    code,
    create,
    end,
    get,
    node,
    opened,
    refusal,
)

PENDING = "pending_requests"
TRAIN = Key("Job", "acme", "train")


def ago(seconds: float = 1) -> str:
    return timestamp(now() - timedelta(seconds=seconds))


@pytest.fixture
async def acme(runtime: Runtime) -> Runtime:
    await gated(runtime)
    await node(runtime, "n1", cpu=8)
    return runtime


async def notices(runtime: Runtime) -> list[str]:
    async with runtime.database.reader() as db:
        return [row["type"] for row in await db.fetch("SELECT type FROM notice ORDER BY id")]


async def rows(runtime: Runtime) -> int:
    async with runtime.database.reader() as db:
        return int(await db.fetchval("SELECT count(*) FROM approval"))


async def in_state(runtime: Runtime, kind: str, name: str, state: str, namespace: str = "acme") -> None:
    """Wait until a request is in a state."""

    async def is_there() -> bool:
        return bool((await approval(runtime, kind, namespace, name))["state"] == state)

    await eventually(is_there)


@asynccontextmanager
async def controllers(*runtimes: Runtime) -> AsyncIterator[None]:
    loops = [asyncio.ensure_future(run_approvals(one)) for one in runtimes]
    try:
        yield
    finally:
        for one in loops:
            one.cancel()
        await asyncio.gather(*loops, return_exceptions=True)


async def job(runtime: Runtime, *, template: dict[str, Any] | None = None, **spec: Any) -> None:
    template = {"spec": {"resources": {"requests": {"cpu": "2"}}, **(template or {})}}
    body = {"parallelism": 2, "completions": 3, "template": template, **spec}
    await create(runtime, "Job", {"metadata": {"name": "train", "namespace": "acme"}, "spec": body})


async def approved_job(runtime: Runtime, until: str = "", **spec: Any) -> None:
    """An approved job, one of whose allocations runs."""
    await job(runtime, **spec)
    assert code(await decide(runtime, "Job", "acme", "train", until=until or ago())) == "ok"
    assert code(await bind(runtime, "acme", "train-0", "n1")) == "ok"
    assert code(await end(runtime, "acme", "train-0", Phase.RUNNING)) == "ok"


# The loop.


async def test_requests_expire_by_themselves_and_an_approved_one_does_not(runtime: Runtime) -> None:
    await gated(runtime, approval={"pendingSeconds": 1})
    for name in ("c1", "c2", "c3"):
        await claim(runtime, "acme", name, clusters=1)
    await decide(runtime, "ResourceClaim", "acme", "c2")
    async with controllers(runtime):
        for name in ("c1", "c3"):
            await in_state(runtime, "ResourceClaim", name, "expired")
    assert (await approval(runtime, "ResourceClaim", "acme", "c1"))["reason"] == "Undecided"
    assert (await approval(runtime, "ResourceClaim", "acme", "c2"))["state"] == "approved"
    assert await notices(runtime) == ["request.approved", "request.expired", "request.expired"]
    assert (await used(runtime, "acme", PENDING), await rows(runtime)) == (0, 0)
    await assert_counters_equal_charges(runtime)


async def test_two_controllers_do_everything_once(acme: Runtime, rival: Runtime) -> None:
    until = timestamp(now() + timedelta(seconds=1))
    for number in range(80):
        await claim(acme, "acme", f"c{number}", clusters=1)
        await decide(acme, "ResourceClaim", "acme", f"c{number}", until=until)
    async with controllers(acme, rival):
        for number in range(80):
            await in_state(acme, "ResourceClaim", f"c{number}", "expired")
    said = await notices(acme)
    assert (said.count("request.expired"), said.count("request.ending")) == (80, 0)
    assert await used(acme, "acme", "clusters") == 0
    await assert_counters_equal_charges(acme)


async def test_a_notice_is_sent_at_its_time_and_once(acme: Runtime, rival: Runtime) -> None:
    """One day before the end; the notice of seven days before was due when it was approved."""
    await claim(acme, "acme", "c", clusters=1)
    await decide(acme, "ResourceClaim", "acme", "c", until=timestamp(now() + timedelta(days=1, seconds=1)))

    async def is_sent() -> bool:
        return "request.ending" in await notices(acme)

    async with controllers(acme, rival):
        await eventually(is_sent)
    assert await notices(acme) == ["request.approved", "request.ending"]
    assert (await approval(acme, "ResourceClaim", "acme", "c"))["state"] == "approved"


async def test_what_fails_does_not_delay_the_others_and_is_tried_again(
    acme: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(70):
        await claim(acme, "acme", f"c{number:02}", clusters=1)
        await decide(acme, "ResourceClaim", "acme", f"c{number:02}", until=ago(60))
    sound = (await get(acme, "ResourceClaim", "acme", "c00")).status
    async with acme.database.reader() as db:
        await db.execute("""UPDATE object SET status = '{"approval": {"state": 7}}' WHERE name = 'c00'""")
    failed: dict[Key, Any] = {}
    await keep_times(acme, failed)
    assert list(failed) == [Key("ResourceClaim", "acme", "c00")]
    assert (await approval(acme, "ResourceClaim", "acme", "c69"))["state"] == "expired"
    assert await rows(acme) == 1
    async with acme.database.reader() as db:
        await db.execute("UPDATE object SET status = $1 WHERE name = 'c00'", sound)
    await keep_times(acme, failed)
    assert await rows(acme) == 1, "not yet"
    failed = dict.fromkeys(failed, now())
    await keep_times(acme, failed)
    assert (failed, await rows(acme)) == ({}, 0)


async def test_the_loop_sleeps_until_the_next_time_and_finds_a_new_one_soon(acme: Runtime) -> None:
    assert await keep_times(acme, {}) == 2.0
    await claim(acme, "acme", "c", clusters=1)
    await decide(acme, "ResourceClaim", "acme", "c", until=timestamp(now() + timedelta(seconds=2)))
    assert 0 <= await keep_times(acme, {}) < 2.0


async def test_the_loop_goes_on_when_its_connections_are_cut(runtime: Runtime) -> None:
    await gated(runtime, approval={"pendingSeconds": 1})
    async with controllers(runtime):
        await claim(runtime, "acme", "c", clusters=1)
        async with runtime.database.reader() as db:
            await db.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE pid <> pg_backend_pid() AND datname = current_database()"
            )
        await in_state(runtime, "ResourceClaim", "c", "expired")


@pytest.mark.parametrize("cut", ["before", "after", "during"])
async def test_a_connection_that_is_lost_at_commit_ends_a_job_once(acme: Runtime, database_url: str, cut: str) -> None:
    await approved_job(acme)
    async with Proxy(database_url) as proxy, opened(proxy.url) as other:
        proxy.plan = iter([cut])
        assert code(await run_timer(other, TRAIN)) == "ok"
        assert proxy.cuts == [cut]
    assert (await status(acme, "Job", "acme", "train"))["phase"] == "Cancelling"
    assert (await status(acme, "Allocation", "acme", "train-0"))["phase"] == "Terminating"
    assert await notices(acme) == ["request.approved", "request.expired"]
    await assert_counters_equal_charges(acme)


# Races.


async def test_a_decision_and_an_expiry_at_the_same_moment(runtime: Runtime, rival: Runtime) -> None:
    await gated(runtime, approval={"pendingSeconds": 1}, limits={"clusters": 40})
    names = [f"c{number}" for number in range(30)]
    for name in names:
        await claim(runtime, "acme", name, clusters=1)
    keys = [Key("ResourceClaim", "acme", name) for name in names]
    last = (await get(runtime, *keys[-1])).fields["status.approval.due"]

    async def is_due() -> bool:
        return timestamp(now()) >= last

    await eventually(is_due)
    each: list[Any] = []
    for key in keys:
        each += [decide(runtime, *key), run_timer(rival, key)]
    answers = await asyncio.gather(*each)
    approved = [name for name, answer in zip(names, answers[::2], strict=True) if code(answer) == "ok"]
    lost = [answer for answer in answers[::2] if code(answer) != "ok"]
    assert {refusal(one).code for one in lost} <= {"already_decided"}
    for name in names:
        state = (await approval(runtime, "ResourceClaim", "acme", name))["state"]
        assert state == ("approved" if name in approved else "expired")
    assert (await used(runtime, "acme", "clusters"), await used(runtime, "acme", PENDING)) == (len(approved), 0)
    assert sorted(await notices(runtime)) == sorted(
        ["request.approved"] * len(approved) + ["request.expired"] * (30 - len(approved))
    )
    await assert_counters_equal_charges(runtime)


# The end of jobs.


async def test_a_released_job_is_cancelled_with_its_grace_in_one_transaction(acme: Runtime) -> None:
    await approved_job(acme)
    await run_timer(acme, TRAIN)
    now_ = await status(acme, "Job", "acme", "train")
    assert (now_["phase"], now_["reason"], now_["active"]) == ("Cancelling", "ApprovalEnded", 1)
    assert (now_["approval"]["state"], now_["approval"]["reason"]) == ("expired", "Ended")
    running = await status(acme, "Allocation", "acme", "train-0")
    assert running["phase"] == "Terminating"
    assert code(await object_ops.get(acme, Key("Allocation", "acme", "train-1"))) == "not_found"
    assert await used(acme, "acme", "cpu") == 2, "what still runs is still charged"
    await step(acme, TRAIN)
    await end(acme, "acme", "train-0", Phase.CANCELLED)
    await step(acme, TRAIN)
    assert (await status(acme, "Job", "acme", "train"))["phase"] == "Cancelled"
    assert await used(acme, "acme", "cpu") == 0
    assert await rows(acme) == 0
    assert await notices(acme) == ["request.approved", "request.expired"]
    await assert_counters_equal_charges(acme)


async def test_a_job_that_moved_on_is_read_again(acme: Runtime) -> None:
    """A step creates an allocation after the timer read the job: that one is released too."""
    await approved_job(acme)
    old = timer_command(await get(acme, *TRAIN))
    await end(acme, "acme", "train-0")
    await step(acme, TRAIN)
    assert (await status(acme, "Job", "acme", "train"))["active"] == 2
    assert code(await object_ops.submit(acme, old, tenant="acme")) == "conflict"
    assert code(await run_timer(acme, TRAIN)) == "ok"
    for name in ("train-1", "train-2"):
        assert code(await object_ops.get(acme, Key("Allocation", "acme", name))) == "not_found"
    assert (await status(acme, "Job", "acme", "train"))["phase"] == "Cancelled"
    assert await used(acme, "acme", "cpu") == 0
    await assert_counters_equal_charges(acme)


async def test_a_released_gang_is_stopped_as_a_whole(acme: Runtime) -> None:
    await job(acme, template={"gangScheduling": {"minMembers": 2}}, completions=2)
    await decide(acme, "Job", "acme", "train", until=ago())
    await run_timer(acme, TRAIN)
    assert (await status(acme, "Job", "acme", "train"))["phase"] == "Cancelled"
    async with acme.database.reader() as db:
        assert await db.fetchval("SELECT count(*) FROM gang WHERE members > 0") == 0
    await assert_counters_equal_charges(acme)


async def test_a_frozen_job_makes_no_new_allocations_and_ends_with_the_last_one(runtime: Runtime) -> None:
    await gated(runtime, approval={"onEnd": "freeze"})
    await node(runtime, "n1", cpu=8)
    await approved_job(runtime)
    await run_timer(runtime, TRAIN)
    assert (await approval(runtime, "Job", "acme", "train"))["state"] == "expired"
    assert await used(runtime, "acme", "cpu") == 4
    await end(runtime, "acme", "train-0")
    await step(runtime, TRAIN)
    now_ = await status(runtime, "Job", "acme", "train")
    assert (now_["phase"], now_["succeeded"], now_["active"]) == ("Running", 1, 1)
    assert code(await object_ops.get(runtime, Key("Allocation", "acme", "train-2"))) == "not_found"
    assert code(await bind(runtime, "acme", "train-1", "n1")) == "ok", "what was approved may start"
    await end(runtime, "acme", "train-1", Phase.FAILED)
    await step(runtime, TRAIN)
    now_ = await status(runtime, "Job", "acme", "train")
    assert (now_["phase"], now_["reason"]) == ("Failed", "ApprovalEnded")
    assert "1 of 3 succeeded" in now_["message"]
    assert await used(runtime, "acme", "cpu") == 0


async def test_a_frozen_job_whose_allocations_all_succeed_has_succeeded(runtime: Runtime) -> None:
    await gated(runtime, approval={"onEnd": "freeze"})
    await node(runtime, "n1", cpu=8)
    await approved_job(runtime, parallelism=1, completions=1)
    await run_timer(runtime, TRAIN)
    await end(runtime, "acme", "train-0")
    await step(runtime, TRAIN)
    assert (await status(runtime, "Job", "acme", "train"))["phase"] == "Succeeded"


async def test_a_kept_job_goes_on_as_before(runtime: Runtime) -> None:
    await gated(runtime, approval={"onEnd": "keep"})
    await node(runtime, "n1", cpu=8)
    await approved_job(runtime)
    await run_timer(runtime, TRAIN)
    assert (await approval(runtime, "Job", "acme", "train"))["state"] == "expired"
    await end(runtime, "acme", "train-0")
    await step(runtime, TRAIN)
    assert (await status(runtime, "Allocation", "acme", "train-2"))["phase"] == "Pending"


async def test_for_a_job_that_has_ended_nothing_is_due(acme: Runtime) -> None:
    later = timestamp(now() + timedelta(days=30))
    await approved_job(acme, later, parallelism=1, completions=1)
    assert await rows(acme) == 1
    await end(acme, "acme", "train-0")
    await step(acme, TRAIN)
    assert (await status(acme, "Job", "acme", "train"))["phase"] == "Succeeded"
    assert await rows(acme) == 0


async def test_placed_work_is_stopped_and_its_charge_given_back_when_it_has(acme: Runtime) -> None:
    for name in ("a", "b"):
        await allocation(acme, "acme", name, cpu=2)
        await decide(acme, "Allocation", "acme", name, until=ago())
    await bind(acme, "acme", "a", "n1")
    await keep_times(acme, {})
    assert (await status(acme, "Allocation", "acme", "a"))["phase"] == "Terminating"
    assert (await status(acme, "Allocation", "acme", "b"))["phase"] == "Failed"
    assert await used(acme, "acme", "cpu") == 2
    await end(acme, "acme", "a", Phase.FAILED)
    ended = await status(acme, "Allocation", "acme", "a")
    assert (ended["phase"], ended["reason"]) == ("Failed", "ApprovalEnded")
    assert (await used(acme, "acme", "cpu"), await rows(acme)) == (0, 0)
    await assert_counters_equal_charges(acme)


# News and figures.


async def test_a_tenant_reads_no_figures_of_others_in_the_reason(runtime: Runtime) -> None:
    await gated(runtime, "institute", limits={"clusters": 3})
    await gated(runtime, parent="institute")
    await gated(runtime, "other", parent="institute")
    await claim(runtime, "other", "theirs", clusters=2)
    await decide(runtime, "ResourceClaim", "other", "theirs")
    await claim(runtime, "acme", "c", clusters=2)
    denied = refusal(await decide(runtime, "ResourceClaim", "acme", "c"))
    assert denied.causes[0].limit == "3", "the approver decides for all tenants"
    hidden = refusal(await decide(runtime, "ResourceClaim", "acme", "c", tenants=("acme",)))
    assert hidden.causes[0].limit == "", "and this one for acme only"
    said = "a limit above this tenant has no headroom: max_clusters, requested 2"
    assert (await approval(runtime, "ResourceClaim", "acme", "c"))["reason"] == said
    async with runtime.database.reader() as db:
        found = await db.fetch("SELECT tenant, subject, data FROM notice WHERE type = 'request.pending'")
    ((tenant, subject, data),) = [tuple(row) for row in found]
    assert (tenant, subject) == ("acme", "resourceclaims/acme/c")
    assert msgspec.json.decode(data)["reason"] == said


async def test_the_gauges_tell_a_silent_service_from_a_full_tenant(acme: Runtime) -> None:
    def gauge(name: str, **labels: str) -> float | None:
        return REGISTRY.get_sample_value(f"bursar_approval_{name}", {"gate": "quota", **labels})

    decisions = gauge("decisions_total", outcome="approved") or 0.0
    async with acme.database.reader() as db:
        assert await store.count_open(db) == []
    await claim(acme, "acme", "c", clusters=1)
    async with acme.database.reader() as db:
        await db.execute("UPDATE approval SET since = $1", ago(100))
    await show_approvals(acme)
    assert gauge("requests") == 1
    assert 100 <= (gauge("unanswered_seconds") or 0) < 200
    assert 100 <= (gauge("oldest_seconds") or 0) < 200
    await decide(acme, "ResourceClaim", "acme", "c", "note", reason="no room")
    await show_approvals(acme)
    assert (gauge("requests"), gauge("unanswered_seconds")) == (1, 0)
    await decide(acme, "ResourceClaim", "acme", "c")
    await show_approvals(acme)
    assert gauge("requests") is None
    assert gauge("decisions_total", outcome="approved") == decisions + 1
