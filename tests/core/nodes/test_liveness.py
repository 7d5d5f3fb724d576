"""Whether nodes are alive: tables of what is said when, and properties that hold for any cluster."""

import math
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bursar.core.nodes.liveness import (
    Liveness,
    LivenessVerdict,
    OnLost,
    Patience,
    SeenHeartbeat,
    Sighting,
    gone_at,
    judge,
    requeues,
    seconds_to_wait,
)

NOW = datetime(2026, 1, 15, 10, 30, tzinfo=UTC)
READY, NOT_READY, LOST, FENCED = Liveness.READY, Liveness.NOT_READY, Liveness.LOST, Liveness.FENCED
PATIENCE = Patience()
AGES = st.floats(0, 500, allow_nan=False)


def ago(seconds: float) -> datetime:
    return NOW - timedelta(seconds=seconds)


def seen(
    node: str, silent: float, standing: Liveness = READY, *, since: float | None = None, granted: float | None = None
) -> Sighting:
    """A node that was heard so long ago. Said to be silent, it was not heard since, unless told otherwise."""
    heartbeat = SeenHeartbeat(ago(silent), NOW, None if granted is None else ago(granted))
    declared = None if standing is READY else ago(silent if since is None else since)
    return Sighting(node, standing, heartbeat, declared)


def judged(*nodes: Sighting, heard: int = 100, watched: float = 1e6, calm: float | None = None) -> LivenessVerdict:
    return judge(
        nodes, heard, watched_seconds=watched, calm_seconds=watched if calm is None else calm, patience=PATIENCE
    )


def said(*nodes: Sighting, **more: float) -> dict[str, Liveness]:
    return dict(judged(*nodes, **more).transitions)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("silent", "standing", "after"),
    [
        (0.0, READY, None),
        (14.9, READY, None),
        (15.0, READY, NOT_READY),
        (59.9, NOT_READY, None),
        (60.0, NOT_READY, LOST),
        (60.0, READY, LOST),
        (9e9, LOST, None),
        (9e9, FENCED, None),
    ],
)
def test_silence_makes_a_node_not_ready_and_then_lost(
    silent: float, standing: Liveness, after: Liveness | None
) -> None:
    assert said(seen("n", silent, standing)) == ({} if after is None else {"n": after})


@pytest.mark.parametrize("standing", [NOT_READY, LOST, FENCED])
def test_who_was_heard_since_is_ready_at_once(standing: Liveness) -> None:
    assert said(seen("n", 1, standing, since=80)) == {"n": READY}
    assert said(seen("n", 14, standing, since=80), watched=0) == {"n": READY}, "also by one who just began to watch"


def test_a_node_that_was_never_heard_is_left_alone() -> None:
    assert said(Sighting("n")) == {}
    assert said(Sighting("n", FENCED, None, ago(5))) == {}
    assert said(Sighting("n", FENCED, SeenHeartbeat(ago(1), NOW), ago(5))) == {"n": READY}, "until it speaks"


@pytest.mark.parametrize(("watched", "after"), [(0, None), (14, None), (15, NOT_READY), (59, NOT_READY), (60, LOST)])
def test_silence_before_we_were_there_ourselves_does_not_count(watched: float, after: Liveness | None) -> None:
    assert said(seen("n", 1000), watched=watched) == ({} if after is None else {"n": after})


def test_more_than_three_in_ten_at_once_are_an_alarm_and_nobody_is_lost() -> None:
    most = judged(*(seen(f"n{index}", 90, NOT_READY) for index in range(31)))
    assert (most.alarm, most.silent, most.heartbeating, most.transitions) == (True, 31, 100, ())
    fewer = judged(*(seen(f"n{index}", 90, NOT_READY) for index in range(30)))
    assert not fewer.alarm
    assert {standing for _, standing in fewer.transitions} == {LOST}


def test_in_an_alarm_nodes_still_become_not_ready_and_ready_again() -> None:
    nodes = [seen(f"n{index}", 90) for index in range(50)]
    verdict = judged(*nodes, seen("back", 1, LOST, since=300))
    assert verdict.alarm
    assert dict(verdict.transitions) == {"back": READY, **{one.node: NOT_READY for one in nodes}}


def test_those_lost_long_ago_are_no_part_of_an_alarm() -> None:
    lost = [seen(f"l{index}", 9000, LOST) for index in range(60)]
    verdict = judged(*lost, *(seen(f"n{index}", 90, NOT_READY) for index in range(12)))
    assert (verdict.heartbeating, verdict.silent, verdict.alarm) == (40, 12, False)
    assert judged(*lost, *(seen(f"n{index}", 90, NOT_READY) for index in range(13))).alarm


def test_one_node_alone_may_die_also_where_there_are_few() -> None:
    assert said(seen("n", 90, NOT_READY), heard=1) == {"n": LOST}
    assert judged(seen("a", 90, NOT_READY), seen("b", 90, NOT_READY), heard=5).alarm


def test_after_an_alarm_nobody_is_lost_before_it_was_calm_for_a_while() -> None:
    node = seen("n", 500, NOT_READY)
    assert said(node, calm=59) == {}
    assert said(node, calm=60) == {"n": LOST}


# The work of those that are gone.


