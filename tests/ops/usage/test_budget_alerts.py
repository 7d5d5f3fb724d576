"""A tenant's people are told of their budget: in its status, in the feed and as a notice, together and once."""

import asyncio
from typing import Any

import msgspec
import pytest

from bursar.commands.command import Reply, Written
from bursar.commands.usage.budget_alert import BUDGETS, Warn, tenant_key
from bursar.core.objects.object import Key, Origin, Stored
from bursar.core.values.refusal import Refusal
from bursar.ops.objects import object as object_ops
from bursar.ops.runtime.runtime import Runtime
from bursar.store.objects import change as change_store
from support.runtime.runtime import change, code, delete, node, opened, refusal, tenant
from support.scheduling.schedulers import edit, term

KEY = tenant_key("physics")


@pytest.fixture
async def physics(runtime: Runtime) -> Runtime:
    assert code(await tenant(runtime, "physics", gpuHoursBudget=100, limits={"nodes": 3})) == "ok"
    return runtime


async def stored(runtime: Runtime) -> Stored:
    found = await object_ops.get(runtime, KEY)
    assert isinstance(found, Stored)
    return found


async def tell(runtime: Runtime, gpu_hours: float, node_hours: float = 0.0, **changed: Any) -> Reply:
    uid = changed.pop("uid", None) or (await stored(runtime)).uid
    given = {"days": 90, "source": "internal", **changed}
    origin = Origin(BUDGETS, "review")
    command = Warn(key=KEY, origin=origin, uid=uid, gpu_hours=gpu_hours, node_hours=node_hours, **given)
    return await runtime.changing.submit(command, KEY.name)


async def conditions(runtime: Runtime) -> dict[str, str]:
    status = msgspec.json.decode((await stored(runtime)).status)
    return {one["type"]: one["status"] for one in status.get("conditions", ())}


async def reasons(runtime: Runtime) -> list[str]:
    status = msgspec.json.decode((await stored(runtime)).status)
    return [one["reason"] for one in status["conditions"]]


async def notices(runtime: Runtime) -> list[tuple[str, dict[str, Any]]]:
    async with runtime.database.reader() as db:
        rows = await db.fetch("SELECT type, tenant, subject, data FROM notice ORDER BY id")
    assert all((row["tenant"], row["subject"]) == ("physics", "physics") for row in rows)
    return [(row["type"], msgspec.json.decode(row["data"])) for row in rows]


async def verbs(runtime: Runtime) -> list[tuple[str, str]]:
    """The Events of the tenant by the budget loop."""
    async with runtime.database.reader() as db:
        found = await change_store.load_happenings_of(db, "", "physics", "Tenant", 1000)
    return [(one.verb, one.reason) for one in reversed(found) if one.actor == BUDGETS]


async def test_at_eighty_percent_people_are_warned_once(physics: Runtime) -> None:
    assert isinstance(await tell(physics, 79.9), Written)
    assert await conditions(physics) == {}
    for _ in range(3):
        await tell(physics, 80.0)
    assert await conditions(physics) == {"BudgetWarning": "True", "BudgetExhausted": "False"}
    ((type_, data),) = await notices(physics)
    assert type_ == "budget.warning"
    assert data == {
        "tenant": "physics",
        "threshold": 0.8,
        "utilization": 0.8,
        "gpu_hours_used": 80.0,
        "gpu_hours_budget": 100.0,
        "node_hours_used": 0.0,
        "node_hours_budget": None,
        "budget_period_days": 90,
        "source": "internal",
        "message": "80 % of the budget is used: 80.0 of 100 GPU-hours in the last 90 days",
    }
    assert await verbs(physics) == [("warn", data["message"])]


async def test_at_a_hundred_percent_people_are_told_that_it_is_used_up(physics: Runtime) -> None:
    await tell(physics, 85.0)
    await tell(physics, 100.0)
    await tell(physics, 130.0)
    assert await conditions(physics) == {"BudgetWarning": "True", "BudgetExhausted": "True"}
    assert [type_ for type_, _ in await notices(physics)] == ["budget.warning", "budget.exhausted"]
    assert [verb for verb, _ in await verbs(physics)] == ["warn", "exhaust"]


async def test_who_passes_both_marks_at_once_is_told_the_worse(physics: Runtime) -> None:
    await tell(physics, 250.0)
    ((type_, data),) = await notices(physics)
    assert (type_, data["threshold"], data["utilization"]) == ("budget.exhausted", 1.0, 2.5)


