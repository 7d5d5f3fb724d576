"""`bursar node`: enrolment tokens, fencing and claims of nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from bursar.cli.session.token import print_new
from bursar.cli.shell.connection import Connection, connected, dry_run_option
from bursar.cli.shell.options import node_argument
from bursar.cli.shell.output import NONE, exit_with_json, print_rows


@click.group()
def node() -> None:
    """Enrol, claim, wipe and fence nodes."""


@node.command()
@click.option("--name", required=True, help="The node to enrol.")
@click.option("--ttl", default="10m", show_default=True, metavar="TIME", help="Lifetime of the token.")
@click.option(
    "--output", type=click.Path(path_type=Path, dir_okay=False), help="Write it to this file, with mode 0600."
)
@connected
def token(connection: Connection, name: str, ttl: str, output: Path | None) -> None:
    """Create a token that enrols a node once.

    \b
    bursar node token --name gpu-worker-043
    bursar node token --name gpu-worker-043 --output gpu-worker-043.token
    """
    print_new(connection.client, {"role": "node", "node": name, "ttl": ttl, "single_use": True}, file=output)


@node.command()
@node_argument
@click.option("--reason", required=True, help="Why none of its work can be running, such as: switched off by hand.")
@click.option("--yes", "-y", is_flag=True, help="Do not ask for confirmation.")
@dry_run_option
@connected
def fence(connection: Connection, name: str, reason: str, yes: bool, dry_run: bool) -> None:
    """Confirm that no work runs on a silent node.

    Its work is requeued at once, or fails if it asked for that. Work that is still running would then run twice: first
    switch the node off, or cut it off from everything it could write to.

    \b
    bursar node fence gpu-7 --reason "switched off, board is dead"
    """
    if not yes and not dry_run:
        click.secho(f"Confirm that nothing runs on {name}.", bold=True, err=True)
        click.echo("Its work is started elsewhere. Work that still runs there would run twice.", err=True)
        click.confirm(f"Fence {name}?", abort=True, err=True)
    answer = connection.client.fence(name, reason=reason, dry_run=dry_run)
    ended = answer["allocations"]
    counts = [f"{ended[one]} {one}" for one in ("requeued", "failed", "stopping", "left") if ended[one]]
    click.echo(
        f"node/{name} fenced{' (dry run)' if dry_run else ''}: {', '.join(counts) or 'nothing was placed there'}"
    )


@node.command()
@node_argument
@dry_run_option
@connected
def unfence(connection: Connection, name: str, dry_run: bool) -> None:
    """Remove a node's fence.

    A node that sends heartbeats again is unfenced automatically. Requeued work stays requeued.
    """
    answer = connection.client.unfence(name, dry_run=dry_run)
    click.echo(f"node/{name} unfenced{' (dry run)' if dry_run else ''}: {answer['status']['phase']}")


# Sensitive work.


@node.command()
@node_argument
@click.option("--reason", default="", help="The reason; it is recorded.")
@click.option("--for", "user", default="", metavar="TENANT/USER", help="The user, if an administrator claims for one.")
@dry_run_option
@connected
def claim(connection: Connection, name: str, reason: str, user: str, dry_run: bool) -> None:
    """Claim an empty node for sensitive work.

    The node takes only your work until you release it, and counts as used even when idle. If other work has run there
    since its last wipe, it is wiped first: `bursar node claims` shows Wiping until the claim begins.

    \b
    bursar node claim gpu-7 --reason "study 42"
    """
    answer = connection.client.claim(name, user=user, reason=reason, dry_run=dry_run)
    _say(name, "claimed", answer, dry_run)
    if _state(answer) == "Wiping":
        click.echo("The claim begins after a wipe: `bursar node claims` shows it.", err=True)


@node.command()
@node_argument
@click.option("--reason", default="", help="The reason; it is recorded.")
@dry_run_option
@connected
def release(connection: Connection, name: str, reason: str, dry_run: bool) -> None:
    """Release a claimed node.

    Refused while work is placed there. The node is wiped before others may use it.
    """
    _say(name, "released", connection.client.release_node(name, reason=reason, dry_run=dry_run), dry_run)


@node.command()
@node_argument
@click.option("--reason", default="", help="The reason; it is recorded.")
@dry_run_option
@connected
def wipe(connection: Connection, name: str, reason: str, dry_run: bool) -> None:
    """Retry the wipe of a node, for instance after its wipe hook failed."""
    _say(name, "to be wiped", connection.client.wipe(name, reason=reason, dry_run=dry_run), dry_run)


@node.command()
@node_argument
@click.option("--reason", required=True, help="How it was wiped, such as: disks replaced.")
@click.option("--yes", "-y", is_flag=True, help="Do not ask for confirmation.")
@dry_run_option
@connected
def wiped(connection: Connection, name: str, reason: str, yes: bool, dry_run: bool) -> None:
    """Confirm that a node has been wiped.

    For nodes without an agent. A released node becomes available to all again, a pending claim begins, and any other
    node can be claimed without another wipe.
    """
    if not yes and not dry_run:
        click.secho(f"Confirm that {name} has been wiped.", bold=True, err=True)
        click.confirm(f"Mark {name} clean?", abort=True, err=True)
    _say(name, "wiped", connection.client.confirm_wiped(name, reason=reason, dry_run=dry_run), dry_run)


@node.command()
@click.option("-o", "--output", type=click.Choice(("table", "json")), default="table", help="The output format.")
@click.option("--json", "as_json", is_flag=True, help="The same as -o json.")
@connected
def claims(connection: Connection, output: str, as_json: bool) -> None:
    """List claimed nodes and the size of the pool."""
    found = connection.client.claims()
    exit_with_json(as_json or output == "json", found)
    rows = [
        [one["node"], one["state"], one["user"], one["since"], one.get("message") or one.get("reason") or NONE]
        for one in found["items"]
    ]
    if rows:
        print_rows(("Node", "State", "User", "Since", "Reason"), rows)
    pool = found["pool"]
    click.echo(f"{pool['claimed']} of {pool['size']} nodes of the sensitive pool are claimed", err=bool(rows))


def _say(name: str, done: str, node: dict[str, Any], dry_run: bool) -> None:
    click.echo(f"node/{name} {done}{' (dry run)' if dry_run else ''}: {_state(node) or 'available to all'}")


def _state(node: dict[str, Any]) -> str:
    return ((node.get("status") or {}).get("claim") or {}).get("state") or ""
