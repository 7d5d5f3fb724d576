"""Raising budget alerts."""

from __future__ import annotations

from bursar.commands.command import Reply
from bursar.commands.usage.budget_alert import Warn
from bursar.ops.runtime.runtime import Runtime


async def warn(runtime: Runtime, command: Warn) -> Reply:
    """Commit a budget alert. It takes the tree's lock in shared mode, so no other writer waits for it."""
    return await runtime.changing.submit(command, command.key.name)
