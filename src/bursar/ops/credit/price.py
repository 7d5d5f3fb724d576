"""Prices in memory: read once, and again whenever the ledger's row has another version."""

from __future__ import annotations

from bursar.core.credit.price import PriceList
from bursar.store.credit import price as store
from bursar.store.db.database import Connection


class Prices:
    """The price cache of one process. The version read under locks shows whether it is complete."""

    def __init__(self) -> None:
        self._version = -1
        self._list = PriceList()

    async def at(self, db: Connection, version: int) -> PriceList:
        """The prices of this version, or of a later one."""
        if self._version != version:
            # The version is read first: prices read afterwards are of that version or a later one.
            version = await store.load_version(db)
            self._list, self._version = await store.load_all(db), version
        return self._list

    async def refresh(self, db: Connection) -> PriceList:
        """The current prices, for callers that only read."""
        return await self.at(db, await store.load_version(db))
