"""`bursar create`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from bursar.cli.shell import completers, manifest
from bursar.cli.shell.connection import Connection, connected, dry_run_option, namespace_option
from bursar.cli.shell.manifest import Manifest
from bursar.cli.shell.output import output_option, say
from bursar.cli.shell.problem import Outcomes
from bursar.cli.shell.resource_arg import find


@click.command()
@click.argument("words", nargs=-1, metavar="[KIND] [NAME]...", shell_complete=completers.kind)
@manifest.files_option
@manifest.recursive_option
@click.option("--tenant", default="", metavar="NAME", help="The tenant of a new namespace.")
@namespace_option
@dry_run_option
@output_option
@connected
def create(
    connection: Connection,
    words: Sequence[str],
    files: Sequence[str],
    recursive: bool,
    tenant: str,
    dry_run: bool,
    output: str,
) -> None:
    """Create objects from files.

    With a NAME and no file, create an object with an empty spec. With a file, KIND is the kind of objects without one.

    \b
    bursar create -f allocation.yaml
    bursar create allocation -n ml-team -f - < body.json
    bursar create namespace ml-team --tenant physics
    """
    kind, names = (words[0] if words else ""), words[1:]
    if bool(files) == bool(names):
        raise click.UsageError("name a file with -f (-f - is standard input), or a kind and a name")
    outcomes = Outcomes()
    by_name = [plain(connection, kind, name, tenant) for name in names]
    wanted = manifest.read(files, recursive=recursive) if files else by_name
    for one in wanted:
        with outcomes.each():
            noun, resource = manifest.place(one, connection, kind)
            document = resource.create(one.document, dry_run=dry_run)
            say(noun, document, "created", output, dry_run=dry_run)
    outcomes.leave()


def plain(connection: Connection, kind: str, name: str, tenant: str) -> Manifest:
    from bursar.wire.kinds.namespace import TENANT_LABEL
    from bursar.wire.kinds.registry import BY_NAME
    from bursar.wire.shared.meta import API_VERSION

    noun = find(kind, connection.client)
    metadata: dict[str, Any] = {"name": name}
    if tenant:
        if noun.kind != "Namespace":
            raise click.UsageError("--tenant is for namespaces")
        metadata["labels"] = {TENANT_LABEL: tenant}
    known = BY_NAME.get(noun.kind)
    version = known.api_version if known is not None else API_VERSION
    return Manifest({"apiVersion": version, "kind": noun.kind, "metadata": metadata, "spec": {}}, "the command line")
