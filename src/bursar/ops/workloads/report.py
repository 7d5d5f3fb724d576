"""Reports on an allocation: that it runs, or how it ended."""

from __future__ import annotations

from bursar.commands.command import Reply
from bursar.commands.workloads.report import Report
from bursar.ops.runtime.runtime import Runtime


async def report(runtime: Runtime, command: Report) -> Reply:
    return await runtime.binding.submit(command, command.key.namespace)
