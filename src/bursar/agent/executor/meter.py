"""Usage metering of placements: from their control groups, else from the processes below their shims."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bursar.agent.executor.placement_dir import Exit
from bursar.agent.host.cgroup import Cgroup
from bursar.agent.host.environment import GPU_VENDOR
from bursar.agent.machine.types import Run, Usage

PROC = Path("/proc")
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Process:
    parent: int
    cpu_seconds: float  # with its reaped children
    memory_bytes: int


def processes() -> dict[int, Process]:
    """List all processes in one pass over /proc; processes that end meanwhile are skipped."""
    found: dict[int, Process] = {}
    for entry in PROC.iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_bytes().rpartition(b")")[2].split()
            except OSError:
                continue
            ticks = sum(map(int, fields[11:15]))
            found[int(entry.name)] = Process(int(fields[1]), ticks / TICKS_PER_SECOND, int(fields[21]) * PAGE_BYTES)
    return found


def children(found: Mapping[int, Process]) -> dict[int, list[int]]:
    by_parent: dict[int, list[int]] = {}
    for pid, process in found.items():
        by_parent.setdefault(process.parent, []).append(pid)
    return by_parent


def use_below(pid: int, found: Mapping[int, Process], by_parent: Mapping[int, list[int]]) -> tuple[float, int]:
    """CPU seconds and memory bytes of all descendants of a process."""
    cpu_seconds, memory_bytes, below = 0.0, 0, list(by_parent.get(pid, ()))
    while below:
        one = below.pop()
        cpu_seconds += found[one].cpu_seconds
        memory_bytes += found[one].memory_bytes
        below += by_parent.get(one, ())
    return cpu_seconds, memory_bytes


def usage(run: Run, seconds: float, group: Cgroup | None, below: tuple[float, int], before: Usage) -> Usage:
    """The usage so far. CPU seconds and peak memory never fall when processes end."""
    cpu_seconds, memory_bytes = below
    memory_most = memory_bytes
    if group is not None:
        cpu_seconds = cpu_seconds if (measured := group.cpu_seconds()) is None else measured
        memory_bytes, memory_most = group.memory_bytes() or (memory_bytes, memory_bytes)
    return Usage(
        seconds=seconds,
        cpu_seconds=max(before.cpu_seconds, cpu_seconds),
        memory_bytes=memory_bytes,
        memory_bytes_max=max(before.memory_bytes_max, memory_most),
        gpu_seconds=seconds * gpus(run),
    )


def final_usage(run: Run, end: Exit, group: Cgroup | None, before: Usage) -> Usage:
    """The total usage, once no process runs."""
    used = usage(run, end.seconds, group, (end.cpu_seconds, 0), before)
    most = used.memory_bytes_max or end.memory_bytes_max
    return Usage(used.seconds, max(used.cpu_seconds, end.cpu_seconds), 0, most, used.gpu_seconds)


def gpus(run: Run) -> int:
    return sum(len(given) for resource, given in run.devices.items() if resource.startswith(GPU_VENDOR))
