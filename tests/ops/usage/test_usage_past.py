"""Budgets: what was used before today is added up now and then, and told as if that were done each time."""

from datetime import UTC, datetime, timedelta

import pytest

from bursar.core.usage.usage_levels import DAY, HOUR, UsageBegan, UsageEnded, hours
from bursar.ops.runtime.runtime import Runtime
from bursar.ops.usage.usage_rollup import STRIDE, BudgetUse, Past, load_budgets, roll
from bursar.store.usage import usage_levels as store
from support.runtime.runtime import change, code, delete, tenant
from support.usage.spent_hours import GPU, make_old, spend

# What is read again is seen; what is kept is not.
FORGE = "UPDATE usage_day SET total = total + 3600000 WHERE username = '' AND at < now() - interval '2 days'"


@pytest.fixture
async def physics(runtime: Runtime) -> Runtime:
    assert code(await tenant(runtime, "physics", gpuHoursBudget=100)) == "ok"
    assert code(await tenant(runtime, "optics", parent="physics")) == "ok"
    await spend(runtime, "physics", gpu_hours=4, days_ago=80)
    await spend(runtime, "optics", gpu_hours=2, node_hours=0.5, days_ago=5)
    return runtime


async def told(runtime: Runtime, now: datetime | None = None) -> BudgetUse:
    """The record of changed past days, as a cache of the past reads it."""
    async with runtime.database.reader() as db:
        tree = await runtime.trees.refresh(db)
        return (await load_budgets(db, tree, now, past=runtime.past_hours))["physics"]


async def right(runtime: Runtime, now: datetime | None = None) -> BudgetUse:
    async with runtime.database.reader() as db:
        tree = await runtime.trees.refresh(db)
        return (await load_budgets(db, tree, now, past=Past()))["physics"]


async def test_days_that_are_over_are_not_added_up_again(physics: Runtime) -> None:
    now = datetime.now(UTC)
    assert await told(physics, now) == BudgetUse(6.0, 0.5)
    async with physics.database.reader() as db:
        await db.execute(FORGE)
    assert await told(physics, now) == BudgetUse(6.0, 0.5)
    assert (await right(physics, now)).gpu_hours > 6.0


async def test_what_is_entered_late_for_days_that_are_over_counts_before_and_after_it_is_entered(
    physics: Runtime,
) -> None:
    assert await told(physics) == BudgetUse(6.0, 0.5)
    at = int(datetime.now(UTC).timestamp()) - 3 * DAY
    late = UsageBegan("late", "n0", 1, "optics", "-", "old", "late", {GPU: 1000}, "", at)
    async with physics.database.reader() as db:
        await store.save(db, (), (), [(late, UsageEnded("late", "n0", at + HOUR, "Succeeded"))])
    assert await told(physics) == BudgetUse(7.0, 0.5)
    while await roll(physics.database):
        pass
    assert await told(physics) == BudgetUse(7.0, 0.5)


async def test_what_goes_on_for_days_counts_up_to_now_wherever_it_is_entered(physics: Runtime) -> None:
    began_at = int(datetime.now(UTC).timestamp()) - 2 * DAY
    long = UsageBegan("long", "n0", 1, "physics", "-", "ns", "long", {GPU: 1000, "nodes": 250}, "", began_at)
    async with physics.database.reader() as db:
        await store.save(db, [long], ())
    for entered in (False, True):
        while entered and await roll(physics.database):
            pass
        now = datetime.fromtimestamp(began_at + 2 * DAY + 7, UTC)
        assert await told(physics, now) == BudgetUse(54.0 + 7 / HOUR, 12.5 + 0.25 * 7 / HOUR)
        later = now + timedelta(seconds=1801)
        assert await told(physics, later) == await right(physics, later)


async def test_the_window_moves_on_and_days_fall_out_of_it(physics: Runtime) -> None:
    now = datetime.now(UTC)
    assert await told(physics, now) == BudgetUse(6.0, 0.5)
    for seconds in (STRIDE, 9 * DAY + 23 * HOUR, 10 * DAY + 1800, 10 * DAY + 2 * HOUR):
        later = now + timedelta(seconds=seconds)
        assert await told(physics, later) == await right(physics, later)
    assert (await told(physics, now + timedelta(days=10, hours=2))).gpu_hours == 2.0


async def counted(
    runtime: Runtime, now: datetime, since: dict[str, int] | None = None, *, day: int | None = None
) -> BudgetUse:
    """As every record says of just the window, or from a day on."""
    begin, totals = day or int(now.timestamp()) - 90 * DAY, {GPU: 0, "nodes": 0}
    async with runtime.database.reader() as db:
        for name in ("physics", "optics"):
            first = datetime.fromtimestamp(max(begin, (since or {}).get(name, begin)), UTC)
            for (resource, _), one in (await store.recompute(db, name, first, now)).items():
                totals[resource] += one.total
    return BudgetUse(hours(totals[GPU]), hours(totals["nodes"]))


