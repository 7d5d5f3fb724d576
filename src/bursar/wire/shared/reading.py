"""Strict reading: a plain document becomes a checked object, or a refusal that names every fault."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import msgspec

from bursar.core.values.refusal import Cause, Code, Refusal, field_fault, invalid
from bursar.wire.shared.bounds import has_more_values
from bursar.wire.shared.faults import VALUES_COMPARED_MAX, all_faults, leave_out, told_by, without_faulty
from bursar.wire.shared.kind import Kind, Object
from bursar.wire.shared.meta import meta_faults

DEPTH_MAX = 64
FAULTY_MAX = 8  # decoding attempts with values of wrong types removed
CAUSES_MAX = 50
CAUSES_IN_MESSAGE_MAX = 10


@dataclass(frozen=True, slots=True)
class ObjectPath:
    """The path that a body is sent to, and how strictly its fields are read."""

    namespace: str = ""
    name: str = ""  # empty in the path of a collection
    is_new: bool = False  # whether the path names an object that is about to be created
    strictness: str = "Strict"  # or Warn, Ignore
    suffix: Callable[[], str] = str  # completes metadata.generateName


class Body:
    """A decoded body: the object, the request_id found in it, and what was ignored."""

    __slots__ = ("object", "request_id", "warnings")

    def __init__(self, one: Object, request_id: Any = "", warnings: tuple[str, ...] = ()) -> None:
        self.object = one
        self.request_id = request_id
        self.warnings = warnings


def read(kind: Kind, document: Any, at: ObjectPath) -> Body | Refusal:
    """Convert a plain document to a checked object. Nulls mean "not given"; unknown fields are refused, reported, or
    ignored."""
    body = _convert(kind, document, at)
    return body if isinstance(body, Refusal) else checked(kind, body, at)


def checked(kind: Kind, body: Body, at: ObjectPath) -> Body | Refusal:
    """Check names and namespaces, and the faults of the kind."""
    causes = _faults(kind, body.object, at)
    return _refused(kind, causes) if causes else body


def too_deep(value: Any, depth: int = 0) -> bool:
    if depth > DEPTH_MAX:
        return True
    if isinstance(value, dict):
        return any(too_deep(one, depth + 1) for one in value.values())
    return isinstance(value, list) and any(too_deep(one, depth + 1) for one in value)


def _convert(kind: Kind, document: Any, at: ObjectPath) -> Body | Refusal:
    if not isinstance(document, dict):
        return invalid("the body must be an object")
    document = _given(kind.type, document)
    request_id = document.pop("request_id", "")
    strictness = at.strictness
    if strictness not in ("Strict", "Warn", "Ignore"):
        return invalid("fieldValidation must be Strict, Warn or Ignore")
    dropped: list[str] = []
    if strictness != "Strict":
        document = _prune(kind.type, document, "", dropped)
    try:
        one = msgspec.convert(document, kind.type)
    except (msgspec.ValidationError, RecursionError) as error:
        return _faulty(kind, document, at, str(error))
    warnings = tuple(f'unknown field "{path}"' for path in dropped) if strictness == "Warn" else ()
    return Body(one, request_id, warnings)


def _faulty(kind: Kind, document: Any, at: ObjectPath, error: str) -> Refusal:
    """List every fault: wrong types and, as far as the rest can be decoded, faults of values."""
    faults = dict(all_faults(kind.type, document) or [told_by(error)])
    readable = None if has_more_values(document, VALUES_COMPARED_MAX) else _readable(kind, document, faults)
    causes = [Cause("FieldValueInvalid", message, field=path) for path, message in faults.items()]
    if readable is not None:
        # Values that were removed to decode the rest are not missing, and their list elements are incomplete.
        torn = {_element(path) for path in faults} - {""}
        others = _faults(kind, readable, at)
        causes += [one for one in others if one.field not in faults and _element(one.field) not in torn]
    return _refused(kind, causes)


def _element(path: str) -> str:
    """The list element that contains a path; empty if there is none."""
    return path[: path.rfind("]") + 1] if "]." in path else ""


def _readable(kind: Kind, document: Any, faults: dict[str, str]) -> Object | None:
    """Decode a body without its values of wrong types; faults that only decoding reveals are added."""
    try:
        kept = without_faulty(kind.type, _prune(kind.type, document, "", []), faults)
        for _ in range(FAULTY_MAX):
            try:
                return msgspec.convert(kept, kind.type)
            except msgspec.ValidationError as error:
                path, message = told_by(str(error))
                if not path or path in faults:
                    return None
                faults[path] = message
                leave_out(kept, path)
    except (ValueError, TypeError, OverflowError, RecursionError):
        return None
    return None


def _refused(kind: Kind, causes: list[Cause]) -> Refusal:
    """One refusal with all faults of an object, bounded in length."""
    shown = causes[:CAUSES_IN_MESSAGE_MAX]
    listed = "; ".join(f"{one.field}: {one.message}" if one.field else one.message for one in shown)
    more = f" (and {len(causes) - len(shown)} more)" if len(causes) > len(shown) else ""
    return Refusal(Code.INVALID, f"{kind.name} is invalid: {listed}{more}", causes=tuple(causes[:CAUSES_MAX]))


def _given(kind_type: Any, value: Any) -> Any:
    """Remove fields that are null. In a map, null is refused as a value: a selector that lost an entry would match more
    than was meant."""
    struct = _struct_in(kind_type)
    if struct is not None and isinstance(value, dict):
        types = _fields_of(struct)
        return {name: _given(types.get(name), one) for name, one in value.items() if one is not None}
    if isinstance(value, list) and (inner := _list_item(kind_type)) is not None:
        return [_given(inner, one) for one in value]
    return value


def without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: without_nulls(one) for name, one in value.items() if one is not None}
    return [without_nulls(one) for one in value] if isinstance(value, list) else value


def _prune(kind_type: Any, value: Any, path: str, dropped: list[str]) -> Any:
    """Remove unknown fields, and collect their names."""
    struct = _struct_in(kind_type)
    if struct is not None and isinstance(value, dict):
        fields = _fields_of(struct)
        kept: dict[str, Any] = {}
        for name, one in value.items():
            where = f"{path}.{name}" if path else name
            if name in fields:
                kept[name] = _prune(fields[name], one, where, dropped)
            else:
                dropped.append(where)
        return kept
    if isinstance(value, list) and (inner := _list_item(kind_type)) is not None:
        return [_prune(inner, one, f"{path}[{index}]", dropped) for index, one in enumerate(value)]
    return value


@cache
def _fields_of(struct: Any) -> dict[str, Any]:
    """Cached types of a struct's fields by wire name; looking them up is slow."""
    return {one.encode_name: one.type for one in msgspec.structs.fields(struct)}


