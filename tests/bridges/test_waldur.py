"""What is left of budgets, read from a Waldur on loopback with Waldur's own client."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from uuid import UUID, uuid4

import pytest

from bursar.bridges.budget import ReadPace, SourceAway, read_once
from bursar.bridges.waldur import Component, Waldur
from bursar.core.usage.external_budget import Remaining
from bursar.ops.runtime.runtime import Runtime
from bursar.ops.usage.usage_rollup import BudgetUse, load_budgets
from support.api.site import eventually
from support.process.waldurs import TOKEN, WaldurServer, serving
from support.runtime.runtime import tenant

PACE = ReadPace(600.0, again_seconds=0.0)


@pytest.fixture
def waldur() -> Iterator[WaldurServer]:
    with serving() as server:
        yield server
        assert server.faults == []


@pytest.fixture
def source(waldur: WaldurServer, tmp_path: Path) -> Waldur:
    token = tmp_path / "token"
    token.write_text(f"{TOKEN}\n")
    return Waldur(waldur.url, token, (waldur.offering,))


def said(gpu_hours: float | None = None, node_hours: float | None = None) -> Remaining:
    return Remaining(gpu_hours, node_hours, "waldur")


async def test_what_is_left_is_what_was_agreed_less_what_was_reported(waldur: WaldurServer, source: Waldur) -> None:
    agreed = {"gpu_hours": 1000, "node_hours": 50, "max_nodes": 8}
    waldur.resource("physics", limits=agreed, limit_usage={"gpu_hours": 250.5, "node_hours": 60})
    waldur.resource("billed-by-use", limits={"gpu_hours": 10}, current_usages={"gpu_hours": 4})
    waldur.resource("nothing-reported", limits=agreed)
    waldur.resource("nothing-agreed", limit_usage={"gpu_hours": 7})
    waldur.resource("", limits=agreed, limit_usage={"gpu_hours": 1})
    waldur.resource("ended", state="Terminated", limits=agreed, limit_usage={"gpu_hours": 1})
    waldur.resource("of-others", offering_uuid=uuid4().hex, limits=agreed, limit_usage={"gpu_hours": 1})

    assert await source.remaining_budgets() == {
        "physics": said(749.5, -10.0),
        "billed-by-use": said(6.0),
        "nothing-reported": said(),
        "nothing-agreed": said(),
    }


async def test_several_resources_of_a_tenant_are_one_budget_and_units_are_hours(
    waldur: WaldurServer, source: Waldur
) -> None:
    for used in (1, 2):
        waldur.resource("physics", limits={"kgpu": 5}, limit_usage={"kgpu": used})
    assert await replace(source, gpu_hours=Component("kgpu", 1000.0)).remaining_budgets() == {"physics": said(7000.0)}


async def test_all_pages_are_read(waldur: WaldurServer, source: Waldur) -> None:
    waldur.page_size_max = 3
    for number in range(7):
        waldur.resource(f"t{number}", limits={"gpu_hours": number}, limit_usage={"gpu_hours": 0})
    assert await source.remaining_budgets() == {f"t{number}": said(float(number)) for number in range(7)}
    assert len(waldur.calls) == 3


async def test_only_what_is_needed_is_asked_for(waldur: WaldurServer, source: Waldur) -> None:
    await source.remaining_budgets()
    (call,) = waldur.calls
    assert set(call.query["field"]) == {"uuid", "backend_id", "limits", "limit_usage", "current_usages"}
    assert [UUID(one) for one in call.query["offering_uuid"]] == [waldur.offering]


@pytest.mark.parametrize("status", [401, 403, 404, 429, 500, 503, 302])
async def test_whatever_else_it_answers_it_is_away(waldur: WaldurServer, source: Waldur, status: int) -> None:
    waldur.plan = [status]
    with pytest.raises(SourceAway, match=f"HTTP {status}") as caught:
        await source.remaining_budgets()
    assert TOKEN not in str(caught.value)


async def test_a_token_that_is_not_accepted_is_said_to_be_so(waldur: WaldurServer, source: Waldur) -> None:
    source.token_file.write_text("old")
    with pytest.raises(SourceAway, match="token is not accepted"):
        await source.remaining_budgets()
    source.token_file.write_text(TOKEN)
    assert await source.remaining_budgets() == {}
    source.token_file.unlink()
    with pytest.raises(SourceAway, match="No such file"):
        await source.remaining_budgets()


async def test_who_is_not_there_is_away(waldur: WaldurServer, source: Waldur) -> None:
    with pytest.raises(SourceAway, match="ConnectError"):
        await replace(source, url="http://127.0.0.1:9").remaining_budgets()


async def test_amounts_that_are_no_numbers_are_no_figures(waldur: WaldurServer, source: Waldur) -> None:
    waldur.resource("physics", limits={"gpu_hours": "100", "node_hours": None}, limit_usage={"gpu_hours": "1"})
    waldur.resource("biology", limits={"gpu_hours": 1}, limit_usage={"gpu_hours": "NaN"})
    assert await source.remaining_budgets() == {"physics": said(99.0), "biology": said()}
    waldur.resource("chemistry", limits={"gpu_hours": "many"}, limit_usage={"gpu_hours": 0})
    with pytest.raises(SourceAway, match="unexpected answer"):
        await source.remaining_budgets()


async def test_waldurs_figure_counts_while_it_answers_and_ours_as_soon_as_it_does_not(
    runtime: Runtime, waldur: WaldurServer, source: Waldur
) -> None:
    await tenant(runtime, "physics", gpuHoursBudget=1000)
    resource = waldur.resource("physics", limits={"gpu_hours": 1000}, limit_usage={"gpu_hours": 900})

    async def budgets() -> dict[str, BudgetUse]:
        async with runtime.database.reader() as db:
            await db.execute("UPDATE budget_source SET due_at = now()")
            await read_once(runtime.database, source, PACE)
            return await load_budgets(db, await runtime.trees.refresh(db))

    assert await budgets() == {"physics": BudgetUse(900.0, 0.0, "waldur")}
    waldur.plan = [502, 502]
    assert await budgets() == {"physics": BudgetUse()}
    resource.limit_usage["gpu_hours"] = 1000.0  # type: ignore[index]
    assert await budgets() == {"physics": BudgetUse(1000.0, 0.0, "waldur")}


async def test_nobody_who_counts_waits_for_a_waldur_that_hangs(
    runtime: Runtime, waldur: WaldurServer, source: Waldur
) -> None:
    await tenant(runtime, "physics", gpuHoursBudget=1000)
    waldur.resource("physics", limits={"gpu_hours": 1000}, limit_usage={"gpu_hours": 900})
    assert await read_once(runtime.database, source, PACE)
    waldur.gate.clear()
    async with runtime.database.reader() as db:
        await db.execute("UPDATE budget_source SET due_at = now()")
    reading = asyncio.create_task(read_once(runtime.database, source, PACE))

    async def is_asked() -> bool:
        return len(waldur.calls) == 2

    await eventually(is_asked)
    async with runtime.database.reader() as db:
        assert (await load_budgets(db, await runtime.trees.refresh(db)))["physics"].source == "waldur"
    assert not reading.done()
    waldur.plan = [503, 503]
    waldur.gate.set()
    assert not await reading
    async with runtime.database.reader() as db:
        assert (await load_budgets(db, runtime.trees.latest))["physics"].source == "internal"
