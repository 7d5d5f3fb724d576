"""Idempotency keys: the request id that a client chose, in its scope, and a fingerprint of the request's body."""

from __future__ import annotations

from typing import NamedTuple


class RequestKey(NamedTuple):
    """The request id of a client in its scope."""

    scope: str  # tenant and verb
    request_id: str


class IdempotencyKey(NamedTuple):
    """A request key with the fingerprint of the request's body, which detects its reuse."""

    key: RequestKey
    fingerprint: str
