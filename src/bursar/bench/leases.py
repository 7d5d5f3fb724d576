"""`bursar bench leases`: lease extensions per second, and their latency.

A PostgreSQL of its own with its usual durability. First every job extends at its pace, then as fast as it is answered;
then the same with one account that pays for half of the jobs. The baseline extends one lease per
transaction, in one statement and without waiting for numbers, over sixteen connections to the same database.
"""

from __future__ import annotations

import asyncio
import random
import re
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from bursar.bench.crowd import percentile_ms
from bursar.bench.server import create, running_runtime
from bursar.commands.credit.credit import OpenLease, PutPrice, TopUp
from bursar.commands.credit.ledger import Receipt
from bursar.core.credit.account import Owner
from bursar.core.credit.lease import Grant
from bursar.core.values.money import MICROS, NANO
from bursar.core.values.refusal import Refusal
from bursar.ops.credit.ledger import Extend
from bursar.ops.runtime.gc_tuning import calm_collector
from bursar.ops.runtime.runtime import Runtime
from bursar.store.credit import ledger as store
from bursar.store.embedded.binaries import find_binaries

GPU = "nvidia.com/gpu"
WINDOW_SECONDS = 120
TICK_SECONDS = 0.01
FLIGHT = 4096  # extensions that wait for their answer when it goes as fast as it can
CONNECTIONS = 16
WARM_SECONDS = 1.0

# One lease, one transaction, in one statement: nothing that could be sent or waited for less.
BASELINE = """\
\\set job random(0, {jobs} - 1)
WITH due AS (
    SELECT id, account, rate * 5 AS amount FROM lease WHERE id = {first} + :job
), balanced AS (
    UPDATE account SET posted = posted - due.amount, version = version + 1 FROM due
     WHERE account.id = due.account AND posted - held + credit_limit >= due.amount
    RETURNING account.id
), moved AS (
    UPDATE lease SET posted_until = posted_until + 5000000, paid_until = paid_until + 5000000,
                     posted = posted + due.amount, seq = seq + 1
      FROM due, balanced WHERE lease.id = due.id
    RETURNING lease.id, lease.seq, lease.rate
)
INSERT INTO bench_entry (number, at, type, debit, credit, amount, lease, seq, rate)
SELECT nextval('bench_number'), now(), 'debit', due.account, 2, due.amount, moved.id, moved.seq, moved.rate
  FROM due, moved;
"""
BASELINE_TABLE = """
CREATE SEQUENCE bench_number;
CREATE TABLE bench_entry (LIKE entry INCLUDING DEFAULTS INCLUDING CONSTRAINTS, PRIMARY KEY (number));
"""
# Accounts whose balance is not that of their entries, or that hold something else than their leases do.
CHECK = """
WITH moved AS (
    SELECT account, sum(amount) AS posted
      FROM (SELECT credit AS account, amount FROM entry UNION ALL SELECT debit, -amount FROM entry) AS side
     GROUP BY account
), open AS (
    SELECT account, sum(held) AS held FROM lease GROUP BY account
)
SELECT count(*)
  FROM account
  LEFT JOIN moved ON moved.account = account.id
  LEFT JOIN open ON open.account = account.id
 WHERE id >= 100 AND (account.posted <> coalesce(moved.posted, 0) OR account.held <> coalesce(open.held, 0))
"""

Log = Callable[[str], None]


@dataclass(slots=True)
class BenchJob:
    lease: int
    seq: int = 0


@dataclass(slots=True)
class ExtensionTaken:
    """The results of a part: answers, duration and latencies."""

    offered: int = 0
    seconds: float = 0.0
    waits: list[float] = field(default_factory=list)
    refused: list[Grant | Refusal] = field(default_factory=list)

    @property
    def per_second(self) -> float:
        return len(self.waits) / self.seconds if self.seconds else 0.0

    def percentile_ms(self, fraction: float) -> float:
        return percentile_ms(sorted(self.waits), fraction)


