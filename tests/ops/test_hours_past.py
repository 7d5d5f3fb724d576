"""Budgets: what was used before today is added up now and then, and told as if that were done each time."""

from datetime import UTC, datetime, timedelta

import pytest

from bursar.core.hours import DAY, HOUR, Began, Ended
from bursar.ops.hours import STRIDE, BudgetUse, Past, load_budgets, roll
from bursar.ops.office import Office
from bursar.store import usage as store
from offices import change, code, delete, tenant
from spent_hours import GPU, make_old, spend

# What is read again is seen; what is kept is not.
FORGE = "UPDATE usage_day SET total = total + 3600000 WHERE username = '' AND at < now() - interval '2 days'"


@pytest.fixture
async def physics(office: Office) -> Office:
    assert code(await tenant(office, "physics", gpuHoursBudget=100)) == "ok"
    assert code(await tenant(office, "optics", parent="physics")) == "ok"
    await spend(office, "physics", gpu_hours=4, days_ago=80)
    await spend(office, "optics", gpu_hours=2, node_hours=0.5, days_ago=5)
    return office


async def told(office: Office, now: datetime | None = None) -> BudgetUse:
    """As whoever keeps the past is told."""
    async with office.database.reader() as db:
        tree = await office.trees.refresh(db)
        return (await load_budgets(db, tree, now, past=office.past_hours))["physics"]


async def right(office: Office, now: datetime | None = None) -> BudgetUse:
    async with office.database.reader() as db:
        tree = await office.trees.refresh(db)
        return (await load_budgets(db, tree, now, past=Past()))["physics"]


async def test_days_that_are_over_are_not_added_up_again(physics: Office) -> None:
    now = datetime.now(UTC)
    assert await told(physics, now) == BudgetUse(6.0, 0.5)
    async with physics.database.reader() as db:
        await db.execute(FORGE)
    assert await told(physics, now) == BudgetUse(6.0, 0.5)
    assert (await right(physics, now)).gpu_hours > 6.0


async def test_what_is_entered_late_for_days_that_are_over_counts_before_and_after_it_is_entered(
    physics: Office,
) -> None:
    assert await told(physics) == BudgetUse(6.0, 0.5)
    at = int(datetime.now(UTC).timestamp()) - 3 * DAY
    late = Began("late", "n0", 1, "optics", "-", "old", "late", {GPU: 1000}, "", at)
    async with physics.database.reader() as db:
        await store.save(db, (), (), [(late, Ended("late", "n0", at + HOUR, "Succeeded"))])
    assert await told(physics) == BudgetUse(7.0, 0.5)
    while await roll(physics.database):
        pass
    assert await told(physics) == BudgetUse(7.0, 0.5)


async def test_what_goes_on_for_days_counts_up_to_now_wherever_it_is_entered(physics: Office) -> None:
    began_at = int(datetime.now(UTC).timestamp()) - 2 * DAY
    long = Began("long", "n0", 1, "physics", "-", "ns", "long", {GPU: 1000, "nodes": 250}, "", began_at)
    async with physics.database.reader() as db:
        await store.save(db, [long], ())
    for entered in (False, True):
        while entered and await roll(physics.database):
            pass
        now = datetime.fromtimestamp(began_at + 2 * DAY + 7, UTC)
        assert await told(physics, now) == BudgetUse(54.0 + 7 / HOUR, 12.5 + 0.25 * 7 / HOUR)
        later = now + timedelta(seconds=1801)
        assert await told(physics, later) == await right(physics, later)


async def test_the_window_moves_on_and_days_fall_out_of_it(physics: Office) -> None:
    now = datetime.now(UTC)
    assert await told(physics, now) == BudgetUse(6.0, 0.5)
    for seconds in (STRIDE, 9 * DAY + 23 * HOUR, 10 * DAY + 1800, 10 * DAY + 2 * HOUR):
        later = now + timedelta(seconds=seconds)
        assert await told(physics, later) == await right(physics, later)
    assert (await told(physics, now + timedelta(days=10, hours=2))).gpu_hours == 2.0


async def test_another_period_is_another_window(physics: Office) -> None:
    assert (await told(physics)).gpu_hours == 6.0
    assert code(await change(physics, "Settings", "", "system", scheduling={"budgetPeriodDays": 30})) == "ok"
    assert (await told(physics)).gpu_hours == 2.0


async def test_a_successor_of_the_same_name_has_used_nothing_also_where_the_past_is_kept(physics: Office) -> None:
    await spend(physics, "optics", gpu_hours=3, days_ago=0.1)
    assert (await told(physics)).gpu_hours == 9.0
    assert code(await delete(physics, "Tenant", "", "optics")) == "ok"
    assert code(await tenant(physics, "optics", parent="physics")) == "ok"
    assert (await told(physics)).gpu_hours == 4.0


async def test_who_comes_and_goes_below_a_tenant_is_counted_with_it(physics: Office) -> None:
    assert (await told(physics)).gpu_hours == 6.0
    assert code(await tenant(physics, "atoms", parent="physics")) == "ok"
    await spend(physics, "atoms", gpu_hours=1, days_ago=3)
    await make_old(physics, "atoms")
    assert (await told(physics)).gpu_hours == 7.0
    assert code(await change(physics, "Tenant", "", "optics", parent="")) == "ok"
    assert (await told(physics)).gpu_hours == 5.0