def _struct_in(kind_type: Any) -> Any:
    options = getattr(kind_type, "__args__", None) if not isinstance(kind_type, type) else None
    for one in options or (kind_type,):
        if isinstance(one, type) and issubclass(one, msgspec.Struct):
            return one
    return None


def _list_item(kind_type: Any) -> Any:
    for one in (kind_type, *getattr(kind_type, "__args__", ())):
        if getattr(one, "__origin__", None) is list:
            return one.__args__[0]
    return None


def _faults(kind: Kind, one: Object, at: ObjectPath) -> list[Cause]:
    return [*_identify(kind, one, at), *meta_faults(one.metadata), *kind.check(one)]


def _identify(kind: Kind, one: Object, at: ObjectPath) -> list[Cause]:
    """Fill in the name and namespace of the path; a body that contradicts them is refused."""
    causes: list[Cause] = []
    metadata = one.metadata
    if one.kind and one.kind != kind.name:
        causes.append(field_fault("kind", f"is {one.kind[:63]!r}, but this path is for {kind.name}"))
    if one.api_version and one.api_version != kind.api_version:
        causes.append(field_fault("apiVersion", f"is {one.api_version[:63]!r}, must be {kind.api_version}"))
    namespace = at.namespace
    if metadata.namespace and kind.namespaced and metadata.namespace != namespace:
        causes.append(field_fault("metadata.namespace", f"is {metadata.namespace[:63]!r}, the path says {namespace!r}"))
    if kind.namespaced:
        metadata.namespace = namespace
    elif metadata.namespace:
        causes.append(field_fault("metadata.namespace", f"{kind.plural} have no namespace"))
    return causes + _name(kind, metadata, at, kind.derived_name(one))


def _name(kind: Kind, metadata: Any, at: ObjectPath, derived: str) -> list[Cause]:
    if at.name:
        if metadata.name and metadata.name != at.name:
            return [field_fault("metadata.name", f"is {metadata.name[:63]!r}, the path says {at.name!r}")]
        metadata.name = at.name
        if not at.is_new:
            return []  # The name of an existing object is valid under any rules.
    if not metadata.name and not metadata.generate_name and derived:
        metadata.name = derived
    if not metadata.name and metadata.generate_name:
        metadata.name = metadata.generate_name + at.suffix()
    if not metadata.name:
        return [field_fault("metadata.name", "is required; or give generateName")]
    return [field_fault("metadata.name", fault) for fault in kind.name_faults(metadata.name)]
