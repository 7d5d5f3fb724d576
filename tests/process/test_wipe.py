"""Real agents wipe real nodes: the hook runs once for each attempt, and nobody comes near before it is done."""

import os
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from bursar.client import Client
from support.process.agents import Agent, await_phase, joined_agent, part, submit, until
from support.process.server import OwnServer, migrated_directory, started

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def context() -> Iterator[OwnServer]:
    """A server of its own: parts of it are killed here."""
    with migrated_directory() as data, started(data) as running:
        with running.client() as client:
            client.settings.patch("system", {"spec": {"limits": {"sensitive_pool_size": "100"}}})
        yield running


@pytest.fixture
def admin(context: OwnServer) -> Iterator[Client]:
    with context.client() as one:
        yield one


@pytest.fixture
def ann(context: OwnServer, admin: Client) -> Iterator[Client]:
    wanted = {"role": "user", "tenant": "default", "user": "ann", "ttl": "1h"}
    token = admin.request("POST", "/api/v1/tokens", body=wanted)["status"]["token"]
    with Client(context.url, token=token) as one:
        yield one


@pytest.fixture
def name() -> str:
    return f"n-{uuid.uuid4().hex[:8]}"


def claim_state(client: Client, node: str) -> str:
    """Empty where the node is anybody's."""
    return str((client.nodes.get(node)["status"].get("claim") or {}).get("state", ""))


def failure(client: Client, node: str) -> str:
    """What is said of a wipe that failed; empty where none did."""
    conditions: list[dict[str, Any]] = client.nodes.get(node)["status"]["conditions"]
    return next((one["message"] for one in conditions if one["type"] == "WipeFailed"), "")


def claim_and_release(ann: Client, node: str) -> str:
    """The id of the claim."""
    until(lambda: ann.nodes.get(node)["status"].get("phase") == "Ready", "the node being ready")
    made: str = ann.claim(node)["status"]["claim"]["id"]
    ann.release_node(node)
    return made


def test_a_node_is_wiped_by_its_hook_and_then_open_to_everybody(
    context: OwnServer, admin: Client, ann: Client, name: str, tmp_path: Path
) -> None:
    kept = tmp_path / name / "work" / "placements"
    hook = f"echo $BURSAR_NODE $BURSAR_CLAIM >> {tmp_path}/wiped; ls {kept} > {tmp_path}/left"
    with joined_agent(context, admin, name, tmp_path, "--wipe-hook", hook) as agent:
        until(lambda: ann.nodes.get(name)["status"].get("phase") == "Ready", "the node being ready")
        claimed = ann.claim(name, reason="study 42")["status"]["claim"]["id"]
        submit(ann, f"{name}-secret", name, "sh", "-c", "echo secret", sensitive=True)
        submit(admin, f"{name}-other", name, "true")
        await_phase(ann, f"{name}-secret", "Succeeded")
        assert list((agent.data / "work" / "placements").glob("alloc-*"))
        ann.release_node(name)
        await_phase(admin, f"{name}-other", "Succeeded")
        assert (tmp_path / "wiped").read_text() == f"{name} {claimed}\n"
        assert "alloc-" not in (tmp_path / "left").read_text(), "what ran there has left no output"
        assert claim_state(admin, name) == ""
        events = admin.request("GET", "/api/v1/events", query={"fieldSelector": f"involvedObject.name={name}"})
        verbs = ("claim", "release", "wiped")
        told = [one["message"] for one in events["items"] if one["message"].startswith(verbs)]
        assert told == [
            "claim by user:default/ann: study 42",
            "release by user:default/ann",
            f"wiped by node:{name}",
        ]


def test_a_hook_that_fails_keeps_the_node_out_of_use_until_it_succeeds(
    context: OwnServer, admin: Client, ann: Client, name: str, tmp_path: Path
) -> None:
    hook = f"echo once >> {tmp_path}/tries; test -e {tmp_path}/repaired || exit 3"
    with joined_agent(context, admin, name, tmp_path, "--wipe-hook", hook):
        claim_and_release(ann, name)
        until(lambda: claim_state(admin, name) == "WipeFailed", "the wipe having failed")
        assert "exit code 3" in failure(admin, name)
        submit(admin, f"{name}-other", name, "true")
        until(
            lambda: admin.allocations("default").get(f"{name}-other")["status"].get("reason") == "no_matching_nodes",
            "the node being out of use",
        )
        (tmp_path / "repaired").touch()
        admin.wipe(name, reason="repaired")
        await_phase(admin, f"{name}-other", "Succeeded")
        assert (claim_state(admin, name), failure(admin, name)) == ("", "")
        assert (tmp_path / "tries").read_text().split() == ["once", "once"]


