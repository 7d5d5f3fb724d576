"""Request bodies: decoding to a checked object, or to a refusal that names every fault."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Callable, Iterator
from functools import cache
from itertools import islice
from typing import Any, TypeVar
from urllib.parse import urlencode

import msgspec

from bursar.api.http.route import JSON, UNREAD, Call
from bursar.core.values.idempotency import IdempotencyKey, RequestKey
from bursar.core.values.names import dns_subdomain
from bursar.core.values.refusal import Cause, Code, Refusal, field_fault, invalid
from bursar.wire.shared import protobuf, yaml_text
from bursar.wire.shared.bounds import (
    VALUES_MAX,
    RepeatedKey,
    TooManyValues,
    has_more_values,
    has_more_values_json,
    require_unique_keys,
)
from bursar.wire.shared.faults import VALUES_COMPARED_MAX, all_faults, dotted, leave_out, told_by, without_faulty
from bursar.wire.shared.kind import Kind, Object
from bursar.wire.shared.meta import API_VERSION, meta_faults

YAML = ("application/yaml", "application/x-yaml", "text/yaml")
PROTOBUF = "application/vnd.kubernetes.protobuf"
REQUEST_ID_CHARS_MAX = 128
DEPTH_MAX = 64
# Longer bodies are read in a thread.
INLINE_BYTES_MAX = 16_384
# Bodies that are not plain, valid objects take longer: all faults are collected.
INLINE_SLOW_BYTES_MAX = 2_048
NULS_SHOWN_MAX = 10
FAULTY_MAX = 8  # decoding attempts with values of wrong types removed
CAUSES_MAX = 50
CAUSES_IN_MESSAGE_MAX = 10
# Query parameters without effect on the result.
_NO_MATTER = ("pretty", "fieldManager", "dryRun")
_NUL_ESCAPED = b"\\u0000"  # the only spelling of NUL in JSON
T = TypeVar("T")

_SUFFIX = "bcdfghjklmnpqrstvwxz2456789"


@cache
def _decoder(kind_type: type) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind_type)


class Body:
    """A decoded body: the object, the request_id found in it, and what was ignored."""

    __slots__ = ("object", "request_id", "warnings")

    def __init__(self, one: Object, request_id: Any = "", warnings: tuple[str, ...] = ()) -> None:
        self.object = one
        self.request_id = request_id
        self.warnings = warnings


async def read_object(call: Call, kind: Kind) -> Body | Refusal:
    """Decode strictly in one pass; only a body that fails is read again, to name every fault or to be lenient."""
    if len(call.body) > INLINE_BYTES_MAX:
        return await _apart(call, read_object_now, call, kind)
    body = _read_plain(call, kind)
    if body is not None:
        return body
    if len(call.body) > INLINE_SLOW_BYTES_MAX:
        return await _apart(call, _read_other, call, kind)
    return _read_other(call, kind)


async def _apart(call: Call, read: Callable[..., T], *arguments: Any) -> T:
    """Read a body in a thread, so that the event loop is not blocked. One at a time, round robin over tenants."""
    async with call.context.bodies.taken(call.identity):
        return await asyncio.to_thread(read, *arguments)


def read_object_now(call: Call, kind: Kind) -> Body | Refusal:
    body = _read_plain(call, kind)
    return _read_other(call, kind) if body is None else body


def _read_plain(call: Call, kind: Kind) -> Body | Refusal | None:
    """Decode a JSON body with known fields of the right types; None for all other bodies."""
    if call.media_type != JSON or _NUL_ESCAPED in call.body:
        return None
    try:
        one = _decoder(kind.type).decode(call.body)
        require_unique_keys(call.body, one)
    except (msgspec.ValidationError, RecursionError):
        return None
    except RepeatedKey as error:
        return _repeated(error)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return invalid(f"the body is not valid JSON: {error}", hint="Check quotes, commas and brackets.")
    return _checked(call, kind, Body(one))


def _read_other(call: Call, kind: Kind) -> Body | Refusal:
    document = read_document(call)
    if isinstance(document, Refusal):
        return document
    body = convert(call, kind, document)
    return body if isinstance(body, Refusal) else _checked(call, kind, body)


def _repeated(error: RepeatedKey) -> Refusal:
    return invalid(str(error), hint="Give each key once: parsers disagree about which of two values counts.")


BYTES = "application/octet-stream"


def _too_many() -> Refusal:
    return invalid(
        f"the body has more than {VALUES_MAX} values",
        hint=f"Send at most {VALUES_MAX} values at once: numbers, strings, lists and objects, at any depth.",
    )


async def weigh(call: Call) -> Refusal | None:
    """Bound a long body before a handler reads it. A body that takes long to decode is decoded here, in a thread, for
    any route."""
    if BYTES in call.route.body_media:
        return None  # Not decoded as a document.
    if len(call.body) <= INLINE_BYTES_MAX and call.media_type != PROTOBUF and not _is_yaml(call.media_type):
        return None  # Too short for too many values.
    document = await _apart(call, _read_bounded, call)
    if isinstance(document, Refusal):
        return document
    call.document = document
    return None


def _read_bounded(call: Call) -> Any:
    # The readers of YAML and protobuf count values while they read.
    counts_itself = call.media_type == PROTOBUF or _is_yaml(call.media_type)
    return _too_many() if not counts_itself and has_more_values_json(call.body) else read_document(call)


async def read_beside(call: Call, read: Callable[[Call], T]) -> T:
    """Decode a body with this function, in a thread if the body is long."""
    return await _apart(call, read, call) if len(call.body) > INLINE_BYTES_MAX else read(call)


def _is_yaml(media: str) -> bool:
    return media in YAML or media == "application/apply-patch+yaml"


def read_document(call: Call) -> Any:
    """Decode the body to plain values, from any supported media type."""
    if call.document is not UNREAD:
        return call.document
    media = call.media_type
    try:
        if media == PROTOBUF:
            document = protobuf.decode(call.body)
        elif _is_yaml(media):
            document = _read_yaml(call.body)
        elif media == JSON or media.endswith("+json"):
            document = msgspec.json.decode(call.body)
            require_unique_keys(call.body, document)
        else:
            return Refusal(
                Code.UNSUPPORTED_MEDIA, f"a body of type {media[:80]!r} is not understood", "Send application/json."
            )
        if too_deep(document):
            return invalid(f"the body is nested deeper than {DEPTH_MAX} levels")
    except RecursionError:
        return invalid(f"the body is nested deeper than {DEPTH_MAX} levels")
    except RepeatedKey as error:
        return _repeated(error)
    except TooManyValues:
        return _too_many()
    except (msgspec.DecodeError, ArithmeticError, ValueError) as error:
        return invalid(f"the body is malformed: {str(error)[:300]}", hint="Check quotes, commas and brackets.")
    if (_NUL_ESCAPED in call.body or not media.endswith("json")) and (causes := _nul_faults(document)):
        return invalid("; ".join(f"{one.field}: {one.message}" for one in causes), *causes)
    return document


def _nul_faults(document: Any) -> list[Cause]:
    """Report NUL characters, which PostgreSQL's text cannot store, as faults of their fields."""
    paths = islice(_nul_paths(document, ()), NULS_SHOWN_MAX)
    return [field_fault(dotted(path).replace("\0", "\\0"), "must not contain a NUL character") for path in paths]


