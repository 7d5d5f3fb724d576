"""Kubernetes' protobuf bodies, decoded into the documents that JSON would have given.

kubectl sends `create namespace`, `create quota` and `auth can-i` as `application/vnd.kubernetes.protobuf` and does not
fall back to JSON. Such a body is four magic bytes and an envelope (runtime.Unknown) that names the kind of the message
inside. Only the messages that clients really send are known here, as tables of field numbers; unknown fields are
skipped, as protobuf requires. Empty values that Go's JSON encoder omits are omitted too.

The input is untrusted: every fault is a ProtobufError, nesting is limited to the depth of the tables, and no more
fields are read than a body may have values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final, TypeAlias

from bursar.wire.shared.bounds import VALUES_MAX, TooManyValues

MEDIA_TYPE: Final = "application/vnd.kubernetes.protobuf"
MAGIC: Final = b"k8s\x00"
BODY_BYTES_MAX: Final = 4 * 1024 * 1024
NAME_CHARS_MAX: Final = 63

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_VARINT_BYTES_MAX: Final = 10


class ProtobufError(ValueError):
    """The body is not a Kubernetes protobuf message, or not one of those that are understood here."""


@dataclass(slots=True)
class Budget:
    """The remaining number of fields, known or not, that may be read in all messages of a body."""

    fields: int = VALUES_MAX

    def spend(self) -> None:
        self.fields -= 1
        if self.fields < 0:
            raise TooManyValues


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a message: its JSON name and how its value is decoded.

    `pointer` marks fields that Kubernetes keeps by reference: there a zero is a value; elsewhere it means "not given".
    """

    name: str
    read: Reader
    many: bool = False
    is_map: bool = False
    pointer: bool = False


Value: TypeAlias = int | bytes  # a raw value: a number or bytes
Reader: TypeAlias = Callable[[Value, Budget], Any]
Message: TypeAlias = Mapping[int, Field]


def decode(body: bytes) -> dict[str, Any]:
    """Decode the document in a protobuf body, with its apiVersion and kind."""
    if len(body) > BODY_BYTES_MAX:
        raise ProtobufError(f"protobuf body is too large: at most {BODY_BYTES_MAX} bytes are allowed")
    if not body.startswith(MAGIC):
        raise ProtobufError("protobuf body does not start with the four bytes 'k8s\\0'")
    budget = Budget()
    envelope = _read_message(_UNKNOWN, body[len(MAGIC) :], budget)
    if envelope.get("contentEncoding"):
        raise ProtobufError("protobuf body with a content encoding is not understood")
    if envelope.get("contentType", MEDIA_TYPE) != MEDIA_TYPE:
        raise ProtobufError("protobuf envelope holds something else than protobuf")
    type_meta = envelope.get("typeMeta", {})
    kind = type_meta.get("kind", "")
    message = MESSAGES.get(kind)
    if message is None:
        raise ProtobufError(f"kind {kind[:NAME_CHARS_MAX]!r} is not understood in protobuf: send it as JSON")
    return {**type_meta, **_read_message(message, envelope.get("raw", b""), budget)}


# The wire format.


def _read_message(message: Message, data: bytes, budget: Budget) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for number, value in _wire_fields(data, budget):
        field = message.get(number)
        if field is not None:
            _put(result, field, field.read(value, budget))
    return result


def _put(result: dict[str, Any], field: Field, value: Any) -> None:
    if field.many:
        result.setdefault(field.name, []).append(value)
    elif field.is_map:
        result.setdefault(field.name, {})[value.get("key", "")] = value.get("value", "")
    elif field.name in result:
        raise ProtobufError(f"field {field.name} is given twice")
    elif field.pointer or value not in ("", 0, None):
        result[field.name] = value


