"""Saving notes on leases that could not be extended."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from bursar.commands.command import Reply
from bursar.commands.credit.shortfall import NoteShortfall
from bursar.ops.runtime.runtime import Runtime


async def note_shortfalls(runtime: Runtime, notes: Sequence[NoteShortfall]) -> list[Reply | BaseException]:
    """Save all notes; each is answered by its reply or its exception. They use the lane of changes, so that binding
    does not wait for them."""
    taken = (runtime.changing.submit(one, one.key.namespace) for one in notes)
    return await asyncio.gather(*taken, return_exceptions=True)
