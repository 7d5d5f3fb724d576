"""The ledger when connections are lost, and when many processes want the same money: one effect, and never too much."""

import asyncio
import os
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from itertools import chain, cycle, repeat
from multiprocessing import get_context
from typing import Any

import pytest

from bursar.commands.credit.credit import CloseLeaseCommand, PutAccount
from bursar.core.credit.account import Owner
from bursar.core.credit.lease import Grant
from bursar.core.values.money import MICROS, NANO, nanocredits
from bursar.core.values.refusal import Refusal
from bursar.ops.credit import credit, ledger
from bursar.ops.credit.ledger import Extend, ledger_key
from bursar.ops.runtime.runtime import Runtime
from bursar.store.db.database import connect
from support.credit.ledgers import (
    LAB,
    account_of,
    asking,
    assert_books_balance,
    funded,
    leased,
    once,
    priced,
    receipt,
    stop_clock,
)
from support.runtime.postgres_proxy import Proxy
from support.runtime.runtime import code, opened

PROCESSES = 3
SOAK = 20 if os.environ.get("BURSAR_SOAK") else 1
OWNERS = (LAB, Owner("default", "ann"), Owner("default", "bob"))


# Connections that are cut at COMMIT.


@pytest.fixture
async def proxy(database_url: str) -> AsyncIterator[Proxy]:
    async with Proxy(database_url) as one:
        yield one


@pytest.fixture
async def runtime(proxy: Proxy) -> AsyncIterator[Runtime]:
    async with opened(proxy.url) as one:
        await stop_clock(one)
        await priced(one)
        await funded(one, "50")
        yield one


@pytest.mark.parametrize("deed", ["before", "after", "during"])
async def test_a_top_up_whose_connection_is_cut_comes_once(runtime: Runtime, proxy: Proxy, deed: str) -> None:
    proxy.plan = chain([deed], repeat("pass"))
    claim = ledger_key("default", "topup", "r-1", "5")
    first = await credit.top_up(runtime, LAB, 5 * NANO, actor="user:test", idempotency_key=claim)
    assert proxy.cuts == [deed]
    proxy.plan = repeat("pass")
    # A client that lost the answer repeats the request, and gets the same answer.
    assert once(await credit.top_up(runtime, LAB, 5 * NANO, actor="user:test", idempotency_key=claim)) == once(first)
    assert (await account_of(runtime)).posted == 55 * NANO
    await assert_books_balance(runtime)


@pytest.mark.parametrize("deed", ["before", "after", "during"])
async def test_an_extension_whose_connection_is_cut_is_paid_once(runtime: Runtime, proxy: Proxy, deed: str) -> None:
    lease = await leased(runtime, gpus=4, seconds=15)
    async with runtime.database.reader() as db:
        await db.execute("UPDATE test_clock SET now = now + 5000000")
    proxy.plan = chain([deed], repeat("pass"))
    answers = await ledger.extend(runtime, [Extend(lease, 1)] * 2)
    proxy.plan = repeat("pass")
    answers += await ledger.extend(runtime, [Extend(lease, 1)])
    assert len({(one.paid_until, one.micros) for one in answers if isinstance(one, Grant)}) == 1
    account = await account_of(runtime)
    assert (account.posted, account.held) == (50 * NANO - nanocredits("0.2"), nanocredits("0.6"))
    await assert_books_balance(runtime)


async def test_everything_under_cuts_of_every_sort_happens_once(runtime: Runtime, proxy: Proxy) -> None:
    proxy.plan = cycle(["before", "after", "pass", "during"])
    asked = [
        credit.top_up(
            runtime, LAB, NANO, actor="user:test", idempotency_key=ledger_key("default", "topup", f"r{n}", "1")
        )
        for n in range(20)
    ]
    opened_ = [credit.open_lease(runtime, asking()) for _ in range(20)]
    replies = await asyncio.gather(*asked, *opened_)
    leases = [one.lease.id for one in map(receipt, replies) if one.lease is not None]
    await asyncio.gather(*(ledger.extend(runtime, [Extend(one, 1)]) for one in leases))
    await asyncio.gather(*(credit.close_lease(runtime, CloseLeaseCommand(number=one)) for one in leases[:10]))
    proxy.plan = repeat("pass")
    assert set(Counter(proxy.cuts)) == {"before", "after", "during"}
    account = await account_of(runtime)
    assert (account.posted, account.gpus) == (70 * NANO, 10_000)
    await assert_books_balance(runtime)


# Processes.


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(PROCESSES, mp_context=get_context("spawn")) as one:
        yield one


async def in_processes(
    pool: ProcessPoolExecutor, url: str, work: Callable[..., Awaitable[Any]], *more: Any
) -> list[Any]:
    loop = asyncio.get_running_loop()
    jobs = [loop.run_in_executor(pool, _run, work, url, which, more) for which in range(PROCESSES)]
    return await asyncio.wait_for(asyncio.gather(*jobs), 60 + 60 * SOAK)


