"""`bursar bench usage`: latency of a year's report over ten million usage records.

The benchmark starts a PostgreSQL of its own, which makes the records and their buckets in sets. A sample of them is
compared with the rules in `core/usage/usage_levels.py`. Only reads are measured, so the tables are unlogged and get
their indexes when they are full. The baseline adds up the same tenant's records without the buckets.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
from msgspec import Struct

from bursar.bench.crowd import percentile_ms
from bursar.bench.server import running_database
from bursar.core.credit.price import Price
from bursar.core.usage.usage_levels import DAY, HOUR, Level, LevelStep, Meter, Used, fold
from bursar.core.values.money import NANO
from bursar.store.credit import price as price_store
from bursar.store.db.database import PATIENT_SECONDS, PATIENT_SETTINGS, Connection, connect
from bursar.store.usage import usage_levels as store
from bursar.store.usage.usage_records import ensure_partitions

GPU = "nvidia.com/gpu"
YEAR = timedelta(days=365)
HOURS_KEPT = timedelta(days=100)
SCANS = 3
CHEAP, DEAR = NANO // 1000, NANO // 500  # what a GPU costs a second, and later one of its class
RUNS_AT_ONCE = 250_000
# Rows that a transaction writes into tables that it emptied are not logged, but on the disk when it commits.
FILLING = {"wal_level": "minimal", "max_wal_senders": "0"}
LOADING = {**PATIENT_SETTINGS, "synchronous_commit": "off", "maintenance_work_mem": "256MB", "work_mem": "128MB"}

Log = Callable[[str], None]

# The work that ran: whole numbers only, drawn anew from its number wherever it is needed. `gpus` also stands for the
# cores, the memory and the part of the node that come with them. `whose` is the user's number.
DRAWN = """
SELECT number, (number % {tenants})::integer AS place, (number / {tenants} % {users})::integer AS whose,
       (hash % 4)::integer AS size, begin, least({end}, begin + 60 + (hash / 4) % 14400) AS until
  FROM {numbers} AS number
 CROSS JOIN LATERAL (SELECT abs(hashint8(number)::bigint) AS hash,
                            {begin} + number * ({end} - {begin} - 120)::bigint / {records} AS begin OFFSET 0) AS drawn
"""
RECORDS = """
INSERT INTO usage_record (uid, node, epoch, tenant, username, namespace, name, amounts, class, started_at, ended_at,
                          phase, reason, lease)
SELECT 'alloc-' || number, 'node-' || number % 1000, 1, tenant, tenant || '/user-' || whose, tenant, 'run-' || number,
       ($1::json[])[size + 1], 'h100', to_timestamp(begin), to_timestamp(until), 'Succeeded', '', NULL
  FROM ({drawn}) AS run
 CROSS JOIN LATERAL (SELECT 'tenant-' || lpad(place::text, 4, '0') AS tenant) AS named
