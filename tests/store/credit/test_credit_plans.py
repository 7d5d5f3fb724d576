"""What is asked of the ledger again and again costs what is answered, however much there is beside it."""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from bursar.ops.runtime.runtime import Runtime
from bursar.store.credit import account_statement, usage_events
from bursar.store.credit.usage_events import KEPT_MICROS
from bursar.store.db.database import Connection

ACCOUNT, LEASES, BLOCKS, SHOWN = 100, 2000, 50, 20


async def plan_of(db: Connection, sql: str, *arguments: Any) -> dict[str, Any]:
    """How a statement was carried out, and what of it was changed undone."""
    transaction = db.transaction()
    await transaction.start()
    try:
        raw = await db.fetchval(f"EXPLAIN (ANALYZE, FORMAT JSON) {sql}", *arguments)
    finally:
        await transaction.rollback()
    plan: dict[str, Any] = msgspec.json.decode(raw)[0]["Plan"]
    return plan


def parts(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for one in plan.get("Plans", ()):
        yield from parts(one)


def rows_read(plan: dict[str, Any], table: str) -> int:
    scans = [one for one in parts(plan) if one.get("Relation Name", "").startswith(table)]
    return sum(one["Actual Loops"] * (one["Actual Rows"] + one.get("Rows Removed by Filter", 0)) for one in scans)


@pytest.fixture
async def long_history(runtime: Runtime) -> Runtime:
    """Many leases of one account, each with some rollups in every block."""
    async with runtime.database.reader() as db:
        await db.execute(
            "INSERT INTO entry_rollup (block, account, lease, type, count, amount, micros, first, last, begin, until)"
            " SELECT block, $1, lease, 'debit', 1, -1, 1000000, 1, 1, 1, 2"
            "   FROM generate_series(1, $2::bigint) AS block, generate_series(1, $3::bigint) AS lease",
            ACCOUNT, BLOCKS, LEASES,
        )  # fmt: skip
        await db.execute("ANALYZE entry_rollup")
    return runtime


@pytest.mark.parametrize("after", [0, LEASES // 2, LEASES - SHOWN])
async def test_a_page_of_a_statement_reads_what_it_shows(long_history: Runtime, after: int) -> None:
    async with long_history.database.reader() as db:
        plan = await plan_of(
            db, account_statement.SQL.lines, ACCOUNT, 1, BLOCKS, 0, 0, 0, 0, after, LEASES, SHOWN
        )  # fmt: skip
    assert plan["Actual Rows"] == SHOWN
    assert (
        rows_read(plan, "entry_rollup") <= 2 * (SHOWN + 2) * BLOCKS
    )  # once to find the leases, and once to add them up


async def test_what_is_forgotten_of_usage_is_found_by_its_age(runtime: Runtime) -> None:
    old = 25
    async with runtime.database.reader() as db:
        await db.execute(
            "INSERT INTO lease_ended (id, account, job, amounts, gpus, span, rate, opened_at, since, posted_until,"
            " paid_until, held, state, closed_at, reconciled_at)"
            " SELECT id, 100, 'job', '{}', 0, 0, 0, 1, 1, 1, 1, 0, 'closed', 1, now() FROM generate_series(1, 2) AS id"
        )
        for lease, count, age in ((1, old, "90 days"), (2, 5000, "1 hour")):
            await db.execute(
                "INSERT INTO usage_event (account, job, seq, lease, begin_us, end_us, micros, at)"
                f" SELECT 100, 'job-' || $1::bigint, seq, $1::bigint, 0, 0, 0, now() - interval '{age}'"
                "   FROM generate_series(1, $2::bigint) AS seq",
                lease, count,
            )  # fmt: skip
            await db.execute(
                "INSERT INTO job_usage (account, job, lease, events, amount, at, made_at)"
                f" SELECT 100, 'job-' || lease, lease, 0, 0, now() - interval '{age}', now() - interval '{age}'"
                "   FROM generate_series($1::bigint * 100000, $1::bigint * 100000 + $2::bigint) AS lease",
                lease, count,
            )  # fmt: skip
        await db.execute("ANALYZE usage_event")
        await db.execute("ANALYZE job_usage")
        before = await db.fetchval("SELECT now() - interval '31 days'")
        events = await plan_of(db, usage_events.SQL.forget_events, before, KEPT_MICROS, 10_000)
        sums = await plan_of(db, usage_events.SQL.forget_sums, before, KEPT_MICROS, 10_000)
        assert rows_read(events, "usage_event") <= 2 * old  # found once, and deleted once
        assert rows_read(sums, "job_usage") <= 2 * old + 2
        assert await usage_events.forget(db) == old
