"""The ledger on a real database: every verb, what it stores, and what it refuses without a trace."""

import asyncio
from datetime import timedelta
from typing import Any

import asyncpg
import pytest

from bursar.commands.credit.credit import CloseLeaseCommand, ExtendLeaseCommand, PutAccount, PutPrice, Refund, TopUp
from bursar.commands.credit.ledger import Credit
from bursar.core.credit.account import Owner
from bursar.core.credit.lease import Grant, Lease, LeaseState, Mode
from bursar.core.values.money import AMOUNT_MAX, MICROS, NANO, credits_of, nanocredits
from bursar.core.values.refusal import Code, Refusal
from bursar.ops.credit import credit
from bursar.ops.credit import ledger as ledger_ops
from bursar.ops.credit.ledger import CreditBatch, Extend, PayerCache, Prices, ledger_for, ledger_key
from bursar.ops.credit.ledger_verify import prove_present
from bursar.ops.runtime.clock import now
from bursar.ops.runtime.runtime import Runtime
from bursar.store.credit import ledger as store
from bursar.store.db import idempotency as request_store
from bursar.store.db.database import connect
from support.credit.ledgers import (
    GPU,
    HOUR,
    LAB,
    START,
    account_of,
    asking,
    assert_books_balance,
    funded,
    leased,
    once,
    pass_time,
    priced,
    receipt,
    stop_clock,
)
from support.runtime.runtime import code, refusal

ANN = Owner("default", "ann")


async def available(runtime: Runtime, owner: Owner = LAB) -> str:
    return credits_of((await account_of(runtime, owner)).available)


async def entries(runtime: Runtime) -> list[tuple[Any, ...]]:
    async with runtime.database.reader() as db:
        return [tuple(row) for row in await db.fetch("SELECT type, debit, credit, amount FROM entry ORDER BY number")]


async def limited(runtime: Runtime, owner: Owner = LAB, **changes: Any) -> None:
    receipt(await credit.put_account(runtime, PutAccount(whose=owner, changes=changes)))


# What it costs.


async def test_the_walkthrough_to_the_last_digit(runtime: Runtime) -> None:
    await stop_clock(runtime)
    await priced(runtime)
    await funded(runtime, "50")
    lease = await leased(runtime, gpus=4, seconds=15)
    assert await available(runtime) == "49.4"
    for seq in range(1, 97):
        await pass_time(runtime, 5 * MICROS)
        (grant,) = await ledger_ops.extend(runtime, [Extend(lease, seq)])
        assert isinstance(grant, Grant)
        assert grant.micros == 15 * MICROS
        if seq == 1:
            assert await available(runtime) == "49.2"
    reply = receipt(await credit.close_lease(runtime, CloseLeaseCommand(number=lease)))
    assert reply.lease is not None
    assert credits_of(reply.lease.posted) == "19.2"
    assert await available(runtime) == "30.8"
    await assert_books_balance(runtime)


async def test_what_runs_out_is_told_and_goes_on_when_there_is_credit_again(runtime: Runtime) -> None:
    await stop_clock(runtime)
    await priced(runtime)
    await funded(runtime, "1")
    lease = await leased(runtime, gpus=4, seconds=15)
    await pass_time(runtime, 14 * MICROS)
    (grant,) = await ledger_ops.extend(runtime, [Extend(lease, 1)])
    assert isinstance(grant, Grant)
    assert grant.final
    assert (grant.reason, grant.micros) == ("insufficient_credit", MICROS)
    async with runtime.database.reader() as db:
        told = await db.fetch("SELECT type, subject FROM notice ORDER BY id")
    assert [tuple(row) for row in told] == [("credit.topped-up", "default"), ("credit.exhausted", "default")]
    await funded(runtime, "1")
    (grant,) = await ledger_ops.extend(runtime, [Extend(lease, 2)])
    assert isinstance(grant, Grant)
    assert not grant.final
    assert grant.micros == 15 * MICROS
    await assert_books_balance(runtime)


