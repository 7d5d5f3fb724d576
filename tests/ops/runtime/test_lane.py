"""The lane alone: bounded, fair, patient with poison, and silent until the batch is done."""

import asyncio
import gc
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

import pytest

from bursar.ops.runtime import lane as lane_module
from bursar.ops.runtime.lane import Closed, Lane, Overloaded, put_all, raise_first
from bursar.store.db.database import Unavailable

Command = tuple[str, int]  # (tenant, number)


class Desk:
    """Runs batches one gate at a time, so that a test decides when a batch is done."""

    def __init__(self) -> None:
        self.batches: list[list[Command]] = []
        self.gate = asyncio.Semaphore(0)
        self.poison: set[Command] = set()
        self.begun = asyncio.Condition()

    async def run(self, commands: Sequence[Command]) -> Sequence[str]:
        async with self.begun:
            self.batches.append(list(commands))
            self.begun.notify_all()
        await self.gate.acquire()
        if self.poison & set(commands):
            raise ValueError("poisoned")
        return [f"{tenant}-{number}" for tenant, number in commands]

    async def until_begun(self, batches: int) -> None:
        async with self.begun:
            await asyncio.wait_for(self.begun.wait_for(lambda: len(self.batches) >= batches), 5)

    def open(self) -> None:
        for _ in range(10_000):
            self.gate.release()


Submit = Callable[..., asyncio.Task[str]]


def submitter(lane: Lane[Command, str]) -> Submit:
    def submit(tenant: str, number: int = 0) -> asyncio.Task[str]:
        return asyncio.create_task(lane.submit((tenant, number), tenant))

    return submit


async def settled(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0)


async def answers(tasks: Sequence[Awaitable[str]]) -> list[str | BaseException]:
    return await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 5)


async def test_the_next_batch_is_whatever_queued_meanwhile() -> None:
    desk = Desk()
    lane = Lane[Command, str]("t", desk.run)
    submit = submitter(lane)
    first = submit("a")
    await desk.until_begun(1)
    later = [submit("a", number) for number in range(1, 6)]
    await settled(lambda: lane.size == 5)
    desk.open()
    assert await answers([first, *later]) == [f"a-{number}" for number in range(6)]
    assert [len(batch) for batch in desk.batches] == [1, 5]


async def test_answers_come_only_after_the_batch_is_done() -> None:
    desk = Desk()
    lane = Lane[Command, str]("t", desk.run)
    task = submitter(lane)("a")
    await desk.until_begun(1)
    for _ in range(20):
        await asyncio.sleep(0)
    assert not task.done()
    desk.open()
    assert await task == "a-0"


async def test_a_flood_of_one_tenant_does_not_delay_another_beyond_the_next_batch() -> None:
    desk = Desk()
    lane = Lane[Command, str]("t", desk.run, batch_max=10)
    submit = submitter(lane)
    flood = [submit("flood", number) for number in range(500)]
    await desk.until_begun(1)
    await settled(lambda: lane.size == 490)
    single = submit("quiet")
    await settled(lambda: lane.size == 491)
    desk.open()
    await answers([single, *flood])
    assert ("quiet", 0) in desk.batches[1]


async def test_a_batch_takes_from_each_tenant_in_turn() -> None:
    desk = Desk()
    lane = Lane[Command, str]("t", desk.run, batch_max=6)
    submit = submitter(lane)
    tasks = [submit("first")]
    await desk.until_begun(1)
    for tenant in ("a", "b", "c"):
        tasks += [submit(tenant, number) for number in range(20)]
    await settled(lambda: lane.size == 60)
    desk.open()
    await answers(tasks)
    assert Counter(tenant for tenant, _ in desk.batches[1]) == {"a": 2, "b": 2, "c": 2}
    numbers = [number for batch in desk.batches for tenant, number in batch if tenant == "b"]
    assert numbers == sorted(numbers)  # each tenant's own order is kept


