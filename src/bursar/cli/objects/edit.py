"""`bursar edit`: opens an object in the user's editor and sends the changes as a patch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click

from bursar.cli.shell import completers
from bursar.cli.shell.connection import Connection, connected, namespace_option
from bursar.cli.shell.limit_notes import print_limit_notes
from bursar.cli.shell.output import full_name, say, to_yaml
from bursar.cli.shell.problem import Problem
from bursar.cli.shell.resource_arg import one_target

_HEADING = """\
# Edit the object and save. Lines that begin with # are ignored; an empty file changes nothing.
"""
# Fields that nobody may change, hidden for reading.
_SERVERS_OWN = ("managedFields", "uid", "creationTimestamp", "generation", "selfLink")


@click.command()
@click.argument("words", nargs=-1, metavar="KIND NAME | KIND/NAME", shell_complete=completers.target)
@namespace_option
@connected
def edit(connection: Connection, words: Sequence[str]) -> None:
    """Change an object in your editor.

    If the object changes meanwhile, your change is refused, so that none is overwritten.
    """
    from bursar.client import BursarError
    from bursar.client.apply import three_way

    target = one_target(words, connection.client)
    resource = connection.resource(target.noun)
    before = editable(resource.get(target.name))
    text = click.edit(_HEADING + to_yaml(before), extension=".yaml")
    after = parsed(text)
    changes = three_way(before, after, before) if after else {}
    if not changes:
        click.echo(f"{full_name(target.noun, target.name)} unchanged")
        return
    revision = before["metadata"].get("resourceVersion")
    changes["metadata"] = {**(changes.get("metadata") or {}), "resourceVersion": revision}
    try:
        document = resource.patch(target.name, changes)
    except BursarError:
        # Print the text, so that a refusal does not lose it.
        click.echo(text, err=True)
        raise
    say(target.noun, document, "edited")
    print_limit_notes(connection, before if target.noun.plural == "tenants" else None, document)


def editable(document: Mapping[str, Any]) -> dict[str, Any]:
    metadata = {name: value for name, value in document["metadata"].items() if name not in _SERVERS_OWN}
    shown = {name: value for name, value in document.items() if name != "status"}
    return {**shown, "metadata": metadata}


def parsed(text: str | None) -> dict[str, Any]:
    """The edited object; empty if the editor was left without saving."""
    from bursar.cli.shell.manifest import parse

    if not text:
        return {}
    found = list(parse(text, "the edited text"))
    if len(found) > 1:
        raise Problem("the edited text holds more than one object")
    return found[0].document if found else {}
