"""Objects as bytes: the stored form, and the rendering with a resourceVersion.

A stored document contains metadata and spec; the status is stored beside it, and the resourceVersion is in neither.
Rendering splices three byte strings without decoding them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec import UNSET

from bursar.wire.shared.kind import Kind, Object

_encoder = msgspec.json.Encoder()
_METADATA = b'"metadata":{'
EMPTY = b"{}"


def encode(value: Any) -> bytes:
    return _encoder.encode(value)


def encode_object(kind: Kind, one: Object) -> bytes:
    """Encode the stored document, without fields that are stored elsewhere or never."""
    one.api_version = kind.api_version
    one.kind = kind.name
    metadata = one.metadata
    metadata.resource_version = UNSET
    metadata.managed_fields = UNSET
    metadata.self_link = UNSET
    if hasattr(one, "status"):
        one.status = UNSET
    return _encoder.encode(one)


def render(doc: bytes, status: bytes, revision: int) -> bytes:
    """Render an object for clients."""
    # apiVersion and kind, which come first, do not contain this text.
    at = doc.index(_METADATA) + len(_METADATA)
    version = b'"resourceVersion":"%d",' % revision
    if status == EMPTY:
        return b"".join((doc[:at], version, doc[at:]))
    return b"".join((doc[:at], version, doc[at:-1], b',"status":', status, b"}"))


def render_list(
    kind: Kind, items: Iterable[bytes], revision: int, continue_token: str = "", remaining: int = 0
) -> bytes:
    meta: dict[str, Any] = {"resourceVersion": str(revision)}
    if continue_token:
        meta["continue"] = continue_token
        if remaining:
            meta["remainingItemCount"] = remaining
    head = b'{"kind":"%sList","apiVersion":"%s","metadata":' % (kind.name.encode(), kind.api_version.encode())
    return b"".join((head, _encoder.encode(meta), b',"items":[', b",".join(items), b"]}"))


class _Ending(msgspec.Struct, rename="camel"):
    deletion_timestamp: str = ""
    finalizers: tuple[str, ...] = ()
    generation: int = 0


class _Metadata(msgspec.Struct):
    metadata: _Ending


_ending = msgspec.json.Decoder(_Metadata)


def is_ending(doc: bytes) -> bool:
    """Whether an object is marked for deletion and waits for its work to end or for its finalizers."""
    # Most documents do not contain this text, and need not be decoded.
    return b'"deletionTimestamp"' in doc and bool(_ending.decode(doc).metadata.deletion_timestamp)


def deleted_at(doc: bytes) -> str:
    """The deletion timestamp of a stored object; empty if it is not being deleted."""
    return _ending.decode(doc).metadata.deletion_timestamp


def finalizers_of(doc: bytes) -> tuple[str, ...]:
    """The finalizers of a stored object: it is kept until the list is empty."""
    return _ending.decode(doc).metadata.finalizers if b'"finalizers":["' in doc else ()


def generation_of(doc: bytes) -> int:
    """The number of versions of a stored object's spec."""
    return _ending.decode(doc).metadata.generation


def decode(doc: bytes, status: bytes, revision: int) -> dict[str, Any]:
    """Decode an object to a plain document, the form that patches are applied to."""
    document: dict[str, Any] = msgspec.json.decode(render(doc, status, revision))
    return document
