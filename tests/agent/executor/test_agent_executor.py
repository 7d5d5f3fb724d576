"""Real commands under real shims: how they start, what they are told, and every way they end."""

from __future__ import annotations

import asyncio
import errno
import os
import pwd
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bursar.agent.executor.executor import ExecutorSettings, PlacementStarted, group_name
from bursar.agent.executor.placement_dir import PlacementDir
from bursar.agent.host.cgroup import find
from bursar.agent.machine.state import EXPIRED, LEASE_EXPIRED, OF_THE_PAST
from bursar.agent.machine.types import PlacementState
from support.nodes.executors import SLEEP, Bench, alive, processes_of, run, script, sleeper, until

# Starting and ending.


@pytest.mark.parametrize(
    ("text", "state", "code"),
    [
        ("exit 0", PlacementState.SUCCEEDED, 0),
        ("exit 7", PlacementState.FAILED, 7),
        ("kill -9 $$", PlacementState.FAILED, 137),
        ("kill -TERM $$", PlacementState.FAILED, 143),
    ],
)
async def test_how_a_command_ends(bench: Bench, uid: str, text: str, state: PlacementState, code: int) -> None:
    async with bench:
        end = await bench.run(script(uid, text))
        assert (end.state, end.exit_code, end.reason) == (state, code, "")
        assert isinstance(bench.events[0], PlacementStarted)


async def test_a_command_that_does_not_exist(bench: Bench, uid: str) -> None:
    async with bench:
        end = await bench.run(run(uid, "no-such-command", "--x"))
        assert (end.state, end.exit_code, end.reason) == (PlacementState.FAILED, 127, "CommandNotFound")
        assert "'no-such-command'" in end.message


