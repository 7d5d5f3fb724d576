"""Soft quotas with a real scheduler: budgets, shares and burst change who goes first, and refuse and stop nobody.

Each test is named after what is promised.
"""

import math
from collections.abc import Callable
from time import time
from typing import Any

import pytest

from bursar.core.scheduling.cycle.plan import SchedulingPolicy
from bursar.loops.schedule import Scheduler
from bursar.ops.runtime.runtime import Runtime
from support.api.site import eventually
from support.runtime.runtime import change, code, delete, namespace, node, tenant
from support.scheduling.schedulers import HASTY, acting, history, is_in, scheduling, settled, status, submit, until
from support.usage.spent_hours import spend

PATIENT = SchedulingPolicy(preemption=False)
TEAMS = ("physics", "chemistry")


@pytest.fixture
async def teams(runtime: Runtime) -> Runtime:
    """Two tenants, each with a namespace of its name."""
    for name in TEAMS:
        assert code(await tenant(runtime, name)) == "ok"
        assert code(await namespace(runtime, name, name)) == "ok"
    return runtime


async def set_soft(runtime: Runtime, name: str, **fields: Any) -> None:
    assert code(await change(runtime, "Tenant", "", name, **fields)) == "ok"


async def running(runtime: Runtime, *names: str, where: str = "physics") -> None:
    for name in names:
        await until(runtime, name, is_in("Running"), where)


async def eventually_so(holds: Callable[[], bool]) -> None:
    async def ask() -> bool:
        return holds()

    await eventually(ask, 60)


# The budget of GPU-hours.


@pytest.mark.parametrize(
    ("used", "left"),
    [
        pytest.param(0.0, 1.0, id="nothing used"),
        pytest.param(0.5, 1.0, id="up to 80 percent there is no penalty"),
        pytest.param(0.9, 0.525, id="from 80 to 100 percent it increases"),
        pytest.param(0.95, 0.05 + 0.95 * (1 - math.sqrt(0.5)) / 2, id="and increases further"),
        pytest.param(1.0, 0.05, id="at 100 percent hardly anything is left"),
        pytest.param(2.0, 0.05, id="and not less beyond"),
    ],
)
async def test_the_scheduler_lowers_scores_as_the_budget_depletes(teams: Runtime, used: float, left: float) -> None:
    if used:
        await spend(teams, "physics", gpu_hours=100 * used)
    await set_soft(teams, "physics", gpuHoursBudget=100)
    async with scheduling(teams) as scheduler:
        await eventually_so(lambda: math.isclose(penalty(scheduler), left, rel_tol=1e-6))


def penalty(scheduler: Scheduler) -> float:
    known = scheduler.cluster.tenants.get("physics")
    return known.penalty if known is not None else math.nan


async def test_when_both_budgets_are_set_the_worse_utilization_drives_the_penalty(teams: Runtime) -> None:
    await spend(teams, "physics", gpu_hours=10, node_hours=90)
    await set_soft(teams, "physics", gpuHoursBudget=100, nodeHoursBudget=100)
    async with scheduling(teams) as scheduler:
        await eventually_so(lambda: math.isclose(penalty(scheduler), 0.525, rel_tol=1e-6))


async def test_new_allocations_of_an_exhausted_tenant_starve_and_run_when_nobody_else_wants_the_capacity(
    teams: Runtime,
) -> None:
    await set_soft(teams, "physics", gpuHoursBudget=0)
    async with acting(teams), scheduling(teams, PATIENT):
        assert code(await node(teams, "n1", gpu=1)) == "ok"
        await submit(teams, "blocks")
        await until(teams, "blocks", is_in("Running"))
        await submit(teams, "poor", where="physics")
        for name in ("first", "second"):
            await submit(teams, name, where="chemistry")
        await until(teams, "poor", lambda now: bool(now.get("reason")), "physics")
        assert code(await delete(teams, "Allocation", "default", "blocks")) == "ok"
        for name in ("first", "second"):
            await running(teams, name, where="chemistry")
            # It was submitted before both, and was neither rejected nor placed.
            assert (await status(teams, "poor", "physics"))["phase"] == "Pending"
            assert code(await delete(teams, "Allocation", "chemistry", name)) == "ok"
        await running(teams, "poor")


async def test_a_reduced_budget_lowers_what_is_pending_and_rejects_and_stops_nothing(teams: Runtime) -> None:
    await spend(teams, "physics", gpu_hours=90)
    await set_soft(teams, "physics", gpuHoursBudget=1000)
    assert code(await node(teams, "n1", gpu=1)) == "ok"
    async with acting(teams), scheduling(teams, PATIENT) as scheduler:
        await submit(teams, "runs", where="physics")
        await running(teams, "runs")
        await submit(teams, "waits", where="physics")
        await until(teams, "waits", lambda now: bool(now.get("reason")), "physics")
        assert penalty(scheduler) == 1.0
        await set_soft(teams, "physics", gpuHoursBudget=91)
        await eventually_so(lambda: penalty(scheduler) < 0.2)
        await submit(teams, "later", where="chemistry")
        await until(teams, "later", lambda now: bool(now.get("reason")), "chemistry")
        assert await history(teams, "runs", "physics") == ["Pending", "Scheduled", "Running"]
        assert await history(teams, "waits", "physics") == ["Pending"]
        assert code(await delete(teams, "Allocation", "physics", "runs")) == "ok"
        await running(teams, "later", where="chemistry")
        assert (await status(teams, "waits", "physics"))["phase"] == "Pending"
        assert code(await delete(teams, "Allocation", "chemistry", "later")) == "ok"
        await running(teams, "waits")


