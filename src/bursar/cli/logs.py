"""`bursar logs`: what an allocation has written."""

from __future__ import annotations

import errno

import click

from bursar.cli import complete
from bursar.cli.connection import Connection, connected, namespace_option
from bursar.cli.following import Copying, Lines
from bursar.cli.problem import Outcomes


@click.command()
@click.argument("name", shell_complete=complete.named("allocations"))
@click.option("-f", "--follow", is_flag=True, help="Go on with what is written, until it has ended.")
@click.option("--tail", "tail_lines", type=click.IntRange(0), metavar="N", help="Only the last N lines.")
@click.option(
    "--node",
    default="",
    metavar="NODE",
    help="Of one of its nodes; else of all.",
    shell_complete=complete.named("nodes"),
)
@click.option("--epoch", type=click.IntRange(1), metavar="N", help="Of an earlier placement; with --node.")
@namespace_option
@connected
def logs(connection: Connection, name: str, follow: bool, tail_lines: int | None, node: str, epoch: int | None) -> None:
    """Print what an allocation has written.

    Where it runs on several nodes, each line is preceded by its node's name.

    \b
    bursar logs train -n ml-team
    bursar logs -f --tail 20 train
    """
    if epoch and not node:
        raise click.UsageError("--epoch goes with --node: every placement may be elsewhere")
    allocations = connection.client.allocations(connection.effective_namespace)
    nodes = [node]
    if not node:
        status = allocations.get(name.removeprefix("allocation/")).get("status") or {}
        # While it has none, the server says why.
        nodes = [one["name"] for one in status.get("nodes") or []] or [""]
        epoch = int(status.get("epoch") or 0) if len(nodes) > 1 else 0
    lines = Lines(named=len(nodes) > 1)
    copying = Copying(allocations, name.removeprefix("allocation/"), lines)
    copying.begin(nodes, epoch or 0, follow=follow, tail_lines=tail_lines)
    copying.wait()
    if copying.left:
        raise BrokenPipeError(errno.EPIPE, "nobody reads any more")
    lines.finish()
    for gap in copying.gaps():
        click.echo(f"bursar: {gap}", err=True)
    outcomes = Outcomes()
    for copy in copying.copies:
        if copy.error is not None:
            outcomes.failed(copy.error)
    outcomes.leave()
