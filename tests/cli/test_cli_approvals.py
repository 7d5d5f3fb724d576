"""`bursar approvals` against a real server: the inbox, decisions on many requests, and the history of one."""

import json
import os
import subprocess
from collections.abc import Iterator

import pytest

from bursar.client import AsyncClient, Client
from support.process.commands import bursar
from support.process.server import BURSAR, Server


@pytest.fixture
def gated(admin: Client, team: str) -> str:
    """A tenant whose requests pass the gates `manual` and `external:itsm`."""
    policy = {"gates": ["manual", "external:itsm"]}
    admin.tenants.patch(team, {"spec": {"approval": policy, "limits": {"clusters": 4}}})
    return team


@pytest.fixture
def user(server: Server, admin: Client, gated: str) -> Iterator[Client]:
    """A user of that tenant: nobody approves their own request."""
    wanted = {"role": "user", "tenant": gated, "user": "una"}
    with Client(server.url, admin.request("POST", "/api/v1/tokens", body=wanted)["status"]["token"]) as client:
        yield client


def claim(user: Client, team: str, name: str, clusters: int = 1) -> None:
    spec = {"type": "cluster", "resources": {"clusters": clusters}}
    user.resourceclaims(team).create({"metadata": {"name": name}, "spec": spec})


def state(admin: Client, team: str, name: str) -> str:
    return str(admin.resourceclaims(team).get(name)["status"]["approval"]["state"])


def test_the_inbox_has_every_kind_with_what_it_asks_for(
    server: Server, admin: Client, user: Client, gated: str
) -> None:
    claim(user, gated, "c", 2)
    work = {"resources": {"requests": {"cpu": "2"}}}
    admin.allocations(gated).create({"metadata": {"name": "a"}, "spec": {**work, "nodes": 3, "exclusive": True}})
    admin.jobs(gated).create({"metadata": {"name": "j"}, "spec": {"parallelism": 4, "template": {"spec": work}}})
    shown = bursar(server, "approvals", "--tenant", gated).stdout.splitlines()
    assert shown[0].split() == ["AGE", "GATE", "TENANT", "NAMESPACE", "REQUEST", "USER", "REQUESTED", "REASON"]
    asked = {row.split()[4]: row.split()[6] for row in shown[1:]}
    assert asked == {
        "resourceclaim/c": "clusters=2", "allocation/a": "allocations=1,cpu=6,nodes=3,pods=1",
        "job/j": "allocations=4,cpu=8,pods=4",
    }  # fmt: skip
    assert bursar(server, "approvals", "list", "--gate", "external:itsm", "--tenant", gated).stdout == ""
    found = json.loads(bursar(server, "approvals", "--tenant", gated, "--json").stdout)["items"]
    assert {one["kind"] for one in found} == {"ResourceClaim", "Allocation", "Job"}


def test_many_are_decided_at_once_and_each_refusal_is_told(
    server: Server, admin: Client, user: Client, gated: str
) -> None:
    for name in ("one", "two", "big"):
        claim(user, gated, name, 9 if name == "big" else 1)
    both = ("resourceclaim/one", "resourceclaim/two", "-n", gated)
    first = bursar(server, "approvals", "approve", *both, "--gate", "manual")
    assert first.stdout == "".join(
        f"resourceclaim/{name} approved at this gate; another gate is pending\n" for name in ("one", "two")
    )
    tried = bursar(server, "approvals", "approve", *both, "--dry-run")
    assert "resourceclaim/one approved (dry run)\n" in tried.stdout
    assert state(admin, gated, "one") == "pending"
    done = bursar(server, "approvals", "approve", *both, "--until", "2099-01-31T00:00:00Z", "--reason", "until January")
    assert done.stdout == "resourceclaim/one approved\nresourceclaim/two approved\n"
    mixed = bursar(server, "approvals", "deny", "resourceclaim/one", "resourceclaim/big", "claim/none", "-n", gated,
                   "--reason", "too big", code=5)  # fmt: skip
    assert mixed.stdout == "resourceclaim/big denied\n"
    assert "is approved already by" in mixed.stderr
    assert 'resourceclaims "none" not found' in mixed.stderr
    claim(user, gated, "huge", 9)
    bursar(server, "approvals", "approve", "resourceclaim/huge", "-n", gated)
    full = bursar(server, "approvals", "approve", "resourceclaim/huge", "-n", gated, code=6)
    assert "max_clusters" in full.stderr
    bursar(server, "approvals", "approve", "resourceclaim", "-n", gated, code=2)
    past = bursar(server, "approvals", "approve", "resourceclaim/huge", "-n", gated, "--until", "2001-01-01T00:00:00Z",
                  code=1)  # fmt: skip
    assert "must be in the future" in past.stderr


