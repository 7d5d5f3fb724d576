"""Simulated nodes over the public API, against a real server, and the command that starts them."""

import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest

from bursar.client import AsyncClient, Client
from bursar.core.nodes.eviction import Notice
from bursar.core.nodes.node import SIMULATED
from bursar.core.objects.object import Key, Stored
from bursar.ops.objects import object as object_ops
from bursar.ops.scheduling.placement import evict
from bursar.sim.registry import NotSimulated
from bursar.sim.rest import RestNodes
from bursar.sim.shape import NodeShape
from bursar.sim.work import EXIT, SECONDS
from bursar.store.objects import change as change_store
from support.api.site import Site, eventually, opened_site
from support.nodes.simulated_nodes import at_work
from support.process.server import BURSAR, Server
from support.runtime.runtime import TEST, assert_counters_equal_charges, bind, code

LEAVE_SECONDS_MAX = 60.0


@pytest.fixture
async def site(database_url: str) -> AsyncIterator[Site]:
    async with opened_site(database_url) as one:
        yield one


@asynccontextmanager
async def acting(site: Site, count: int = 2, *, remove: bool = False, **options: Any) -> AsyncIterator[RestNodes]:
    async with AsyncClient(site.url, site.admin) as client:
        nodes = RestNodes(client, NodeShape(count), **options)
        await nodes.open()
        try:
            async with at_work(nodes):
                yield nodes
        finally:
            if remove:
                await nodes.remove()


async def submit(site: Site, name: str, *, spec: dict[str, Any] | None = None, **notes: str) -> None:
    annotations = {{"seconds": SECONDS, "exit": EXIT}[key]: value for key, value in notes.items()}
    body = {"resources": {"requests": {"nvidia.com/gpu": "1"}}, **(spec or {})}
    document = {"metadata": {"name": name, "annotations": annotations}, "spec": body}
    assert (await site.post("namespaces/default/allocations", document)).status == 201


async def submitted_and_bound(site: Site, name: str, *nodes: str, **how: Any) -> None:
    await submit(site, name, **how)
    assert code(await bind(site.context.runtime, "default", name, *nodes)) == "ok"


async def until(site: Site, name: str, *phases: str) -> dict[str, Any]:
    """Its status once it is in one of these phases; empty when it is gone, where that is what is waited for."""
    status: dict[str, Any] = {}

    async def holds() -> bool:
        reply = await site.get(f"namespaces/default/allocations/{name}")
        status.clear()
        status.update(reply.body["status"] if reply.status == 200 else {"phase": "Gone"})
        return status["phase"] in phases

    await eventually(holds)
    return status


async def changes_of(site: Site, kind: str) -> int:
    async with site.context.database.reader() as db:
        return sum(one.key.kind == kind for one in await change_store.load_since(db, 0, 10_000))


async def test_what_is_bound_runs_and_ends(site: Site) -> None:
    async with acting(site) as nodes:
        await submitted_and_bound(site, "quick", "sim-0001", seconds="0.05")
        await submitted_and_bound(site, "broken", "sim-0002", seconds="0", exit="7")
        assert (await until(site, "quick", "Succeeded", "Failed"))["exitCode"] == 0
        broken = await until(site, "broken", "Succeeded", "Failed")
        assert (broken["phase"], broken["exitCode"]) == ("Failed", 7)

        async def both_have_ended() -> bool:
            return (nodes.running, nodes.ended) == (0, 2)

        await eventually(both_have_ended)
    await assert_counters_equal_charges(site.context.runtime)


async def test_each_node_speaks_for_itself_also_where_it_shares_an_allocation_with_a_real_one(site: Site) -> None:
    capacity = {"nvidia.com/gpu": "1"}
    await site.post("nodes", {"metadata": {"name": "real"}, "spec": {"capacity": capacity}})
    async with acting(site):
        await submitted_and_bound(site, "wide", "sim-0001", "real", "sim-0002", spec={"nodes": 3}, seconds="0")

        async def ours_have_left() -> bool:
            reply = await site.get("namespaces/default/allocations/wide")
            return {one["name"]: one.get("phase") for one in reply.body["status"]["nodes"]} == {
                "sim-0001": "Succeeded",
                "sim-0002": "Succeeded",
                "real": None,
            }

        await eventually(ours_have_left)
        assert (await until(site, "wide", "Running"))["phase"] == "Running"
        await site.patch("namespaces/default/allocations/wide/status", {"status": {"phase": "Succeeded"}})
        await until(site, "wide", "Succeeded")


async def test_what_is_deleted_goes_and_what_is_evicted_waits_again(site: Site) -> None:
    runtime = site.context.runtime
    async with acting(site):
        for name in ("deleted", "evicted"):
            await submitted_and_bound(site, name, "sim-0001")
            await until(site, name, "Running")
        assert (await site.delete("namespaces/default/allocations/deleted")).status == 200
        await until(site, "deleted", "Gone")
        one = await object_ops.get(runtime, Key("Allocation", "default", "evicted"))
        assert isinstance(one, Stored)
        await evict(runtime, one, Notice("Preempted", "Admin", "oncall", "Preempted by oncall"), TEST)
        assert (await until(site, "evicted", "Pending"))["reason"] == "Preempted"
        assert code(await bind(runtime, "default", "evicted", "sim-0002")) == "ok"
        await until(site, "evicted", "Running")
    await assert_counters_equal_charges(runtime)


