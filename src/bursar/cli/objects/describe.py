"""`bursar describe`: all fields of an object, with its conditions and events."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from bursar.cli.shell import completers
from bursar.cli.shell.connection import Connection, connected, label_selector_option, namespace_option
from bursar.cli.shell.output import NONE, age, lines, widths
from bursar.cli.shell.problem import Outcomes
from bursar.cli.shell.resource_arg import ResourceTarget, ResourceType, targets

if TYPE_CHECKING:
    from bursar.client import Document, Resource

_LABEL_WIDTH = 14


@click.command()
@click.argument("words", nargs=-1, metavar="KIND [NAME]... | KIND/NAME...", shell_complete=completers.target)
@namespace_option
@label_selector_option
@connected
def describe(connection: Connection, words: Sequence[str], label_selector: str) -> None:
    """Show an object in full, with its events.

    \b
    bursar describe allocation train -n ml-team
    bursar describe nodes -l zone=us-east-1a
    """
    outcomes = Outcomes()
    first = True
    for target in targets(words, connection.client):
        with outcomes.each(connection.located):
            for document in _documents(connection.resource(target.noun), target, label_selector):
                if not first:
                    click.echo()
                first = False
                for line in described(target.noun, document, _events(connection, target.noun, document)):
                    click.echo(line)
    outcomes.leave()


def _documents(resource: Resource, target: ResourceTarget, label_selector: str) -> Iterator[Document]:
    if target.name:
        yield resource.get(target.name)
    else:
        yield from resource.list(label_selector=label_selector)


def _events(connection: Connection, noun: ResourceType, document: Document) -> list[Document]:
    """The object's events; none if the server has none or the user may not read them."""
    from bursar.client import BursarError

    metadata = document["metadata"]
    selector = f"involvedObject.kind={noun.kind},involvedObject.name={metadata['name']}"
    events = connection.client.resource("events", metadata.get("namespace") or "", namespaced=True)
    try:
        return list(events.list(field_selector=selector))
    except BursarError:
        return []


def described(noun: ResourceType, document: Mapping[str, Any], events: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    metadata = document.get("metadata") or {}
    yield from _labelled("Name", [str(metadata.get("name") or "")])
    if noun.namespaced:
        yield from _labelled("Namespace", [str(metadata.get("namespace") or "")])
    yield from _labelled("Kind", [noun.kind])
    yield from _labelled("Labels", _pairs(metadata.get("labels")))
    yield from _labelled("Annotations", _pairs(_without_last_applied(metadata.get("annotations"))))
    yield from _labelled("Created", [_when(metadata.get("creationTimestamp"))])
    if metadata.get("deletionTimestamp"):
        yield from _labelled("Deletion", [_when(metadata["deletionTimestamp"])])
    status = dict(document.get("status") or {})
    conditions = status.pop("conditions", None) or []
    for title, part in (("Spec", document.get("spec")), ("Status", status)):
        if part:
            yield f"{title}:"
            yield from _tree(part, 1)
    if conditions:
        yield "Conditions:"
        yield from _table(("Type", "Status", "Since", "Reason", "Message"), map(_condition, conditions))
    if events:
        yield "Events:"
        yield from _table(("Type", "Reason", "Age", "Message"), map(_event, events))


def _labelled(label: str, values: Sequence[str]) -> Iterator[str]:
    for label_or_blank, value in zip([f"{label}:", *[""] * len(values)], values, strict=False):
        yield f"{label_or_blank.ljust(_LABEL_WIDTH)}{value}"


def _pairs(values: Mapping[str, Any] | None) -> list[str]:
    shown = [f"{name}={_short(str(value))}" for name, value in sorted((values or {}).items())]
    return shown or [NONE]


def _without_last_applied(annotations: Mapping[str, Any] | None) -> dict[str, Any]:
    """The annotations without apply's own copy of the object."""
    from bursar.core.values.redaction import LAST_APPLIED

    return {name: value for name, value in (annotations or {}).items() if name != LAST_APPLIED}


def _short(text: str, chars_max: int = 120) -> str:
    line = " ".join(text.split())
    return line if len(line) <= chars_max else line[: chars_max - 1] + "…"


def _tree(value: object, depth: int) -> Iterator[str]:
    """Nested values, one per line, under the API's field names, so that they can be used in a patch."""
    indent = "  " * depth
    if isinstance(value, Mapping):
        for name, inner in value.items():
            if isinstance(inner, Mapping | list) and inner:
                yield f"{indent}{name}:"
                yield from _tree(inner, depth + 1)
            else:
                yield f"{indent}{name}: {_plain(inner)}"
    elif isinstance(value, list):
        for inner in value:
            if isinstance(inner, Mapping | list) and inner:
                first, *rest = _tree(inner, depth + 1)
                yield f"{indent}- {first.strip()}"
                yield from rest
            else:
                yield f"{indent}- {_plain(inner)}"
    else:
        yield f"{indent}{_plain(value)}"


def _plain(value: object) -> str:
    if value is None or value in ({}, []):
        return NONE
    return str(value).lower() if isinstance(value, bool) else str(value)


def _condition(condition: Mapping[str, Any]) -> list[str]:
    since = condition.get("lastTransitionTime")
    shown = (condition.get("type"), condition.get("status"), age(since), condition.get("reason"))
    return [*(str(value or "") for value in shown), " ".join(str(condition.get("message") or "").split())]


def _event(event: Mapping[str, Any]) -> list[str]:
    at = event.get("lastTimestamp") or event.get("eventTime") or event.get("firstTimestamp")
    return [str(event.get("type") or ""), str(event.get("reason") or ""), age(at), str(event.get("message") or "")]


def _table(header: Sequence[str], rows: Iterator[list[str]]) -> Iterator[str]:
    shown = list(rows)
    width = widths([header, *shown])
    yield from (f"  {line}" for line in lines(header, shown, width))


def _when(timestamp: object) -> str:
    return f"{timestamp} ({age(timestamp)} ago)" if timestamp else NONE
