"""`bursar token`: creates, lists and revokes API tokens."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bursar.cli.shell import completers
from bursar.cli.shell.connection import Connection, connected
from bursar.cli.shell.output import NONE, exit_with_json, print_documents, print_rows
from bursar.cli.shell.problem import Outcomes, Problem
from bursar.core.values.access import Role

if TYPE_CHECKING:
    from bursar.client import Client, Document, Resource


@click.group()
def token() -> None:
    """Create, list and revoke tokens."""


@token.command()
@click.option("--role", type=click.Choice([str(role) for role in Role]), required=True, help="The role.")
@click.option("--tenant", metavar="NAME", help="The tenant.", shell_complete=completers.named("tenants"))
@click.option("--user", metavar="NAME", help="The user that changes are recorded under.")
@click.option("--node", metavar="NAME", help="The node; for role node.", shell_complete=completers.named("nodes"))
@click.option(
    "--decide-tenant",
    "tenants",
    multiple=True,
    metavar="NAME",
    help="For role approver: a tenant whose requests it decides; `*` is every tenant. Repeatable.",
    shell_complete=completers.named("tenants"),
)
@click.option(
    "--decide-gate",
    "gates",
    multiple=True,
    metavar="NAME",
    help="For role approver: a gate that it decides: quota, manual, external:NAME or `*`. Repeatable.",
)
@click.option("--ttl", metavar="TIME", help="Lifetime, such as 24h; else it never expires.")
@click.option("-o", "--output", type=click.Choice(["token", "json"]), default="token", help="json includes the id.")
@connected
def create(connection: Connection, output: str, **wanted: str | Sequence[str] | None) -> None:
    """Create a token and print it; it is not shown again.

    \b
    bursar token create --role user --tenant physics --user jobs-bot --ttl 24h
    bursar token create --role approver --user ann --decide-tenant physics --decide-gate manual
    """
    print_new(connection.client, {name: value for name, value in wanted.items() if value}, output)


@token.command("list")
@click.option("-o", "--output", type=click.Choice(["table", "json", "yaml"]), default="table", help="Output format.")
@connected
def list_(connection: Connection, output: str) -> None:
    """List tokens, without their secrets."""
    found = list(tokens(connection.client).list())
    if output == "table":
        print_rows(("Id", "Role", "Tenant", "User", "Node", "State", "Expires"), map(_row, found))
    else:
        print_documents(found, output, as_list=True)


@token.command()
@click.argument("ids", nargs=-1, required=True, metavar="ID...")
@connected
def revoke(connection: Connection, ids: Sequence[str]) -> None:
    """Revoke tokens. Objects created with them stay."""
    outcomes = Outcomes()
    for one in ids:
        with outcomes.each():
            tokens(connection.client).delete(one)
            click.echo(f"token/{one} revoked")
    outcomes.leave()


def print_new(client: Client, wanted: dict[str, Any], output: str = "token", file: Path | None = None) -> None:
    """Create a token and print it alone on standard output, for scripts; or write it to a file with mode 0600."""
    if file is not None and not os.access(file.parent, os.W_OK):
        raise Problem(f"{file} cannot be written", "no token was created: choose a directory that you may write to")
    created = tokens(client).create(wanted)
    exit_with_json(output == "json", created)
    if file is not None:
        _keep(file, created["status"]["token"])
    else:
        click.echo(created["status"]["token"])
    expires = (created.get("spec") or {}).get("expiresAt") or "never"
    click.echo(f"token/{created['metadata']['name']} created; expires: {expires}", err=True)


def _keep(file: Path, token: str) -> None:
    """Write the file atomically and with mode 0600."""
    try:
        handle, scratch = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")  # mode 0600
        with os.fdopen(handle, "w") as written:
            written.write(f"{token}\n")
        Path(scratch).replace(file)
    except OSError as error:
        raise Problem(f"{file} cannot be written: {error.strerror}", "revoke the token: bursar token list") from error


def tokens(client: Client) -> Resource:
    return client.resource("tokens", namespaced=False)


def _row(document: Document) -> list[str]:
    spec = document.get("spec") or {}
    values = (spec.get(name) or NONE for name in ("role", "tenant", "user", "node"))
    state = (document.get("status") or {}).get("state") or NONE
    return [document["metadata"]["name"], *values, state, spec.get("expiresAt") or "never"]
