"""`bursar job`: cancel and boost, the commands for jobs alone."""

from __future__ import annotations

from collections.abc import Sequence

import click

from bursar.cli.shell import completers
from bursar.cli.shell.connection import Connection, connected, namespace_option
from bursar.cli.shell.options import grace_period_option
from bursar.cli.shell.output import moments
from bursar.cli.shell.problem import Outcomes


@click.group()
def job() -> None:
    """Cancel jobs, or boost their priority."""


@job.command()
@click.argument("names", nargs=-1, required=True, metavar="NAME...", shell_complete=completers.named("jobs"))
@click.option("--reason", default="", help="The reason; it is recorded.")
@grace_period_option
@namespace_option
@connected
def cancel(connection: Connection, names: Sequence[str], reason: str, grace_period: int | None) -> None:
    """Stop jobs and all their work.

    Pending allocations are deleted at once, running ones are stopped within their grace period.

    \b
    bursar job cancel train -n ml-team --reason "newer model" --grace-period 60
    """
    jobs = connection.client.jobs(connection.effective_namespace)
    outcomes = Outcomes()
    for name in names:
        with outcomes.each():
            status = jobs.cancel(name, reason=reason, grace_period_seconds=grace_period)["status"]
            why = f" ({status['cancellationReason']})" if status.get("cancellationReason") else ""
            click.echo(f"job/{name} {status['phase'].lower()}: {status['message']}{why}")
    outcomes.leave()


@job.command()
@click.argument("name", shell_complete=completers.named("jobs"))
@click.option("--priority", type=int, required=True, help="The priority during the boost.")
@click.option("--reason", required=True, help="The reason; it is recorded.")
@click.option("--for", "duration", required=True, metavar="TIME", help="How long the boost lasts, such as 1h30m.")
@click.option("--approved-by", required=True, metavar="WHO", help="The approver; it is recorded.")
@namespace_option
@connected
def boost(connection: Connection, name: str, priority: int, reason: str, duration: str, approved_by: str) -> None:
    """Give a job another priority for a limited time.

    For system administrators.

    \b
    bursar job boost train -n ml-team --priority 500 --for 1h --reason incident --approved-by admin@example.com
    """
    jobs = connection.client.jobs(connection.effective_namespace)
    boosted = jobs.boost(name, priority=priority, reason=reason, duration=duration, approved_by=approved_by)
    before, after = boosted["previousPriority"], boosted["newPriority"]
    click.echo(f"job/{name} boosted: priority {before} → {after} until {moments(boosted['boostExpires'])}")
