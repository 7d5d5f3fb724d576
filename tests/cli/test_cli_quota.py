"""`bursar quota` against a real server: limits with usage as bars, changes of limits, and requests for higher ones."""

import json

import pytest
from click.testing import CliRunner

from bursar.cli.main import cli
from bursar.cli.quota.quota import bar
from bursar.client import Client
from support.nodes.placed_work import until
from support.process.commands import bursar
from support.process.server import Server


def token_of(admin: Client, role: str, tenant: str = "", **whose: object) -> str:
    wanted = {"role": role, "user": f"the-{role}", **({"tenant": tenant} if tenant else {}), **whose}
    return str(admin.request("POST", "/api/v1/tokens", body=wanted)["status"]["token"])


@pytest.mark.parametrize(
    ("placed", "used", "limit", "shown"),
    [
        ("0", "0", "10", "[--------------------] 0%"),
        ("5", "5", "10", "[##########----------] 50%"),
        ("5", "10", "10", "[##########++++++++++] 100%"),
        ("0", "999m", "1", "[+++++++++++++++++++-] 99%"),
        ("2Gi", "3Gi", "2Gi", "[####################] 150%"),
        ("0", "0", "0", "[                    ] no headroom"),
        ("1", "1", None, "<none>"),
    ],
)
def test_a_full_bar_means_that_the_limit_is_reached(placed: str, used: str, limit: str | None, shown: str) -> None:
    assert bar("memory" if "i" in placed else "cpu", placed, used, limit) == shown


def test_limits_are_set_shown_and_removed(server: Server, admin: Client, team: str) -> None:
    tried = bursar(server, "quota", "set", team, "cpu=8", "--dry-run")
    assert tried.stdout == f"tenant/{team} updated (dry run)\n"
    assert bursar(server, "quota", team).stderr == f"tenant/{team} has no limits and no usage.\n"
    done = bursar(server, "quota", "set", team, "cpu=8", "nvidia.com/gpu=4", "memory=64Gi")
    assert done.stdout == f"tenant/{team} updated\n"
    spec = {"resources": {"requests": {"cpu": "4"}}, "nodeSelector": {"nowhere": "here"}}
    admin.allocations(team).create({"metadata": {"name": "a"}, "spec": spec})
    quota = {"metadata": {"name": "half"}, "spec": {"hard": {"requests.cpu": "4"}, "soft": {"requests.cpu": "3"}}}
    admin.resourcequotas(team).create(quota)
    shown = bursar(server, "quota", team).stdout
    limits, quotas = shown.split("\n\n")
    head, *rows = [line.split("   ") for line in limits.splitlines()]
    assert [one.strip() for one in head if one] == ["DIMENSION", "USAGE", "REQUESTED", "PLACED", "LIMIT", "SOURCE"]
    cpu = next(line for line in limits.splitlines() if line.startswith("cpu "))
    assert cpu.split() == ["cpu", "[++++++++++----------]", "50%", "4", "0", "8", "override"]
    assert any(one[0] == "pods" for one in rows)
    assert quotas.splitlines()[1].split() == [
        team, "half", "requests.cpu", "[++++++++++++++++++++]", "100%", "4", "0", "4", "3",
    ]  # fmt: skip
    gone = bursar(server, "quota", "unset", team, "cpu", "memory")
    assert "has no limits of its own now for cpu, memory" in gone.stderr
    assert "cpu" not in json.loads(bursar(server, "get", "tenant", team, "-o", "json").stdout)["spec"]["limits"]
    assert bursar(server, "quota", "set", team, "gpu=1", code=2).stderr.startswith("Error: gpu limits no device")
    assert "DIMENSION=QUANTITY" in bursar(server, "quota", "set", team, "cpu", code=2).stderr
    assert "must not be negative" in bursar(server, "quota", "set", team, "cpu=-1", code=1).stderr


def test_tenants_see_their_own_and_administrators_all(server: Server, admin: Client, team: str) -> None:
    bursar(server, "quota", "set", team, "clusters=2")
    user = token_of(admin, "user", team)
    own = json.loads(bursar(server, "quota", "--json", token=user).stdout)
    assert (own["tenant"], own["limits"]["clusters"]["limit"]) == (team, "2")
    assert bursar(server, "quota", "show", team, token=user).stdout.startswith("DIMENSION")
    bursar(server, "quota", "default", token=user, code=3)
    bursar(server, "quota", "set", team, "clusters=9", token=user, code=4)
    everybody = bursar(server, "quota").stdout
    assert everybody.startswith("TENANT")
    assert any(line.split()[:2] == [team, "clusters"] for line in everybody.splitlines())


def test_higher_limits_are_requested_listed_and_approved(server: Server, admin: Client, team: str) -> None:
    bursar(server, "quota", "set", team, "clusters=2")
    boss = token_of(admin, "tenant-admin", team, user="boss")
    made = bursar(
        server, "quota", "request", "clusters=5", "--reason", "June", "--name", "more", "-n", team, token=boss
    )
    assert made.stdout == "quotarequest/more created: awaiting approval at gate manual: an approver decides\n"
    refused = bursar(server, "quota", "request", "clusters=1", "--reason", "x", "-n", team, token=boss, code=1)
    assert "the limit on max_clusters is 2 already, requested 1" in refused.stderr
    assert "--reason" in bursar(server, "quota", "request", "clusters=9", "-n", team, token=boss, code=2).stderr
    bursar(server, "quota", "request", "clusters=none", "--reason", "x", "-n", team, token=boss, code=2)
    bursar(server, "quota", "request", "clusters=9", "--reason", "x", "-n", team, token=token_of(admin, "user", team),
           code=4)  # fmt: skip
    inbox = bursar(server, "approvals", "--tenant", team)
    row = inbox.stdout.splitlines()[1].split()
    assert row[1:] == ["manual", team, team, "quotarequest/more", f"{team}/boss", "clusters=5", "June"]
    denied = bursar(server, "approvals", "approve", "quotarequest/more", "-n", team, token=boss, code=4)
    assert "decided by an approver" in denied.stderr
    done = bursar(server, "approvals", "approve", "qr/more", "-n", team, "--reason", "fine")
    assert done.stdout == "quotarequest/more approved\n"
    assert json.loads(bursar(server, "quota", team, "--json").stdout)["limits"]["clusters"]["limit"] == "5"
    assert bursar(server, "approvals", "--tenant", team).stderr == "No request awaits approval.\n"


def test_the_first_word_is_a_command_or_a_tenant() -> None:
    shown = CliRunner().invoke(cli, ["quota", "--help"])
    assert shown.exit_code == 0
    assert {line.split()[0] for line in shown.output.split("Commands:")[1].splitlines() if line.strip()} == {
        "show", "set", "unset", "request",
    }  # fmt: skip


def test_a_warning_is_an_event_of_the_tenant(server: Server, admin: Client, team: str) -> None:
    bursar(server, "quota", "set", team, "clusters=10")
    claim = {"metadata": {"name": "c"}, "spec": {"resources": {"clusters": 9}}}
    admin.resourceclaims(team).create(claim)
    until(lambda: (admin.tenants.get(team).get("status") or {}).get("quotaWarnings") == {"clusters": 80})
    shown = bursar(server, "describe", "tenant", team, token=token_of(admin, "user", team)).stdout
    assert "QuotaWarning" in shown
    assert "90 % of the limit on max_clusters is used: 9 of 10" in shown
    warned = bursar(server, "get", "tenants", "--field-selector", "status.quota=Warning").stdout
    assert any(line.split()[0] == team for line in warned.splitlines())