async def test_a_full_lane_sheds_the_newest_of_the_longest_queue() -> None:
    desk = Desk()
    lane = Lane[Command, str]("t", desk.run, capacity=5)
    submit = submitter(lane)
    running = submit("x")
    await desk.until_begun(1)
    greedy = [submit("greedy", number) for number in range(5)]
    await settled(lambda: lane.size == 5)
    quiet = submit("quiet")
    await settled(greedy[4].done)
    error = greedy[4].exception()
    assert isinstance(error, Overloaded)
    assert 1 <= error.retry_after_seconds <= 30
    assert lane.size == 5
    with pytest.raises(Overloaded):
        await lane.submit(("greedy", 9), "greedy")
    desk.open()
    assert await answers([running, quiet, *greedy[:4]]) == ["x-0", "quiet-0", *(f"greedy-{n}" for n in range(4))]


async def test_a_lane_full_of_single_commands_refuses_the_one_that_came_last() -> None:
    desk = Desk()
    lane = Lane[Command, str]("t", desk.run, capacity=3)
    submit = submitter(lane)
    running = submit("x")
    await desk.until_begun(1)
    waiting = [submit(tenant) for tenant in "abc"]
    await settled(lambda: lane.size == 3)
    with pytest.raises(Overloaded):
        await lane.submit(("d", 0), "d")
    desk.open()
    assert await answers([running, *waiting]) == ["x-0", "a-0", "b-0", "c-0"]


async def test_retry_after_grows_with_what_is_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane_module, "BATCH_MIN", 1)
    desk = Desk()
    lane = Lane[Command, str]("t", desk.run, capacity=40, batch_max=1)
    lane._batch_seconds = 0.5
    submit = submitter(lane)
    tasks = [submit("a")]
    await desk.until_begun(1)
    tasks += [submit("a", number) for number in range(1, 41)]
    await settled(lambda: lane.size == 40)
    with pytest.raises(Overloaded, match=r"t is overloaded; try again in 20 s") as refused:
        await lane.submit(("a", 99), "a")
    assert refused.value.retry_after_seconds == 20
    desk.open()
    await answers(tasks)


async def test_a_poisoned_command_gets_its_error_and_its_neighbours_their_answers() -> None:
    desk = Desk()
    desk.poison = {("a", 7)}
    desk.open()
    lane = Lane[Command, str]("t", desk.run)
    submit = submitter(lane)
    results = await answers([submit("a", number) for number in range(16)])
    assert isinstance(results[7], ValueError)
    assert [one for index, one in enumerate(results) if index != 7] == [f"a-{n}" for n in range(16) if n != 7]
    # Once whole, once more whole, then in halves: the work is bounded by the logarithm.
    assert len(desk.batches) <= 2 + 2 * 4
    assert [len(batch) for batch in desk.batches[:3]] == [16, 16, 8]


async def test_a_batch_that_fails_once_is_run_again_whole() -> None:
    desk = Desk()
    desk.poison = {("a", 0)}
    lane = Lane[Command, str]("t", desk.run)
    submit = submitter(lane)
    tasks = [submit("a", number) for number in range(4)]
    await desk.until_begun(1)
    desk.gate.release()
    await desk.until_begun(2)
    desk.poison.clear()
    desk.open()
    assert await answers(tasks) == [f"a-{number}" for number in range(4)]
    assert [len(batch) for batch in desk.batches] == [4, 4]


async def test_when_the_database_is_away_nobody_is_tried_one_by_one() -> None:
    tried = []

    async def away(commands: Sequence[Command]) -> Sequence[str]:
        tried.append(len(commands))
        raise Unavailable("gone fishing")

    lane = Lane[Command, str]("t", away)
    results = await answers([submitter(lane)("a", number) for number in range(8)])
    assert all(isinstance(one, Unavailable) for one in results)
    assert tried == [8]


async def test_a_caller_who_leaves_before_the_batch_is_not_decided() -> None:
    desk = Desk()
    lane = Lane[Command, str]("t", desk.run)
    submit = submitter(lane)
    first = submit("a")
    await desk.until_begun(1)
    leaving, staying = submit("a", 1), submit("a", 2)
    await settled(lambda: lane.size == 2)
    leaving.cancel()
    desk.open()
    assert await answers([first, staying]) == ["a-0", "a-2"]
    assert desk.batches == [[("a", 0)], [("a", 2)]]
    assert leaving.cancelled()
    assert lane.size == 0


