"""Indexed jobs: the progress of a job, and the next step of its controller.

A job is a number of completions, each with an index. One allocation works on an index at a time; after a failure
another attempt follows, under its own name. Every end is counted once, by its index and attempt, however often the
controller observes it, and stays counted after the allocation is deleted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from enum import StrEnum
from itertools import islice

from bursar.core.objects.allocation import ENDED, Phase
from bursar.core.objects.charge import Charge
from bursar.core.values.wording import counted


class JobPhase(StrEnum):
    """The phase of a job."""

    QUEUED = "Queued"  # none of its allocations has run yet
    RUNNING = "Running"  # at least one of its allocations has run
    CANCELLING = "Cancelling"  # its allocations are being stopped
    SUCCEEDED = "Succeeded"  # every index has succeeded
    FAILED = "Failed"  # it exceeded its backoff limit or its deadline
    CANCELLED = "Cancelled"  # it was cancelled, and nothing of it runs


BACKOFF_SECONDS_MAX = 360

JOB_ENDED = frozenset({JobPhase.SUCCEEDED, JobPhase.FAILED, JobPhase.CANCELLED})


@dataclass(frozen=True, slots=True)
class JobPlan:
    """The specification of a job. `deadline_seconds` 0 means no deadline, `backoff_seconds` 0 no pause before a retry.

    With `as_set` its allocations are one gang: when one fails, all are retried.
    """

    parallelism: int
    completions: int
    backoff_limit: int
    deadline_seconds: int = 0
    backoff_seconds: int = 0
    as_set: bool = False

    @property
    def width(self) -> int:
        """The number of allocations that a job begins with."""
        return min(self.parallelism, self.completions)


@dataclass(frozen=True, slots=True)
class Boost:
    """A temporary priority that replaces the job's own until it expires."""

    priority: int
    expires: datetime


@dataclass(frozen=True, slots=True)
class JobProgress:
    """The progress of a job. Indexes below `started` were begun; `failures` counts the failed attempts of each.

    Of these attempts, `spared` were stopped because another one failed: they do not count towards the backoff limit.
    """

    phase: JobPhase = JobPhase.QUEUED
    reason: str = ""
    message: str = ""
    started: int = 0
    completed: frozenset[int] = frozenset()
    failures: Mapping[int, int] = field(default_factory=dict)
    spared: int = 0
    retry_at: datetime | None = None  # no retry before
    active: int = 0
    started_at: datetime | None = None
    ended_at: datetime | None = None
    boost: Boost | None = None
    deleting: bool = False
    held: bool = False  # while it is being deleted: it has finalizers
    orphaning: bool = False  # its allocations remain after its deletion
    frozen: bool = False  # its approval has ended: what exists goes on, and no allocation is created

    @property
    def succeeded(self) -> int:
        return len(self.completed)

    @property
    def failed(self) -> int:
        return sum(self.failures.values()) - self.spared

    @property
    def attempt(self) -> int:
        """The current attempt of a job with `as_set`, from 0."""
        return max(self.failures.values(), default=0)

    @property
    def settled(self) -> bool:
        """Whether the job needs no further steps."""
        return self.phase in JOB_ENDED and not self.active and self.boost is None and not self.deleting


@dataclass(frozen=True, slots=True, order=True)
class JobAttempt:
    """One attempt at one index of a job: each allocation of a job is one."""

    index: int
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class JobMember:
    """An allocation of the job as the controller observed it."""

    turn: JobAttempt
    phase: Phase
    started_at: datetime | None = None
    why: str = ""  # how it ended, in words
    spared: bool = False  # it was stopped because another member failed
    deleting: bool = False


@dataclass(frozen=True, slots=True)
class JobStep:
    """The next step of a job: allocations to create and to release, and the progress after it.

    `progress.active` does not count the allocations of `create` and `release`: the caller adds those that succeeded.
    `remove` says that the deletion of the job can complete.
    """

    progress: JobProgress
    create: tuple[JobAttempt, ...] = ()
    release: tuple[JobAttempt, ...] = ()
    remove: bool = False


# Names.


def turn_name(job: str, turn: JobAttempt) -> str:
    """The name of an attempt's allocation: `train-3`, and `train-3-1` for its first retry."""
    return f"{job}-{turn.index}" + (f"-{turn.attempt}" if turn.attempt else "")


def open_turns(progress: JobProgress) -> Iterator[JobAttempt]:
    """The attempts whose outcome is not counted yet: for each, at most one allocation exists."""
    for index in range(progress.started):
        if index not in progress.completed:
            yield JobAttempt(index, progress.failures.get(index, 0))


def all_turns(progress: JobProgress) -> Iterator[JobAttempt]:
    """All attempts ever made, and so all names that allocations of the job can have."""
    for index in range(progress.started):
        for attempt in range(progress.failures.get(index, 0) + 1):
            yield JobAttempt(index, attempt)


