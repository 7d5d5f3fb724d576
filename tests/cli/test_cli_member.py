"""`bursar member` against a real server, the tenant that a client names, and tokens of approvers."""

import json

from bursar.cli.shell.problem import CONFLICT, FAILED, NOT_FOUND, USAGE
from bursar.client import Client
from bursar.client.contexts import resolve
from bursar.client.http import options
from support.process.commands import bursar
from support.process.server import Server


def test_members_are_added_listed_and_removed(server: Server, admin: Client, team: str) -> None:
    empty = bursar(server, "member", "list", team)
    assert (empty.stdout, empty.stderr) == ("", f"tenant/{team} has no members.\n")
    tried = bursar(server, "member", "add", team, "ann", "--dry-run")
    assert tried.stdout == f"member/{team}.ann added (dry run)\n"
    done = bursar(server, "member", "add", team, "ann", "--role", "tenant-admin")
    assert done.stdout == f"member/{team}.ann added\n"
    added = json.loads(bursar(server, "member", "add", team, "bob@physics.example", "--json").stdout)
    assert added["spec"] == {"tenant": team, "user": "bob@physics.example", "role": "user"}
    again = bursar(server, "member", "add", team, "ann", code=CONFLICT)
    assert "already exists" in again.stderr
    head, *rows = bursar(server, "member", "list", team).stdout.splitlines()
    assert head.split() == ["TENANT", "USER", "ROLE", "AGE"]
    assert sorted(row.split()[:3] for row in rows) == [
        [team, "ann", "tenant-admin"],
        [team, "bob@physics.example", "user"],
    ]
    listed = json.loads(bursar(server, "member", "list", "--json").stdout)
    assert {f"{team}.ann"} <= {one["metadata"]["name"] for one in listed["items"]}
    assert bursar(server, "member", "remove", team, "bob@physics.example").stdout.endswith("removed\n")
    assert bursar(server, "member", "remove", team, "ann").stdout == f"member/{team}.ann removed\n"
    gone = bursar(server, "member", "remove", team, "ann", code=NOT_FOUND)
    assert "not found" in gone.stderr
    assert list(admin.members.list(field_selector=f"spec.tenant={team}")) == []


def test_a_member_of_no_tenant_and_a_role_that_is_none_are_refused(server: Server, team: str) -> None:
    missing = bursar(server, "member", "add", "nowhere", "ann", code=FAILED)
    assert "Tenant 'nowhere' does not exist" in missing.stderr
    wrong = bursar(server, "member", "add", team, "ann", "--role", "emperor", code=USAGE)
    assert "'tenant-admin', 'user', 'viewer'" in wrong.stderr


def test_an_approvers_token_names_tenants_and_gates(server: Server, admin: Client, team: str) -> None:
    made = bursar(
        server, "token", "create", "--role", "approver", "--user", "ida", "--decides-for", team, "--gate", "manual",
        "--gate", "quota", "-o", "json",
    )  # fmt: skip
    spec = json.loads(made.stdout)["spec"]
    assert (spec["tenants"], spec["gates"]) == ([team], ["manual", "quota"])
    refused = bursar(server, "token", "create", "--role", "approver", code=FAILED)
    assert "names the tenants that it sees, and the gates" in refused.stderr


def test_requests_name_the_tenant_that_the_context_or_the_environment_says() -> None:
    def header(**environment: str) -> str | None:
        context = resolve(url="http://127.0.0.1:1", environment={"BURSAR_CONFIG": "/nonexistent", **environment})
        found: str | None = options(context, 1.0)["headers"].get("x-bursar-tenant")
        return found

    assert header() is None
    assert header(BURSAR_TENANT="physics") == "physics"
    with Client("http://127.0.0.1:1", "t", tenant="optics") as client:
        assert client.context.tenant == "optics"
