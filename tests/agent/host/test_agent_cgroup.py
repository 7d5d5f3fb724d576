"""Control groups: where they are made, what is written into them, and what is said where they cannot be made.

The machine's own are used in the tests of the shell. Here is what few machines have at the same time: folders that look
like each kind.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from uuid import uuid4

import pytest

from bursar.agent.host.cgroup import CgroupLimits, Cgroups, find, leave_earlier, limits_of, weight

V2_FILES = (
    "cgroup.procs",
    "cgroup.kill",
    "memory.max",
    "memory.swap.max",
    "memory.oom.group",
    "cpu.weight",
    "cpu.max",
    "pids.max",
)
V1_FILES = ("cgroup.procs", "pids.max", "memory.limit_in_bytes", "cpu.shares", "cpu.cfs_period_us", "cpu.cfs_quota_us")


def a_group(path: Path, *files: str, **contents: str) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    for name in files:
        (path / name).touch()
    for name, content in contents.items():
        (path / name.replace("_", ".", 1)).write_text(content)
    return path


def proc(folder: Path, mounts: list[str], own: list[str]) -> dict[str, Path]:
    (folder / "mounts").write_text("".join(f"{line}\n" for line in mounts))
    (folder / "own").write_text("".join(f"{line}\n" for line in own))
    return {"mounts": folder / "mounts", "own": folder / "own"}


def unified(folder: Path, *, controllers: str = "cpu io memory pids", inside: str = "", path: str = "/unit") -> Path:
    """A machine with the second generation, and our service's group in it."""
    mount = folder / "cgroup"
    for group in (mount, mount / path.lstrip("/")):
        a_group(group, "cgroup.subtree_control", cgroup_controllers=controllers)
    own = mount / path.lstrip("/")
    (own / "cgroup.type").write_text("domain\n")
    (own / "cgroup.procs").write_text(inside)
    for above in (mount, own):
        a_group(above / "bursar-1", "cgroup.subtree_control", cgroup_controllers=controllers)
        a_group(above / "bursar-1" / "a.1", *V2_FILES)
    a_group(own / "bursar-1-agent", "cgroup.procs")
    return mount


def found_v2(folder: Path, path: str = "/unit") -> Cgroups:
    return find("bursar-1", cores=4, **proc(folder, [f"none {folder}/cgroup cgroup2 rw 0 0"], [f"0::{path}"]))


def test_the_second_generation(tmp_path: Path) -> None:
    mount = unified(tmp_path)
    cgroups = found_v2(tmp_path)
    assert (cgroups.version, cgroups.parents) == ("v2", {"": mount / "unit" / "bursar-1"})
    group = cgroups.make("a.1", CgroupLimits(1000, 2500, 1 << 30, 64))
    assert group is not None
    folder = mount / "unit" / "bursar-1" / "a.1"
    assert (folder / "memory.max").read_text() == str(1 << 30)
    assert (folder / "memory.oom.group").read_text() == "1"
    assert (folder / "cpu.weight").read_text() == "2500"
    assert (folder / "cpu.max").read_text() == "250000 100000"
    assert (folder / "pids.max").read_text() == "64"
    assert (group.procs, group.kill_file) == ([folder / "cgroup.procs"], folder / "cgroup.kill")
    for above in (mount / "unit", mount / "unit" / "bursar-1"):
        assert (above / "cgroup.subtree_control").read_text() == "+cpu +memory +pids"


def test_without_a_controller_for_processes_the_others_are_used(tmp_path: Path) -> None:
    mount = unified(tmp_path, controllers="cpu memory")
    found_v2(tmp_path)
    assert (mount / "unit" / "bursar-1" / "cgroup.subtree_control").read_text() == "+cpu +memory"


def test_requests_limit_memory_and_nothing_else(tmp_path: Path) -> None:
    mount = unified(tmp_path)
    found_v2(tmp_path).make("a.1", limits_of({"cpu": "500m", "memory": "1Gi"}, {}))
    folder = mount / "unit" / "bursar-1" / "a.1"
    assert (folder / "cpu.weight").read_text() == "1250"
    assert (folder / "memory.max").read_text() == str(1 << 30)
    assert (folder / "cpu.max").read_text() == ""


def test_a_limit_of_memory_goes_before_the_request() -> None:
    assert limits_of({"memory": "1Gi"}, {"memory": "2Gi"}).memory_limit_bytes == 2 << 30
    assert limits_of({"cpu": "1"}, {}).memory_limit_bytes is None