async def test_an_exhausted_tenant_takes_nothing_from_others_that_run_beyond_their_share(teams: Runtime) -> None:
    for team in TEAMS:
        await set_soft(teams, team, fairShareTarget=0.5)
    await set_soft(teams, "physics", gpuHoursBudget=0)
    assert code(await node(teams, "n1", gpu=2)) == "ok"
    async with acting(teams), scheduling(teams, HASTY) as scheduler:
        for name in ("a", "b"):
            await submit(teams, name, where="chemistry")
            await running(teams, name, where="chemistry")
        await submit(teams, "poor", where="physics")
        await until(teams, "poor", lambda now: now.get("reason", "").startswith("no_capacity"), "physics")
        await set_soft(teams, "physics", gpuHoursBudget=1000)  # Within its budget it has a claim to its share.
        await eventually_so(lambda: penalty(scheduler) == 1.0)
        await running(teams, "poor")
        assert await history(teams, "a", "chemistry") == ["Pending", "Scheduled", "Running"]


async def test_hours_are_known_to_the_scheduler_within_thirty_seconds(teams: Runtime) -> None:
    await set_soft(teams, "physics", gpuHoursBudget=100)
    ahead = 0.0
    async with scheduling(teams, clock=lambda: time() + ahead) as scheduler:
        assert penalty(scheduler) == 1.0
        await spend(teams, "physics", gpu_hours=150)
        ahead = 30.0

        async def is_known() -> bool:
            scheduler.nudge()
            return penalty(scheduler) == 0.05

        await eventually(is_known, 60)


# The fair share.


async def test_tenants_below_their_share_get_priority_and_those_above_are_deprioritized(teams: Runtime) -> None:
    await set_soft(teams, "physics", fairShareTarget=0.75)
    await set_soft(teams, "chemistry", fairShareTarget=0.25)
    async with acting(teams), scheduling(teams, PATIENT) as scheduler:
        for number in range(8):
            for team in TEAMS:
                await submit(teams, f"a{number}", where=team)
        await eventually_so(lambda: len(scheduler.cluster.waiting) == 16)
        assert code(await node(teams, "n1", gpu=8)) == "ok"
        held = dict.fromkeys(TEAMS, 0)

        def is_full() -> bool:
            for team in TEAMS:
                held[team] = sum(one.ask.tenant == team for one in scheduler.cluster.placed.values())
            return sum(held.values()) == 8

        await eventually_so(is_full)
        assert held == {"physics": 6, "chemistry": 2}


async def test_a_share_is_no_ceiling_when_resources_are_idle(teams: Runtime) -> None:
    await set_soft(teams, "physics", fairShareTarget=0.15)
    assert code(await node(teams, "n1", gpu=4)) == "ok"
    async with acting(teams), scheduling(teams, PATIENT):
        for name in ("a", "b", "c", "d"):
            await submit(teams, name, where="physics")
        await running(teams, "a", "b", "c", "d")


async def test_a_reduced_share_stops_nothing_and_still_schedules_when_resources_are_idle(teams: Runtime) -> None:
    for team in TEAMS:
        await set_soft(teams, team, fairShareTarget=0.5)
    assert code(await node(teams, "n1", gpu=4)) == "ok"
    async with acting(teams), scheduling(teams, HASTY) as scheduler:
        await submit(teams, "a", where="physics")
        await submit(teams, "b", where="physics")
        await running(teams, "a", "b")
        await set_soft(teams, "physics", fairShareTarget=0.1)
        await eventually_so(lambda: scheduler.cluster.tenants["physics"].target == 0.1)
        await settled(scheduler)
        for name in ("a", "b"):
            assert await history(teams, name, "physics") == ["Pending", "Scheduled", "Running"]
        await submit(teams, "c", where="physics")
        await running(teams, "c")


# Burst.


async def test_burst_allocations_are_the_first_to_go_when_others_need_their_share(teams: Runtime) -> None:
    """One may go beyond its share while the cluster is idle. What it started last goes first, whatever its priority."""
    await set_soft(teams, "physics", fairShareTarget=0.5, burstAllowance=1.5)
    await set_soft(teams, "chemistry", fairShareTarget=0.5)
    assert code(await node(teams, "n1", gpu=4)) == "ok"
    async with acting(teams), scheduling(teams, HASTY):
        for name in ("old", "older", "new", "newest"):
            await submit(teams, name, where="physics", spec={"priority": 500})
            await running(teams, name)
        await submit(teams, "asks", where="chemistry", spec={"priority": 100}, gpu=2)
        await running(teams, "asks", where="chemistry")
        for name in ("new", "newest"):
            now = await until(teams, name, is_in("Pending"), "physics")
            assert now["reason"] == "Preempted"
            assert "this ran beyond its own tenant's" in now["message"]
        for name in ("old", "older"):
            assert await history(teams, name, "physics") == ["Pending", "Scheduled", "Running"]
        # Within its share, nothing of it is stopped for what is less urgent.
        await submit(teams, "more", where="chemistry", spec={"priority": 100}, gpu=2)
        await until(teams, "more", lambda now: now.get("reason", "").startswith("no_capacity"), "chemistry")
        for name in ("old", "older"):
            assert (await status(teams, name, "physics"))["phase"] == "Running"
