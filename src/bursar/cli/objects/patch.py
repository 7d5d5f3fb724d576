"""`bursar patch`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bursar.cli.shell import completers
from bursar.cli.shell.connection import Connection, connected, dry_run_option, namespace_option
from bursar.cli.shell.limit_notes import print_limit_notes, tenant_before
from bursar.cli.shell.output import output_option, say
from bursar.cli.shell.resource_arg import one_target

if TYPE_CHECKING:
    from bursar.client.calls import PatchType


@click.command()
@click.argument("words", nargs=-1, metavar="KIND NAME | KIND/NAME", shell_complete=completers.target)
@click.option("-p", "--patch", "text", metavar="TEXT", help="The patch, as JSON or YAML.")
@click.option("--patch-file", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="A file with it.")
@click.option(
    "--type", "patch_type", type=click.Choice(["merge", "strategic", "json"]), default="merge", show_default=True
)
@click.option("--subresource", default="", metavar="NAME", help="The subresource, such as status.")
@namespace_option
@dry_run_option
@output_option
@connected
def patch(
    connection: Connection,
    words: Sequence[str],
    text: str | None,
    patch_file: Path | None,
    patch_type: PatchType,
    subresource: str,
    dry_run: bool,
    output: str,
) -> None:
    """Change part of an object.

    \b
    bursar patch tenant physics -p '{"spec": {"limits": {"nodes": 250}}}'
    bursar patch node gpu-1 --subresource status --type strategic -p '{"status": {…}}'
    """
    if (text is None) == (patch_file is None):
        raise click.UsageError("give the patch with -p or in a file with --patch-file")
    target = one_target(words, connection.client)
    content = parsed(text if patch_file is None else patch_file.read_text(), patch_type)
    before = None if dry_run else tenant_before(connection, target.noun.plural, target.name)
    document = connection.resource(target.noun).patch(
        target.name, content, type=patch_type, subresource=subresource, dry_run=dry_run
    )
    say(target.noun, document, "patched", output, dry_run=dry_run)
    print_limit_notes(connection, before, document)


def parsed(text: str | None, patch_type: str) -> Any:
    import yaml

    try:
        content = yaml.safe_load(text or "")
    except yaml.YAMLError as error:
        raise click.UsageError(f"the patch is neither JSON nor YAML: {error}") from None
    expected, words = (list, "a list of operations") if patch_type == "json" else (dict, "an object")
    if not isinstance(content, expected):
        raise click.UsageError(f"a {patch_type} patch should be {words}")
    return content