async def run(*, jobs: int, delta: float, seconds: float, accounts: int, log: Log) -> dict[str, Any]:
    figures: dict[str, Any] = {"bench": "leases", "jobs": jobs, "delta_seconds": delta, "accounts": accounts}
    async with running_runtime() as (runtime, url):
        await _priced(runtime)
        owners = [Owner(f"bench-{number:04}") for number in range(accounts)]
        many = await _leased(runtime, [owners[index % accounts] for index in range(jobs)])
        hot = await _leased(runtime, [Owner("bench-hot")] * max(1, jobs // 2))
        calm_collector()  # as the server does
        await _flat_out(runtime, many, WARM_SECONDS)
        figures |= await _measured(runtime, many, delta, seconds)
        log(
            f"offered  {figures['offered_per_s']:9.0f}/s  {jobs} jobs every {delta:g} s:"
            f" {figures['extended_per_s']:.0f}/s, p50 {figures['p50_ms']:.1f} ms, p99 {figures['p99_ms']:.1f} ms"
        )
        log(f"flat out {figures['max_per_s']:9.0f}/s  p99 {figures['max_p99_ms']:.1f} ms")
        figures |= {f"hot_{name}": value for name, value in (await _measured(runtime, hot, delta, seconds)).items()}
        figures["hot_jobs"] = len(hot)
        log(
            f"hot      {figures['hot_max_per_s']:9.0f}/s  {len(hot)} jobs of one account,"
            f" at their pace p99 {figures['hot_p99_ms']:.1f} ms"
        )
        await _check(runtime)
        figures |= await _baseline(runtime, url, many, seconds)
    figures["max_vs_baseline"] = round(figures["max_per_s"] / figures["baseline_tx_per_s"], 2)
    log(
        f"baseline {figures['baseline_tx_per_s']:9.0f}/s  one transaction each, {CONNECTIONS} connections:"
        f" {figures['max_vs_baseline']:.2f} times as many"
    )
    return figures


async def _measured(runtime: Runtime, jobs: Sequence[BenchJob], delta: float, seconds: float) -> dict[str, Any]:
    offered = await _offered(runtime, jobs, delta, seconds)
    flat = await _flat_out(runtime, jobs, seconds)
    if refused := offered.refused + flat.refused:
        raise RuntimeError(f"{len(refused)} heartbeats got no more time, the first: {refused[0]}")
    return {
        "offered_per_s": round(offered.offered / offered.seconds, 1),
        "extended_per_s": round(offered.per_second, 1),
        "p50_ms": offered.percentile_ms(0.5),
        "p99_ms": offered.percentile_ms(0.99),
        "max_per_s": round(flat.per_second),
        "max_p99_ms": flat.percentile_ms(0.99),
    }


async def _offered(runtime: Runtime, jobs: Sequence[BenchJob], delta: float, seconds: float) -> ExtensionTaken:
    """Every job sends one heartbeat in `delta` seconds at its own time, independent of the others' answers."""
    loop = asyncio.get_running_loop()
    order = random.Random(1).sample(list(jobs), len(jobs))  # noqa: S311
    taken, waiting = ExtensionTaken(), set[asyncio.Future[Grant | Refusal]]()
    began = loop.time()
    while (elapsed := loop.time() - began) < seconds:
        due = int(elapsed / delta * len(jobs))
        while taken.offered < due and loop.time() - began < seconds:
            waiting.add(_heartbeat(runtime, order[taken.offered % len(jobs)], taken, waiting.discard))
            taken.offered += 1
        await asyncio.sleep(TICK_SECONDS)
    taken.seconds = loop.time() - began
    await asyncio.gather(*waiting)
    return taken


async def _flat_out(runtime: Runtime, jobs: Sequence[BenchJob], seconds: float) -> ExtensionTaken:
    """As many as are answered: so many wait at any time, each for another job."""
    loop = asyncio.get_running_loop()
    taken, began = ExtensionTaken(), loop.time()
    resting, waiting = deque(jobs), set[asyncio.Future[Grant | Refusal]]()

    def heard(job: BenchJob, future: asyncio.Future[Grant | Refusal]) -> None:
        waiting.discard(future)
        resting.append(job)  # A job has one heartbeat in flight, which the next one must not overtake.
        if loop.time() - began < seconds and not future.exception():
            send()

    def send() -> None:
        job = resting.popleft()
        taken.offered += 1
        waiting.add(_heartbeat(runtime, job, taken, partial(heard, job)))

    for _ in range(min(FLIGHT, len(jobs))):
        send()
    while waiting:
        await asyncio.gather(*waiting)
    taken.seconds = loop.time() - began
    return taken


def _heartbeat(
    runtime: Runtime, job: BenchJob, taken: ExtensionTaken, then: Callable[[asyncio.Future[Grant | Refusal]], None]
) -> asyncio.Future[Grant | Refusal]:
    sent = time.perf_counter()
    job.seq += 1
    answer = runtime.extending.put(Extend(job.lease, job.seq))

    def heard(future: asyncio.Future[Grant | Refusal]) -> None:
        if not future.cancelled() and future.exception() is None:
            grant = future.result()
            if isinstance(grant, Grant) and not grant.final:
                taken.waits.append(time.perf_counter() - sent)
            else:
                taken.refused.append(grant)
        then(future)

    answer.add_done_callback(heard)
    return answer


# Setup.


async def _priced(runtime: Runtime) -> None:
    command = PutPrice(actor="system:bench", resource=GPU, klass="h100", per_second=NANO // 100)
    _granted(await runtime.crediting.submit(command))


async def _leased(runtime: Runtime, owners: Sequence[Owner]) -> list[BenchJob]:
    """An open lease for each of these, and accounts that never run dry."""
    for owner in sorted(set(owners), key=lambda one: one.tenant):
        await create(runtime, "Tenant", {"metadata": {"name": owner.tenant}, "spec": {}})
        _granted(await runtime.crediting.submit(TopUp(actor="system:bench", whose=owner, amount=10**6 * NANO)))
    asked = [
        OpenLease(whose=owner, job=f"job-{index}", amounts={GPU: 4000}, klass="h100", window=WINDOW_SECONDS * MICROS)
        for index, owner in enumerate(owners)
    ]
    jobs = []
    for start in range(0, len(asked), FLIGHT):
        waiting = [runtime.crediting.put(one, one.whose.tenant) for one in asked[start : start + FLIGHT]]
        jobs += [_granted(await one) for one in waiting]
    return [BenchJob(one.lease.id) for one in jobs if one.lease is not None]


def _granted(reply: Receipt | Refusal) -> Receipt:
    if isinstance(reply, Refusal):
        raise RuntimeError(f"the ledger refused: {reply.message}")
    return reply


async def _check(runtime: Runtime) -> None:
    """Check the results: balances equal the sums of entries, and holds equal those of leases."""
    async with runtime.database.reader() as db:
        wrong = await db.fetchval(CHECK)
        last, count = await store.load_last(db), await db.fetchval("SELECT count(*) FROM entry")
    if wrong or last != count:
        raise RuntimeError(f"{wrong} accounts are wrong, and {count} entries are there of {last}")


# Baseline.


async def _baseline(runtime: Runtime, url: str, jobs: Sequence[BenchJob], seconds: float) -> dict[str, Any]:
    async with runtime.database.reader() as db:
        await db.execute(BASELINE_TABLE)
    script = BASELINE.format(jobs=len(jobs), first=min(one.lease for one in jobs))
    with tempfile.NamedTemporaryFile("w", suffix=".sql") as file:
        file.write(script)
        file.flush()
        bench = find_binaries().bin_dir / "pgbench"
        process = await asyncio.create_subprocess_exec(
            str(bench), "--no-vacuum", "--protocol", "prepared", "--client", str(CONNECTIONS), "--jobs", "2",
            "--time", str(max(1, round(seconds))), "--file", str(Path(file.name)), url,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        out, errors = await process.communicate()
    found = re.search(rb"tps = ([0-9.]+)", out)
    if process.returncode or found is None:
        raise RuntimeError(f"the baseline could not be measured: {errors.decode()[-300:]}")
    return {"baseline_tx_per_s": round(float(found[1])), "baseline_connections": CONNECTIONS}
