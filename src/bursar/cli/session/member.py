"""`bursar member`: adds, removes and lists members of tenants."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from bursar.cli.shell import completers
from bursar.cli.shell.connection import Connection, connected, dry_run_option
from bursar.cli.shell.output import age, exit_with_json, print_documents, print_rows
from bursar.core.values.access import OF_TENANTS
from bursar.core.values.names import member_name

if TYPE_CHECKING:
    from bursar.client import Document

_ROLES = [str(role) for role in OF_TENANTS]
_tenant = click.argument("tenant", metavar="TENANT", shell_complete=completers.named("tenants"))
_user = click.argument("user", metavar="USER")
_json = click.option("--json", "as_json", is_flag=True, help="Print the answer as JSON.")


@click.group()
def member() -> None:
    """Add, remove and list the members of tenants.

    A member is a user that the identity provider names without a tenant, as its user claim says.
    """


@member.command()
@_tenant
@_user
@click.option("--role", type=click.Choice(_ROLES), default="user", show_default=True, help="The role in the tenant.")
@dry_run_option
@_json
@connected
def add(connection: Connection, tenant: str, user: str, role: str, dry_run: bool, as_json: bool) -> None:
    """Make a user a member of a tenant.

    \b
    bursar member add physics ann@example.com --role tenant-admin
    """
    document = {"spec": {"tenant": tenant, "user": user, "role": role}}
    created = connection.client.members.create(document, dry_run=dry_run)
    exit_with_json(as_json, created)
    click.echo(f"member/{created['metadata']['name']} added{' (dry run)' if dry_run else ''}")


@member.command()
@_tenant
@_user
@dry_run_option
@_json
@connected
def remove(connection: Connection, tenant: str, user: str, dry_run: bool, as_json: bool) -> None:
    """End a user's membership. Their tokens in that tenant are revoked, and their watches end."""
    name = member_name(tenant, user)
    removed = connection.client.members.delete(name, dry_run=dry_run)
    exit_with_json(as_json, removed)
    click.echo(f"member/{name} removed{' (dry run)' if dry_run else ''}")


@member.command("list")
@click.argument("tenant", metavar="[TENANT]", required=False, shell_complete=completers.named("tenants"))
@click.option("-o", "--output", type=click.Choice(["table", "json", "yaml"]), default="table", help="Output format.")
@click.option("--json", "as_json", is_flag=True, help="The same as -o json.")
@connected
def list_(connection: Connection, tenant: str | None, output: str, as_json: bool) -> None:
    """List the members of a tenant, or of all tenants that you see."""
    selector = f"spec.tenant={tenant}" if tenant else ""
    found = list(connection.client.members.list(field_selector=selector))
    if as_json or output != "table":
        print_documents(found, "json" if as_json else output, as_list=True)
    elif found:
        print_rows(("Tenant", "User", "Role", "Age"), map(_row, found))
    else:
        click.echo(f"tenant/{tenant} has no members." if tenant else "There are no members that you see.", err=True)


def _row(document: Document) -> list[str]:
    spec = document["spec"]
    return [spec["tenant"], spec["user"], spec["role"], age(document["metadata"].get("creationTimestamp"))]
