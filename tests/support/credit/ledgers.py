"""A ledger for tests: a clock that stands still until it is moved, and the checks that hold after every step."""

from msgspec.structs import replace

from bursar.commands.credit.credit import OpenLease, PutPrice
from bursar.commands.credit.ledger import Receipt
from bursar.core.credit.account import FIRST_ACCOUNT, Account, Owner
from bursar.core.values.money import MICROS, nanocredits
from bursar.core.values.refusal import Refusal
from bursar.ops.credit import credit
from bursar.ops.runtime.runtime import Runtime
from bursar.store.credit import ledger as store
from support.runtime.runtime import one_moment

GPU = "nvidia.com/gpu"
LAB = Owner("default")
HOUR = 3600 * MICROS
START = 1_800_000_000 * MICROS

# The clock that money is counted by is one function of the database: here it reads a row.
CLOCK = """
CREATE TABLE IF NOT EXISTS test_clock (now bigint NOT NULL);
INSERT INTO test_clock SELECT 1800000000000000 WHERE NOT EXISTS (SELECT FROM test_clock);
CREATE OR REPLACE FUNCTION ledger_now() RETURNS bigint LANGUAGE sql VOLATILE AS 'SELECT now FROM test_clock';
"""


async def stop_clock(runtime: Runtime) -> None:
    """From now on the ledger's time stands at START, and moves when it is told to."""
    async with runtime.database.reader() as db:
        await db.execute(CLOCK)


async def pass_time(runtime: Runtime, micros: int) -> None:
    async with runtime.database.reader() as db:
        await db.execute("UPDATE test_clock SET now = now + $1", micros)


def receipt(reply: Receipt | Refusal) -> Receipt:
    assert isinstance(reply, Receipt), reply
    return reply


def once(reply: Receipt | Refusal) -> Receipt:
    """What was answered, whether it was given for the first time or again."""
    return replace(receipt(reply), replayed=False)


async def priced(runtime: Runtime, per_second: str = "0.01", klass: str = "h100") -> None:
    command = PutPrice(actor="user:test", resource=GPU, klass=klass, per_second=nanocredits(per_second))
    receipt(await credit.put_price(runtime, command))


async def funded(runtime: Runtime, amount: str, owner: Owner = LAB) -> int:
    """An account with so many credits; its number."""
    account = receipt(await credit.top_up(runtime, owner, nanocredits(amount), actor="user:test")).account
    assert account is not None
    return account.id


def asking(gpus: int = 1, seconds: int = 15, owner: Owner = LAB, job: str = "train") -> OpenLease:
    return OpenLease(whose=owner, job=job, amounts={GPU: 1000 * gpus}, klass="h100", window=seconds * MICROS)


async def leased(runtime: Runtime, gpus: int = 1, seconds: int = 15, owner: Owner = LAB) -> int:
    """An open lease that runs; its number."""
    lease = receipt(await credit.open_lease(runtime, asking(gpus, seconds, owner))).lease
    assert lease is not None
    return lease.id


async def account_of(runtime: Runtime, owner: Owner = LAB) -> Account:
    async with runtime.database.reader() as db:
        found = await store.find_accounts(db, [owner])
        return (await store.load_accounts(db, found.values()))[found[owner]]


async def assert_books_balance(runtime: Runtime) -> None:
    """What must be so after every commit, counted anew from all entries and leases, in one moment."""
    async with one_moment(runtime) as db:
        last = await store.load_last(db)
        entries = await db.fetch("SELECT number, debit, credit, amount FROM entry ORDER BY number")
        accounts = await db.fetch(
            "SELECT id, posted, held, gpus, credit_limit FROM account WHERE id >= $1", FIRST_ACCOUNT
        )
        leases = await db.fetch("SELECT account, held, gpus, posted FROM lease")
        repeated = await db.fetchval(
            "SELECT count(*) FROM (SELECT FROM entry WHERE request <> '' AND type <> 'debit'"
            " GROUP BY type, request, credit, debit HAVING count(*) > 1) AS twice"
        )
    assert [row["number"] for row in entries] == list(range(1, last + 1))
    sums: dict[int, int] = {}
    for row in entries:
        assert row["amount"] > 0
        sums[row["debit"]] = sums.get(row["debit"], 0) - row["amount"]
        sums[row["credit"]] = sums.get(row["credit"], 0) + row["amount"]
    assert sum(sums.values()) == 0
    for row in accounts:
        own = [lease for lease in leases if lease["account"] == row["id"]]
        assert row["posted"] == sums.get(row["id"], 0)
        assert row["held"] == sum(lease["held"] for lease in own)
        assert row["gpus"] == sum(lease["gpus"] for lease in own)
        assert row["posted"] - row["held"] + row["credit_limit"] >= 0
    assert all(lease["held"] >= 0 and lease["posted"] >= 0 for lease in leases)
    assert repeated == 0
