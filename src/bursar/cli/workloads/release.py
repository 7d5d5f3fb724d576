"""`bursar release`."""

from __future__ import annotations

import click

from bursar.cli.shell.connection import Connection, connected, dry_run_option, namespace_option
from bursar.cli.shell.options import grace_period_option
from bursar.cli.shell.output import pairs


@click.command()
@click.option("-l", "--selector", "label_selector", required=True, help="The allocations, such as batch-id=job-7.")
@grace_period_option
@namespace_option
@dry_run_option
@connected
def release(connection: Connection, label_selector: str, grace_period: int | None, dry_run: bool) -> None:
    """Release all allocations that match a selector.

    \b
    bursar release -n ml-team -l batch-id=job-20240115 --grace-period 60
    """
    allocations = connection.client.allocations(connection.effective_namespace)
    answer = allocations.bulk_release(label_selector=label_selector, grace_period_seconds=grace_period, dry_run=dry_run)
    would = "would be " if dry_run else ""
    click.echo(f"{answer.get('released', 0)} {would}released, {answer.get('failed', 0)} failed")
    if freed := answer.get("totalResourcesFreed"):
        click.echo(f"freed: {pairs(freed)}")
    if answer.get("failed"):
        raise click.exceptions.Exit(1)
