"""`bursar node`."""

from __future__ import annotations

import click

from bursar.cli.connection import Connection, connected
from bursar.cli.token import print_new


@click.group()
def node() -> None:
    """Let nodes join."""


@node.command()
@click.option("--name", required=True, help="The node that may join with it.")
@click.option("--ttl", default="10m", show_default=True, metavar="TIME", help="How long it may take to join.")
@connected
def token(connection: Connection, name: str, ttl: str) -> None:
    """Create the token with which a node joins, good for one use.

    \b
    bursar node token --name gpu-worker-043
    """
    print_new(connection.client, {"role": "node", "node": name, "ttl": ttl, "single_use": True})
