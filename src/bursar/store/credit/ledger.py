"""Accounts, leases and entries in the database.

Accounts are locked in ascending order of id. The lock of an account covers its open leases, because every change of a
lease holds it. The row of the ledger is locked after them: it numbers entries in commit order. The time is the
database's, read after the locks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import asyncpg
import msgspec

from bursar.core.credit.account import FIRST_ACCOUNT, Account, AccountStatus
from bursar.core.credit.lease import Lease, LeaseState, Mode, Segment, lease_name
from bursar.core.credit.ledger import Entry, Ledger, LedgerEvent
from bursar.core.values.money import credits_of
from bursar.store.db.columns import documents, lists, numbers, texts
from bursar.store.db.database import Connection, Stale
from bursar.store.db.sql_loader import statements

SQL = statements("credit/ledger")

PARTITION_SIZE = 10_000_000
CHANNEL = "bursar_credit"  # announces accounts that may be able to pay again
ALL = "*"  # announces all accounts, if they are too many to name
TOLD_MAX = 300

_STATUSES = {str(one): one for one in AccountStatus}
_MODES = {str(one): one for one in Mode}
_segments = msgspec.json.Decoder(tuple[Segment, ...]).decode
_amounts = msgspec.json.Decoder(dict[str, int])
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Locked:
    """Accounts and open leases that are locked until the transaction ends."""

    now: int
    prices: int  # version of the price list
    accounts: dict[int, Account]
    leases: dict[int, Lease]


async def lock(db: Connection, accounts: Iterable[int], leases: Iterable[int]) -> Locked:
    """Lock accounts and read their state and these leases; the accounts of the leases must be among `accounts`."""
    rows = await db.fetch(SQL.lock, numbers(sorted(set(accounts))))
    wanted = sorted(set(leases))
    found = await db.fetch(SQL.lease_rows, numbers(wanted)) if wanted else ()
    moment = await db.fetchrow(SQL.moment)
    return Locked(
        moment["now"], moment["prices"], {row[0]: _account(row) for row in rows}, {row[0]: _lease(row) for row in found}
    )


async def lock_ended(db: Connection, leases: Iterable[int]) -> dict[int, Lease]:
    """Lock ended leases, to correct their postings. Their accounts must be locked before."""
    rows = await db.fetch(SQL.lock_ended, numbers(sorted(set(leases))))
    return {row[0]: _ended(row) for row in rows}


async def reserve_numbers(db: Connection, count: int) -> list[int]:
    """Reserve numbers for new leases; unused numbers are lost, which is harmless."""
    return [row[0] for row in await db.fetch(SQL.reserve_leases, count)] if count else []


async def reserve_accounts(db: Connection, count: int) -> list[int]:
    return [row[0] for row in await db.fetch(SQL.reserve_accounts, count)] if count else []


async def find_accounts(db: Connection, owners: Iterable[tuple[str, str]]) -> dict[tuple[str, str], int]:
    """Find the accounts of these owners, (tenant, user). Accounts of an existing tenant are found by its name."""
    wanted = sorted({owner for owner in owners if owner[0]})
    if not wanted:
        return {}
    rows = await db.fetch(SQL.find_accounts, [tenant for tenant, _ in wanted], [user for _, user in wanted])
    return {(row["tenant"], row["username"]): row["id"] for row in rows}


async def load_accounts(db: Connection, ids: Iterable[int]) -> dict[int, Account]:
    return {row[0]: _account(row) for row in await db.fetch(SQL.read_accounts, sorted(set(ids)))}


class Payers(NamedTuple):
    """The account that pays for a lease, the owner's own account, and who opened the lease (empty if it has ended, or
    was opened by a bind)."""

    account: Account | None
    own: Account | None
    opened_by: str


async def load_payers(db: Connection, lease: Lease, owner: tuple[str, str]) -> Payers:
    """Load the payers of a lease in one statement."""
    rows = await db.fetch(SQL.read_payers, lease.account, *owner, lease.id)
    found = [_account(row) for row in rows]
    return Payers(
        next((one for one in found if one.id == lease.account), None),
        next((one for one in found if (one.tenant, one.user) == owner), None),
        (rows[0]["opened_by"] or "") if rows else "",
    )


async def list_accounts(
    db: Connection,
    tenants: Sequence[str] | None = None,
    users: Sequence[str] | None = None,
    after: tuple[str, str] = ("", ""),
    limit: int = 500,
) -> list[Account]:
    """List accounts by tenant and user, of these tenants and users or of all (None). The empty user is the tenant's
    pool."""
    return [_account(row) for row in await db.fetch(SQL.list_accounts, tenants, users, *after, limit)]


async def lock_of_tenant(db: Connection, tenant: str) -> list[Account]:
    """Lock all accounts of a tenant. The exclusive lock of the tree prevents new ones."""
    return [_account(row) for row in await db.fetch(SQL.lock_of_tenant, tenant)]


async def accounts_of_leases(db: Connection, ids: Iterable[int]) -> dict[int, int]:
    """Map leases, open or ended, to the accounts that pay for them; this never changes."""
    return {row["id"]: row["account"] for row in await db.fetch(SQL.accounts_of_leases, sorted(set(ids)))}


async def load_leases(db: Connection, ids: Iterable[int]) -> dict[int, Lease]:
    """Load those of these leases that are open."""
    return {row[0]: _lease(row) for row in await db.fetch(SQL.read_leases, sorted(set(ids)))}


async def load_ended(db: Connection, ids: Iterable[int]) -> dict[int, Lease]:
    return {row[0]: _ended(row) for row in await db.fetch(SQL.read_ended, sorted(set(ids)))}


async def list_leases(db: Connection, accounts: Iterable[int], after: int = 0, limit: int = 500) -> list[Lease]:
    """List the open leases of these accounts, by number."""
    return [_lease(row) for row in await db.fetch(SQL.leases_of_accounts, sorted(set(accounts)), after, limit)]


async def load_now(db: Connection) -> int:
    """Return the time of the database's clock, by which the ledger counts."""
    row = await db.fetchrow(SQL.moment)
    now: int = row["now"]
    return now


