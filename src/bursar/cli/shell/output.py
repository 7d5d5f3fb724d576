"""Output formats of answers: the server's tables, JSON, YAML, or names only."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from bursar.core.values.duration import format_age, format_clock, format_due

if TYPE_CHECKING:
    from bursar.cli.shell.resource_arg import ResourceType

FORMATS = ("table", "wide", "json", "yaml", "name")
GAP = "   "
NONE = "<none>"
_TIMESTAMP = re.compile(r"\b\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")

output_option = click.option(
    "-o", "--output", type=click.Choice(FORMATS), default="table", show_default=True, help="The output format."
)


def print_rows(header: Sequence[str], rows: Iterable[Sequence[str]], *, with_header: bool = True) -> None:
    """Print a table with columns as wide as their cells."""
    shown = [list(row) for row in rows]
    for line in lines(header, shown, widths([header, *shown] if with_header else shown), with_header=with_header):
        click.echo(line)


def lines(
    header: Sequence[str], rows: Iterable[Sequence[str]], width: Sequence[int], *, with_header: bool = True
) -> list[str]:
    all_rows = [[name.upper() for name in header], *rows] if with_header else rows
    return [GAP.join(cell.ljust(size) for cell, size in zip(row, width, strict=False)).rstrip() for row in all_rows]


def widths(rows: Iterable[Sequence[str]]) -> list[int]:
    """The width of each column, in characters."""
    return [max(map(len, column)) for column in zip(*rows, strict=True)]


class TableColumns:
    """The columns of a table: the server's, with the namespace before them and the labels after them on request."""

    def __init__(self, *, wide: bool = False, with_namespace: bool = False, with_labels: bool = False) -> None:
        self._wide = wide
        self._with_namespace = with_namespace
        self._with_labels = with_labels
        self._definitions: list[Mapping[str, Any]] = []

    def header(self, table: Mapping[str, Any]) -> list[str]:
        self._learn(table)
        before = ["Namespace"] if self._with_namespace else []
        after = ["Labels"] if self._with_labels else []
        return [*before, *(str(one["name"]) for one in self._definitions if self._shows(one)), *after]

    def rows(self, table: Mapping[str, Any]) -> list[list[str]]:
        """The cells to show. In a watch only the first table has column definitions, so they are remembered."""
        self._learn(table)
        return [self._row(row) for row in table.get("rows") or []]

    def _learn(self, table: Mapping[str, Any]) -> None:
        self._definitions = table.get("columnDefinitions") or self._definitions

    def _row(self, row: Mapping[str, Any]) -> list[str]:
        metadata = (row.get("object") or {}).get("metadata") or {}
        cells = [_cell(cell) for one, cell in zip(self._definitions, row["cells"], strict=False) if self._shows(one)]
        before = [str(metadata.get("namespace") or "")] if self._with_namespace else []
        after = [pairs(metadata.get("labels"))] if self._with_labels else []
        return [*before, *cells, *after]

    def _shows(self, definition: Mapping[str, Any]) -> bool:
        return self._wide or not definition.get("priority")


def _cell(value: object) -> str:
    # A cell is one line, even if the server's value has several.
    return NONE if value is None else " ".join(str(value).split())


def age(timestamp: object) -> str:
    """The time since a timestamp, as `5m`."""
    try:
        at = datetime.fromisoformat(str(timestamp))
    except ValueError:
        return "<unknown>"
    return format_age(int((datetime.now(UTC) - at).total_seconds()))


def due(timestamp: object) -> str:
    """The time of an expected event: `in about 10 min (12:38 UTC)`, or `now` once it has passed."""
    distance, clock = _moment(timestamp)
    if not distance:
        return clock
    return f"{distance} ({clock})" if distance.startswith("in ") else "now"


def moments(text: str) -> str:
    """A sentence with its timestamps rewritten for people: `12:38 UTC (in about 10 min)`."""
    return _TIMESTAMP.sub(lambda found: "{1} ({0})".format(*_moment(found[0])), text)


def _moment(timestamp: object) -> tuple[str, str]:
    """The distance to a timestamp and its clock time; a text that is no timestamp is returned as the clock time."""
    now = datetime.now(UTC)
    try:
        at = datetime.fromisoformat(str(timestamp)).astimezone(UTC)
    except ValueError:
        return "", str(timestamp)
    return format_due((at - now).total_seconds()), format_clock(at, now)


def pairs(values: Mapping[str, Any] | None) -> str:
    return ",".join(f"{name}={value}" for name, value in sorted((values or {}).items())) or NONE


def print_documents(documents: Sequence[Mapping[str, Any]], output: str, *, as_list: bool) -> None:
    """Print one object, or several as a List."""
    whole: Mapping[str, Any] = (
        {"apiVersion": "v1", "kind": "List", "items": list(documents)} if as_list else documents[0]
    )
    click.echo(to_json(whole) if output == "json" else to_yaml(whole), nl=output == "json")


def exit_with_json(as_json: bool, document: object) -> None:
    """With --json: print the API's answer and end the command, before it is rendered for people."""
    if as_json:
        click.echo(to_json(document))
        raise click.exceptions.Exit


def to_json(document: object) -> str:
    return json.dumps(document, indent=2, ensure_ascii=False)


def to_yaml(document: object) -> str:
    import yaml

    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    return str(yaml.dump(document, Dumper=dumper, sort_keys=False, allow_unicode=True, width=120))


def full_name(noun: ResourceType, name: str) -> str:
    return f"{noun.singular}/{name}"


def say(
    noun: ResourceType, document: Mapping[str, Any], done: str, output: str = "table", *, dry_run: bool = False
) -> None:
    """Print the result of a write: `allocation/train created`, or the object as JSON or YAML."""
    if output in ("json", "yaml"):
        print_documents([document], output, as_list=False)
        return
    name = full_name(noun, str((document.get("metadata") or {}).get("name") or ""))
    click.echo(name if output == "name" else f"{name} {done}{' (dry run)' if dry_run else ''}")
