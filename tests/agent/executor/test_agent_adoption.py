"""The agent's own end: what runs goes on, is adopted, and is never run twice; nothing outlives its deadline."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import replace
from pathlib import Path

import msgspec
from structlog.testing import capture_logs

from bursar.agent.executor.journal import Journal, began
from bursar.agent.machine.events import PlacementEnded
from bursar.agent.machine.state import LEASE_EXPIRED, OF_THE_PAST, RETRY_SECONDS, SignalStop, Start
from bursar.agent.machine.types import Place, PlacementState, Run
from bursar.agent.shim.clock import boot_seconds
from support.nodes import executors as shells
from support.nodes.executors import SLEEP, Bench, alive, processes_of, run, script, sleeper, until


def another_life(folder: Path, *runs: Run, lease_seconds: float = 0) -> subprocess.Popen[str]:
    command = [sys.executable, shells.__file__, str(folder), msgspec.json.encode(runs).decode(), str(lease_seconds)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "running\n"
    process.stdout.close()
    return process


def killed(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()


async def test_what_runs_outlives_its_agent_and_is_adopted(tmp_path: Path, uid: str) -> None:
    ones = [script(f"{uid}-{n}", "echo $$; trap 'exit 9' TERM; while :; do sleep 0.05; done") for n in range(3)]
    killed(another_life(tmp_path, *ones))
    async with Bench(tmp_path) as bench:
        pids = [await sleeper(bench, one.place) for one in ones]
        assert all(map(alive, pids))
        bench.want(*ones)
        for one in ones:
            await bench.until(one.place, PlacementState.RUNNING)
        assert bench.events == []
        for one in ones:
            bench.stop(one.place)
        assert {(await bench.end(one.place)).exit_code for one in ones} == {9}
        assert not any(map(alive, pids))


async def test_what_ended_while_no_agent_was_there_is_known(tmp_path: Path, uid: str) -> None:
    one = script(uid, f"echo $$; while [ ! -e {tmp_path}/go ]; do sleep 0.02; done; exit 4")
    killed(another_life(tmp_path, one))
    (tmp_path / "go").touch()
    await until(lambda: True if not processes_of(f"{uid}.1") else None)
    async with Bench(tmp_path) as bench:
        end = bench.status((uid, 1))
        assert end is not None
        assert (end.state, end.exit_code) == (PlacementState.FAILED, 4)
        bench.want(one)
        bench.acknowledge((uid, 1))
        bench.want(one)
        assert (await bench.end((uid, 1))).reason == OF_THE_PAST
    async with Bench(tmp_path) as bench:
        bench.want(one)
        assert (await bench.end((uid, 1))).reason == OF_THE_PAST
        assert bench.text((uid, 1)).count("\n") == 1, "it was run twice"


async def test_a_stop_outlives_the_agent_that_asked_for_it(tmp_path: Path, uid: str) -> None:
    async with Bench(tmp_path) as bench:
        bench.want(script(uid, "trap '' TERM; echo $$; while :; do sleep 0.05; done"))
        pid = await sleeper(bench, (uid, 1))
        bench.stop((uid, 1), grace_seconds=1, reason="Preempted")
        await asyncio.to_thread(_wait_for_stop, bench, (uid, 1))
    await until(lambda: True if not alive(pid) else None)
    async with Bench(tmp_path) as bench:
        end = await bench.end((uid, 1))
        assert (end.state, end.reason, end.exit_code) == (PlacementState.STOPPED, "Preempted", 137)


async def test_a_stopped_agent_lets_nothing_run_past_its_deadline(tmp_path: Path, uid: str) -> None:
    one = script(uid, "trap '' TERM; echo $$; while :; do sleep 0.05; done", leased=True, grace_seconds=1)
    agent = another_life(tmp_path, one, lease_seconds=2)
    try:
        os.kill(agent.pid, signal.SIGSTOP)
        await until(lambda: True if not processes_of(f"{uid}.1") else None)
    finally:
        killed(agent)
    async with Bench(tmp_path) as bench:
        end = await bench.end((uid, 1))
        assert (end.state, end.reason, end.exit_code) == (PlacementState.STOPPED, LEASE_EXPIRED, 137)


async def test_what_was_journaled_but_not_started_waits_to_be_wanted(tmp_path: Path, uid: str) -> None:
    journal = Journal(tmp_path / "journal")
    journal.append([began(run(uid, "echo", "hello"))])
    journal.close()
    async with Bench(tmp_path) as bench:
        status = bench.status((uid, 1))
        assert status is not None
        assert status.state is PlacementState.STARTING
        assert (await bench.run(run(uid, "echo", "hello"))).state is PlacementState.SUCCEEDED


async def test_of_two_shims_only_one_starts_the_command(tmp_path: Path, uid: str) -> None:
    async with Bench(tmp_path) as bench:
        bench.want(script(uid, "echo $$; exec sleep 300"))
        pid = await sleeper(bench, (uid, 1))
        shim, pipe = bench.shell._children[(uid, 1)].folder.spawn()
        assert os.read(pipe, 64) == b""
        os.close(pipe)
        assert os.waitstatus_to_exitcode(os.waitpid(shim, 0)[1]) == 3
        assert bench.text((uid, 1)) == f"{pid}\n"
        bench.stop((uid, 1))
        await bench.end((uid, 1))


async def test_a_killed_shim_takes_everything_with_it(bench: Bench, uid: str) -> None:
    """What it leaves behind is found and killed before the end is told."""
    async with bench:
        bench.want(script(uid, "setsid sleep 300 & setsid sleep 300 & echo $$; wait"))
        await sleeper(bench, (uid, 1))
        os.kill(bench.shell._children[(uid, 1)].shim, signal.SIGKILL)
        end = await bench.end((uid, 1))
        assert (end.state, end.reason, end.exit_code) == (PlacementState.FAILED, "ShimLost", None)
        assert processes_of(uid) == []


async def test_a_shim_killed_while_no_agent_was_there(tmp_path: Path, uid: str) -> None:
    agent = another_life(tmp_path, script(uid, "setsid sleep 300 & echo $$; wait"))
    killed(agent)
    folder = next((tmp_path / "placements").iterdir())
    os.kill(int((folder / "claim").read_text().split()[0]), signal.SIGKILL)
    async with Bench(tmp_path) as bench:
        assert (await bench.end((uid, 1))).reason == "ShimLost"
        assert processes_of(uid) == []


async def test_a_pid_that_is_another_process_now_is_not_taken_for_ours(tmp_path: Path, uid: str) -> None:
    """The claim names a process that lives, but not since then."""
    killed(another_life(tmp_path, run(uid, *SLEEP)))
    folder = next((tmp_path / "placements").iterdir())
    shim, ticks, boot = (folder / "claim").read_text().split()
    os.kill(int(shim), signal.SIGKILL)
    stranger = subprocess.Popen(["sleep", "300"])
    try:
        (folder / "claim").unlink()
        (folder / "claim").write_text(f"{stranger.pid} {ticks} {boot}\n")
        async with Bench(tmp_path) as bench:
            assert (await bench.end((uid, 1))).reason == "ShimLost"
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


async def test_a_node_that_was_restarted_says_so(tmp_path: Path, uid: str) -> None:
    killed(another_life(tmp_path, run(uid, *SLEEP)))
    folder = next((tmp_path / "placements").iterdir())
    shim, ticks, _ = (folder / "claim").read_text().split()
    os.kill(int(shim), signal.SIGKILL)
    (folder / "claim").unlink()
    (folder / "claim").write_text(f"{shim} {ticks} another-boot\n")
    async with Bench(tmp_path) as bench:
        assert (await bench.end((uid, 1))).reason == "NodeRestarted"


async def test_a_shim_that_somebody_has_stopped_is_woken_and_kills(bench: Bench, uid: str) -> None:
    async with bench:
        bench.want(script(uid, "echo $$; exec sleep 300"))
        pid = await sleeper(bench, (uid, 1))
        os.kill(bench.shell._children[(uid, 1)].shim, signal.SIGSTOP)
        bench.stop((uid, 1), grace_seconds=0)
        bench.shell.execute(bench.machine.due(boot_seconds() + RETRY_SECONDS))
        assert (await bench.end((uid, 1))).state is PlacementState.STOPPED
        assert not alive(pid)


async def test_a_shim_that_is_asked_to_end_takes_the_command_with_it(bench: Bench, uid: str) -> None:
    """As when the machine is shut down."""
    async with bench:
        bench.want(script(uid, "trap 'exit 6' TERM; echo $$; while :; do sleep 0.05; done"))
        await sleeper(bench, (uid, 1))
        os.kill(bench.shell._children[(uid, 1)].shim, signal.SIGTERM)
        end = await bench.end((uid, 1))
        assert (end.state, end.reason, end.exit_code) == (PlacementState.STOPPED, "Terminated", 6)


async def test_a_life_cut_short_anywhere_starts_nothing_twice(tmp_path: Path, uid: str) -> None:
    ones = [script(f"{uid}-{n}", f"echo $$ >> {tmp_path}/ran-{n}; exec sleep 300") for n in range(12)]
    said = msgspec.json.encode(ones).decode()
    for pause in (0.0, 0.02, 0.05, 0.1):
        life = subprocess.Popen([sys.executable, shells.__file__, str(tmp_path), said, "0"], stdout=subprocess.DEVNULL)
        await until(lambda: True if (tmp_path / "journal").exists() else None)
        await asyncio.sleep(pause)  # wherever it is by then
        life.kill()
        life.wait()
    async with Bench(tmp_path) as bench:
        bench.want(*ones)
        for one in ones:
            await bench.until(one.place, PlacementState.RUNNING)
        pids = [await until(lambda n=n: _lines(tmp_path / f"ran-{n}")) for n in range(len(ones))]  # type: ignore[misc]
        assert [len(lines) for lines in pids] == [1] * len(ones)
        for one in ones:
            bench.stop(one.place)
        for one in ones:
            await bench.end(one.place)


def _lines(path: Path) -> list[str] | None:
    return path.read_text().splitlines() if path.exists() and path.read_text().endswith("\n") else None


def _wait_for_stop(bench: Bench, place: Place) -> None:
    while bench.shell._children[place].kill_at is None:
        time.sleep(0.01)


async def test_what_cannot_be_killed_holds_up_nothing_else(tmp_path: Path, uid: str) -> None:
    one = run(uid, *SLEEP)
    killed(another_life(tmp_path, one))
    # As a process that hangs in a driver: it is in the group for as long as the file says so.
    group = tmp_path / "group"
    group.mkdir()
    (group / "cgroup.procs").write_text("999999999\n")
    async with Bench(tmp_path) as bench:
        folder = bench.folder(one.place)
        shim = int((folder / "claim").read_text().split()[0])
    paths = {"folders": [str(group)], "unified": None, "memory": None, "cpu_usage": None}
    (folder / "group").write_bytes(msgspec.json.encode(paths))
    async with Bench(tmp_path) as bench:
        os.kill(shim, signal.SIGSTOP)
        bench.shell.execute([SignalStop(one.place, 0) for _ in range(50)])
        try:
            end = await bench.run(script(f"{uid}-other", "exit 0"))
        finally:
            (group / "cgroup.procs").write_text("")
        assert end.state is PlacementState.SUCCEEDED
        await bench.end(one.place)


async def test_what_cannot_be_killed_and_has_no_shim_keeps_nobody_from_starting(tmp_path: Path, uid: str) -> None:
    one = run(uid, *SLEEP)
    killed(another_life(tmp_path, one))
    (folder,) = (tmp_path / "placements").iterdir()
    os.kill(int((folder / "claim").read_text().split()[0]), signal.SIGKILL)
    # As a process that hangs in a driver: it is in the group for as long as the file says so.
    group = tmp_path / "group"
    group.mkdir()
    (group / "cgroup.procs").write_text("999999999\n")
    paths = {"folders": [str(group)], "unified": None, "memory": None, "cpu_usage": None}
    (folder / "group").write_bytes(msgspec.json.encode(paths))
    for _ in range(2):
        async with asyncio.timeout(30), Bench(tmp_path) as bench:
            bench.stop(one.place)
            assert (await bench.run(script(f"{uid}-{uuid.uuid4().hex}", "exit 0"))).state is PlacementState.SUCCEEDED
            status = bench.status(one.place)
            assert status is not None
            assert status.state is PlacementState.STOPPING, "nothing says that it is dead"
    async with Bench(tmp_path) as bench:
        (group / "cgroup.procs").write_text("")
        end = await bench.end(one.place)
        assert (end.state, end.reason) == (PlacementState.FAILED, "ShimLost")


async def test_what_cannot_be_carried_out_is_told_without_its_secrets(tmp_path: Path, uid: str) -> None:
    nameless = replace(run(uid, "true", env={"PASSWORD": "hunter2"}), uid=5)  # type: ignore[arg-type]
    with capture_logs() as told:
        async with Bench(tmp_path) as bench:
            bench.shell.execute([Start(nameless)])
            await until(lambda: told or None)
            end = await until(lambda: next((one for one in bench.events if isinstance(one, PlacementEnded)), None))
            assert end.reason == "StartFailed"
    (line,) = told
    assert (line["instruction"], line["place"]) == ("Start", (5, 1))
    assert "hunter2" not in str(line)
