"""Seats: limits on concurrent expensive operations, in total and per tenant.

A tenant above its share waits behind its own requests, and not before those of others.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from bursar.core.values.access import OF_TENANTS, Identity


def party(identity: Identity) -> str:
    """The party whose share a request counts against: a tenant, a node, or a user who acts for no tenant, as approvers
    and services do."""
    if identity.node:
        return f"node:{identity.node}"
    return f"tenant:{identity.tenant}" if identity.role in OF_TENANTS else f"{identity.role}:{identity.user}"


class Seats:
    def __init__(self, total: int, each: int) -> None:
        self._each = each
        self._all = asyncio.Semaphore(total)
        self._shares: dict[str, _Share] = {}

    def __len__(self) -> int:
        """The number of parties that have a seat or wait for one."""
        return len(self._shares)

    @asynccontextmanager
    async def taken(self, identity: Identity) -> AsyncIterator[None]:
        """Hold a seat for the length of a block."""
        who = party(identity)
        share = self._shares.setdefault(who, _Share(self._each))
        share.users += 1
        try:
            async with share.seats, self._all:
                yield
        finally:
            share.users -= 1
            if not share.users:
                del self._shares[who]


class _Share:
    """The share of one party, kept while any of its requests has a seat or waits for one."""

    __slots__ = ("seats", "users")

    def __init__(self, each: int) -> None:
        self.seats = asyncio.Semaphore(each)
        self.users = 0
