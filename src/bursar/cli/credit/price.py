"""`bursar price`: lists, sets and deletes the prices of resources per second."""

from __future__ import annotations

import click

from bursar.cli.credit.credit import request_option
from bursar.cli.shell.connection import Connection, connected
from bursar.cli.shell.options import json_option
from bursar.cli.shell.output import exit_with_json, print_rows
from bursar.cli.shell.resource_names import check_priced, force_option
from bursar.core.values.wording import counted


@click.group()
def price() -> None:
    """Show and set prices."""


@price.command("list")
@click.option("--resource", default="", metavar="NAME", help="Only this resource.")
@click.option("--at", default="", metavar="TIME", help="The prices at this time; else now.")
@click.option("--history", is_flag=True, help="All versions, future ones too.")
@json_option
@connected
def list_(connection: Connection, resource: str, at: str, history: bool, as_json: bool) -> None:
    """List prices per second of one unit: a GPU, a core, a GiB."""
    found = connection.client.prices(resource=resource, at=at, history=history)
    exit_with_json(as_json, found)
    rows = [
        [one["resource"], one["class"] or "any", one["per_second"], one["effective_from"]] for one in found["items"]
    ]
    if not rows:
        click.echo("No prices found: `bursar price set` sets one.", err=True)
        return
    print_rows(("Resource", "Class", "Per second", "From"), rows)


@price.command("set")
@click.argument("resource")
@click.argument("per_second", metavar="CREDITS")
@click.option("--class", "class_", default="", metavar="TYPE", help="The GPU type; else for types without a price.")
@click.option("--from", "begin", default="", metavar="TIME", help="The begin; else now.")
@force_option
@request_option
@json_option
@connected
def set_(
    connection: Connection,
    resource: str,
    per_second: str,
    class_: str,
    begin: str,
    force: bool,
    request_id: str,
    as_json: bool,
) -> None:
    """Set the price per second. It begins now or later, because prices that have begun never change.

    \b
    bursar price set nvidia.com/gpu 0.01 --class h100
    bursar price set cpu 0.0001 --from 2027-01-01
    """
    check_priced(resource, force=force)
    found = connection.client.set_price(
        resource, per_second, gpu_type=class_, effective_from=begin, request_id=request_id
    )
    exit_with_json(as_json, found)
    name = f"{found['resource']} {found['class']}".strip()
    click.echo(f"price of {name}: {counted(found['per_second'], 'credit')} a second from {found['effective_from']}")


@price.command()
@click.argument("resource")
@click.option("--class", "class_", default="", metavar="TYPE", help="The GPU type; else the price without one.")
@click.option("--from", "begin", required=True, metavar="TIME", help="Its begin, as in `price list --history`.")
@json_option
@connected
def delete(connection: Connection, resource: str, class_: str, begin: str, as_json: bool) -> None:
    """Delete a price that has not begun.

    \b
    bursar price list --resource cpu --history
    bursar price delete cpu --from 2027-01-01
    """
    found = connection.client.delete_price(resource, begin, gpu_type=class_)
    exit_with_json(as_json, found)
    name = f"{found['resource']} {found['class']}".strip()
    click.echo(f"price of {name} from {found['effective_from']} deleted")
