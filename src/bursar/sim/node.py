"""The pure state machine of simulated REST nodes: versions of allocations in, reports out; `now` is an argument.

A node reports each allocation bound to it as Running, and later its end. It has one report per allocation in flight.
All nodes of a simulation share one machine and one timer heap.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection
from dataclasses import dataclass, field

from bursar.core.objects.allocation import Phase
from bursar.sim.work import SimWork

EXPIRED = "Expired"
# Retries of a refused report for the same version of an allocation. A newer version starts again.
REFUSALS_MAX = 4
PAUSE_SECONDS_MIN = 0.1
PAUSE_SECONDS_MAX = 5.0


@dataclass(frozen=True, slots=True, eq=False)
class NodeReport:
    """A node's report of an allocation."""

    node: str
    work: SimWork
    phase: Phase
    reason: str = ""
    exit_code: int | None = None


@dataclass(slots=True)
class _Run:
    """One allocation on one node."""

    started: bool = False
    stopping: bool = False
    ends_at: float = math.inf
    quiet_until: float = -math.inf  # backoff after a passing error
    asked: NodeReport | None = None  # the report in flight
    refusals: int = 0
    troubles: int = 0
    due_at: float = math.inf  # the valid entry in the heap; others are stale


@dataclass(slots=True)
class _Held:
    """The newest known version of an allocation, and its runs by node.

    It is kept after its last run until the feed has caught up: until then the feed delivers older versions.
    """

    work: SimWork
    revision: int
    runs: dict[str, _Run] = field(default_factory=dict)