def _run(work: Callable[..., Awaitable[Any]], url: str, which: int, more: tuple[Any, ...]) -> Any:
    async def main() -> Any:
        async with opened(url) as runtime:
            return await work(runtime, which, *more)

    return asyncio.run(main())


async def prepare(url: str, amount: str) -> None:
    async with opened(url) as runtime:
        await priced(runtime)
        for owner in OWNERS:
            receipt(await credit.put_account(runtime, PutAccount(whose=owner, changes={})))
            await funded(runtime, amount, owner)


async def spend(runtime: Runtime, which: int, rounds: int) -> dict[str, int]:
    """Open, extend and close leases of all accounts at random, many at once; what was answered how often."""
    chance = random.Random(which)
    said: Counter[str] = Counter()

    async def one(number: int) -> None:
        reply = await credit.open_lease(runtime, asking(chance.choice([1, 2]), 15, chance.choice(OWNERS), f"j{number}"))
        said[code(reply)] += 1
        if isinstance(reply, Refusal):
            return
        assert reply.lease is not None
        for seq in range(1, 6):
            # Twice, as when an agent did not hear its answer.
            answers = await ledger.extend(runtime, [Extend(reply.lease.id, seq)] * 2)
            said.update("granted" if isinstance(answer, Grant) else str(answer.code) for answer in answers)
        if chance.random() < 0.8:
            measured = chance.choice([None, 0, MICROS, 60 * MICROS])
            said["closed"] += (
                code(await credit.close_lease(runtime, CloseLeaseCommand(number=reply.lease.id, measured=measured)))
                == "ok"
            )

    for start in range(rounds):
        await asyncio.gather(*(one(start * 100 + number) for number in range(40)))
        await credit.top_up(runtime, chance.choice(OWNERS), NANO // 100, actor="user:test")
    return dict(said)


async def test_many_processes_on_few_accounts_never_spend_too_much(
    pool: ProcessPoolExecutor, database_url: str
) -> None:
    """Every commit of theirs satisfies the constraint that nothing is overdrawn; and nobody waits in a circle."""
    await prepare(database_url, "3")
    watching = asyncio.create_task(watch(database_url))
    said = await in_processes(pool, database_url, spend, 3 * SOAK)
    watching.cancel()
    with suppress(asyncio.CancelledError):
        await watching
    total: Counter[str] = Counter()
    for one in said:
        total.update(one)
    # There is not enough for all of them.
    assert total["ok"] > 0
    assert total["insufficient_credit"] > 0
    assert set(total) <= {"ok", "insufficient_credit", "granted", "closed"}
    async with opened(database_url) as runtime:
        await assert_books_balance(runtime)
        async with runtime.database.reader() as db:
            assert await db.fetchval("SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()") == 0


async def watch(url: str) -> None:
    """At every moment that anybody can see, balances are those of the entries, and numbers have no gaps."""
    async with opened(url) as runtime:
        while True:
            await assert_books_balance(runtime)
            await asyncio.sleep(0.05)


async def repeat_one(runtime: Runtime, which: int, request: str) -> Any:
    claim = ledger_key("default", "topup", request, "1")
    replies = await asyncio.gather(
        *(credit.top_up(runtime, LAB, NANO, actor="user:test", idempotency_key=claim) for _ in range(10))
    )
    assert all(once(one) == once(replies[0]) for one in replies)
    return receipt(replies[0]).account.posted  # type: ignore[union-attr]


async def test_the_same_request_through_many_processes_is_one(pool: ProcessPoolExecutor, database_url: str) -> None:
    await prepare(database_url, "1")
    for number in range(3 * SOAK):
        posted = await in_processes(pool, database_url, repeat_one, f"r-{number}")
        assert posted == [(2 + number) * NANO] * PROCESSES


async def heartbeat_one(runtime: Runtime, which: int, lease: int) -> list[int]:
    answers = await asyncio.gather(*(ledger.extend(runtime, [Extend(lease, seq)]) for seq in range(1, 40)))
    return [one.paid_until for (one,) in answers if isinstance(one, Grant)]


async def test_the_same_heartbeats_through_many_processes_are_paid_once(
    pool: ProcessPoolExecutor, database_url: str
) -> None:
    await prepare(database_url, "50")
    async with opened(database_url) as runtime:
        lease = await leased(runtime, gpus=4, seconds=15)
        await stop_clock(runtime)
        db = await connect(database_url)
        await db.execute("UPDATE test_clock SET now = (SELECT opened_at FROM lease) + 10000000")
        await db.close()
        await in_processes(pool, database_url, heartbeat_one, lease)
        account = await account_of(runtime)
        assert (account.posted, account.held) == (50 * NANO - nanocredits("0.4"), nanocredits("0.6"))
        await assert_books_balance(runtime)


async def open_account(runtime: Runtime, which: int) -> str:
    return code(await credit.put_account(runtime, PutAccount(whose=Owner("default", "new"), changes={}, only_new=True)))


async def test_an_account_is_opened_once(pool: ProcessPoolExecutor, database_url: str) -> None:
    said = await in_processes(pool, database_url, open_account)
    assert sorted(said) == ["already_exists"] * (PROCESSES - 1) + ["ok"]
