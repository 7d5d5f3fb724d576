"""Verification of the ledger: each statement returns only faulty rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, TypeAlias

from bursar.core.credit.account import SYSTEM_ACCOUNTS
from bursar.core.credit.hash_chain import Check, Finding
from bursar.core.credit.lease import lease_name
from bursar.core.values.money import credits_of
from bursar.core.values.replace import replace
from bursar.store.db.database import Connection
from bursar.store.db.sql_loader import statements

SQL = statements("credit/ledger_verify")

# Findings listed per check: enough to diagnose a fault.
FINDINGS_MAX = 20
# Limits of one statement: leases, and the quarters of an hour during which they ran. One statement takes about a
# second.
LEASES_MAX = 1000
QUARTERS_MAX = 50_000
LEASE_MAX = 2**62

Key: TypeAlias = tuple[int, int, str]  # account, lease and type of a rollup


class VerifiedSum(NamedTuple):
    """The fields of a rollup."""

    entries: int
    amount: int
    micros: int
    first: int
    last: int
    begin: int  # 0: no payment by time
    until: int


async def list_missing(db: Connection, first: int, last: int, block: int = 0) -> list[Finding]:
    rows = await db.fetch(SQL.missing_entries, first, last, FINDINGS_MAX)
    return [Finding(Check.ENTRY, f"entry {row['number']}", "it is missing", block) for row in rows]


async def list_untimely(db: Connection, first: int, last: int, block: int = 0) -> list[Finding]:
    rows = await db.fetch(SQL.untimely_entries, first, last, FINDINGS_MAX)
    said = "its time is before that of the entry before it"
    return [Finding(Check.ENTRY, f"entry {row['number']}", said, block) for row in rows]


async def list_kept(db: Connection, first: int, last: int, block: int) -> list[Finding]:
    """List permanently kept entries that differ from the entries that were written."""
    rows = await db.fetch(SQL.kept_differences, first, last, FINDINGS_MAX)
    return [
        Finding(
            Check.KEPT,
            f"kept entry {row['number']}",
            "it is missing" if row["missing"] else "it was never written" if row["extra"] else "it was changed",
            block,
        )
        for row in rows
    ]


async def list_rollups(db: Connection, blocks: tuple[int, int], parts: Iterable[tuple[int, int]]) -> list[Finding]:
    """List rollups that differ from the sums of their entries. Entries are summed part by part: a quarter of an hour
    has millions of entries but few rollups."""
    due: dict[Key, VerifiedSum] = {}
    for first, last in parts:
        for key, more in _sums(await db.fetch(SQL.sums_of_entries, first, last)):
            due[key] = _together(due[key], more) if key in due else more
    wrong: dict[Key, VerifiedSum | None] = {}
    missing = set(due)
    for key, said in _sums(await db.fetch(SQL.rollups, *blocks)):
        missing.discard(key)
        if due.get(key) != said:
            wrong[key] = said
    wrong.update(dict.fromkeys(missing))
    return [_rollup(key, wrong[key], due.get(key), blocks[1]) for key in sorted(wrong)[:FINDINGS_MAX]]


def _sums(rows: list[Any]) -> Iterator[tuple[Key, VerifiedSum]]:
    for account, lease, type_, count, amount, micros, *rest in rows:
        yield (account, lease, type_), VerifiedSum(count, int(amount), int(micros), *rest)


def _together(one: VerifiedSum, other: VerifiedSum) -> VerifiedSum:
    return VerifiedSum(
        one.entries + other.entries,
        one.amount + other.amount,
        one.micros + other.micros,
        min(one.first, other.first),
        max(one.last, other.last),
        min(one.begin or other.begin, other.begin or one.begin),
        max(one.until, other.until),
    )


def _rollup(key: Key, said: VerifiedSum | None, due: VerifiedSum | None, block: int) -> Finding:
    account, lease, type_ = key
    where = f"rollup of block {block}, {_account(account)}" + (f", {lease_name(lease)}" if lease else "") + f", {type_}"
    amounts = said.amount if said else None, due.amount if due else None
    return Finding(Check.ROLLUP, where, _differs(*amounts, "its entries come to"), block)


async def load_rollup_sum(db: Connection, first_block: int, last_block: int) -> tuple[int, int | None, int | None]:
    """Sum the rollups of a range of blocks; return also the first and the last block that has any."""
    row = await db.fetchrow(SQL.rollup_sum, first_block, last_block)
    return int(row["amount"]), row["first_block"], row["last_block"]


async def list_balances_of_block(db: Connection, block: int, first: int, last: int) -> list[Finding]:
    return _balances(await db.fetch(SQL.balances_against_entries, block, first, last, FINDINGS_MAX), block)


async def list_balances_of_page(db: Connection, first_block: int, last_block: int) -> list[Finding]:
    return _balances(await db.fetch(SQL.balances_against_rollups, first_block, last_block, FINDINGS_MAX), last_block)


def _balances(rows: list[Any], block: int) -> list[Finding]:
    return [
        Finding(
            Check.BALANCE,
            f"balance of {_account(row['account'])} after block {block}",
            "nothing moved it"
            if row["extra"]
            else _differs(row["said"], row["due"], "with what moved it, it comes to"),
            block,
        )
        for row in rows
    ]


async def list_ended(db: Connection, blocks: tuple[int, int], times: tuple[int, int], sealed: int) -> list[Finding]:
    """List leases that ended within a range of blocks, between two times, and whose amounts differ from their
    entries."""
    ended = [(row["id"], row["quarters"]) for row in await db.fetch(SQL.ended_leases, *blocks, *times)]
    found: list[Finding] = []
    for leases in _slices(ended):
        rows = await db.fetch(SQL.ended_differences, leases, sealed, FINDINGS_MAX)
        found += _amounts(Check.LEASE, "posted of lease", rows, "entries")
    return [Finding(one.check, one.where, one.message, blocks[1]) for one in found[:FINDINGS_MAX]]


def _slices(leases: list[tuple[int, int]]) -> Iterator[list[int]]:
    """Split leases, each with the quarters of an hour for which it ran, into groups that one statement can sum."""
    together: list[int] = []
    total = 0
    for number, quarters in leases:
        if together and (total + quarters > QUARTERS_MAX or len(together) >= LEASES_MAX):
            yield together
            together, total = [], 0
        together.append(number)
        total += quarters
    if together:
        yield together


async def list_leases(db: Connection, sealed: int, after: int) -> tuple[list[Finding], int]:
    """List those of the next leases after `after` whose amounts differ from their entries; return also the last lease
    checked."""
    through: int | None = await db.fetchval(SQL.some_leases, after, LEASES_MAX, QUARTERS_MAX)
    if through is None:
        return [], LEASE_MAX
    rows = await db.fetch(SQL.lease_posted_differences, sealed, after, through, FINDINGS_MAX)
    found = _amounts(Check.LEASE, "posted of lease", rows, "entries")
    return [replace(one, lease=row["id"]) for one, row in zip(found, rows, strict=True)], through


async def list_present(db: Connection, head: int, sealed: int) -> list[Finding]:
    """Verify the current state: accounts, holds of leases, and entries that are not sealed yet."""
    found = [
        Finding(Check.CHAIN, f"block {row['block']}", "it is missing: there are rollups or balances of it")
        for row in await db.fetch(SQL.stray_rollups, head, FINDINGS_MAX)
    ]
    found += await _tail(db, sealed)
    found += _amounts(Check.BALANCE, "account", await db.fetch(SQL.posted_differences, sealed, FINDINGS_MAX), "entries")
    found += [
        Finding(Check.BALANCE, f"account {row['account']}", "it has entries and does not exist")
        for row in await db.fetch(SQL.strangers, FINDINGS_MAX)
    ]
    found += [_held(row) for row in await db.fetch(SQL.held_differences, FINDINGS_MAX)]
    found += _amounts(Check.LEASE, "held of lease", await db.fetch(SQL.lease_held_differences, FINDINGS_MAX), "window")
    found += [
        Finding(Check.NEGATIVE, row["name"], f"{row['what']} is {credits_of(int(row['amount']))}")
        for row in await db.fetch(SQL.negative, FINDINGS_MAX)
    ]
    if total := int(await db.fetchval(SQL.sum_of_balances)):
        found.append(Finding(Check.SUM, "ledger", f"all accounts together have {credits_of(total)}, and not nothing"))
    return found


async def _tail(db: Connection, sealed: int) -> list[Finding]:
    row = await db.fetchrow(SQL.tail, sealed)
    if row["count"] == row["last"] - sealed and (row["newest"] or sealed) == row["last"]:
        return await list_untimely(db, sealed + 1, row["last"])
    found = await list_missing(db, sealed + 1, row["last"])
    if (row["newest"] or 0) > row["last"]:
        found.append(Finding(Check.ENTRY, f"entry {row['newest']}", f"the ledger's last one is {row['last']}"))
    return found


def _amounts(check: Check, what: str, rows: list[Any], of: str) -> list[Finding]:
    said = f"its {of} come to" if of == "entries" else f"its {of} comes to"
    return [Finding(check, f"{what} {row['id']}", _differs(row["said"], row["due"], said)) for row in rows]


def _held(row: Any) -> Finding:
    if row["said"] != row["due"]:
        said = f"it holds {credits_of(int(row['said']))}, its open leases hold {credits_of(int(row['due']))}"
    else:
        said = f"it uses {row['gpus_said']} thousandths of a GPU, its open leases use {row['gpus_due']}"
    return Finding(Check.HELD, f"account {row['id']}", said)


def _differs(said: Any, due: Any, of: str) -> str:
    if said is None:
        return f"it is missing: {of} {credits_of(int(due))}"
    if due is None:
        return f"it says {credits_of(int(said))}, and there are no such entries"
    if said == due:
        return "its count, its time or its entries are not right"
    return f"it says {credits_of(int(said))}, {of} {credits_of(int(due))}"


def _account(number: int) -> str:
    return SYSTEM_ACCOUNTS.get(number, f"account {number}")
