"""Short names for leases and their measured usage, on the runtime of a test."""

from collections.abc import Iterable
from typing import Any

from bursar.commands.credit.credit import CloseLeaseCommand, OpenLease, PutPrice
from bursar.commands.credit.ledger import Receipt
from bursar.core.credit.account import Owner
from bursar.core.credit.lease import Lease
from bursar.core.credit.ledger import Ledger
from bursar.core.credit.price import PriceList
from bursar.core.credit.usage_events import UsageEvent
from bursar.core.values.money import MICROS, nanocredits
from bursar.core.values.refusal import Refusal
from bursar.loops.reconcile import reconcile_due, reconciler
from bursar.ops.credit.credit import close_lease, open_lease, put_price, top_up
from bursar.ops.credit.reconcile import Reconciled
from bursar.ops.credit.usage_events import Measure, Noted, note_usage
from bursar.ops.runtime.runtime import Runtime
from bursar.store.credit import ledger as ledger_store
from support.runtime.runtime import change

GPU = "nvidia.com/gpu"
POOL = Owner("default")


def done(reply: Receipt | Refusal) -> Receipt:
    assert isinstance(reply, Receipt), reply
    return reply


async def furnish(runtime: Runtime, amount: str = "50", price: str = "0.01", wait_seconds: int = 0) -> None:
    """A price for H100s, credits in the default tenant's pool, and reconciliation without a wait."""
    done(await put_price(runtime, PutPrice(resource=GPU, klass="h100", per_second=nanocredits(price), actor="test")))
    done(await top_up(runtime, POOL, nanocredits(amount), actor="test"))
    await change(runtime, "Settings", "", "system", credits={"reconcileSeconds": wait_seconds, "driftCredits": "0.1"})


async def lease(runtime: Runtime, job: str, *, gpus: int = 4, window: int = 15, owner: Owner = POOL) -> Lease:
    command = OpenLease(
        whose=owner, job=job, amounts={GPU: gpus * 1000}, klass="h100", window=window * MICROS, actor="test"
    )
    opened = done(await open_lease(runtime, command)).lease
    assert opened is not None
    return opened


async def close(runtime: Runtime, one: Lease) -> Lease:
    closed = done(await close_lease(runtime, CloseLeaseCommand(number=one.id, actor="test"))).lease
    assert closed is not None
    return closed


async def pass_time(runtime: Runtime, seconds: float, *leases: Lease) -> None:
    """Let so much time go by for these leases: all of theirs is moved into the past."""
    async with runtime.database.reader() as db:
        for table, more in (("lease", ""), ("lease_ended", ", closed_at = closed_at - $1")):
            await db.execute(
                f"UPDATE {table} SET opened_at = opened_at - $1, started_at = started_at - $1, since = since - $1,"
                f" posted_until = posted_until - $1, paid_until = paid_until - $1 {more} WHERE id = ANY ($2)",
                round(seconds * MICROS), [one.id for one in leases],
            )  # fmt: skip


async def lapse(runtime: Runtime, *leases: Lease) -> None:
    """What nobody extends any more ends, with all that was held for it posted."""
    async with runtime.database.reader() as db, db.transaction():
        ids = [one.id for one in leases]
        payers = await ledger_store.accounts_of_leases(db, ids)
        locked = await ledger_store.lock(db, payers.values(), ids)
        ledger = Ledger(locked.now, PriceList(), locked.accounts, locked.leases)
        for number in ids:
            ledger.lapse(ledger.leases[number])
        await ledger_store.save(db, ledger)


def event(job: str, seq: int, seconds: float, **more: Any) -> UsageEvent:
    begin = more.pop("begin", 1_800_000_000 * MICROS)
    micros = round(seconds * MICROS)
    return UsageEvent(job, seq, begin, begin + micros, more.pop("micros", micros), **more)


async def send(runtime: Runtime, *events: UsageEvent, **who: Any) -> list[str]:
    """Send events together; what became of each."""
    answers = await note_usage(runtime, [Measure(one, **who) for one in events])
    return [word_of(one) for one in answers]


def word_of(answer: Noted | Refusal) -> str:
    if isinstance(answer, Refusal):
        return str(answer.code)
    return "duplicate" if answer.duplicate else "late" if answer.late else "new"


async def reconcile(runtime: Runtime) -> list[Reconciled]:
    runner = reconciler(runtime)
    try:
        return await reconcile_due(runtime, runner)
    finally:
        await runner.close()


async def ended(runtime: Runtime, *leases: Lease) -> list[Any]:
    """The rows of leases that have ended, in the order of the leases."""
    async with runtime.database.reader() as db:
        rows = await db.fetch("SELECT * FROM lease_ended WHERE id = ANY ($1)", [one.id for one in leases])
    by_id = {row["id"]: row for row in rows}
    return [by_id[one.id] for one in leases]


async def balance(runtime: Runtime, owner: Owner = POOL) -> int:
    async with runtime.database.reader() as db:
        ids = await ledger_store.find_accounts(db, [owner])
        (account,) = (await ledger_store.load_accounts(db, ids.values())).values()
    return account.posted


async def assert_books_balance(runtime: Runtime) -> None:
    """Balances are their entries, entries are numbered without a gap, held is what open leases hold."""
    async with runtime.database.reader() as db, db.transaction(isolation="repeatable_read"):
        entries = await db.fetch("SELECT number, debit, credit, amount FROM entry ORDER BY number")
        accounts = await db.fetch("SELECT id, posted, held FROM account WHERE id >= 100")
        held = {row["account"]: row["held"] for row in await db.fetch(
            "SELECT account, sum(held)::bigint AS held FROM lease GROUP BY account")}  # fmt: skip
    assert [row["number"] for row in entries] == list(range(1, len(entries) + 1))
    for row in accounts:
        assert row["posted"] == moved(entries, row["id"])
        assert row["held"] == held.get(row["id"], 0)


def moved(entries: Iterable[Any], account: int) -> int:
    return sum(one["amount"] * ((one["credit"] == account) - (one["debit"] == account)) for one in entries)
