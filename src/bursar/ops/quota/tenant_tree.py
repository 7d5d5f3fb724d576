"""The tenant tree in memory: read once, kept up to date from the feed, trusted only under the tree's lock."""

from __future__ import annotations

from dataclasses import dataclass

from bursar.commands.quota.tree_documents import applied, tree_of
from bursar.core.quota.tenant_tree import Tree
from bursar.store.db.database import Connection
from bursar.store.quota import tenant_tree as store

# A cache that is this many revisions behind is read again in full.
BEHIND_MAX = 2_000_000


@dataclass(frozen=True, slots=True)
class _Cached:
    version: int
    revision: int
    tree: Tree


class TreeCache:
    def __init__(self) -> None:
        self._cached = _Cached(-1, 0, Tree())

    @property
    def latest(self) -> Tree:
        """The tree as last read: for display, never for charging."""
        return self._cached.tree

    async def at(self, db: Connection, version: int) -> Tree:
        """The tree of this version, which the caller holds locked."""
        if self._cached.version == version:
            return self._cached.tree
        known = self._cached
        position = await store.load_position(db)
        behind = position.revision - known.revision
        if known.version < 0 or known.revision < position.floor or not 0 <= behind <= BEHIND_MAX:
            tree = tree_of(await store.load_all(db), await store.load_ended(db))
        else:
            tree = known.tree
            for change in await store.load_since(db, known.revision):
                tree = applied(tree, change)
        self._cached = _Cached(version, position.revision, tree)
        return tree

    async def refresh(self, db: Connection) -> Tree:
        """The current tree, for callers that only read."""
        position = await store.load_position(db)
        return await self.at(db, position.version)
