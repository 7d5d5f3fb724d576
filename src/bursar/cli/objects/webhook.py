"""`bursar webhook`: manages receivers of events and senders of payments."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import click

from bursar.cli.credit.credit import moment
from bursar.cli.shell import completers
from bursar.cli.shell.connection import Connection, connected
from bursar.cli.shell.options import json_option, seconds_of
from bursar.cli.shell.output import NONE, exit_with_json, print_rows
from bursar.cli.shell.problem import Problem

Document = Mapping[str, Any]
name_argument = click.argument("name", shell_complete=completers.webhook)
POLL_SECONDS = 0.2


@click.group()
def webhook() -> None:
    """Manage webhooks, and show their pending deliveries.

    For system administrators.
    """


@webhook.command("list")
@json_option
@connected
def list_(connection: Connection, as_json: bool) -> None:
    """List webhooks, without their secrets."""
    found = list(connection.client.webhooks())
    exit_with_json(as_json, {"items": found})
    header = ("Name", "Direction", "Tenant", "URL", "Types", "Pending", "Dropped", "State", "Last response")
    print_rows(header, map(_row, found))


@webhook.command()
@click.argument("name")
@click.argument("where", metavar="URL", required=False, default="")
@click.option("--payments", is_flag=True, help="Accept signed payments from it; it has no URL.")
@click.option("--tenant", default="", help="Only events of this tenant.", shell_complete=completers.named("tenants"))
@click.option("--type", "types", multiple=True, metavar="TYPE", help="An event type, such as credit.low; repeatable.")
@click.option("--allow-local", is_flag=True, help="Allow loopback and link-local addresses.")
@click.option("--secret", default="", help="Your own secret, as whsec_…; else one is generated.")
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
    """Create a webhook and print its signing secret, which is not shown again.

    \b
    bursar webhook create ops https://hooks.example/bursar --type credit.low --type credit.exhausted
    bursar webhook create bank --payments
    """
    if payments == bool(where):
        raise click.UsageError("give a URL or --payments")
    made = connection.client.create_webhook(
        name,
        where,
        direction="in" if payments else "out",
        tenant=tenant,
        types=types,
        allow_local=allow_local,
        secret=secret,
    )
    exit_with_json(as_json, made)
    # The secret alone goes to standard output, for scripts.
    click.echo(made["status"]["secret"])
    click.echo(f"webhook/{name} created", err=True)


@webhook.command()
@name_argument
@connected
def delete(connection: Connection, name: str) -> None:
    """Delete a webhook and its pending deliveries."""
    connection.client.delete_webhook(name)
    click.echo(f"webhook/{name} deleted")


@webhook.command()
@name_argument
@click.option(
    "--timeout", "seconds", callback=seconds_of, default="15s", show_default=True, metavar="TIME",
    help="How long to wait for the delivery.",
)  # fmt: skip
@connected
def test(connection: Connection, name: str, seconds: int) -> None:
    """Send a test event, and wait until it is delivered.

    A failed delivery is retried like that of any other event.
    """
    sent = connection.client.test_webhook(name)["notice"]
    deadline = time.monotonic() + seconds
    while (left := _pending(connection, name, sent)) is not None:
        if left["tries"] and left["lastSaid"]:
            raise Problem(f"webhook/{name} did not accept {sent}: {left['lastSaid']}", _hint(left["lastSaid"]))
        if time.monotonic() >= deadline:
            raise click.ClickException(
                f"webhook/{name} has not accepted {sent} within {seconds} s; delivery will be retried"
            )
        time.sleep(POLL_SECONDS)
    # A receiver that answers 410 Gone is disabled, and its deliveries are deleted.
    state = next(
        (one["status"]["state"] for one in connection.client.webhooks() if one["metadata"]["name"] == name), "Deleted"
    )
    if state != "Active":
        raise click.ClickException(f"webhook/{name} did not accept {sent}: {state}")
    click.echo(f"webhook/{name} delivered {sent}")


def _hint(said: str) -> str:
    """A hint for a local address, which is called only if --allow-local was given at creation."""
    return "delete it, and create it with --allow-local" if "allowLocal" in said else ""


def _pending(connection: Connection, name: str, notice: str) -> Document | None:
    return next((one for one in connection.client.webhook_deliveries(name) if one["notice"] == notice), None)


@webhook.command()
@name_argument
@json_option
@connected
def deliveries(connection: Connection, name: str, as_json: bool) -> None:
    """List pending and dropped deliveries, the oldest first."""
    found = list(connection.client.webhook_deliveries(name))
    exit_with_json(as_json, {"items": found})
    rows = (
        [
            one["notice"], one["type"], one["subject"], moment(one["at"]), str(one["tries"]),
            moment(one["nextAt"]) or "dropped", one["lastSaid"] or NONE,
        ]
        for one in found
    )  # fmt: skip
    print_rows(("Event", "Type", "Subject", "At", "Attempts", "Next", "Last response"), rows)


def _row(one: Document) -> list[str]:
    spec, status = one["spec"], one["status"]
    return [
        one["metadata"]["name"], spec["direction"], spec["tenant"] or NONE, spec["url"] or NONE,
        ",".join(spec["types"]) or "all", str(status.get("waiting", 0)), str(status.get("givenUp", 0)),
        status["state"], status.get("lastSaid") or NONE,
    ]  # fmt: skip