async def test_a_caller_who_leaves_during_the_batch_does_not_stop_it() -> None:
    desk = Desk()
    lane = Lane[Command, str]("t", desk.run)
    submit = submitter(lane)
    leaving, staying = submit("a", 1), submit("a", 2)
    await desk.until_begun(1)
    leaving.cancel()
    await settled(leaving.done)
    desk.open()
    assert await answers([staying]) == ["a-2"]
    assert desk.batches == [[("a", 1), ("a", 2)]]


async def test_a_lane_whose_callers_all_left_goes_on_with_the_next() -> None:
    desk = Desk()
    lane = Lane[Command, str]("t", desk.run)
    submit = submitter(lane)
    first = submit("a")
    await desk.until_begun(1)
    gone = [submit("b", number) for number in range(3)]
    await settled(lambda: lane.size == 3)
    for task in gone:
        task.cancel()
    desk.open()
    await answers([first, *gone])
    assert await asyncio.wait_for(lane.submit(("c", 0), "c"), 5) == "c-0"


async def test_closing_finishes_what_was_taken_and_takes_no_more() -> None:
    desk = Desk()
    lane = Lane[Command, str]("t", desk.run)
    submit = submitter(lane)
    tasks = [submit("a"), submit("b")]
    await desk.until_begun(1)
    closing = asyncio.create_task(lane.close())
    await asyncio.sleep(0)
    with pytest.raises(Closed):
        await lane.submit(("c", 0), "c")
    desk.open()
    await asyncio.wait_for(closing, 5)
    assert [task.result() for task in tasks] == ["a-0", "b-0"]


