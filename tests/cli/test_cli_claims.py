"""`bursar node claim`, `release`, `wipe`, `wiped` and `claims` against a real server, and the same from Python."""

import json
import uuid
from collections.abc import Iterator

import pytest

from bursar.client import AsyncClient, Client, Conflict, QuotaExceeded
from support.nodes.placed_work import phase_of, until
from support.process.commands import bursar
from support.process.server import Server


@pytest.fixture(autouse=True)
def pool(admin: Client) -> Iterator[None]:
    """A pool that nobody else uses up."""
    admin.settings.patch("system", {"spec": {"limits": {"sensitive_pool_size": "50"}}})
    yield
    admin.settings.patch("system", {"spec": {"limits": {"sensitive_pool_size": None}}})


@pytest.fixture
def node(admin: Client) -> str:
    name = f"node-{uuid.uuid4().hex[:12]}"
    admin.nodes.create({"metadata": {"name": name}, "spec": {"capacity": {"cpu": "8", "nvidia.com/gpu": "8"}}})
    return name


@pytest.fixture
def token(admin: Client, team: str) -> str:
    wanted = {"role": "user", "tenant": team, "user": "ann", "ttl": "1h"}
    return str(admin.request("POST", "/api/v1/tokens", body=wanted)["status"]["token"])


def test_a_node_is_claimed_used_released_and_wiped_by_hand(
    server: Server, admin: Client, team: str, node: str, token: str
) -> None:
    tried = bursar(server, "node", "claim", node, "--dry-run", token=token)
    assert tried.stdout == f"node/{node} claimed (dry run): Claimed\n"
    done = bursar(server, "node", "claim", node, "--reason", "study 42", token=token)
    assert done.stdout == f"node/{node} claimed: Claimed\n"
    assert "Ready,Claimed" in bursar(server, "get", "nodes", node).stdout
    run = ("run", "-n", team, "--sensitive", "--detach", "--name", "secret", "--", "true")
    bursar(server, *run, token=token)
    until(lambda: phase_of(admin, team, "secret") == "Scheduled")
    refused = bursar(server, "node", "release", node, token=token, code=5)
    assert f"{team}/secret" in refused.stderr
    admin.allocations(team).patch("secret", {"status": {"phase": "Succeeded"}}, subresource="status")
    assert bursar(server, "node", "release", node, token=token).stdout == f"node/{node} released: Wiping\n"
    asked = bursar(server, "node", "wiped", node, "--reason", "new disks", said="n\n", code=1)
    assert f"Confirm that {node} has been wiped" in asked.stderr
    bursar(server, "node", "wiped", node, "--reason", "new disks", "--yes", token=token, code=4)
    wiped = bursar(server, "node", "wiped", node, "--reason", "new disks", "--yes")
    assert wiped.stdout == f"node/{node} wiped: available to all\n"
    assert bursar(server, "node", "wipe", node, code=5).stderr.startswith("Error: ")


def test_the_list_is_of_those_that_one_may_know(server: Server, team: str, node: str, token: str) -> None:
    bursar(server, "node", "claim", node, "--for", f"{team}/ann", "--reason", "study 42")
    shown = bursar(server, "node", "claims", token=token)
    head, row = shown.stdout.splitlines()
    assert head.split() == ["NODE", "STATE", "USER", "SINCE", "REASON"]
    assert row.split()[:3] == [node, "Claimed", f"{team}/ann"]
    assert row.endswith("study 42")
    assert "of 50 nodes of the sensitive pool are claimed" in shown.stderr
    found = json.loads(bursar(server, "node", "claims", "-o", "json", token=token).stdout)
    assert json.loads(bursar(server, "node", "claims", "--json", token=token).stdout) == found
    assert [one["node"] for one in found["items"]] == [node]


async def test_the_same_from_python(server: Server, team: str, node: str, token: str) -> None:
    async with AsyncClient(server.url, token=token) as ann:
        first = await ann.claim(node, reason="study 42", request_id=f"r-{node}")
        assert first["status"]["claim"]["state"] == "Claimed"
        assert [one["user"] for one in (await ann.claims())["items"]] == [f"{team}/ann"]
        assert (await ann.release_node(node))["status"]["claim"]["state"] == "Wiping"
        with pytest.raises(Conflict, match="not wiped yet"):
            await ann.claim(node)
    async with AsyncClient(server.url, token=server.environment["BURSAR_TOKEN"]) as admin:
        other = await admin.nodes.create({"metadata": {"name": f"{node}-2"}, "spec": {"capacity": {"cpu": "1"}}})
        await admin.settings.patch("system", {"spec": {"limits": {"sensitive_pool_size": "0"}}})
        with pytest.raises(QuotaExceeded, match="no nodes may be claimed") as refused:
            await admin.claim(other["metadata"]["name"], user=f"{team}/ann")
        assert refused.value.causes[0].dimension == "sensitive_pool_size"
        assert (await admin.confirm_wiped(node))["status"].get("claim") is None


def test_who_is_of_no_tenant_is_told_to_name_somebody(server: Server, team: str, node: str) -> None:
    refused = bursar(server, "node", "claim", node, code=1).stderr
    assert "must name a user" in refused
    assert "--for TENANT/NAME" in refused
    done = bursar(server, "node", "claim", node, "--for", f"{team}/ann")
    assert done.stdout == f"node/{node} claimed: Claimed\n"
