"""OpenAPI 2 for clients up to kubectl 1.26: a protobuf document that lists the operations with dry runs.

Such clients refuse `diff` and `--dry-run=server` unless the PATCH operation of the kind has a `dryRun` parameter here.
It contains nothing else: with schemas they would validate bodies themselves, and the server does that better.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Final

# With an `@`, as in the registered name, client-go could not parse the body.
MEDIA_TYPE: Final = "application/com.github.proto-openapi.spec.v2.v1.0+protobuf"
EXTENSION: Final = "x-kubernetes-group-version-kind"

_BYTES: Final = 2  # the wire type of text and of messages

# Field numbers of gnostic's openapi.v2 messages.
_DOCUMENT_SWAGGER, _DOCUMENT_INFO, _DOCUMENT_PATHS = 1, 2, 8
_INFO_TITLE, _INFO_VERSION = 1, 2
_PATHS_PATH = 2
_NAME, _VALUE = 1, 2  # of NamedPathItem and NamedAny
_ITEM_PATCH = 8
_OPERATION_ID, _OPERATION_PARAMETERS, _OPERATION_EXTENSION = 5, 8, 13
_PARAMETERS_ITEM_PARAMETER, _PARAMETER_NON_BODY, _NON_BODY_QUERY = 1, 2, 3
_QUERY_IN, _QUERY_NAME, _QUERY_TYPE = 2, 4, 6
_ANY_YAML = 2


def body(patches: Iterable[tuple[str, str, dict[str, str], Iterable[str]]], *, release: str) -> bytes:
    """The document for PATCH operations: (path, operation id, group, version and kind, query parameters)."""
    paths = b"".join(_field(_PATHS_PATH, _path(*one)) for one in patches)
    info = _field(_INFO_TITLE, b"Bursar") + _field(_INFO_VERSION, release.encode())
    return _field(_DOCUMENT_SWAGGER, b"2.0") + _field(_DOCUMENT_INFO, info) + _field(_DOCUMENT_PATHS, paths)


def _path(path: str, operation_id: str, kind: dict[str, str], parameters: Iterable[str]) -> bytes:
    extension = _field(_NAME, EXTENSION.encode()) + _field(_VALUE, _field(_ANY_YAML, json.dumps(kind).encode()))
    operation = b"".join(
        (
            _field(_OPERATION_ID, operation_id.encode()),
            *(_field(_OPERATION_PARAMETERS, _query(name)) for name in parameters),
            _field(_OPERATION_EXTENSION, extension),
        )
    )
    return _field(_NAME, path.encode()) + _field(_VALUE, _field(_ITEM_PATCH, operation))


def _query(name: str) -> bytes:
    query = _field(_QUERY_IN, b"query") + _field(_QUERY_NAME, name.encode()) + _field(_QUERY_TYPE, b"string")
    return _field(_PARAMETERS_ITEM_PARAMETER, _field(_PARAMETER_NON_BODY, _field(_NON_BODY_QUERY, query)))


def _field(number: int, value: bytes) -> bytes:
    return _varint(number << 3 | _BYTES) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    pieces = bytearray()
    while value > 0x7F:
        pieces.append(value & 0x7F | 0x80)
        value >>= 7
    pieces.append(value)
    return bytes(pieces)
