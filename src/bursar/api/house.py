"""What handlers share: the office, the feed, who may come in and how often."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from bursar.api.identity import Authenticator
from bursar.api.ratelimit import LIMIT_PER_MINUTE_DEFAULT, RateLimit
from bursar.core.access import Identity, Reach, reach
from bursar.core.tree import Tree, lineage, subtree
from bursar.ops.feed import Feed
from bursar.ops.office import Office
from bursar.store.database import Database

TREE_AGE_SECONDS_MAX = 1.0
BODY_BYTES_MAX = 1_500_000


@dataclass(slots=True)
class House:
    database: Database
    office: Office
    feed: Feed
    authenticator: Authenticator
    limits: RateLimit
    requests_per_minute: int = LIMIT_PER_MINUTE_DEFAULT
    version: str = ""
    _tree_read_at: float = field(default=-1e9)
    _tree_lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def tree(self, *, fresh: bool = False) -> Tree:
        """The tree for reading and for asking who may see what; at most a second old."""
        now = asyncio.get_running_loop().time()
        if fresh or now - self._tree_read_at > TREE_AGE_SECONDS_MAX:
            async with self._tree_lock:
                if fresh or asyncio.get_running_loop().time() - self._tree_read_at > TREE_AGE_SECONDS_MAX:
                    async with self.database.reader() as db:
                        await self.office.trees.refresh(db)
                    self._tree_read_at = asyncio.get_running_loop().time()
        return self.office.trees.latest

    def forget_tree(self) -> None:
        """This process changed the tree: who asks next sees the change."""
        self._tree_read_at = -1e9

    async def sees(self, identity: Identity, tenant: str) -> bool:
        """Whether an identity may see what belongs to a tenant; what belongs to none is for everybody."""
        whose = reach(identity)
        if whose.everything or not tenant:
            return True
        return whose.sees(lineage(await self.tree(), tenant))

    async def visible_tenants(self, identity: Identity) -> tuple[str, ...] | None:
        """The tenants whose objects an identity may list; None means everybody's."""
        whose: Reach = reach(identity)
        if whose.everything:
            return None
        if not whose.tenant:
            return ()
        return tuple(sorted(subtree(await self.tree(), whose.tenant))) if whose.subtree else (whose.tenant,)
