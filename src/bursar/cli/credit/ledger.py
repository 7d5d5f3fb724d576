"""`bursar ledger`: verifies the hash chain and sums of the ledger, and rotates its signing key."""

from __future__ import annotations

import click

from bursar.cli.shell.connection import Connection, connected
from bursar.cli.shell.options import json_option, seconds_of
from bursar.cli.shell.output import exit_with_json, to_json
from bursar.core.values.wording import counted


@click.group()
def ledger() -> None:
    """Verify the ledger, and rotate its signing key."""


@ledger.command()
@click.option("--anchor", default="", metavar="BLOCK:HASH", help="The head that an earlier run printed.")
@json_option
@connected
def verify(connection: Connection, anchor: str, as_json: bool) -> None:
    """Check every block, sum, balance and hold of the ledger.

    Prints every fault found, and exits with 1 if there is one. Keep the printed head somewhere else: a later run with
    --anchor proves that no entry before it has changed.

    \b
    bursar ledger verify
    bursar ledger verify --anchor 381:9f2c…
    """
    found = connection.client.verify_ledger(anchor=anchor)
    if as_json:
        click.echo(to_json(found))
    else:
        for one in found["findings"]:
            click.secho(f"{one['where']}: {one['message']} ({one['check']})", fg="red", err=True)
        entries = counted(found["entries"], "entry", "entries")
        checked = f"{entries} in {counted(found['blocks'], 'sealed block')}, plus unsealed entries"
        click.echo(f"ledger {'OK' if found['sound'] else 'DAMAGED'}: {checked}")
        if found["head"]:
            click.echo(f"head: {found['head']}")
    if not found["sound"]:
        raise click.exceptions.Exit(1)


@ledger.command()
@json_option
@connected
def status(connection: Connection, as_json: bool) -> None:
    """Show how much of the ledger is sealed and verified.

    Also shows the balances of the system's own accounts.
    """
    found = connection.client.ledger()
    exit_with_json(as_json, found)
    click.echo(f"entries:  {found['last_entry']}, of which {found['sealed_entry']} are sealed")
    click.echo(f"head:     {found['head'] or 'no block is sealed yet'}")
    click.echo(f"verified: up to block {found['verified_block']}, {found['verified_at'] or 'never'}")
    for name, amount in found["accounts"].items():
        click.echo(f"{name + ':':<20}{counted(amount, 'credit')}")
    for one in found["findings"]:
        click.secho(f"{one['where']}: {one['message']} ({one['check']})", fg="red", err=True)


@ledger.command("rotate-key")
@click.option("--overlap", callback=seconds_of, metavar="TIME", help="How long older keys stay valid.")
@click.option("--reason", default="", help="The reason; it is recorded.")
@json_option
@connected
def rotate_key(connection: Connection, overlap: int | None, reason: str, as_json: bool) -> None:
    """Create a new key that signs leases for nodes.

    With --overlap 0 older keys become invalid at once, for instance after a theft.
    """
    body = {"reason": reason, **({} if overlap is None else {"overlapSeconds": overlap})}
    found = connection.client.request("POST", "/api/v1/ledger/keys", body=body)
    exit_with_json(as_json, found)
    click.echo(f"key {found['key']} signs from now on; valid keys: {', '.join(found['believed'])}")
