"""`bursar token`: who may speak to the server."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bursar.cli.shell import completers
from bursar.cli.shell.connection import Connection, connected
from bursar.cli.shell.output import NONE, print_documents, print_rows, to_json
from bursar.cli.shell.problem import Outcomes, Problem
from bursar.core.values.access import Role

if TYPE_CHECKING:
    from bursar.client import Client, Document, Resource


@click.group()
def token() -> None:
    """Create, list and revoke tokens."""


@token.command()
@click.option("--role", type=click.Choice([str(role) for role in Role]), required=True, help="What it may do.")
@click.option("--tenant", metavar="NAME", help="With whose things.", shell_complete=completers.named("tenants"))
@click.option("--user", metavar="NAME", help="Whose name is written on what is done.")
@click.option("--node", metavar="NAME", help="For role node: which one.", shell_complete=completers.named("nodes"))
@click.option("--ttl", metavar="TIME", help="How long it is good for, such as 24h; else until it is revoked.")
@click.option("-o", "--output", type=click.Choice(["token", "json"]), default="token", help="json tells its id too.")
@connected
def create(connection: Connection, output: str, **wanted: str | None) -> None:
    """Create a token and print it; it is not shown again.

    \b
    bursar token create --role user --tenant physics --user jobs-bot --ttl 24h
    """
    print_new(connection.client, {name: value for name, value in wanted.items() if value}, output)


@token.command("list")
@click.option("-o", "--output", type=click.Choice(["table", "json", "yaml"]), default="table", help="How to print.")
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
    """Revoke tokens; what they were used for stays."""
    from bursar.client import BursarError

    outcomes = Outcomes()
    for one in ids:
        try:
            tokens(connection.client).delete(one)
            click.echo(f"token/{one} revoked")
        except BursarError as error:
            outcomes.failed(error)
    outcomes.leave()


def print_new(client: Client, wanted: dict[str, Any], output: str = "token", file: Path | None = None) -> None:
    """The token alone on standard output, so that a script can take it from there; or in a file of its user alone."""
    if file is not None and not os.access(file.parent, os.W_OK):
        raise Problem(f"{file} cannot be written", "nothing was created: name a file in a directory of yours")
    created = tokens(client).create(wanted)
    if output == "json":
        click.echo(to_json(created))
        return
    if file is not None:
        _keep(file, created["status"]["token"])
    else:
        click.echo(created["status"]["token"])
    expires = (created.get("spec") or {}).get("expiresAt") or "never"
    click.echo(f"token/{created['metadata']['name']} created; expires: {expires}", err=True)


def _keep(file: Path, token: str) -> None:
    """At once and whole, and never readable by others for a moment."""
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
