"""`bursar bench usage`: how long a year's report takes over ten million records of what ran.

A PostgreSQL of its own with its usual durability. The records and their buckets are made by the server in sets, and are
compared with the rules in `core/hours.py` for a sample. What a report is compared with adds up the same tenant's
records, without buckets.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from bursar.bench.crowd import percentile_ms
from bursar.bench.server import running_database
from bursar.core.hours import DAY, HOUR, Level, Meter, Step, Used, fold
from bursar.core.money import NANO
from bursar.core.price import Price
from bursar.store import price as price_store
from bursar.store import usage as store
from bursar.store.database import PATIENT_SECONDS, PATIENT_SETTINGS, Connection, connect
from bursar.store.usage_record import ensure_partitions

GPU = "nvidia.com/gpu"
YEAR = timedelta(days=365)
HOURS_KEPT = timedelta(days=100)
SCANS = 3
RUNS_AT_ONCE = 1_000_000
LOADING = {**PATIENT_SETTINGS, "synchronous_commit": "off", "maintenance_work_mem": "256MB", "work_mem": "128MB"}

Log = Callable[[str], None]

# What ran: whole numbers only, from which everything else is made. `gpus` also stands for the cores, the memory and the
# part of the node that come with them.
RUNS = """
CREATE UNLOGGED TABLE bench_run AS
SELECT number, (number % $2)::integer AS place, 'tenant-' || lpad((number % $2)::text, 4, '0') AS tenant,
       'tenant-' || lpad((number % $2)::text, 4, '0') || '/user-' || (number / $2 % $3) AS username,
       1 << (hash % 4)::integer AS gpus, begin,
       least($5::bigint, begin + 60 + (hash / 4) % 14400) AS until
  FROM generate_series(0, $1::bigint - 1) AS number
 CROSS JOIN LATERAL (SELECT abs(hashint8(number))::bigint AS hash,
                            $4::bigint + (number::numeric * ($5::bigint - $4::bigint - 120) / $1::bigint)::bigint
                                AS begin) AS drawn
"""
RECORDS = """
INSERT INTO usage_record (uid, node, epoch, tenant, username, namespace, name, amounts, class, started_at, ended_at,
                          phase, reason, lease)
SELECT 'alloc-' || number, 'node-' || number % 1000, 1, tenant, username, tenant, 'run-' || number,
       ('{"nvidia.com/gpu":' || gpus * 1000 || ',"cpu":' || gpus * 8000 || ',"memory":' || gpus * 68719476736
        || ',"nodes":' || gpus * 125 || '}')::json,
       'h100', to_timestamp(begin), to_timestamp(until), 'Succeeded', '', NULL
  FROM bench_run
"""
# How much runs of whom, from each step to the next: of some tenants, so that everything is sorted in memory.
LEVELS = """
CREATE UNLOGGED TABLE bench_level AS
SELECT tenant, whose, at, lead(at) OVER steps AS until, sum(delta) OVER steps AS level
  FROM (SELECT tenant, whose, at, sum(delta) AS delta
          FROM (SELECT tenant, username, begin AS at, gpus AS delta
                  FROM bench_run WHERE place BETWEEN {first} AND {last}
                 UNION ALL
                SELECT tenant, username, until, -gpus
                  FROM bench_run WHERE place BETWEEN {first} AND {last}) AS step
         CROSS JOIN LATERAL unnest(ARRAY[username, '']) AS whose
         GROUP BY tenant, whose, at) AS step
WINDOW steps AS (PARTITION BY tenant, whose ORDER BY at)
"""
# Levels in buckets, for each resource as many times as comes with a GPU. Prices change at midnight only.
BUCKETS = """
INSERT INTO {table} (tenant, {username} resource, class, at, total, cost, peak, last)
SELECT tenant, {whose} resource, class, to_timestamp(bucket), total * each,
       total * each * CASE WHEN resource <> 'nvidia.com/gpu' THEN 0 WHEN bucket < $1::bigint THEN $2::numeric
                           ELSE $3::numeric END,
       peak * each, last * each
  FROM (SELECT tenant, whose, bucket,
               sum(level * (least(until, bucket + {size}) - greatest(at, bucket))) AS total, max(level) AS peak,
               coalesce(sum(level) FILTER (WHERE until >= bucket + {size}), 0) AS last
          FROM bench_level
         CROSS JOIN LATERAL generate_series(at - at % {size}, until - 1, {size}) AS bucket
         WHERE level > 0 AND ({chosen}) AND bucket >= $4::bigint
         GROUP BY tenant, whose, bucket) AS kept
 CROSS JOIN (VALUES ('nvidia.com/gpu', 'h100', 1000), ('cpu', '', 8000), ('memory', '', 68719476736),
                    ('nodes', '', 125)) AS taken (resource, class, each)
