"""What the API needs to know of a kind. Adding a kind is one small file that ends in one of these."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from bursar.core.objects.charge import NOTHING, Charge
from bursar.core.values.refusal import Cause
from bursar.wire.shared.meta import Wire

Object = Any  # a Struct with api_version, kind, metadata, spec and status
Fields = dict[str, str]


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the server-side table; `wide` ones show only with `-o wide`."""

    name: str
    value: Callable[[dict[str, Any]], str]
    type: str = "string"
    wide: bool = False
    description: str = ""


def _no_fields(_: Object) -> Fields:
    return {}


def _no_faults(_: Object) -> list[Cause]:
    return []


def _no_charge(_: Object) -> Charge:
    return NOTHING


def _leave(_: Object) -> None:
    return None


def _no_status(_: Object, __: str) -> dict[str, Any]:
    return {}


@dataclass(frozen=True, slots=True)
class Kind:
    name: str
    plural: str
    type: type[Wire]
    namespaced: bool
    description: str
    short_names: tuple[str, ...] = ()
    uid_prefix: str = ""
    # Everything wrong with a well-typed object, by field.
    check: Callable[[Object], list[Cause]] = _no_faults
    # What fieldSelector may ask for, beside metadata.name and metadata.namespace.
    selectable: tuple[str, ...] = ()
    fields: Callable[[Object], Fields] = _no_fields
    # What the object uses from the moment it is accepted.
    charge: Callable[[Object], Charge] = _no_charge
    # The status a new object starts with, given the time.
    first_status: Callable[[Object, str], dict[str, Any]] = _no_status
    columns: tuple[Column, ...] = ()
    # Strategic merge patch: dotted field path → the key that identifies an element of that list.
    merge_keys: Mapping[str, str] = field(default_factory=dict)
    # Whether its spec may change after creation; labels and annotations always may.
    mutable_spec: bool = True
    # Puts a checked object into the form in which it is stored.
    normalise: Callable[[Object], None] = _leave
    # Whether its existence or spec is part of the tree, which every charge holds still, or changes only with it.
    in_tree: bool = False

    @property
    def singular(self) -> str:
        return self.name.lower()


# Who submitted it.
USER_FIELD = "status.user"


def user_field(user: str) -> Fields:
    """Where nobody is known there is no field, as for kinds that nobody submits: both are selected as empty."""
    return {USER_FIELD: user} if user else {}


def read(document: Mapping[str, Any], path: str, default: Any = "") -> Any:
    """The value at a dotted path of a plain document."""
    value: Any = document
    for step in path.split("."):
        if not isinstance(value, Mapping) or step not in value:
            return default
        value = value[step]
    return value


def column(name: str, path: str, *, type: str = "string", wide: bool = False, default: str = "") -> Column:  # noqa: A002
    """A column that shows one field."""
    return Column(name, lambda document: str(read(document, path, default)), type, wide)
