"""`bursar admin`: what only administrators of the system do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from bursar.cli import complete
from bursar.cli.connection import Connection, connected
from bursar.core.wording import dimension_of

NO_LIMIT = "none"


@click.group()
def admin() -> None:
    """Change what tenants may use."""


@admin.group()
def tenant() -> None:
    """Change what a tenant may use."""


@tenant.command()
@click.argument("name", shell_complete=complete.named("tenants"))
@click.option("--max-nodes", metavar="N", help="Nodes at once.")
@click.option("--max-concurrent-allocations", metavar="N", help="Allocations at once.")
@click.option("--gpu-hours-budget", type=float, metavar="HOURS", help="Per budget period.")
@click.option("--node-hours-budget", type=float, metavar="HOURS", help="Per budget period.")
@click.option("--fair-share-target", type=float, metavar="FRACTION", help="The share of the whole system.")
@click.option("--burst-allowance", type=float, metavar="FACTOR", help="How far above its share it may go when idle.")
@click.option("--weight", type=float, help="Its part of its parent's share.")
@click.option("--tier", metavar="NAME", help="The tier its defaults come from.", shell_complete=complete.named("tiers"))
@click.option("--parent", metavar="NAME", help="The tenant above it.", shell_complete=complete.named("tenants"))
@click.option("--enforcement", type=click.Choice(["Reject", "Queue"]), help="What happens to work above a limit.")
@click.option(
    "--limit", "limits", multiple=True, metavar="DIMENSION=QUANTITY", help="Any other limit; =none removes it."
)
@connected
def update(connection: Connection, name: str, limits: Sequence[str], **fields: Any) -> None:
    """Change the named limits and leave the others.

    \b
    bursar admin tenant update physics --max-nodes 250 --gpu-hours-budget 150000
    bursar admin tenant update physics --limit nvidia.com/gpu=512 --limit volumes=none
    """
    changes = {field: _number(value) for field, value in fields.items() if value is not None}
    for text in limits:
        dimension, quantity = limit(text)
        changes[f"max_{dimension}"] = quantity
    if not changes:
        raise click.UsageError("nothing to change: name at least one limit")
    connection.client.update_tenant(name, changes)
    click.echo(f"tenant/{name} updated")


def limit(text: str) -> tuple[str, str | int | None]:
    dimension, equals, quantity = text.partition("=")
    if not dimension or not equals or not quantity:
        raise click.UsageError(f"--limit {text!r} should be DIMENSION=QUANTITY, such as nvidia.com/gpu=100")
    return dimension_of(dimension), _number(quantity)


def _number(value: Any) -> Any:
    """`none` takes a limit away; a whole number goes as one; a quantity such as 40Ti goes as it is."""
    if value == NO_LIMIT:
        return None
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return int(value) if isinstance(value, str) and value.isascii() and value.isdecimal() else value
