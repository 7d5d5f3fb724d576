"""Prices in memory: read once, and again whenever the ledger's row tells of another version."""

from __future__ import annotations

from bursar.core.credit.price import PriceList
from bursar.store.credit import price as store
from bursar.store.db.database import Connection


class Prices:
    """Those of one process. The version that was read under locks says whether they are all known."""

    def __init__(self) -> None:
        self._version = -1
        self._list = PriceList()

    async def at(self, db: Connection, version: int) -> PriceList:
        """The prices of this version, or of a later one if there is one by now."""
        if self._version != version:
            # Asked first: what is read afterwards has all of that version, and maybe more.
            version = await store.load_version(db)
            self._list, self._version = await store.load_all(db), version
        return self._list

    async def refresh(self, db: Connection) -> PriceList:
        """As they are now, for those who only read."""
        return await self.at(db, await store.load_version(db))
