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
from bursar.core.values.refusal import Cause, Code, Refusal, field_fault, invalid
from bursar.wire.shared import protobuf, yaml_text
from bursar.wire.shared.bounds import (
    VALUES_MAX,
    RepeatedKey,
    TooManyValues,
    has_more_values_json,
    require_unique_keys,
)
from bursar.wire.shared.faults import dotted
from bursar.wire.shared.kind import Kind
from bursar.wire.shared.reading import DEPTH_MAX, Body, ObjectPath, checked, read, too_deep

YAML = ("application/yaml", "application/x-yaml", "text/yaml")
PROTOBUF = "application/vnd.kubernetes.protobuf"
REQUEST_ID_CHARS_MAX = 128
# Longer bodies are read in a thread.
INLINE_BYTES_MAX = 16_384
# Bodies that are not plain, valid objects take longer: all faults are collected.
INLINE_SLOW_BYTES_MAX = 2_048
NULS_SHOWN_MAX = 10
# Query parameters without effect on the result.
_NO_MATTER = ("pretty", "fieldManager", "dryRun")
_NUL_ESCAPED = b"\\u0000"  # the only spelling of NUL in JSON
T = TypeVar("T")

_SUFFIX = "bcdfghjklmnpqrstvwxz2456789"


@cache
def _decoder(kind_type: type) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind_type)


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
    return checked(kind, Body(one), path_of(call))


def _read_other(call: Call, kind: Kind) -> Body | Refusal:
    document = read_document(call)
    if isinstance(document, Refusal):
        return document
    return read(kind, document, path_of(call))


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


def path_of(call: Call, *, is_new: bool = False) -> ObjectPath:
    """The path of a call's object, with its field validation."""
    strictness = call.query.get("fieldValidation", "Strict") or "Strict"
    namespace, name = call.parameters.get("namespace", ""), call.parameters.get("name", "")
    return ObjectPath(namespace, name, is_new, strictness, _suffix)


def _suffix() -> str:
    return "".join(secrets.choice(_SUFFIX) for _ in range(5))


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