"""
EACH = {GPU: 1000, "cpu": 8000, "memory": 68719476736, "nodes": 125}  # what comes with a GPU
AMOUNTS = [msgspec.json.encode({name: gpus * each for name, each in EACH.items()}) for gpus in (1, 2, 4, 8)]
# How much runs per user, from each step to the next, and that in buckets, for each resource as many times as comes with
# a GPU: of some tenants, so that everything is sorted in memory, and by one number. `owner` is a user's number; before
# those of a tenant's users comes that of them all. Everything ends, so everybody begins at zero. Of steps of one second
# only the last one lasts. Prices change at midnight only.
BUCKETS = """
WITH run AS MATERIALIZED (
    SELECT place * ({users} + 1) AS everybody, place * ({users} + 1) + 1 + whose AS owner, begin, until,
           1 << size AS gpus
      FROM ({drawn}) AS drawn
), level AS MATERIALIZED (
    SELECT step >> 32 AS owner, step & 4294967295 AS at, until & 4294967295 AS until, level
      FROM (SELECT step, lead(step) OVER steps AS until, sum(delta) OVER steps AS level
              FROM (SELECT (owner::bigint << 32) + begin AS step, gpus AS delta FROM run
                     UNION ALL
                    SELECT (owner::bigint << 32) + until, -gpus FROM run
                     UNION ALL
                    SELECT (everybody::bigint << 32) + begin, gpus FROM run
                     UNION ALL
                    SELECT (everybody::bigint << 32) + until, -gpus FROM run) AS step
            WINDOW steps AS (ORDER BY step ROWS UNBOUNDED PRECEDING)) AS stepped
     WHERE level > 0 AND until > step
), taken (resource, class, each) AS (
    VALUES ('nvidia.com/gpu', 'h100', 1000::bigint), ('cpu', '', 8000), ('memory', '', 68719476736), ('nodes', '', 125)
), named AS (
    SELECT place * ({users} + 1) + number AS owner, tenant,
           CASE number WHEN 0 THEN '' ELSE tenant || '/user-' || number - 1 END AS username
      FROM generate_series({first}, {last}) AS place, generate_series(0, {users}) AS number,
   LATERAL (SELECT 'tenant-' || lpad(place::text, 4, '0') AS tenant) AS called
), days AS (
    INSERT INTO usage_day (tenant, username, resource, class, at, total, cost, peak, last)
    SELECT tenant, username, {amounts} FROM ({days}) AS bucket JOIN named USING (owner) CROSS JOIN taken
), hours AS (
    INSERT INTO usage_hour (tenant, resource, class, at, total, cost, peak, last)
    SELECT tenant, {amounts} FROM ({hours}) AS bucket JOIN named USING (owner) CROSS JOIN taken
)
INSERT INTO usage_level (tenant, username, resource, class, amount, since)
SELECT tenant, username, resource, class, 0, to_timestamp(since)
  FROM (SELECT owner, max(until) AS since FROM run GROUP BY owner
         UNION ALL
        SELECT everybody, max(until) FROM run GROUP BY everybody) AS last
  JOIN named USING (owner)
 CROSS JOIN taken
"""
BUCKET = """
SELECT owner, bucket, sum(level * (least(until, bucket + {size}) - greatest(at, bucket))) AS total, max(level) AS peak,
       coalesce(sum(level) FILTER (WHERE until >= bucket + {size}), 0) AS last
  FROM (SELECT owner, at, until, level,
               generate_series(greatest(at - at % {size}, {since}), until - 1, {size}) AS bucket
          FROM level
         WHERE until > {since} AND owner % {every} = 0) AS kept
 GROUP BY owner, bucket
"""
AMOUNT = """
resource, class, to_timestamp(bucket), total * each,
total * each * CASE WHEN resource <> 'nvidia.com/gpu' THEN 0 WHEN bucket < {middle} THEN {cheap} ELSE {dear} END,
peak * each, last * each
"""
ROLLED = "UPDATE usage_rolled SET at = to_timestamp($1), hours_from = to_timestamp($2)"
KEYS = """
SELECT conrelid::regclass::text AS table, conname AS name, pg_get_constraintdef(oid) AS definition
  FROM pg_constraint WHERE contype = 'p' AND conrelid = ANY($1::text[]::regclass[])
"""
INDEXES = """
SELECT indexname AS name, indexdef AS definition FROM pg_indexes
 WHERE tablename = ANY($1::text[]) AND NOT indexname = ANY($2::text[]) ORDER BY indexname
"""
STEPS = """
SELECT at, sum(delta)::bigint AS delta
  FROM (SELECT extract(epoch FROM started_at)::bigint AS at, (amounts->>'nvidia.com/gpu')::bigint AS delta
          FROM usage_record WHERE tenant = $1
         UNION ALL
        SELECT extract(epoch FROM ended_at)::bigint, -(amounts->>'nvidia.com/gpu')::bigint
          FROM usage_record WHERE tenant = $1) AS step
 GROUP BY at
"""
DAYS = """
SELECT extract(epoch FROM at)::bigint AS at, total::bigint, cost::numeric, peak, last
  FROM usage_day WHERE tenant = $1 AND username = '' AND resource = 'nvidia.com/gpu'
