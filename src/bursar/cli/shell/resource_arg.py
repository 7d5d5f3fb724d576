"""Kinds and names as users type them: `alloc`, `allocations`, `Allocation` and `alloc/train` mean the same kind.

Kinds of this release are found here, others through the server's discovery.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from bursar.cli.shell.problem import nearest

if TYPE_CHECKING:
    from bursar.client import Client, Resource


READ = frozenset({"get", "list"})  # the verbs in discovery of kinds that can be read


@dataclass(frozen=True, slots=True)
class ResourceType:
    kind: str
    plural: str
    namespaced: bool
    short_names: tuple[str, ...] = ()

    @property
    def singular(self) -> str:
        return self.kind.lower()

    @property
    def names(self) -> tuple[str, ...]:
        return (self.plural, self.singular, *self.short_names)


@dataclass(frozen=True, slots=True)
class ResourceTarget:
    """A kind, and the name of one of its objects or none."""

    noun: ResourceType
    name: str = ""


def targets(words: Sequence[str], client: Client) -> list[ResourceTarget]:
    """Parse `alloc a b`, `alloc,nodes` or `alloc/a node/b`."""
    if not words:
        raise click.UsageError("name a kind, such as allocations, or an object, such as allocation/train")
    if any("/" in word for word in words):
        return [_slashed(word, client) for word in words]
    kinds, names = words[0].split(","), words[1:]
    if len(kinds) > 1 and names:
        raise click.UsageError("several kinds cannot be combined with names: write kind/name for each")
    nouns = [find(kind, client) for kind in kinds]
    return [_named_target(nouns[0], name) for name in names] or [ResourceTarget(noun) for noun in nouns]


def one_target(words: Sequence[str], client: Client) -> ResourceTarget:
    """Parse `alloc a` or `alloc/a`."""
    found = targets(words, client)
    if len(found) != 1 or not found[0].name:
        raise click.UsageError("name one object, as in `allocation train` or `allocation/train`")
    return found[0]


def named_or_selected(nodes: Resource, names: Sequence[str], label_selector: str) -> Sequence[str]:
    """The named nodes, or the nodes that the selector matches."""
    if bool(names) == bool(label_selector):
        raise click.UsageError("name nodes, or choose them with --selector")
    return names or [node["metadata"]["name"] for node in nodes.list(label_selector=label_selector)]


def _slashed(word: str, client: Client) -> ResourceTarget:
    kind, slash, name = word.partition("/")
    if not slash or not kind or not name:
        raise click.UsageError(f"{word!r} should be kind/name, like the others")
    return _named_target(find(kind, client), name)


def _named_target(noun: ResourceType, name: str) -> ResourceTarget:
    if not name or name in (".", ".."):
        raise click.UsageError(f"{name!r} is not a name")
    return ResourceTarget(noun, name)


def find(word: str, client: Client) -> ResourceType:
    """The kind that a word names, by plural, singular, short name or Kind."""
    ours = known()
    noun = _named(word, ours)
    if noun is None:
        served = discovered(client)
        noun = _named(word, served)
        if noun is None:
            raise click.UsageError(_unknown(word, [*ours, *served]))
    return noun


def known() -> list[ResourceType]:
    from bursar.wire.kinds.registry import KINDS

    return [ResourceType(kind.name, kind.plural, kind.namespaced, kind.short_names) for kind in KINDS]


def discovered(client: Client) -> list[ResourceType]:
    """The readable kinds of the server's discovery, without those that can only be posted, such as reviews."""
    answer = client.request("GET", "/api/v1")
    resources = answer.get("resources") or [] if isinstance(answer, dict) else []
    return [
        ResourceType(one["kind"], one["name"], bool(one["namespaced"]), tuple(one.get("shortNames") or ()))
        for one in resources
        if "/" not in one["name"] and not READ.isdisjoint(one["verbs"])
    ]


def _named(word: str, nouns: Iterable[ResourceType]) -> ResourceType | None:
    return next((noun for noun in nouns if word.lower() in noun.names), None)


def _unknown(word: str, nouns: Iterable[ResourceType]) -> str:
    names = [name for noun in nouns for name in noun.names]
    near = nearest(word.lower(), names)
    kinds = ", ".join(dict.fromkeys(noun.plural for noun in nouns))
    return f"unknown kind {word!r}" + (f"; did you mean {near!r}?" if near else f"; known kinds: {kinds}")
