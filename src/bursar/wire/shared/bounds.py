"""Bounds of request bodies: the number of values, and no repeated keys.

A body is bounded by its number of values as well as by its bytes, because checking one value takes a thousand times as
long as reading it. Values are counted before anything is built from them; bodies that are too short to hold many are
not counted.
"""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

from bursar.core.values.redaction import variable_name

VALUES_MAX = 25_000

_encode = msgspec.json.Encoder().encode

# A string, complete or truncated; an empty object or list; the begin of another value. Possessive quantifiers prevent
# backtracking, so the time is linear in the length of the text.
_TOKEN = re.compile(rb'"(?:[^"\\]++|\\.)*+"?|[\[{]\s*+[\]}]|([,\[{])', re.DOTALL)
# A value is at most a key, a string, a comma or bracket, and an empty object: text with more tokens is not JSON.
_TOKENS_PER_VALUE = 4


class TooManyValues(ValueError):
    """A body has more values than are read."""

    def __init__(self, values_max: int = VALUES_MAX) -> None:
        super().__init__(f"the body has more than {values_max} values")


class RepeatedKey(ValueError):
    """An object has a key twice; parsers disagree about which value counts."""

    def __init__(self, key: str) -> None:
        super().__init__(f"the key {variable_name(key)[:63]!r} is given twice in one object")


def has_more_values_json(raw: bytes, values_max: int = VALUES_MAX) -> bool:
    """Whether a JSON text has more values than this, at any depth; arbitrary for text that is not JSON."""
    if len(raw) <= 2 * values_max:
        return False  # A value takes two bytes at least: itself and a comma.
    if raw.count(b",") + raw.count(b"[") + raw.count(b"{") < values_max:
        return False  # Few enough even if none of them is inside a string.
    values, tokens_left = 1, _TOKENS_PER_VALUE * values_max
    for token in _TOKEN.finditer(raw):
        values += token.lastindex is not None
        tokens_left -= 1
        if values > values_max or not tokens_left:
            return True
    return values > values_max


def has_more_values(document: Any, values_max: int) -> bool:
    """Whether a document of plain values has more of them than this. Stops at the first excess value."""
    left, waiting = values_max, [document]
    while waiting:
        value = waiting.pop()
        left -= 1
        if left < 0 or (isinstance(value, dict | list) and len(value) > left):
            return True
        if isinstance(value, dict):
            waiting.extend(value.values())
        elif isinstance(value, list):
            waiting.extend(value)
    return False


def require_unique_keys(raw: bytes, value: Any) -> None:
    """Refuse a JSON text that gives a key twice in one object.

    Fast path: the decoded value is encoded again. If the text has no escapes and as many colons as the result, no key
    was lost. This holds for nearly all bodies, and costs less than comparing keys.
    """
    if b"\\" not in raw and raw.count(b":") == _encode(value).count(b":"):
        return
    # Number values do not matter here, and parsing the longest would be slow.
    json.loads(raw.decode(), object_pairs_hook=_without_repetition, parse_int=len, parse_float=len, parse_constant=len)


def _without_repetition(pairs: list[tuple[str, Any]]) -> Any:
    if len(dict(pairs)) == len(pairs):
        return None
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            raise RepeatedKey(key)
        seen.add(key)
    raise AssertionError("a shorter dictionary has lost a key")
