"""`bursar whoami`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from bursar.cli.shell.connection import Connection, connected
from bursar.cli.shell.output import to_json


@click.command()
@click.option("-o", "--output", type=click.Choice(["text", "json"]), default="text", help="How to print.")
@connected
def whoami(connection: Connection, output: str) -> None:
    """Show who the server takes you for."""
    info = connection.client.whoami()
    if output == "json":
        click.echo(to_json(info))
        return
    click.echo(username(info))
    for name in ("role", "tenant", "node"):
        if info.get(name):
            click.echo(f"  {name}: {info[name]}")
    click.echo(f"  server: {connection.client.context.url}")


def username(info: Mapping[str, Any]) -> str:
    """Not every token is somebody's: then it is known by its role."""
    return str(info.get("user") or info.get("node") or info.get("role") or "nobody")