async def save(db: Connection, ledger: Ledger, *, added: Collection[int] = (), amended: Collection[int] = ()) -> None:
    """Save what the ledger decided. `added` are accounts that are not stored yet; `amended` are those whose limits
    changed."""
    if new := [ledger.accounts[one] for one in sorted(added) if one in ledger.changed]:
        await _add_accounts(db, new)
    if opened := [ledger.leases[one] for one in sorted(ledger.opened - ledger.ended)]:
        await db.execute(SQL.open_leases, *_lease_columns(opened), texts([one.opened_by for one in opened]))
    if ledger.ended:
        await _save_ended(db, ledger)
    if repaid := [ledger.leases[one] for one in sorted(ledger.refunded - ledger.ended)]:
        await db.execute(SQL.refunded, numbers([one.id for one in repaid]), numbers([one.refunded for one in repaid]))
    if ledger.events:
        await _save_notices(db, ledger)
    if told := _paid(ledger) | set(amended):
        await db.execute(SQL.tell, ALL if len(told) > TOLD_MAX else numbers(sorted(told)))
    await _save_balances(db, ledger)


async def tell_all(db: Connection) -> None:
    """Notify waiters for credit of all accounts."""
    await db.execute(SQL.tell, ALL)


async def _save_balances(db: Connection, ledger: Ledger) -> None:
    accounts = [ledger.accounts[one] for one in sorted(ledger.changed)]
    moved = [ledger.leases[one] for one in sorted(ledger.moved - ledger.opened - ledger.ended)]
    leases = [one for one in moved if one.state is LeaseState.OPEN]
    if len(leases) < len(moved):
        await _correct_ended(db, [one for one in moved if one.state is not LeaseState.OPEN])
    if not (accounts or leases or ledger.entries):
        return
    row = await db.fetchrow(
        SQL.save,
        *_account_columns(accounts),
        *_moved_columns(leases),
        len(ledger.entries),
        *_entry_columns(ledger.entries),
    )
    if row["balanced"] != len(accounts) or row["moved"] != len(leases):
        raise Stale(f"{row['balanced']} of {len(accounts)} accounts and {row['moved']} of {len(leases)} leases")
    for account in accounts:
        account.version += 1