async def test_a_price_that_changes_counts_for_what_is_paid_after_it(runtime: Runtime) -> None:
    await stop_clock(runtime)
    await priced(runtime)
    await funded(runtime, "50")
    lease = await leased(runtime, gpus=1, seconds=10)
    await pass_time(runtime, 4 * MICROS)
    await priced(runtime, "0.02")
    await pass_time(runtime, 2 * MICROS)
    await ledger_ops.extend(runtime, [Extend(lease, 1)])
    # Six seconds are posted and four still held at the old price; the six that the heartbeat added are at the new one.
    account = await account_of(runtime)
    assert (credits_of(account.posted), credits_of(account.held)) == ("49.94", "0.16")
    async with runtime.database.reader() as db:
        assert (await store.load_leases(db, [lease]))[lease].ahead == ((20_000_000, 6 * MICROS),)
    assert await prove_present(runtime) == []
    await pass_time(runtime, 5 * MICROS)
    closed = receipt(await credit.close_lease(runtime, CloseLeaseCommand(number=lease))).lease
    assert closed is not None
    assert (credits_of(closed.posted), closed.past) == ("0.12", ((10_000_000, 10 * MICROS),))
    await assert_books_balance(runtime)


async def test_a_lease_that_was_never_started_costs_nothing(runtime: Runtime) -> None:
    """As for a placement that no node ever took."""
    await stop_clock(runtime)
    await priced(runtime)
    account = await funded(runtime, "50")
    db = await connect(runtime.database.url)
    async with db.transaction():
        ledger = await ledger_for(db, runtime.prices, [account], [], 1)
        lease = Lease(0, account, "job", uid="u", node="n", amounts={GPU: 1000}, klass="h100", gpus=1000, window=HOUR)
        assert ledger.open(lease, started=False) is None
        await store.save(db, ledger)
    await pass_time(runtime, HOUR)
    (grant,) = await ledger_ops.extend(runtime, [Extend(lease.id, 1, running=False)])
    assert isinstance(grant, Grant)
    assert code(await credit.close_lease(runtime, CloseLeaseCommand(number=lease.id))) == "in_use"
    more = ExtendLeaseCommand(number=lease.id, delta=MICROS, ahead_max=HOUR)
    assert code(await credit.extend_lease(runtime, more)) == "in_use"
    async with db.transaction():
        ledger = await ledger_for(db, runtime.prices, [], [lease.id])
        ledger.close(ledger.leases[lease.id])
        await store.save(db, ledger)
    await db.close()
    assert await available(runtime) == "50"
    await assert_books_balance(runtime)


async def test_what_was_opened_and_closed_in_one_book_is_kept_as_ended(runtime: Runtime) -> None:
    await priced(runtime)
    account = await funded(runtime, "50")
    db = await connect(runtime.database.url)
    async with db.transaction():
        ledger = await ledger_for(db, runtime.prices, [account], [], 1)
        lease = Lease(0, account, "job", amounts={GPU: 1000}, klass="h100", gpus=1000, window=HOUR, mode=Mode.RESERVE)
        assert ledger.open(lease, started=True) is None
        ledger.close(lease)
        await store.save(db, ledger)
    ended = (await store.load_ended(db, [lease.id]))[lease.id]
    await db.close()
    assert (ended.state, ended.mode, ended.amounts) == (LeaseState.CLOSED, Mode.RESERVE, {GPU: 1000})
    await assert_books_balance(runtime)


async def test_an_ended_lease_is_put_right_under_locks(runtime: Runtime) -> None:
    await stop_clock(runtime)
    await priced(runtime)
    await funded(runtime, "50")
    lease = await leased(runtime, gpus=1, seconds=100)
    await pass_time(runtime, 50 * MICROS)
    await credit.close_lease(runtime, CloseLeaseCommand(number=lease))
    db = await connect(runtime.database.url)
    async with db.transaction():
        ledger = await ledger_for(db, runtime.prices, [], [], ended=[lease])
        assert ledger.reconcile(ledger.leases[lease], 20 * MICROS, drift=NANO) == -nanocredits("0.3")
        await store.save(db, ledger)
    assert (await store.load_ended(db, [lease]))[lease].posted == nanocredits("0.2")
    await db.close()
    assert await available(runtime) == "49.8"
    await assert_books_balance(runtime)


# What is refused leaves nothing.


