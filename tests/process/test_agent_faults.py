"""Nodes that fall silent, are cut off or die, with real agents: nothing ever runs twice at once, and nothing leaks."""

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from bursar.client import Client
from support.process.agents import Agent, await_phase, living, status_of, until, users_of
from support.process.faults import (
    Fleet,
    Ledger,
    Net,
    assert_nothing_left,
    metric,
    opened_fleet,
    opened_net,
    set_patience,
)
from support.process.server import BURSAR, OwnServer, free_port, migrated_directory, started

pytestmark = pytest.mark.timeout(240)

REQUEUE: dict[str, Any] = {"onNodeLost": "requeue"}


@pytest.fixture(scope="module")
def port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def context(port: int) -> Iterator[OwnServer]:
    with migrated_directory() as data, started(data, grpc_port=port) as running:
        yield running


@pytest.fixture(scope="module")
def client(context: OwnServer) -> Iterator[Client]:
    with context.client() as one:
        set_patience(one)
        yield one


@pytest.fixture(scope="module")
def net(port: int) -> Iterator[Net]:
    with opened_net(port) as one:
        yield one


@pytest.fixture(scope="module")
def three(context: OwnServer, client: Client, net: Net, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with opened_fleet(context, client, net, tmp_path_factory.mktemp("agents")) as fleet:
        yield fleet


@pytest.fixture
def fleet(three: Fleet) -> Iterator[Fleet]:
    """Whatever the test before did to it, it is whole and empty."""
    three.mend()
    yield three
    three.mend()
    three.clear()


@pytest.fixture
def name() -> str:
    return f"w-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "ledger")


def begin(fleet: Fleet, ledger: Ledger, name: str, *, stubborn: bool = False, code: int = 3, **spec: Any) -> str:
    """Work that writes into the ledger; the node it runs on."""
    fleet.submit(name, *ledger.command(code=code, stubborn=stubborn), **spec)
    await_phase(fleet.client, name, "Running")
    until(ledger.is_alive, "the command running")
    return fleet.where(name)


@contextmanager
def paused(agent: Agent) -> Iterator[None]:
    assert agent.process is not None
    agent.process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        agent.process.send_signal(signal.SIGCONT)


def await_moved(fleet: Fleet, ledger: Ledger, name: str, old: str) -> str:
    """Until it runs again; where."""
    until(lambda: len(ledger.intervals()) > 1, f"{name} running again", 40)
    await_phase(fleet.client, name, "Running")
    now = fleet.where(name)
    assert now != old
    return now


def assert_ends(fleet: Fleet, ledger: Ledger, name: str, code: int) -> None:
    ledger.finish()
    status = await_phase(fleet.client, name, "Succeeded", "Failed")
    assert status["exitCode"] == code


# A node that is not heard.


@pytest.mark.parametrize("stubborn", [False, True])
def test_work_of_a_paused_agent_is_killed_by_its_shim_before_it_runs_elsewhere(
    fleet: Fleet, ledger: Ledger, name: str, stubborn: bool
) -> None:
    old = begin(fleet, ledger, name, stubborn=stubborn, **REQUEUE)
    with paused(fleet.agents[old]):
        new = await_moved(fleet, ledger, name, old)
        assert ledger.nodes() == [old, new]
        ledger.assert_never_two()
        assert fleet.phase(old) == "Lost"
    fleet.await_phase(old, "Ready")
    # What the late one has to tell is of the past: it is acknowledged, and changes nothing.
    until(lambda: is_acknowledged(fleet.agents[old], uid_of(fleet, name)), "the late report being answered")
    assert status_of(fleet.client, name)["phase"] == "Running"
    assert fleet.where(name) == new
    assert_ends(fleet, ledger, name, 3)
    ledger.assert_never_two()
    assert ledger.nodes() == [old, new]
    assert_nothing_left(fleet)


def uid_of(fleet: Fleet, name: str) -> str:
    return str(fleet.client.allocations("default").get(name)["metadata"]["uid"])


def is_acknowledged(agent: Agent, uid: str, epoch: int = 1) -> bool:
    """Whether the agent was told that the end of this placement is known, or of the past."""
    words = ('"type":"gone"', f'"uid":"{uid}"', f'"epoch":{epoch}')
    lines = (agent.data / "work" / "journal").read_text(errors="replace").splitlines()
    return any(all(word in line for word in words) for line in lines)


@pytest.mark.parametrize("how", ["cut", "stall"])
def test_work_of_a_node_that_is_cut_off_moves_only_after_its_end(
    fleet: Fleet, ledger: Ledger, name: str, how: str, tmp_path: Path
) -> None:
    """Beside it runs work that did not ask for this: it goes on, and is found again."""
    old = begin(fleet, ledger, name, stubborn=True, **REQUEUE)
    other = Ledger(tmp_path / "other")
    there = begin(fleet, other, f"{name}-2", code=4, nodeSelector={"only": old})
    assert there == old
    getattr(fleet.net, how)(old)
    new = await_moved(fleet, ledger, name, old)
    ledger.assert_never_two()
    assert other.is_alive()
    status = status_of(fleet.client, f"{name}-2")
    assert (status["phase"], status["reason"]) == ("Running", "NodeLost")
    fleet.net.heal()
    fleet.await_phase(old, "Ready")
    until(lambda: not status_of(fleet.client, f"{name}-2").get("reason"), "the node's work being found again")
    assert status_of(fleet.client, name)["phase"] == "Running"
    assert_ends(fleet, ledger, name, 3)
    assert_ends(fleet, other, f"{name}-2", 4)
    assert ledger.nodes() == [old, new]
    assert len(other.intervals()) == 1
    ledger.assert_never_two()
    assert_nothing_left(fleet)


def test_a_short_outage_is_nobodys_end(fleet: Fleet, ledger: Ledger, name: str) -> None:
    """Nothing is stopped or moved when the node is back within its lease, and how it ended meanwhile is told."""
    old = begin(fleet, ledger, name, code=5, **REQUEUE)
    fleet.net.cut(old)
    ledger.finish()
    until(lambda: ledger.intervals()[-1].ended, "the command ending")
    fleet.net.heal()
    status = await_phase(fleet.client, name, "Succeeded", "Failed", "Pending")
    assert (status["phase"], status["exitCode"], len(ledger.intervals())) == ("Failed", 5, 1)


def test_when_many_are_silent_at_once_it_is_said_and_nothing_is_given_up(
    context: OwnServer, fleet: Fleet, ledger: Ledger, name: str
) -> None:
    old = begin(fleet, ledger, name, **REQUEUE)
    other = next(one for one in fleet.agents if one != old)
    fleet.net.cut(old)
    fleet.net.cut(other)
    until(lambda: metric(context, "bursar_nodes_alarm") == 1, "the alarm")
    until(lambda: not ledger.is_alive(3.0), "the lease running out")
    # Long after all that would be needed for one alone.
    until(lambda: seconds_silent(fleet.client, old) > 12, "a long silence")
    nodes = [fleet.client.nodes.get(one)["status"] for one in (old, other)]
    assert [one["phase"] for one in nodes] == ["NotReady", "NotReady"]
    # The second of them tells why; when the first fell silent it was alone, perhaps.
    ready = [one["message"] for node in nodes for one in node["conditions"] if one["type"] == "Ready"]
    assert [one for one in ready if "2 of 3 nodes lost contact at once" in one]
    assert status_of(fleet.client, name)["phase"] == "Running"
    assert fleet.where(name) == old
    fleet.net.heal()
    until(lambda: metric(context, "bursar_nodes_alarm") == 0, "the alarm's end")
    # It was stopped when its lease was over: now the node says so, and it waits again at once.
    until(lambda: len(ledger.intervals()) == 2, "it running again")
    assert_ends(fleet, ledger, name, 3)
    ledger.assert_never_two()


def seconds_silent(client: Client, node: str) -> float:
    since = client.nodes.get(node)["status"].get("silentSince")
    return (datetime.now(UTC) - datetime.fromisoformat(since)).total_seconds() if since else 0.0


def test_work_that_was_told_to_stop_in_its_own_time_has_no_more_of_it_than_its_lease(
    fleet: Fleet, ledger: Ledger, name: str
) -> None:
    """It was preempted with a long grace when its node was lost."""
    old = begin(fleet, ledger, name, stubborn=True, **REQUEUE)
    fleet.client.preempt("default", name, reason="somebody else needs it", grace_period_seconds=300)
    until(lambda: "asked" in {line[0] for line in ledger.lines()}, "it being asked to end")
    with paused(fleet.agents[old]):
        await_moved(fleet, ledger, name, old)
        ledger.assert_never_two()
    assert_ends(fleet, ledger, name, 3)
    ledger.assert_never_two()
    assert_nothing_left(fleet)


def test_a_node_that_stood_still_as_a_whole_does_not_go_on_where_it_was(
    fleet: Fleet, ledger: Ledger, name: str
) -> None:
    """As a machine that was suspended: agent, shim and command wake up when all of it runs elsewhere. The agent is the
    first to wake, and is granted new leases: they are not for what has outlived its own."""
    old = begin(fleet, ledger, name, stubborn=True, **REQUEUE)
    agent = fleet.agents[old]
    assert agent.process is not None
    (shim,) = set(users_of(agent.data)) - {agent.process.pid}
    command = ledger.intervals()[0].pid
    for pid in (shim, command):
        os.kill(pid, signal.SIGSTOP)
    with paused(agent):
        new = await_moved(fleet, ledger, name, old)
    fleet.await_phase(old, "Ready")
    # It is killed while stopped: a request to end would first have to continue it.
    os.kill(shim, signal.SIGCONT)
    until(lambda: gone(command), "the command being gone")
    until(lambda: is_acknowledged(agent, uid_of(fleet, name)), "its end being answered")
    assert_ends(fleet, ledger, name, 3)
    assert ledger.nodes() == [old, new]
    ledger.assert_never_two(frozen=True)
    assert_nothing_left(fleet)


# A node that is fenced.


def test_work_of_a_fenced_node_moves_at_once_and_what_returns_is_stopped(
    context: OwnServer, fleet: Fleet, ledger: Ledger, name: str, tmp_path: Path
) -> None:
    """The administrator was wrong, and it still runs: that is stopped when the node returns, and its end is nothing."""
    lines = tmp_path / "lines"
    script = f"echo $BURSAR_NODE $BURSAR_EPOCH $$ >> {lines}; while [ ! -e {lines}.go ]; do sleep 0.1; done; exit 7"
    fleet.submit(name, "sh", "-c", script)
    await_phase(fleet.client, name, "Running")
    old = fleet.where(name)
    until(lambda: runs(lines), "the command running")
    agent = fleet.agents[old]
    agent.kill()
    until(lambda: fleet.phase(old) != "Ready", "the node being silent")
    done = bursar(context, "node", "fence", old, "--reason", "its board is dead", "--yes")
    assert "1 requeued" in done.stdout, done.stdout + done.stderr
    assert fleet.client.nodes.get(old)["status"]["phase"] == "Lost"
    until(lambda: len(runs(lines)) == 2, "it running elsewhere")
    new = fleet.where(name)
    assert new != old
    (_, _, pid), second = runs(lines)
    assert second[:2] == [new, "2"]
    os.kill(int(pid), 0)
    agent.start()
    until(lambda: gone(int(pid)), "what returned being stopped")
    fleet.await_phase(old, "Ready")
    until(lambda: is_acknowledged(agent, uid_of(fleet, name)), "its end being answered")
    status = status_of(fleet.client, name)
    assert (status["phase"], status["nodeName"], status["epoch"]) == ("Running", new, 2)
    Path(f"{lines}.go").touch()
    assert await_phase(fleet.client, name, "Succeeded", "Failed")["exitCode"] == 7
    assert len(runs(lines)) == 2
    assert_nothing_left(fleet)


def runs(lines: Path) -> list[list[str]]:
    return [line.split() for line in lines.read_text().splitlines()] if lines.exists() else []


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def bursar(server: OwnServer, *words: str) -> subprocess.CompletedProcess[str]:
    command = [str(BURSAR), *words]
    return subprocess.run(command, env=server.environment, capture_output=True, text=True, timeout=60)


# Work on several nodes.


@pytest.mark.parametrize("form", ["nodes", "gang"])
def test_what_loses_one_of_its_nodes_stops_everywhere_and_waits_as_a_whole(
    fleet: Fleet, name: str, form: str, tmp_path: Path
) -> None:
    """Two parts on two nodes; one is lost; both run again, when nothing of the first time is left."""
    ledgers = {node: Ledger(tmp_path / node) for node in fleet.agents}
    command = Ledger(tmp_path / "$BURSAR_NODE").command()
    names = [name] if form == "nodes" else [f"{name}-a", f"{name}-b"]
    spread = {"topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "only"}]}
    for one in names:
        more: dict[str, Any] = {"nodes": 2} if form == "nodes" else {
            "gangScheduling": {"groupId": name, "minMembers": 2},
            "scheduling": {"nodeSelector": {"pool": fleet.pool}, **spread},
        }  # fmt: skip
        fleet.submit(one, *command, **more, **REQUEUE)
    for one in names:
        await_phase(fleet.client, one, "Running")
    until(lambda: sum(one.is_alive(2.0) for one in ledgers.values()) == 2, "two parts running")
    first = {node for node, one in ledgers.items() if one.is_alive(2.0)}
    lost = min(first)
    fleet.net.cut(lost)
    until(lambda: all(status_of(fleet.client, one).get("epoch") == 2 for one in names), "being placed again", 40)
    for one in names:
        await_phase(fleet.client, one, "Running")
    second = {node for node in fleet.agents if node != lost}
    until(lambda: all(ledgers[node].is_alive(2.0) for node in second), "both parts running")
    assert len(ledgers[lost].intervals()) == 1
    # Never a part of the second time beside one of the first.
    parts = [(one.epoch, one.began, one.last) for ledger in ledgers.values() for one in ledger.intervals()]
    assert max(last for epoch, _, last in parts if epoch == 1) < min(began for epoch, began, _ in parts if epoch == 2)
    fleet.net.heal()
    fleet.await_phase(lost, "Ready")
    for ledger in ledgers.values():
        ledger.finish()
    for one in names:
        assert await_phase(fleet.client, one, "Succeeded", "Failed")["phase"] == "Succeeded"
    assert_nothing_left(fleet)


# Commands that behave badly.


def end_of(fleet: Fleet, name: str, *command: str, **spec: Any) -> dict[str, Any]:
    fleet.submit(name, *command, **spec)
    return await_phase(fleet.client, name, "Succeeded", "Failed")


def mark() -> str:
    """A number of seconds that nobody else sleeps for."""
    return f"{3000 + uuid.uuid4().int % 10**6}.{uuid.uuid4().int % 10**6:06}"


def test_a_command_that_is_not_there_says_so(fleet: Fleet, name: str) -> None:
    status = end_of(fleet, name, "no-such-command")
    assert (status["phase"], status["reason"], status["exitCode"]) == ("Failed", "CommandNotFound", 127)
    assert "'no-such-command' was not found" in status["message"]
    assert_nothing_left(fleet)


def test_a_working_directory_that_is_not_there_says_so(fleet: Fleet, name: str) -> None:
    status = end_of(fleet, name, "true", workingDir="/no/such/folder")
    assert (status["phase"], status["reason"]) == ("Failed", "WorkingDirUnusable")
    assert "/no/such/folder" in status["message"]
    assert_nothing_left(fleet)


def test_what_forks_away_ends_with_its_command(fleet: Fleet, name: str) -> None:
    """Two forks and a session of its own: its parent is gone, and it is found all the same."""
    seconds = mark()
    source = "import os, sys\nif os.fork() == 0:\n os.setsid()\n if os.fork() == 0: os.execvp('sleep', sys.argv[1:])\n"
    wait = "import time; time.sleep(0.5); sys.exit(8)"
    status = end_of(fleet, name, sys.executable, "-S", "-c", f"{source} os._exit(0)\n{wait}", "sleep", seconds)
    assert (status["phase"], status["exitCode"]) == ("Failed", 8)
    assert not living(seconds)
    assert_nothing_left(fleet)


def test_what_forks_away_and_heeds_nothing_is_gone_when_it_was_deleted(fleet: Fleet, name: str) -> None:
    seconds = mark()
    script = f"trap '' TERM INT HUP; (setsid sh -c \"trap '' TERM HUP; sleep {seconds}; :\" &) ; sleep {seconds}"
    fleet.submit(name, "sh", "-c", script)
    await_phase(fleet.client, name, "Running")
    until(lambda: len(living(seconds)) == 2, "both of them sleeping")
    fleet.client.allocations("default").delete(name, grace_period_seconds=1)
    until(lambda: not status_of(fleet.client, name), "the allocation being gone")
    assert not living(seconds)
    assert_nothing_left(fleet)


def test_what_needs_more_memory_than_its_limit_is_killed_and_says_so(fleet: Fleet, name: str) -> None:
    agent = next(iter(fleet.agents.values()))
    kept = next(line for line in agent.said.splitlines() if "cgroups_probed" in line)
    if '"cgroups": "none"' in kept.replace('":"', '": "'):
        pytest.skip(f"no memory control group can be written here: {kept}")
    source = "x = bytearray()\nwhile True: x += b'x' * (1 << 20)"
    resources = {"requests": {"cpu": "10m", "memory": "64Mi"}, "limits": {"memory": "64Mi"}}
    status = end_of(fleet, name, sys.executable, "-S", "-c", source, resources=resources)
    assert (status["phase"], status["reason"], status["exitCode"]) == ("Failed", "OOMKilled", 137)
    assert "64Mi" in status["message"]
    assert_nothing_left(fleet)
