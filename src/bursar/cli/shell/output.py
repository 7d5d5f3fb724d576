"""How answers are printed: the server's tables, JSON, YAML, or names only."""

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
    "-o", "--output", type=click.Choice(FORMATS), default="table", show_default=True, help="The form of the answer."
)


def print_rows(header: Sequence[str], rows: Iterable[Sequence[str]], *, with_header: bool = True) -> None:
    """Columns as wide as what is in them."""
    shown = [list(row) for row in rows]
    for line in lines(header, shown, widths([header, *shown] if with_header else shown), with_header=with_header):
        click.echo(line)


def lines(
    header: Sequence[str], rows: Iterable[Sequence[str]], width: Sequence[int], *, with_header: bool = True
) -> list[str]:
    all_rows = [[name.upper() for name in header], *rows] if with_header else rows
    return [GAP.join(cell.ljust(size) for cell, size in zip(row, width, strict=False)).rstrip() for row in all_rows]


def widths(rows: Iterable[Sequence[str]]) -> list[int]:
    """How wide each column is; cells count as many columns as their characters."""
    return [max(map(len, column)) for column in zip(*rows, strict=True)]


class TableColumns:
    """Which of a server's columns are shown, and in front and behind them what only we know to show."""

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
        """In a watch only the first table says what its columns are."""
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
    # A cell is one line, whatever the server put in it.
    return NONE if value is None else " ".join(str(value).split())


def age(timestamp: object) -> str:
    """How long ago that was."""
    try:
        at = datetime.fromisoformat(str(timestamp))
    except ValueError:
        return "<unknown>"
    return format_age(int((datetime.now(UTC) - at).total_seconds()))


def due(timestamp: object) -> str:
    """When something is expected, the distance first: `in about 10 min (12:38 UTC)`; `now` once that has passed."""
    distance, clock = _moment(timestamp)
    if not distance:
        return clock
    return f"{distance} ({clock})" if distance.startswith("in ") else "now"


def moments(text: str) -> str:
    """A sentence with each of its times as people read it: `12:38 UTC (in about 10 min)`."""
    return _TIMESTAMP.sub(lambda found: "{1} ({0})".format(*_moment(found[0])), text)


def _moment(timestamp: object) -> tuple[str, str]:
    """How far away it is, and what the clock says then; a text that is no time is left as it is."""
    now = datetime.now(UTC)
    try:
        at = datetime.fromisoformat(str(timestamp)).astimezone(UTC)
    except ValueError:
        return "", str(timestamp)
    return format_due((at - now).total_seconds()), format_clock(at, now)


def pairs(values: Mapping[str, Any] | None) -> str:
    return ",".join(f"{name}={value}" for name, value in sorted((values or {}).items())) or NONE


def print_documents(documents: Sequence[Mapping[str, Any]], output: str, *, as_list: bool) -> None:
    """One object as it is, several as a List."""
    whole: Mapping[str, Any] = (
        {"apiVersion": "v1", "kind": "List", "items": list(documents)} if as_list else documents[0]
    )
    click.echo(to_json(whole) if output == "json" else to_yaml(whole), nl=output == "json")


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
    """What a write did: `allocation/train created`, or the object if that was asked for."""
    if output in ("json", "yaml"):
        print_documents([document], output, as_list=False)
        return
    name = full_name(noun, str((document.get("metadata") or {}).get("name") or ""))
    click.echo(name if output == "name" else f"{name} {done}{' (dry run)' if dry_run else ''}")