def test_without_a_hook_an_administrator_says_that_it_is_wiped(
    context: OwnServer, admin: Client, ann: Client, name: str, tmp_path: Path
) -> None:
    with joined_agent(context, admin, name, tmp_path):
        claim_and_release(ann, name)
        until(lambda: claim_state(admin, name) == "WipeFailed", "the agent saying that it has no hook")
        assert "--wipe-hook" in failure(admin, name)
        admin.confirm_wiped(name, reason="by hand")
        submit(admin, f"{name}-other", name, "true")
        await_phase(admin, f"{name}-other", "Succeeded")


def test_a_hook_that_takes_too_long_has_failed(
    context: OwnServer, admin: Client, ann: Client, name: str, tmp_path: Path
) -> None:
    with joined_agent(context, admin, name, tmp_path, "--wipe-hook", "sleep 1000", "--wipe-seconds", "1"):
        claim_and_release(ann, name)
        until(lambda: claim_state(admin, name) == "WipeFailed", "the wipe having failed")
        assert "Expired" in failure(admin, name)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may run commands as another")
def test_the_hook_runs_as_the_agent_itself_whoever_tenants_commands_run_as(
    context: OwnServer, admin: Client, ann: Client, name: str, tmp_path: Path
) -> None:
    hook = f"id -u > {tmp_path}/who"
    with joined_agent(context, admin, name, tmp_path, "--run-as", "nobody", "--wipe-hook", hook):
        claim_and_release(ann, name)
        until(lambda: claim_state(admin, name) == "", "the node being open again")
        assert (tmp_path / "who").read_text().strip() == "0"


# Processes that die during a wipe.


def waiting_hook(folder: Path) -> str:
    """Begins, and ends when it is let go."""
    return f"echo begun >> {folder}/hook; while ! test -e {folder}/go; do sleep 0.05; done; echo done >> {folder}/hook"


def begun(folder: Path) -> bool:
    return (folder / "hook").exists()


def test_an_agent_that_is_killed_while_it_wipes_wipes_once(
    context: OwnServer, admin: Client, ann: Client, name: str, tmp_path: Path
) -> None:
    with joined_agent(context, admin, name, tmp_path, "--wipe-hook", waiting_hook(tmp_path)) as agent:
        claim_and_release(ann, name)
        until(lambda: begun(tmp_path), "the hook having begun")
        agent.kill()
        (tmp_path / "go").touch()
        until(lambda: "done" in (tmp_path / "hook").read_text(), "the hook ending without its agent")
        assert claim_state(admin, name) == "Wiping"
        agent.start()
        until(lambda: claim_state(admin, name) == "", "the node being open again")
        assert (tmp_path / "hook").read_text().split() == ["begun", "done"]


def test_an_agent_that_was_away_when_its_node_was_released_wipes_when_it_comes(
    context: OwnServer, admin: Client, ann: Client, name: str, tmp_path: Path
) -> None:
    with joined_agent(context, admin, name, tmp_path, "--wipe-hook", f"echo done >> {tmp_path}/hook") as agent:
        until(lambda: ann.nodes.get(name)["status"].get("phase") == "Ready", "the node being ready")
        ann.claim(name)
        agent.kill()
        ann.release_node(name)
        assert claim_state(admin, name) == "Wiping"
        agent.start()
        until(lambda: claim_state(admin, name) == "", "the node being open again")
        assert (tmp_path / "hook").read_text() == "done\n"


