"""Prices in the database: versions are only added; a version that is not yet in force may be withdrawn."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from bursar.core.credit.price import Price, PriceList
from bursar.store.db.columns import lists
from bursar.store.db.database import Connection
from bursar.store.db.sql_loader import statements

SQL = statements("credit/price")


class PriceRow(NamedTuple):
    """A price with its author and the time of its creation."""

    price: Price
    created_at: datetime
    created_by: str


async def load_version(db: Connection) -> int:
    """Return the version of the price list; each new price raises it."""
    return int(await db.fetchval(SQL.version))


async def load_all(db: Connection) -> PriceList:
    return PriceList.of(Price(*row) for row in await db.fetch(SQL.read_all))


async def list_prices(db: Connection) -> list[PriceRow]:
    """List prices by resource, class and time."""
    return [PriceRow(Price(*row[:4]), row[4], row[5]) for row in map(tuple, await db.fetch(SQL.list))]


async def raise_version(db: Connection) -> None:
    """Raise the version, so that caches of prices are read again. Locks the ledger's row."""
    await db.execute(SQL.raise_version)


async def drop(db: Connection, prices: Sequence[Price]) -> int:
    """Withdraw prices that are not yet in force; return their number."""
    columns = lists(((one.resource, one.klass, one.effective_from) for one in prices), 3)
    return len(await db.fetch(SQL.drop, *columns))


async def add(db: Connection, prices: Sequence[tuple[Price, str]]) -> int:
    """Add prices with their authors; return how many were new."""
    rows = ((one.resource, one.klass, one.per_second, one.effective_from, actor) for one, actor in prices)
    return len(await db.fetch(SQL.add, *lists(rows, 5)))