async def test_a_command_that_cannot_be_executed(bench: Bench, uid: str, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("not a program")
    async with bench:
        end = await bench.run(run(uid, str(tmp_path / "notes.txt")))
        assert (end.state, end.exit_code, end.reason) == (PlacementState.FAILED, 126, "CommandNotExecutable")
        assert "notes.txt" in end.message


async def test_a_working_directory_that_does_not_exist(bench: Bench, uid: str) -> None:
    async with bench:
        end = await bench.run(run(uid, "true", working_dir="/no/such/folder"))
        assert (end.state, end.reason) == (PlacementState.FAILED, "WorkingDirUnusable")
        assert "'/no/such/folder'" in end.message
        assert "No such file or directory" in end.message


async def test_a_command_that_the_kernel_cannot_be_told(bench: Bench, uid: str) -> None:
    async with bench:
        end = await bench.run(run(uid, "echo", "a\0b"))
        assert (end.state, end.reason) == (PlacementState.FAILED, "StartFailed")
        assert "NUL" in end.message


async def test_what_a_command_is_told(bench: Bench, uid: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_THE_AGENT", "x")
    wished = {"COLOUR": "grün = green", "BURSAR_NODE": "elsewhere", "CUDA_VISIBLE_DEVICES": "7"}
    more = {"env": wished, "devices": {"nvidia.com/gpu": (3, 1)}, "nodes": ("node-0", "node-1"), "epoch": 4}
    async with bench:
        await bench.run(script(uid, "pwd; env", working_dir=str(tmp_path), **more))
        cwd, *lines = bench.text((uid, 4)).splitlines()
    told = dict(line.split("=", 1) for line in lines)
    assert cwd == str(tmp_path)
    assert told["COLOUR"] == "grün = green"
    assert (told["CUDA_VISIBLE_DEVICES"], told["NVIDIA_VISIBLE_DEVICES"]) == ("1,3", "1,3")
    assert (told["BURSAR_ALLOCATION"], told["BURSAR_NAMESPACE"], told["BURSAR_TENANT"]) == ("train", "lab", "physics")
    assert (told["BURSAR_NODE"], told["BURSAR_NODES"], told["BURSAR_NODE_RANK"]) == ("node-1", "node-0,node-1", "1")
    assert (told["BURSAR_ALLOCATION_UID"], told["BURSAR_EPOCH"]) == (uid, "4")
    assert told["HOME"] == pwd.getpwuid(os.geteuid()).pw_dir
    assert "SECRET_OF_THE_AGENT" not in told


async def test_without_devices_no_gpu_is_seen(bench: Bench, uid: str) -> None:
    async with bench:
        await bench.run(script(uid, 'echo "[$CUDA_VISIBLE_DEVICES]$NVIDIA_VISIBLE_DEVICES"'))
        assert bench.text((uid, 1)) == "[]void\n"


async def test_a_command_runs_in_a_session_and_group_of_its_own(bench: Bench, uid: str) -> None:
    """And inherits nothing: no files, no ignored signals."""
    text = "ls /proc/self/fd; grep -E '^Sig(Blk|Ign|Cgt)' /proc/self/status; ps -o pid=,pgid=,sid= -p $$"
    async with bench:
        await bench.run(run(uid, "sh", "-c", text))
        *descriptors, blocked, ignored, _, ids = bench.text((uid, 1)).splitlines()
    assert descriptors == ["0", "1", "2", "3"]  # the last is that of ls itself
    usual = 0x7FFFFFFF  # the two above are the C library's own
    assert (int(blocked.split()[1], 16) & usual, int(ignored.split()[1], 16) & usual) == (0, 0)
    assert len(set(ids.split())) == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another")
async def test_as_another_user(tmp_path: Path, uid: str) -> None:
    async with Bench(tmp_path, settings=ExecutorSettings(run_as="nobody")) as bench:
        await bench.run(script(uid, "id -un; echo $USER", working_dir="/"))
        assert bench.text((uid, 1)) == "nobody\nnobody\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another")
async def test_another_user_reads_nothing_of_the_agents_and_becomes_nobody_else(tmp_path: Path, uid: str) -> None:
    tmp_path.chmod(0o755)
    for above in (one for one in tmp_path.parents if one.name.startswith(("pytest-", "popen-"))):
        above.chmod(0o755)
    home = tmp_path / "work"
    async with Bench(home, settings=ExecutorSettings(run_as="nobody")) as bench:
        looking = f"ls {tmp_path}; ls {home}; cat {home}/journal; echo $HOME; pwd"
        await bench.run(script(uid, f"grep NoNewPrivs /proc/self/status; {looking}"))
        told = bench.text((uid, 1)).splitlines()
    assert told[0].split() == ["NoNewPrivs:", "1"]
    assert told[1] == "work"
    assert [line.rpartition(": ")[2] for line in told[2:4]] == ["Permission denied"] * 2
    assert told[4:] == ["/", "/"]


async def test_a_reservation_starts_nothing(bench: Bench, uid: str) -> None:
    async with bench:
        bench.want(run(uid))
        await bench.until((uid, 1), PlacementState.RUNNING)
        assert processes_of(uid) == []
        bench.stop((uid, 1))
        end = await bench.end((uid, 1))
        assert (end.state, end.reason, end.exit_code) == (PlacementState.STOPPED, "Preempted", None)


# Stopping.


async def test_a_polite_command_is_stopped_politely(bench: Bench, uid: str) -> None:
    async with bench:
        bench.want(script(uid, "trap 'echo bye; exit 5' TERM; echo here; while :; do sleep 0.05; done"))
        await until(lambda: (bench.shell.log(uid) and "here" in bench.text((uid, 1))) or None)
        bench.stop((uid, 1))
        end = await bench.end((uid, 1))
        assert (end.state, end.reason, end.exit_code) == (PlacementState.STOPPED, "Preempted", 5)
        assert "bye" in bench.text((uid, 1))


PARENT = """
import os, signal, time

# One signal is taken, and one word written: no other can come in between.
awaited = {signal.SIGTERM, signal.SIGCHLD}
signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
for _ in range(40):
    if not os.fork():
        signal.pthread_sigmask(signal.SIG_UNBLOCK, awaited)
        time.sleep(600)
os.write(1, b"here ")
os.write(1, b"asked" if signal.sigwait(awaited) == signal.SIGTERM else b"bereft")
os._exit(0)
"""


async def test_a_command_hears_of_its_end_before_its_children_are_gone(bench: Bench, uid: str) -> None:
    async with bench:
        bench.want(run(uid, sys.executable, "-c", PARENT))
        await until(lambda: (bench.shell.log(uid) and "here" in bench.text((uid, 1))) or None)
        bench.stop((uid, 1))
        await bench.end((uid, 1))
        assert bench.text((uid, 1)) == "here asked"


async def test_a_command_that_ignores_being_asked_is_killed(bench: Bench, uid: str) -> None:
    async with bench:
        bench.want(script(uid, "trap '' TERM; echo here; while :; do sleep 0.05; done"))
        await until(lambda: (bench.shell.log(uid) and "here" in bench.text((uid, 1))) or None)
        bench.stop((uid, 1), grace_seconds=1)
        end = await bench.end((uid, 1))
        assert (end.state, end.exit_code) == (PlacementState.STOPPED, 137)


async def test_a_stop_before_the_start_was_done(bench: Bench, uid: str) -> None:
    async with bench:
        bench.want(run(uid, *SLEEP))
        bench.stop((uid, 1), grace_seconds=5)
        assert (await bench.end((uid, 1))).state is PlacementState.STOPPED


async def test_a_stopped_process_is_stopped(bench: Bench, uid: str) -> None:
    async with bench:
        bench.want(script(uid, "echo $$; kill -STOP $$"))
        await sleeper(bench, (uid, 1))
        bench.stop((uid, 1))
        assert (await bench.end((uid, 1))).exit_code == 143


FORKS_AWAY = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        {ignoring}
        print(os.getpid(), flush=True)
        os.close(1); os.close(2)
        time.sleep(300)
    os._exit(0)
{then}
"""


async def test_what_forks_away_ends_with_the_command(bench: Bench, uid: str) -> None:
    source = FORKS_AWAY.format(ignoring="", then="os.wait(); time.sleep(0.2); sys.exit(3)")
    async with bench:
        end = await bench.run(run(uid, sys.executable, "-c", source))
        assert (end.state, end.exit_code) == (PlacementState.FAILED, 3)
        assert not alive(int(bench.text((uid, 1))))


async def test_what_forks_away_is_stopped_with_the_command(bench: Bench, uid: str) -> None:
    ignoring = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    source = FORKS_AWAY.format(ignoring=ignoring, then="time.sleep(300)")
    async with bench:
        bench.want(run(uid, sys.executable, "-c", source))
        pid = await sleeper(bench, (uid, 1))
        bench.stop((uid, 1), grace_seconds=1)
        await bench.end((uid, 1))
        assert not alive(pid)


async def test_many_that_fork_away_are_all_found(bench: Bench, uid: str) -> None:
    async with bench:
        bench.want(script(uid, "for i in $(seq 30); do setsid sleep 300 & done; echo $$; wait"))
        await sleeper(bench, (uid, 1))
        bench.stop((uid, 1), grace_seconds=0)
        await bench.end((uid, 1))
        assert processes_of(uid) == []


# Deadlines.


async def test_a_ttl_is_kept_by_the_shim(tmp_path: Path, uid: str) -> None:
    async with Bench(tmp_path) as bench:
        end = await bench.run(script(uid, "sleep 300", ttl_seconds=1, grace_seconds=1))
        assert (end.state, end.reason, end.exit_code) == (PlacementState.FAILED, EXPIRED, 143)


async def test_a_deadline_that_nobody_moves_is_kept_by_the_shim(tmp_path: Path, uid: str) -> None:
    """The machine is not asked what is due."""
    async with Bench(tmp_path) as bench:
        bench.grant(1.0)
        end = await bench.run(script(uid, "trap '' TERM; while :; do sleep 300; done", leased=True, grace_seconds=1))
        assert (end.state, end.reason, end.exit_code) == (PlacementState.STOPPED, LEASE_EXPIRED, 137)


async def test_a_deadline_that_is_moved_is_not_kept(tmp_path: Path, uid: str) -> None:
    async with Bench(tmp_path) as bench:
        bench.grant(1.0)
        bench.want(run(uid, *SLEEP, leased=True), run(f"{uid}-b", *SLEEP, leased=True))
        await bench.until((uid, 1), PlacementState.RUNNING)
        granted_at = time.monotonic()
        bench.grant(600.0)
        bench.stop((f"{uid}-b", 1))
        await bench.end((f"{uid}-b", 1))
        await until(lambda: True if time.monotonic() > granted_at + 2 else None)
        assert bench.status((uid, 1)) is not None
        bench.stop((uid, 1), reason="Enough")
        assert (await bench.end((uid, 1))).reason == "Enough"


# Limits and use.


async def test_more_memory_than_the_limit(tmp_path: Path, uid: str) -> None:
    found = find(group_name(tmp_path))
    if not found.parents:
        pytest.skip(found.message)
    source = "print('here', flush=True); x = bytearray(1)\nwhile True: x += b'x' * (1 << 20)"
    try:
        async with Bench(tmp_path, cgroups=found) as bench:
            end = await bench.run(run(uid, sys.executable, "-c", source, limits={"memory": "64Mi"}))
            assert (end.state, end.exit_code, end.reason) == (PlacementState.FAILED, 137, "OOMKilled")
            assert "64Mi" in end.message
            assert 48 << 20 < end.usage.memory_bytes_max <= 64 << 20
    finally:
        found.remove()


async def test_what_is_used_is_measured(bench: Bench, uid: str) -> None:
    source = (
        "import time\nx = b'x' * (40 << 20)\nend = time.process_time() + 0.5\nwhile time.process_time() < end: pass\n"
    )
    waiting = source + "print('done', flush=True); time.sleep(300)"
    async with bench:
        bench.want(run(uid, sys.executable, "-c", waiting, devices={"nvidia.com/gpu": (0, 1)}))
        await until(lambda: (bench.shell.log(uid) and "done" in bench.text((uid, 1))) or None)
        now = (await bench.shell.usages())[(uid, 1)]
        assert now.cpu_seconds >= 0.5
        assert now.memory_bytes > 40 << 20
        assert now.gpu_seconds == 2 * now.seconds
        bench.stop((uid, 1))
        end = (await bench.end((uid, 1))).usage
        assert end.cpu_seconds >= now.cpu_seconds
        assert end.memory_bytes_max > 40 << 20
        assert end.seconds >= now.seconds


# Trouble.


async def test_output_is_bounded_and_the_newest_is_kept(tmp_path: Path, uid: str) -> None:
    async with Bench(tmp_path, settings=ExecutorSettings(output_bytes=10_000)) as bench:
        assert (await bench.run(script(uid, "seq 1 20000"))).state is PlacementState.SUCCEEDED
        text = bench.text((uid, 1))
        assert text.endswith("19999\n20000\n")
        assert 10_000 < len(text) <= 20_000
        assert len(list(bench.folder((uid, 1)).glob("output.*"))) == 2


async def test_a_journal_that_cannot_be_written_starts_nothing(
    tmp_path: Path, uid: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Bench(tmp_path) as bench:
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", _full)
            end = await bench.run(script(uid, "echo here"))
            assert (end.state, end.reason) == (PlacementState.FAILED, "StartFailed")
            assert "No space left" in end.message
        assert bench.shell.log(uid) is None
        assert (await bench.run(script(uid, "echo here", epoch=2))).state is PlacementState.SUCCEEDED


async def test_a_start_that_fails_in_whatever_way_has_failed(
    tmp_path: Path, uid: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Bench(tmp_path) as bench:
        with monkeypatch.context() as patch:
            patch.setattr(os, "mkfifo", _broken)
            end = await bench.run(script(uid, "echo here"))
        assert (end.state, end.reason) == (PlacementState.FAILED, "StartFailed")
        assert "RuntimeError: broken" in end.message
        with monkeypatch.context() as patch:
            patch.setattr(os, "pidfd_open", _broken)  # its shim is there by then, and may be quick
            end = await bench.run(script(f"{uid}-b", "sleep 300"))
        assert (end.state, end.reason) == (PlacementState.FAILED, "StartFailed")
        assert processes_of(uid) == []


async def test_readers_that_are_slow_hold_up_neither_the_journal_nor_a_deadline(tmp_path: Path, uid: str) -> None:
    async with Bench(tmp_path) as bench:
        bench.grant(300.0)
        bench.want(run(uid, *SLEEP, leased=True))
        await bench.until((uid, 1), PlacementState.RUNNING)
        before = PlacementDir(bench.folder((uid, 1))).deadline() or 0.0
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        release = threading.Event()
        reading = asyncio.create_task(asyncio.to_thread(release.wait, 60))
        try:
            bench.want(run(f"{uid}-b"))
            await bench.until((f"{uid}-b", 1), PlacementState.RUNNING)
            bench.grant(900.0)
            await until(lambda: (PlacementDir(bench.folder((uid, 1))).deadline() or 0.0) > before + 300 or None)
        finally:
            release.set()
            assert await reading, "all of that while it was slow"
        bench.stop((uid, 1), grace_seconds=0)
        await bench.end((uid, 1))


async def test_hundreds_at_a_time(tmp_path: Path, uid: str) -> None:
    count = 200
    ones = [script(f"{uid}-{n}", f"echo {n}; exec sleep 300") for n in range(count)]
    async with Bench(tmp_path) as bench:
        bench.want(*ones)
        for one in ones:
            await bench.until(one.place, PlacementState.RUNNING)
        assert len(await bench.shell.usages()) == count
        for one in ones:
            bench.stop(one.place)
        assert {(await bench.end(one.place)).state for one in ones} == {PlacementState.STOPPED}
        assert [bench.text(one.place) for one in ones] == [f"{n}\n" for n in range(count)]
        bench.acknowledge(*(one.place for one in ones))
    async with Bench(tmp_path) as bench:
        assert bench.machine.inventory() == []
        bench.want(*ones)
        assert {one.reason for one in bench.machine.inventory()} == {OF_THE_PAST}


async def test_logs_of_the_past_are_kept_for_a_while(tmp_path: Path, uid: str) -> None:
    async with Bench(tmp_path) as bench:
        await bench.run(script(uid, "echo hello"))
        bench.acknowledge((uid, 1))
    async with Bench(tmp_path) as bench:
        assert bench.text((uid, 1)) == "hello\n"
    async with Bench(tmp_path, settings=ExecutorSettings(keep_seconds=0)) as bench:
        assert bench.shell.log(uid, 1) is None


def _broken(*_: object) -> None:
    raise RuntimeError("broken")


def _full(_: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