class Nodes:
    """The named nodes, or all. Without `default_seconds`, work without a run time of its own runs until its ttl, or for
    ever. `stop_seconds` is how long stopping takes, at most the grace."""

    def __init__(
        self, names: Collection[str] | None = None, *, default_seconds: float | None = None, stop_seconds: float = 0.0
    ) -> None:
        self._names = None if names is None else frozenset(names)
        self._default_seconds = default_seconds
        self._stop_seconds = stop_seconds
        self._held: dict[str, _Held] = {}
        self._heap: list[tuple[float, str, str]] = []  # (when, uid, node)
        self.ended = 0  # allocations that have left the last of our nodes

    # Events.

    def see(self, work: SimWork, now: float) -> list[NodeReport]:
        """Process a version of an allocation; older versions than the known one are skipped."""
        here = self.ours(work.nodes)
        held = self._held.get(work.uid)
        if held is None:
            if not here:
                return []
            held = self._held[work.uid] = _Held(work, work.revision)
        elif work.revision < held.revision:
            return []
        if work.revision > held.work.revision:
            self._advance(held, work)
        held.work, held.revision = work, work.revision
        self._end(held, [one for one in held.runs if one not in here])
        if not here:
            del self._held[work.uid]
        reports: list[NodeReport] = []
        for node in here:
            run = held.runs.setdefault(node, _Run())
            self._adopt(run, work, now)
            reports += self._next(held, node, run, now)
        return reports

    def forget(self, uid: str) -> None:
        """The allocation is gone."""
        if (held := self._held.pop(uid, None)) is not None:
            self._end(held, list(held.runs))

    def keep(self, uids: Collection[str]) -> None:
        """After a full list: forget allocations that it does not name."""
        for uid in self._held.keys() - set(uids):
            self.forget(uid)

    def knows(self, uid: str) -> bool:
        return uid in self._held

    def ours(self, nodes: Collection[str]) -> Collection[str]:
        return nodes if self._names is None else [one for one in nodes if one in self._names]

    def accepted(self, report: NodeReport, revision: int, now: float) -> list[NodeReport]:
        """A report was committed with this revision, or changed nothing."""
        held, run = self._asked(report)
        if held is None or run is None:
            return []
        held.revision = max(held.revision, revision)
        run.asked, run.refusals, run.troubles = None, 0, 0
        if report.phase is not Phase.RUNNING:
            self._end(held, [report.node])
            return []
        if not run.started:
            run.started = True
            if not run.stopping:
                run.ends_at = now + self._seconds(held.work)
        return self._next(held, report.node, run, now)

    def refused(self, report: NodeReport) -> None:
        """A report was refused because the allocation has changed; `see` of the current version continues."""
        _, run = self._asked(report)
        if run is not None:
            run.asked = None
            run.refusals += 1

    def postponed(self, report: NodeReport, now: float) -> None:
        """A report failed with a passing error: retry it with backoff."""
        held, run = self._asked(report)
        if held is None or run is None:
            return
        run.asked = None
        run.quiet_until = now + min(PAUSE_SECONDS_MAX, PAUSE_SECONDS_MIN * 2**run.troubles)
        run.troubles = min(run.troubles + 1, 10)
        self._next(held, report.node, run, now)

    def due(self, now: float) -> list[NodeReport]:
        """The reports whose time has come."""
        reports: list[NodeReport] = []
        while self._heap and self._heap[0][0] <= now:
            at, uid, node = heapq.heappop(self._heap)
            held = self._held.get(uid)
            run = held.runs.get(node) if held else None
            if held is not None and run is not None and run.due_at == at:
                run.due_at = math.inf
                reports += self._next(held, node, run, now)
        return reports

    # Queries.

    @property
    def next_at(self) -> float:
        """The earliest timer of `due`."""
        return self._heap[0][0] if self._heap else math.inf

    @property
    def running(self) -> int:
        """The number of running allocations."""
        return sum(any(run.started for run in held.runs.values()) for held in self._held.values())

    # The rules.

    def _advance(self, held: _Held, work: SimWork) -> None:
        """A newer version clears refusals; a newer epoch starts with new runs."""
        if work.epoch != held.work.epoch:
            held.runs.clear()
        for run in held.runs.values():
            run.refusals = 0

    def _end(self, held: _Held, nodes: Collection[str]) -> None:
        """Remove the runs of these nodes."""
        for node in nodes:
            del held.runs[node]
        self.ended += bool(nodes) and not held.runs

    def _adopt(self, run: _Run, work: SimWork, now: float) -> None:
        """Adopt a run that an earlier simulation started, or stop it."""
        if work.phase is Phase.RUNNING and not run.started and run.asked is None:
            run.started = True
            run.ends_at = (now if work.started_at is None else work.started_at) + self._seconds(work)
        if work.phase is Phase.TERMINATING:
            grace = self._stop_seconds if work.grace_seconds is None else work.grace_seconds
            stops_at = now + min(grace, self._stop_seconds)
            # A repeated request never takes longer.
            run.ends_at = min(run.ends_at, stops_at) if run.stopping else stops_at
            run.stopping = True

    def _seconds(self, work: SimWork) -> float:
        """The run time: its own or the default, at most its ttl."""
        return min(self._wished_seconds(work), math.inf if work.ttl_seconds is None else work.ttl_seconds)

    def _wished_seconds(self, work: SimWork) -> float:
        if work.seconds is not None:
            return work.seconds
        return math.inf if self._default_seconds is None else self._default_seconds

    def _next(self, held: _Held, node: str, run: _Run, now: float) -> list[NodeReport]:
        """The next report if it is due; else its timer is pushed."""
        if run.asked is not None or run.refusals > REFUSALS_MAX:
            return []
        due_at = run.ends_at if run.started or run.stopping else -math.inf
        at = max(due_at, run.quiet_until)
        if at <= now:
            run.asked = self._report(held.work, node, run)
            return [run.asked]
        if at not in (math.inf, run.due_at):
            run.due_at = at
            heapq.heappush(self._heap, (at, held.work.uid, node))
        return []

    def _report(self, work: SimWork, node: str, run: _Run) -> NodeReport:
        if run.stopping:
            if work.deleted:
                return NodeReport(node, work, Phase.CANCELLED)
            return NodeReport(node, work, Phase.FAILED, work.reason)
        if not run.started:
            return NodeReport(node, work, Phase.RUNNING)
        if self._seconds(work) < self._wished_seconds(work):
            return NodeReport(node, work, Phase.FAILED, EXPIRED)
        if work.exit_code:
            return NodeReport(node, work, Phase.FAILED, exit_code=work.exit_code)
        return NodeReport(node, work, Phase.SUCCEEDED, exit_code=0)

    def _asked(self, report: NodeReport) -> tuple[_Held | None, _Run | None]:
        """The run that waits for the answer to this report, unless it was superseded."""
        held = self._held.get(report.work.uid)
        run = held.runs.get(report.node) if held else None
        return (held, run) if run is not None and run.asked is report else (None, None)
