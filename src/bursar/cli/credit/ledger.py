"""`bursar ledger`: whether the books are what was written."""

from __future__ import annotations

import click

from bursar.cli.credit.credit import json_option
from bursar.cli.nodes.drain import seconds_of
from bursar.cli.shell.connection import Connection, connected
from bursar.cli.shell.output import to_json
from bursar.core.values.wording import counted


@click.group()
def ledger() -> None:
    """Prove that the ledger is whole."""


@ledger.command()
@click.option("--anchor", default="", metavar="BLOCK:HASH", help="The head that an earlier run printed.")
@json_option
@connected
def verify(connection: Connection, anchor: str, as_json: bool) -> None:
    """Check every block, sum, balance and hold of the ledger.

    Ends with 1 where anything is not as it must be, and says what. Write the head down somewhere else: given as
    --anchor later, it proves that nothing before it was changed since.

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
        looked = f"{counted(found['blocks'], 'sealed block')} with {entries}, and what is not sealed yet"
        click.echo(f"the ledger is whole: {looked}" if found["sound"] else f"THE LEDGER IS NOT WHOLE: {looked}")
        if found["head"]:
            click.echo(f"head: {found['head']}")
    if not found["sound"]:
        raise click.exceptions.Exit(1)


@ledger.command()
@json_option
@connected
def status(connection: Connection, as_json: bool) -> None:
    """Show how far it is sealed and verified.

    The system's own accounts are shown as well.
    """
    found = connection.client.ledger()
    if as_json:
        click.echo(to_json(found))
        return
    click.echo(f"entries:  {found['last_entry']}, of which {found['sealed_entry']} are sealed")
    click.echo(f"head:     {found['head'] or 'nothing is sealed yet'}")
    click.echo(f"verified: up to block {found['verified_block']}, {found['verified_at'] or 'never'}")
    for name, amount in found["accounts"].items():
        click.echo(f"{name + ':':<20}{counted(amount, 'credit')}")
    for one in found["findings"]:
        click.secho(f"{one['where']}: {one['message']} ({one['check']})", fg="red", err=True)


@ledger.command("rotate-key")
@click.option("--overlap", callback=seconds_of, metavar="TIME", help="How long the older keys are still believed.")
@click.option("--reason", default="", help="Why; it is recorded.")
@json_option
@connected
def rotate_key(connection: Connection, overlap: int | None, reason: str, as_json: bool) -> None:
    """Make a new key for signing what is granted to nodes.

    With --overlap 0 the older keys are believed no longer: for when one may have been stolen.
    """
    body = {"reason": reason, **({} if overlap is None else {"overlapSeconds": overlap})}
    found = connection.client.request("POST", "/api/v1/ledger/keys", body=body)
    if as_json:
        click.echo(to_json(found))
        return
    click.echo(f"key {found['key']} signs from now on; believed: {', '.join(found['believed'])}")
