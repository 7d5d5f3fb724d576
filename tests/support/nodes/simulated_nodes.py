"""Simulated nodes at work for as long as a block lasts."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from bursar.sim.rest import Simulated


@asynccontextmanager
async def at_work(nodes: Simulated) -> AsyncIterator[None]:
    """They act, having joined before, and must not have failed when they are told to stop."""
    task = asyncio.create_task(nodes.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled(), task.exception()