async def test_use_that_goes_back_and_forth_a_little_is_told_once_and_cleared_when_it_has_fallen(
    physics: Runtime,
) -> None:
    for used in (80.0, 79.5, 80.1, 79.0, 80.0, 100.0, 99.0, 100.5):
        await tell(physics, used)
    assert [type_ for type_, _ in await notices(physics)] == ["budget.warning", "budget.exhausted"]
    await tell(physics, 97.0)
    assert await conditions(physics) == {"BudgetWarning": "True", "BudgetExhausted": "False"}
    assert len(await notices(physics)) == 2  # It is still nearly used, which was told.
    await tell(physics, 77.0)
    assert await conditions(physics) == {"BudgetWarning": "False", "BudgetExhausted": "False"}
    assert (await notices(physics))[-1][0] == "budget.restored"
    await tell(physics, 81.0)
    assert (await notices(physics))[-1][0] == "budget.warning"


async def test_conditions_say_how_much_of_the_budget_is_used(physics: Runtime) -> None:
    for used, expected in (
        (85.0, ["BudgetNearlyUsed", "BudgetNotUsedUp"]),
        (100.0, ["BudgetUsedUp", "BudgetUsedUp"]),
        (97.0, ["BudgetNearlyUsed", "BudgetNotUsedUp"]),
        (50.0, ["BudgetHasRoom", "BudgetNotUsedUp"]),
    ):
        await tell(physics, used)
        assert await reasons(physics) == expected


async def test_many_who_look_at_once_tell_it_once(physics: Runtime, database_url: str) -> None:
    async with opened(database_url) as other:
        replies = await asyncio.gather(*(tell(one, 90.0) for one in (physics, other) for _ in range(10)))
    assert {code(one) for one in replies} == {"ok"}
    assert [type_ for type_, _ in await notices(physics)] == ["budget.warning"]
    assert len(await verbs(physics)) == 1


async def test_a_budget_that_was_raised_meanwhile_counts(physics: Runtime) -> None:
    assert code(await change(physics, "Tenant", "", "physics", gpuHoursBudget=1000)) == "ok"
    await tell(physics, 120.0)  # Read when the budget was still 100.
    assert await notices(physics) == []


async def test_a_budget_that_was_taken_away_warns_of_nothing(physics: Runtime) -> None:
    await tell(physics, 120.0)

    def without(document: dict[str, Any]) -> None:
        del document["spec"]["gpuHoursBudget"]

    assert code(await edit(physics, "Tenant", "", "physics", without)) == "ok"
    assert await conditions(physics) == {"BudgetWarning": "True", "BudgetExhausted": "True"}  # An edit leaves them.
    await tell(physics, 120.0)
    assert await conditions(physics) == {"BudgetWarning": "False", "BudgetExhausted": "False"}
    assert (await notices(physics))[-1][1]["message"] == "the tenant no longer has a budget of hours"


async def test_the_hours_of_one_that_is_gone_are_not_told_of_its_successor(physics: Runtime) -> None:
    uid = (await stored(physics)).uid
    assert code(await delete(physics, "Tenant", "", "physics")) == "ok"
    assert code(await tell(physics, 120.0, uid=uid)) == "not_found"
    assert code(await tenant(physics, "physics", gpuHoursBudget=100)) == "ok"
    assert code(await tell(physics, 120.0, uid=uid)) == "stale"
    assert await notices(physics) == []


async def test_who_was_deposed_tells_nothing(physics: Runtime) -> None:
    old = await term(physics)
    await term(physics, "another", depose=True)
    assert isinstance(await tell(physics, 120.0, fence=old), Refusal)
    assert await notices(physics) == []
    assert await conditions(physics) == {}


async def test_limits_stand_as_they_were_and_can_be_changed_after_it(physics: Runtime, database_url: str) -> None:
    await tell(physics, 120.0)
    async with opened(database_url) as other:
        for runtime in (physics, other):
            assert code(await change(runtime, "Tenant", "", "physics", limits={"nodes": 2})) == "ok"
            async with runtime.database.reader() as db:
                tree = await runtime.trees.refresh(db)
            assert tree.tenants["physics"].limits == {"nodes": 2000}
        assert code(await node(other, "n1", gpu=1)) == "ok"
    assert await conditions(physics) == {"BudgetWarning": "True", "BudgetExhausted": "True"}


async def test_a_tenant_is_found_by_how_it_stands(physics: Runtime) -> None:
    await tell(physics, 85.0)
    assert (await stored(physics)).fields["status.budget"] == "Warning"
    assert code(await change(physics, "Tenant", "", "physics", weight=2)) == "ok"
    assert (await stored(physics)).fields["status.budget"] == "Warning"


async def test_a_refused_word_leaves_no_notice(physics: Runtime) -> None:
    """What is told and what it tells of are one: neither is there without the other."""
    async with physics.database.reader() as db:
        await db.execute("ALTER TABLE notice ADD CONSTRAINT never CHECK (type <> 'budget.warning')")
    with pytest.raises(Exception, match="never"):
        await tell(physics, 85.0)
    assert await conditions(physics) == {}
    assert refusal(await object_ops.get(physics, Key("Tenant", "", "nobody"))).code == "not_found"