async def test_batches_shrink_when_they_take_long_and_grow_again(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk()
    desk.open()
    lane = Lane[Command, str]("t", desk.run, batch_max=256)
    submit = submitter(lane)
    monkeypatch.setattr(lane_module, "HOLD_SECONDS", -1.0)  # every batch takes too long
    await answers([submit("a", number) for number in range(2000)])
    sizes = [len(batch) for batch in desk.batches]
    assert sizes[:3] == [256, 192, 144]
    assert min(sizes[:-1]) == lane_module.BATCH_MIN  # locks are not worth more than that
    desk.batches.clear()
    monkeypatch.setattr(lane_module, "HOLD_SECONDS", 60.0)
    await answers([submit("a", number) for number in range(1000)])
    assert [len(batch) for batch in desk.batches[:4]] == [64, 128, 192, 256]


async def test_a_lane_full_of_bytes_sheds_the_newest_of_the_heaviest_queue() -> None:
    desk = Desk()
    lane = Lane[Command, str]("t", desk.run, weigh=lambda command: command[1], bytes_max=100)
    submit = submitter(lane)
    running = submit("x", 90)
    await desk.until_begun(1)
    heavy = [submit("heavy", weight) for weight in (30, 31, 32)]
    await settled(lambda: lane.size == 3)
    with pytest.raises(Overloaded):
        await lane.submit(("heavy", 20), "heavy")
    light = [submit("light", weight) for weight in (9, 10)]
    await settled(heavy[2].done)
    assert isinstance(heavy[2].exception(), Overloaded)
    await settled(lambda: lane.size == 4)
    desk.open()
    assert await answers([running, *heavy[:2], *light]) == ["x-90", "heavy-30", "heavy-31", "light-9", "light-10"]
    assert await asyncio.wait_for(lane.submit(("big", 500), "big"), 5) == "big-500", "alone it is taken, however heavy"


async def test_a_tenant_whose_only_command_is_shed_has_no_turn_left() -> None:
    desk = Desk()
    lane = Lane[Command, str]("t", desk.run, weigh=lambda command: command[1], bytes_max=100)
    submit = submitter(lane)
    running = submit("x", 1)
    await desk.until_begun(1)
    whale = submit("whale", 99)
    await settled(lambda: lane.size == 1)
    minnow = submit("minnow", 5)
    await settled(whale.done)
    assert isinstance(whale.exception(), Overloaded)
    desk.open()
    assert await answers([running, minnow]) == ["x-1", "minnow-5"]
    assert (lane.size, lane._weight, lane._weights) == (0, 0, {})


async def test_a_second_runner_takes_only_whole_batches() -> None:
    desk = Desk()
    lane: Lane[Command, str] = Lane("test", desk.run, desk.run, batch_max=4)
    submit = submitter(lane)
    first = submit("a")
    await desk.until_begun(1)
    tasks = [submit("a", number) for number in range(1, 8)]
    await settled(lambda: lane.size == 7)
    assert desk.batches == [[("a", 0)]], "less than a batch for each runner waits for the one in flight"

    tasks.append(submit("a", 8))
    await desk.until_begun(2)
    assert desk.batches[1] == [("a", number) for number in range(1, 5)]
    desk.open()
    assert await answers([first, *tasks]) == [f"a-{number}" for number in range(9)]
    assert [("a", number) for number in range(9)] == [one for batch in desk.batches for one in batch]
    await lane.close()
    with pytest.raises(Closed):
        await lane.submit(("a", 9), "a")


async def test_a_lane_that_two_runners_emptied_starts_again() -> None:
    desk = Desk()
    desk.open()
    lane: Lane[Command, str] = Lane("test", desk.run, desk.run, batch_max=2)
    for round_ in range(3):
        tasks = [submitter(lane)("a", number) for number in range(8)]
        assert await answers(tasks) == [f"a-{number}" for number in range(8)], round_
    await lane.close()


async def test_of_many_that_are_put_at_once_each_is_answered_whatever_becomes_of_the_others() -> None:
    """Also when the lane is full halfway, and when what was queued fails: nothing is left behind that nobody asks."""
    complaints: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))

    async def run(commands: Sequence[Command]) -> list[str]:
        raise Unavailable("the database is away")

    lane: Lane[Command, str] = Lane("test", run, capacity=3)
    found = await put_all(lane, [("a", number) for number in range(5)], "a")
    assert [type(one) for one in found] == [Unavailable] * 3 + [Overloaded] * 2
    await lane.close()
    assert [type(one) for one in await put_all(lane, [("a", 6)], "a")] == [Closed]
    del found
    gc.collect()
    assert complaints == []
    with pytest.raises(Overloaded):
        raise_first(["fine", Overloaded("test", 1), Unavailable("away")])
    assert raise_first(["fine", "too"]) == ["fine", "too"]


async def test_answers_to_many_come_together_in_their_order_each_its_own() -> None:
    desk = Desk()
    desk.poison = {("a", 1)}
    desk.open()
    lane = Lane[Command, str]("t", desk.run, capacity=4)
    assert await lane.put_together([]) == []
    commands: list[tuple[Command, str]] = [((tenant, number), tenant) for number in range(3) for tenant in ("a", "b")]
    async with asyncio.timeout(5):
        told = await lane.put_together(commands)
    assert [one if isinstance(one, str) else type(one) for one in told] == [
        "a-0", "b-0", ValueError, "b-1", Overloaded, Overloaded,
    ]  # fmt: skip
    await lane.close()
    async with asyncio.timeout(5):
        assert isinstance((await lane.put_together(commands[:1]))[0], Closed)


async def test_who_leaves_before_many_are_decided_has_none_of_them_decided() -> None:
    desk = Desk()
    lane = Lane[Command, str]("t", desk.run)
    submit = submitter(lane)
    first = submit("a")
    await desk.until_begun(1)
    many = lane.put_together([(("a", number), "a") for number in range(1, 4)])
    later = submit("a", 9)
    await settled(lambda: lane.size == 4)
    many.cancel()
    desk.open()
    assert await answers([first, later]) == ["a-0", "a-9"]
    assert desk.batches == [[("a", 0)], [("a", 9)]]