def test_output_of_work_whose_end_nobody_knows_of_is_gone_before_the_hook_runs(
    context: OwnServer, admin: Client, ann: Client, name: str, tmp_path: Path
) -> None:
    """The agent is killed while it runs, it is given up, and ends by itself between release and wipe. The agent that
    comes back is killed as well, while its hook runs, and tells what it found."""
    work = tmp_path / name / "work"
    look = f"grep -rl the-patients-nam[e] {work}/placements {work}/journal > {tmp_path}/left"
    with joined_agent(context, admin, name, tmp_path, "--wipe-hook", f"{look}; {waiting_hook(tmp_path)}") as agent:
        until(lambda: ann.nodes.get(name)["status"].get("phase") == "Ready", "the node being ready")
        ann.claim(name)
        text = f"echo the-patients-name; while ! test -e {tmp_path}/end; do sleep 0.05; done; exit 7"
        submit(ann, f"{name}-secret", name, "sh", "-c", text, sensitive=True, onNodeLost="fail")
        await_phase(ann, f"{name}-secret", "Running")
        agent.kill()
        until(lambda: admin.nodes.get(name)["status"]["phase"] != "Ready", "the node being silent")
        admin.fence(name, reason="its board is dead")
        await_phase(ann, f"{name}-secret", "Failed")
        ann.release_node(name)
        (tmp_path / "end").touch()
        until(lambda: list(work.glob("placements/alloc-*/status")), "it ending without anybody knowing")
        assert [path for path in work.glob("placements/alloc-*/output.*") if path.stat().st_size]
        agent.start()
        until(lambda: begun(tmp_path), "the hook having begun")
        agent.kill()
        agent.start()
        (tmp_path / "go").touch()
        until(lambda: claim_state(admin, name) == "", "the node being open again")
        assert (tmp_path / "left").read_text() == ""
        assert (tmp_path / "hook").read_text().split() == ["begun", "done"]
        assert not list(work.glob("placements/alloc-*"))


def test_a_hook_whose_shim_is_killed_has_failed_and_is_not_taken_for_done(
    context: OwnServer, admin: Client, ann: Client, name: str, tmp_path: Path
) -> None:
    with joined_agent(context, admin, name, tmp_path, "--wipe-hook", waiting_hook(tmp_path)) as agent:
        claim_and_release(ann, name)
        until(lambda: begun(tmp_path), "the hook having begun")
        for pid in shims_of(agent):
            os.kill(pid, signal.SIGKILL)
        until(lambda: claim_state(admin, name) == "WipeFailed", "the wipe having failed")
        (tmp_path / "go").touch()
        admin.wipe(name)
        until(lambda: claim_state(admin, name) == "", "the node being open again")


def shims_of(agent: Agent) -> list[int]:
    assert agent.process is not None
    children = psutil.Process(agent.process.pid).children()
    return [one.pid for one in children if any("shim" in word for word in one.cmdline())]


def test_a_server_that_is_killed_at_every_step_forgets_nothing(
    context: OwnServer, admin: Client, ann: Client, name: str, tmp_path: Path
) -> None:
    with joined_agent(context, admin, name, tmp_path, "--wipe-hook", waiting_hook(tmp_path)):
        until(lambda: ann.nodes.get(name)["status"].get("phase") == "Ready", "the node being ready")
        ann.claim(name)
        kill_server(context, admin)
        assert claim_state(admin, name) == "Claimed"
        ann.release_node(name)
        kill_server(context, admin)
        until(lambda: begun(tmp_path), "the hook having begun")
        os.kill(part(context, "api"), signal.SIGKILL)
        (tmp_path / "go").touch()
        until(lambda: answers(admin) and claim_state(admin, name) == "", "the node being open again")
        assert (tmp_path / "hook").read_text().split() == ["begun", "done"]
        submit(admin, f"{name}-other", name, "true")
        await_phase(admin, f"{name}-other", "Succeeded")


def kill_server(context: OwnServer, admin: Client) -> None:
    """The API and the controller; they are started again by their parent."""
    killed = [part(context, word) for word in ("api", "controller")]
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    until(lambda: not any(psutil.pid_exists(pid) and is_alive(pid) for pid in killed), "them being dead")
    until(lambda: answers(admin), "the server being back")


def is_alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def answers(client: Client) -> bool:
    try:
        client.whoami()
    except Exception:
        return False
    return True
