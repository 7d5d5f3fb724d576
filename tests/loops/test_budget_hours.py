"""The scheduler knows what tenants have used of their budgets: from hours as they are kept, and without waiting."""

import asyncio

from bursar.core.usage.budget import PENALTY_FLOOR
from bursar.core.usage.usage_levels import HOUR, UsageBegan
from bursar.loops.schedule import Scheduler
from bursar.ops.runtime.runtime import Runtime
from bursar.store.usage import usage_levels as store
from support.runtime.runtime import change, code, tenant
from support.scheduling.schedulers import scheduling
from support.usage.hourly import backdate, now

GPU = "nvidia.com/gpu"


async def use(runtime: Runtime, name: str, gpus: int, hours: int) -> None:
    """So many GPUs, since so many hours ago and until now."""
    begin = int(now().timestamp()) - hours * HOUR
    one = UsageBegan(f"uid-{name}", "a", 1, name, "-", "lab", "x", {GPU: gpus * 1000, "nodes": 1000}, "", begin)
    async with runtime.database.reader() as db, db.transaction():
        await store.save(db, [one], [])


async def penalty_is(scheduler: Scheduler, name: str, wanted: float) -> None:
    async with asyncio.timeout(30):
        while scheduler.cluster.tenants[name].penalty != wanted:
            scheduler.nudge()
            await asyncio.sleep(0.02)


async def test_a_scheduler_knows_from_the_start_what_was_used(runtime: Runtime) -> None:
    await tenant(runtime, "physics", gpuHoursBudget=10)
    await tenant(runtime, "biology", gpuHoursBudget=1000)
    await backdate(runtime, 0)
    for name in ("physics", "biology"):
        await use(runtime, name, 4, 3)
    async with scheduling(runtime) as scheduler:
        assert scheduler.cluster.tenants["physics"].penalty == PENALTY_FLOOR
        assert scheduler.cluster.tenants["biology"].penalty == 1.0


async def test_what_is_used_below_counts_for_who_has_the_budget(runtime: Runtime) -> None:
    await tenant(runtime, "science", nodeHoursBudget=2)
    await tenant(runtime, "physics", parent="science")
    await backdate(runtime, 0)
    await use(runtime, "physics", 4, 3)
    async with scheduling(runtime) as scheduler:
        assert scheduler.cluster.tenants["science"].penalty == PENALTY_FLOOR
        assert scheduler.cluster.tenants["physics"].penalty == 1.0


async def test_a_budget_that_is_set_counts_at_once(runtime: Runtime) -> None:
    await tenant(runtime, "physics")
    await backdate(runtime, 0)
    await use(runtime, "physics", 4, 3)
    async with scheduling(runtime) as scheduler:
        assert scheduler.cluster.tenants["physics"].penalty == 1.0
        assert code(await change(runtime, "Tenant", "", "physics", gpuHoursBudget=10)) == "ok"
        await penalty_is(scheduler, "physics", PENALTY_FLOOR)
        assert code(await change(runtime, "Tenant", "", "physics", gpuHoursBudget=1000)) == "ok"
        await penalty_is(scheduler, "physics", 1.0)