def test_others_are_not_moved_out_of_a_group_that_is_theirs_too(tmp_path: Path) -> None:
    mount = unified(tmp_path, inside="1\n2\n")
    assert found_v2(tmp_path).parents == {"": mount / "bursar-1"}
    assert (mount / "unit" / "bursar-1-agent" / "cgroup.procs").read_text() == ""


def test_a_container_is_all_ours(tmp_path: Path) -> None:
    mount = unified(tmp_path, path="/")
    (mount / "cgroup.procs").write_text("1\n")
    assert found_v2(tmp_path, "/outside/of/it").parents == {"": mount / "bursar-1"}
    assert (mount / "bursar-1-agent" / "cgroup.procs").read_text() == "1"


def test_a_limit_that_cannot_be_set_is_an_error(tmp_path: Path) -> None:
    unified(tmp_path)
    cgroups = found_v2(tmp_path)
    with pytest.raises(FileNotFoundError):
        cgroups.make("b.1", CgroupLimits(memory_limit_bytes=1 << 20))


def test_the_first_generation_and_the_second_beside_it(tmp_path: Path) -> None:
    unified(tmp_path, controllers="")
    mounts = [f"none {tmp_path}/cgroup cgroup2 rw 0 0"]
    for name in ("memory", "cpu,cpuacct", "pids"):
        a_group(tmp_path / name / "unit" / "bursar-1" / "a.1", *V1_FILES)
        mounts.append(f"none {tmp_path}/{name} cgroup rw,relatime,{name} 0 0")
    own = ["5:pids:/unit", "4:memory:/unit", "3:cpu,cpuacct:/unit", "0::/unit"]
    cgroups = find("bursar-1", cores=4, **proc(tmp_path, mounts, own))
    assert cgroups.version == "v1"
    group = cgroups.make("a.1", CgroupLimits(500, 1500, 1 << 20, 64))
    assert group is not None
    memory, cpu, pids = (tmp_path / name / "unit" / "bursar-1" / "a.1" for name in ("memory", "cpu,cpuacct", "pids"))
    assert (pids / "pids.max").read_text() == "64"
    assert (memory / "memory.limit_in_bytes").read_text() == str(1 << 20)
    assert (cpu / "cpu.shares").read_text() == "512"
    assert (cpu / "cpu.cfs_quota_us").read_text() == "150000"
    assert group.folders == (memory, cpu, pids, tmp_path / "cgroup" / "unit" / "bursar-1" / "a.1")
    assert group.kill_file is not None


def test_none_says_why(tmp_path: Path) -> None:
    cgroups = find("bursar-1", cores=4, **proc(tmp_path, [], []))
    assert (cgroups.version, cgroups.make("a.1", CgroupLimits())) == ("none", None)
    assert cgroups.message == ("placements run without limits; v2: is not mounted; v1: has no controller for memory")


def test_what_cannot_be_written_is_none(tmp_path: Path) -> None:
    (tmp_path / "memory").touch()
    mounts = [f"none {tmp_path}/memory cgroup rw,memory 0 0"]
    cgroups = find("bursar-1", cores=4, **proc(tmp_path, mounts, ["4:memory:/"]))
    assert cgroups.version == "none"
    assert "Not a directory" in cgroups.message


@pytest.mark.parametrize(
    ("milli", "cores", "value"), [(1000, 4, 2500), (4000, 4, 10_000), (1, 256, 1), (9000, 4, 10_000)]
)
def test_weights_are_in_proportion_to_the_machine(milli: int, cores: int, value: int) -> None:
    assert weight(milli, cores) == value


def test_what_was_killed_for_memory_is_counted(tmp_path: Path) -> None:
    unified(tmp_path)
    group = found_v2(tmp_path).group("a.1")
    assert group is not None
    assert group.memory is not None
    assert group.oom_kills() == 0
    (group.memory / "memory.events").write_text("low 0\noom 2\noom_kill 1\n")
    assert group.oom_kills() == 1
    (group.memory / "cpu.stat").write_text("usage_usec 2500000\n")
    assert group.cpu_seconds() == 2.5


# What an agent that was killed leaves behind.


def lives(folder: Path, *places: str) -> list[Cgroups]:
    """One life after the other, each with its groups at another place, as when another service starts it."""
    return [
        Cgroups("v1", parents={one: folder / place / one / "bursar-1" for one in ("memory", "cpu")}) for place in places
    ]