async def put(runtime: Runtime, uid: str, name: str, at: int, seconds: int, *, is_entered: bool = True) -> None:
    began = UsageBegan(uid, "n0", 1, name, "-", "old", uid, {GPU: 3000, "nodes": 700}, "", at)
    async with runtime.database.reader() as db:
        await store.save(db, (), (), [(began, UsageEnded(uid, "n0", at + seconds, "Succeeded"))])
    while is_entered and await roll(runtime.database):
        pass


def strides_ago(count: int) -> int:
    """When a stride began, ninety days and some strides ago."""
    return (int(datetime.now(UTC).timestamp()) - 90 * DAY) // STRIDE * STRIDE + count * STRIDE


def moments(at: int) -> list[datetime]:
    """When the window begins around a time, and now and then within its stride."""
    return [datetime.fromtimestamp(at + seconds + 90 * DAY, UTC) for seconds in (-1, 0, 1, 99, 250, 251, 599, 600, 43)]


@pytest.mark.parametrize("are_hours_kept", [True, False])
async def test_what_is_told_is_what_records_say_of_just_the_window(physics: Runtime, are_hours_kept: bool) -> None:
    begin = strides_ago(2)
    await put(physics, "across", "physics", begin - 5000, 9000)
    await put(physics, "for-days", "physics", begin - 5000, 3 * DAY)
    await put(physics, "begins", "optics", begin + 100, 7000)
    await put(physics, "ends", "physics", begin - 400, 650)
    await put(physics, "within", "optics", begin + 20, 200)
    if not are_hours_kept:
        async with physics.database.reader() as db:
            await store.forget_hours(db, datetime.now(UTC) - timedelta(days=30))
    for now in moments(begin):
        expected = await counted(physics, now)
        assert await told(physics, now) == await right(physics, now) == expected
        assert expected.gpu_hours > 0


async def test_what_was_kept_of_a_stride_is_read_again_after_something_came_late_there(physics: Runtime) -> None:
    begin = strides_ago(2)
    await put(physics, "first", "physics", begin - 100, 1000)
    now = datetime.fromtimestamp(begin + 300 + 90 * DAY, UTC)
    assert await told(physics, now) == await counted(physics, now)
    await put(physics, "late", "optics", begin + 200, 1000, is_entered=False)
    assert await told(physics, now) == await counted(physics, now)
    while await roll(physics.database):
        pass
    for then in (now, now + timedelta(seconds=100)):
        assert await told(physics, then) == await counted(physics, then)


async def test_who_was_created_within_the_stride_counts_from_then_on(physics: Runtime) -> None:
    begin = strides_ago(2)
    await put(physics, "somebody", "optics", begin - 100, 5000)
    created = begin + 250
    await make_old(physics, "optics", f"{datetime.fromtimestamp(created, UTC):%Y-%m-%dT%H:%M:%SZ}")
    for now in moments(begin):
        assert await told(physics, now) == await right(physics, now) == await counted(physics, now, {"optics": created})


async def test_where_records_are_gone_the_window_begins_with_its_day(physics: Runtime) -> None:
    begin = strides_ago(2)
    await put(physics, "of-old", "physics", begin - 3 * DAY, 6 * DAY)
    async with physics.database.reader() as db:
        await db.execute("UPDATE usage_rolled SET records_from = $1", datetime.now(UTC) - timedelta(days=1))
    for now in moments(begin):
        day = (int(now.timestamp()) - 90 * DAY) // DAY * DAY
        assert await told(physics, now) == await right(physics, now) == await counted(physics, now, day=day)


async def test_another_period_is_another_window(physics: Runtime) -> None:
    assert (await told(physics)).gpu_hours == 6.0
    assert code(await change(physics, "Settings", "", "system", scheduling={"budgetPeriodDays": 30})) == "ok"
    assert (await told(physics)).gpu_hours == 2.0


async def test_a_successor_of_the_same_name_has_used_nothing_also_where_the_past_is_kept(physics: Runtime) -> None:
    await spend(physics, "optics", gpu_hours=3, days_ago=0.1)
    assert (await told(physics)).gpu_hours == 9.0
    assert code(await delete(physics, "Tenant", "", "optics")) == "ok"
    assert code(await tenant(physics, "optics", parent="physics")) == "ok"
    assert (await told(physics)).gpu_hours == 4.0


async def test_who_comes_and_goes_below_a_tenant_is_counted_with_it(physics: Runtime) -> None:
    assert (await told(physics)).gpu_hours == 6.0
    assert code(await tenant(physics, "atoms", parent="physics")) == "ok"
    await spend(physics, "atoms", gpu_hours=1, days_ago=3)
    await make_old(physics, "atoms")
    assert (await told(physics)).gpu_hours == 7.0
    assert code(await change(physics, "Tenant", "", "optics", parent="")) == "ok"
    assert (await told(physics)).gpu_hours == 5.0
