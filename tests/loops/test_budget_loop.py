"""Watching over budgets: from hours that were used to what people are told, with the real figures."""

from typing import Any

import msgspec
import pytest

from bursar.commands.usage.budget_alert import tenant_key
from bursar.core.objects.object import Stored
from bursar.loops.budget import review
from bursar.ops.objects import object as object_ops
from bursar.ops.runtime.runtime import Runtime
from support.runtime.runtime import change, code, namespace, node, tenant
from support.scheduling.schedulers import acting, edit, history, is_in, scheduling, settled, submit, term, until
from support.usage.spent_hours import spend


@pytest.fixture
async def physics(runtime: Runtime) -> Runtime:
    assert code(await tenant(runtime, "physics", gpuHoursBudget=100)) == "ok"
    assert code(await namespace(runtime, "lab", "physics")) == "ok"
    return runtime


async def true_conditions(runtime: Runtime, name: str = "physics") -> set[str]:
    found = await object_ops.get(runtime, tenant_key(name))
    assert isinstance(found, Stored)
    return {one["type"] for one in msgspec.json.decode(found.status).get("conditions", ()) if one["status"] == "True"}


async def told(runtime: Runtime) -> list[tuple[str, str]]:
    async with runtime.database.reader() as db:
        return [(row["tenant"], row["type"]) for row in await db.fetch("SELECT tenant, type FROM notice ORDER BY id")]


async def test_people_are_told_at_80_and_at_100_percent_and_once_each(physics: Runtime) -> None:
    await spend(physics, "physics", gpu_hours=79)
    assert await review(physics) == 0
    await spend(physics, "physics", gpu_hours=2)
    assert await review(physics) == 1
    assert await review(physics) == 0
    assert await true_conditions(physics) == {"BudgetWarning"}
    await spend(physics, "physics", gpu_hours=30)
    assert await review(physics) == 1
    assert await true_conditions(physics) == {"BudgetWarning", "BudgetExhausted"}
    assert await told(physics) == [("physics", "budget.warning"), ("physics", "budget.exhausted")]


async def test_node_hours_have_a_budget_of_their_own_and_the_worse_counts(physics: Runtime) -> None:
    assert code(await change(physics, "Tenant", "", "physics", nodeHoursBudget=10)) == "ok"
    await spend(physics, "physics", gpu_hours=1, node_hours=9)
    await review(physics)
    assert await true_conditions(physics) == {"BudgetWarning"}


async def test_a_parent_is_told_of_what_those_below_it_have_used_and_they_are_not(runtime: Runtime) -> None:
    assert code(await tenant(runtime, "institute", gpuHoursBudget=100)) == "ok"
    assert code(await tenant(runtime, "group", parent="institute")) == "ok"
    assert code(await tenant(runtime, "other", gpuHoursBudget=100)) == "ok"
    await spend(runtime, "group", gpu_hours=85)
    await review(runtime)
    assert await told(runtime) == [("institute", "budget.warning")]
    assert await true_conditions(runtime, "group") == set()


async def test_what_was_told_is_taken_back_when_the_window_moves_on(physics: Runtime) -> None:
    await spend(physics, "physics", gpu_hours=120, days_ago=3)
    await review(physics)
    assert await true_conditions(physics) == {"BudgetWarning", "BudgetExhausted"}

    def shorter(document: dict[str, Any]) -> None:
        document["spec"] = {"scheduling": {"budgetPeriodDays": 2}}

    assert code(await edit(physics, "Settings", "", "system", shorter)) == "ok"
    assert await review(physics) == 1
    assert await true_conditions(physics) == set()
    assert (await told(physics))[-1] == ("physics", "budget.restored")


async def test_what_was_told_is_taken_back_when_there_is_no_budget_any_more(physics: Runtime) -> None:
    await spend(physics, "physics", gpu_hours=120)
    await review(physics)

    def without(document: dict[str, Any]) -> None:
        del document["spec"]["gpuHoursBudget"]

    assert code(await edit(physics, "Tenant", "", "physics", without)) == "ok"
    assert await review(physics) == 1
    assert await true_conditions(physics) == set()
    assert await review(physics) == 0


async def test_who_was_deposed_tells_nothing_of_budgets(physics: Runtime) -> None:
    await spend(physics, "physics", gpu_hours=120)
    old = await term(physics)
    new = await term(physics, "another", depose=True)
    assert await review(physics, old) == 0
    assert await told(physics) == []
    assert await review(physics, new) == 1


async def test_running_allocations_continue_when_the_budget_is_exhausted(physics: Runtime) -> None:
    assert code(await node(physics, "n1", gpu=2)) == "ok"
    async with acting(physics), scheduling(physics) as scheduler:
        await submit(physics, "runs", where="lab")
        await until(physics, "runs", is_in("Running"), "lab")
        await spend(physics, "physics", gpu_hours=500)
        await review(physics)
        assert await true_conditions(physics) == {"BudgetWarning", "BudgetExhausted"}
        await settled(scheduler)
        assert await history(physics, "runs", "lab") == ["Pending", "Scheduled", "Running"]
        # New work is not refused either: it runs on capacity that nobody else wants.
        await submit(physics, "also", where="lab")
        await until(physics, "also", is_in("Running"), "lab")
