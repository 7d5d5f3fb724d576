"""Budgets that are kept elsewhere: read by one, believed while fresh, and given up at once when nobody answers."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from bursar.bridges.budget import ReadPace, SourceAway, read_once, run_budget_source
from bursar.core.usage.external_budget import Remaining
from bursar.ops.runtime.runtime import Runtime
from bursar.ops.usage.usage_rollup import BudgetUse, load_budgets
from bursar.store.usage import budget as store
from support.api.site import eventually
from support.runtime.runtime import tenant

LONG = ReadPace(poll_seconds=600.0, again_seconds=0.0)


@dataclass(slots=True)
class Books:
    """A source that says what a test has written in it."""

    figures: dict[str, Remaining] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)  # one for each time that it does not answer
    hangs: bool = False
    asked: int = 0
    name: str = "books"

    async def remaining_budgets(self) -> Mapping[str, Remaining]:
        self.asked += 1
        if self.hangs:
            await asyncio.Event().wait()
        if self.faults:
            raise SourceAway(self.faults.pop())
        return {name: Remaining(one.gpu_hours, one.node_hours, self.name) for name, one in self.figures.items()}


async def make_due(runtime: Runtime) -> None:
    async with runtime.database.reader() as db:
        await db.execute("UPDATE budget_source SET due_at = now()")


async def read(runtime: Runtime, source: Books, pace: ReadPace = LONG) -> bool:
    await make_due(runtime)
    return await read_once(runtime.database, source, pace)


async def remaining(runtime: Runtime) -> dict[str, Remaining]:
    async with runtime.database.reader() as db:
        return await store.load_remaining(db)


async def budgets(runtime: Runtime) -> dict[str, BudgetUse]:
    async with runtime.database.reader() as db:
        return await load_budgets(db, await runtime.trees.refresh(db))


async def test_what_is_said_takes_precedence_over_what_was_counted_here(runtime: Runtime) -> None:
    await tenant(runtime, "physics", gpuHoursBudget=1000, nodeHoursBudget=50)
    await tenant(runtime, "biology", gpuHoursBudget=1000)
    await tenant(runtime, "chemistry")
    source = Books({"physics": Remaining(250.0, None), "chemistry": Remaining(1.0, 1.0), "stranger": Remaining(0.0)})
    assert await budgets(runtime) == {"physics": BudgetUse(), "biology": BudgetUse()}

    assert await read(runtime, source)

    assert await budgets(runtime) == {"physics": BudgetUse(750.0, 0.0, "books"), "biology": BudgetUse()}


async def test_a_source_that_does_not_answer_is_asked_once_more_and_then_given_up_at_once(runtime: Runtime) -> None:
    await tenant(runtime, "physics", gpuHoursBudget=1000)
    source = Books({"physics": Remaining(250.0)})
    assert await read(runtime, source)
    source.faults, source.asked = ["no route"], 0
    assert await read(runtime, source)
    assert (source.asked, (await budgets(runtime))["physics"].source) == (2, "books")

    source.faults = ["no route", "no route"]
    assert not await read(runtime, source)

    assert await budgets(runtime) == {"physics": BudgetUse()}
    async with runtime.database.reader() as db:
        assert await store.load_sources(db) == [("books", False, "no route")]
    assert await read(runtime, source)
    async with runtime.database.reader() as db:
        assert await store.load_sources(db) == [("books", True, "")]
        await db.execute("UPDATE budget_source SET due_at = now() - interval '2 minutes'")
        assert await store.load_sources(db) == [("books", False, "")]
    assert (await budgets(runtime))["physics"].gpu_hours == 750.0


async def test_a_source_that_hangs_is_given_up_before_the_next_reading_is_due(runtime: Runtime) -> None:
    await tenant(runtime, "physics", gpuHoursBudget=1000)
    source = Books({"physics": Remaining(250.0)})
    assert await read(runtime, source)
    source.hangs = True

    assert not await read(runtime, source, ReadPace(poll_seconds=0.05))

    assert await budgets(runtime) == {"physics": BudgetUse()}


async def test_figures_that_nobody_renews_go_stale(runtime: Runtime) -> None:
    await tenant(runtime, "physics", gpuHoursBudget=1000)
    assert await read(runtime, Books({"physics": Remaining(250.0)}))
    async with runtime.database.reader() as db:
        seconds = await db.fetchval("SELECT extract(epoch FROM fresh_until - read_at) FROM budget_remaining")
        await db.execute("UPDATE budget_remaining SET fresh_until = now()")
    assert float(seconds) == LONG.fresh_seconds
    assert await remaining(runtime) == {}
    assert await budgets(runtime) == {"physics": BudgetUse()}


async def test_a_tenant_that_is_named_no_more_is_counted_here_again(runtime: Runtime) -> None:
    source = Books({"physics": Remaining(1.0), "biology": Remaining(2.0)})
    assert await read(runtime, source)
    del source.figures["physics"]
    assert await read(runtime, source)
    assert await remaining(runtime) == {"biology": Remaining(2.0, None, "books")}


async def test_of_many_readers_one_reads_each_time(runtime: Runtime) -> None:
    source = Books({"physics": Remaining(1.0)})
    done = await asyncio.gather(*(read_once(runtime.database, source, LONG) for _ in range(5)))
    assert (sorted(done), source.asked) == ([False] * 4 + [True], 1)
    assert not await read_once(runtime.database, source, LONG)


async def test_a_reader_that_was_held_up_does_not_undo_what_another_read_since(runtime: Runtime) -> None:
    async with runtime.database.reader() as db:
        late = await store.claim(db, "books", 0.0)
        newer = await store.claim(db, "books", 0.0)
        assert late is not None
        assert newer is not None
        await store.save(db, "books", newer, {"physics": Remaining(1.0)}, 60)
        await store.save(db, "books", late, {"biology": Remaining(9.0)}, 60)
        await store.withdraw(db, "books", late, "too late")
    assert (await remaining(runtime))["physics"] == Remaining(1.0, None, "books")


async def test_it_goes_on_for_ever(runtime: Runtime) -> None:
    source = Books({"physics": Remaining(1.0)}, faults=["a", "b", "c"])
    running = asyncio.create_task(run_budget_source(runtime.database, source, ReadPace(0.05, again_seconds=0.0)))
    try:

        async def asked_again() -> bool:
            return source.asked > 6

        await eventually(asked_again)
        source.figures = {"physics": Remaining(3.0)}

        async def read_anew() -> bool:
            return await remaining(runtime) == {"physics": Remaining(3.0, None, "books")}

        await eventually(read_anew)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
