"""`bursar label` and `bursar annotate`: `name=value` sets, `name-` removes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from bursar.cli.shell import completers
from bursar.cli.shell.connection import (
    Connection,
    all_of,
    connected,
    dry_run_option,
    label_selector_option,
    namespace_option,
)
from bursar.cli.shell.output import full_name, say
from bursar.cli.shell.problem import CONFLICT, Outcomes, Problem
from bursar.cli.shell.resource_arg import ResourceType, targets

if TYPE_CHECKING:
    from bursar.client import Document, Resource

LabelChanges = dict[str, str | None]

_arguments = all_of(
    click.argument(
        "words", nargs=-1, metavar="KIND [NAME]... NAME=VALUE... NAME-...", shell_complete=completers.target
    ),
    click.option("--overwrite", is_flag=True, help="Change existing values."),
    click.option("--all", "everything", is_flag=True, help="All objects of the kind in the namespace."),
    namespace_option,
    label_selector_option,
    dry_run_option,
    connected,
)


@click.command()
@_arguments
def label(connection: Connection, words: Sequence[str], **options: Any) -> None:
    """Set or remove labels.

    \b
    bursar label node gpu-1 zone=us-east-1a rack-
    bursar label nodes -l rack=r12 maintenance=true --overwrite
    """
    _change(connection, words, "labels", "labeled", **options)


@click.command()
@_arguments
def annotate(connection: Connection, words: Sequence[str], **options: Any) -> None:
    """Set or remove annotations.

    \b
    bursar annotate tenant physics contact=ops@example.com
    """
    _change(connection, words, "annotations", "annotated", **options)


def _change(
    connection: Connection,
    words: Sequence[str],
    part: str,
    done: str,
    *,
    overwrite: bool,
    everything: bool,
    label_selector: str,
    dry_run: bool,
) -> None:
    about, changes = split(words)
    if not changes:
        raise click.UsageError("give a change: name=value to set, name- to remove")
    outcomes = Outcomes()
    for noun, resource, document in _chosen(connection, about, label_selector, everything):
        with outcomes.each():
            patch = _patch(noun, document, part, changes, overwrite)
            name = document["metadata"]["name"]
            after = resource.patch(name, patch, dry_run=dry_run) if patch else document
            say(noun, after, done if patch else "unchanged", dry_run=dry_run)
    outcomes.leave()


def split(words: Sequence[str]) -> tuple[list[str], LabelChanges]:
    """Split the arguments into objects and changes. Object names have no `=` and no `-` at their end."""
    about: list[str] = []
    changes: LabelChanges = {}
    for word in words:
        name, equals, value = word.partition("=")
        if equals:
            changes[name] = value
        elif word.endswith("-"):
            changes[word.removesuffix("-")] = None
        elif changes:
            raise click.UsageError(f"{word!r} should be name=value or name-")
        else:
            about.append(word)
    return about, changes


def _chosen(
    connection: Connection, about: Sequence[str], label_selector: str, everything: bool
) -> Iterator[tuple[ResourceType, Resource, Document]]:
    for target in targets(about, connection.client):
        resource = connection.resource(target.noun)
        if target.name:
            yield target.noun, resource, resource.get(target.name)
        elif label_selector or everything:
            yield from ((target.noun, resource, item) for item in list(resource.list(label_selector=label_selector)))
        else:
            raise click.UsageError("name objects, or choose them with --selector or --all")


def _patch(noun: ResourceType, document: Document, part: str, changes: LabelChanges, overwrite: bool) -> dict[str, Any]:
    metadata = document["metadata"]
    present = metadata.get(part) or {}
    differing = {name: value for name, value in changes.items() if present.get(name) != value}
    taken = [name for name, value in differing.items() if value is not None and name in present]
    if taken and not overwrite:
        name = taken[0]
        raise Problem(
            f'{full_name(noun, metadata["name"])} already has {name}="{present[name]}"',
            "use --overwrite to change it",
            CONFLICT,
        )
    if not differing:
        return {}
    # Without --overwrite a concurrent change must not be overwritten either.
    guard = {} if overwrite else {"resourceVersion": metadata.get("resourceVersion")}
    return {"metadata": {part: differing, **guard}}
