"""Drives the state machine of simulated nodes: timers, and a bounded number of concurrent report batches.

Reports beyond that bound queue here, not at the server.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, TypeAlias

from bursar.sim.node import NodeReport, Nodes
from bursar.sim.work import SimWork

# Resolution of the timers: ends within a tick are reported together.
TICK_SECONDS = 0.01


class DriveTrouble(Enum):
    REFUSED = "refused"  # the allocation has changed: read it again
    PASSING = "passing"  # try again later


# The revision of an accepted report, or why it was not accepted.
Answer: TypeAlias = int | DriveTrouble


class ReportSink(Protocol):
    """The server, as the simulation reaches it."""

    async def say(self, reports: Sequence[NodeReport], /) -> Sequence[Answer]:
        """Send reports; returns their answers, in order."""

    async def look(self, work: SimWork, /) -> SimWork | DriveTrouble | None:
        """The current version of an allocation; None if it does not exist."""


@dataclass(frozen=True, slots=True)
class SimPace:
    """How many batches of reports are in flight at a time, and their maximum size."""

    speakers: int
    batch_max: int


class Drive:
    def __init__(self, nodes: Nodes, sink: ReportSink, pace: SimPace, clock: Callable[[], float] = time.time) -> None:
        self.nodes = nodes
        self._sink = sink
        self._pace = pace
        self._clock = clock
        self._waiting: deque[NodeReport] = deque()
        self._speak = asyncio.Event()
        self._retime = asyncio.Event()
        self._sleeps_until = math.inf

    def see(self, work: SimWork) -> None:
        self._put(self.nodes.see(work, self._clock()))

    async def run(self) -> None:
        """Send reports and keep timers until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._keep_time())
            for _ in range(self._pace.speakers):
                group.create_task(self._speaker())

    def _put(self, reports: Sequence[NodeReport]) -> None:
        if reports:
            self._waiting.extend(reports)
            self._speak.set()
        if self.nodes.next_at < self._sleeps_until:
            self._retime.set()

    async def _keep_time(self) -> None:
        while True:
            self._put(self.nodes.due(self._clock()))
            self._retime.clear()
            self._sleeps_until = self.nodes.next_at
            pause = max(TICK_SECONDS, self._sleeps_until - self._clock())
            # Not wait_for: it may swallow a cancellation that coincides with the event.
            with suppress(TimeoutError):
                async with asyncio.timeout(None if pause == math.inf else pause):
                    await self._retime.wait()
            self._sleeps_until = -math.inf

    async def _speaker(self) -> None:
        while True:
            while not self._waiting:
                self._speak.clear()
                await self._speak.wait()
            reports = [self._waiting.popleft() for _ in range(min(len(self._waiting), self._pace.batch_max))]
            answers = await self._sink.say(reports)
            for report, answer in zip(reports, answers, strict=True):
                self._take(report, answer)
            refused = [
                report for report, answer in zip(reports, answers, strict=True) if answer is DriveTrouble.REFUSED
            ]
            await asyncio.gather(*(self._look_again(report) for report in refused))

    def _take(self, report: NodeReport, answer: Answer) -> None:
        if isinstance(answer, int):
            self._put(self.nodes.accepted(report, answer, self._clock()))
        elif answer is DriveTrouble.PASSING:
            self._postpone(report)

    async def _look_again(self, report: NodeReport) -> None:
        """Decide a refused report again from the current version; the machine counts the refusals."""
        found = await self._sink.look(report.work)
        if isinstance(found, DriveTrouble):
            self._postpone(report)
            return
        self.nodes.refused(report)
        if found is None or found.uid != report.work.uid:
            self.nodes.forget(report.work.uid)
        if found is not None:
            self.see(found)

    def _postpone(self, report: NodeReport) -> None:
        self.nodes.postponed(report, self._clock())
        self._put(())
