"""What a job does next: tables of what was seen and what follows."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bursar.core.objects.allocation import Phase
from bursar.core.objects.charge import Charge, Facts
from bursar.core.objects.job import (
    Boost,
    JobAttempt,
    JobMember,
    JobPhase,
    JobPlan,
    JobProgress,
    JobStep,
    all_turns,
    backoff,
    format_indexes,
    next_look,
    next_step,
    open_turns,
    parse_indexes,
    times,
    turn_name,
)

NOW = datetime(2024, 1, 15, 11, tzinfo=UTC)
EARLIER = NOW - timedelta(minutes=10)
PLAN = JobPlan(parallelism=2, completions=4, backoff_limit=1, deadline_seconds=3600)
BEGUN = JobProgress(started=2, active=2)
RUNNING = JobProgress(JobPhase.RUNNING, started=2, active=2, started_at=EARLIER)


def seen(*members: tuple[int, Phase] | tuple[int, int, Phase]) -> list[JobMember]:
    """`(index, phase)`, or `(index, attempt, phase)`."""
    found = []
    for one in members:
        index, attempt, phase = one if len(one) == 3 else (one[0], 0, one[1])
        found.append(JobMember(JobAttempt(index, attempt), phase))
    return found


def after(progress: JobProgress, *members: tuple[int, Phase] | tuple[int, int, Phase], plan: JobPlan = PLAN) -> JobStep:
    return next_step(plan, progress, seen(*members), NOW)


def test_while_its_allocations_wait_a_job_is_queued_and_there_is_nothing_to_do() -> None:
    assert after(BEGUN, (0, Phase.PENDING), (1, Phase.SCHEDULED)) == JobStep(BEGUN)


def test_it_runs_from_when_its_first_allocation_does() -> None:
    members = [JobMember(JobAttempt(0), Phase.RUNNING, EARLIER), JobMember(JobAttempt(1), Phase.PENDING)]
    progress = next_step(PLAN, BEGUN, members, NOW).progress
    assert (progress.phase, progress.started_at) == (JobPhase.RUNNING, EARLIER)


def test_it_has_run_also_when_everything_ended_before_anybody_looked() -> None:
    members = [JobMember(JobAttempt(0), Phase.SUCCEEDED, EARLIER), JobMember(JobAttempt(1), Phase.SUCCEEDED, NOW)]
    progress = next_step(PLAN, BEGUN, members, NOW).progress
    assert (progress.phase, progress.started_at, progress.succeeded) == (JobPhase.RUNNING, EARLIER, 2)


@pytest.mark.parametrize(
    ("members", "create"),
    [
        ([(0, Phase.SUCCEEDED), (1, Phase.RUNNING)], [JobAttempt(2)]),
        ([(0, Phase.SUCCEEDED), (1, Phase.SUCCEEDED)], [JobAttempt(2), JobAttempt(3)]),
        ([(0, Phase.FAILED), (1, Phase.RUNNING)], [JobAttempt(0, 1)]),
        ([(0, Phase.FAILED), (1, Phase.SUCCEEDED)], [JobAttempt(0, 1), JobAttempt(2)]),
        ([(0, Phase.CANCELLED), (1, Phase.RUNNING)], [JobAttempt(0, 1)]),
        # Preempted work waits again, or is about to.
        ([(0, Phase.PENDING), (1, Phase.TERMINATING)], []),
        # Somebody deleted one: it is made again, under the same name.
        ([(1, Phase.RUNNING)], [JobAttempt(0)]),
    ],
)
def test_what_is_made_next(members: list[tuple[int, Phase]], create: list[JobAttempt]) -> None:
    assert list(after(RUNNING, *members).create) == create


def test_no_more_are_made_than_are_still_needed() -> None:
    progress = JobProgress(JobPhase.RUNNING, started=4, completed=frozenset({0, 1, 2}), started_at=EARLIER)
    assert after(progress, (3, Phase.RUNNING)).create == ()


def test_an_end_is_counted_once_however_often_it_is_seen() -> None:
    first = after(RUNNING, (0, Phase.FAILED), (1, Phase.SUCCEEDED)).progress
    again = after(first, (0, Phase.FAILED), (1, Phase.SUCCEEDED)).progress
    assert (first.failed, first.succeeded) == (again.failed, again.succeeded) == (1, 1)
    assert list(open_turns(first)) == [JobAttempt(0, 1)]
    assert list(all_turns(first)) == [JobAttempt(0), JobAttempt(0, 1), JobAttempt(1)]


def test_enough_completions_end_it_and_the_rest_is_released() -> None:
    plan = JobPlan(parallelism=3, completions=1, backoff_limit=0)
    step = after(RUNNING, (0, Phase.SUCCEEDED), (1, Phase.RUNNING), (2, Phase.TERMINATING), plan=plan)
    assert (step.progress.phase, step.progress.ended_at) == (JobPhase.SUCCEEDED, NOW)
    assert (step.release, step.create, step.progress.active) == ((JobAttempt(1),), (), 1)


def test_one_failure_too_many_ends_it() -> None:
    members = [
        JobMember(JobAttempt(0), Phase.FAILED, why="train-0: OOMKilled"),
        JobMember(JobAttempt(1), Phase.RUNNING),
    ]
    once = next_step(PLAN, RUNNING, members, NOW)
    assert once.progress.phase is JobPhase.RUNNING
    twice = after(once.progress, (0, 1, Phase.FAILED), (1, Phase.RUNNING))
    assert (twice.progress.phase, twice.progress.reason) == (JobPhase.FAILED, "BackoffLimitExceeded")
    strict = next_step(replace(PLAN, backoff_limit=0), RUNNING, members, NOW)
    assert strict.progress.message == "1 allocation failed, backoffLimit is 0; last failure: train-0: OOMKilled"
    assert twice.progress.message == "2 allocations failed, backoffLimit is 1; last failure: train-0: OOMKilled"
    assert twice.release == (JobAttempt(1),)


def test_success_is_not_taken_away_by_failures_that_are_seen_with_it() -> None:
    plan = JobPlan(parallelism=2, completions=1, backoff_limit=0)
    assert after(RUNNING, (0, Phase.SUCCEEDED), (1, Phase.FAILED), plan=plan).progress.phase is JobPhase.SUCCEEDED


def test_the_deadline_runs_from_the_start() -> None:
    late = NOW - timedelta(seconds=PLAN.deadline_seconds)
    members = ((0, Phase.RUNNING), (1, Phase.PENDING))
    just_in_time = after(JobProgress(JobPhase.RUNNING, started=2, started_at=late + timedelta(seconds=1)), *members)
    assert just_in_time.progress.phase is JobPhase.RUNNING
    step = after(JobProgress(JobPhase.RUNNING, started=2, started_at=late), *members)
    assert (step.progress.phase, step.progress.reason) == (JobPhase.FAILED, "DeadlineExceeded")
    assert step.release == (JobAttempt(0), JobAttempt(1))
    # A job that waits is not late.
    assert after(BEGUN, (0, Phase.PENDING), (1, Phase.PENDING)).progress.phase is JobPhase.QUEUED


def test_a_cancelled_job_ends_when_the_last_allocation_is_gone() -> None:
    cancelling = JobProgress(JobPhase.CANCELLING, started=2, active=2, message="why")
    waiting = after(cancelling, (0, Phase.TERMINATING), (1, Phase.PENDING))
    assert (waiting.progress.phase, waiting.release, waiting.create) == (JobPhase.CANCELLING, (JobAttempt(1),), ())
    done = after(cancelling)
    assert (done.progress.phase, done.progress.active, done.progress.message) == (JobPhase.CANCELLED, 0, "why")


def test_what_was_deleted_and_has_finalizers_is_waited_for() -> None:
    deleting = JobProgress(JobPhase.CANCELLED, started=2, deleting=True)
    members = [JobMember(JobAttempt(0), Phase.CANCELLED, deleting=True), JobMember(JobAttempt(1), Phase.SUCCEEDED)]
    assert next_step(PLAN, deleting, members, NOW).release == (JobAttempt(1),)
    waits = next_step(PLAN, deleting, members[:1], NOW)
    assert (waits.release, waits.remove) == ((), False)
    assert next_step(PLAN, deleting, [], NOW).remove


def test_a_job_with_finalizers_is_not_removed_and_what_an_orphaning_one_made_stays() -> None:
    held = JobProgress(JobPhase.CANCELLED, started=2, deleting=True, held=True)
    assert next_step(PLAN, held, [], NOW) == JobStep(held)
    orphaning = JobProgress(JobPhase.RUNNING, started=2, active=2, started_at=EARLIER, deleting=True, orphaning=True)
    assert next_step(PLAN, orphaning, seen((0, Phase.RUNNING), (1, Phase.PENDING)), NOW) == JobStep(orphaning)


def test_a_deleted_job_takes_everything_with_it() -> None:
    progress = JobProgress(JobPhase.SUCCEEDED, started=2, completed=frozenset({0, 1}), deleting=True)
    step = after(progress, (0, Phase.SUCCEEDED), (1, Phase.TERMINATING))
    assert (step.release, step.remove) == ((JobAttempt(0),), False)
    assert after(progress).remove


def test_a_boost_ends_with_its_time_and_with_the_job() -> None:
    boost = Boost(500, NOW + timedelta(seconds=1))
    boosted = JobProgress(JobPhase.RUNNING, started=1, active=1, started_at=EARLIER, boost=boost)
    plan = JobPlan(1, 1, 0)
    assert next_step(plan, boosted, seen((0, Phase.RUNNING)), NOW).progress.boost == boost
    assert next_step(plan, boosted, seen((0, Phase.RUNNING)), boost.expires).progress.boost is None
    ended = next_step(plan, boosted, seen((0, Phase.SUCCEEDED)), NOW).progress
    assert (ended.boost, ended.settled) == (None, True)


def test_when_time_alone_changes_something() -> None:
    assert next_look(PLAN, BEGUN) is None
    assert next_look(PLAN, RUNNING) == EARLIER + timedelta(seconds=3600)
    soon = Boost(1, NOW)
    assert next_look(PLAN, JobProgress(JobPhase.RUNNING, started_at=EARLIER, boost=soon)) == NOW
    assert next_look(JobPlan(1, 1, 0), JobProgress(JobPhase.SUCCEEDED, started_at=EARLIER)) is None


def test_names() -> None:
    assert [turn_name("train", turn) for turn in (JobAttempt(0), JobAttempt(3), JobAttempt(3, 2))] == [
        "train-0",
        "train-3",
        "train-3-2",
    ]


def test_many_of_the_same_hold_so_many_times_as_much() -> None:
    charge = Charge(Facts(scoped=True), {"cpu": 8000, "pods": 1000})
    assert times(charge, 8) == Charge(Facts(scoped=True), {"cpu": 64_000, "pods": 8000})


@given(st.frozensets(st.integers(0, 300)))
def test_indexes_are_read_as_they_were_written(indexes: frozenset[int]) -> None:
    assert parse_indexes(format_indexes(indexes)) == indexes


def test_neighbours_are_written_as_a_range() -> None:
    assert format_indexes([5, 0, 1, 2, 7, 8]) == "0-2,5,7-8"


@given(st.data(), st.integers(1, 5), st.integers(1, 8), st.integers(0, 4))
def test_whatever_happens_it_ends_and_never_runs_more_at_once_than_it_may(
    data: st.DataObject, parallelism: int, completions: int, backoff_limit: int
) -> None:
    plan = JobPlan(parallelism, completions, backoff_limit)
    progress = JobProgress(started=plan.width, active=plan.width)
    there = dict.fromkeys((JobAttempt(index) for index in range(plan.width)), Phase.PENDING)
    outcomes = st.sampled_from([Phase.PENDING, Phase.RUNNING, Phase.SUCCEEDED, Phase.FAILED, None])
    for _ in range(200):
        step = next_step(plan, progress, [JobMember(turn, phase) for turn, phase in there.items()], NOW)
        assert not set(step.create) & set(there)
        there |= dict.fromkeys(step.create, Phase.PENDING)
        there = {turn: phase for turn, phase in there.items() if turn not in step.release}
        started = max([step.progress.started, *(turn.index + 1 for turn in step.create)])
        progress = JobProgress(
            step.progress.phase, started=started, completed=step.progress.completed, failures=step.progress.failures
        )
        live = [turn for turn, phase in there.items() if phase in (Phase.PENDING, Phase.RUNNING)]
        assert len(live) <= parallelism
        assert len({turn.index for turn in live}) == len(live)
        if progress.phase in (JobPhase.SUCCEEDED, JobPhase.FAILED):
            break
        moved = data.draw(outcomes)
        if live and moved is None:
            del there[live[0]]
        elif live and moved is not None:
            there[live[0]] = moved
    else:
        # Only one that is always put back or deleted goes on for ever.
        assert progress.succeeded < completions
    assert (progress.phase is JobPhase.SUCCEEDED) == (progress.succeeded >= completions)
    assert (progress.phase is JobPhase.FAILED) == (progress.failed > backoff_limit and progress.succeeded < completions)


# Trying again.


@pytest.mark.parametrize(
    ("base", "failures", "seconds"),
    [(10, 0, 0), (10, 1, 10), (10, 2, 20), (10, 3, 40), (10, 6, 320), (10, 7, 360), (10, 9999, 360), (0, 5, 0)],
)
def test_the_pause_before_a_retry_doubles_up_to_six_minutes(base: int, failures: int, seconds: int) -> None:
    assert backoff(base, failures) == seconds


PATIENT = JobPlan(parallelism=2, completions=4, backoff_limit=5, backoff_seconds=10)


def test_what_failed_is_tried_again_after_a_pause_and_the_rest_goes_on() -> None:
    progress = JobProgress(JobPhase.RUNNING, started=3, completed=frozenset({1}), active=2, started_at=EARLIER)
    step = after(progress, (0, Phase.FAILED), (2, Phase.RUNNING), plan=PATIENT)
    assert step.create == (JobAttempt(3),)
    assert step.progress.retry_at == NOW + timedelta(seconds=10) == next_look(PATIENT, step.progress)
    later = next_step(PATIENT, step.progress, seen((2, Phase.RUNNING)), NOW + timedelta(seconds=10))
    assert later.create == (JobAttempt(0, 1),)
    assert later.progress.retry_at is None


GANG = JobPlan(parallelism=3, completions=3, backoff_limit=1, as_set=True)
GANG_RUNS = JobProgress(JobPhase.RUNNING, started=3, active=3, started_at=EARLIER)


def test_a_set_waits_for_its_last_member_before_it_is_tried_again() -> None:
    step = after(GANG_RUNS, (0, Phase.SUCCEEDED), (1, Phase.FAILED), (2, Phase.TERMINATING), plan=GANG)
    assert step.create == ()
    assert (step.progress.failed, step.progress.succeeded) == (1, 0)
    again = after(step.progress, (2, Phase.FAILED), plan=GANG)
    assert again.create == (JobAttempt(0, 1), JobAttempt(1, 1), JobAttempt(2, 1))
    assert again.progress.failed == 1
    assert set(open_turns(again.progress)) == set(again.create)


def test_members_of_a_set_that_fail_together_are_one_failure() -> None:
    step = after(GANG_RUNS, (0, Phase.FAILED), (1, Phase.FAILED), (2, Phase.FAILED), plan=GANG)
    assert (step.progress.failed, len(step.create)) == (1, 3)
    last = after(step.progress, *((index, 1, Phase.FAILED) for index in range(3)), plan=GANG)
    assert (last.progress.phase, last.progress.failed) == (JobPhase.FAILED, 2)


def test_a_member_that_was_stopped_for_another_is_no_failure_of_the_job() -> None:
    plan = JobPlan(parallelism=2, completions=4, backoff_limit=1)
    members = [
        JobMember(JobAttempt(0), Phase.FAILED, why="own"),
        JobMember(JobAttempt(1), Phase.FAILED, why="other", spared=True),
    ]
    step = next_step(plan, RUNNING, members, NOW)
    assert (step.progress.failed, step.progress.message) == (1, "own")
    assert step.create == (JobAttempt(0, 1), JobAttempt(1, 1))
