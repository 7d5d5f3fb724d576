"""Short words for what tests do with work that is stopped."""

from typing import Any

import msgspec

from bursar.commands.command import Reply
from bursar.commands.workloads.report import Report
from bursar.core.nodes.eviction import EvictionReason, EvictionRule, Notice
from bursar.core.objects.allocation import Phase
from bursar.core.objects.charge import Amounts
from bursar.core.objects.object import Key, Stored
from bursar.ops.runtime.runtime import Runtime
from bursar.ops.scheduling.placement import evict, report
from bursar.store.nodes import node as node_store
from support.runtime.runtime import TEST, allocation, assert_counters_equal_charges, bind, code, get, one_moment
from support.usage.hourly import assert_hours_agree

GPU = "nvidia.com/gpu"
PREEMPTED = Notice(EvictionReason.PREEMPTED, EvictionRule.LOWER_PRIORITY, "prod/urgent", "Preempted by prod/urgent", 60)


def key(name: str, namespace: str = "default") -> Key:
    return Key("Allocation", namespace, name)


async def stored(runtime: Runtime, name: str) -> Stored:
    return await get(runtime, "Allocation", "default", name)


async def status(runtime: Runtime, name: str) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.json.decode((await stored(runtime, name)).status)
    return found


async def stop(runtime: Runtime, name: str, notice: Notice = PREEMPTED) -> Reply:
    return await evict(runtime, await stored(runtime, name), notice, TEST)


async def says(runtime: Runtime, on: str, name: str, phase: Phase, **more: Any) -> Reply:
    return await report(runtime, Report(key=key(name), origin=TEST, phase=phase, node=on, **more))


async def running(
    runtime: Runtime, name: str, *nodes: str, spec: dict[str, Any] | None = None, **requests: Any
) -> None:
    assert code(await allocation(runtime, "default", name, spec=spec, **(requests or {"gpu": 1}))) == "ok"
    assert code(await bind(runtime, "default", name, *nodes)) == "ok"
    for one in nodes:
        assert code(await says(runtime, one, name, Phase.RUNNING)) == "ok"


async def assert_books_balance(runtime: Runtime) -> None:
    """Counters are the sum of charges, each node has given what its placements hold, and hours count what runs."""
    await assert_counters_equal_charges(runtime)
    await assert_hours_agree(runtime)
    async with one_moment(runtime) as db:
        capacities = await node_store.load_all(db)
        placements = await node_store.load_placements_on(db, capacities)
    given: dict[str, dict[str, int]] = {name: {} for name in capacities}
    for one in placements:
        for resource, amount in one.resources.items():
            given[one.node][resource] = given[one.node].get(resource, 0) + amount
    allocated: dict[str, Amounts] = {name: dict(capacity.allocated) for name, capacity in capacities.items()}
    assert allocated == given
