"""`bursar cordon` and `bursar uncordon`."""

from __future__ import annotations

from collections.abc import Sequence

import click

from bursar.cli.shell import completers
from bursar.cli.shell.connection import Connection, all_of, connected, dry_run_option, label_selector_option
from bursar.cli.shell.output import say
from bursar.cli.shell.problem import Outcomes
from bursar.cli.shell.resource_arg import find, named_or_selected

_arguments = all_of(
    click.argument("names", nargs=-1, metavar="NODE...", shell_complete=completers.named("nodes")),
    label_selector_option,
    dry_run_option,
    connected,
)


@click.command()
@_arguments
def cordon(connection: Connection, names: Sequence[str], label_selector: str, dry_run: bool) -> None:
    """Mark nodes unschedulable.

    Running work continues.
    """
    _mark(connection, names, label_selector, dry_run, unschedulable=True)


@click.command()
@_arguments
def uncordon(connection: Connection, names: Sequence[str], label_selector: str, dry_run: bool) -> None:
    """Mark nodes schedulable."""
    _mark(connection, names, label_selector, dry_run, unschedulable=False)


def _mark(
    connection: Connection, names: Sequence[str], label_selector: str, dry_run: bool, *, unschedulable: bool
) -> None:
    noun = find("nodes", connection.client)
    nodes = connection.resource(noun)
    outcomes = Outcomes()
    for name in named_or_selected(nodes, names, label_selector):
        with outcomes.each():
            # Null removes the field, and nodes are schedulable by default.
            document = nodes.patch(name, {"spec": {"unschedulable": unschedulable or None}}, dry_run=dry_run)
            say(noun, document, "cordoned" if unschedulable else "uncordoned", dry_run=dry_run)
    outcomes.leave()
