"""Sealing: sealed entries equal the written ones, whichever process seals and whenever it is killed."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import cast

import asyncpg
import pytest

from bursar.core.credit.account import QUARTER
from bursar.core.credit.hash_chain import micros_of
from bursar.core.credit.lease import Grant
from bursar.core.credit.ledger import Entry, Type
from bursar.core.values.money import MICROS
from bursar.core.values.replace import replace
from bursar.ops.credit import ledger
from bursar.ops.credit.ledger import Extend
from bursar.ops.credit.ledger_verify import verify
from bursar.ops.credit.seal import Broken, create_partitions, drop_lines, load_standing, roll_up, seal, seal_block
from bursar.ops.runtime.runtime import Runtime
from bursar.store.credit import seal as store
from bursar.store.credit.ledger import load_last
from bursar.store.credit.seal import raise_floor
from bursar.store.db.database import Database
from support.credit.entry_lines import line, lines_hash
from support.credit.ledgers import LAB, assert_books_balance, funded, leased, pass_time, priced
from support.credit.sealings import (
    ANNA,
    cut_everywhere,
    everything,
    found,
    heartbeat,
    history,
    open_accounts,
    partitions,
    small_partitions,
    unguarded,
)
from support.runtime.runtime import opened


async def test_an_untouched_ledger_is_sound(runtime: Runtime) -> None:
    await history(runtime)
    before = await verify(runtime)
    assert before.findings == ()
    assert await seal(runtime) > 0
    standing = await load_standing(runtime)
    assert standing.unsealed == 0
    after = await verify(runtime)
    assert after.findings == ()
    assert after.entries == standing.last
    assert after.head is not None
    assert after.head.block == standing.block == after.through
    await assert_books_balance(runtime)


async def test_an_empty_ledger_is_sound_and_not_sealed(runtime: Runtime) -> None:
    assert await seal(runtime) == 0
    assert (await verify(runtime)).findings == ()


async def test_what_is_hashed_is_what_the_rules_say(runtime: Runtime) -> None:
    await history(runtime)
    await seal(runtime)
    async with runtime.database.reader() as db:
        blocks = await store.load_blocks(db, 0, 10**9, 10**6)
        rows = await db.fetch("SELECT * FROM entry ORDER BY number")
    assert len(blocks) > 3
    assert blocks[-1].last == len(rows)
    lines = [
        line(
            row["number"],
            micros_of(row["at"]),
            Entry(
                Type(row["type"]), row["debit"], row["credit"], row["amount"], row["lease"], row["seq"], row["rate"],
                row["begin"], row["until"], row["request"], row["actor"], row["reason"],
            ),
        )
        for row in rows
    ]  # fmt: skip
    for block in blocks:
        assert block.entries_hash == lines_hash(lines[block.first - 1 : block.last])


@pytest.mark.parametrize("do", [seal_block, roll_up])
async def test_cut_at_any_step_nothing_is_half(runtime: Runtime, do: Callable[[Runtime], Awaitable[object]]) -> None:
    await history(runtime, quarters=2)
    if do is seal_block:
        await pass_time(runtime, QUARTER)
        await heartbeat(runtime, 99)
    else:
        async with unguarded(runtime) as db:
            for table in ("entry_kept", "entry_rollup", "account_balance", "entry_block", "entry_page"):
                await db.execute(f"DELETE FROM {table}")
        while await seal_block(runtime, 3):
            pass
    before, cuts = await everything(runtime), 0
    async for where in cut_everywhere(runtime, do):
        cuts += 1
        assert await everything(runtime) == before, where
    assert cuts > 10
    after = await everything(runtime)
    assert len(after["entry_block"]) + len(after["entry_page"]) == 1 + len(before["entry_block"] + before["entry_page"])
    await seal(runtime)
    assert await found(runtime) == []


async def test_blocks_end_with_quarters_of_an_hour_and_are_never_too_large(runtime: Runtime) -> None:
    await history(runtime)
    await seal(runtime)
    await pass_time(runtime, 1)
    await heartbeat(runtime, 98)
    for turn in range(4):
        await pass_time(runtime, QUARTER // 2)
        await heartbeat(runtime, 100 + turn)
    await seal(runtime, entries_max=2)
    async with runtime.database.reader() as db:
        blocks = await store.load_blocks(db, 0, 10**9, 10**6)
        assert await load_last(db) == blocks[-1].last
    assert all(one.first_at // QUARTER == one.last_at // QUARTER for one in blocks)
    assert max(one.last - one.first + 1 for one in blocks[7:]) == 2
    assert await found(runtime) == []


async def test_many_may_seal_at_once(database_url: str, runtime: Runtime) -> None:
    await history(runtime)
    async with opened(database_url) as other:
        made = await asyncio.gather(*(seal(one, entries_max=1) for one in (runtime, other) for _ in range(2)))
    # A process that finds another one sealing leaves the rest to it, or to the next time.
    assert sum(made) + await seal(runtime, entries_max=1) == 3
    assert await found(runtime) == []


async def test_sealing_goes_on_while_everybody_writes(runtime: Runtime) -> None:
    """On the real clock: nothing is left out, nothing comes twice, and the books balance all the while."""
    await priced(runtime)
    await open_accounts(runtime)
    for owner in (LAB, ANNA):
        await funded(runtime, "1000", owner)
    leases = [await leased(runtime, 1, 60, owner) for owner in (LAB, ANNA) for _ in range(4)]
    over = asyncio.Event()

    async def extend(lease: int) -> None:
        for seq in range(1, 60):
            (grant,) = await ledger.extend(runtime, [Extend(lease, seq)])
            assert isinstance(grant, Grant)

    async def keep() -> int:
        made = 0
        while not over.is_set():
            made += await seal(runtime, entries_max=25)
            assert await found(runtime) == []
        return made + await seal(runtime)

    keeping = asyncio.ensure_future(keep())
    await asyncio.gather(*(extend(one) for one in leases))
    over.set()
    assert await keeping > 5
    assert (await load_standing(runtime)).unsealed == 0
    assert await found(runtime) == []
    await assert_books_balance(runtime)


async def test_a_ledger_with_a_gap_is_not_sealed_beyond_it(runtime: Runtime) -> None:
    await history(runtime)
    before = await load_standing(runtime)
    async with unguarded(runtime) as db:
        await db.execute("DELETE FROM entry WHERE number = 40")
    with pytest.raises(Broken, match="only 2 of the entries 39 to 41 exist"):
        await seal(runtime)
    assert await load_standing(runtime) == before


async def test_lines_are_dropped_once_they_are_old_and_their_sums_still_proven(runtime: Runtime) -> None:
    await small_partitions(runtime, size=8, number=6)
    await history(runtime)
    await seal(runtime)
    assert await drop_lines(runtime, days=1) == []
    await pass_time(runtime, 2 * 86_400 * MICROS)
    assert await drop_lines(runtime, days=1) == [f"entry_{90 + index:09d}" for index in range(4)]
    assert (await load_standing(runtime)).floor == 35, "what was rolled up together is kept or dropped as one"
    proof = await verify(runtime)
    assert proof.findings == ()
    assert await drop_lines(runtime, days=1) == []
    async with unguarded(runtime) as db:
        await db.execute("UPDATE entry_rollup SET amount = amount + 1 WHERE block = 3 AND account = 101 AND lease = 3")
    assert (await found(runtime))[0] == ("rollup", "page 2")
    async with unguarded(runtime) as db:
        await db.execute("UPDATE entry_rollup SET amount = amount - 1 WHERE block = 3 AND account = 101 AND lease = 3")
        await db.execute("UPDATE account_balance SET posted = posted + 1 WHERE block = 5 AND account = 101")
        await db.execute("UPDATE entry_kept SET reason = 'so' WHERE number = 2")
    wrong = await found(runtime)
    assert ("balance", "balance of account 101 after block 5") in wrong
    assert ("kept", "block 1") in wrong


async def test_one_drops_lines_at_a_time(runtime: Runtime) -> None:
    await small_partitions(runtime, size=8, number=6)
    await history(runtime)
    await seal(runtime)
    assert await drop_lines(runtime, days=1, seconds=60.0) == []
    await pass_time(runtime, 2 * 86_400 * MICROS)
    assert await drop_lines(runtime, days=1, seconds=60.0) == [], "somebody has just been at it"
    assert len(await drop_lines(runtime, days=1)) == 4


async def test_a_page_may_take_long_to_roll_up(runtime: Runtime) -> None:
    """Longer than statements may on which somebody waits."""
    await history(runtime, quarters=1)
    async with unguarded(runtime) as db:
        await db.execute("DELETE FROM entry_page")
    heard: list[str] = []

    class Patient:
        reader = runtime.database.reader

        @asynccontextmanager
        async def patient(self) -> AsyncIterator[asyncpg.Connection]:
            async with runtime.database.patient() as db:
                heard.append(await db.fetchval("SHOW statement_timeout"))
                yield db

    await roll_up(replace(runtime, database=cast("Database", Patient())))
    assert heard == ["10min"]


async def test_lines_that_are_not_right_are_not_dropped(runtime: Runtime) -> None:
    await small_partitions(runtime, size=8, number=6)
    await history(runtime)
    await pass_time(runtime, 2 * 86_400 * MICROS)
    async with unguarded(runtime) as db:
        await db.execute("UPDATE entry SET actor = 'bob' WHERE number = 12")
    assert await drop_lines(runtime, days=1) == ["entry_000000090"]
    assert ("entry", "entry 12") in await found(runtime)


async def test_cut_at_any_step_of_dropping_it_is_sound_and_goes_on(runtime: Runtime) -> None:
    await small_partitions(runtime, size=8, number=6)
    await history(runtime)
    await seal(runtime)
    await pass_time(runtime, 2 * 86_400 * MICROS)
    cuts = 0
    async for where in cut_everywhere(runtime, lambda one: drop_lines(one, days=1)):
        cuts += 1
        assert await found(runtime) == [], where
    assert cuts > 10
    await drop_lines(runtime, days=1)
    assert await partitions(runtime) == ["entry_000000094", "entry_000000095", "entry_000000096"]
    async with runtime.database.reader() as db:
        assert await db.fetch(store.SQL.orphans) == []


async def test_writers_do_not_wait_for_lines_to_be_dropped(runtime: Runtime) -> None:
    await small_partitions(runtime, size=8, number=6)
    await history(runtime)
    await seal(runtime)
    await pass_time(runtime, 2 * 86_400 * MICROS)
    async with runtime.database.reader() as db, db.transaction():
        await db.fetch("SELECT FROM entry")  # Somebody reads all of it, and takes long.
        dropping = asyncio.ensure_future(drop_lines(runtime, days=1))
        await asyncio.wait({dropping}, timeout=0.5)
        await funded(runtime, "1")
        assert not dropping.done()
    assert len(await dropping) == 4
    assert await found(runtime) == []


async def test_a_removal_that_was_given_up_halfway_is_finished(runtime: Runtime) -> None:
    await small_partitions(runtime, size=8, number=6)
    await history(runtime)
    await seal(runtime)
    await pass_time(runtime, 2 * 86_400 * MICROS)
    async with runtime.database.reader() as reading, reading.transaction(), runtime.database.reader() as db:
        await reading.fetch("SELECT FROM entry")
        await raise_floor(db, 11, 1)
        await db.execute("SET statement_timeout = '200ms'")
        with pytest.raises(asyncpg.QueryCanceledError):
            await db.execute("ALTER TABLE entry DETACH PARTITION entry_000000090 CONCURRENTLY")
        await db.execute("SET statement_timeout = '30s'")
        assert (await store.list_partitions(db))[0].pending
    await funded(runtime, "1")
    assert await found(runtime) == []
    assert (await drop_lines(runtime, days=1))[0] == "entry_000000090"
    assert await found(runtime) == []


async def test_there_is_always_a_partition_for_the_next_entries(runtime: Runtime) -> None:
    async with runtime.database.reader() as db:
        await db.execute("UPDATE ledger SET last = 19999999")
    await create_partitions(runtime)
    assert {"entry_000000001", "entry_000000002"} <= set(await partitions(runtime))
