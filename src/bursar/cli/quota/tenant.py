"""`bursar tenant`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from bursar.cli.shell import completers
from bursar.cli.shell.connection import Connection, connected
from bursar.cli.shell.output import NONE, print_rows, to_json


@click.group()
def tenant() -> None:
    """Show what tenants may use, and do use."""


@tenant.command()
@click.argument("name", shell_complete=completers.named("tenants"))
@click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table", help="How to print.")
@click.option("--json", "as_json", is_flag=True, help="The same as -o json.")
@connected
def quotas(connection: Connection, name: str, output: str, as_json: bool) -> None:
    """Show each limit of a tenant, where it comes from, and what is used of it."""
    answer = connection.client.tenant_quotas(name)
    if as_json or output == "json":
        click.echo(to_json(answer))
        return
    rows = [row(dimension, one) for dimension, one in (answer.get("quotas") or {}).items()]
    if not rows:
        click.echo(f"tenant/{name} has no limits and uses nothing.", err=True)
        return
    print_rows(("Dimension", "Limit", "Source", "Accepted", "Bound", "Used"), rows)


def row(dimension: str, one: Mapping[str, Any]) -> list[str]:
    share = one.get("utilization")
    values = [str(one.get(name) or NONE) for name in ("limit", "source", "accepted", "bound")]
    return [dimension, *values, NONE if share is None else f"{int(share * 100)}%"]  # Rounded down: 100% means no room.