@pytest.mark.parametrize(
    ("changes", "gpus", "seconds", "expected"),
    [
        pytest.param({}, 100, 3600, "insufficient_credit", id="not enough"),
        pytest.param({"gpus_max": 3000}, 4, 15, "concurrency_exceeded", id="too many GPUs"),
        pytest.param({"daily_cap": NANO // 2}, 4, 15, "daily_cap_exceeded", id="too much for a day"),
        pytest.param({"spend_rate_max": NANO, "spend_burst": NANO // 2}, 4, 15, "spend_rate_exceeded", id="too fast"),
        pytest.param({"status": "suspended"}, 4, 15, "account_inactive", id="suspended"),
        pytest.param({"gpus_max": 3000, "status": "suspended"}, 4, 15, "account_inactive", id="the first of two"),
    ],
)
async def test_a_lease_without_capacity_is_refused(
    runtime: Runtime, changes: dict[str, Any], gpus: int, seconds: int, expected: str
) -> None:
    await priced(runtime)
    await funded(runtime, "50")
    await limited(runtime, **changes)
    before = await account_of(runtime)
    refused = refusal(await credit.open_lease(runtime, asking(gpus, seconds)))
    assert str(refused.code) == expected
    assert refused.hint
    assert await account_of(runtime) == before
    async with runtime.database.reader() as db:
        assert await db.fetchval("SELECT count(*) FROM lease") == 0
    await assert_books_balance(runtime)


async def test_what_has_no_price_is_not_given_away(runtime: Runtime) -> None:
    await funded(runtime, "50")
    await priced(runtime, klass="a100")
    refused = refusal(await credit.open_lease(runtime, asking()))
    assert refused.code is Code.UNPRICED
    assert "a100" in refused.hint


@pytest.mark.parametrize("amount", [0, -1, AMOUNT_MAX + 1, 10**30])
async def test_amounts_that_cannot_be_are_refused(runtime: Runtime, amount: int) -> None:
    reply = await credit.top_up(runtime, LAB, amount, actor="user:test")
    assert code(reply) == "invalid"
    async with runtime.database.reader() as db:
        assert await store.find_accounts(db, [LAB]) == {}
    assert await entries(runtime) == []


async def test_a_balance_never_outgrows_what_can_be_counted(runtime: Runtime) -> None:
    await funded(runtime, credits_of(AMOUNT_MAX))
    await limited(runtime, credit_limit=AMOUNT_MAX)
    assert code(await credit.top_up(runtime, LAB, 1, actor="user:test")) == "invalid"
    assert code(await credit.refund(runtime, LAB, 1, actor="user:test", reason="x")) == "invalid"
    assert code(await credit.adjust(runtime, LAB, 1, actor="user:test", reason="x")) == "invalid"
    for _ in range(3):
        receipt(await credit.adjust(runtime, LAB, -AMOUNT_MAX, actor="user:test", reason="x"))
        receipt(await credit.adjust(runtime, LAB, AMOUNT_MAX, actor="user:test", reason="x"))
    await assert_books_balance(runtime)


async def test_a_price_beyond_all_means_is_only_too_dear(runtime: Runtime) -> None:
    await funded(runtime, credits_of(AMOUNT_MAX))
    await limited(runtime, credit_limit=AMOUNT_MAX)
    receipt(await credit.put_price(runtime, PutPrice(resource=GPU, klass="h100", per_second=AMOUNT_MAX)))
    assert code(await credit.open_lease(runtime, asking(1000, 3600))) == "insufficient_credit"
    await assert_books_balance(runtime)


async def test_accounts_are_of_tenants_that_there_are(runtime: Runtime) -> None:
    nobody = Owner("nobody")
    assert code(await credit.top_up(runtime, nobody, NANO, actor="user:test")) == "not_found"
    assert code(await credit.put_account(runtime, PutAccount(whose=nobody, changes={}))) == "not_found"
    assert code(await credit.open_lease(runtime, asking(owner=nobody))) == "not_found"
    # The system's own are nobody's to name.
    for user in ("topups", "revenue", "write-off", "adjustments"):
        assert code(await credit.adjust(runtime, Owner("", user), NANO, actor="user:test", reason="x")) == "not_found"


async def test_a_users_account_is_opened_on_purpose(runtime: Runtime) -> None:
    await funded(runtime, "1")
    assert code(await credit.top_up(runtime, ANN, NANO, actor="user:test")) == "not_found"
    await limited(runtime, ANN)
    await funded(runtime, "1", ANN)
    again = PutAccount(whose=ANN, changes={}, only_new=True)
    assert code(await credit.put_account(runtime, again)) == "already_exists"
    missing = PutAccount(whose=Owner("default", "bob"), changes={}, only_old=True)
    assert code(await credit.put_account(runtime, missing)) == "not_found"


@pytest.mark.parametrize(
    "command", [ExtendLeaseCommand(number=77, delta=MICROS, ahead_max=HOUR), CloseLeaseCommand(number=77)]
)
async def test_a_lease_that_never_was_is_not_found(runtime: Runtime, command: Credit) -> None:
    assert code(await runtime.crediting.submit(command)) == "not_found"
    assert code((await ledger_ops.extend(runtime, [Extend(77, 1)]))[0]) == "fenced"


async def test_extending_by_asking_ends_at_the_horizon(runtime: Runtime) -> None:
    await stop_clock(runtime)
    await priced(runtime)
    await funded(runtime, "50")
    lease = await leased(runtime, seconds=15)
    for _ in range(3):
        more = ExtendLeaseCommand(number=lease, delta=40 * MICROS, ahead_max=60 * MICROS)
        reply = receipt(await credit.extend_lease(runtime, more))
    assert reply.grant is not None
    assert reply.grant.micros == 60 * MICROS
    assert await available(runtime) == "49.4"


# Accounts and prices.


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"posted": 1}, "posted"),
        ({"credit_limit": -1}, "credit_limit"),
        ({"credit_limit": None}, "credit_limit"),
        ({"credit_limit": True}, "credit_limit"),
        ({"credit_limit": AMOUNT_MAX + 1}, "credit_limit"),
        ({"gpus_max": -1}, "gpus_max"),
        ({"gpus_max": 10**18}, "gpus_max"),
        ({"spend_rate_max": "fast"}, "spend_rate_max"),
        ({"time_zone": "Mars/Olympus"}, "time_zone"),
        ({"time_zone": "../etc/passwd"}, "time_zone"),
        ({"time_zone": ""}, "time_zone"),
        ({"status": "asleep"}, "status"),
        ({"stop_at_cap": 1}, "stop_at_cap"),
    ],
)
async def test_limits_that_cannot_be_are_refused_by_name(runtime: Runtime, changes: dict[str, Any], field: str) -> None:
    refused = refusal(await credit.put_account(runtime, PutAccount(whose=LAB, changes={"gpus_max": 1, **changes})))
    assert refused.code is Code.INVALID
    assert [cause.field for cause in refused.causes] == [field]
    async with runtime.database.reader() as db:
        assert await store.find_accounts(db, [LAB]) == {}