# The next step.


def next_step(plan: JobPlan, progress: JobProgress, members: Sequence[JobMember], now: datetime) -> JobStep:
    """Count ended allocations, update the job's phase, and decide which allocations to create and release.

    `members` are the existing allocations of open attempts or, of a job that is being deleted, of all its attempts.
    The observation may be old: ends are final, and the next step observes the rest.
    """
    live = [one for one in members if one.phase not in ENDED]
    progress = observed(plan, progress, members, now)
    if progress.boost is not None and (progress.phase in JOB_ENDED or progress.boost.expires <= now):
        progress = replace(progress, boost=None)
    if progress.orphaning:
        return JobStep(progress)
    if progress.deleting:
        release = _releasable(members)
    elif progress.phase in JOB_ENDED or progress.phase is JobPhase.CANCELLING:
        release = _releasable(live)
    elif progress.frozen:
        return JobStep(_without_more(plan, progress, len(live), now))
    else:
        progress = replace(progress, active=len(live), retry_at=_pending_retry(progress, now))
        return JobStep(progress, create=tuple(_wanted(plan, progress, live)))
    stopping = sum(one.phase is Phase.TERMINATING for one in live)
    gone = progress.deleting and not progress.held and not members
    return JobStep(replace(progress, active=stopping), release=release, remove=gone)


def observed(plan: JobPlan, progress: JobProgress, members: Sequence[JobMember], now: datetime) -> JobProgress:
    """The progress of a job after an observation of its members."""
    counted = _counted_as_set(progress, members) if plan.as_set else _counted(progress, members)
    if counted.failed > progress.failed:
        counted = replace(counted, retry_at=_next_try(plan, progress, counted, now))
    progress = _started(counted, members, now)
    return _judged(plan, progress, any(one.phase not in ENDED for one in members), now)


def _counted(progress: JobProgress, members: Iterable[JobMember]) -> JobProgress:
    completed, failures, spared = set(progress.completed), dict(progress.failures), progress.spared
    message = progress.message
    for one in members:
        index, attempt = one.turn.index, one.turn.attempt
        if one.phase not in ENDED or index in completed or attempt != failures.get(index, 0):
            continue
        if one.phase is Phase.SUCCEEDED:
            completed.add(index)
        else:
            failures[index] = attempt + 1
            spared += one.spared
            message = message if one.spared else one.why or message
    if len(completed) == progress.succeeded and failures == progress.failures:
        return progress
    return replace(progress, completed=frozenset(completed), failures=failures, spared=spared, message=message)


def _counted_as_set(progress: JobProgress, members: Sequence[JobMember]) -> JobProgress:
    """Count a failure as the failure of all: ends in the same attempt, also successes, no longer count, and all indexes
    have the same number of attempts once the last of them has ended."""
    attempt, completed, failures = progress.attempt, set(progress.completed), dict(progress.failures)
    ended = [one for one in members if one.phase in ENDED and one.turn.attempt == attempt]
    completed |= {one.turn.index for one in ended if one.phase is Phase.SUCCEEDED}
    failed = [one for one in ended if one.turn.index not in completed]
    if failed:
        attempt += 1
    if attempt:
        live = {one.turn.index for one in members if one.phase not in ENDED}
        again = [index for index in range(progress.started) if failures.get(index, 0) < attempt and index not in live]
        failures |= dict.fromkeys(again, attempt)
        completed -= set(again)
    why = next((one.why for one in failed if one.why and not one.spared), progress.message)
    if len(completed) == progress.succeeded and failures == progress.failures:
        return progress
    spared = sum(failures.values()) - attempt
    return replace(progress, completed=frozenset(completed), failures=failures, spared=spared, message=why)


def _started(progress: JobProgress, members: Iterable[JobMember], now: datetime) -> JobProgress:
    """Mark a job as running once its first allocation has run, even if that ended before it was observed."""
    if progress.phase is not JobPhase.QUEUED:
        return progress
    ran = [one.started_at or now for one in members if one.phase is Phase.RUNNING or one.started_at is not None]
    if not ran and not progress.completed:
        return progress
    return replace(progress, phase=JobPhase.RUNNING, started_at=min(ran, default=now))


