"""Ledgers with a history for tests of sealing, and ways to do to them what nobody may."""

import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from itertools import count, pairwise
from typing import Any, cast

import asyncpg

from bursar.commands.credit.credit import CloseLeaseCommand, PutAccount
from bursar.core.credit.account import QUARTER, Owner
from bursar.core.values.money import MICROS, nanocredits
from bursar.ops.credit import credit, ledger
from bursar.ops.credit.ledger import Extend
from bursar.ops.credit.ledger_verify import verify
from bursar.ops.credit.seal import seal
from bursar.ops.runtime.runtime import Runtime
from bursar.store.db.database import Connection, Database, Unavailable
from support.credit.ledgers import LAB, funded, leased, pass_time, priced, receipt, stop_clock

ANNA = Owner("default", "anna")
PARTITIONS = "SELECT inhrelid::regclass::text AS name FROM pg_inherits WHERE inhparent = 'entry'::regclass ORDER BY 1"


async def history(runtime: Runtime, quarters: int = 3) -> dict[str, int]:
    """Two accounts with two leases each, over several quarters of an hour, sealed once in each; what is where."""
    await stop_clock(runtime)
    await priced(runtime)
    await open_accounts(runtime)
    lab, anna = await funded(runtime, "1000"), await funded(runtime, "500", ANNA)
    leases = [await leased(runtime, 1 + index % 2, 600, owner) for index, owner in enumerate((LAB, LAB, ANNA, ANNA))]
    for turn in range(quarters):
        for heartbeat in range(3):
            await pass_time(runtime, QUARTER // 3)
            await ledger.extend(runtime, [Extend(one, 10 * turn + heartbeat + 1) for one in leases])
        await seal(runtime)
    receipt(await credit.close_lease(runtime, CloseLeaseCommand(number=leases[0], measured=100 * MICROS)))
    receipt(await credit.refund(runtime, LAB, nanocredits("0.5"), actor="user:test", reason="sorry", lease=leases[1]))
    receipt(await credit.adjust(runtime, ANNA, nanocredits("-0.25"), actor="user:test", reason="put right"))
    return {"lab": lab, "anna": anna, "first": leases[0], "second": leases[1], "third": leases[2]}


async def heartbeat(runtime: Runtime, seq: int) -> None:
    """Of all open leases."""
    async with runtime.database.reader() as db:
        leases = [row["id"] for row in await db.fetch("SELECT id FROM lease ORDER BY id")]
    await ledger.extend(runtime, [Extend(one, seq) for one in leases])


async def open_accounts(runtime: Runtime) -> None:
    for owner in (LAB, ANNA):
        receipt(await credit.put_account(runtime, PutAccount(actor="user:test", whose=owner, changes={})))


async def some_day(runtime: Runtime, chance: random.Random, steps: int, leases: dict[int, int]) -> None:
    """Anything that moves money, at any pace; `leases` are the open ones, with the numbers of their last heartbeats."""
    for _ in range(steps):
        owner = chance.choice((LAB, ANNA))
        match chance.randrange(8):
            case 0:
                await funded(runtime, str(chance.randrange(1, 50)), owner)
            case 1 | 2 if len(leases) < 6:
                leases[await leased(runtime, chance.randrange(1, 5), chance.randrange(5, 900), owner)] = 0
            case 3 if leases:
                number = chance.choice(sorted(leases))
                del leases[number]
                measured = chance.choice((None, chance.randrange(1, 10**9)))
                receipt(await credit.close_lease(runtime, CloseLeaseCommand(number=number, measured=measured)))
            case 4:
                await credit.adjust(runtime, owner, chance.randrange(-5, 5) * 10**8 + 1, actor="user:test", reason="so")
            case 5 if leases:
                number = chance.choice(sorted(leases))
                await credit.refund(runtime, owner, chance.randrange(1, 10**9), actor="user:test", reason="so", lease=0)
            case _:
                await pass_time(runtime, chance.choice((0, 1, chance.randrange(10**6), chance.randrange(10**9))))
                for number in leases:
                    leases[number] += 1
                await ledger.extend(runtime, [Extend(number, seq) for number, seq in leases.items()])


@asynccontextmanager
async def unguarded(runtime: Runtime) -> AsyncIterator[asyncpg.Connection]:
    """A connection of somebody who has switched the guards off, as the owner of the tables can."""
    async with runtime.database.reader() as db:
        for table in ("entry", "entry_kept"):
            await db.execute(f"ALTER TABLE {table} DISABLE TRIGGER USER")
        yield db
        for table in ("entry", "entry_kept"):
            await db.execute(f"ALTER TABLE {table} ENABLE TRIGGER USER")


async def found(runtime: Runtime) -> list[tuple[str, str]]:
    """What is wrong, and where."""
    proof = await verify(runtime)
    assert not proof.more
    return [(str(one.check), one.where) for one in proof.findings]


async def small_partitions(runtime: Runtime, size: int, number: int) -> None:
    """Before the first entry: partitions of entries that are soon full."""
    async with runtime.database.reader() as db:
        for row in await db.fetch(PARTITIONS):
            await db.execute(f"DROP TABLE {row['name']}")
        bounds = [*range(0, size * number + 1, size), 10_000_000]
        for index, (first, end) in enumerate(pairwise(bounds)):
            name = f"entry_{90 + index:09d}"
            await db.execute(f"CREATE TABLE {name} PARTITION OF entry FOR VALUES FROM ({first}) TO ({end})")


async def partitions(runtime: Runtime) -> list[str]:
    async with runtime.database.reader() as db:
        return [row["name"] for row in await db.fetch(PARTITIONS)]


class Cut(Exception):
    """The connection was cut."""


class CutOff:
    """A database whose connections are cut at a statement: before it is sent, or once it was done."""

    def __init__(self, database: Database, at: int, *, done: bool) -> None:
        self._database = database
        self.left = at
        self.done = done

    @asynccontextmanager
    async def reader(self) -> AsyncIterator["CutLine"]:
        async with self._database.reader() as db:
            yield CutLine(db, self)

    @asynccontextmanager
    async def patient(self) -> AsyncIterator["CutLine"]:
        async with self._database.patient() as db:
            yield CutLine(db, self)


class CutLine:
    def __init__(self, db: Connection, plan: CutOff) -> None:
        self._db = db
        self._plan = plan
        self.transaction = db.transaction

    async def _do(self, call: Callable[..., Awaitable[Any]], *args: Any) -> Any:
        self._plan.left -= 1
        if self._plan.left or self._plan.done:
            answer = await call(*args)
        if self._plan.left:
            return answer
        self._db.terminate()
        raise Cut

    def __getattr__(self, name: str) -> Any:
        assert name in ("fetch", "fetchrow", "fetchval", "execute"), name
        return partial(self._do, getattr(self._db, name))


Heard = tuple[str, tuple[Any, ...]]


class Hearing:
    """A database whose statements are written down, with what they were asked."""

    def __init__(self, database: Database, heard: list[Heard]) -> None:
        self._database = database
        self._heard = heard

    @asynccontextmanager
    async def reader(self) -> AsyncIterator["HeardLine"]:
        async with self._database.reader() as db:
            yield HeardLine(db, self._heard)


class HeardLine:
    def __init__(self, db: Connection, heard: list[Heard]) -> None:
        self._db = db
        self._heard = heard
        self.transaction = db.transaction

    def __getattr__(self, name: str) -> Any:
        def do(statement: str, *args: Any) -> Any:
            self._heard.append((statement, args))
            return getattr(self._db, name)(statement, *args)

        return do


def hearing(runtime: Runtime, heard: list[Heard]) -> Runtime:
    return replace(runtime, database=cast("Database", Hearing(runtime.database, heard)))


async def cut_everywhere(runtime: Runtime, do: Callable[[Runtime], Awaitable[object]]) -> AsyncIterator[str]:
    """Do something again and again, cut one step later each time, until it is done; after each cut, where it was."""
    for at in count(1):
        for done in (False, True):
            plan = CutOff(runtime.database, at, done=done)
            try:
                await do(replace(runtime, database=cast("Database", plan)))
            except (Cut, asyncpg.InterfaceError, Unavailable):
                yield f"{'after' if done else 'before'} statement {at}"
            else:
                assert plan.left > 0
                return


async def everything(runtime: Runtime) -> dict[str, list[tuple[Any, ...]]]:
    """What sealing writes."""
    tables = ("entry_block", "entry_page", "entry_rollup", "account_balance", "entry_kept", "seal")
    async with runtime.database.reader() as db:
        return {one: sorted((tuple(row) for row in await db.fetch(f"SELECT * FROM {one}")), key=repr) for one in tables}