def _nul_paths(value: Any, path: tuple[str | int, ...]) -> Iterator[tuple[str | int, ...]]:
    if isinstance(value, str):
        if "\0" in value:
            yield path
        return
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for step, one in inside:
        if isinstance(step, str) and "\0" in step:
            yield (*path, step)
        yield from _nul_paths(one, (*path, step))


def _read_yaml(raw: bytes) -> Any:
    """Decode YAML, or JSON sent as YAML, as kubectl does. The YAML reader counts values before it builds them."""
    if has_more_values_json(raw):
        return yaml_text.decode(raw)
    try:
        document = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return yaml_text.decode(raw)
    require_unique_keys(raw, document)
    return document


def too_deep(value: Any, depth: int = 0) -> bool:
    if depth > DEPTH_MAX:
        return True
    if isinstance(value, dict):
        return any(too_deep(one, depth + 1) for one in value.values())
    return isinstance(value, list) and any(too_deep(one, depth + 1) for one in value)


def convert(call: Call, kind: Kind, document: Any) -> Body | Refusal:
    """Convert a plain document to an object: nulls mean "not given"; unknown fields are refused, reported, or
    ignored."""
    if not isinstance(document, dict):
        return invalid("the body must be an object")
    document = _given(kind.type, document)
    request_id = document.pop("request_id", "")
    strictness = call.query.get("fieldValidation", "Strict") or "Strict"
    if strictness not in ("Strict", "Warn", "Ignore"):
        return invalid("fieldValidation must be Strict, Warn or Ignore")
    dropped: list[str] = []
    if strictness != "Strict":
        document = prune(kind.type, document, "", dropped)
    try:
        one = msgspec.convert(document, kind.type)
    except (msgspec.ValidationError, RecursionError) as error:
        return faulty(call, kind, document, str(error))
    warnings = tuple(f'unknown field "{path}"' for path in dropped) if strictness == "Warn" else ()
    return Body(one, request_id, warnings)


def faulty(call: Call, kind: Kind, document: Any, error: str) -> Refusal:
    """List every fault: wrong types and, as far as the rest can be decoded, faults of values."""
    faults = dict(all_faults(kind.type, document) or [told_by(error)])
    readable = None if has_more_values(document, VALUES_COMPARED_MAX) else _readable(kind, document, faults)
    causes = [Cause("FieldValueInvalid", message, field=path) for path, message in faults.items()]
    if readable is not None:
        # Values that were removed to decode the rest are not missing, and their list elements are incomplete.
        torn = {_element(path) for path in faults} - {""}
        others = identify(call, kind, readable) + check(kind, readable)
        causes += [one for one in others if one.field not in faults and _element(one.field) not in torn]
    return faulty_causes(kind, causes)