def _judged(plan: JobPlan, progress: JobProgress, live: bool, now: datetime) -> JobProgress:
    """Decide whether the job has ended, and in which phase."""
    if progress.phase in JOB_ENDED:
        return progress
    if progress.phase is JobPhase.CANCELLING:
        return progress if live else _ended(progress, JobPhase.CANCELLED, now, progress.reason, progress.message)
    if progress.succeeded >= plan.completions:
        return _ended(progress, JobPhase.SUCCEEDED, now)
    if progress.failed > plan.backoff_limit:
        last = f"; last failure: {progress.message}" if progress.message else ""
        words = f"{counted(progress.failed, 'allocation')} failed, backoffLimit is {plan.backoff_limit}{last}"
        return _ended(progress, JobPhase.FAILED, now, "BackoffLimitExceeded", words)
    if (end := deadline(plan, progress)) is not None and end <= now:
        words = f"ran longer than activeDeadlineSeconds, {plan.deadline_seconds} s"
        return _ended(progress, JobPhase.FAILED, now, "DeadlineExceeded", words)
    return progress


def _ended(progress: JobProgress, phase: JobPhase, now: datetime, reason: str = "", message: str = "") -> JobProgress:
    return replace(progress, phase=phase, reason=reason, message=message, ended_at=now, retry_at=None)


def _without_more(plan: JobPlan, progress: JobProgress, live: int, now: datetime) -> JobProgress:
    """The progress of a job that gets no more allocations: it fails when the last one has ended."""
    progress = replace(progress, active=live, retry_at=None)
    if live:
        return progress
    done = f"{progress.succeeded} of {plan.completions} succeeded"
    words = f"its approval has ended, so it gets no more allocations: {done}"
    return _ended(progress, JobPhase.FAILED, now, "ApprovalEnded", words)


def _releasable(members: Iterable[JobMember]) -> tuple[JobAttempt, ...]:
    """The members to release: not those that are being stopped already, nor ended ones with finalizers."""
    return tuple(
        one.turn for one in members if one.phase is not Phase.TERMINATING and not (one.deleting and one.phase in ENDED)
    )


def _wanted(plan: JobPlan, progress: JobProgress, live: Sequence[JobMember]) -> Iterator[JobAttempt]:
    """The attempts to create allocations for: first retries, then new indexes. A set is retried when all its members
    have ended."""
    if plan.as_set and any(one.turn.attempt < progress.attempt for one in live):
        return
    capacity = min(plan.parallelism, plan.completions - progress.succeeded) - len(live)
    working = {one.turn.index for one in live}
    again = (
        turn
        for turn in open_turns(progress)
        if turn.index not in working and not (turn.attempt and progress.retry_at is not None)
    )
    new = (JobAttempt(index) for index in range(progress.started, plan.completions))
    yield from islice((turn for turns in (again, new) for turn in turns), max(0, capacity))


# Retries.


def backoff(base_seconds: int, failures: int) -> int:
    """Exponential backoff: the pause doubles with each failure, up to a bound."""
    return min(base_seconds << min(failures - 1, 16), BACKOFF_SECONDS_MAX) if failures > 0 else 0


def _next_try(plan: JobPlan, before: JobProgress, counted: JobProgress, now: datetime) -> datetime | None:
    """The time of the next retry: after the longest pause of the new failures, and never earlier than set before."""
    tries = max(
        (count for index, count in counted.failures.items() if count > before.failures.get(index, 0)), default=0
    )
    pause = backoff(plan.backoff_seconds, tries)
    later = now + timedelta(seconds=pause) if pause else None
    return max((at for at in (before.retry_at, later) if at is not None), default=None)


def _pending_retry(progress: JobProgress, now: datetime) -> datetime | None:
    return progress.retry_at if progress.retry_at is not None and progress.retry_at > now else None


# Timers.


def deadline(plan: JobPlan, progress: JobProgress) -> datetime | None:
    """The time by `activeDeadlineSeconds` at which a running job fails; None without one."""
    if not plan.deadline_seconds or progress.started_at is None or progress.phase in JOB_ENDED:
        return None
    return progress.started_at + timedelta(seconds=plan.deadline_seconds)


def next_look(plan: JobPlan, progress: JobProgress) -> datetime | None:
    """The next time at which the job needs a step although none of its allocations changed."""
    boosted_until = progress.boost.expires if progress.boost is not None else None
    ends = (deadline(plan, progress), boosted_until, progress.retry_at)
    return min((end for end in ends if end is not None), default=None)


# Charges.


def times(charge: Charge, count: int) -> Charge:
    """The charge of this many equal allocations together."""
    return replace(charge, accepted={name: amount * count for name, amount in charge.accepted.items()})


# The text form of index sets.


def format_indexes(indexes: Iterable[int]) -> str:
    """Format indexes as sorted ranges: `0-3,5`."""
    ranges: list[list[int]] = []
    for index in sorted(indexes):
        if ranges and ranges[-1][1] == index - 1:
            ranges[-1][1] = index
        else:
            ranges.append([index, index])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)


def parse_indexes(text: str) -> frozenset[int]:
    """Parse the ranges that `format_indexes` writes."""
    indexes: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        indexes.update(range(int(first), int(last or first) + 1))
    return frozenset(indexes)
