"""A machine that sleeps, and a disk that is full: what has a deadline keeps it, and what is granted arrives."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from bursar.agent.control.certificates import NoCredentials
from bursar.agent.control.codec import HeartbeatAnswer
from bursar.agent.control.stream import ControlStream
from bursar.agent.daemon import Daemon
from bursar.agent.executor.placement_dir import BOOTSTRAP, PlacementDir
from bursar.agent.host.environment import user
from bursar.agent.host.probe import Probe
from bursar.agent.machine.types import PlacementState, Run
from bursar.agent.shim import shim
from bursar.agent.shim.clock import boot_seconds
from bursar.agent.shim.deadline import CREDIT_EXHAUSTED, LEASE_EXPIRED, format_deadline, parse_deadline
from support.nodes.executors import Bench, run, until

SLEPT_SECONDS = 1000


def prepared(path: Path, deadline: float, *command: str) -> PlacementDir:
    folder = PlacementDir(path)
    folder.prepare()
    folder.write_spec(command, {"PATH": "/usr/bin:/bin"}, cwd="/", owner=user(), group=None, options={"grace": 0})
    folder.write_deadline(deadline, 0.0)
    return folder


def shim_after_sleeping(folder: PlacementDir) -> None:
    """Runs it where the machine has slept, as far as it can tell: only a clock that counts that is ahead."""
    slept = ["unshare", "--time", "--boottime", str(SLEPT_SECONDS), "--fork", "--"]
    if subprocess.run([*slept, "true"], capture_output=True).returncode:
        pytest.skip("there are no time namespaces here")
    root = str(Path(shim.__file__).parents[3])
    command = [*slept, sys.executable, "-I", "-S", "-c", BOOTSTRAP, root, str(folder.path)]
    subprocess.run(command, stdout=subprocess.DEVNULL, timeout=60, check=True)


def test_a_lease_that_ended_while_the_machine_slept_is_over(tmp_path: Path) -> None:
    folder = prepared(tmp_path / "over", boot_seconds() + SLEPT_SECONDS / 2, "touch", str(tmp_path / "ran"))
    shim_after_sleeping(folder)
    end = folder.exit()
    assert end is not None
    assert end.reason == LEASE_EXPIRED
    assert not (tmp_path / "ran").exists()


def test_a_lease_that_lasts_longer_than_the_machine_slept_is_not(tmp_path: Path) -> None:
    folder = prepared(tmp_path / "good", boot_seconds() + SLEPT_SECONDS + 600, "touch", str(tmp_path / "ran"))
    shim_after_sleeping(folder)
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize("deadline", [3.0, 1e9])
def test_a_shim_with_a_deadline_looks_at_the_clock_often(deadline: float) -> None:
    """The kernel's timers stand still while the machine sleeps."""
    one = shim.Shim.__new__(shim.Shim)
    one.kill_at = one.expires_at = float("inf")
    one.deadline, one.frozen_at = boot_seconds() + deadline, 0.0
    assert one._wait_milliseconds() <= 1000 * shim.LOOK_SECONDS + 1 <= 5000


async def test_everybody_in_an_agent_counts_by_the_clock_that_goes_on(
    tmp_path: Path, uid: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A heartbeat that was sent before the machine slept grants nothing afterwards."""
    probe = Probe(tmp_path)
    daemon = Daemon("n", tmp_path / "work", probe)
    stream = ControlStream("n", NoCredentials(("127.0.0.1:1",)), daemon)
    sent_at = stream._clock()
    await daemon.open()
    try:
        real = time.clock_gettime
        monkeypatch.setattr(time, "clock_gettime", lambda number: real(number) + SLEPT_SECONDS)
        assert min(daemon._clock(), stream._clock(), boot_seconds()) >= sent_at + SLEPT_SECONDS
        leased = Run(uid, 1, "default", uid, command=("true",), leased=True)
        daemon.hear(HeartbeatAnswer(lease_seconds=SLEPT_SECONDS / 2, directives=(leased,)), sent_at)
        assert [one.state for one in daemon.snapshot().statuses] == [PlacementState.STARTING]
        daemon.hear(HeartbeatAnswer(lease_seconds=SLEPT_SECONDS / 2), stream._clock())
        monkeypatch.setattr(time, "clock_gettime", real)  # a shim is another process, to which nothing happened
        await until(lambda: daemon.snapshot().statuses[0].state is PlacementState.SUCCEEDED or None)
    finally:
        await daemon.close()
        probe.close()


# A full disk.


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(disk)], capture_output=True).returncode:
        pytest.skip("nothing can be mounted here")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def fill(disk: Path) -> None:
    with (disk / "filler").open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(b"x" * 4096)
    assert shutil.disk_usage(disk).free == 0


async def test_a_deadline_moves_on_a_full_disk(small_disk: Path, uid: str) -> None:
    async with Bench(small_disk) as bench:
        bench.grant(600.0)
        bench.want(run(uid, "sleep", "300", leased=True))
        await bench.until((uid, 1), PlacementState.RUNNING)
        fill(small_disk)
        folder = PlacementDir(bench.folder((uid, 1)))
        before = folder.deadline()
        assert before is not None
        bench.grant(1200.0)
        await until(lambda: (folder.deadline() or 0) > before + 500 or None)
        (small_disk / "filler").unlink()
        bench.stop((uid, 1), grace_seconds=0)
        await bench.end((uid, 1))


def test_a_deadline_that_is_half_written_is_none() -> None:
    lease, credit = (1.5, None, 0.0, LEASE_EXPIRED), (22.25, 3.0, 322.25, CREDIT_EXHAUSTED)
    old, new = format_deadline(*lease), format_deadline(*credit)
    assert (parse_deadline(old), parse_deadline(new)) == (lease, credit)
    whole = {parse_deadline(new[:n] + old[n:]) for n in range(len(new) + 1)}
    assert whole == {None, lease, credit}


def test_a_deadline_is_long_enough_for_a_machine_that_runs_for_a_century() -> None:
    terms = (3_200_000_000.123456, 604_800.0, 3_200_604_800.123456, CREDIT_EXHAUSTED)
    assert parse_deadline(format_deadline(*terms)) == terms


def test_a_deadline_that_cannot_be_read_starts_nothing(tmp_path: Path) -> None:
    folder = prepared(tmp_path / "torn", boot_seconds() + 600, "touch", str(tmp_path / "ran"))
    (folder.path / "deadline").write_bytes(b"nonsense")
    pid, pipe = folder.spawn()
    os.waitpid(pid, 0)
    os.close(pipe)
    end = folder.exit()
    assert end is not None
    assert end.reason == LEASE_EXPIRED