async def test_whoever_is_killed_in_the_middle_is_replaced_and_nothing_is_lost(site: Site) -> None:
    names = [f"job-{number}" for number in range(9)]
    for name in names:
        await submit(site, name, seconds="0.3")
    async with acting(site):
        for name in names[:5]:
            await bind(site.context.runtime, "default", name, "sim-0001")
        await until(site, names[0], "Running")
    for name in names[5:]:
        await bind(site.context.runtime, "default", name, "sim-0002")
    await site.delete(f"namespaces/default/allocations/{names[4]}")
    async with acting(site):
        for name in names:
            await until(site, name, "Gone" if name == names[4] else "Succeeded")
    await assert_counters_equal_charges(site.context.runtime)


async def test_nodes_send_heartbeats_and_watchers_see_no_change(site: Site) -> None:
    async with acting(site, 3):
        before = await changes_of(site, "Node")

        async def have_sent_heartbeats() -> bool:
            items = (await site.get("nodes")).body["items"]
            return all("lastHeartbeatTime" in one["status"] for one in items)

        await eventually(have_sent_heartbeats)
        assert await changes_of(site, "Node") == before


async def test_a_token_that_is_not_good_any_more_is_replaced(site: Site) -> None:
    async with acting(site):
        tokens = (await site.get("tokens")).body["items"]
        for one in tokens:
            if one["spec"]["role"] == "node":
                assert (await site.delete(f"tokens/{one['metadata']['name']}")).status == 200
        await submitted_and_bound(site, "quick", "sim-0001", seconds="0")
        await until(site, "quick", "Succeeded")


async def test_a_machine_of_somebodys_is_not_spoken_for(site: Site) -> None:
    await site.post("nodes", {"metadata": {"name": "sim-0002"}, "spec": {"capacity": {"cpu": "1"}}})
    async with AsyncClient(site.url, site.admin) as client:
        nodes = RestNodes(client, NodeShape(2))
        with pytest.raises(NotSimulated, match="sim-0002"):
            await nodes.open()
        await nodes.remove()
    assert (await site.get("nodes")).names == ["sim-0002"]


async def test_nodes_that_run_something_are_left(site: Site) -> None:
    async with acting(site) as nodes:
        await submitted_and_bound(site, "endless", "sim-0002")
        await until(site, "endless", "Running")
        assert await nodes.remove() == 1
        assert (await site.get("nodes")).names == ["sim-0002"]


# The command.


@contextmanager
def command(server: Server, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """`bursar sim nodes` from when it is ready; interrupted at the end, if it has not ended before."""
    process = subprocess.Popen(
        [str(BURSAR), "sim", "nodes", *arguments],
        env=server.environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert "simulated nodes are ready" in line, process.communicate()
        yield process
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=LEAVE_SECONDS_MAX)


def simulated(admin: Client, prefix: str) -> list[str]:
    found = admin.nodes.list(label_selector=f"{SIMULATED}=true")
    return [name for one in found if (name := one["metadata"]["name"]).startswith(prefix)]


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM], ids=lambda one: one.name)
def test_the_command_registers_nodes_and_takes_them_away(server: Server, admin: Client, how: signal.Signals) -> None:
    prefix = f"lab-{how.name.lower()}"
    with command(server, "--count", "3", "--gpus", "4", "--prefix", prefix) as process:
        assert simulated(admin, prefix) == [f"{prefix}-{number:04}" for number in (1, 2, 3)]
        assert admin.nodes.get(f"{prefix}-0001")["status"]["allocatable"]["nvidia.com/gpu"] == "4"
        process.send_signal(how)
        out, err = process.communicate(timeout=LEAVE_SECONDS_MAX)
        assert (process.returncode, out, err) == (0, "0 allocations ended\n", "")
    assert simulated(admin, prefix) == []


def test_kept_nodes_are_found_again(server: Server, admin: Client) -> None:
    with command(server, "--count", "2", "--prefix", "kept", "--keep"):
        pass
    assert simulated(admin, "kept") == ["kept-0001", "kept-0002"]
    with command(server, "--count", "2", "--prefix", "kept"):
        pass
    assert simulated(admin, "kept") == []


@pytest.mark.parametrize(
    ("arguments", "environment", "exit_code", "message"),
    [
        (["--count", "0"], {}, 2, "0 is not in the range"),
        (["--count", "1", "--memory", "plenty"], {}, 1, "memory"),
        (["--count", "1", "--prefix", "Not A Name"], {}, 1, "name"),
        (["--count", "1"], {"BURSAR_TOKEN": "none"}, 4, "Error: "),
    ],
    ids=["no nodes", "no memory", "no name", "no token"],
)
def test_what_cannot_be_done_is_told(
    server: Server, arguments: list[str], environment: dict[str, str], exit_code: int, message: str
) -> None:
    ran = subprocess.run(
        [str(BURSAR), "sim", "nodes", *arguments],
        env={**server.environment, **environment}, capture_output=True, text=True, timeout=LEAVE_SECONDS_MAX,
    )  # fmt: skip
    assert ran.returncode == exit_code, ran.stderr
    assert message in ran.stderr
    assert "Traceback" not in ran.stderr


IN_A_TERMINAL = """
import os, pty, subprocess, sys
ask = [sys.executable, "-c", "from bursar.main import _in_foreground; print(_in_foreground())"]
pid, terminal = pty.fork()
if pid == 0:
    subprocess.run(ask, check=True)
    subprocess.run(ask, check=True, process_group=0)
    sys.exit(0)
said = b""
while True:
    try:
        piece = os.read(terminal, 1024)
    except OSError:  # nobody holds its other end any more
        break
    if not piece:
        break
    said += piece
os.waitpid(pid, 0)
print(said.decode().split())
"""


def test_progress_is_told_only_to_who_looks_at_the_terminal() -> None:
    """A command that was started with `&` has a process group of its own, and would write into others' lines."""
    done = subprocess.run(
        [sys.executable, "-c", IN_A_TERMINAL], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "['True', 'False']"
    assert not done.stderr
