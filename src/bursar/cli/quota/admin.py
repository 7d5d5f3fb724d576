"""`bursar admin`: changes that only system administrators may make."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from bursar.cli.shell import completers
from bursar.cli.shell.connection import Connection, connected, dry_run_option
from bursar.cli.shell.limit_notes import print_limit_notes, tenant_before
from bursar.cli.shell.resource_names import check_limited, force_option
from bursar.core.quota.quota_messages import dimension_of

NO_LIMIT = "none"


@click.group()
def admin() -> None:
    """Change the limits and settings of tenants."""


@admin.group()
def tenant() -> None:
    """Change the limits and settings of a tenant."""


class NumberOrNone(click.ParamType[float | str]):
    """A non-negative number, or `none`."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float | str:
        if value == NO_LIMIT:
            return NO_LIMIT
        try:
            number = float(value)
        except ValueError:
            number = -1.0
        if not 0 <= number < float("inf"):
            self.fail(f"{value!r} is not a number of 0 or more, and not {NO_LIMIT!r}", param, ctx)
        return number


NUMBER = NumberOrNone()


@tenant.command()
@click.argument("name", shell_complete=completers.named("tenants"))
@click.option("--max-nodes", metavar="N", help="Nodes at once.")
@click.option("--max-concurrent-allocations", metavar="N", help="Allocations at once.")
@click.option("--gpu-hours-budget", type=NUMBER, metavar="HOURS", help="Budget per period.")
@click.option("--node-hours-budget", type=NUMBER, metavar="HOURS", help="Budget per period.")
@click.option("--fair-share-target", type=NUMBER, metavar="FRACTION", help="Target share of the cluster.")
@click.option("--burst-allowance", type=NUMBER, metavar="FACTOR", help="How far above its share it may go if idle.")
@click.option("--weight", type=NUMBER, metavar="NUMBER", help="Weight within its parent's share.")
@click.option("--tier", metavar="NAME", help="The tier with its defaults.", shell_complete=completers.named("tiers"))
@click.option("--parent", metavar="NAME", help="The parent tenant.", shell_complete=completers.named("tenants"))
@click.option("--enforcement", type=click.Choice(["Reject", "Queue"]), help="Reject or queue work above a limit.")
@click.option("--billing-mode", type=click.Choice(["none", "prepaid"]), help="Whether its work is prepaid.")
@click.option(
    "--approval-policy",
    type=click.Choice(["none", "quota", "manual", "external"]),
    help="The approval that its requests need.",
)
@click.option("--sensitive/--no-sensitive", default=None, help="Whether its users may claim nodes for sensitive use.")
@click.option(
    "--isolation",
    type=click.Choice(["none", "required"]),
    help="Whether its work needs nodes that isolate tenants from each other.",
)
@click.option("--display-name", metavar="TEXT", help="The name for display.")
@click.option("--limit", "limits", multiple=True, metavar="DIMENSION=QUANTITY", help="Another limit; =none removes it.")
@force_option
@dry_run_option
@connected
def update(connection: Connection, name: str, limits: Sequence[str], force: bool, dry_run: bool, **fields: Any) -> None:
    """Change limits and settings of a tenant. `none` removes a limit, budget, share, tier or parent.

    \b
    bursar admin tenant update physics --max-nodes 250 --gpu-hours-budget 150000
    bursar admin tenant update physics --limit nvidia.com/gpu=512 --limit volumes=none
    """
    changes = {field: _value(field, value) for field, value in fields.items() if value is not None}
    for text in limits:
        dimension, quantity = limit(text)
        changes[f"max_{dimension}"] = quantity
        if quantity is not None:
            check_limited(dimension, force=force)
    if not changes:
        raise click.UsageError("nothing to change: give at least one option")
    before = None if dry_run else tenant_before(connection, "tenants", name)
    after = connection.client.update_tenant(name, changes, dry_run=dry_run)
    click.echo(f"tenant/{name} updated{' (dry run)' if dry_run else ''}")
    if not dry_run:
        numbers = {field: value for field, value in changes.items() if field.startswith("max_")}
        limited = [dimension_of(field) for field, value in numbers.items() if value is not None]
        print_limit_notes(connection, before, after, limited)


def _value(field: str, value: Any) -> Any:
    """The value to send. In some fields `none` is an ordinary value."""
    return value if field in ("billing_mode", "approval_policy", "isolation", "display_name") else _number(value)


def limit(text: str) -> tuple[str, str | int | None]:
    dimension, equals, quantity = text.partition("=")
    if not dimension or not equals or not quantity:
        raise click.UsageError(f"--limit {text!r} should be DIMENSION=QUANTITY, such as nvidia.com/gpu=100")
    return dimension_of(dimension), _number(quantity)


def _number(value: Any) -> Any:
    """The limit to send: null for `none`, whole numbers as integers, quantities such as 40Ti as text."""
    if value == NO_LIMIT:
        return None
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return int(value) if isinstance(value, str) and value.isascii() and value.isdecimal() else value