def _wire_fields(data: bytes, budget: Budget) -> Iterator[tuple[int, Value]]:
    """Iterate over field numbers and raw values, in wire order."""
    position = 0
    while position < len(data):
        budget.spend()
        tag, position = _read_varint(data, position)
        number, wire_type = tag >> 3, tag & 7
        if number == 0:
            raise ProtobufError("field number 0 is not allowed")
        value: Value
        if wire_type == _VARINT:
            value, position = _read_varint(data, position)
        elif wire_type == _BYTES:
            length, position = _read_varint(data, position)
            value, position = _slice(data, position, length)
        elif wire_type in (_FIXED64, _FIXED32):
            # Skipped: no known field has a fixed width.
            _, position = _slice(data, position, 8 if wire_type == _FIXED64 else 4)
            continue
        else:
            raise ProtobufError(f"wire type {wire_type} is not understood")
        yield number, value


def _read_varint(data: bytes, position: int) -> tuple[int, int]:
    value = 0
    for index in range(_VARINT_BYTES_MAX):
        if position + index >= len(data):
            raise ProtobufError("message ends inside a number")
        byte = data[position + index]
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            if value >= 1 << 64:
                break
            return value, position + index + 1
    raise ProtobufError("number has more than 64 bits")


def _slice(data: bytes, position: int, length: int) -> tuple[bytes, int]:
    end = position + length
    if end > len(data):
        raise ProtobufError("message ends inside a field")
    return data[position:end], end


# Decoding of values.


def _raw(value: Value, _: Budget) -> bytes:
    if not isinstance(value, bytes):
        raise ProtobufError("a number where bytes are expected")
    return value


def _text(value: Value, budget: Budget) -> str:
    try:
        return _raw(value, budget).decode()
    except UnicodeDecodeError:
        raise ProtobufError("text is not UTF-8") from None


def _integer(value: Value, _: Budget) -> int:
    """A signed 64-bit number; negative ones are in two's complement."""
    if not isinstance(value, int):
        raise ProtobufError("bytes stand where a number should")
    return value - (1 << 64) if value >= 1 << 63 else value


def _boolean(value: Value, budget: Budget) -> bool:
    return _integer(value, budget) != 0


def _message(message: Message) -> Reader:
    return lambda value, budget: _read_message(message, _raw(value, budget), budget)


def _quantity(value: Value, budget: Budget) -> str:
    return str(_read_message(_QUANTITY, _raw(value, budget), budget).get("string", "0"))


def _time(value: Value, budget: Budget) -> str | None:
    """RFC 3339 in whole seconds; an empty message is Go's zero time, which JSON shows as null."""
    seconds = _read_message(_TIME, _raw(value, budget), budget).get("seconds")
    if seconds is None:
        return None
    try:
        instant = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(seconds=seconds)
    except OverflowError:
        raise ProtobufError("time is outside of the years 1 to 9999") from None
    return instant.isoformat().replace("+00:00", "Z")


def _map_of(read: Reader) -> Reader:
    return _message({1: Field("key", _text), 2: Field("value", read)})


# The messages. Numbers are those of Kubernetes' generated.proto files.


def _strings(*names: str) -> dict[int, Field]:
    """Text fields numbered from 1."""
    return {number: Field(name, _text) for number, name in enumerate(names, 1)}


def _texts(number: int, name: str) -> Message:
    return {number: Field(name, _text, many=True)}


_QUANTITY: Message = _strings("string")
_TIME: Message = {1: Field("seconds", _integer)}

_UNKNOWN: Message = {
    1: Field("typeMeta", _message(_strings("apiVersion", "kind"))),
    2: Field("raw", _raw),
    3: Field("contentEncoding", _text),
    4: Field("contentType", _text),
}

_OWNER_REFERENCE: Message = {
    1: Field("kind", _text),
    3: Field("name", _text),
    4: Field("uid", _text),
    5: Field("apiVersion", _text),
    6: Field("controller", _boolean, pointer=True),
    7: Field("blockOwnerDeletion", _boolean, pointer=True),
}