def begin(cgroups: Cgroups, folder: Path, *placements: str) -> None:
    """A life of the agent: what was there is left, and groups are made."""
    for parent in cgroups.parents.values():
        parent.mkdir(parents=True, exist_ok=True)
    leave_earlier(cgroups, "bursar-1", folder / "cgroups")
    for parent in cgroups.parents.values():
        for name in placements:
            (parent / name).mkdir()


def test_what_an_earlier_life_left_elsewhere_is_removed(tmp_path: Path) -> None:
    first, second = lives(tmp_path, "a", "b")
    begin(first, tmp_path, "x.1", "y.1")
    begin(second, tmp_path)
    assert not any(parent.exists() for parent in first.parents.values())
    assert all(parent.exists() for parent in second.parents.values())


def test_what_holds_something_stays_and_goes_with_a_later_life(tmp_path: Path) -> None:
    first, second, third = lives(tmp_path, "a", "b", "c")
    begin(first, tmp_path, "empty.1", "held.1")
    held = first.parents["memory"] / "held.1" / "cgroup.procs"
    held.touch()  # A folder with something in it is as hard to remove as a group with processes.
    begin(second, tmp_path)
    assert [one.name for one in first.parents["memory"].iterdir()] == ["held.1"]
    assert not first.parents["cpu"].exists()
    held.unlink()
    begin(third, tmp_path)
    assert not first.parents["memory"].exists()
    assert not second.parents["memory"].exists()


def test_the_groups_of_others_are_left_alone(tmp_path: Path) -> None:
    """Also those of an agent with another directory, and whatever somebody wrote into the note."""
    first, second = lives(tmp_path, "a", "b")
    begin(first, tmp_path)
    beside = [tmp_path / "a" / "memory" / name for name in ("bursar-2", "bursar-2-agent", "user.slice")]
    for one in beside:
        one.mkdir()
    with (tmp_path / "cgroups").open("a") as note:
        note.write("".join(f"{one}\n" for one in beside))
    begin(second, tmp_path)
    assert not first.parents["memory"].exists()
    assert all(one.exists() for one in beside)


def test_the_second_generation_has_one_for_the_agent_itself(tmp_path: Path) -> None:
    parent = tmp_path / "unit-a" / "bursar-1"
    begin(Cgroups("v2", parents={"": parent}), tmp_path, "x.1")
    parent.with_name("bursar-1-agent").mkdir()
    begin(Cgroups("v2", parents={"": tmp_path / "unit-b" / "bursar-1"}), tmp_path)
    assert list((tmp_path / "unit-a").iterdir()) == []


def test_where_groups_cannot_be_made_any_more_those_of_before_are_removed(tmp_path: Path) -> None:
    (first,) = lives(tmp_path, "a")
    begin(first, tmp_path, "x.1")
    begin(Cgroups("none"), tmp_path)
    assert not any(parent.exists() for parent in first.parents.values())


def test_the_machine_s_own_groups(tmp_path: Path) -> None:
    """With real ones, and a real process in one of them."""
    name = f"bursar-{uuid4().hex[:8]}"
    here = find(name)
    if here.version == "none":
        pytest.skip(here.message)
    # As if an earlier life had them one level below: in a group that nobody else has.
    upper = {key: parent.with_name(f"{name}-earlier") for key, parent in here.parents.items()}
    earlier = Cgroups(here.version, parents={key: parent / name for key, parent in upper.items()})
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    memory = next(iter(earlier.parents.values()))
    try:
        for parent in dict.fromkeys(earlier.parents.values()):
            (parent / "x.1").mkdir(parents=True, exist_ok=True)
        (memory / "y.1").mkdir()
        (memory / "y.1" / "cgroup.procs").write_text(str(child.pid))
        (tmp_path / "cgroups").write_text("".join(f"{one}\n" for one in earlier.parents.values()))
        leave_earlier(here, name, tmp_path / "cgroups")
        assert [one.name for one in memory.iterdir() if one.is_dir()] == ["y.1"]
        assert not any(one.exists() for one in earlier.parents.values() if one != memory)
        child.communicate(b"\n", timeout=30)
        leave_earlier(here, name, tmp_path / "cgroups")
        assert not memory.exists()
        assert all(parent.exists() for parent in here.parents.values())
    finally:
        child.kill()
        child.wait(30)
        earlier.remove()
        here.remove()
        for one in dict.fromkeys(upper.values()):
            if one.exists():
                one.rmdir()