def _element(path: str) -> str:
    """The list element that contains a path; empty if there is none."""
    return path[: path.rfind("]") + 1] if "]." in path else ""


def _readable(kind: Kind, document: Any, faults: dict[str, str]) -> Object | None:
    """Decode a body without its values of wrong types; faults that only decoding reveals are added."""
    try:
        kept = without_faulty(kind.type, prune(kind.type, document, "", []), faults)
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


def faulty_causes(kind: Kind, causes: list[Cause]) -> Refusal:
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


def prune(kind_type: Any, value: Any, path: str, dropped: list[str]) -> Any:
    """Remove unknown fields, and collect their names."""
    struct = _struct_in(kind_type)
    if struct is not None and isinstance(value, dict):
        fields = _fields_of(struct)
        kept: dict[str, Any] = {}
        for name, one in value.items():
            where = f"{path}.{name}" if path else name
            if name in fields:
                kept[name] = prune(fields[name], one, where, dropped)
            else:
                dropped.append(where)
        return kept
    if isinstance(value, list) and (inner := _list_item(kind_type)) is not None:
        return [prune(inner, one, f"{path}[{index}]", dropped) for index, one in enumerate(value)]
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


def _checked(call: Call, kind: Kind, body: Body) -> Body | Refusal:
    """Check names and namespaces, and the faults of the kind."""
    causes = identify(call, kind, body.object)
    causes += check(kind, body.object)
    return faulty_causes(kind, causes) if causes else body


def check(kind: Kind, one: Object) -> list[Cause]:
    return [*meta_faults(one.metadata), *kind.check(one)]


def identify(call: Call, kind: Kind, one: Object) -> list[Cause]:
    """Fill in the name and namespace of the path; a body that contradicts them is refused."""
    causes: list[Cause] = []
    metadata = one.metadata
    if one.kind and one.kind != kind.name:
        causes.append(field_fault("kind", f"is {one.kind[:63]!r}, but this path is for {kind.name}"))
    if one.api_version and one.api_version != API_VERSION:
        causes.append(field_fault("apiVersion", f"is {one.api_version[:63]!r}, must be {API_VERSION}"))
    namespace = call.parameters.get("namespace", "")
    if metadata.namespace and kind.namespaced and metadata.namespace != namespace:
        causes.append(field_fault("metadata.namespace", f"is {metadata.namespace[:63]!r}, the path says {namespace!r}"))
    if kind.namespaced:
        metadata.namespace = namespace
    elif metadata.namespace:
        causes.append(field_fault("metadata.namespace", f"{kind.plural} have no namespace"))
    return causes + _name(call, metadata, kind.derived_name(one))


def _name(call: Call, metadata: Any, derived: str) -> list[Cause]:
    named = call.parameters.get("name", "")
    if named:
        if metadata.name and metadata.name != named:
            return [field_fault("metadata.name", f"is {metadata.name[:63]!r}, the path says {named!r}")]
        # The name of an existing object is valid under any rules; rules of new names are in `name_faults`.
        metadata.name = named
        return []
    if not metadata.name and not metadata.generate_name and derived:
        metadata.name = derived
    if not metadata.name and metadata.generate_name:
        metadata.name = metadata.generate_name + "".join(secrets.choice(_SUFFIX) for _ in range(5))
    if not metadata.name:
        return [field_fault("metadata.name", "is required; or give generateName")]
    return name_faults(metadata)


def name_faults(metadata: Any) -> list[Cause]:
    """List the faults of a new object's name."""
    return [field_fault("metadata.name", fault) for fault in dns_subdomain(metadata.name)]


def idempotency_key_of(call: Call, in_body: Any = "") -> IdempotencyKey | Refusal | None:
    """The idempotency key of a request: its id, from the body or the Idempotency-Key header, and a hash of its content.

    A dry run claims no key: its answer depends on the current state, and the id is left for the real request.
    """
    request_id = in_body or call.headers.get("idempotency-key", "")
    if not request_id:
        return None
    plain = isinstance(request_id, str) and request_id.isascii() and request_id.isprintable()
    if not plain or len(request_id) > REQUEST_ID_CHARS_MAX:
        return invalid(f"request_id must be at most {REQUEST_ID_CHARS_MAX} printable ASCII characters")
    if dry_run(call) is True:
        return None
    path = "/".join((call.route.path, *call.parameters.values()))
    query = urlencode(sorted((name, value) for name, value in call.query.items() if name not in _NO_MATTER))
    # The caller is part of the hash: no caller gets the answer to another's request.
    parts = (call.route.method, path, query, call.identity.tenant, call.identity.actor)
    what = hashlib.sha256(b"\0".join((*(part.encode() for part in parts), call.body))).hexdigest()
    verb = f"{call.route.verb} token" if call.route.resource == "tokens" else call.route.verb
    return IdempotencyKey(RequestKey(f"{call.identity.tenant_uid or call.identity.actor}/{verb}", request_id), what)


def dry_run(call: Call) -> bool | Refusal:
    value = call.query.get("dryRun", "")
    if value not in ("", "All", "true", "false"):
        return invalid("dryRun must be All")
    return value in ("All", "true")
