"""`bursar watch`: prints the change feed, one line per change."""

from __future__ import annotations

import json
from collections.abc import Sequence

import click

from bursar.cli.shell import completers
from bursar.cli.shell.connection import (
    Connection,
    all_namespaces_option,
    connected,
    field_selector_option,
    label_selector_option,
    namespace_option,
)
from bursar.cli.shell.finite_range import FiniteRange
from bursar.cli.shell.output import TableColumns, full_name, lines, widths
from bursar.cli.shell.resource_arg import targets

FORMATS = ("table", "wide", "json", "name")


@click.command()
@click.argument("words", nargs=-1, metavar="KIND [NAME]", shell_complete=completers.target)
@namespace_option
@all_namespaces_option
@label_selector_option
@field_selector_option
@click.option("-o", "--output", type=click.Choice(FORMATS), default="table", show_default=True, help="Output format.")
@click.option("--since", "resource_version", default="", metavar="REVISION", help="Only changes after this revision.")
@click.option("--timeout", "timeout_seconds", type=FiniteRange(0), metavar="SECONDS", help="Stop after this time.")
@connected
def watch(
    connection: Connection,
    words: Sequence[str],
    label_selector: str,
    field_selector: str,
    output: str,
    resource_version: str,
    timeout_seconds: float | None,
) -> None:
    """Print changes as they happen.

    Existing objects come first, as ADDED; then each change, across restarts of the server.

    \b
    bursar watch allocations -n ml-team
    bursar watch allocation train -o json | jq .object.status.phase
    """
    chosen = targets(words, connection.client)
    if len(chosen) != 1:
        raise click.UsageError("watch one kind, or one object, at a time")
    target = chosen[0]
    if target.name:
        field_selector = f"metadata.name={target.name}"
    as_table = output in ("table", "wide")
    with_namespace = connection.all_namespaces and target.noun.namespaced
    columns = TableColumns(wide=output == "wide", with_namespace=with_namespace)
    width: list[int] = []
    for event in connection.resource(target.noun).watch(
        label_selector=label_selector,
        field_selector=field_selector,
        resource_version=resource_version,
        timeout_seconds=timeout_seconds,
        as_table=as_table,
    ):
        if output == "json":
            click.echo(json.dumps({"type": event.type, "object": event.object}, ensure_ascii=False))
        elif output == "name":
            click.echo(f"{event.type} {full_name(target.noun, event.object['metadata']['name'])}")
        else:
            header = ["Event", *columns.header(event.object)]
            rows = [[event.type, *row] for row in columns.rows(event.object)]
            # Later lines keep the widths of the first, with some margin.
            first = not width
            width = width or [max(size, 8) for size in widths([header, *rows])]
            for line in lines(header, rows, width, with_header=first):
                click.echo(line)
