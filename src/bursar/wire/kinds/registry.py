"""The registry of kinds: each module of this package that ends in a `Kind`, in order of module names.

The API serves the kinds in this order. `register` adds a kind that is defined elsewhere, before the server is built.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from bursar.core.values.access import VIEWS, Policy
from bursar.wire import kinds as package
from bursar.wire.shared.kind import Kind

KINDS: list[Kind] = []
BY_NAME: dict[str, Kind] = {}
BY_PLURAL: dict[str, Kind] = {}


def register(kind: Kind) -> None:
    """Add a kind: its routes, documents, access, client attribute and command-line noun follow."""
    names = {kind.plural, kind.singular, *kind.short_names}
    for other in KINDS:
        if taken := names & {other.plural, other.singular, *other.short_names}:
            raise ValueError(f"{kind.name} and {other.name} share the name {', '.join(sorted(taken))}")
    KINDS.append(kind)
    BY_NAME[kind.name] = kind
    BY_PLURAL[kind.plural] = kind


def policy() -> Policy:
    """The access rules, including those of the kinds and of their views."""
    access = {**{kind.plural: kind.access for kind in KINDS}, **VIEWS}
    return Policy(access, [kind.plural for kind in KINDS if kind.requestable])


def _register_package() -> None:
    for name in sorted(found.name for found in iter_modules(package.__path__)):
        path = f"{package.__name__}.{name}"
        if path != __name__:
            # A module may import another one's kind: a kind belongs to the module that defines its type.
            for one in vars(import_module(path)).values():
                if isinstance(one, Kind) and one.type.__module__ == path:
                    register(one)


_register_package()
