"""What runs on a lease is dead when the control plane may think so, whatever else it was told."""

from pathlib import Path

from bursar.agent.machine.events import PlacementEnded
from bursar.agent.machine.state import LEASE_EXPIRED, Machine, MoveDeadline, Start
from bursar.agent.machine.types import PlacementState, Run
from bursar.agent.shim.clock import boot_seconds
from support.nodes.executors import Bench, until

STUBBORN = ("sh", "-c", "trap '' TERM; echo here; while :; do sleep 0.1; done")


def leased(uid: str, *command: str, grace_seconds: int = 600) -> Run:
    return Run(uid, 1, "default", uid, command=command, leased=True, grace_seconds=grace_seconds)


def grant(bench: Bench, seconds: float, grace_seconds: float) -> None:
    bench.shell.execute(bench.machine.granted(seconds, boot_seconds(), grace_seconds))


async def test_the_grace_is_that_of_the_lease_which_was_granted_last(tmp_path: Path, uid: str) -> None:
    """It was started when much more was allowed; the control plane counts with what it says now."""
    async with Bench(tmp_path) as bench:
        grant(bench, 600.0, 600.0)
        bench.want(leased(uid, *STUBBORN))
        await bench.until((uid, 1), PlacementState.RUNNING)
        grant(bench, 601.0, 0.0)
        bench.want(leased(f"{uid}-b", *STUBBORN))
        await bench.until((f"{uid}-b", 1), PlacementState.RUNNING)
        folder = bench.folder((uid, 1))
        await until(lambda: (folder / "deadline").read_text().split()[1] == "0.0" or None)
        for one in (uid, f"{uid}-b"):
            bench.stop((one, 1), grace_seconds=0)
            await bench.end((one, 1))


async def test_what_is_being_stopped_with_a_long_grace_ends_with_its_lease(tmp_path: Path, uid: str) -> None:
    async with Bench(tmp_path) as bench:
        grant(bench, 1.5, 0.5)
        bench.want(leased(uid, *STUBBORN))
        await bench.until((uid, 1), PlacementState.RUNNING)
        bench.stop((uid, 1), grace_seconds=600)
        end = await bench.end((uid, 1))
        assert (end.state, end.reason, end.exit_code) == (PlacementState.STOPPED, "Preempted", 137)


async def test_what_is_being_stopped_has_its_grace_while_leases_are_granted(tmp_path: Path, uid: str) -> None:
    async with Bench(tmp_path) as bench:
        grant(bench, 3.0, 0.0)
        trapped = tmp_path / "trapped"
        script = f"trap 'sleep 4; exit 9' TERM; touch {trapped}; while :; do sleep 0.05; done"
        bench.want(leased(uid, "sh", "-c", script))
        await until(lambda: trapped.exists() or None)
        bench.stop((uid, 1), grace_seconds=600)
        grant(bench, 600.0, 0.0)
        assert (await bench.end((uid, 1))).exit_code == 9


async def test_what_comes_too_late_to_its_start_is_not_started(tmp_path: Path, uid: str) -> None:
    """The agent was held up between deciding and doing: by now it may run elsewhere."""
    ran = tmp_path / "ran"
    async with Bench(tmp_path) as bench:
        bench.shell.execute([Start(leased(uid, "touch", str(ran)), boot_seconds() - 0.001, 30.0)])
        end = await until(lambda: next((one for one in bench.events if isinstance(one, PlacementEnded)), None))
        assert (end.place, end.reason) == ((uid, 1), LEASE_EXPIRED)
        assert not ran.exists()


def test_what_ended_with_its_lease_is_not_let_live_by_a_later_one() -> None:
    machine = Machine()
    machine.granted(10, 0, 3)
    machine.tell([leased("a", "true"), leased("b", "true")], 1)
    for one in ("a", "b"):
        machine.started((one, 1), 1)
    (stop, _) = machine.due(10)
    assert getattr(stop, "grace_seconds", None) == 3
    assert machine.granted(10, 11, 4) == []
    assert machine.tell([leased("c", "true")], 12) == [Start(leased("c", "true"), 21, 4)]
    machine.started(("c", 1), 12)
    assert machine.granted(10, 13, 5) == [MoveDeadline(("c", 1), 23, 5)]
