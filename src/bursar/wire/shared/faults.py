"""All faults of a request body, in words.

msgspec stops at the first fault, which is fast but unhelpful. When it refuses a body, the body is validated against the
JSON schema of the same type, and all faults are listed. The validator collects all faults before it yields the first,
and each takes a tenth of a millisecond: for bodies with many values, only the fault of msgspec is reported.
"""

from __future__ import annotations

import copy
import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import islice
from typing import Any

import msgspec
from jsonschema_rs import Draft202012Validator, ValidationError, ValidationErrorKind

from bursar.core.values.redaction import in_environment, variable_name
from bursar.wire.shared.bounds import has_more_values

FAULTS_MAX = 50
VALUES_COMPARED_MAX = 512
VALUE_CHARS_MAX = 63
PATH_CHARS_MAX = 512

# msgspec puts the path last: names of fields, indexes of lists, and `[...]` for a value of a map, which cannot be
# followed. The quantifiers are possessive: a step given back character by character can never match better, and trying
# that takes time exponential in the length of the path.
_PATH_FOLLOWS = " - at `$"
_PATH = re.compile(r"\.?((?:[\w-]++|\[\d++\]|\.)*+)`")
_STEPS = re.compile(r"[\w-]+|\[\d+\]")
_OF_VALUES = (ValidationErrorKind.Type, ValidationErrorKind.AnyOf, ValidationErrorKind.Enum)

_TYPE_WORDS = {
    "string": "a string",
    "integer": "an integer",
    "number": "a number",
    "boolean": "a boolean",
    "object": "an object",
    "array": "a list",
    "null": "null",
}


def all_faults(kind_type: type, document: Any) -> list[tuple[str, str]]:
    """Path and message of all faults of a body, in the order of the paths; none if the schema finds none, or the body
    is too large to validate."""
    if has_more_values(document, VALUES_COMPARED_MAX):
        return []
    schema, validator = _compiled(kind_type)
    try:
        errors = list(islice(validator.iter_errors(document), FAULTS_MAX))
    except (ValueError, TypeError, OverflowError):
        # Nested too deep, or a value that JSON does not have: the fault of msgspec is reported alone.
        return []
    found = (fault for error in errors for fault in _explain(schema, error))
    return sorted(dict.fromkeys(islice(found, FAULTS_MAX)))


def told_by(error: str) -> tuple[str, str]:
    """Path and message of a msgspec error; the path is empty if the error has none that can be followed."""
    what, found, rest = error.rpartition(_PATH_FOLLOWS)
    path = _PATH.fullmatch(rest) if found else None
    if path is None:
        return "", error
    said = what.replace("`", "")
    return path[1], f"{said[:1].lower()}{said[1:]}"


def without_faulty(kind_type: type, document: Any, paths: Iterable[str] = ()) -> Any:
    """A copy of a body that lacks the values which are of the wrong type, and those at these paths: the rest of it may
    be read. Elements of lists keep their places: where one is wrong the list is left out."""
    kept = copy.deepcopy(document)
    if not has_more_values(document, VALUES_COMPARED_MAX):
        _, validator = _compiled(kind_type)
        for error in islice(validator.iter_errors(document), FAULTS_MAX):
            if isinstance(error.kind, _OF_VALUES):
                _leave_out(kept, list(error.instance_path))
    for path in paths:
        leave_out(kept, path)
    return kept


def leave_out(document: Any, path: str) -> None:
    """Take the value at a path out of a body, or the list that it is an element of."""
    _leave_out(document, [int(one[1:-1]) if one.startswith("[") else one for one in _STEPS.findall(path)])


def _leave_out(document: Any, path: list[str | int]) -> None:
    while path and isinstance(path[-1], int):
        path.pop()
    for step in path[:-1]:
        if isinstance(document, list) and isinstance(step, int) and step < len(document):
            document = document[step]
        else:
            document = document.get(step) if isinstance(document, dict) else None
    if path and isinstance(document, dict):
        document.pop(str(path[-1]), None)


def schema_components(
    types: Iterable[type], ref_template: str = "#/$defs/{name}"
) -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]]]:
    """The JSON schemas of these types and their parts; the API validates with the schemas that it publishes."""
    roots, components = msgspec.json.schema_components(types, schema_hook=_any_value, ref_template=ref_template)
    return list(roots), components


def _any_value(_: type) -> dict[str, Any]:
    return {"description": "Any JSON value."}


