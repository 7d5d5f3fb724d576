"""`bursar job`: what can be done with jobs beside what every object can."""

from __future__ import annotations

from collections.abc import Sequence

import click

from bursar.cli.shell import completers
from bursar.cli.shell.connection import Connection, connected, namespace_option
from bursar.cli.shell.problem import Outcomes


@click.group()
def job() -> None:
    """Cancel jobs, or raise their priority for a while."""


@job.command()
@click.argument("names", nargs=-1, required=True, metavar="NAME...", shell_complete=completers.named("jobs"))
@click.option("--reason", default="", help="Why; it is recorded.")
@click.option("--grace-period", type=click.IntRange(0), metavar="SECONDS", help="How long what runs may take to end.")
@namespace_option
@connected
def cancel(connection: Connection, names: Sequence[str], reason: str, grace_period: int | None) -> None:
    """Stop jobs and all that they run.

    What waits goes at once, and what runs is told to stop.

    \b
    bursar job cancel train -n ml-team --reason "newer model" --grace-period 60
    """
    from bursar.client import BursarError

    jobs = connection.client.jobs(connection.effective_namespace)
    outcomes = Outcomes()
    for name in names:
        try:
            status = jobs.cancel(name, reason=reason, grace_period_seconds=grace_period)["status"]
            why = f" ({status['cancellationReason']})" if status.get("cancellationReason") else ""
            click.echo(f"job/{name} {status['phase'].lower()}: {status['message']}{why}")
        except BursarError as error:
            outcomes.failed(error)
    outcomes.leave()


@job.command()
@click.argument("name", shell_complete=completers.named("jobs"))
@click.option("--priority", type=int, required=True, help="The priority it has for that time.")
@click.option("--reason", required=True, help="Why; it is recorded.")
@click.option("--for", "duration", required=True, metavar="TIME", help="For how long, such as 1h30m.")
@click.option("--approved-by", required=True, metavar="WHO", help="Who approved it; it is recorded.")
@namespace_option
@connected
def boost(connection: Connection, name: str, priority: int, reason: str, duration: str, approved_by: str) -> None:
    """Give a job another priority for a while.

    For system administrators.

    \b
    bursar job boost train -n ml-team --priority 500 --for 1h --reason incident --approved-by admin@example.com
    """
    jobs = connection.client.jobs(connection.effective_namespace)
    told = jobs.boost(name, priority=priority, reason=reason, duration=duration, approved_by=approved_by)
    until = told["boostExpires"]
    click.echo(f"job/{name} boosted: priority {told['previousPriority']} → {told['newPriority']} until {until}")
