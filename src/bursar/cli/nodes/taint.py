"""`bursar taint`: `key=value:Effect` sets, `key-` and `key:Effect-` remove."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import click

from bursar.cli.shell import completers
from bursar.cli.shell.connection import Connection, connected, dry_run_option, label_selector_option
from bursar.cli.shell.output import full_name, say
from bursar.cli.shell.problem import CONFLICT, Outcomes, Problem
from bursar.cli.shell.resource_arg import find, named_or_selected

TaintDocument = dict[str, str]
EFFECT_DEFAULT = "NoSchedule"  # of a taint without one


class TaintChanges(NamedTuple):
    """Taints to set, and the (key, effect) of taints to remove; an empty effect means all effects."""

    put: list[TaintDocument]
    remove: list[tuple[str, str]]


@click.command()
@click.argument(
    "words",
    nargs=-1,
    metavar="NODE... KEY[=VALUE]:EFFECT... KEY[:EFFECT]-...",
    shell_complete=completers.named("nodes"),
)
@click.option("--overwrite", is_flag=True, help="Change existing values.")
@label_selector_option
@dry_run_option
@connected
def taint(connection: Connection, words: Sequence[str], overwrite: bool, label_selector: str, dry_run: bool) -> None:
    """Set or remove the taints of nodes.

    NoSchedule and NoExecute repel work that does not tolerate them; PreferNoSchedule repels it if other nodes are free.
    Running work continues: `bursar drain` empties a node.

    \b
    bursar taint gpu-1 team=physics:NoSchedule
    bursar taint -l rack=r12 team- flaky:PreferNoSchedule
    """
    names, changes = split(words)
    if not any(changes):
        raise click.UsageError("give a change: key=value:Effect to set, key- to remove")
    noun = find("nodes", connection.client)
    nodes = connection.resource(noun)
    outcomes = Outcomes()
    for name in named_or_selected(nodes, names, label_selector):
        with outcomes.each():
            before = nodes.get(name)
            present = (before.get("spec") or {}).get("taints") or []
            after = tainted(full_name(noun, name), present, changes, overwrite=overwrite)
            if after == present:
                say(noun, before, "unchanged", dry_run=dry_run)
                continue
            # The whole list is replaced, so a concurrent change must not be lost.
            guard = {"resourceVersion": before["metadata"].get("resourceVersion")}
            patch = {"metadata": guard, "spec": {"taints": after or None}}
            done = "tainted" if changes.put else "untainted"
            say(noun, nodes.patch(name, patch, dry_run=dry_run), done, dry_run=dry_run)
    outcomes.leave()


def split(words: Sequence[str]) -> tuple[list[str], TaintChanges]:
    """Split the arguments into nodes and changes. Node names have no `:`, no `=` and no `-` at their end."""
    names: list[str] = []
    changes = TaintChanges([], [])
    for word in words:
        if word.endswith("-"):
            key, _, effect = word.removesuffix("-").partition(":")
            changes.remove.append((key, effect))
        elif ":" in word:
            text, _, effect = word.rpartition(":")
            key, _, value = text.partition("=")
            changes.put.append({"key": key, **({"value": value} if value else {}), "effect": effect})
        elif "=" in word:
            raise click.UsageError(f"{word!r} has no effect: write {word}:NoSchedule")
        elif any(changes):
            raise click.UsageError(f"{word!r} should be key=value:Effect or key-")
        else:
            names.append(word.removeprefix("node/"))
    # As in `bursar label node gpu-1`.
    if len(names) > 1 and names[0] in ("node", "nodes"):
        names = names[1:]
    return names, changes


def tainted(
    name: str, present: Sequence[Mapping[str, Any]], changes: TaintChanges, *, overwrite: bool
) -> list[Mapping[str, Any]]:
    """A node's taints after the changes. A key has one value for each effect."""
    after = [one for one in present if not any(_is(one, key, effect) for key, effect in changes.remove)]
    for wanted in changes.put:
        same = next((one for one in after if _is(one, wanted["key"], wanted["effect"])), None)
        if same is None:
            after.append(wanted)
        elif same.get("value", "") != wanted.get("value", ""):
            if not overwrite:
                raise Problem(f"{name} already has {_text(same)}", "use --overwrite to change it", CONFLICT)
            after[after.index(same)] = wanted
    return after


def _is(one: Mapping[str, Any], key: str, effect: str) -> bool:
    return one["key"] == key and effect in ("", one.get("effect", EFFECT_DEFAULT))


def _text(one: Mapping[str, Any]) -> str:
    value = f"={one['value']}" if one.get("value") else ""
    return f"{one['key']}{value}:{one.get('effect', EFFECT_DEFAULT)}"
