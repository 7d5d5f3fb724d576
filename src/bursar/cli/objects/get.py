"""`bursar get`: prints objects as tables that the server renders, or as JSON, YAML or names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, TypedDict

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
from bursar.cli.shell.output import TableColumns, full_name, lines, output_option, print_documents, print_rows, widths
from bursar.cli.shell.problem import Outcomes
from bursar.cli.shell.resource_arg import ResourceTarget, ResourceType, targets

if TYPE_CHECKING:
    from bursar.client import Document, Resource


class Selectors(TypedDict):
    label_selector: str
    field_selector: str


@dataclass(frozen=True, slots=True)
class Form:
    """The output format and its options."""

    output: str
    with_header: bool
    with_labels: bool

    @property
    def is_table(self) -> bool:
        return self.output in ("table", "wide")

    def columns(self, connection: Connection, noun: ResourceType) -> TableColumns:
        with_namespace = connection.all_namespaces and noun.namespaced
        return TableColumns(wide=self.output == "wide", with_namespace=with_namespace, with_labels=self.with_labels)


@click.command()
@click.argument("words", nargs=-1, metavar="KIND [NAME]... | KIND/NAME...", shell_complete=completers.target)
@namespace_option
@all_namespaces_option
@label_selector_option
@field_selector_option
@output_option
@click.option("-w", "--watch", is_flag=True, help="Keep printing changes.")
@click.option("--no-headers", is_flag=True, help="Print tables without headers.")
@click.option("--show-labels", is_flag=True, help="Add the labels to tables.")
@connected
def get(
    connection: Connection,
    words: Sequence[str],
    label_selector: str,
    field_selector: str,
    output: str,
    watch: bool,
    no_headers: bool,
    show_labels: bool,
) -> None:
    """Show one or many objects.

    \b
    bursar get allocations -n ml-team
    bursar get alloc train-1 train-2 -o yaml
    bursar get nodes -l gpu-type=nvidia-a100 -o wide
    bursar get allocations -A --field-selector status.phase=Pending -w
    """
    chosen = targets(words, connection.client)
    selectors = Selectors(label_selector=label_selector, field_selector=field_selector)
    form = Form(output, with_header=not no_headers, with_labels=show_labels)
    _require_sense(connection, chosen, selectors)
    if watch:
        _watch(connection, chosen, selectors, form)
    elif form.is_table:
        _print_tables(connection, chosen, selectors, form)
    else:
        _print_objects(connection, chosen, selectors, form)


def _require_sense(connection: Connection, chosen: Sequence[ResourceTarget], selectors: Selectors) -> None:
    named = [target for target in chosen if target.name]
    if named and any(selectors.values()):
        raise click.UsageError("give names or selectors, not both")
    if connection.all_namespaces and any(target.noun.namespaced for target in named):
        raise click.UsageError("a name needs one namespace: leave out --all-namespaces")


# --- Tables


def _print_tables(connection: Connection, chosen: Sequence[ResourceTarget], selectors: Selectors, form: Form) -> None:
    outcomes = Outcomes()
    several = len({target.noun for target in chosen}) > 1
    printed = False
    for noun, group in groupby(chosen, key=lambda target: target.noun):
        tables = _tables(connection, noun, [target.name for target in group if target.name], selectors, outcomes)
        columns = form.columns(connection, noun)
        headers = [columns.header(table) for table in tables]
        rows = [row for table in tables for row in columns.rows(table)]
        if rows:
            if printed:
                click.echo()
            printed = True
            if several:
                rows = [_prefixed(noun, row, headers[0].index("Name")) for row in rows]
            print_rows(headers[0], rows, with_header=form.with_header)
        elif tables:
            click.echo(_nothing(connection, noun, selectors), err=True)
    outcomes.leave()


def _tables(
    connection: Connection, noun: ResourceType, names: Sequence[str], selectors: Selectors, outcomes: Outcomes
) -> list[Document]:
    resource = connection.resource(noun)
    if not names:
        return [resource.table(**selectors)]
    found = []
    for name in names:
        with outcomes.each(connection.located):
            found.append(resource.table(name))
    return found


def _prefixed(noun: ResourceType, row: list[str], at: int) -> list[str]:
    """The row with `kind/name` in the name column, for output of several kinds."""
    return [*row[:at], full_name(noun, row[at]), *row[at + 1 :]]


def _nothing(connection: Connection, noun: ResourceType, selectors: Selectors) -> str:
    inside = noun.namespaced and not connection.all_namespaces
    where = f" in namespace {connection.effective_namespace}" if inside else ""
    return f"No{' matching' if any(selectors.values()) else ''} {noun.plural} found{where}."


# --- Objects as JSON, YAML or names


def _print_objects(connection: Connection, chosen: Sequence[ResourceTarget], selectors: Selectors, form: Form) -> None:
    outcomes = Outcomes()
    found: list[tuple[ResourceType, Document]] = []
    for target in chosen:
        resource = connection.resource(target.noun)
        with outcomes.each(connection.located):
            items = [resource.get(target.name)] if target.name else resource.list(**selectors)
            found += [(target.noun, item) for item in items]
    as_list = len(chosen) > 1 or not chosen[0].name
    if form.output == "name":
        for noun, item in found:
            click.echo(full_name(noun, item["metadata"]["name"]))
    elif found or as_list:
        print_documents([item for _, item in found], form.output, as_list=as_list)
    outcomes.leave()


# --- Watching


def _watch(connection: Connection, chosen: Sequence[ResourceTarget], selectors: Selectors, form: Form) -> None:
    if len(chosen) != 1:
        raise click.UsageError("watch one kind, or one object, at a time")
    target = chosen[0]
    resource = connection.resource(target.noun)
    if target.name:
        selectors = Selectors(label_selector="", field_selector=f"metadata.name={target.name}")
    if form.is_table:
        _watch_table(resource, selectors, form.columns(connection, target.noun), form.with_header)
        return
    for event in resource.watch(**selectors):
        if form.output == "name":
            click.echo(full_name(target.noun, event.object["metadata"]["name"]))
        else:
            if form.output == "yaml":
                click.echo("---")
            print_documents([event.object], form.output, as_list=False)


def _watch_table(resource: Resource, selectors: Selectors, columns: TableColumns, with_header: bool) -> None:
    table = resource.table(**selectors)
    header, rows = columns.header(table), columns.rows(table)
    width = widths([header, *rows])
    for line in lines(header, rows, width, with_header=with_header):
        click.echo(line)
    for event in resource.watch(**selectors, resource_version=table["metadata"]["resourceVersion"], as_table=True):
        for line in lines(header, columns.rows(event.object), width, with_header=False):
            click.echo(line)
