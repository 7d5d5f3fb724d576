"""The shell around the machine of simulated nodes, whichever way the server is reached.

It keeps time, and hands out what is to be said to a few speakers. Reports are said many at a time where the way allows
it, and never more than so many at once: however much is bound, the rest waits here and not at the server.
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

# Due times are met to the hundredth of a second: what ends together is reported together.
TICK_SECONDS = 0.01


class DriveTrouble(Enum):
    REFUSED = "refused"  # something has changed: look again
    PASSING = "passing"  # try again a little later


# The revision that an accepted report was committed with, or why it was not.
Answer: TypeAlias = int | DriveTrouble


class Way(Protocol):
    """How the server is reached."""

    async def say(self, reports: Sequence[NodeReport], /) -> Sequence[Answer]:
        """Make reports; their answers, in order."""

    async def look(self, work: SimWork, /) -> SimWork | DriveTrouble | None:
        """The allocation of this name as it is now; None when there is none."""


@dataclass(frozen=True, slots=True)
class SimPace:
    """How many batches of reports are under way at a time, and how big each may be."""

    speakers: int
    batch_max: int


class Drive:
    def __init__(self, nodes: Nodes, way: Way, pace: SimPace, clock: Callable[[], float] = time.time) -> None:
        self.nodes = nodes
        self._way = way
        self._pace = pace
        self._clock = clock
        self._waiting: deque[NodeReport] = deque()
        self._speak = asyncio.Event()
        self._retime = asyncio.Event()
        self._sleeps_until = math.inf

    def see(self, work: SimWork) -> None:
        self._put(self.nodes.see(work, self._clock()))

    async def run(self) -> None:
        """Speak and keep time until cancelled."""
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
            # Not wait_for: it may swallow a cancellation that comes together with what it waits for.
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
            answers = await self._way.say(reports)
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
        """What was refused is decided anew from what stands now; the machine counts how often."""
        found = await self._way.look(report.work)
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
