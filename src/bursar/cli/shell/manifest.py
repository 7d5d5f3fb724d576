"""Manifests: objects read from YAML or JSON files, directories or standard input."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bursar.cli.shell.problem import Problem
from bursar.cli.shell.resource_arg import ResourceType, find

if TYPE_CHECKING:
    from bursar.cli.shell.connection import Connection
    from bursar.client import Resource

STDIN = "-"
SUFFIXES = (".yaml", ".yml", ".json")

files_option = click.option(
    "-f", "--filename", "files", multiple=True, metavar="FILE", help="A file, a directory, or - for standard input."
)
recursive_option = click.option("-R", "--recursive", is_flag=True, help="Read directories recursively.")


@dataclass(frozen=True, slots=True)
class Manifest:
    """An object, and the file it was read from."""

    document: dict[str, Any]
    source: str

    @property
    def name(self) -> str:
        return str((self.document.get("metadata") or {}).get("name") or "")

    def require_name(self) -> str:
        """The name, which is an error if missing. Only `create` leaves it to the server."""
        if not self.name:
            raise Problem(f"{self.source}: the object has no metadata.name")
        return self.name


def read(files: Sequence[str], *, recursive: bool = False) -> list[Manifest]:
    """All objects in the files, in order. Everything is read before anything is used."""
    found = [manifest for file in files for manifest in _read_one(file, recursive)]
    if not found:
        raise Problem(f"no object in {', '.join(files)}")
    return found


def place(manifest: Manifest, connection: Connection, word: str = "") -> tuple[ResourceType, Resource]:
    """The kind and namespace of an object; `word` is the kind of objects that have no `kind`."""
    kind = manifest.document.get("kind") or word
    if not kind:
        raise Problem(
            f"{manifest.source}: the object has no `kind` field", "add `kind:`, or name the kind in the command"
        )
    noun = find(str(kind), connection.client)
    if not noun.namespaced:
        return noun, connection.resource(noun)
    own = str((manifest.document.get("metadata") or {}).get("namespace") or "")
    if own and connection.namespace and own != connection.namespace:
        raise Problem(f'{manifest.source}: the object is in namespace "{own}", not "{connection.namespace}"')
    return noun, connection.resource(noun, own or connection.effective_namespace)


def _read_one(file: str, recursive: bool) -> Iterator[Manifest]:
    if file == STDIN:
        yield from parse(sys.stdin.read(), "standard input")
        return
    path = Path(file)
    if path.is_dir():
        inside = sorted(path.rglob("*") if recursive else path.iterdir())
        for one in inside:
            if one.suffix in SUFFIXES and one.is_file():
                yield from parse(_text(one), str(one))
    else:
        yield from parse(_text(path), file)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except FileNotFoundError:
        raise Problem(f"file {path} not found") from None
    except (OSError, UnicodeDecodeError) as error:
        raise Problem(f"{path} cannot be read: {error}") from None


def parse(text: str, source: str) -> Iterator[Manifest]:
    """Parse YAML or JSON, which is a subset of YAML, and split Lists into their items."""
    import yaml

    try:
        documents = list(yaml.load_all(text, Loader=_loader()))
    except yaml.YAMLError as error:
        raise Problem(f"{source} is neither YAML nor JSON: {error}") from None
    for document in documents:
        if document is not None:
            yield from _objects(document, source)


def _loader() -> Any:
    """YAML's safe loader without dates: text that looks like a date is the value of a label or a status."""
    import yaml

    safe = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    resolvers = {
        first: [(tag, pattern) for tag, pattern in known if tag != "tag:yaml.org,2002:timestamp"]
        for first, known in safe.yaml_implicit_resolvers.items()
    }
    return type("Loader", (safe,), {"yaml_implicit_resolvers": resolvers})


def _objects(document: object, source: str) -> Iterator[Manifest]:
    if not isinstance(document, dict):
        raise Problem(f"{source}: an object should be a mapping, not {type(document).__name__}")
    kind = str(document.get("kind") or "")
    items = document.get("items")
    if kind.endswith("List") and isinstance(items, list):
        for item in items:
            # The items of an AllocationList need no kind.
            named = {"kind": kind.removesuffix("List"), **item} if isinstance(item, Mapping) else item
            yield from _objects(named if kind != "List" else item, source)
    elif not isinstance(document.get("metadata") or {}, dict):
        raise Problem(f"{source}: the object's metadata should be a mapping")
    else:
        yield Manifest(_plain(document), source)


def _plain(document: dict[Any, Any]) -> dict[str, Any]:
    """The mapping with strings as keys, as in JSON. YAML also reads numbers and words such as `on` as keys."""
    return {_key(field): _plain_value(value) for field, value in document.items()}


def _plain_value(value: Any) -> Any:
    if isinstance(value, dict):
        return _plain(value)
    return [_plain_value(one) for one in value] if isinstance(value, list) else value


def _key(field: object) -> str:
    return str(field).lower() if isinstance(field, bool) else str(field)
