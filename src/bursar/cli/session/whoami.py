"""`bursar whoami`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from bursar.cli.shell.connection import Connection, connected
from bursar.cli.shell.output import exit_with_json


@click.command()
@click.option("-o", "--output", type=click.Choice(["text", "json"]), default="text", help="The output format.")
@connected
def whoami(connection: Connection, output: str) -> None:
    """Show the current user and role."""
    info = connection.client.whoami()
    exit_with_json(output == "json", info)
    click.echo(username(info))
    for name in ("role", "tenant", "node"):
        if info.get(name):
            click.echo(f"  {name}: {info[name]}")
    click.echo(f"  server: {connection.client.context.url}")


def username(info: Mapping[str, Any]) -> str:
    """The user's name, or the role of a token without a user."""
    return str(info.get("user") or info.get("node") or info.get("role") or "nobody")
