"""How the scheduler hears of what others commit: it is told, and looks now and then should nobody have told it."""

import pytest

from bursar.loops import schedule
from bursar.loops.schedule import Scheduler
from bursar.ops.runtime.runtime import Runtime
from bursar.wire.kinds.allocation import DATA_READY
from support.runtime.runtime import node
from support.scheduling.schedulers import annotate, is_in, scheduling, settled, status, submit, until, waits_for


async def submit_elsewhere(runtime: Runtime, rival: Runtime) -> None:
    """What another process submits is bound, one after another."""
    await node(runtime, "n1", gpu=4)
    async with scheduling(runtime) as scheduler:
        await settled(scheduler)
        for number in range(3):
            await submit(rival, f"job-{number}")
            await until(runtime, f"job-{number}", is_in("Scheduled"))


async def test_what_others_submit_is_bound_when_the_database_tells_of_it(
    runtime: Runtime, rival: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedule, "IDLE_SECONDS", 3600.0)
    await submit_elsewhere(runtime, rival)


async def test_what_nobody_told_of_is_found_all_the_same(
    runtime: Runtime, rival: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Notifications are hints, and may be lost on the way."""
    monkeypatch.setattr(schedule, "IDLE_SECONDS", 0.1)
    monkeypatch.setattr(Scheduler, "_told", lambda *told: None)
    await submit_elsewhere(runtime, rival)


async def test_whose_data_has_come_meanwhile_goes_first(runtime: Runtime) -> None:
    """Annotations are read when they change, not only when the cluster state is loaded."""
    async with scheduling(runtime):
        for name in ("early", "late"):
            await submit(runtime, name)
            await until(runtime, name, waits_for("no_nodes_active"))
        await annotate(runtime, "Allocation", "default", "early", {DATA_READY: "0"})
        await annotate(runtime, "Allocation", "default", "late", {DATA_READY: "1"})
        await node(runtime, "n1", gpu=1)
        await until(runtime, "late", is_in("Scheduled"))
        assert (await status(runtime, "early"))["phase"] == "Pending"
