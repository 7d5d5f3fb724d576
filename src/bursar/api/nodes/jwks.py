"""Handlers of the lease-signing keys: the public key set (JWKS), and their rotation."""

from __future__ import annotations

from typing import Any

import msgspec

from bursar.api.http.action import faulty, read_action, words_faults
from bursar.api.http.route import Answer, Call, Outcome
from bursar.core.values.refusal import Refusal, field_fault, invalid
from bursar.ops.nodes import signing as ops
from bursar.wire.shared.document import encode

# A client with an older cache meets an unknown key, and reads the key set again.
CACHE = {"Cache-Control": "public, max-age=60"}
OVERLAP_SECONDS_MAX = 30 * 86_400


class KeySet(msgspec.Struct):
    """The public keys (RFC 7517), oldest first. The last one signs."""

    keys: list[dict[str, Any]]


class RotateKey(msgspec.Struct, rename="camel", forbid_unknown_fields=True):
    """A key rotation. Signatures of older keys stay valid for the overlap; 0 if the keys may have been stolen."""

    overlap_seconds: int = int(ops.OVERLAP_SECONDS)
    reason: str = ""


class RotatedKey(msgspec.Struct):
    """The key that signs from now on, and all valid keys."""

    key: str
    believed: list[str]


async def show(call: Call) -> Outcome:
    ring = await call.context.runtime.signing.ring()
    return Answer(200, encode(KeySet(ring.jwks()["keys"])), headers=CACHE)


async def rotate(call: Call) -> Outcome:
    """Rotate the signing key."""
    asked = read_action(call, RotateKey, "rotation")
    if isinstance(asked, Refusal):
        return asked
    wanted, idempotency_key, dry = asked
    if dry:
        return invalid("dryRun is not supported here")
    causes = words_faults(reason=wanted.reason)
    if not 0 <= wanted.overlap_seconds <= OVERLAP_SECONDS_MAX:
        causes.append(field_fault("overlapSeconds", f"must be between 0 and {OVERLAP_SECONDS_MAX}"))
    if causes:
        return faulty("rotation", causes)
    context = call.context
    by = f"{call.identity.actor}: {wanted.reason}" if wanted.reason else call.identity.actor
    ring = await ops.rotate(
        context.database, by=by, overlap_seconds=wanted.overlap_seconds, idempotency_key=idempotency_key
    )
    context.runtime.signing.forget()
    if isinstance(ring, Refusal):
        return ring
    return Answer(201, encode(RotatedKey(ring.ids[-1], list(ring.ids))))
