"""`bursar tenant`: shows limits and usage of tenants."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from bursar.cli.shell import completers
from bursar.cli.shell.connection import Connection, connected
from bursar.cli.shell.output import NONE, exit_with_json, print_rows


@click.group()
def tenant() -> None:
    """Show the limits and usage of tenants."""


@tenant.command()
@click.argument("name", shell_complete=completers.named("tenants"))
@click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table", help="The output format.")
@click.option("--json", "as_json", is_flag=True, help="The same as -o json.")
@connected
def quotas(connection: Connection, name: str, output: str, as_json: bool) -> None:
    """Show each limit of a tenant, its source, and its usage."""
    answer = connection.client.tenant_quotas(name)
    exit_with_json(as_json or output == "json", answer)
    rows = [row(dimension, one) for dimension, one in (answer.get("quotas") or {}).items()]
    if not rows:
        click.echo(f"tenant/{name} has no limits and no usage.", err=True)
        return
    print_rows(("Dimension", "Limit", "Source", "Requested", "Placed", "Used"), rows)
    click.echo("\nRequested: accepted work, pending or placed. Placed: work on nodes.", err=True)


def row(dimension: str, one: Mapping[str, Any]) -> list[str]:
    share = one.get("utilization")
    values = [str(one.get(name) or NONE) for name in ("limit", "source", "accepted", "bound")]
    # Rounded down, so that 100% means the limit is reached.
    return [dimension, *values, NONE if share is None else f"{int(share * 100)}%"]
