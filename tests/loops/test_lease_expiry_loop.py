"""Leases that nobody extends are found, and those that are paid for are not read for it."""

import pytest

from bursar.commands.credit.credit import ExtendLeaseCommand
from bursar.core.credit.lease_expiry import ROUND_SECONDS, UNBEGUN_MICROS, ExpiryWatch
from bursar.core.values.money import MICROS
from bursar.loops.lease_expiry import end_lapsed
from bursar.ops.credit import credit
from bursar.ops.runtime.runtime import Runtime
from support.credit.ledgers import assert_books_balance, funded, leased, pass_time, priced, receipt, stop_clock

NOW = 1_800_000_000 * MICROS
PATIENCE = 60.0


@pytest.fixture
async def lab(runtime: Runtime) -> Runtime:
    await stop_clock(runtime)
    await priced(runtime)
    await funded(runtime, "1000")
    return runtime


class Loop:
    """Looks, with both clocks going alike."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.watch = ExpiryWatch()
        self.at = 1000.0

    async def look(self, seconds: float = 5.0) -> list[int]:
        await pass_time(self.runtime, round(seconds * MICROS))
        self.at += seconds
        return await end_lapsed(self.runtime, self.watch, self.at)


async def test_a_look_reads_what_may_be_over_and_what_is_new(lab: Runtime) -> None:
    for _ in range(20):
        await leased(lab, seconds=3600)
    loop = Loop(lab)
    await loop.look()
    assert loop.watch.looked == 20
    await loop.look()
    assert loop.watch.looked == 0, "all of them are paid for: there is nothing to read"
    short = await leased(lab, seconds=30)
    await loop.look()
    assert loop.watch.looked == 1
    await loop.look(20)
    assert loop.watch.looked == 0
    await loop.look(20)
    assert (loop.watch.looked, [number for number, _ in loop.watch.since]) == (1, [short])
    assert await loop.look(PATIENCE) == [short]
    await loop.look()
    assert loop.watch.looked == 0
    await assert_books_balance(lab)


async def test_what_was_extended_is_looked_at_when_that_is_over(lab: Runtime) -> None:
    lease = await leased(lab, seconds=30)
    loop = Loop(lab)
    await loop.look()
    command = ExtendLeaseCommand(number=lease, delta=60 * MICROS, ahead_max=3600 * MICROS)
    receipt(await credit.extend_lease(lab, command))
    await loop.look(30)
    assert (loop.watch.looked, loop.watch.since) == (1, {})
    await loop.look(30)
    assert loop.watch.looked == 0
    await loop.look(30)
    assert len(loop.watch.since) == 1
    assert await loop.look(PATIENCE) == [lease]


async def test_a_number_that_becomes_visible_late_is_found(lab: Runtime) -> None:
    first, late, last = [await leased(lab, seconds=30) for _ in range(3)]
    loop = Loop(lab)
    async with lab.database.reader() as db:
        await db.execute("CREATE TABLE held_back AS SELECT * FROM lease WHERE id = $1", late)
        await db.execute("DELETE FROM lease WHERE id = $1", late)
        await loop.look()
        await db.execute("INSERT INTO lease SELECT * FROM held_back")
    await loop.look()
    await loop.look(40)
    assert sorted(await loop.look(PATIENCE)) == [first, late, last]
    await assert_books_balance(lab)


async def test_after_a_jump_of_the_clock_all_are_looked_at(lab: Runtime) -> None:
    await leased(lab, seconds=3600)
    loop = Loop(lab)
    await loop.look()
    await pass_time(lab, 4000 * MICROS)
    await loop.look()
    assert (loop.watch.looked, len(loop.watch.since)) == (1, 1)


async def test_what_could_not_be_read_is_read_the_next_time(lab: Runtime) -> None:
    await leased(lab, seconds=30)
    loop = Loop(lab)
    await loop.look()
    async with lab.database.reader() as db:
        await db.execute("ALTER TABLE placement RENAME TO away")
        with pytest.raises(Exception, match="placement"):
            await loop.look(40)
        await db.execute("ALTER TABLE away RENAME TO placement")
    await loop.look()
    assert len(loop.watch.since) == 1


def test_now_and_then_all_are_looked_at_anew() -> None:
    watch = ExpiryWatch()
    watch.heed(0.0, NOW)
    watch.see([], [(1, NOW + 10**12, NOW + 10**12)], 0.0, NOW)
    assert watch.newest == 1
    watch.heed(ROUND_SECONDS, NOW + round(ROUND_SECONDS * MICROS))
    assert watch.newest == 0


def test_what_has_not_begun_is_looked_at_again_after_a_while() -> None:
    watch = ExpiryWatch()
    watch.heed(0.0, NOW)
    watch.see([], [(1, NOW, None)], 0.0, NOW)
    assert not watch.since
    assert watch.take(1.0, NOW + MICROS) == []
    assert watch.take(30.0, NOW + UNBEGUN_MICROS) == [1]


async def test_what_was_not_taken_is_ended_the_next_time(lab: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = [await leased(lab, seconds=30) for _ in range(5)]
    loop = Loop(lab)
    await loop.look(40)
    monkeypatch.setattr(lab.crediting, "_capacity", 2)
    ended = [await loop.look(PATIENCE), await loop.look(), await loop.look()]
    assert [len(some) for some in ended] == [2, 2, 1], "nobody waits for so long again"
    assert sorted(number for some in ended for number in some) == numbers
    await assert_books_balance(lab)
