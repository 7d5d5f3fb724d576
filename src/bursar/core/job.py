"""A job as the rules see it: how far it is, and what its next step is.

A job is a number of completions, each with an index. One allocation works on an index at a time; one that fails is
followed by another try, under a name of its own. So an end is counted once, by its index and try, whoever looks at it
and however often, and what is counted stays counted when the allocation itself is long gone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from enum import StrEnum
from itertools import islice

from bursar.core.allocation import ENDED, Phase
from bursar.core.charge import Charge


class JobPhase(StrEnum):
    QUEUED = "Queued"
    RUNNING = "Running"
    CANCELLING = "Cancelling"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    CANCELLED = "Cancelled"


JOB_ENDED = frozenset({JobPhase.SUCCEEDED, JobPhase.FAILED, JobPhase.CANCELLED})


@dataclass(frozen=True, slots=True)
class Plan:
    """What a job asks for; `deadline_seconds` 0 is no deadline."""

    parallelism: int
    completions: int
    backoff_limit: int
    deadline_seconds: int = 0

    @property
    def width(self) -> int:
        """How many allocations a job begins with."""
        return min(self.parallelism, self.completions)


@dataclass(frozen=True, slots=True)
class Boost:
    """A priority that replaces the job's own until it expires."""

    priority: int
    expires: datetime


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a job is. Indexes below `started` were worked on; `failures` counts the tries of each that failed."""

    phase: JobPhase = JobPhase.QUEUED
    reason: str = ""
    message: str = ""
    started: int = 0
    completed: frozenset[int] = frozenset()
    failures: Mapping[int, int] = field(default_factory=dict)
    active: int = 0
    started_at: datetime | None = None
    ended_at: datetime | None = None
    boost: Boost | None = None
    deleting: bool = False

    @property
    def succeeded(self) -> int:
        return len(self.completed)

    @property
    def failed(self) -> int:
        return sum(self.failures.values())

    @property
    def settled(self) -> bool:
        """Whether nothing will happen to the job any more."""
        return self.phase in JOB_ENDED and not self.active and self.boost is None and not self.deleting


@dataclass(frozen=True, slots=True, order=True)
class Turn:
    """One try at one index: what an allocation of a job is."""

    index: int
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class Member:
    """An allocation of the job as it was seen."""

    turn: Turn
    phase: Phase
    started_at: datetime | None = None
    why: str = ""  # how it ended, in words


@dataclass(frozen=True, slots=True)
class Step:
    """What to do next: allocations to make and to release, and how far the job then is.

    `progress.active` leaves out what is released or made: who does that knows what became of it. `remove` says that a
    deleted job has nothing left to wait for.
    """

    progress: Progress
    create: tuple[Turn, ...] = ()
    release: tuple[Turn, ...] = ()
    remove: bool = False


# Names.


def turn_name(job: str, turn: Turn) -> str:
    """`train-3`, and `train-3-1` for the first try after it failed."""
    return f"{job}-{turn.index}" + (f"-{turn.attempt}" if turn.attempt else "")


def open_turns(progress: Progress) -> Iterator[Turn]:
    """The turns whose outcome is not counted yet: at most one allocation each exists."""
    for index in range(progress.started):
        if index not in progress.completed:
            yield Turn(index, progress.failures.get(index, 0))


def all_turns(progress: Progress) -> Iterator[Turn]:
    """Every turn there ever was, and so every name that an allocation of the job may have."""
    for index in range(progress.started):
        for attempt in range(progress.failures.get(index, 0) + 1):
            yield Turn(index, attempt)


# What comes next.


def next_step(plan: Plan, progress: Progress, members: Sequence[Member], now: datetime) -> Step:
    """Count what ended, judge the job by it, and say what is to be made and released.

    `members` are the allocations that exist of the turns that are open, or, of a job that is being deleted, of all its
    turns. That one of them has moved on since does no harm: nothing comes back from an end, and the rest is seen next
    time.
    """
    live = [one for one in members if one.phase not in ENDED]
    progress = observed(plan, progress, members, now)
    if progress.boost is not None and (progress.phase in JOB_ENDED or progress.boost.expires <= now):
        progress = replace(progress, boost=None)
    if progress.deleting:
        release = _releasable(members)
    elif progress.phase in JOB_ENDED or progress.phase is JobPhase.CANCELLING:
        release = _releasable(live)
    else:
        progress = replace(progress, active=len(live))
        return Step(progress, create=tuple(_wanted(plan, progress, live)))
    stopping = sum(one.phase is Phase.TERMINATING for one in live)
    return Step(replace(progress, active=stopping), release=release, remove=progress.deleting and not members)


def observed(plan: Plan, progress: Progress, members: Sequence[Member], now: datetime) -> Progress:
    """How far a job is by what was seen of its members."""
    progress = _started(_counted(progress, members), members, now)
    return _judged(plan, progress, any(one.phase not in ENDED for one in members), now)


def _counted(progress: Progress, members: Iterable[Member]) -> Progress:
    completed, failures = set(progress.completed), dict(progress.failures)
    message = progress.message
    for one in members:
        index, attempt = one.turn.index, one.turn.attempt
        if one.phase not in ENDED or index in completed or attempt != failures.get(index, 0):
            continue
        if one.phase is Phase.SUCCEEDED:
            completed.add(index)
        else:
            failures[index] = attempt + 1
            message = one.why or message
    if len(completed) == progress.succeeded and failures == progress.failures:
        return progress
    return replace(progress, completed=frozenset(completed), failures=failures, message=message)


def _started(progress: Progress, members: Iterable[Member], now: datetime) -> Progress:
    """A job runs from when the first of its allocations does, also if that one ended before anybody looked."""
    if progress.phase is not JobPhase.QUEUED:
        return progress
    ran = [one.started_at or now for one in members if one.phase is Phase.RUNNING or one.started_at is not None]
    if not ran and not progress.completed:
        return progress
    return replace(progress, phase=JobPhase.RUNNING, started_at=min(ran, default=now))


def _judged(plan: Plan, progress: Progress, live: bool, now: datetime) -> Progress:
    """Whether the job has come to an end, and to which."""
    if progress.phase in JOB_ENDED:
        return progress
    if progress.phase is JobPhase.CANCELLING:
        return progress if live else _ended(progress, JobPhase.CANCELLED, now, progress.reason, progress.message)
    if progress.succeeded >= plan.completions:
        return _ended(progress, JobPhase.SUCCEEDED, now)
    if progress.failed > plan.backoff_limit:
        last = f"; the last one: {progress.message}" if progress.message else ""
        words = f"{progress.failed} allocations failed, backoffLimit is {plan.backoff_limit}{last}"
        return _ended(progress, JobPhase.FAILED, now, "BackoffLimitExceeded", words)
    if (end := deadline(plan, progress)) is not None and end <= now:
        words = f"ran longer than activeDeadlineSeconds, {plan.deadline_seconds} s"
        return _ended(progress, JobPhase.FAILED, now, "DeadlineExceeded", words)
    return progress


def _ended(progress: Progress, phase: JobPhase, now: datetime, reason: str = "", message: str = "") -> Progress:
    return replace(progress, phase=phase, reason=reason, message=message, ended_at=now)


def _releasable(members: Iterable[Member]) -> tuple[Turn, ...]:
    """What is being stopped already is waited for."""
    return tuple(one.turn for one in members if one.phase is not Phase.TERMINATING)


def _wanted(plan: Plan, progress: Progress, live: Sequence[Member]) -> Iterator[Turn]:
    """Turns to make allocations for: first what must be done again, then what was never begun."""
    room = min(plan.parallelism, plan.completions - progress.succeeded) - len(live)
    working = {one.turn.index for one in live}
    again = (turn for turn in open_turns(progress) if turn.index not in working)
    new = (Turn(index) for index in range(progress.started, plan.completions))
    yield from islice((turn for turns in (again, new) for turn in turns), max(0, room))


# When to look again.


def deadline(plan: Plan, progress: Progress) -> datetime | None:
    if not plan.deadline_seconds or progress.started_at is None or progress.phase in JOB_ENDED:
        return None
    return progress.started_at + timedelta(seconds=plan.deadline_seconds)


def next_look(plan: Plan, progress: Progress) -> datetime | None:
    """When time alone will have changed something."""
    ends = (deadline(plan, progress), progress.boost.expires if progress.boost is not None else None)
    return min((end for end in ends if end is not None), default=None)


# What it is charged.


def times(charge: Charge, count: int) -> Charge:
    """What so many of the same hold together."""
    return replace(charge, accepted={name: amount * count for name, amount in charge.accepted.items()})


# How indexes are written.


def format_indexes(indexes: Iterable[int]) -> str:
    """`0-3,5`: sorted, neighbours as a range."""
    ranges: list[list[int]] = []
    for index in sorted(indexes):
        if ranges and ranges[-1][1] == index - 1:
            ranges[-1][1] = index
        else:
            ranges.append([index, index])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)


def parse_indexes(text: str) -> frozenset[int]:
    indexes: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        indexes.update(range(int(first), int(last or first) + 1))
    return frozenset(indexes)
