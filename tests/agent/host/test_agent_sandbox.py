"""The sandbox of a placement, with a real shell, real shims and the real bubblewrap."""

from __future__ import annotations

import os
import signal
import stat
from pathlib import Path
from typing import Any

import pytest

from bursar.agent.executor.executor import ExecutorSettings
from bursar.agent.host.disk_quota import Mount, find_mount
from bursar.agent.host.environment import user
from bursar.agent.host.sandbox import NO_SANDBOX, Sandbox, Users, find_sandbox
from bursar.agent.machine.types import PlacementState, Run
from bursar.agent.shim.namespaces import seccomp_filter
from bursar.core.values.replace import replace
from support.nodes.executors import Bench, alive, run, script, until

FOUND = find_sandbox()
needs_sandbox = pytest.mark.skipif(not FOUND.isolates, reason=f"nothing can be isolated here: {FOUND.why}")


def settings(folder: Path, **more: Any) -> ExecutorSettings:
    return ExecutorSettings(sandbox=replace(FOUND, hidden=(folder.resolve(),), **more))


def of(tenant: str, uid: str, text: str, **more: Any) -> Run:
    return replace(script(uid, text, **more), tenant=tenant)


@needs_sandbox
async def test_a_command_is_nobody_and_can_become_nobody_else(tmp_path: Path, uid: str) -> None:
    asked = "id -u; id -G; umask; grep -E '^(Cap|NoNewPrivs|Seccomp:)' /proc/self/status"
    async with Bench(tmp_path, settings=settings(tmp_path)) as bench:
        await bench.run(script(uid, asked))
        user, groups, umask, *rights = bench.text((uid, 1)).splitlines()
    assert (user, groups, umask) == ("70000", "70000", "0077")
    said = dict(line.split() for line in rights)
    assert (said.pop("NoNewPrivs:"), said.pop("Seccomp:")) == ("1", "2")
    assert {int(value, 16) for value in said.values()} == {0}


@needs_sandbox
@pytest.mark.parametrize(("asked", "shared"), [(False, set()), (True, set(user("daemon").groups))])
async def test_the_groups_of_run_as_are_shared_only_where_that_is_asked_for(
    tmp_path: Path, uid: str, asked: bool, shared: set[int]
) -> None:
    chosen = replace(settings(tmp_path), run_as="daemon", run_as_groups=asked)
    async with Bench(tmp_path, settings=chosen) as bench:
        await bench.run(script(uid, "id -G"))
        assert {int(one) for one in bench.text((uid, 1)).split()} == {70_000} | shared


@needs_sandbox
async def test_home_is_its_own_and_goes_with_it(tmp_path: Path, uid: str) -> None:
    asked = "stat -c '%a %u' . /tmp /var/tmp; pwd; echo $HOME; whoami; echo $USER; ls -A ~; touch ~/x /tmp/x /dev/shm/x"
    async with Bench(tmp_path, settings=settings(tmp_path)) as bench:
        end = await bench.run(script(uid, asked))
        told = bench.text((uid, 1)).splitlines()
    assert end.state is PlacementState.SUCCEEDED
    home = str(tmp_path / "homes" / f"{uid}.1" / "home")
    assert told == ["700 70000"] * 3 + [home, home] + ["bursar-70000"] * 2
    assert list((tmp_path / "homes").iterdir()) == []


@needs_sandbox
async def test_of_the_agent_and_of_other_placements_nothing_is_there(tmp_path: Path, uid: str) -> None:
    asked = f"ls -A {tmp_path}; ls -A {tmp_path}/homes; cat {tmp_path}/journal; ps -o comm= ax; touch /etc/x"
    async with Bench(tmp_path, settings=settings(tmp_path)) as bench:
        bench.want(of("biology", f"{uid}-other", "echo $$; sleep 300"))
        await bench.until((f"{uid}-other", 1), PlacementState.RUNNING)
        await bench.run(script(uid, asked))
        told = bench.text((uid, 1)).splitlines()
        bench.stop((f"{uid}-other", 1), grace_seconds=0)
        await bench.end((f"{uid}-other", 1))
    assert told[:2] == ["homes", f"{uid}.1"]
    assert told[2].endswith("No such file or directory")
    assert told[3:-1] == ["bwrap", "cat", "sh", "ps"]
    assert told[-1].endswith("Read-only file system")


