"""Short words for what tests do with work that is stopped."""

from typing import Any

import msgspec

from bursar.core.nodes.eviction import Notice, Reason, Rule
from bursar.core.objects.allocation import Phase
from bursar.core.objects.charge import Amounts
from bursar.core.objects.object import Key, Stored
from bursar.ops.runtime.command import Reply
from bursar.ops.runtime.runtime import Office
from bursar.ops.scheduling.evict import evict
from bursar.ops.workloads.report import Report, report
from bursar.store.nodes import node as node_store
from support.runtime.runtime import TEST, allocation, assert_counters_equal_charges, bind, code, get, one_moment
from support.usage.hourly import assert_hours_agree

GPU = "nvidia.com/gpu"
PREEMPTED = Notice(Reason.PREEMPTED, Rule.LOWER_PRIORITY, "prod/urgent", "Preempted by prod/urgent", 60)


def key(name: str, namespace: str = "default") -> Key:
    return Key("Allocation", namespace, name)


async def stored(office: Office, name: str) -> Stored:
    return await get(office, "Allocation", "default", name)


async def status(office: Office, name: str) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.json.decode((await stored(office, name)).status)
    return found


async def stop(office: Office, name: str, notice: Notice = PREEMPTED) -> Reply:
    return await evict(office, await stored(office, name), notice, TEST)


async def says(office: Office, on: str, name: str, phase: Phase, **more: Any) -> Reply:
    return await report(office, Report(key=key(name), origin=TEST, phase=phase, node=on, **more))


async def running(office: Office, name: str, *nodes: str, spec: dict[str, Any] | None = None, **requests: Any) -> None:
    assert code(await allocation(office, "default", name, spec=spec, **(requests or {"gpu": 1}))) == "ok"
    assert code(await bind(office, "default", name, *nodes)) == "ok"
    for one in nodes:
        assert code(await says(office, one, name, Phase.RUNNING)) == "ok"


async def assert_books_balance(office: Office) -> None:
    """Counters are the sum of charges, each node has given what its placements hold, and hours count what runs."""
    await assert_counters_equal_charges(office)
    await assert_hours_agree(office)
    async with one_moment(office) as db:
        rooms = await node_store.load_all(db)
        placements = await node_store.load_placements_on(db, rooms)
    given: dict[str, dict[str, int]] = {name: {} for name in rooms}
    for one in placements:
        for resource, amount in one.resources.items():
            given[one.node][resource] = given[one.node].get(resource, 0) + amount
    allocated: dict[str, Amounts] = {name: dict(room.allocated) for name, room in rooms.items()}
    assert allocated == given
