"""`bursar node`."""

from __future__ import annotations

import click

from bursar.cli import complete
from bursar.cli.connection import Connection, connected, dry_run_option
from bursar.cli.token import print_new


@click.group()
def node() -> None:
    """Let nodes join, and give up those that are gone."""


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


@node.command()
@click.argument("name", metavar="NODE", shell_complete=complete.named("nodes"))
@click.option("--reason", required=True, help="Why nothing of it can be running, as in: switched off by hand.")
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
@dry_run_option
@connected
def fence(connection: Connection, name: str, reason: str, yes: bool, dry_run: bool) -> None:
    """Say that nothing of a silent node runs any more.

    Its work is given up at once: it waits to be placed elsewhere, or fails where it asked for that. Should any of it
    still be running, it runs twice. So switch the node off first, or cut it off from everything it could write to.

    \b
    bursar node fence gpu-7 --reason "switched off, board is dead"
    """
    if not yes and not dry_run:
        click.secho(f"NOTHING OF NODE {name} RUNS ANY MORE: is that certain?", bold=True, err=True)
        click.echo("Its work is started elsewhere. What still runs there would run twice.", err=True)
        click.confirm(f"Fence {name}?", abort=True, err=True)
    answer = connection.client.fence(name, reason=reason, dry_run=dry_run)
    ended = answer["allocations"]
    counts = [f"{ended[one]} {one}" for one in ("requeued", "failed", "stopping", "left") if ended[one]]
    click.echo(
        f"node/{name} fenced{' (dry run)' if dry_run else ''}: {', '.join(counts) or 'nothing was placed there'}"
    )


@node.command()
@click.argument("name", metavar="NODE", shell_complete=complete.named("nodes"))
@dry_run_option
@connected
def unfence(connection: Connection, name: str, dry_run: bool) -> None:
    """Take a fence back.

    A node that is heard again is unfenced by itself. What was given up stays so.
    """
    answer = connection.client.unfence(name, dry_run=dry_run)
    click.echo(f"node/{name} unfenced{' (dry run)' if dry_run else ''}: {answer['status']['phase']}")