@needs_sandbox
async def test_how_a_command_ends_is_known_exactly(tmp_path: Path, uid: str) -> None:
    async with Bench(tmp_path, settings=settings(tmp_path)) as bench:
        assert (await bench.run(script(f"{uid}-a", "exit 7"))).exit_code == 7
        assert (await bench.run(script(f"{uid}-b", "kill -9 $$"))).exit_code == 137
        end = await bench.run(run(f"{uid}-c", "no-such-command"))
        assert (end.reason, end.exit_code) == ("CommandNotFound", 127)
        end = await bench.run(run(f"{uid}-d", "true", working_dir="/no/such/folder"))
        assert end.reason == "WorkingDirUnusable"


@needs_sandbox
async def test_it_is_asked_to_end_and_has_its_grace(tmp_path: Path, uid: str) -> None:
    async with Bench(tmp_path, settings=settings(tmp_path)) as bench:
        bench.want(script(uid, "trap 'echo bye; exit 3' TERM; echo up; while :; do sleep 0.1; done"))
        await until(lambda: bench.shell.log(uid, 1) and "up" in bench.text((uid, 1)))
        bench.stop((uid, 1), grace_seconds=60)
        end = await bench.end((uid, 1))
        assert (end.state, end.exit_code) == (PlacementState.STOPPED, 3)
        assert "bye" in bench.text((uid, 1))


@needs_sandbox
async def test_what_it_leaves_behind_ends_with_it(tmp_path: Path, uid: str) -> None:
    async with Bench(tmp_path, settings=settings(tmp_path)) as bench:
        await bench.run(script(uid, f"setsid sleep 300.{uid[-6:]} >/dev/null 2>&1 & true"))
        wanted = f"sleep\0300.{uid[-6:]}\0".encode()
        running = [one for one in Path("/proc").iterdir() if one.name.isdigit() and wanted == _command_line(one)]
        assert running == []


def _command_line(process: Path) -> bytes:
    try:
        return (process / "cmdline").read_bytes()
    except OSError:
        return b""


@needs_sandbox
async def test_a_shim_that_is_killed_takes_everything_with_it(tmp_path: Path, uid: str) -> None:
    async with Bench(tmp_path, settings=settings(tmp_path)) as bench:
        bench.want(script(uid, "sleep 300 & wait"))
        await bench.until((uid, 1), PlacementState.RUNNING)
        child = bench.shell._children[(uid, 1)]
        os.kill(child.shim, signal.SIGKILL)
        assert (await bench.end((uid, 1))).reason == "ShimLost"
        assert not alive(child.shim)
    assert list((tmp_path / "homes").iterdir()) == []


@needs_sandbox
async def test_tenants_have_users_of_their_own_until_the_node_is_wiped(tmp_path: Path, uid: str) -> None:
    chosen = settings(tmp_path, users=Users(70_100, 70_101))
    async with Bench(tmp_path, settings=chosen) as bench:
        for place, tenant in enumerate(("physics", "biology", "physics")):
            await bench.run(of(tenant, f"{uid}-{place}", "id -u"))
        assert [bench.text((f"{uid}-{place}", 1)) for place in range(3)] == ["70100\n", "70101\n", "70100\n"]
    async with Bench(tmp_path, settings=chosen) as bench:  # another life of the agent
        await bench.run(of("biology", f"{uid}-3", "id -u"))
        assert bench.text((f"{uid}-3", 1)) == "70101\n"
        end = await bench.run(of("chemistry", f"{uid}-4", "id -u"))
        assert end.reason == "StartFailed"
        assert "a wipe of the node frees them" in end.message
        failed = await bench.run(Run(f"{uid}-w", 1, "", "wipe", command=("false",), wipe=True))
        assert failed.state is PlacementState.FAILED
        assert (await bench.run(of("chemistry", f"{uid}-5", "id -u"))).reason == "StartFailed"
        namesake = replace(of("biology", f"{uid}-7", "id -u"), tenant_uid="tenant-2")
        await bench.run(replace(namesake, uid=f"{uid}-8", tenant_uid="tenant-1"))
        assert bench.text((f"{uid}-8", 1)) == "70101\n", "as before its server said which biology it is"
        assert (await bench.run(namesake)).reason == "StartFailed", "and no other has its user"
        await bench.run(Run(f"{uid}-w", 2, "", "wipe", command=("true",), wipe=True))
    async with Bench(tmp_path, settings=chosen) as bench:
        await bench.run(of("chemistry", f"{uid}-6", "id -u"))
        assert bench.text((f"{uid}-6", 1)) == "70100\n"


