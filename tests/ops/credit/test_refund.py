"""Refunds of a lease never exceed its cost, by any caller, however often, and whatever is measured afterwards."""

import asyncio

import pytest

from bursar.commands.credit.credit import CloseLeaseCommand, ExtendLeaseCommand, Lapse, PutAccount
from bursar.commands.credit.ledger import Receipt
from bursar.core.credit.account import Owner
from bursar.core.credit.billing_terms import CreditPolicy
from bursar.core.credit.lease import Lease
from bursar.core.credit.ledger import RECONCILER
from bursar.core.values.money import MICROS, nanocredits
from bursar.core.values.refusal import Refusal
from bursar.ops.credit import credit
from bursar.ops.credit.ledger_verify import verify
from bursar.ops.credit.reconcile import Reconcile, reconcile, settle_late
from bursar.ops.runtime.runtime import Runtime
from bursar.store.credit import ledger as store
from bursar.store.credit.reconcile import EndedLease, LastWord
from support.credit.ledgers import (
    LAB,
    account_of,
    assert_books_balance,
    funded,
    leased,
    pass_time,
    priced,
    receipt,
    stop_clock,
)
from support.credit.paying import state
from support.runtime.runtime import code, refusal


@pytest.fixture
async def lab(runtime: Runtime) -> Runtime:
    """50 credits, and one GPU for 0.01 a second."""
    await stop_clock(runtime)
    await priced(runtime)
    await funded(runtime, "50")
    return runtime


async def refunded(runtime: Runtime, amount: str, lease: int, owner: Owner = LAB) -> Receipt | Refusal:
    return await credit.refund(runtime, owner, nanocredits(amount), actor="user:test", reason="sorry", lease=lease)


async def closed(runtime: Runtime, lease: int, seconds: int) -> None:
    """It ran for so long, and has ended."""
    await pass_time(runtime, seconds * MICROS)
    receipt(await credit.close_lease(runtime, CloseLeaseCommand(number=lease)))


async def lease_of(runtime: Runtime, number: int) -> Lease:
    async with runtime.database.reader() as db:
        return ((await store.load_leases(db, [number])) | (await store.load_ended(db, [number])))[number]


async def assert_sound(runtime: Runtime) -> None:
    await assert_books_balance(runtime)
    assert (await verify(runtime)).findings == ()


async def test_a_refund_is_never_more_than_the_lease_cost(lab: Runtime) -> None:
    lease = await leased(lab)
    await closed(lab, lease, 10)
    before = await state(lab)
    no = refusal(await refunded(lab, "0.100000001", lease))
    assert (no.code, no.message) == (
        "unprocessable",
        f"lease-{lease} cost 0.1 credits, of which 0 are refunded: 0.100000001 more cannot be refunded",
    )  # fmt: skip
    assert no.hint == "Refund 0.1 credits or less; for goodwill, leave the lease out."
    assert (no.causes[0].limit, no.causes[0].current_usage, no.causes[0].requested_delta) == ("0.1", "0", "0.100000001")
    assert await state(lab) == before
    receipt(await refunded(lab, "0.06", lease))
    assert code(await refunded(lab, "0.05", lease)) == "unprocessable"
    receipt(await refunded(lab, "0.04", lease))
    nothing = refusal(await refunded(lab, "0.000000001", lease))
    assert nothing.hint == "For goodwill, leave the lease out."
    receipt(await refunded(lab, "3", 0))
    assert (await account_of(lab)).posted == nanocredits("53")
    await assert_sound(lab)


async def test_of_an_open_lease_what_is_posted_can_be_refunded(lab: Runtime) -> None:
    lease = await leased(lab, seconds=60)
    assert code(await refunded(lab, "0.01", lease)) == "unprocessable"
    await pass_time(lab, 10 * MICROS)
    extended = ExtendLeaseCommand(number=lease, delta=MICROS, ahead_max=120 * MICROS)
    receipt(await credit.extend_lease(lab, extended))
    receipt(await refunded(lab, "0.1", lease))
    assert (await lease_of(lab, lease)).refunded == nanocredits("0.1")
    await closed(lab, lease, 5)
    assert code(await refunded(lab, "0.06", lease)) == "unprocessable"
    receipt(await refunded(lab, "0.05", lease))
    await assert_sound(lab)


async def test_of_many_at_once_so_many_are_refunded_as_it_cost(lab: Runtime) -> None:
    lease = await leased(lab)
    await closed(lab, lease, 10)
    replies = await asyncio.gather(*(refunded(lab, "0.03", lease) for _ in range(8)))
    assert sorted(map(code, replies)) == ["ok"] * 3 + ["unprocessable"] * 5
    assert (await lease_of(lab, lease)).refunded == nanocredits("0.09")
    await assert_sound(lab)


async def test_another_accounts_lease_is_none(lab: Runtime) -> None:
    lease = await leased(lab)
    await closed(lab, lease, 10)
    ann = Owner("default", "ann")
    receipt(await credit.put_account(lab, PutAccount(whose=ann, changes={})))
    before = await state(lab)
    assert code(await refunded(lab, "0.01", lease, ann)) == "not_found"
    assert code(await refunded(lab, "0.01", 999_999)) == "not_found"
    assert await state(lab) == before


async def test_what_turns_out_cheaper_does_not_come_back_twice(lab: Runtime) -> None:
    """Ten seconds were posted and refunded all but one; then the node says that it ran for five."""
    lease = await leased(lab)
    await closed(lab, lease, 10)
    receipt(await refunded(lab, "0.09", lease))
    async with lab.database.reader() as db:
        await db.execute("UPDATE lease_ended SET uid = 'u', job = 'u', node = 'n1', epoch = 1 WHERE id = $1", lease)
    await settle_late(lab, [LastWord("u", 1, "n1", 5 * MICROS)])
    account = (await account_of(lab)).id
    async with lab.database.reader() as db, db.transaction():
        (done,) = await reconcile(db, [Reconcile(EndedLease(lease, account), CreditPolicy(drift_credits=0))])
    assert done is not None
    assert done.difference == -nanocredits("0.05")
    after = await lease_of(lab, lease)
    assert (after.posted, after.refunded) == (nanocredits("0.05"), nanocredits("0.05"))
    assert (await account_of(lab)).posted == nanocredits("50")
    async with lab.database.reader() as db:
        taken = await db.fetchrow("SELECT amount, actor FROM entry ORDER BY number DESC LIMIT 1")
    assert tuple(taken) == (nanocredits("0.04"), RECONCILER)
    await assert_sound(lab)


async def test_a_lease_that_is_closed_and_has_lapsed_in_one_batch_ends_once(lab: Runtime) -> None:
    lease = await leased(lab)
    paid_until = (await lease_of(lab, lease)).paid_until
    await pass_time(lab, 20 * MICROS)
    first = lab.crediting.submit(CloseLeaseCommand(number=lease))
    second = lab.crediting.submit(Lapse(number=lease, paid_until=paid_until))
    assert sorted(map(code, await asyncio.gather(first, second))) == ["not_found", "ok"]
    assert (await account_of(lab)).gpus == 0
    await assert_sound(lab)
