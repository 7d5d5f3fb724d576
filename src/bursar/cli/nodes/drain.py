"""`bursar drain`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import click

from bursar.cli.shell import completers
from bursar.cli.shell.connection import Connection, connected, dry_run_option
from bursar.core.values.duration import DurationError, parse_seconds

PAUSE_SECONDS = 0.5


def seconds_of(_: click.Context, __: click.Parameter, value: str | None) -> int | None:
    """A duration as people write it, in seconds."""
    try:
        return None if value is None else parse_seconds(value)
    except DurationError as error:
        raise click.BadParameter(str(error)) from None


@click.command()
@click.argument("name", metavar="NODE", shell_complete=completers.named("nodes"))
@click.option("--grace", callback=seconds_of, metavar="TIME", help="How long what runs may take to end, such as 5m.")
@click.option("--force", is_flag=True, help="Evict also what is annotated bursar.io/do-not-evict.")
@click.option("--reason", default="", help="Why; those who are evicted are told.")
@click.option("--wait", is_flag=True, help="Wait until the node is empty, and show how far it is.")
@dry_run_option
@connected
def drain(
    connection: Connection, name: str, grace: int | None, force: bool, reason: str, wait: bool, dry_run: bool
) -> None:
    """Empty a node: keep new work away, and evict what is placed there.

    What is evicted waits to be placed again, elsewhere. `bursar uncordon` ends the drain.

    \b
    bursar drain gpu-7 --grace 5m --reason "new disks" --wait
    """
    client = connection.client
    answer = client.drain(name, grace_period_seconds=grace, force=force, reason=reason, dry_run=dry_run)
    told = _tell(name, answer, dry_run=dry_run)
    while wait and not dry_run and _goes_on(answer):
        time.sleep(PAUSE_SECONDS)
        answer = client.drain_status(name)
        told = _tell(name, answer, told)
    if answer["progress"]["failed"]:
        click.echo(f"left, for they are protected: {', '.join(answer.get('blockedBy') or [])}", err=True)
        click.echo("hint: evict them as well with --force", err=True)
        raise click.exceptions.Exit(1)


def _goes_on(answer: Mapping[str, Any]) -> bool:
    """Whether waiting helps: not when all that is left on the node is protected."""
    progress = answer["progress"]
    return bool(answer["status"] == "Draining" and (progress["pending"] or not progress["failed"]))


def _tell(name: str, answer: Mapping[str, Any], before: str = "", *, dry_run: bool = False) -> str:
    """Print how it stands, where that is news."""
    progress = answer["progress"]
    of_all = f"{progress['evicted']} of {answer['allocationsToEvict']} evicted"
    line = (
        f"node/{name} {answer['status'].lower()}: {of_all}, {progress['pending']} pending, {progress['failed']} failed"
    )
    if line != before:
        click.echo(f"{line} (dry run)" if dry_run else line)
    return line
