"""What is paid ahead, and an agent that comes back: nothing lasts longer than it was paid, and no use is forgotten."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from bursar.agent.executor.journal import SPARE_BYTES, SPARE_LINES, Journal, JournalBegan, JournalGone
from bursar.agent.executor.placement_dir import boot_id
from bursar.agent.machine.lease_token import SignedLease
from bursar.agent.machine.paid_window import Paid, PaidWindow, WindowLine, terms_of, window, windows
from bursar.agent.machine.types import LeaseGrant, Place, PlacementState, Run
from bursar.agent.shim.clock import boot_seconds
from bursar.agent.shim.deadline import CREDIT_EXHAUSTED, LEASE_EXPIRED
from support.nodes.executors import Bench, alive, run, script, sleeper, until

BOOT = boot_id()
PLACE: Place = ("a", 1)
SIGNED = {PLACE: SignedLease("lease-7", "a", 1, 120.0, False)}


def paid(until_at: float, place: Place = PLACE, **more: object) -> Paid:
    return Paid(*place, "lease-7", until_at, **more)  # type: ignore[arg-type]


def test_paid_time_is_counted_from_when_the_heartbeat_was_sent() -> None:
    kept = window(BOOT, "token", 1000.0, {PLACE: LeaseGrant(120.0, "insufficient_credit")}, SIGNED, {PLACE: 33.5})
    assert kept == WindowLine(BOOT, "token", (paid(1120.0, used_seconds=33.5, final="insufficient_credit"),))


def test_what_is_not_signed_is_not_kept() -> None:
    assert window(BOOT, "token", 1000.0, {("b", 1): LeaseGrant(0.0, "fenced")}, SIGNED, {}).paid == ()


@pytest.mark.parametrize(
    ("paid_window", "at", "reason", "ran"),
    [
        pytest.param(PaidWindow("boot", "t", paid(500.0)), 500.0, LEASE_EXPIRED, None, id="as it was paid"),
        pytest.param(PaidWindow("boot", "t", paid(90.0)), 90.0, LEASE_EXPIRED, None, id="over already"),
        pytest.param(
            PaidWindow("boot", "t", paid(500.0, final="x")), 500.0, CREDIT_EXHAUSTED, None, id="the last of it"
        ),
        pytest.param(
            PaidWindow("old", "t", paid(500.0, used_seconds=7.0)), 100.0, LEASE_EXPIRED, 7.0, id="another start"
        ),
        pytest.param(None, 100.0, LEASE_EXPIRED, 0.0, id="never granted"),
    ],
)
def test_what_an_agent_that_comes_back_goes_by(
    paid_window: PaidWindow | None, at: float, reason: str, ran: float | None
) -> None:
    (until_at, _, freeze_until, why), ran_seconds = terms_of(paid_window, "boot", 100.0)
    assert (until_at, freeze_until, why, ran_seconds) == (at, 0.0, reason, ran)


# The journal.


def known(path: Path) -> dict[Place, PaidWindow]:
    journal = Journal(path)
    journal.close()
    return journal.known.paid_windows


def test_the_newest_window_of_each_placement_comes_back_until_it_is_acknowledged(tmp_path: Path) -> None:
    path, other = tmp_path / "journal", ("b", 1)
    journal = Journal(path)
    journal.append([WindowLine(BOOT, "one", (paid(10.0), paid(11.0, other))), WindowLine(BOOT, "two", (paid(20.0),))])
    journal.close()
    assert known(path) == {
        PLACE: PaidWindow(BOOT, "two", paid(20.0)),
        other: PaidWindow(BOOT, "one", paid(11.0, other)),
    }
    journal = Journal(path)
    journal.append([JournalGone(*other), WindowLine(BOOT, "three", (paid(30.0, other),))])
    journal.close()
    assert list(known(path)) == [PLACE]


def test_a_heartbeat_more_does_not_make_the_file_longer_for_ever(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = Journal(path)
    token = "t" * 500
    for seq in range(3):
        journal.append(WindowLine(BOOT, token, (paid(float(one)),)) for one in range(seq, seq + SPARE_LINES))
    assert path.stat().st_size < 1.5 * SPARE_LINES * 600
    assert journal.known.paid_windows[PLACE].paid.until == SPARE_LINES + 1
    for one in range(20):
        journal.append([WindowLine(BOOT, token * 1000, (paid(float(one)),))])
    journal.close()
    assert path.stat().st_size < SPARE_BYTES + 4 * 500_000
    assert known(path)[PLACE].paid.until == 19


def test_lines_that_say_the_same_are_few() -> None:
    ones = [PaidWindow(BOOT, "t", paid(1.0, (f"a{n}", 1))) for n in range(5)] + [
        PaidWindow("old", "t", paid(1.0, ("z", 1)))
    ]
    assert [len(one.paid) for one in windows(ones)] == [5, 1]


# Lives of an agent.


def grant(bench: Bench, one: Run, seconds: float, *, used: float = 0.0, final: str = "") -> float:
    """As an answer does it; until when it is paid."""
    sent_at = boot_seconds()
    signed = {one.place: SignedLease("lease-7", *one.place, seconds, bool(final))}
    grants = {one.place: LeaseGrant(seconds, final)}
    bench.shell.keep(window(BOOT, "token", sent_at, grants, signed, {one.place: used}))
    bench.shell.execute(bench.machine.paid(grants, sent_at))
    return sent_at + seconds


def rewrite(folder: Path, *, boot: str | None = None, wall_seconds: float = 0.0) -> None:
    """As if the machine had been started anew, or its clock been set."""
    path = folder / "journal"
    journal = Journal(path)
    lines = journal.known.lines()
    journal.close()
    path.unlink()
    journal = Journal(path)
    for line in lines:
        if isinstance(line, JournalBegan):
            journal.append([JournalBegan(line.run, line.at + wall_seconds, boot or line.boot, line.clock)])
        else:
            journal.append([WindowLine(boot, line.token, line.paid) if boot and isinstance(line, WindowLine) else line])
    journal.close()


async def reserved(folder: Path, uid: str, seconds: float, *, used: float = 0.0, final: str = "") -> float:
    """A paid reservation in one life of an agent, which ends then; until when it is paid."""
    one = run(uid, paid=True)
    async with Bench(folder) as bench:
        bench.want(one)
        until_at = grant(bench, one, seconds, used=used, final=final)
        await bench.until(one.place, PlacementState.RUNNING)
    return until_at


async def test_a_reservation_goes_on_until_the_end_of_what_was_paid_and_no_longer(tmp_path: Path, uid: str) -> None:
    until_at = await reserved(tmp_path, uid, 3600.0)
    async with Bench(tmp_path) as bench:
        assert bench.machine.next_at == until_at
        bench.shell.execute(bench.machine.due(until_at - 1.0))
        assert (await bench.until((uid, 1), PlacementState.RUNNING)).state is PlacementState.RUNNING
        bench.shell.execute(bench.machine.due(until_at))
        end = await bench.end((uid, 1))
        assert (end.state, end.reason) == (PlacementState.STOPPED, LEASE_EXPIRED)


async def test_a_reservation_whose_paid_time_ended_meanwhile_has_used_exactly_that(tmp_path: Path, uid: str) -> None:
    until_at = await reserved(tmp_path, uid, 0.3, final="insufficient_credit")
    await until(lambda: True if boot_seconds() > until_at + 0.2 else None)
    async with Bench(tmp_path) as bench:
        began = bench.shell._children[uid, 1].started_at
        bench.shell.execute(bench.machine.due(boot_seconds()))
        end = await bench.end((uid, 1))
        assert (end.state, end.reason) == (PlacementState.STOPPED, CREDIT_EXHAUSTED)
        assert end.usage.seconds == until_at - began
        assert 0 < end.usage.seconds <= 0.3
    async with Bench(tmp_path) as bench:
        again = bench.status((uid, 1))
        assert again is not None
        assert (again.state, again.usage.seconds) == (PlacementState.STOPPED, end.usage.seconds)


@pytest.mark.parametrize("wall_seconds", [-86_400.0, 86_400.0])
async def test_a_clock_that_was_set_changes_neither_what_is_left_nor_what_was_used(
    tmp_path: Path, uid: str, wall_seconds: float
) -> None:
    until_at = await reserved(tmp_path, uid, 3600.0)
    rewrite(tmp_path, wall_seconds=wall_seconds)
    async with Bench(tmp_path) as bench:
        assert bench.machine.next_at == until_at
        used = (await bench.shell.usages())[uid, 1].seconds
        assert 0 <= used < 3600


async def test_after_another_start_of_the_machine_it_is_over_and_was_used_as_far_as_measured(
    tmp_path: Path, uid: str
) -> None:
    await reserved(tmp_path, uid, 3600.0, used=41.5)
    rewrite(tmp_path, boot="another", wall_seconds=-500.0)
    async with Bench(tmp_path) as bench:
        bench.shell.execute(bench.machine.due(boot_seconds()))
        end = await bench.end((uid, 1))
        assert (end.state, end.reason, end.usage.seconds) == (PlacementState.STOPPED, LEASE_EXPIRED, 41.5)


async def test_what_lost_its_shim_while_no_agent_was_there_has_used_what_was_measured(tmp_path: Path, uid: str) -> None:
    one = replace(script(uid, "echo $$; exec sleep 300"), paid=True)
    async with Bench(tmp_path) as bench:
        bench.want(one)
        grant(bench, one, 3600.0)
        pid = await sleeper(bench, one.place)
        grant(bench, one, 3600.0, used=17.25)
        shim = bench.shell._children[one.place].shim
        await until(lambda: bench.shell._journal.known.paid_windows[one.place].paid.used_seconds or None)
    os.kill(shim, signal.SIGKILL)
    await until(lambda: True if not alive(pid) else None)
    async with Bench(tmp_path) as bench:
        end = await bench.end(one.place)
        assert (end.reason, end.usage.seconds) == ("ShimLost", 17.25)


async def test_a_command_is_adopted_with_what_is_left_and_what_it_used_so_far(tmp_path: Path, uid: str) -> None:
    one = replace(script(uid, "echo $$; exec sleep 300"), paid=True)
    async with Bench(tmp_path) as bench:
        bench.want(one)
        until_at = grant(bench, one, 3600.0)
        pid = await sleeper(bench, one.place)
    async with Bench(tmp_path) as bench:
        assert alive(pid)
        assert bench.machine.next_at == until_at
        status = bench.status(one.place)
        assert status is not None
        assert status.usage.seconds > 0, "the first beat says what it has used"
        bench.stop(one.place, grace_seconds=0)
        await bench.end(one.place)