async def _add_accounts(db: Connection, accounts: Sequence[Account]) -> None:
    columns = lists(((one.id, one.tenant, one.user, one.tenant_uid) for one in accounts), 4)
    rows = await db.fetch(SQL.add_accounts, *columns)
    if len(rows) != len(accounts):
        raise Stale("somebody else opened the same account")


async def _save_ended(db: Connection, ledger: Ledger) -> None:
    leases = [ledger.leases[one] for one in sorted(ledger.ended)]
    gone = await db.fetchval(
        SQL.end_leases,
        *_lease_columns(leases),
        texts([one.state for one in leases]),
        numbers([one.closed_at for one in leases]),
        texts(["" if one.measured is None else str(one.measured) for one in leases]),
        numbers([one.written_off for one in leases]),
        numbers([one.refunded for one in leases]),
    )
    if gone != len(ledger.ended - ledger.opened):
        raise Stale(f"{gone} of {len(ledger.ended - ledger.opened)} leases were open")


async def _correct_ended(db: Connection, leases: Sequence[Lease]) -> None:
    rows = await db.fetch(
        SQL.correct_ended,
        numbers([one.id for one in leases]),
        numbers([one.posted for one in leases]),
        numbers([one.written_off for one in leases]),
        numbers([one.refunded for one in leases]),
    )
    if len(rows) != len(leases):
        raise Stale(f"{len(rows)} of {len(leases)} ended leases")


async def _save_notices(db: Connection, ledger: Ledger) -> None:
    owned = ((one, ledger.accounts[one.account]) for one in ledger.events)
    rows = ((str(one.news), owner.tenant, owner.name, _notice(one, owner)) for one, owner in owned)
    await db.execute(SQL.notice, *lists(rows, 4))


def _notice(event: LedgerEvent, owner: Account) -> bytes:
    return _encode(
        {
            "account": owner.name,
            "amount": credits_of(event.amount),
            "available": credits_of(owner.available),
            "lease": lease_name(event.lease) if event.lease else "",
            "reason": event.reason,
        }
    )


def _paid(ledger: Ledger) -> set[int]:
    """The accounts that received credit, or whose holds were reduced."""
    credited = {one.credit for one in ledger.entries if one.credit >= FIRST_ACCOUNT}
    return credited | {ledger.leases[one].account for one in ledger.ended}


def told_of(payload: str) -> set[int] | None:
    """Parse a notification on CHANNEL: the accounts that it names, or None for all."""
    return None if payload == ALL else {int(one) for one in payload.split(",") if one.isdigit()}


# Rows and columns.


def _account(row: Any) -> Account:
    return Account(
        row[0], row[1], row[2], _STATUSES[row[3]], row[4], row[5], row[6], row[7], row[8], row[9], row[10], row[11],
        row[12], row[13], row[14], row[15], row[16], row[17], row[18], row[19], row[20],
    )  # fmt: skip


def _lease(row: Any) -> Lease:
    past, ahead = row[16], row[17]
    return Lease(
        row[0], row[1], row[2], row[3], row[4], _amounts.decode(row[5]), row[6], row[7], row[8], _MODES[row[9]],
        row[10], row[11], row[12], row[13], row[14], row[15], () if past == b"[]" else _segments(past),
        () if ahead == b"[]" else _segments(ahead), row[18], row[19], row[20], row[21], row[22], row[23], row[24],
        row[25],
    )  # fmt: skip


def _ended(row: Any) -> Lease:
    lease = _lease(row)
    lease.state, lease.closed_at, lease.written_off = LeaseState(row[26]), row[27], row[28]
    return lease


