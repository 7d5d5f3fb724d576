"""Account statements: balances at a point in time, and bookings between two points in time.

A point in time becomes a cut: a position between two entries. All other queries go by entry number. Amounts between two
cuts are the sum of the rollups that lie within, plus the single entries at both edges.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from bursar.core.credit.hash_chain import micros_of, time_of
from bursar.core.credit.statement import Item, LeaseLine
from bursar.store.db.database import Connection
from bursar.store.db.sql_loader import statements

SQL = statements("credit/account_statement")


class StatementCut(NamedTuple):
    """A position in the ledger: `number` is the last entry before a time, `block` the last block wholly before it, and
    `sealed` the last entry of that block."""

    number: int
    block: int
    sealed: int


class Span(NamedTuple):
    """The entries between two cuts: a range of rollups, and the single entries before (`head`) and after it (`tail`).
    Each is a half-open range (after, through]."""

    blocks: tuple[int, int]
    head: tuple[int, int]
    tail: tuple[int, int]


async def load_cut(db: Connection, at: int) -> StatementCut | None:
    """Find the cut at a time. None if entries there were dropped: then only cuts at quarters of an hour are known."""
    row = await db.fetchrow(SQL.cut, time_of(at))
    block, sealed, floor = row["block"], row["sealed"], row["floor"]
    if sealed + 1 < floor and not (row["page_end"] and row["clean"]):
        return None
    if row["clean"]:
        return StatementCut(sealed, block, sealed)
    later = await db.fetchval(SQL.first_since, sealed, time_of(at))
    return StatementCut(later - 1 if later is not None else row["last"], block, sealed)


async def load_newest(db: Connection) -> StatementCut:
    row = await db.fetchrow(SQL.newest)
    return StatementCut(row["last"], row["block"], row["sealed"])


async def load_posted(db: Connection, accounts: Sequence[int], cut: StatementCut) -> dict[int, int]:
    rows = await db.fetch(SQL.posted, accounts, cut.block, cut.sealed, cut.number)
    return {row["id"]: int(row["posted"]) for row in rows}


class Sums(NamedTuple):
    """Amounts by entry type, with the first and the last lease among them (0: no lease)."""

    totals: dict[str, int]
    first_lease: int
    last_lease: int


async def load_span(db: Connection, begin: int, end: int) -> Span:
    """Split the entries in (begin, end] into rollups and single entries."""
    first, last = await db.fetchrow(SQL.first_unit, begin), await db.fetchrow(SQL.last_unit, end)
    if first is None or last is None or first["first"] > last["last"]:
        return Span((0, -1), (begin, end), (end, end))
    return Span((first["first_block"], last["last_block"]), (begin, first["first"] - 1), (last["last"], end))


async def is_kept(db: Connection, span: Span) -> bool:
    """Return whether the single entries at both edges of the span are still stored."""
    floor = await db.fetchval(SQL.floor)
    return all(after >= up_to or after + 1 >= floor for after, up_to in (span.head, span.tail))


async def load_sums(db: Connection, accounts: Sequence[int], span: Span) -> dict[int, Sums]:
    """Sum the entries of a span by account; accounts without entries are absent."""
    sums: dict[int, Sums] = {}
    for row in await db.fetch(SQL.totals, accounts, *span.blocks, *span.head, *span.tail):
        known = sums.get(row["account"], Sums({}, 0, 0))
        first = min(filter(None, (known.first_lease, row["first_lease"])), default=0)
        last = max(known.last_lease, row["last_lease"] or 0)
        sums[row["account"]] = Sums({**known.totals, row["type"]: int(row["amount"])}, first, last)
    return sums


async def load_lines(db: Connection, account: int, span: Span, after: int, last: int, limit: int) -> list[LeaseLine]:
    """List one line per lease, for leases in (after, last], in order."""
    rows = await db.fetch(SQL.lines, account, *span.blocks, *span.head, *span.tail, after, last, limit)
    return [
        LeaseLine(
            row["lease"], int(row["amount"]), int(row["debited"]), int(row["refunded"]), int(row["adjusted"]),
            int(row["micros"]), row["begin"], row["until"], int(row["entries"]), row["job"], row["work"], row["node"],
            row["class"], row["gpus"], row["state"],
        )
        for row in rows
    ]  # fmt: skip


async def load_items(db: Connection, account: int, after: int, end: int, limit: int) -> list[Item]:
    """List entries without a lease in (after, end], in order; sealed ones are kept for ever."""
    sealed = (await load_newest(db)).sealed
    rows = await db.fetch(SQL.items, account, after, end, sealed, limit)
    return [Item(number, micros_of(at), *rest) for number, at, *rest in rows]


async def load_names(db: Connection, accounts: Sequence[int]) -> dict[int, tuple[str, str]]:
    rows = await db.fetch(SQL.names, accounts)
    return {row["id"]: (row["tenant"], row["username"]) for row in rows}


async def load_tenant(db: Connection, tenant: str) -> dict[int, tuple[str, str]]:
    """Load a tenant's accounts: its pool first, then those of its users."""
    rows = await db.fetch(SQL.names_of_tenant, tenant)
    return {row["id"]: (row["tenant"], row["username"]) for row in rows}
