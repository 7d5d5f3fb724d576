"""`bursar node`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from bursar.cli.session.token import print_new
from bursar.cli.shell import completers
from bursar.cli.shell.connection import Connection, connected, dry_run_option
from bursar.cli.shell.output import NONE, print_rows, to_json


@click.group()
def node() -> None:
    """Let nodes join, claim them, and give up those that are gone."""


@node.command()
@click.option("--name", required=True, help="The node that may join with it.")
@click.option("--ttl", default="10m", show_default=True, metavar="TIME", help="How long it may take to join.")
@click.option(
    "--output", type=click.Path(path_type=Path, dir_okay=False), help="Write it to this file, readable by you alone."
)
@connected
def token(connection: Connection, name: str, ttl: str, output: Path | None) -> None:
    """Create the token with which a node joins, good for one use.

    \b
    bursar node token --name gpu-worker-043
    bursar node token --name gpu-worker-043 --output gpu-worker-043.token
    """
    print_new(connection.client, {"role": "node", "node": name, "ttl": ttl, "single_use": True}, file=output)


@node.command()
@click.argument("name", metavar="NODE", shell_complete=completers.named("nodes"))
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
@click.argument("name", metavar="NODE", shell_complete=completers.named("nodes"))
@dry_run_option
@connected
def unfence(connection: Connection, name: str, dry_run: bool) -> None:
    """Take a fence back.

    A node that is heard again is unfenced by itself. What was given up stays so.
    """
    answer = connection.client.unfence(name, dry_run=dry_run)
    click.echo(f"node/{name} unfenced{' (dry run)' if dry_run else ''}: {answer['status']['phase']}")


# Sensitive work.


@node.command()
@click.argument("name", metavar="NODE", shell_complete=completers.named("nodes"))
@click.option("--reason", default="", help="What for; it is written in the audit.")
@click.option("--for", "user", default="", metavar="TENANT/USER", help="For whom, where an administrator claims it.")
@dry_run_option
@connected
def claim(connection: Connection, name: str, reason: str, user: str, dry_run: bool) -> None:
    """Claim an empty node for sensitive work.

    From then on the node takes only your work, until you release it; it counts as used, busy or idle. If other work
    has run there since the node was last wiped, it is wiped first: `bursar node claims` shows Wiping until it is yours.

    \b
    bursar node claim gpu-7 --reason "study 42"
    """
    answer = connection.client.claim(name, user=user, reason=reason, dry_run=dry_run)
    _say(name, "claimed", answer, dry_run)
    if _state(answer) == "Wiping":
        click.echo("The node is yours when it has been wiped: bursar node claims", err=True)


@node.command()
@click.argument("name", metavar="NODE", shell_complete=completers.named("nodes"))
@click.option("--reason", default="", help="Why; it is written in the audit.")
@dry_run_option
@connected
def release(connection: Connection, name: str, reason: str, dry_run: bool) -> None:
    """Give a claimed node back.

    It is refused while work is placed there. The node is wiped before anybody else may use it.
    """
    _say(name, "released", connection.client.release_node(name, reason=reason, dry_run=dry_run), dry_run)


@node.command()
@click.argument("name", metavar="NODE", shell_complete=completers.named("nodes"))
@click.option("--reason", default="", help="Why; it is written in the audit.")
@dry_run_option
@connected
def wipe(connection: Connection, name: str, reason: str, dry_run: bool) -> None:
    """Have a node wiped again, as when its wipe hook failed."""
    _say(name, "to be wiped", connection.client.wipe(name, reason=reason, dry_run=dry_run), dry_run)


@node.command()
@click.argument("name", metavar="NODE", shell_complete=completers.named("nodes"))
@click.option("--reason", required=True, help="How it was wiped, as in: disks replaced.")
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
@dry_run_option
@connected
def wiped(connection: Connection, name: str, reason: str, yes: bool, dry_run: bool) -> None:
    """Say that a node has been wiped.

    For nodes that no agent wipes. A node that was released is open to everybody again; a node that waits to be wiped
    for its new holder is theirs; any other node can be claimed without another wipe.
    """
    if not yes and not dry_run:
        click.secho(f"NOTHING SENSITIVE IS LEFT ON NODE {name}: is that certain?", bold=True, err=True)
        click.confirm(f"Go on with {name} as a clean node?", abort=True, err=True)
    _say(name, "wiped", connection.client.confirm_wiped(name, reason=reason, dry_run=dry_run), dry_run)


@node.command()
@click.option("-o", "--output", type=click.Choice(("table", "json")), default="table", help="The form of the answer.")
@click.option("--json", "as_json", is_flag=True, help="The same as -o json.")
@connected
def claims(connection: Connection, output: str, as_json: bool) -> None:
    """List the nodes that are claimed, and how many may be."""
    found = connection.client.claims()
    if as_json or output == "json":
        click.echo(to_json(found))
        return
    rows = [
        [one["node"], one["state"], one["user"], one["since"], one.get("message") or one.get("reason") or NONE]
        for one in found["items"]
    ]
    if rows:
        print_rows(("Node", "State", "User", "Since", "Reason"), rows)
    pool = found["pool"]
    click.echo(f"{pool['claimed']} of {pool['size']} nodes of the sensitive pool are claimed", err=bool(rows))


def _say(name: str, done: str, node: dict[str, Any], dry_run: bool) -> None:
    click.echo(f"node/{name} {done}{' (dry run)' if dry_run else ''}: {_state(node) or 'open to everybody'}")


def _state(node: dict[str, Any]) -> str:
    return ((node.get("status") or {}).get("claim") or {}).get("state") or ""
