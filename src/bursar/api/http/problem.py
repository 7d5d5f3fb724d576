"""Refusals over HTTP: one table from code to status and reason, and Kubernetes' Status as the body."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from bursar.api.http.route import Answer
from bursar.core.values.refusal import Cause, Code, Refusal
from bursar.wire.kinds.registry import BY_PLURAL

_encode = msgspec.json.Encoder().encode

# code → (HTTP status, Kubernetes reason)
TABLE: dict[Code, tuple[int, str]] = {
    Code.INVALID: (400, "BadRequest"),
    Code.TOO_LARGE: (413, "RequestEntityTooLarge"),
    Code.URL_TOO_LONG: (414, "RequestURITooLong"),
    Code.HEADERS_TOO_LARGE: (431, "RequestHeaderFieldsTooLarge"),
    Code.UNSUPPORTED_MEDIA: (415, "UnsupportedMediaType"),
    Code.METHOD_NOT_ALLOWED: (405, "MethodNotAllowed"),
    Code.NOT_ACCEPTABLE: (406, "NotAcceptable"),
    Code.UNAUTHENTICATED: (401, "Unauthorized"),
    Code.FORBIDDEN: (403, "Forbidden"),
    Code.NOT_FOUND: (404, "NotFound"),
    Code.REQUEST_REUSED: (422, "Invalid"),
    Code.IMMUTABLE: (422, "Invalid"),
    Code.UNPROCESSABLE: (422, "Invalid"),
    Code.UNSATISFIABLE: (422, "Invalid"),
    Code.UNPRICED: (422, "Invalid"),
    Code.ALREADY_EXISTS: (409, "AlreadyExists"),
    Code.CONFLICT: (409, "Conflict"),
    Code.TERMINATING: (403, "Forbidden"),
    Code.IN_USE: (409, "Conflict"),
    Code.DECIDED: (409, "Conflict"),
    Code.ENDED: (409, "Conflict"),
    Code.GONE: (410, "Expired"),
    Code.QUOTA_EXCEEDED: (403, "Forbidden"),
    Code.NO_CAPACITY: (409, "Conflict"),
    Code.STALE: (409, "Conflict"),
    Code.FENCED: (409, "Conflict"),
    Code.ACCOUNT_INACTIVE: (403, "Forbidden"),
    Code.INSUFFICIENT_CREDIT: (403, "Forbidden"),
    Code.CONCURRENCY_EXCEEDED: (403, "Forbidden"),
    Code.DAILY_CAP_EXCEEDED: (403, "Forbidden"),
    Code.SPEND_RATE_EXCEEDED: (429, "TooManyRequests"),
    Code.TIMEOUT: (408, "RequestTimeout"),
    Code.RATE_LIMITED: (429, "TooManyRequests"),
    Code.OVERLOADED: (503, "ServiceUnavailable"),
    Code.UNAVAILABLE: (503, "ServiceUnavailable"),
}

CAUSES_MAX = 50
NAME_CHARS_MAX = 320  # the longest name, NAME@UID of a deleted tenant included


def status_of(refusal: Refusal, resource: str = "") -> tuple[int, str]:
    if refusal.code is Code.QUOTA_EXCEEDED:
        kind = BY_PLURAL.get(resource)
        return TABLE[refusal.code] if kind is not None and kind.forbidden_by_quota else (409, "Conflict")
    return TABLE[refusal.code]


def body_of(refusal: Refusal, request_id: str, *, resource: str = "", kind: str = "", name: str = "") -> dict[str, Any]:
    """Kubernetes' Status, with our code, hint and numbers among the details.

    As in Kubernetes `details.kind` is the kind of what is invalid (`Job`), and else the resource (`jobs`): kubectl
    prints "The Job "train" is invalid".
    """
    status, reason = status_of(refusal, resource)
    details: dict[str, Any] = {"code": refusal.code}
    if name:
        details["name"] = name[:NAME_CHARS_MAX]
    if resource:
        details["kind"] = kind if kind and reason == "Invalid" else resource
    if refusal.hint:
        details["hint"] = refusal.hint
    if refusal.causes:
        details["causes"] = [_cause(cause) for cause in refusal.causes[:CAUSES_MAX]]
        details |= _numbers(refusal.causes[0])
    if refusal.retry_after_seconds:
        details["retryAfterSeconds"] = refusal.retry_after_seconds
    if refusal.seconds_left is not None:
        details |= {"final": True, "seconds_left": refusal.seconds_left}
    details["requestId"] = request_id
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": refusal.message,
        "reason": reason,
        "details": details,
        "code": status,
    }


def _cause(cause: Cause) -> dict[str, str]:
    whole = {
        "reason": cause.reason,
        "message": cause.message,
        "field": cause.field,
        "scope": cause.scope,
        **_numbers(cause),
    }
    return {name: value for name, value in whole.items() if value}


def _numbers(cause: Cause) -> dict[str, str]:
    if not cause.dimension:
        return {}
    return {
        "dimension": cause.dimension,
        "scope": cause.scope,
        "limit": cause.limit,
        "current_usage": cause.current_usage,
        "requested_delta": cause.requested_delta,
    }


def answer_of(
    refusal: Refusal,
    request_id: str,
    *,
    resource: str = "",
    kind: str = "",
    name: str = "",
    headers: Mapping[str, str] | None = None,
) -> Answer:
    status, _ = status_of(refusal, resource)
    extra = dict(headers or {})
    if refusal.retry_after_seconds:
        extra["Retry-After"] = str(refusal.retry_after_seconds)
    if status == 408:
        # Otherwise the rest of the body would be parsed as the next request.
        extra["Connection"] = "close"
    if status == 401:
        extra["WWW-Authenticate"] = 'Bearer realm="bursar"'
    body = body_of(refusal, request_id, resource=resource, kind=kind, name=name)
    return Answer(status, _encode(body), headers=extra)