def _account_columns(accounts: Sequence[Account]) -> list[list[Any]]:
    rows = [
        (
            one.id, one.version, str(one.status), one.posted, one.held, one.credit_limit, one.gpus, one.gpus_max,
            one.spend_rate_max, one.spend_burst, one.tokens, one.tokens_at, one.daily_cap, one.stop_at_cap,
            one.time_zone, one.day, one.day_posted, one.low_balance,
        )
        for one in accounts
    ]  # fmt: skip
    return lists(rows, 18)


def _segments_of(lines: Iterable[tuple[Segment, ...]]) -> str:
    return documents([_encode(one) if one else b"[]" for one in lines])


def _lease_columns(leases: Sequence[Lease]) -> tuple[str, ...]:
    return (
        numbers([one.id for one in leases]),
        numbers([one.account for one in leases]),
        texts([one.job for one in leases]),
        numbers([one.rate for one in leases]),
        numbers([one.window for one in leases]),
        documents([_encode(one.amounts) for one in leases]),
        texts([one.klass for one in leases]),
        numbers([one.gpus for one in leases]),
        numbers([one.discount for one in leases]),
        texts([one.mode for one in leases]),
        texts([one.uid for one in leases]),
        numbers([one.epoch for one in leases]),
        texts([one.node for one in leases]),
        numbers([one.opened_at for one in leases]),
        *_standing_columns(leases),
        texts([one.work for one in leases]),
    )


def _moved_columns(leases: Sequence[Lease]) -> tuple[str, ...]:
    return (
        numbers([one.id for one in leases]),
        numbers([one.rate for one in leases]),
        *_standing_columns(leases),
    )


def _standing_columns(leases: Sequence[Lease]) -> tuple[str, ...]:
    """The columns of a lease that change while it is open: paid, posted and settled."""
    return (
        numbers([one.started_at for one in leases]),
        numbers([one.since for one in leases]),
        _segments_of(one.past for one in leases),
        _segments_of(one.ahead for one in leases),
        numbers([one.posted_until for one in leases]),
        numbers([one.paid_until for one in leases]),
        numbers([one.posted for one in leases]),
        numbers([one.held for one in leases]),
        numbers([one.seq for one in leases]),
        texts([one.final for one in leases]),
    )


def _entry_columns(entries: Sequence[Entry]) -> tuple[str, ...]:
    return (
        texts([one.type for one in entries]),
        numbers([one.debit for one in entries]),
        numbers([one.credit for one in entries]),
        numbers([one.amount for one in entries]),
        numbers([one.lease for one in entries]),
        numbers([one.seq for one in entries]),
        numbers([one.rate for one in entries]),
        numbers([one.begin for one in entries]),
        numbers([one.end for one in entries]),
        texts([one.request for one in entries]),
        texts([one.actor for one in entries]),
        texts([one.reason for one in entries]),
    )


async def load_last(db: Connection) -> int:
    """Return the number of the last entry."""
    return int(await db.fetchval(SQL.position))


async def ensure_partitions(db: Connection) -> None:
    """Create the partitions for the next entries in advance."""
    first = await load_last(db) // PARTITION_SIZE
    there = {row["name"] for row in await db.fetch(SQL.partitions)}
    for index in (first, first + 1):
        name = f"entry_{index:09d}"
        if name not in there:
            try:
                await db.execute(
                    # Creating a partition in place would wait for all readers of entries and block all writers;
                    # attaching does not.
                    f"CREATE TABLE {name} (LIKE entry INCLUDING DEFAULTS INCLUDING CONSTRAINTS INCLUDING INDEXES);"
                    f"ALTER TABLE entry ATTACH PARTITION {name} "
                    f"FOR VALUES FROM ({index * PARTITION_SIZE}) TO ({(index + 1) * PARTITION_SIZE});"
                    # LIKE copies row triggers, but not this statement trigger.
                    f"CREATE TRIGGER entry_never_emptied BEFORE TRUNCATE ON {name} "
                    "FOR EACH STATEMENT EXECUTE FUNCTION entry_is_immutable()"
                )
            except (asyncpg.DuplicateTableError, asyncpg.UniqueViolationError):
                continue  # another process created it first
