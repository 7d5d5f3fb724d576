"""The scheduler's policy follows the system's settings, from the next cycle on."""

from typing import Any

from bursar.ops.runtime.runtime import Runtime
from support.runtime.runtime import code, node
from support.scheduling.schedulers import acting, edit, is_in, scheduling, submit, until


async def set_policy(runtime: Runtime, **scheduling: Any) -> None:
    def by(document: dict[str, Any]) -> None:
        document["spec"] = {"scheduling": scheduling}

    assert code(await edit(runtime, "Settings", "", "system", by)) == "ok"


async def test_a_minimum_runtime_that_is_lowered_lets_the_urgent_in(runtime: Runtime) -> None:
    assert code(await node(runtime, "n1", gpu=1)) == "ok"
    async with acting(runtime), scheduling(runtime):
        await submit(runtime, "slow", spec={"priority": 0})
        await until(runtime, "slow", is_in("Running"))
        await submit(runtime, "urgent", spec={"priority": 1000})
        await until(runtime, "urgent", lambda now: now.get("reason", "").startswith("no_capacity"))
        await set_policy(runtime, minRuntimeSeconds=0, gracePeriodSeconds=1)
        await until(runtime, "urgent", is_in("Running"))
        assert (await until(runtime, "slow", is_in("Pending")))["phase"] == "Pending"


async def test_what_was_set_before_a_leader_begins_holds_for_it(runtime: Runtime) -> None:
    assert code(await node(runtime, "n1", gpu=1)) == "ok"
    await set_policy(runtime, minRuntimeSeconds=7, preemption=False)
    async with scheduling(runtime) as scheduler:
        await submit(runtime, "one")
        await until(runtime, "one", is_in("Scheduled"))
        policy = scheduler.policy
        assert (policy.min_runtime_seconds, policy.preemption, policy.grace_seconds) == (7, False, 30)
