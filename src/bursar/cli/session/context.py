"""`bursar context`: the servers that `bursar login` has stored."""

from __future__ import annotations

from typing import NoReturn

import click

from bursar.cli.shell import completers
from bursar.cli.shell.output import NONE, print_rows
from bursar.cli.shell.problem import NOT_FOUND, Problem


@click.group()
def context() -> None:
    """List, choose and delete stored servers."""


@context.command("list")
def list_() -> None:
    """List contexts; a star marks the current one."""
    from bursar.client.contexts import config_path, load

    contexts = load(config_path())
    if not contexts.known:
        click.echo("No contexts yet: `bursar login URL` adds one.", err=True)
        return
    rows = [
        ("*" if name == contexts.current else "", name, one.url, one.namespace or NONE)
        for name, one in sorted(contexts.known.items())
    ]
    print_rows(("Current", "Name", "URL", "Namespace"), rows)


@context.command()
@click.argument("name", shell_complete=completers.context_name)
@click.option("-n", "--namespace", metavar="NAME", help="Also change its default namespace.")
def use(name: str, namespace: str | None) -> None:
    """Make a context the current one."""
    from dataclasses import replace

    from bursar.client.contexts import Contexts, config_path, load, save

    path = config_path()
    contexts = load(path)
    chosen = contexts.known.get(name) or _missing(name)
    if namespace is not None:
        chosen = replace(chosen, namespace=namespace)
    save(path, Contexts(name, {**contexts.known, name: chosen}))
    click.echo(f'Using context "{name}" ({chosen.url}).')


@context.command()
@click.argument("name", shell_complete=completers.context_name)
def delete(name: str) -> None:
    """Delete a context and its stored token; the token stays valid until it is revoked."""
    from bursar.client.contexts import Contexts, config_path, load, save

    path = config_path()
    contexts = load(path)
    if name not in contexts.known:
        _missing(name)
    left = {other: one for other, one in contexts.known.items() if other != name}
    save(path, Contexts("" if contexts.current == name else contexts.current, left))
    click.echo(f'Deleted context "{name}".')


def _missing(name: str) -> NoReturn:
    raise Problem(f'context "{name}" not found', "`bursar context list` shows all", NOT_FOUND)
