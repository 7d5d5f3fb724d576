"""Work that is paid for: it runs for as long as that lasts, is frozen when it spends too fast, and ends by itself."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from bursar.agent.executor.placement_dir import PlacementDir
from bursar.agent.machine.events import PlacementEnded
from bursar.agent.machine.state import (
    CREDIT_EXHAUSTED,
    FENCED,
    FROZEN,
    LEASE_EXPIRED,
    Machine,
    MoveDeadline,
    SignalStop,
    Start,
    ThrottlePlacement,
)
from bursar.agent.machine.types import LeaseGrant, Place, PlacementState, Run, Stop
from bursar.agent.shim.clock import boot_seconds
from support.nodes.executors import Bench, alive, run, script, until

A = ("a", 1)
NO_CREDIT, TOO_FAST = "insufficient_credit", "spend_rate_exceeded"


def paid(uid: str = "a", *, leased: bool = False, grace_seconds: int = 30) -> Run:
    return Run(uid, 1, "lab", uid, command=("sleep", "9"), paid=True, leased=leased, grace_seconds=grace_seconds)


def begun(machine: Machine, one: Run, seconds: float, now: float = 0.0) -> None:
    machine.tell([one], now)
    machine.paid({one.place: LeaseGrant(seconds)}, now)
    machine.started(one.place, now)


def told(machine: Machine) -> list[tuple[PlacementState, str]]:
    return [(one.state, one.reason) for one in machine.inventory()]


# The machine.


def test_paid_work_waits_for_its_first_grant_and_lives_by_it() -> None:
    machine = Machine()
    machine.granted(600, 0)
    assert machine.tell([paid()], 1) == []
    assert machine.paid({A: LeaseGrant(15)}, 1) == [Start(paid(), 16)]
    machine.started(A, 2)
    assert machine.paid({A: LeaseGrant(15)}, 6) == [MoveDeadline(A, 21)]
    assert machine.paid({A: LeaseGrant(14)}, 6) == []
    assert machine.next_at == 21
    assert machine.due(21) == [SignalStop(A, 30, LEASE_EXPIRED)]


def test_what_was_granted_before_it_was_known_starts_nothing() -> None:
    machine = Machine()
    assert machine.paid({A: LeaseGrant(15)}, 0) == []
    assert machine.tell([paid()], 1) == []


def test_a_grant_that_came_too_late_starts_nothing() -> None:
    machine = Machine()
    machine.tell([paid()], 20)
    assert machine.paid({A: LeaseGrant(15)}, 1) == []
    assert machine.paid({A: LeaseGrant(15)}, 20) == [Start(paid(), 35)]


def test_the_last_window_is_used_up_and_then_it_is_asked_to_end() -> None:
    machine = Machine()
    machine.granted(600, 0, 5)
    begun(machine, paid(), 15)
    assert machine.paid({A: LeaseGrant(10, NO_CREDIT)}, 5) == [MoveDeadline(A, 15, 5, 0.0, CREDIT_EXHAUSTED)]
    assert machine.paid({A: LeaseGrant(5, NO_CREDIT)}, 10) == []
    assert machine.due(14) == []
    assert machine.due(15) == [SignalStop(A, 5, CREDIT_EXHAUSTED)]
    machine.ended(A, 16, exit_code=143)
    assert told(machine) == [(PlacementState.STOPPED, CREDIT_EXHAUSTED)]
    assert machine.inventory()[0].message == "stopped: its account ran out of credit"


def test_topped_up_in_the_last_window_it_goes_on_and_no_later() -> None:
    machine = Machine()
    begun(machine, paid(), 15)
    machine.paid({A: LeaseGrant(10, NO_CREDIT)}, 5)
    assert machine.paid({A: LeaseGrant(15)}, 10) == [MoveDeadline(A, 25)]
    machine.paid({A: LeaseGrant(10, NO_CREDIT)}, 15)
    assert machine.due(25) == [SignalStop(A, 30, CREDIT_EXHAUSTED)]
    assert machine.paid({A: LeaseGrant(15)}, 26) == []


def test_what_spends_too_fast_is_frozen_and_goes_on_when_it_may() -> None:
    machine = Machine()
    begun(machine, paid(), 15)
    assert machine.paid({A: LeaseGrant(10, TOO_FAST, 300)}, 5) == [MoveDeadline(A, 15, None, 315, CREDIT_EXHAUSTED)]
    assert machine.next_at == 15
    assert machine.due(15) == []
    assert [(one.state, one.reason) for one in machine.news()] == [(PlacementState.RUNNING, FROZEN)]
    assert machine.due(100) == []
    assert not machine.has_news
    assert machine.next_at == 315
    assert machine.paid({A: LeaseGrant(15)}, 100) == [MoveDeadline(A, 115)]
    assert [(one.state, one.reason) for one in machine.news()] == [(PlacementState.RUNNING, "")]
    assert told(machine) == [(PlacementState.RUNNING, "")]


def test_what_was_frozen_when_the_agent_was_killed_is_told_so_again() -> None:
    machine = Machine()
    machine.adopt(paid(), 50, started=True, started_at=0, limit=ThrottlePlacement(15, 315, CREDIT_EXHAUSTED))
    machine.news()
    assert machine.next_at == 15
    assert machine.due(50) == []
    assert told(machine) == [(PlacementState.RUNNING, FROZEN)]
    assert machine.has_news


def test_what_is_frozen_for_too_long_is_ended() -> None:
    machine = Machine()
    begun(machine, paid(), 15)
    machine.paid({A: LeaseGrant(10, TOO_FAST, 300)}, 5)
    for now in range(20, 310, 10):
        assert machine.paid({A: LeaseGrant(0, TOO_FAST, 300)}, now) == [], "each refusal would give it more time"
    assert machine.due(315) == [SignalStop(A, 30, CREDIT_EXHAUSTED)]
    machine.ended(A, 316, exit_code=143)
    assert "300 seconds" in machine.inventory()[0].message


def test_what_is_frozen_and_then_has_no_credit_is_ended_at_once() -> None:
    machine = Machine()
    begun(machine, paid(), 15)
    machine.paid({A: LeaseGrant(10, TOO_FAST, 300)}, 5)
    machine.due(50)
    assert machine.paid({A: LeaseGrant(0, NO_CREDIT)}, 50) == [MoveDeadline(A, 15, None, 0.0, CREDIT_EXHAUSTED)]
    assert machine.due(51) == [SignalStop(A, 30, CREDIT_EXHAUSTED)]


def test_what_is_fenced_stops_at_once_whether_it_runs_or_waits() -> None:
    machine = Machine()
    begun(machine, paid(), 600)
    machine.tell([paid("b")], 1)
    assert machine.paid({A: LeaseGrant(0, FENCED), ("b", 1): LeaseGrant(0, FENCED)}, 2) == [
        SignalStop(A, 0, LEASE_EXPIRED)
    ]
    machine.ended(A, 3, exit_code=137)
    assert told(machine) == [(PlacementState.STOPPED, LEASE_EXPIRED)] * 2


@pytest.mark.parametrize(
    ("leased", "grant", "limit"),
    [
        (10, LeaseGrant(20), ThrottlePlacement(10)),
        (30, LeaseGrant(20), ThrottlePlacement(20)),
        (10, LeaseGrant(20, NO_CREDIT), ThrottlePlacement(10)),
        (30, LeaseGrant(20, NO_CREDIT), ThrottlePlacement(20, 0.0, CREDIT_EXHAUSTED)),
        (30, LeaseGrant(20, TOO_FAST, 5), ThrottlePlacement(20, 25, CREDIT_EXHAUSTED)),
        (30, LeaseGrant(20, TOO_FAST, 300), ThrottlePlacement(20, 30, LEASE_EXPIRED)),
    ],
    ids=["node first", "paid first", "node before the last", "the last", "frozen", "frozen until the node's is over"],
)
def test_what_needs_both_leases_ends_with_the_first(leased: float, grant: LeaseGrant, limit: ThrottlePlacement) -> None:
    machine = Machine()
    machine.granted(1, 0)
    machine.tell([paid(leased=True)], 0)
    machine.paid({A: LeaseGrant(1)}, 0)
    machine.started(A, 0)
    machine.granted(leased, 0)
    done = machine.paid({A: grant}, 0)[-1]
    assert isinstance(done, MoveDeadline)
    assert ThrottlePlacement(done.at, done.freeze_until, done.reason) == limit


def test_what_is_being_stopped_is_paid_for_until_it_is_gone() -> None:
    machine = Machine()
    begun(machine, paid(), 15)
    machine.tell([Stop("a", 1, 600, "Preempted")], 5)
    assert machine.paid({A: LeaseGrant(15)}, 10) == [MoveDeadline(A, 25)]


def test_the_next_life_of_the_agent_keeps_what_was_said() -> None:
    """It was frozen, or about to end, when the agent was killed."""
    machine = Machine()
    machine.adopt(paid(), 20, started=True, limit=ThrottlePlacement(15, 315, CREDIT_EXHAUSTED))
    assert machine.due(20) == []
    assert machine.paid({A: LeaseGrant(15)}, 30) == [MoveDeadline(A, 45)]
    machine = Machine()
    machine.adopt(paid(), 20, started=True, limit=ThrottlePlacement(25, 0.0, CREDIT_EXHAUSTED))
    assert machine.due(25) == [SignalStop(A, 30, CREDIT_EXHAUSTED)]
    assert machine.next_at < math.inf


# Real processes.


def pay(bench: Bench, place: Place, seconds: float, final: str = "", freeze_seconds: float = 0.0) -> None:
    bench.shell.execute(bench.machine.paid({place: LeaseGrant(seconds, final, freeze_seconds)}, boot_seconds()))


def tick(bench: Bench) -> None:
    bench.shell.execute(bench.machine.due(boot_seconds()))


COUNTING = "echo $$; i=0; while :; do i=$((i+1)); echo $i > $COUNT.new; mv $COUNT.new $COUNT; sleep 0.02; done"


def counting(uid: str, count: Path, text: str = COUNTING, **more: object) -> Run:
    return script(uid, text, paid=True, env={"COUNT": str(count)}, **more)


def said(count: Path) -> int:
    return int(count.read_text() or 0) if count.exists() else 0


async def stands_still(count: Path) -> int:
    """Until it does not count any more, where it stopped."""
    seen: list[int] = []

    def still() -> int | None:
        seen.append(said(count))
        return seen[-1] if len(seen) > 50 and len(set(seen[-50:])) == 1 else None

    return await until(still)


async def test_work_is_frozen_by_its_shim_and_thawed_with_all_that_it_started(
    bench: Bench, uid: str, tmp_path: Path
) -> None:
    count, inner = tmp_path / "count", tmp_path / "inner"
    text = f"(COUNT={inner}; {COUNTING}) & {COUNTING}"
    async with bench:
        bench.want(counting(uid, count, text))
        pay(bench, (uid, 1), 1.0)
        await bench.until((uid, 1), PlacementState.RUNNING)
        pay(bench, (uid, 1), 0.5, TOO_FAST, 300.0)
        where = await stands_still(count)
        within = await stands_still(inner)
        tick(bench)
        assert bench.status((uid, 1)) is not None
        folder = PlacementDir(bench.folder((uid, 1)))
        assert await until(lambda: folder.frozen_seconds(boot_seconds()) or None) > 0
        pay(bench, (uid, 1), 600.0)
        await until(lambda: (said(count) > where + 5 and said(inner) > within + 5) or None)
        assert "frozen: over the spend rate limit" in bench.text((uid, 1))
        assert "[bursar: resumed]" in bench.text((uid, 1))
        frozen_seconds = folder.frozen_seconds(boot_seconds())
        bench.stop((uid, 1), grace_seconds=0)
        end = await bench.end((uid, 1))
        began = folder.started_at()
        assert began is not None
        # What it was frozen for is not what it ran.
        assert 0 < end.usage.seconds < boot_seconds() - began - frozen_seconds + 0.01
        assert frozen_seconds > 0.5


async def test_frozen_for_too_long_it_is_woken_and_asked_to_end(bench: Bench, uid: str, tmp_path: Path) -> None:
    """The agent does nothing: its shim keeps all of these times."""
    count = tmp_path / "count"
    text = f"trap 'echo asked; exit 3' TERM; {COUNTING}"
    async with bench:
        bench.want(counting(uid, count, text))
        pay(bench, (uid, 1), 1.0)
        await bench.until((uid, 1), PlacementState.RUNNING)
        pay(bench, (uid, 1), 0.5, TOO_FAST, 1.5)
        end = await bench.end((uid, 1))
        assert (end.state, end.reason, end.exit_code) == (PlacementState.STOPPED, CREDIT_EXHAUSTED, 3)
        assert "asked" in bench.text((uid, 1))


async def test_what_is_told_to_stop_while_it_is_frozen_is_woken_for_it(bench: Bench, uid: str, tmp_path: Path) -> None:
    count = tmp_path / "count"
    async with bench:
        bench.want(counting(uid, count, f"trap 'exit 4' TERM; {COUNTING}"))
        pay(bench, (uid, 1), 0.5)
        await bench.until((uid, 1), PlacementState.RUNNING)
        pay(bench, (uid, 1), 0.0, TOO_FAST, 300.0)
        await stands_still(count)
        bench.stop((uid, 1), grace_seconds=30)
        end = await bench.end((uid, 1))
        assert (end.state, end.reason, end.exit_code) == (PlacementState.STOPPED, "Preempted", 4)


async def test_what_is_frozen_can_be_killed(bench: Bench, uid: str, tmp_path: Path) -> None:
    count = tmp_path / "count"
    async with bench:
        bench.want(counting(uid, count))
        pay(bench, (uid, 1), 0.5)
        await bench.until((uid, 1), PlacementState.RUNNING)
        pay(bench, (uid, 1), 0.0, TOO_FAST, 300.0)
        await stands_still(count)
        bench.stop((uid, 1), grace_seconds=0)
        assert (await bench.end((uid, 1))).exit_code == 137


async def test_without_credit_it_is_warned_asked_and_killed(tmp_path: Path, uid: str) -> None:
    async with Bench(tmp_path) as bench:
        text = "trap 'echo asked' TERM; echo here; while :; do sleep 0.05; done"
        bench.want(script(uid, text, paid=True, grace_seconds=1))

        def begun() -> bool | None:
            """Paid a little further each time, as by heartbeats, for as long as its start takes."""
            pay(bench, (uid, 1), 1.5)
            return (bench.shell.log(uid) is not None and "here\n" in bench.text((uid, 1))) or None

        await until(begun)
        pay(bench, (uid, 1), 1.0, NO_CREDIT)
        end = await bench.end((uid, 1))
        assert (end.state, end.reason, end.exit_code) == (PlacementState.STOPPED, CREDIT_EXHAUSTED, 137)
        said = bench.text((uid, 1))
        assert said.index("here\n") < said.index("out of credit: stopping in") < said.index("\nasked\n")


async def test_topped_up_in_time_it_ends_as_it_would_have(tmp_path: Path, uid: str) -> None:
    async with Bench(tmp_path) as bench:
        bench.want(script(uid, f"while [ ! -e {tmp_path}/go ]; do sleep 0.02; done; exit 6", paid=True))
        pay(bench, (uid, 1), 2.0)
        await bench.until((uid, 1), PlacementState.RUNNING)
        pay(bench, (uid, 1), 1.0, NO_CREDIT)
        await until(lambda: "out of credit: stopping in" in bench.text((uid, 1)) or None)
        pay(bench, (uid, 1), 600.0)
        await until(lambda: "paid again" in bench.text((uid, 1)) or None)
        (tmp_path / "go").touch()
        end = await bench.end((uid, 1))
        assert (end.state, end.exit_code) == (PlacementState.FAILED, 6)


async def test_a_life_cut_short_is_told_how_long_it_ran(tmp_path: Path, uid: str) -> None:
    """The agent was there when it ended, and killed before that was acknowledged."""
    async with Bench(tmp_path) as bench:
        bench.want(run(uid, "sleep", "0.2", paid=True))
        pay(bench, (uid, 1), 600.0)
        first = await bench.end((uid, 1))
    async with Bench(tmp_path) as bench:
        again = bench.status((uid, 1))
        assert again is not None
        assert again.usage.seconds == first.usage.seconds >= 0.2


async def test_what_is_adopted_while_it_is_frozen_goes_on(tmp_path: Path, uid: str) -> None:
    count = tmp_path / "count"
    one = counting(uid, count)
    async with Bench(tmp_path) as bench:
        bench.want(one)
        pay(bench, (uid, 1), 0.5)
        await bench.until((uid, 1), PlacementState.RUNNING)
        pay(bench, (uid, 1), 0.0, TOO_FAST, 300.0)
        where = await stands_still(count)
    async with Bench(tmp_path) as bench:
        tick(bench)
        assert not [one for one in bench.events if isinstance(one, PlacementEnded)]
        pay(bench, (uid, 1), 600.0)
        await until(lambda: said(count) > where + 5 or None)
        pid = int(bench.text((uid, 1)).split()[0])
        bench.stop((uid, 1), grace_seconds=0)
        await bench.end((uid, 1))
        assert not alive(pid)
