"""Verification of the ledger finds every changed row, and names it."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from bursar.core.credit.account import QUARTER
from bursar.core.credit.hash_chain import Anchor
from bursar.ops.credit import ledger_verify as ops
from bursar.ops.credit.ledger_verify import review, verify
from bursar.ops.credit.seal import load_standing, seal
from bursar.ops.runtime.runtime import Runtime
from bursar.store.credit import ledger_verify as store
from bursar.store.credit import seal as seal_store
from support.credit.ledgers import funded, pass_time
from support.credit.sealings import Heard, found, hearing, heartbeat, history, unguarded
from support.runtime.postgres import PostgresServer, _url, clone_database, drop_database
from support.runtime.runtime import opened

LAST = "(SELECT max(number) FROM entry_block)"
UNSEALED = "(SELECT last FROM ledger)"
LAB_NUMBER, ANNA_NUMBER = 100, 101


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def database_template(embedded_postgres: PostgresServer, database_template: str) -> AsyncIterator[str]:
    """A database with a history of leases, made once: each test gets a copy of it."""
    name = await clone_database(embedded_postgres, database_template)
    async with opened(_url(embedded_postgres, name)) as runtime:
        ledger = await history(runtime)
    assert (ledger["lab"], ledger["anna"], ledger["first"], ledger["third"]) == (LAB_NUMBER, ANNA_NUMBER, 1, 3)
    yield name
    await drop_database(embedded_postgres, name)


@pytest.mark.parametrize(
    ("done", "named"),
    [
        ("UPDATE entry SET amount = amount + 1 WHERE number = 9", [("entry", "entry 9")]),
        ("UPDATE entry SET debit = 201 - debit WHERE number = 7", [("entry", "entry 7")]),
        ("UPDATE entry SET reason = 'nothing' WHERE number = 1", [("entry", "entry 1")]),
        ("UPDATE entry SET at = at + interval '1 microsecond' WHERE number = 12", [("entry", "entry 12")]),
        ("UPDATE entry SET type = 'refund' WHERE number = 30", [("entry", "entry 30")]),
        ("UPDATE entry SET actor = 'bob' WHERE number IN (16, 19)", [("entry", "block 3")]),
        ("DELETE FROM entry WHERE number = 20", [("entry", "entry 20")]),
        ("DELETE FROM entry WHERE number = 1", [("entry", "entry 1")]),
        ("UPDATE entry_kept SET amount = 1 WHERE number = 2", [("kept", "kept entry 2")]),
        ("DELETE FROM entry_kept WHERE number = 2", [("kept", "kept entry 2")]),
        ("UPDATE entry_block SET amount = amount + 1 WHERE number = 2", [("chain", "block 2")]),
        ("UPDATE entry_block SET hash = previous WHERE number = 2", [("chain", "block 2"), ("chain", "block 3")]),
        ("UPDATE entry_block SET rollup_hash = kept_hash WHERE number = 1", [("chain", "block 1")]),
        ("DELETE FROM entry_block WHERE number = 2", [("chain", "block 2")]),
        ("DELETE FROM entry_block WHERE number = 3", [("chain", "page 2"), ("chain", "block 3")]),
        ("DELETE FROM entry_block WHERE number IN (2, 3)", [("chain", "block 2")]),
        (f"DELETE FROM entry_block WHERE number = {LAST}", [("chain", "block 7"), ("lease", "posted of lease 1")]),
        ("UPDATE entry_page SET rollup_hash = previous WHERE number = 1", [("chain", "page 1")]),
        ("DELETE FROM entry_page WHERE number = 1", [("chain", "page 1")]),
        (
            "UPDATE entry_rollup SET amount = amount + 1 WHERE block = 3 AND account = 101 AND lease = 3",
            [("rollup", "rollup of block 3, account 101, lease-3, debit")],
        ),
        (
            f"DELETE FROM entry_rollup WHERE block = {LAST} AND account = 2 AND type = 'refund'",
            [("rollup", "rollup of block 7, system/revenue, refund")],
        ),
        (
            "INSERT INTO entry_rollup VALUES (3, 101, 99, 'debit', 1, 0, 0, 11, 11, 0, 0)",
            [("rollup", "rollup of block 3, account 101, lease-99, debit")],
        ),
        (
            "UPDATE account_balance SET posted = posted - 1 WHERE account = 100 AND block = 2",
            [("balance", "balance of account 100 after block 2")],
        ),
        (
            f"DELETE FROM account_balance WHERE account = 101 AND block = {LAST}",
            [("balance", "balance of account 101 after block 7")],
        ),
        (
            "INSERT INTO account_balance VALUES (77, 2, 5)",
            [("balance", "balance of account 77 after block 2"), ("balance", "account 77")],
        ),
        ("UPDATE account SET posted = posted + 1 WHERE id = 101", [("balance", "account 101")]),
        ("UPDATE account SET posted = 1 WHERE id = 2", [("balance", "account 2")]),
        ("DELETE FROM account WHERE id = 101", [("balance", "account 101")]),
        ("UPDATE account SET held = held - 1 WHERE id = 100", [("held", "account 100")]),
        ("UPDATE account SET gpus = gpus + 1000 WHERE id = 100", [("held", "account 100")]),
        ("UPDATE lease SET held = held + 1 WHERE id = 3", [("lease", "held of lease 3"), ("held", "account 101")]),
        ("UPDATE lease SET posted = posted + 1 WHERE id = 2", [("lease", "posted of lease 2")]),
        ("UPDATE lease_ended SET posted = posted + 1 WHERE id = 1", [("lease", "posted of lease 1")]),
        ("DELETE FROM lease WHERE id = 4", [("held", "account 101")]),
    ],
)
async def test_one_changed_row_is_found_and_named(runtime: Runtime, done: str, named: list[tuple[str, str]]) -> None:
    await seal(runtime)
    assert await found(runtime) == []
    async with unguarded(runtime) as db:
        assert await db.execute(done) not in ("UPDATE 0", "DELETE 0", "INSERT 0 0")
    wrong = await found(runtime)
    assert set(named) <= set(wrong)
    assert wrong[0] in named, "what is told first is where it began"


@pytest.mark.parametrize(
    ("done", "named"),
    [
        (f"DELETE FROM entry WHERE number = {UNSEALED}", ("entry", "entry 41")),
        (f"DELETE FROM entry WHERE number = {UNSEALED} - 2", ("entry", "entry 39")),
        (f"UPDATE entry SET amount = amount + 1 WHERE number = {UNSEALED} - 2", ("balance", "account 100")),
        ("UPDATE ledger SET last = last + 1", ("entry", "entry 42")),
        ("UPDATE ledger SET last = last - 1", ("entry", "entry 41")),
    ],
)
async def test_also_what_is_not_sealed_yet(runtime: Runtime, done: str, named: tuple[str, str]) -> None:
    assert (await load_standing(runtime)).unsealed == 3
    async with unguarded(runtime) as db:
        await db.execute(done)
    assert named in await found(runtime)


async def test_whoever_seals_anew_what_was_changed_is_found_out_by_a_hash_that_was_written_down(
    runtime: Runtime,
) -> None:
    await seal(runtime)
    written_down = (await verify(runtime)).head
    assert written_down is not None
    assert (await verify(runtime, anchor=written_down)).sound
    async with unguarded(runtime) as db:
        await db.execute("UPDATE entry SET actor = 'bob' WHERE number = 1")
        for table in ("entry_kept", "entry_rollup", "account_balance", "entry_block", "entry_page"):
            await db.execute(f"DELETE FROM {table}")
    await seal(runtime)
    assert (await verify(runtime)).sound, "everything was made to fit"
    (one,) = (await verify(runtime, anchor=written_down)).findings
    assert (one.check, one.where) == ("chain", f"block {written_down.block}")
    (one,) = (await verify(runtime, anchor=Anchor(999, written_down.hash))).findings
    assert (one.where, one.message) == ("block 999", "it is missing")


async def test_a_long_ledger_is_verified_in_parts(runtime: Runtime) -> None:
    await seal(runtime)
    async with unguarded(runtime) as db:
        await db.execute("UPDATE entry SET amount = amount + 1 WHERE number = 30")
    after, parts, wrong = 0, 0, []
    while True:
        proof = await verify(runtime, after=after, entries_max=1)
        after, parts = proof.through, parts + 1
        wrong += [one.where for one in proof.findings if one.check == "entry"]
        if not proof.more:
            break
    assert wrong == ["entry 30"]
    assert parts == 5, "three pages, and two blocks of the last quarter of an hour"


async def test_what_is_wrong_is_written_down_until_it_is_right_again(runtime: Runtime) -> None:
    standing = await review(runtime)
    assert standing is not None
    assert (standing.findings, standing.verified) == ([], standing.block)
    assert await review(runtime, seconds=60.0) is None, "somebody has just done so"
    async with unguarded(runtime) as db:
        await db.execute("UPDATE entry SET amount = amount + 1 WHERE number = 5")
        await db.execute("UPDATE account SET held = held + 1 WHERE id = 100")
    await review(runtime)  # It is an old block: it comes in its turn.
    standing = await review(runtime)
    assert standing is not None
    assert {"entry 5", "account 100"} <= {one.where for one in standing.findings}
    await pass_time(runtime, 10**6)
    await heartbeat(runtime, 99)
    await seal(runtime)
    standing = await review(runtime)
    assert standing is not None
    assert "entry 5" in {one.where for one in standing.findings}, "whatever else was looked at"
    async with unguarded(runtime) as db:
        await db.execute("UPDATE entry SET amount = amount - 1 WHERE number = 5")
        await db.execute("UPDATE account SET held = held - 1 WHERE id = 100")
    for _ in range(3):
        standing = await review(runtime)
    assert standing is not None
    assert standing.findings == []


async def test_an_entry_is_never_before_the_one_before_it_whatever_the_clock_does(runtime: Runtime) -> None:
    await pass_time(runtime, -2 * QUARTER)
    assert await funded(runtime, "1") == LAB_NUMBER
    async with runtime.database.reader() as db:
        times = [row["at"] for row in await db.fetch("SELECT at FROM entry ORDER BY number")]
    assert times[-1] == times[-2]
    assert times == sorted(times)
    assert await found(runtime) == []
    async with unguarded(runtime) as db:
        await db.execute("UPDATE entry SET at = at - interval '1 hour' WHERE number = 42")
    assert await found(runtime) == [("entry", "entry 42")]


async def test_leases_are_looked_at_some_at_a_time_and_what_was_found_of_others_stays(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "LEASES_MAX", 1)
    async with unguarded(runtime) as db:
        await db.execute("UPDATE lease SET posted = posted + 1 WHERE id IN (2, 4)")
    second, fourth = "posted of lease 2", "posted of lease 4"
    assert {second, fourth} <= {one for _, one in await found(runtime)}, "who asks is told of all"

    async def reviewed() -> tuple[int, set[str]]:
        standing = await review(runtime, work_seconds=0.0)
        assert standing is not None
        return standing.leases, {one.where for one in standing.findings}

    assert await reviewed() == (2, {second})
    assert await reviewed() == (3, {second})
    assert await reviewed() == (4, {second, fourth})
    async with unguarded(runtime) as db:
        await db.execute("UPDATE lease SET posted = posted - 1 WHERE id = 2")
    assert await reviewed() == (0, {second, fourth})
    assert await reviewed() == (2, {fourth})
    standing = await review(runtime)
    assert standing is not None
    assert standing.leases == 0, "with time, all the rest of them"


@pytest.mark.parametrize(("quarters_max", "slices"), [(1, [2, 3, 4]), (6, [3, 4]), (10**6, [4])])
async def test_leases_that_ran_long_are_added_up_with_fewer_others(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, quarters_max: int, slices: list[int]
) -> None:
    monkeypatch.setattr(store, "QUARTERS_MAX", quarters_max)
    seen, through = [], 0
    while through < store.LEASE_MAX:
        _, through = await ops.prove_leases(runtime, through)
        seen.append(through)
    assert seen == [*slices, store.LEASE_MAX]
    assert await found(runtime) == []


async def test_no_statement_reads_the_lines_of_more_than_a_block(runtime: Runtime) -> None:
    await seal(runtime)
    async with runtime.database.reader() as db:
        blocks = await seal_store.load_blocks(db, 0, 10**9, 10**6)
        assert await db.fetchval("SELECT max(last_block - first_block) FROM entry_page") > 0, "pages of several blocks"
    heard: list[Heard] = []
    assert (await verify(hearing(runtime, heard))).sound
    sums = [args[:2] for statement, args in heard if statement == store.SQL.sums_of_entries]
    assert sums == [(one.first, one.last) for one in blocks]
    times = [args[:2] for statement, args in heard if statement == store.SQL.untimely_entries]
    assert {last for _, last in times} >= {one.last for one in blocks}
    assert max(last - first for first, last in times) <= max(one.last - one.first + 1 for one in blocks)


async def test_a_review_goes_on_as_long_as_there_is_more_and_time(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    await seal(runtime)
    monkeypatch.setattr(ops, "UNITS_MAX", 1)
    standing = await review(runtime, work_seconds=0.0)
    assert standing is not None
    assert 0 < standing.verified < standing.block
    standing = await review(runtime)
    assert standing is not None
    assert standing.verified == standing.block


async def test_a_review_waits_for_nobody_who_seals_and_counts_only_once_it_is_done(runtime: Runtime) -> None:
    async with runtime.database.reader() as db:
        assert await seal_store.claim_check(db, 60.0)
        assert (await seal_store.load_standing(db)).checked_at is None
        async with db.transaction():
            assert await seal_store.lock(db)
            standing = await review(runtime)
    assert standing is not None
    assert standing.checked_at is not None
