"""`bursar webhook`: where notices are sent, and whose payments are believed."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import click

from bursar.cli.credit.credit import json_option, moment
from bursar.cli.nodes.drain import seconds_of
from bursar.cli.shell import completers
from bursar.cli.shell.connection import Connection, connected
from bursar.cli.shell.output import NONE, print_rows, to_json
from bursar.cli.shell.problem import Problem

Document = Mapping[str, Any]
name_argument = click.argument("name", shell_complete=completers.webhook)
POLL_SECONDS = 0.2


@click.group()
def webhook() -> None:
    """Have notices sent, and see what was not taken.

    For system administrators.
    """


@webhook.command("list")
@json_option
@connected
def list_(connection: Connection, as_json: bool) -> None:
    """List webhooks, without their secrets."""
    found = list(connection.client.webhooks())
    if as_json:
        click.echo(to_json({"items": found}))
        return
    header = ("Name", "Direction", "Tenant", "Where", "Types", "Waiting", "Given up", "State", "Last said")
    print_rows(header, map(_row, found))


@webhook.command()
@click.argument("name")
@click.argument("where", metavar="URL", required=False, default="")
@click.option("--payments", is_flag=True, help="Nothing is sent to it, so it has no URL: its payments are believed.")
@click.option("--tenant", default="", help="Of this tenant alone.", shell_complete=completers.named("tenants"))
@click.option("--type", "types", multiple=True, metavar="TYPE", help="Only these, such as credit.low; repeatable.")
@click.option("--allow-local", is_flag=True, help="It may be on the server's own machine, or link-local.")
@click.option("--secret", default="", help="A secret of yours, as whsec_…; else one is made.")
@json_option
@connected
def create(
    connection: Connection,
    name: str,
    where: str,
    payments: bool,
    tenant: str,
    types: Sequence[str],
    allow_local: bool,
    secret: str,
    as_json: bool,
) -> None:
    """Have notices sent to a URL, and print the secret that they are signed with; it is not shown again.

    \b
    bursar webhook create ops https://hooks.example/bursar --type credit.low --type credit.exhausted
    bursar webhook create bank --payments
    """
    if payments == bool(where):
        raise click.UsageError("Give a URL, or --payments.")
    made = connection.client.create_webhook(
        name,
        where,
        direction="in" if payments else "out",
        tenant=tenant,
        types=types,
        allow_local=allow_local,
        secret=secret,
    )
    if as_json:
        click.echo(to_json(made))
        return
    # The secret alone on standard output, so that a script can take it from there.
    click.echo(made["status"]["secret"])
    click.echo(f"webhook/{name} created", err=True)


@webhook.command()
@name_argument
@connected
def delete(connection: Connection, name: str) -> None:
    """Remove a webhook, with what it was still to get."""
    connection.client.delete_webhook(name)
    click.echo(f"webhook/{name} deleted")


@webhook.command()
@name_argument
@click.option(
    "--timeout", "seconds", callback=seconds_of, default="15s", show_default=True, metavar="TIME",
    help="How long to wait for it to be taken.",
)  # fmt: skip
@connected
def test(connection: Connection, name: str, seconds: int) -> None:
    """Send a notice that tells of nothing, and see whether it is taken.

    It is tried again as any other notice is, should it not be taken at once.
    """
    sent = connection.client.test_webhook(name)["notice"]
    deadline = time.monotonic() + seconds
    while (left := _pending(connection, name, sent)) is not None:
        if left["tries"] and left["lastSaid"]:
            raise Problem(f"webhook/{name} did not take {sent}: {left['lastSaid']}", _hint(left["lastSaid"]))
        if time.monotonic() >= deadline:
            raise click.ClickException(f"webhook/{name} has not taken {sent} within {seconds} s: it is tried again")
        time.sleep(POLL_SECONDS)
    # One that says that it is gone is sent nothing more, and what it was to get is forgotten.
    state = next(
        (one["status"]["state"] for one in connection.client.webhooks() if one["metadata"]["name"] == name), "Deleted"
    )
    if state != "Active":
        raise click.ClickException(f"webhook/{name} did not take {sent}: {state}")
    click.echo(f"webhook/{name} took {sent}")


def _hint(said: str) -> str:
    """Addresses of the server's own machine are called only where that was said when it was made."""
    return "delete it, and create it with --allow-local" if "allowLocal" in said else ""


def _pending(connection: Connection, name: str, notice: str) -> Document | None:
    return next((one for one in connection.client.webhook_deliveries(name) if one["notice"] == notice), None)


@webhook.command()
@name_argument
@json_option
@connected
def deliveries(connection: Connection, name: str, as_json: bool) -> None:
    """List the notices that a webhook has not taken, the oldest first."""
    found = list(connection.client.webhook_deliveries(name))
    if as_json:
        click.echo(to_json({"items": found}))
        return
    rows = (
        [
            one["notice"], one["type"], one["subject"], moment(one["at"]), str(one["tries"]),
            moment(one["nextAt"]) or "given up", one["lastSaid"] or NONE,
        ]
        for one in found
    )  # fmt: skip
    print_rows(("Notice", "Type", "Subject", "At", "Tries", "Next", "Last said"), rows)


def _row(one: Document) -> list[str]:
    spec, status = one["spec"], one["status"]
    return [
        one["metadata"]["name"], spec["direction"], spec["tenant"] or NONE, spec["url"] or NONE,
        ",".join(spec["types"]) or "all", str(status.get("waiting", 0)), str(status.get("givenUp", 0)),
        status["state"], status.get("lastSaid") or NONE,
    ]  # fmt: skip