@pytest.mark.parametrize(
    ("standing", "on_lost", "granted", "calm", "left"),
    [
        # Leased work: until it must be dead, and by how much clocks differ.
        (LOST, OnLost.REQUEUE, -30, math.inf, 35),
        (LOST, OnLost.REQUEUE, 4, math.inf, 1),
        (LOST, OnLost.REQUEUE, 5, math.inf, 0),
        (LOST, OnLost.REQUEUE, 1000, 20, 40),
        (LOST, OnLost.REQUEUE, 1000, 60, 0),
        # A node that was never granted a lease enforces none.
        (LOST, OnLost.REQUEUE, None, math.inf, math.inf),
        # Without a lease nobody knows.
        (LOST, OnLost.FAIL, 1000, math.inf, math.inf),
        (LOST, OnLost.KEEP, 1000, math.inf, math.inf),
        # A node that may come back any moment.
        (NOT_READY, OnLost.REQUEUE, 1000, math.inf, math.inf),
        # An administrator's word counts at once, for everything.
        (FENCED, OnLost.REQUEUE, -30, 0, 0),
        (FENCED, OnLost.FAIL, None, 0, 0),
        (FENCED, OnLost.KEEP, None, 0, 0),
    ],
)
def test_work_is_left_alone_until_none_of_it_can_be_running(
    standing: Liveness, on_lost: OnLost, granted: float | None, calm: float, left: float
) -> None:
    heartbeat = seen("n", 100, standing, granted=granted).heartbeat
    assert seconds_to_wait(standing, on_lost, heartbeat, PATIENCE, calm_seconds=calm) == left


@pytest.mark.parametrize(("watched", "left"), [(0, 155), (100, 55), (154, 1), (155, 0), (math.inf, 0)])
def test_a_clock_that_jumped_forward_gives_nothing_up_that_may_be_alive(watched: float, left: float) -> None:
    """It was heard a moment ago, and granted 150 s; then the clock jumped by an hour, and we listen since."""
    heartbeat = SeenHeartbeat(ago(3600), NOW, ago(3450))
    assert seconds_to_wait(LOST, OnLost.REQUEUE, heartbeat, PATIENCE, watched_seconds=watched) == left
    assert seconds_to_wait(FENCED, OnLost.REQUEUE, heartbeat, PATIENCE, watched_seconds=watched) == 0


def test_until_when_is_told_where_it_is_known() -> None:
    heartbeat = SeenHeartbeat(ago(70), NOW, ago(-50))
    assert gone_at(OnLost.REQUEUE, heartbeat, PATIENCE) == ago(-55)
    assert gone_at(OnLost.KEEP, heartbeat, PATIENCE) is None
    assert gone_at(OnLost.REQUEUE, None, PATIENCE) is None


def test_what_is_given_up_waits_again_unless_it_asked_to_fail() -> None:
    assert [requeues(one) for one in (OnLost.KEEP, OnLost.REQUEUE, OnLost.FAIL)] == [True, True, False]


@st.composite
def clusters(draw: st.DrawFn) -> tuple[list[Sighting], int]:
    nodes = []
    for index in range(draw(st.integers(0, 12))):
        silent, standing = draw(AGES), draw(st.sampled_from(Liveness))
        since = silent if draw(st.booleans()) else silent + draw(st.floats(0.001, 100))
        nodes.append(seen(f"n{index}", silent, standing, since=since, granted=draw(st.none() | AGES)))
    return nodes, len(nodes) + draw(st.integers(0, 30))


@given(clusters(), AGES, AGES)
def test_nobody_is_lost_too_soon_nor_while_very_many_are_silent(
    cluster: tuple[list[Sighting], int], watched: float, calm: float
) -> None:
    nodes, heard = cluster
    calm = min(calm, watched)
    verdict = judged(*nodes, heard=heard, watched=watched, calm=calm)
    by_name = {one.node: one for one in nodes}
    for name, after in verdict.transitions:
        one = by_name[name]
        assert after is not one.standing
        assert (after is READY) == one.heard_since
        if after is LOST:
            assert min(one.silent_seconds, watched, calm) >= PATIENCE.lost_seconds
            assert not verdict.alarm
        if after is NOT_READY:
            assert one.standing is READY
            assert one.silent_seconds >= PATIENCE.not_ready_seconds
    assert verdict.alarm == (verdict.silent >= 2 and verdict.silent > 0.3 * verdict.heartbeating)


@given(clusters(), AGES)
def test_what_was_said_once_is_not_said_again(cluster: tuple[list[Sighting], int], watched: float) -> None:
    nodes, heard = cluster
    verdict = judged(*nodes, heard=heard, watched=watched)
    after = dict(verdict.transitions)
    told = [
        Sighting(one.node, now, one.heartbeat, None if now is READY else one.since or ago(one.silent_seconds))
        for one in nodes
        if (now := after.get(one.node, one.standing)) is not READY or one.standing is READY
    ]
    again = judged(*told, heard=heard, watched=watched)
    assert all(standing is LOST for _, standing in again.transitions), "only the end of an alarm is news"


@given(st.sampled_from(OnLost), st.none() | AGES, AGES, AGES, AGES)
def test_nothing_is_given_up_before_its_lease_and_the_grace_are_over(
    on_lost: OnLost, granted: float | None, silent: float, calm: float, watched: float
) -> None:
    heartbeat = seen("n", silent, granted=granted).heartbeat
    left = seconds_to_wait(LOST, on_lost, heartbeat, PATIENCE, calm_seconds=calm, watched_seconds=watched)
    if left == 0:
        assert on_lost is OnLost.REQUEUE
        assert granted is not None
        assert granted >= PATIENCE.clock_skew_seconds
        assert calm >= PATIENCE.lost_seconds
        assert watched >= silent - granted + PATIENCE.clock_skew_seconds - 1e-5