@needs_sandbox
async def test_nothing_that_outlives_a_process_reaches_the_next(tmp_path: Path, uid: str) -> None:
    """System V queues, shared memory and the temporary folders; and keyrings, which nobody gets at."""
    leave = (
        "ipcmk -Q >/dev/null; echo secret | tee /tmp/left /var/tmp/left ~/left > /dev/shm/left;"
        ' python3 -c \'import ctypes; print(ctypes.CDLL(None).syscall(248, b"user", b"k", b"v", 1, -4))\''
    )
    look = "ipcs -q | grep -c 0x; cat /tmp/left /var/tmp/left ~/left /dev/shm/left 2>/dev/null; echo looked"
    async with Bench(tmp_path, settings=settings(tmp_path)) as bench:
        await bench.run(script(f"{uid}-a", leave))
        assert bench.text((f"{uid}-a", 1)).splitlines()[-1] == "-1"
        await bench.run(script(f"{uid}-b", look))
        assert bench.text((f"{uid}-b", 1)).splitlines() == ["0", "looked"]


@needs_sandbox
async def test_only_the_gpus_that_were_given_are_there(tmp_path: Path, uid: str) -> None:
    devices = tmp_path / "devices"
    devices.mkdir()
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm"):
        os.mknod(devices / name, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    work = tmp_path / "work"
    asked = "ls /dev | grep nvidia; echo $CUDA_VISIBLE_DEVICES"
    async with Bench(work, settings=settings(work, devices=devices, minors={0: 2, 1: 1, 2: 0})) as bench:
        await bench.run(script(f"{uid}-none", asked))
        assert bench.text((f"{uid}-none", 1)) == "\n"
        await bench.run(script(f"{uid}-two", asked, devices={"nvidia.com/gpu": (1, 2)}))
        assert bench.text((f"{uid}-two", 1)).split() == ["nvidia-uvm", "nvidia0", "nvidia1", "nvidiactl", "0,1"]


@needs_sandbox
async def test_what_is_shared_can_be_written(tmp_path: Path, uid: str) -> None:
    shared, work = tmp_path / "shared", tmp_path / "work"
    shared.mkdir()
    shared.chmod(0o777)
    async with Bench(work, settings=settings(work, shared=(shared,))) as bench:
        await bench.run(script(uid, f"echo result > {shared}/out"))
    assert (shared / "out").read_text() == "result\n"
    assert (shared / "out").stat().st_uid == 70_000


@needs_sandbox
async def test_a_folder_as_deep_as_somebody_likes_is_removed(tmp_path: Path, uid: str) -> None:
    dig = "import os\nfor _ in range(3000):\n os.mkdir('d')\n os.chdir('d')"
    async with Bench(tmp_path, settings=settings(tmp_path)) as bench:
        end = await bench.run(run(uid, "python3", "-c", dig))
        assert end.state is PlacementState.SUCCEEDED
    assert list((tmp_path / "homes").iterdir()) == []


def test_without_root_or_bubblewrap_nothing_is_isolated(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not NO_SANDBOX.isolates
    if os.geteuid() == 0:
        assert find_sandbox(run_as="root") == Sandbox(why="commands run as root")
        monkeypatch.setattr("bursar.agent.host.sandbox.find_bubblewrap", lambda: "/bin/false")
        assert "does not work here" in find_sandbox().why
        monkeypatch.setattr("bursar.agent.host.sandbox.find_bubblewrap", lambda: "")
        assert "install" in find_sandbox().why
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert find_sandbox() == Sandbox(why="the agent is not root")


def test_users_that_the_machine_has_are_passed_over() -> None:
    assert Users(0, 1_000_000).choose({}) > 0
    with pytest.raises(OSError, match="a wipe of the node frees them"):
        Users(70_000, 70_001).choose({"a": 70_000, "b": 70_001})


def test_the_filter_of_calls_is_well_formed() -> None:
    """Every jump stays inside, and every way ends."""
    program = seccomp_filter()
    assert len(program) % 8 == 0
    lines = [program[at : at + 8] for at in range(0, len(program), 8)]
    for place, (_, _, true, false, *_rest) in enumerate(lines):
        assert place + 1 + max(true, false) < len(lines) + (lines[place][0] == 0x06)


def test_the_mount_of_a_path(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(
        f"none / ext4 rw 0 0\nnone {tmp_path}/a\\040b btrfs rw 0 0\nnone {tmp_path}/a xfs rw,prjquota 0 0\n"
    )
    (tmp_path / "a b").mkdir()
    assert find_mount(tmp_path / "a b", mounts) == Mount(f"{tmp_path}/a b", "btrfs", frozenset({"rw"}))
    assert find_mount(tmp_path, mounts).kind == "ext4"
    assert find_mount(tmp_path / "a" / "b", mounts).options == {"rw", "prjquota"}
