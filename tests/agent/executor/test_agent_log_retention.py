"""Before a node is wiped: nothing is left of what ran there but how it ended, and that is told until it is known."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from bursar.agent.executor.journal import Journal, began
from bursar.agent.executor.log_retention import remove_all
from bursar.agent.executor.wipe import Wipe
from bursar.agent.machine.state import NOT_WANTED
from bursar.agent.machine.types import PlacementState, PlacementStatus, Run
from support.nodes import executors as shells
from support.nodes.executors import Bench, script, until

SECRET = "the-patients-name"


def hook(uid: str, text: str) -> Run:
    """The wipe of a claim of this name."""
    return Wipe(text).of(Run(f"claim-{uid}", 1, "", "wipe", wipe=True))


def secret(uid: str, text: str = "exit 7") -> Run:
    """Work that leaves something behind, wherever one may look: in its output, its command and its environment."""
    return script(uid, f"echo {SECRET}; {text}", env={"KEY": SECRET}, devices={"nvidia.com/gpu": (0, 1)})


def left_in(folder: Path) -> list[str]:
    """The files in which something of it can still be read."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return [str(path.relative_to(folder)) for path in files if SECRET.encode() in path.read_bytes()]


def looking(folder: Path) -> str:
    """A hook that notes where it still finds something; it does not find itself."""
    word = SECRET.replace("-", "[-]")
    return f"grep -rl '{word}' {folder}/placements {folder}/journal > {folder.parent}/found; true"


def found(folder: Path) -> str:
    return (folder.parent / "found").read_text()


async def test_what_ended_and_is_not_acknowledged_leaves_nothing_but_its_report(tmp_path: Path, uid: str) -> None:
    work, one = tmp_path / "work", secret(uid)
    async with Bench(work) as bench:
        before = await bench.run(one)
        assert SECRET in bench.text(one.place)
        assert (await bench.run(hook(uid, looking(work)))).state is PlacementState.SUCCEEDED
        assert found(work) == ""
        assert bench.status(one.place) == before
        assert (before.exit_code, before.usage.gpu_seconds > 0) == (7, True)
    assert left_in(work) == []


async def test_the_report_outlives_the_agent_and_the_wipe(tmp_path: Path, uid: str) -> None:
    work, one = tmp_path / "work", secret(uid, "i=0; while [ $i -lt 20000 ]; do i=$((i+1)); done; exit 7")
    async with Bench(work) as bench:
        before = await bench.run(one)
        await bench.run(hook(uid, "true"))
    async with Bench(work) as bench:
        assert told(bench.status(one.place)) == told(before)
        assert before.usage.cpu_seconds > 0
        bench.acknowledge(one.place)
    async with Bench(work) as bench:
        assert bench.status(one.place) is None
    assert left_in(work) == []


def told(status: PlacementStatus | None) -> PlacementStatus:
    """How it ended, without the memory that nothing uses any more."""
    assert status is not None
    return msgspec.convert(
        {**msgspec.to_builtins(status), "usage": {**msgspec.to_builtins(status.usage), "memory_bytes": 0}},
        PlacementStatus,
    )


async def test_what_ended_while_the_agent_was_dead_is_removed_as_well(tmp_path: Path, uid: str) -> None:
    """The agent is killed while it runs, and it ends without anybody having seen it."""
    work = tmp_path / "work"
    one = secret(uid, f"while [ ! -e {tmp_path}/go ]; do sleep 0.02; done; exit 4")
    kill_a_life(work, one)
    (tmp_path / "go").touch()
    await until(lambda: (work / "placements" / f"{uid}.1" / "status").exists() or None)
    async with Bench(work) as bench:
        await bench.end(one.place)
        assert SECRET in bench.text(one.place)
        await bench.run(hook(uid, looking(work)))
        assert found(work) == ""
        status = bench.status(one.place)
        assert (status and status.exit_code) == 4


def kill_a_life(work: Path, *runs: Run) -> None:
    """An agent that is killed when all of these run."""
    command = [sys.executable, shells.__file__, str(work), msgspec.json.encode(runs).decode(), "0"]
    life = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert life.stdout is not None
        assert life.stdout.readline() == "running\n"
    finally:
        life.kill()
        life.wait(60)
        assert life.stdout is not None
        life.stdout.close()


async def test_what_was_never_started_leaves_nothing_and_is_never_started(tmp_path: Path, uid: str) -> None:
    """An earlier life wrote down that it would, and came no further than its folder."""
    work, one = tmp_path / "work", secret(uid)
    work.mkdir()
    journal = Journal(work / "journal")
    journal.append([began(one)])
    journal.close()
    folder = work / "placements" / f"{uid}.1"
    folder.mkdir(parents=True)
    (folder / "spec").write_text(SECRET)
    async with Bench(work) as bench:
        await bench.run(hook(uid, looking(work)))
        assert found(work) == ""
        assert not folder.exists()
    async with Bench(work) as bench:
        bench.want(one)
        status = await bench.end(one.place)
        assert (status.state, status.reason) == (PlacementState.STOPPED, NOT_WANTED)
        assert not folder.exists()


async def test_output_whose_time_lies_ahead_goes_as_well(tmp_path: Path, uid: str) -> None:
    """Clocks are set back, and then what was written before seems to be of the future."""
    work, one = tmp_path / "work", secret(uid)
    async with Bench(work) as bench:
        await bench.run(one)
        bench.acknowledge(one.place)
        os.utime(bench.folder(one.place), (1e10, 1e10))
        await bench.run(hook(uid, looking(work)))
    assert found(work) == ""


async def test_an_end_that_could_not_be_written_is_written_before_its_output_goes(
    tmp_path: Path, uid: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk was full when it ended: then its folder is all that says how, until the journal does."""
    work, one = tmp_path / "work", secret(uid, f"while [ ! -e {tmp_path}/go ]; do sleep 0.02; done; exit 7")

    def disk_full(fd: int, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "no room")

    async with Bench(work) as bench:
        bench.want(one)
        await bench.until(one.place, PlacementState.RUNNING)
        with monkeypatch.context() as full:
            full.setattr("bursar.agent.executor.journal._put", disk_full)
            (tmp_path / "go").touch()
            await bench.end(one.place)
        await bench.run(hook(uid, "true"))
    async with Bench(work) as bench:
        status = bench.status(one.place)
        assert (status and status.exit_code) == 7


async def test_a_node_whose_output_cannot_be_removed_is_not_wiped(
    tmp_path: Path, uid: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    work, one = tmp_path / "work", secret(uid)

    def stays(path: str, *_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, "it stays", path)

    async with Bench(work) as bench:
        await bench.run(one)
        with monkeypatch.context() as immutable:
            for name in ("unlink", "rmdir"):
                immutable.setattr(os, name, stays)
            status = await bench.run(hook(uid, looking(work)))
        assert status.state is PlacementState.FAILED
        assert "the output of 1 placement cannot be removed" in status.message
        assert uid not in status.message, "everybody can read it"
        assert not (tmp_path / "found").exists(), "the hook did not run"


def test_whatever_lies_there_is_removed_but_what_is_to_stay(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "gone" / "below").mkdir(parents=True)
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "kept")
    remove_all(tmp_path, {"kept"})
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
