"""`bursar preempt`."""

from __future__ import annotations

import click

from bursar.cli.nodes.drain import seconds_of
from bursar.cli.shell import completers
from bursar.cli.shell.connection import Connection, connected, dry_run_option, namespace_option
from bursar.cli.shell.output import pairs


@click.command()
@click.argument("name", shell_complete=completers.named("allocations"))
@click.option("--reason", required=True, help="Why; whoever is stopped is told.")
@click.option("--grace", callback=seconds_of, metavar="TIME", help="How long it may take to end, such as 30s.")
@click.option("--initiated-by", default="", metavar="WHO", help="For whom you act, if not for yourself.")
@namespace_option
@dry_run_option
@connected
def preempt(
    connection: Connection, name: str, reason: str, grace: int | None, initiated_by: str, dry_run: bool
) -> None:
    """Stop an allocation so that it waits again.

    \b
    bursar preempt low-priority-job -n ml-team --reason "production incident"
    """
    answer = connection.client.preempt(
        connection.effective_namespace,
        name,
        reason=reason,
        grace_period_seconds=grace,
        initiated_by=initiated_by,
        dry_run=dry_run,
    )
    done = f"preempted, ends by {answer['gracePeriodEnds']}"
    click.echo(f"allocation/{name} {done}{' (dry run)' if dry_run else ''}")
    if freed := answer.get("resourcesFreed"):
        click.echo(f"frees: {pairs(freed)}")