# Without managedFields (17), which are never stored.
_OBJECT_META: Message = {
    **_strings("name", "generateName", "namespace", "selfLink", "uid", "resourceVersion"),
    7: Field("generation", _integer),
    8: Field("creationTimestamp", _time),
    9: Field("deletionTimestamp", _time),
    10: Field("deletionGracePeriodSeconds", _integer, pointer=True),
    11: Field("labels", _map_of(_text), is_map=True),
    12: Field("annotations", _map_of(_text), is_map=True),
    13: Field("ownerReferences", _message(_OWNER_REFERENCE), many=True),
    14: Field("finalizers", _text, many=True),
}

_DELETE_OPTIONS: Message = {
    1: Field("gracePeriodSeconds", _integer, pointer=True),
    2: Field("preconditions", _message(_strings("uid", "resourceVersion"))),
    3: Field("orphanDependents", _boolean, pointer=True),
    4: Field("propagationPolicy", _text),
    5: Field("dryRun", _text, many=True),
}

_CONDITION: Message = {
    1: Field("type", _text),
    2: Field("status", _text),
    4: Field("lastTransitionTime", _time),
    5: Field("reason", _text),
    6: Field("message", _text),
}

# Keys, operators and values of requirements; scopes, labels and fields differ only in the name of the key.
_SCOPE_REQUIREMENT: Message = {**_strings("scopeName", "operator"), **_texts(3, "values")}
_REQUIREMENT: Message = {**_strings("key", "operator"), **_texts(3, "values")}
_SELECTOR_ATTRIBUTES: Message = {
    1: Field("rawSelector", _text),
    2: Field("requirements", _message(_REQUIREMENT), many=True),
}

_RESOURCE_QUOTA_SPEC: Message = {
    1: Field("hard", _map_of(_quantity), is_map=True),
    **_texts(2, "scopes"),
    3: Field("scopeSelector", _message({1: Field("matchExpressions", _message(_SCOPE_REQUIREMENT), many=True)})),
}
_RESOURCE_QUOTA_STATUS: Message = {
    1: Field("hard", _map_of(_quantity), is_map=True),
    2: Field("used", _map_of(_quantity), is_map=True),
}

_RESOURCE_ATTRIBUTES: Message = {
    **_strings("namespace", "verb", "group", "version", "resource", "subresource", "name"),
    8: Field("fieldSelector", _message(_SELECTOR_ATTRIBUTES)),
    9: Field("labelSelector", _message(_SELECTOR_ATTRIBUTES)),
}
_ACCESS_REVIEW_SPEC: Message = {
    1: Field("resourceAttributes", _message(_RESOURCE_ATTRIBUTES)),
    2: Field("nonResourceAttributes", _message(_strings("path", "verb"))),
}


def _object(spec: Message, status: Message | None = None) -> Message:
    """Metadata, spec and status; the status of a review is written only by the server."""
    fields = {1: Field("metadata", _message(_OBJECT_META)), 2: Field("spec", _message(spec))}
    return fields if status is None else {**fields, 3: Field("status", _message(status))}


MESSAGES: Final[Mapping[str, Message]] = {
    "Namespace": _object(
        _texts(1, "finalizers"), {1: Field("phase", _text), 2: Field("conditions", _message(_CONDITION), many=True)}
    ),
    "ResourceQuota": _object(_RESOURCE_QUOTA_SPEC, _RESOURCE_QUOTA_STATUS),
    "SelfSubjectAccessReview": _object(_ACCESS_REVIEW_SPEC),
    "SelfSubjectRulesReview": _object(_strings("namespace")),
    "SelfSubjectReview": {1: Field("metadata", _message(_OBJECT_META))},
    "DeleteOptions": _DELETE_OPTIONS,
    "Eviction": {1: Field("metadata", _message(_OBJECT_META)), 2: Field("deleteOptions", _message(_DELETE_OPTIONS))},
}