"""
SINCE = """
INSERT INTO usage_level (tenant, username, resource, class, amount, since)
SELECT tenant, whose, resource, class, 0, to_timestamp(max(bench_level.at))
  FROM bench_level
 CROSS JOIN (VALUES ('nvidia.com/gpu', 'h100'), ('cpu', ''), ('memory', ''), ('nodes', '')) AS taken (resource, class)
 GROUP BY 1, 2, 3, 4
"""
ROLLED = "UPDATE usage_rolled SET at = to_timestamp($1), hours_from = to_timestamp($2)"
INDEXES = """
SELECT indexdef FROM pg_indexes WHERE tablename = 'usage_record' AND indexname <> 'usage_record_once' ORDER BY indexname
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
    async with running_database() as url:
        now = datetime.now(UTC).replace(microsecond=0)
        began = time.perf_counter()
        db = await connect(url, LOADING, PATIENT_SECONDS)
        try:
            await _fill(db, records, tenants, users, now, log)
        finally:
            await db.close()
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


async def _fill(db: Connection, records: int, tenants: int, users: int, now: datetime, log: Log) -> None:
    end, begin = int(now.timestamp()) - 60, int((now - YEAR).timestamp()) - DAY
    middle = (begin + end) // 2 // DAY * DAY
    cheap, dear = NANO // 1000, NANO // 500
    prices = [Price(GPU, "", cheap, begin * 1_000_000 - DAY), Price(GPU, "h100", dear, middle * 1_000_000)]
    await price_store.add(db, [(price, "system:bench") for price in prices])
    month = now - YEAR - timedelta(days=32)
    while month < now:
        await ensure_partitions(db, month)
        month += timedelta(days=28)
    await db.execute(RUNS, records, tenants, users, begin, end)
    log(f"{records} runs drawn")
    await _load_records(db)
    log("records written")
    hours_from = int((now - HOURS_KEPT).timestamp()) // HOUR * HOUR
    days = BUCKETS.format(table="usage_day", username="username,", whose="whose,", size=DAY, chosen="true")
    hours = BUCKETS.format(table="usage_hour", username="", whose="", size=HOUR, chosen="whose = ''")
    together = max(1, tenants * RUNS_AT_ONCE // records)
    for first in range(0, tenants, together):
        await db.execute(LEVELS.format(first=first, last=first + together - 1))
        await db.execute(days, middle, cheap, dear, 0)
        await db.execute(hours, middle, cheap, dear, hours_from)
        await db.execute(SINCE)
        await db.execute("DROP TABLE bench_level")
    await db.execute(ROLLED, end // HOUR * HOUR, hours_from)
    await db.execute("DROP TABLE bench_run")
    await db.execute("VACUUM (ANALYZE) usage_record, usage_day, usage_hour, usage_level")
    log("buckets written")


async def _load_records(db: Connection) -> None:
    """Indexes are built when everything is there: the same ones."""
    indexes = [row["indexdef"] for row in await db.fetch(INDEXES)]
    key = await db.fetchval("SELECT pg_get_constraintdef(oid) FROM pg_constraint WHERE conname = 'usage_record_once'")
    await db.execute("ALTER TABLE usage_record DROP CONSTRAINT usage_record_once")
    await db.execute("DROP INDEX usage_record_ended, usage_record_started")
    await db.execute(RECORDS)
    await db.execute(f"ALTER TABLE usage_record ADD CONSTRAINT usage_record_once {key}")
    for index in indexes:
        await db.execute(index.replace(" ON ONLY ", " ON "))  # on every month as well


async def _check(db: Connection, tenant: str, now: datetime) -> None:
    """What the server made in sets is what the rule makes one by one; and windows are what records say."""
    tariffs = await store.load_tariffs(db)
    meter = Meter(tenant, "", GPU, "h100")
    steps = [Step(meter, row["at"], row["delta"]) for row in await db.fetch(STEPS, tenant)]
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
