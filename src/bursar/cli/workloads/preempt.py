"""`bursar preempt`."""

from __future__ import annotations

import click

from bursar.cli.shell import completers
from bursar.cli.shell.connection import Connection, connected, dry_run_option, namespace_option
from bursar.cli.shell.options import seconds_of
from bursar.cli.shell.output import moments, pairs


@click.command()
@click.argument("name", shell_complete=completers.named("allocations"))
@click.option("--reason", required=True, help="The reason, shown to the owner.")
@click.option("--grace", callback=seconds_of, metavar="TIME", help="How long it may take to stop, such as 30s.")
@click.option("--initiated-by", default="", metavar="WHO", help="The person you act for, if not yourself.")
@namespace_option
@dry_run_option
@connected
def preempt(
    connection: Connection, name: str, reason: str, grace: int | None, initiated_by: str, dry_run: bool
) -> None:
    """Stop an allocation and requeue it.

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
    done = f"preempted, ends by {moments(answer['gracePeriodEnds'])}"
    click.echo(f"allocation/{name} {done}{' (dry run)' if dry_run else ''}")
    if freed := answer.get("resourcesFreed"):
        click.echo(f"frees: {pairs(freed)}")
