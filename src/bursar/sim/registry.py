"""The registration of simulated nodes: finding, checking and removing them through the API."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, TypeVar

from bursar.client.errors import BursarError, Conflict, NotFound
from bursar.core.nodes.node import SIMULATED
from bursar.sim.shape import NodeShape

if TYPE_CHECKING:
    from bursar.client import AsyncClient

A = TypeVar("A")
T = TypeVar("T")

AT_ONCE = 16


class NotSimulated(BursarError):
    """A real node of this name exists."""

    def __init__(self, name: str) -> None:
        super().__init__(f"node {name!r} exists and is not simulated")
        self.hint = "choose another --prefix"


class SimRegistry:
    """The nodes of one shape, as the server knows them. It needs an administrator's token."""

    def __init__(self, client: AsyncClient, shape: NodeShape) -> None:
        self._client = client
        self._names = frozenset(shape.names)

    async def registered(self) -> set[str]:
        """The names of the shape that belong to simulated nodes."""
        return await self._named(f"{SIMULATED}=true")

    async def check(self) -> None:
        """Raise if a real node has one of the names."""
        if taken := await self._named(f"{SIMULATED}!=true"):
            raise NotSimulated(min(taken))

    async def _named(self, selector: str) -> set[str]:
        found = self._client.nodes.list(label_selector=selector)
        return {one["metadata"]["name"] async for one in found} & self._names

    async def remove(self) -> int:
        """Delete the nodes; returns how many still run work and are kept."""
        return sum(await several(self._remove, await self.registered()))

    async def _remove(self, name: str) -> bool:
        try:
            await self._client.nodes.delete(name)
        except NotFound:
            return False
        except Conflict:
            return True
        return False


async def several(do: Callable[[A], Awaitable[T]], arguments: Iterable[A]) -> list[T]:
    """Run a call for all arguments, AT_ONCE at a time. The first error is raised after all have finished."""
    slots = asyncio.Semaphore(AT_ONCE)

    async def one(argument: A) -> T:
        async with slots:
            return await do(argument)

    done = await asyncio.gather(*map(one, arguments), return_exceptions=True)
    for outcome in done:
        if isinstance(outcome, BaseException):
            raise outcome
    return [outcome for outcome in done if not isinstance(outcome, BaseException)]