def test_the_history_has_the_gates_and_the_decisions(server: Server, admin: Client, user: Client, gated: str) -> None:
    claim(user, gated, "c", 2)
    bursar(server, "approvals", "approve", "resourceclaim/c", "-n", gated, "--reason", "fine")
    shown = bursar(server, "approvals", "history", "resourceclaim/c", "-n", gated).stdout
    assert shown.startswith("resourceclaim/c is pending: since ")
    gates, events = shown.split("\n\n")
    assert [line.split()[:3] for line in gates.splitlines() if line.split()[0] in ("manual", "external:itsm")] == [
        ["manual", "approved", "admin"], ["external:itsm", "pending", "<none>"],
    ]  # fmt: skip
    assert "gate manual approved by admin, next is gate external:itsm: fine" in events
    told = json.loads(bursar(server, "approvals", "history", "claim/c", "-n", gated, "--json").stdout)
    assert told["approval"]["gates"]["manual"]["reason"] == "fine"
    admin.namespaces.create({"metadata": {"name": f"{gated}-x", "labels": {"bursar.io/tenant": "default"}}})
    claim(admin, f"{gated}-x", "free")
    plain = bursar(server, "approvals", "history", "resourceclaim/free", "-n", f"{gated}-x", code=1)
    assert "needs no approval" in plain.stderr


def test_a_token_of_an_approver_names_tenants_and_gates(
    server: Server, admin: Client, user: Client, gated: str
) -> None:
    claim(user, gated, "c", 1)
    asked = ("token", "create", "--role", "approver", "--user", "ann")
    assert "names the tenants that it sees, and the gates" in bursar(server, *asked, code=1).stderr
    token = bursar(server, *asked, "--decides-for", gated, "--gate", "external:itsm").stdout.strip()
    assert bursar(server, "approvals", token=token).stderr == "No request awaits approval.\n", (
        "it is not its gate's turn"
    )
    barred = bursar(server, "approvals", "approve", "claim/c", "-n", gated, token=token, code=4)
    assert "may not decide gate 'manual'; its gates are external:itsm" in barred.stderr
    bursar(server, "approvals", "approve", "claim/c", "-n", gated)
    assert "resourceclaim/c" in bursar(server, "approvals", token=token).stdout
    bursar(server, "approvals", "approve", "claim/c", "-n", gated, token=token)
    assert state(admin, gated, "c") == "approved"


async def test_the_same_from_python(server: Server, admin: Client, user: Client, gated: str) -> None:
    for number in range(3):
        claim(user, gated, f"c{number}")
    async with AsyncClient(server.url, token=server.environment["BURSAR_TOKEN"]) as client:
        found = [one async for one in client.approvals(gate="manual", tenant=gated)]
        assert [one["name"] for one in found] == ["c0", "c1", "c2"]
        item = {"kind": "ResourceClaim", "namespace": gated, "name": "c0", "decision": "deny", "reason": "no"}
        assert (await client.decide_approvals([item]))[0]["state"] == "denied"
        limit = await client.set_limit(gated, "nvidia.com/gpu", 4)
        assert (limit["limit"], limit["source"]) == ("4", "override")
        assert (await client.unset_limit(gated, "nvidia.com/gpu"))["source"] == "unlimited"
        assert (await client.tenant_limits(gated))["limits"]["clusters"]["limit"] == "4"


def test_explain_and_status_say_who_decides(server: Server, admin: Client, user: Client, gated: str) -> None:
    admin.allocations(gated).create({"metadata": {"name": "a"}, "spec": {"resources": {"requests": {"cpu": "1"}}}})
    shown = bursar(server, "status", "a", "-n", gated).stdout
    assert "awaiting approval at gate manual: an approver decides" in shown
    explained = bursar(server, "explain", "a", "-n", gated).stdout
    assert "awaiting approval at gate manual" in explained
    assert "more" in shown


def test_words_complete_to_commands_and_tenants(server: Server, gated: str) -> None:
    def completed(words: str) -> set[str]:
        environment = {**os.environ, **server.environment, "_BURSAR_COMPLETE": "bash_complete", "COMP_WORDS": words,
                       "COMP_CWORD": str(len(words.split(" ")) - 1), "BURSAR_COMPLETION_SECONDS": "20"}  # fmt: skip
        done = subprocess.run([str(BURSAR)], env=environment, capture_output=True, text=True, timeout=60, check=False)
        return {line.partition(",")[2] for line in done.stdout.splitlines()}

    assert {"set", "unset", "request", "show"} <= completed("bursar quota ")
    assert gated in completed(f"bursar quota {gated[:6]}")
    assert completed("bursar approvals app") == {"approve"}
