"""`bursar drain`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import click

from bursar.cli.shell.connection import Connection, connected, dry_run_option
from bursar.cli.shell.options import node_argument, seconds_of

PAUSE_SECONDS = 0.5


@click.command()
@node_argument
@click.option("--grace", callback=seconds_of, metavar="TIME", help="How long work may take to stop, such as 5m.")
@click.option("--force", is_flag=True, help="Also evict work annotated bursar.io/do-not-evict.")
@click.option("--reason", default="", help="The reason, shown to owners of evicted work.")
@click.option("--wait", is_flag=True, help="Wait until the node is empty, and print progress.")
@dry_run_option
@connected
def drain(
    connection: Connection, name: str, grace: int | None, force: bool, reason: str, wait: bool, dry_run: bool
) -> None:
    """Cordon a node and evict its work.

    Evicted work is requeued. `bursar uncordon` ends the drain.

    \b
    bursar drain gpu-7 --grace 5m --reason "new disks" --wait
    """
    client = connection.client
    answer = client.drain(name, grace_period_seconds=grace, force=force, reason=reason, dry_run=dry_run)
    line = _print_progress(name, answer, dry_run=dry_run)
    while wait and not dry_run and _makes_progress(answer):
        time.sleep(PAUSE_SECONDS)
        answer = client.drain_status(name)
        line = _print_progress(name, answer, line)
    if answer["progress"]["failed"]:
        click.echo(f"protected, not evicted: {', '.join(answer.get('blockedBy') or [])}", err=True)
        click.echo("hint: --force evicts them", err=True)
        raise click.exceptions.Exit(1)


def _makes_progress(answer: Mapping[str, Any]) -> bool:
    """Whether the drain makes progress: not if all remaining work is protected."""
    progress = answer["progress"]
    return bool(answer["status"] == "Draining" and (progress["pending"] or not progress["failed"]))


def _print_progress(name: str, answer: Mapping[str, Any], before: str = "", *, dry_run: bool = False) -> str:
    """Print the progress if it has changed."""
    progress = answer["progress"]
    of_all = f"{progress['evicted']} of {answer['allocationsToEvict']} evicted"
    line = (
        f"node/{name} {answer['status'].lower()}: {of_all}, {progress['pending']} pending, {progress['failed']} failed"
    )
    if line != before:
        click.echo(f"{line} (dry run)" if dry_run else line)
    return line