"""


async def run(*, records: int, tenants: int, users: int, reports: int, log: Log) -> dict[str, Any]:
    figures: dict[str, Any] = {"bench": "usage", "rows": records, "tenants": tenants, "users_per_tenant": users}
    async with running_database(FILLING) as url:
        now = datetime.now(UTC).replace(microsecond=0)
        began = time.perf_counter()
        await _fill(url, Drawing(records, tenants, users, now), log)
        figures["fill_s"] = round(time.perf_counter() - began, 1)
        db = await connect(url)
        try:
            names = [
                f"tenant-{number * tenants // min(tenants, reports):04}" for number in range(min(tenants, reports))
            ]
            for name in {names[0], names[-1]}:
                await _check(db, name, now)
            figures |= await _measure(db, names, reports, now)
        finally:
            await db.close()
    log(
        f"tenant {figures['tenant_year_ms']:9.1f} ms  a year of one of {tenants} tenants, {records} records"
        f" (p99 {figures['tenant_year_p99_ms']:.1f} ms)"
    )
    log(f"user   {figures['user_year_ms']:9.1f} ms  a year of one of {tenants * users} users")
    log(
        f"scan   {figures['scan_ms']:9.1f} ms  the same tenant's records: {figures['scan_vs_report']:.0f} times as long"
    )
    return figures


class Drawing(Struct, frozen=True):
    """The records to draw, and their prices."""

    records: int
    tenants: int
    users: int
    now: datetime

    @property
    def begin(self) -> int:
        return int((self.now - YEAR).timestamp()) - DAY

    @property
    def end(self) -> int:
        return int(self.now.timestamp()) - 60

    @property
    def middle(self) -> int:
        """When the dearer price begins."""
        return (self.begin + self.end) // 2 // DAY * DAY

    @property
    def hours_from(self) -> int:
        return int((self.now - HOURS_KEPT).timestamp()) // HOUR * HOUR

    def records_of(self, first: int, last: int) -> str:
        """A statement that writes those of these numbers."""
        return RECORDS.format(drawn=self._drawn(f"generate_series({first}::bigint, {last})"))

    def buckets_of(self, first: int, last: int) -> str:
        """A statement that writes those of the tenants of these numbers."""
        numbers = (
            f"generate_series({first}::bigint, {last}) AS one,"
            f" generate_series(one, {self.records - 1}::bigint, {self.tenants})"
        )
        return BUCKETS.format(
            drawn=self._drawn(numbers),
            first=first,
            last=last,
            users=self.users,
            amounts=AMOUNT.format(middle=self.middle, cheap=CHEAP, dear=DEAR),
            days=BUCKET.format(size=DAY, since=0, every=1),
            hours=BUCKET.format(size=HOUR, since=self.hours_from, every=self.users + 1),
        )

    def _drawn(self, numbers: str) -> str:
        return DRAWN.format(
            numbers=numbers,
            begin=self.begin,
            end=self.end,
            records=self.records,
            tenants=self.tenants,
            users=self.users,
        )


async def _fill(url: str, drawing: Drawing, log: Log) -> None:
    """Records and buckets at once, each in a transaction that emptied its tables first: those are not logged."""
    db = await connect(url, LOADING, PATIENT_SECONDS)
    try:
        prices = [
            Price(GPU, "", CHEAP, (drawing.begin - DAY) * 1_000_000),
            Price(GPU, "h100", DEAR, drawing.middle * 1_000_000),
        ]
        await price_store.add(db, [(price, "system:bench") for price in prices])
        month = drawing.now - YEAR - timedelta(days=32)
        while month < drawing.now:
            await ensure_partitions(db, month)
            month += timedelta(days=28)
        async with asyncio.TaskGroup() as both:
            both.create_task(_load_records(url, drawing, log))
            both.create_task(_load_buckets(url, drawing, log))
        await db.execute(ROLLED, drawing.end // HOUR * HOUR, drawing.hours_from)
    finally:
        await db.close()


async def _load_records(url: str, drawing: Drawing, log: Log) -> None:
    async with _loading(url, "usage_record") as db:
        for first in range(0, drawing.records, RUNS_AT_ONCE):
            last = min(first + RUNS_AT_ONCE, drawing.records) - 1
            await db.execute(drawing.records_of(first, last), AMOUNTS)
            log(f"{last + 1} of {drawing.records} records written")
    log("records indexed")


async def _load_buckets(url: str, drawing: Drawing, log: Log) -> None:
    together = max(1, drawing.tenants * RUNS_AT_ONCE // drawing.records)
    async with _loading(url, "usage_day", "usage_hour", "usage_level") as db:
        for first in range(0, drawing.tenants, together):
            last = min(first + together, drawing.tenants) - 1
            await db.execute(drawing.buckets_of(first, last))
            log(f"buckets of {last + 1} of {drawing.tenants} tenants written")
    log("buckets indexed")


@asynccontextmanager
async def _loading(url: str, *tables: str) -> AsyncIterator[Connection]:
    """Tables are filled while they have no indexes; when everything is there they get them back, the same ones."""
    db = await connect(url, LOADING, PATIENT_SECONDS)
    try:
        async with db.transaction():
            await db.execute(f"TRUNCATE {', '.join(tables)}")
            keys = await db.fetch(KEYS, tables)
            indexes = await db.fetch(INDEXES, tables, [key["name"] for key in keys])
            for key in keys:
                await db.execute(f"ALTER TABLE {key['table']} DROP CONSTRAINT {key['name']}")
            for index in indexes:
                await db.execute(f"DROP INDEX {index['name']}")
            yield db
            for key in keys:
                await db.execute(f"ALTER TABLE {key['table']} ADD CONSTRAINT {key['name']} {key['definition']}")
            for index in indexes:
                await db.execute(index["definition"].replace(" ON ONLY ", " ON "))  # on every month as well
        await db.execute(f"VACUUM (ANALYZE) {', '.join(tables)}")
    finally:
        await db.close()


async def _check(db: Connection, tenant: str, now: datetime) -> None:
    """Check that the server's sets equal the rules' results, and that windows equal the records."""
    tariffs = await store.load_tariffs(db)
    meter = Meter(tenant, "", GPU, "h100")
    steps = [LevelStep(meter, row["at"], row["delta"]) for row in await db.fetch(STEPS, tenant)]
    _, expected = fold(Level(), steps, 0, DAY, tariffs.of(GPU, "h100"))
    kept = {
        row["at"]: (row["total"], int(row["cost"]), row["peak"], row["last"]) for row in await db.fetch(DAYS, tenant)
    }
    folded = {at: (one.total, one.cost, one.peak, one.rise) for at, one in expected.items() if one.total}
    if kept != folded:
        raise RuntimeError(f"{tenant}: buckets made by the server differ from the rule's")
    for begin in (now - YEAR, now - timedelta(days=90, seconds=1234)):
        window = (await store.load_window(db, [tenant], begin, now=now, tariffs=tariffs))[tenant]
        records = await store.recompute(db, tenant, begin, now, tariffs=tariffs)
        if {key: Used(one.total, one.cost) for key, one in window.items()} != records:
            raise RuntimeError(f"{tenant}: a window from {begin} differs from its records")


async def _measure(db: Connection, names: Sequence[str], reports: int, now: datetime) -> dict[str, Any]:
    tariffs = await store.load_tariffs(db)
    turns = [
        (name, now - YEAR - timedelta(seconds=37 * turn)) for turn in range(-(-reports // len(names))) for name in names
    ]

    async def tenant(turn: tuple[str, datetime]) -> object:
        return await store.load_window(db, [turn[0]], turn[1])

    async def user(turn: tuple[str, datetime]) -> object:
        return await store.load_user_window(db, f"{turn[0]}/user-0", None, turn[1])

    async def scan(turn: tuple[str, datetime]) -> object:
        return await store.recompute(db, turn[0], turn[1], now, tariffs=tariffs)

    tenants, users, scans = await _timed(tenant, turns), await _timed(user, turns), await _timed(scan, turns[:SCANS])
    scan_ms = percentile_ms(scans, 0.5)
    report_ms = percentile_ms(tenants, 0.5)
    return {
        "tenant_year_ms": report_ms,
        "tenant_year_p99_ms": percentile_ms(tenants, 0.99),
        "user_year_ms": percentile_ms(users, 0.5),
        "user_year_p99_ms": percentile_ms(users, 0.99),
        "scan_ms": scan_ms,
        "scan_vs_report": round(scan_ms / report_ms, 1),
    }


async def _timed(
    ask: Callable[[tuple[str, datetime]], Awaitable[object]], turns: Sequence[tuple[str, datetime]]
) -> list[float]:
    """In order. The first is not counted: it finds nothing in memory that later ones do."""
    waits = []
    for turn in (turns[0], *turns):
        began = time.perf_counter()
        await ask(turn)
        waits.append(time.perf_counter() - began)
    return sorted(waits[1:])
