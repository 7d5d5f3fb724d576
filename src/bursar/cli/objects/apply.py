"""`bursar apply`."""

from __future__ import annotations

from collections.abc import Sequence

import click

from bursar.cli.shell import completers, manifest
from bursar.cli.shell.connection import Connection, connected, dry_run_option, namespace_option
from bursar.cli.shell.limit_notes import print_limit_notes, tenant_before
from bursar.cli.shell.output import output_option, say
from bursar.cli.shell.problem import Outcomes


@click.command()
@click.argument("kind", required=False, default="", shell_complete=completers.kind)
@manifest.files_option
@manifest.recursive_option
@namespace_option
@dry_run_option
@output_option
@connected
def apply(connection: Connection, kind: str, files: Sequence[str], recursive: bool, dry_run: bool, output: str) -> None:
    """Create or update objects from files.

    Objects that do not exist are created. In existing objects apply sets the fields in the file, removes fields that
    an earlier apply set and the file no longer has, and keeps all others. KIND is the kind of objects without one.

    \b
    bursar apply -f cluster/
    bursar apply -f - --dry-run < tenant.yaml
    """
    if not files:
        raise click.UsageError("name a file with -f, or -f - for standard input")
    outcomes = Outcomes()
    for one in manifest.read(files, recursive=recursive):
        with outcomes.each():
            noun, resource = manifest.place(one, connection, kind)
            one.require_name()
            before = None if dry_run else tenant_before(connection, noun.plural, one.document["metadata"]["name"])
            applied = resource.apply(one.document, dry_run=dry_run)
            say(noun, applied.object, applied.outcome, output, dry_run=dry_run)
            print_limit_notes(connection, before, applied.object)
    outcomes.leave()
