"""The server-side table that `kubectl get` prints.

The server decides the columns and formats the cells, ages included, so a client needs no knowledge of the kinds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, Literal

from bursar.core.values.duration import format_age
from bursar.wire.shared.kind import Column, Kind

META_VERSION: Final = "meta.k8s.io/v1"
UNKNOWN_AGE: Final = "<unknown>"
RANGES_MAX: Final = 32

IncludeObject = Literal["None", "Metadata", "Object"]

_PLAIN: Final = frozenset({"application/json", "application/*", "*/*"})


def wants_table(accept: str) -> bool:
    """Whether the client prefers a Table among the media types that it accepts and this server supports."""
    if "as=Table" not in accept:
        return False
    ranges = [_media_range(text) for text in accept.split(",")[:RANGES_MAX]]
    # Sorting is stable: among equals, the first one named is preferred.
    for media, parameters, quality in sorted(ranges, key=lambda one: -one[2]):
        if media not in _PLAIN or not quality:
            continue
        shape = parameters.get("as")
        if shape is None:
            return False
        if (shape, parameters.get("g"), parameters.get("v")) == ("Table", "meta.k8s.io", "v1"):
            return True
    return False


def table(
    kind: Kind,
    documents: Iterable[dict[str, Any]],
    *,
    now_seconds: float,
    list_meta: Mapping[str, Any] | None = None,
    include_object: IncludeObject = "Metadata",
    with_columns: bool = True,
) -> dict[str, Any]:
    """Build a Table of these documents.

    In a watch, every event carries a Table of one row, and only the first defines the columns: clients remember them,
    and the stream is a fraction as long.
    """
    return {
        "kind": "Table",
        "apiVersion": META_VERSION,
        "metadata": dict(list_meta or {}),
        "columnDefinitions": column_definitions(kind) if with_columns else None,
        "rows": [_row(kind.columns, document, now_seconds, include_object) for document in documents],
    }


def column_definitions(kind: Kind) -> list[dict[str, Any]]:
    """Name first and Age last, around the kind's own; those with priority 1 show only with `-o wide`."""
    # The age is the last narrow column, as everywhere in Kubernetes; wide ones follow it.
    narrow, wide = _split(kind.columns)
    return [
        _definition("Name", format="name", description="Name, unique among those of its kind in its namespace."),
        *(_definition(one.name, one.type, description=one.description) for one in narrow),
        _definition("Age", description="Time since it was created."),
        *(_definition(one.name, one.type, description=one.description, priority=1) for one in wide),
    ]


def _definition(
    name: str,
    type: str = "string",  # noqa: A002
    *,
    format: str = "",  # noqa: A002
    description: str = "",
    priority: int = 0,
) -> dict[str, Any]:
    return {"name": name, "type": type, "format": format, "description": description, "priority": priority}


def _split(columns: Sequence[Column]) -> tuple[list[Column], list[Column]]:
    return [one for one in columns if not one.wide], [one for one in columns if one.wide]


def _row(
    columns: Sequence[Column], document: dict[str, Any], now_seconds: float, include_object: IncludeObject
) -> dict[str, Any]:
    metadata = document.get("metadata") or {}
    narrow, wide = _split(columns)
    cells = [
        metadata.get("name", ""),
        *(_cell(one, document) for one in narrow),
        age(metadata.get("creationTimestamp"), now_seconds),
        *(_cell(one, document) for one in wide),
    ]
    if include_object == "None":
        return {"cells": cells}
    whole = document if include_object == "Object" else _metadata_only(metadata)
    return {"cells": cells, "object": whole}


def _cell(column: Column, document: dict[str, Any]) -> str | int:
    text = column.value(document)
    if column.type == "integer" and text.removeprefix("-").isdecimal():
        return int(text)
    return text


def _metadata_only(metadata: Mapping[str, Any]) -> dict[str, Any]:
    return {"kind": "PartialObjectMetadata", "apiVersion": META_VERSION, "metadata": metadata}


def age(timestamp: object, now_seconds: float) -> str:
    """Format the age of an RFC 3339 time as kubectl does."""
    try:
        created = datetime.fromisoformat(str(timestamp))
    except ValueError:
        return UNKNOWN_AGE
    if created.tzinfo is None:
        return UNKNOWN_AGE
    return format_age(int(now_seconds - created.timestamp()))


def _media_range(text: str) -> tuple[str, dict[str, str], float]:
    """Media type, parameters and quality of one element of an Accept header."""
    media, *rest = (part.strip() for part in text.split(";"))
    parameters = {name.strip().lower(): value.strip().strip('"') for name, _, value in (p.partition("=") for p in rest)}
    return media.lower(), parameters, _quality(parameters.pop("q", "1"))


def _quality(text: str) -> float:
    """A quality between 0 and 1; an invalid one is 0."""
    try:
        quality = float(text)
    except ValueError:
        return 0.0
    return quality if 0 <= quality <= 1 else 0.0