async def test_a_credit_limit_is_not_taken_from_under_what_is_owed(runtime: Runtime) -> None:
    await priced(runtime)
    await limited(runtime, credit_limit=NANO)
    await leased(runtime, gpus=4, seconds=15)
    refused = refusal(await credit.put_account(runtime, PutAccount(whose=LAB, changes={"credit_limit": NANO // 2})))
    assert (refused.code, "0.1 credits" in refused.hint) == (Code.INSUFFICIENT_CREDIT, True)
    await limited(runtime, credit_limit=nanocredits("0.6"))
    assert await available(runtime) == "0"


async def test_prices_begin_now_or_later_and_stay(runtime: Runtime) -> None:
    await stop_clock(runtime)
    at = START + HOUR

    async def put(per_second: int, effective_from: int | None) -> str:
        command = PutPrice(resource=GPU, klass="h100", per_second=per_second, effective_from=effective_from)
        return code(await credit.put_price(runtime, command))

    assert await put(1, START - 60 * MICROS - 1) == "unprocessable"
    assert await put(-1, None) == "invalid"
    assert await put(AMOUNT_MAX + 1, None) == "invalid"
    assert [await put(1, at), await put(1, at), await put(2, at), await put(2, at + 1)] == [
        "ok", "ok", "already_exists", "ok",
    ]  # fmt: skip
    assert list(await asyncio.gather(put(5, None), put(6, None))) == ["ok", "already_exists"]


# Requests.


async def test_a_refusal_is_answered_again_as_it_was(runtime: Runtime) -> None:
    await priced(runtime)
    await funded(runtime, "1")
    command = asking(100, 3600)
    claim = ledger_key("default", "lease", "r-1", "body")

    async def ask() -> Any:
        return await credit.open_lease(runtime, type(command)(**{**_fields(command), "idempotency_key": claim}))

    first = await ask()
    assert code(first) == "insufficient_credit"
    await funded(runtime, "100000")
    assert await ask() == first


def _fields(command: Any) -> dict[str, Any]:
    return {name: getattr(command, name) for name in command.__dataclass_fields__}


async def test_what_passes_by_itself_may_be_asked_again(runtime: Runtime) -> None:
    await stop_clock(runtime)
    await priced(runtime)
    await funded(runtime, "50")
    await limited(runtime, spend_rate_max=NANO // 10, spend_burst=NANO)
    claim = ledger_key("default", "lease", "r-1", "body")
    command = type(asking())(**{**_fields(asking(4, 15)), "idempotency_key": claim})
    await leased(runtime, gpus=4, seconds=15)
    refused = refusal(await credit.open_lease(runtime, command))
    assert (refused.code, refused.retry_after_seconds) == (Code.SPEND_RATE_EXCEEDED, 2)
    await pass_time(runtime, 2 * MICROS)
    assert code(await credit.open_lease(runtime, command)) == "ok"


async def test_requests_of_the_ledger_are_never_forgotten(runtime: Runtime) -> None:
    claim = ledger_key("default", "topup", "r-1", "1")
    first = await credit.top_up(runtime, LAB, NANO, actor="user:test", idempotency_key=claim)
    async with runtime.database.reader() as db:
        later = now() + timedelta(days=1)
        assert await request_store.expire(db, markers_before=later, answers_before=later) > 0
        assert await db.fetchval("SELECT count(*) FROM request") == 1
    again = receipt(await credit.top_up(runtime, LAB, NANO, actor="user:test", idempotency_key=claim))
    assert (again.replayed, once(again)) == (True, first)
    assert len(await entries(runtime)) == 1


# What others are told, and what nobody may do.


async def test_those_who_wait_for_credit_are_told_of_the_account(runtime: Runtime) -> None:
    told: asyncio.Queue[str] = asyncio.Queue()
    db = await connect(runtime.database.url)
    await db.add_listener(store.CHANNEL, lambda *event: told.put_nowait(event[-1]))

    async def heard() -> set[int] | None:
        async with asyncio.timeout(10):
            return store.told_of(await told.get())

    account = await funded(runtime, "50")
    assert await heard() == {account}
    await priced(runtime)
    assert await heard() is None
    lease = await leased(runtime)
    await ledger_ops.extend(runtime, [Extend(lease, 1)])
    await limited(runtime, gpus_max=1)
    assert await heard() == {account}
    await credit.close_lease(runtime, CloseLeaseCommand(number=lease))
    assert await heard() == {account}
    assert told.empty()
    await db.close()


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE entry SET amount = 1",
        "DELETE FROM entry",
        "TRUNCATE entry",
        "DELETE FROM entry_000000000",
        "TRUNCATE entry_000000000",
    ],
)
async def test_entries_are_never_changed(runtime: Runtime, statement: str) -> None:
    await funded(runtime, "50")
    async with runtime.database.reader() as db:
        with pytest.raises(asyncpg.IntegrityConstraintViolationError):
            await db.execute(statement)
    await assert_books_balance(runtime)


async def test_entries_go_on_in_the_next_partition(runtime: Runtime) -> None:
    """A missing partition is created by the process that needs it."""
    async with runtime.database.reader() as db:
        await db.execute("UPDATE ledger SET last = $1", 3 * store.PARTITION_SIZE - 1)
    await asyncio.gather(*(credit.top_up(runtime, LAB, NANO, actor="user:test") for _ in range(3)))
    async with runtime.database.reader() as db:
        numbers = [row["number"] for row in await db.fetch("SELECT number FROM entry ORDER BY 1")]
    assert numbers == [3 * store.PARTITION_SIZE + offset for offset in range(3)]


async def test_the_database_itself_refuses_what_is_overdrawn(runtime: Runtime) -> None:
    """The database refuses changes of entries by any statement."""
    account = await funded(runtime, "1")
    async with runtime.database.reader() as db:
        with pytest.raises(asyncpg.CheckViolationError, match="account_never_overdrawn"):
            await db.execute("UPDATE account SET held = posted + 1 WHERE id = $1", account)


async def test_a_batch_of_everything_at_once(runtime: Runtime) -> None:
    """Each sees what those before it did, in one transaction."""
    await stop_clock(runtime)
    replies = await asyncio.gather(
        credit.put_price(runtime, PutPrice(resource=GPU, klass="h100", per_second=NANO // 100)),
        runtime.crediting.submit(TopUp(whose=LAB, amount=NANO)),
        runtime.crediting.submit(asking(4, 15)),
        runtime.crediting.submit(asking(4, 15)),
    )
    assert [code(reply) for reply in replies] == ["ok", "ok", "ok", "insufficient_credit"]
    assert not isinstance(replies[2], Refusal)
    await assert_books_balance(runtime)


async def test_an_account_that_was_refused_is_not_there_for_others_of_the_batch(runtime: Runtime) -> None:
    commands: list[Credit] = [
        PutAccount(whose=ANN, changes={"time_zone": "nowhere"}),
        Refund(whose=ANN, amount=NANO, reason="sorry"),
    ]
    async with runtime.database.reader() as db, db.transaction():
        replies = await CreditBatch(runtime.trees, Prices(), PayerCache())(db, commands)
    assert [one.code for one in replies if isinstance(one, Refusal)] == [Code.INVALID, Code.NOT_FOUND]
    async with runtime.database.reader() as db:
        assert ANN not in await store.find_accounts(db, {ANN})