@cache
def _compiled(kind_type: type) -> tuple[dict[str, Any], Draft202012Validator]:
    (root,), components = schema_components([kind_type])
    schema = {**root, "$defs": components}
    return schema, Draft202012Validator(schema)


def _explain(schema: dict[str, Any], error: ValidationError) -> Iterator[tuple[str, str]]:
    path = list(error.instance_path)
    match error.kind:
        case ValidationErrorKind.AdditionalProperties(unexpected):
            known = _known_fields(schema, error.schema_path)
            yield from ((dotted([*path, name]), _unknown(name, known)) for name in unexpected)
        case ValidationErrorKind.Required(property=name):
            yield dotted([*path, name]), "is required"
        case ValidationErrorKind.Type(types):
            yield dotted(path), _wrong_type(types, path, error.instance)
        case ValidationErrorKind.AnyOf(context):
            yield from _explain_any_of(schema, path, context, error.instance)
        case ValidationErrorKind.Enum(options):
            yield dotted(path), f"must be one of {', '.join(map(str, options))}, got {_got(path, error.instance)}"
        case _:
            said = "is not as it should be" if in_environment(path) else error.message
            yield dotted(path), _shortened(said, 4 * VALUE_CHARS_MAX)


def _explain_any_of(
    schema: dict[str, Any], path: list[str | int], branches: list[list[ValidationError]], value: Any
) -> Iterator[tuple[str, str]]:
    """Report the faults inside the alternative with the right type; without one, report the accepted types."""
    for errors in branches:
        if all(len(list(error.instance_path)) > len(path) for error in errors):
            yield from (fault for error in errors for fault in _explain(schema, error))
            return
        if not any(isinstance(error.kind, ValidationErrorKind.Type) for error in errors):
            yield from (fault for error in errors for fault in _explain(schema, error))
            return
    types = [name for errors in branches for error in errors for name in getattr(error.kind, "types", ())]
    yield dotted(path), _wrong_type(list(dict.fromkeys(types)), path, value)


def _known_fields(schema: dict[str, Any], schema_path: Sequence[str | int]) -> list[str]:
    """The fields of the object whose `additionalProperties` this path of the schema names."""
    here: Any = schema
    for step in list(schema_path)[:-1]:
        here = here.get(step) if isinstance(here, dict) else None
    return list(here.get("properties", ())) if isinstance(here, dict) else []


def _unknown(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name[:VALUE_CHARS_MAX], known, n=1)
    return f"unknown field; did you mean {close[0]}?" if close else "unknown field"


def _wrong_type(types: Sequence[str], path: Sequence[str | int], value: Any) -> str:
    # Every integer is a number, so naming both would only puzzle.
    wanted = [_TYPE_WORDS.get(name, name) for name in types if not (name == "integer" and "number" in types)]
    return f"must be {' or '.join(wanted)}, got {_got(path, value)}"


def _got(path: Sequence[str | int], value: Any) -> str:
    """A value that is wrong, quoted; of environment variables only what kind of value it is."""
    return _kind(value) if in_environment(path) else _shown(value)


def _kind(value: Any) -> str:
    match value:
        case bool():
            return "a boolean"
        case int() | float():
            return "a number"
        case str():
            return "a string"
        case _:
            return _shown(value)


def _shown(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return f"the boolean {str(value).lower()}"
        case int() if value.bit_length() > 256:
            return "a very large number"
        case int() | float():
            return f"the number {_shortened(str(value), VALUE_CHARS_MAX)}"
        case str():
            return f"the string {_shortened(value, VALUE_CHARS_MAX)!r}"
        case dict():
            return "an object"
        case _:
            return "a list"


def _shortened(text: str, chars_max: int) -> str:
    return text if len(text) <= chars_max else text[: chars_max - 1] + "…"


def dotted(path: Sequence[str | int]) -> str:
    """A path as people write it: `spec.taints[0].key`, and brackets around names that have dots of their own."""
    text = ""
    for step in path:
        # Field names have no equals sign; a variable written as NAME=VALUE would reveal its value here.
        name = variable_name(step) if isinstance(step, str) else str(step)
        if isinstance(step, str) and name.isidentifier():
            text += f".{_shortened(name, VALUE_CHARS_MAX)}" if text else _shortened(name, VALUE_CHARS_MAX)
        else:
            text += f"[{_shortened(name, VALUE_CHARS_MAX)}]"
    return _shortened(text, PATH_CHARS_MAX)
