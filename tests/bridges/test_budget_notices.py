"""What is told of budgets comes to those who asked for it, as a signed CloudEvent, and to nobody else."""

from bursar.loops.budget import review
from bursar.ops.runtime.runtime import Runtime
from support.process.receivers import receiving
from support.process.webhook_sending import hook, send_all
from support.runtime.runtime import change, code, tenant
from support.usage.spent_hours import spend


async def test_a_tenants_people_are_sent_what_became_of_their_budget_at_80_and_at_100_percent(runtime: Runtime) -> None:
    for name in ("physics", "chemistry"):
        assert code(await tenant(runtime, name, gpuHoursBudget=100, nodeHoursBudget=1000)) == "ok"
    async with receiving() as theirs, receiving() as others, receiving() as money:
        secret = await hook(runtime, "theirs", theirs, tenant="physics")
        await hook(runtime, "others", others, tenant="chemistry")
        await hook(runtime, "money", money, types=("credit.low",))
        await spend(runtime, "physics", gpu_hours=81, node_hours=20)
        await review(runtime)
        await spend(runtime, "physics", gpu_hours=19)
        await review(runtime)
        await send_all(runtime)
        assert code(await change(runtime, "Tenant", "", "physics", gpuHoursBudget=1000)) == "ok"
        await review(runtime)
        await review(runtime)
        await send_all(runtime)
        assert others.got == money.got == []
        assert all(one.is_signed_with(secret) for one in theirs.got)
        events = sorted((one.event for one in theirs.got), key=lambda event: str(event["time"]))
    assert [event["type"] for event in events] == [
        "io.bursar.budget.warning",
        "io.bursar.budget.exhausted",
        "io.bursar.budget.restored",
    ]
    assert {(event["source"], event["subject"], event["tenant"]) for event in events} == {
        ("/bursar/budget", "physics", "physics")
    }
    assert events[0]["data"] == {
        "tenant": "physics",
        "threshold": 0.8,
        "utilization": 0.81,
        "gpu_hours_used": 81.0,
        "gpu_hours_budget": 100.0,
        "node_hours_used": 20.0,
        "node_hours_budget": 1000.0,
        "budget_period_days": 90,
        "source": "internal",
        "message": "81 % of the budget is used: 81.0 of 100 GPU-hours in the last 90 days",
    }
    assert (events[1]["data"]["threshold"], events[1]["data"]["utilization"]) == (1.0, 1.0)
    assert (events[2]["data"]["threshold"], events[2]["data"]["utilization"]) == (None, 0.1)
