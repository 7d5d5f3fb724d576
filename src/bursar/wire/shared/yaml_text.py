"""YAML bodies, decoded into the documents that JSON would have given.

The document is built from the parser's events in one pass, so every bound holds before anything is built: no aliases,
with which a small text can expand to an enormous document; a limited depth and number of events; no repeated keys; and
only the tags of JSON's types, each on a value of that type. Dates stay text, and so do numbers not in plain decimals:
YAML's sexagesimal numbers take time quadratic in their length.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import Any, Final

import yaml

from bursar.wire.shared.bounds import RepeatedKey

DEPTH_MAX: Final = 64
EVENTS_MAX: Final = 20_000

_CORE: Final = "tag:yaml.org,2002:"
_INTEGER: Final = re.compile(r"[-+]?(?:0|[1-9][0-9]{0,63})\Z")
_FLOAT: Final = re.compile(r"[-+]?(?:[0-9]{1,32}\.[0-9]{0,32}|\.[0-9]{1,32})(?:[eE][-+]?[0-9]{1,3})?\Z")
_TRUE: Final = frozenset(("yes", "Yes", "YES", "true", "True", "TRUE", "on", "On", "ON"))
_FALSE: Final = frozenset(("no", "No", "NO", "false", "False", "FALSE", "off", "Off", "OFF"))
_NULL: Final = frozenset(("", "~", "null", "Null", "NULL"))
_SCALARS: Final = frozenset(_CORE + name for name in ("str", "int", "float", "bool", "null"))
_UNKNOWN_TAG: Final = "the value's tag is not understood here: write a value that begins with ! in quotes"
_MAP, _SEQUENCE = _CORE + "map", _CORE + "seq"


class YamlError(ValueError):
    """The text is not YAML, or contains something that a body may not."""


def decode(raw: bytes) -> Any:
    """Decode the one document in a YAML text."""
    events = _bounded(raw)
    try:
        next(events)  # the stream begins
        first = next(events)
        if isinstance(first, yaml.StreamEndEvent):
            return None
        document = _value(next(events), events)
        next(events)  # the document ends
        if not isinstance(next(events), yaml.StreamEndEvent):
            raise YamlError("a body is one document, and this text has several")
    except yaml.YAMLError as error:
        raise YamlError(str(error)) from None
    return document


def _bounded(raw: bytes) -> Iterator[Any]:
    depth = 0
    for count, event in enumerate(yaml.parse(raw, Loader=yaml.CSafeLoader)):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > DEPTH_MAX or count > EVENTS_MAX:
            raise YamlError(f"YAML may have {DEPTH_MAX} levels and {EVENTS_MAX} parts; send JSON instead")
        yield event


def _value(event: Any, events: Iterator[Any]) -> Any:
    match event:
        case yaml.ScalarEvent():
            try:
                return _scalar(event)
            except YamlError as error:
                # The message omits the value, which may be a secret.
                raise YamlError(f"line {_line(event)}: {error}") from None
        case yaml.MappingStartEvent():
            _require_tag(event, _MAP)
            return _mapping(events)
        case yaml.SequenceStartEvent():
            _require_tag(event, _SEQUENCE)
            return _sequence(events)
        case _:
            raise YamlError("aliases are not allowed")


def _line(event: Any) -> int:
    return event.start_mark.line + 1 if event.start_mark else 0


def _require_tag(event: Any, own: str) -> None:
    if event.tag not in (None, "!", own):
        raise YamlError(f"line {_line(event)}: {_UNKNOWN_TAG}")


def _mapping(events: Iterator[Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    while not isinstance(event := next(events), yaml.MappingEndEvent):
        key = _value(event, events)
        if not isinstance(key, str):
            raise YamlError(f"line {_line(event)}: a key must be text: write it in quotes")
        if key in found:
            raise RepeatedKey(key)
        found[key] = _value(next(events), events)
    return found


def _sequence(events: Iterator[Any]) -> list[Any]:
    found: list[Any] = []
    while not isinstance(event := next(events), yaml.SequenceEndEvent):
        found.append(_value(event, events))
    return found


def _scalar(event: Any) -> Any:
    text: str = event.value
    if event.tag is None or event.tag == "!":
        # Quoted scalars are text, and so are scalars with the non-specific tag `!`.
        return _plain(text) if event.implicit[0] and event.tag is None else text
    if event.tag not in _SCALARS:
        raise YamlError(_UNKNOWN_TAG)
    return _TAGGED[event.tag.removeprefix(_CORE)](text)


def _plain(text: str) -> Any:
    if text in _NULL:
        return None
    if text in _TRUE:
        return True
    if text in _FALSE:
        return False
    if text == "<<":
        raise YamlError("merging with << is not understood")
    if text[0] not in "-+.0123456789":
        return text
    if _INTEGER.match(text):
        return int(text)
    return _float(text) if _FLOAT.match(text) else text


def _integer(text: str) -> int:
    if not _INTEGER.match(text):
        raise YamlError("the value tagged as a number is not one in plain decimals")
    return int(text)


def _tagged_float(text: str) -> float:
    if not _FLOAT.match(text):
        raise YamlError("the value tagged as a number is not one in plain decimals")
    return _float(text)


def _float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise YamlError("the number is too large")
    return value


def _boolean(text: str) -> bool:
    if text not in _TRUE and text not in _FALSE:
        raise YamlError("the value tagged as a boolean is neither true nor false")
    return text in _TRUE


def _null(text: str) -> None:
    if text not in _NULL:
        raise YamlError("the value tagged as null is not null")


_TAGGED: Final[dict[str, Callable[[str], Any]]] = {
    "str": str,
    "int": _integer,
    "float": _tagged_float,
    "bool": _boolean,
    "null": _null,
}
