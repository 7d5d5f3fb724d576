"""The hands of simulated agents, at a clock of our own: how long things run, and how they end."""

import math
from typing import Any

import pytest

from bursar.agent.machine.types import LeaseGrant, PlacementState, PlacementStatus, Run, Stop
from bursar.sim.fake_executor import (
    ENV_EXIT,
    ENV_SECONDS,
    FakeBehaviour,
    FakeExecutor,
    RunTally,
    exit_code_of,
    run_seconds,
)
from bursar.sim.work import EXIT, SECONDS

PLACE = ("alloc-1", 1)


def wanted(uid: str = "alloc-1", epoch: int = 1, **more: Any) -> Run:
    return Run(uid, epoch, "team", "job", **more)


def said(statuses: list[PlacementStatus]) -> list[tuple[str, PlacementState, int | None]]:
    return [(one.uid, one.state, one.exit_code) for one in statuses]


@pytest.mark.parametrize(
    ("run", "default", "seconds"),
    [
        ({"annotations": {SECONDS: "5"}, "env": {ENV_SECONDS: "6"}}, 60.0, 5.0),
        ({"env": {ENV_SECONDS: "6"}, "command": ("sleep", "7")}, 60.0, 6.0),
        ({"command": ("/bin/sleep", "0.5")}, 60.0, 0.5),
        ({"command": ("sleep", "forever")}, 60.0, 60.0),
        ({"command": ("train", "7")}, 60.0, 60.0),
        ({"annotations": {SECONDS: "soon"}}, 60.0, 60.0),
        ({}, None, math.inf),
    ],
    ids=["annotated", "environment", "sleep", "no number", "no sleep", "unreadable", "for ever"],
)
def test_how_long_something_runs(run: dict[str, Any], default: float | None, seconds: float) -> None:
    assert run_seconds(wanted(**run), FakeBehaviour(default)) == seconds


@pytest.mark.parametrize(
    ("run", "code"),
    [({}, 0), ({"annotations": {EXIT: "3"}}, 3), ({"env": {ENV_EXIT: "4"}}, 4), ({"env": {ENV_EXIT: "-1"}}, 0)],
    ids=["well", "annotated", "environment", "unreadable"],
)
def test_how_something_ends(run: dict[str, Any], code: int) -> None:
    assert exit_code_of(wanted(**run)) == code


def test_what_is_wanted_runs_at_once_and_ends_when_its_time_has_come() -> None:
    tally = RunTally()
    hands = FakeExecutor(FakeBehaviour(), tally)
    hands.tell([wanted(annotations={SECONDS: "10"})], 100.0)
    assert said(hands.news()) == [("alloc-1", PlacementState.RUNNING, None)]
    assert (tally.running, hands.next_at, hands.has_news) == (1, 110.0, False)
    hands.due(109.0)
    assert not hands.has_news
    hands.due(110.0)
    assert said(hands.news()) == [("alloc-1", PlacementState.SUCCEEDED, 0)]
    assert (tally.running, tally.ended, hands.next_at) == (0, 1, math.inf)
    # It is told until that is acknowledged, and is not started again.
    assert said(hands.news()) == [("alloc-1", PlacementState.SUCCEEDED, 0)]
    hands.acknowledged([("alloc-1", 1)], 111.0)
    assert hands.inventory() == []
    hands.tell([wanted()], 112.0)
    assert tally.running == 0


def test_what_is_told_to_stop_takes_its_time_but_never_longer_than_its_grace() -> None:
    hands = FakeExecutor(FakeBehaviour(stop_seconds=20.0), RunTally())
    hands.tell([wanted("slow"), wanted("hurried")], 0.0)
    hands.tell([Stop("slow", 1, 30, "Preempted"), Stop("hurried", 1, 5, "Preempted")], 10.0)
    assert hands.next_at == 15.0
    hands.due(15.0)
    hands.due(30.0)
    assert {one.uid: (one.state, one.reason) for one in hands.inventory()} == {
        "slow": (PlacementState.STOPPED, "Preempted"),
        "hurried": (PlacementState.STOPPED, "Preempted"),
    }


@pytest.mark.parametrize(
    ("seconds", "state", "reason"), [("30", PlacementState.SUCCEEDED, ""), ("31", PlacementState.FAILED, "Expired")]
)
def test_what_runs_longer_than_it_may_has_expired(seconds: str, state: PlacementState, reason: str) -> None:
    hands = FakeExecutor(FakeBehaviour(), RunTally())
    hands.tell([wanted(ttl_seconds=30, annotations={SECONDS: seconds})], 0.0)
    assert hands.next_at == 30.0
    hands.due(30.0)
    (ended,) = hands.inventory()
    assert (ended.state, ended.reason) == (state, reason)


def test_leased_work_ends_when_no_lease_is_granted_any_more() -> None:
    hands = FakeExecutor(FakeBehaviour(), RunTally())
    hands.tell([wanted(leased=True)], 0.0)
    assert said(hands.inventory()) == [("alloc-1", PlacementState.STARTING, None)]
    hands.granted(10, 1.0, 2.0)
    assert said(hands.inventory()) == [("alloc-1", PlacementState.RUNNING, None)]
    hands.granted(10, 6.0, 7.0)
    assert hands.next_at == 16.0
    hands.due(16.0)
    (ended,) = hands.inventory()
    assert (ended.state, ended.reason) == (PlacementState.STOPPED, "LeaseExpired")


def test_paid_work_ends_when_it_is_paid_for_no_more_and_says_how_long_it_ran() -> None:
    hands = FakeExecutor(FakeBehaviour(), RunTally())
    hands.tell([wanted(paid=True)], 0.0)
    assert said(hands.inventory()) == [("alloc-1", PlacementState.STARTING, None)]
    hands.paid({PLACE: LeaseGrant(10)}, 1.0, 2.0)
    assert said(hands.inventory()) == [("alloc-1", PlacementState.RUNNING, None)]
    hands.paid({PLACE: LeaseGrant(5, "insufficient_credit")}, 6.0, 7.0)
    assert hands.next_at == 11.0
    hands.due(11.0)
    (ended,) = hands.inventory()
    assert (ended.state, ended.reason, ended.usage.seconds) == (PlacementState.STOPPED, "CreditExhausted", 9.0)


def test_frozen_work_has_still_to_do_what_was_left() -> None:
    hands = FakeExecutor(FakeBehaviour(20.0), RunTally())
    hands.tell([wanted(paid=True)], 0.0)
    hands.paid({PLACE: LeaseGrant(10)}, 0.0, 0.0)
    hands.paid({PLACE: LeaseGrant(5, "spend_rate_exceeded", 300)}, 5.0, 5.0)
    hands.due(10.0)
    hands.due(50.0)
    assert said(hands.inventory()) == [("alloc-1", PlacementState.RUNNING, None)]
    hands.paid({PLACE: LeaseGrant(15)}, 60.0, 60.0)
    assert hands.next_at == 70.0
    hands.due(70.0)
    (ended,) = hands.inventory()
    assert (ended.state, ended.exit_code, ended.usage.seconds) == (PlacementState.SUCCEEDED, 0, 20.0)


def test_an_allocation_on_several_nodes_is_counted_once() -> None:
    tally = RunTally()
    left, right = FakeExecutor(FakeBehaviour(1.0), tally), FakeExecutor(FakeBehaviour(2.0), tally)
    for hands in (left, right):
        hands.tell([wanted()], 0.0)
    assert tally.running == 1
    left.due(1.0)
    assert (tally.running, tally.ended) == (1, 0)
    right.due(2.0)
    assert (tally.running, tally.ended) == (0, 1)
