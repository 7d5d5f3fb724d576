"""Refusals over gRPC: one table from refusal code to gRPC status, and the details in the trailing metadata."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import grpc
from google.protobuf.any_pb2 import Any as Packed

from bursar.core.values.refusal import Code
from bursar.wire.scheduler.v1 import admin_pb2 as pb

STATUS: dict[Code, grpc.StatusCode] = {
    Code.INVALID: grpc.StatusCode.INVALID_ARGUMENT,
    Code.TOO_LARGE: grpc.StatusCode.INVALID_ARGUMENT,
    Code.URL_TOO_LONG: grpc.StatusCode.INVALID_ARGUMENT,
    Code.HEADERS_TOO_LARGE: grpc.StatusCode.INVALID_ARGUMENT,
    Code.UNSUPPORTED_MEDIA: grpc.StatusCode.INVALID_ARGUMENT,
    Code.METHOD_NOT_ALLOWED: grpc.StatusCode.UNIMPLEMENTED,
    Code.NOT_ACCEPTABLE: grpc.StatusCode.INVALID_ARGUMENT,
    Code.UNAUTHENTICATED: grpc.StatusCode.UNAUTHENTICATED,
    Code.FORBIDDEN: grpc.StatusCode.PERMISSION_DENIED,
    Code.NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    Code.REQUEST_REUSED: grpc.StatusCode.FAILED_PRECONDITION,
    Code.IMMUTABLE: grpc.StatusCode.FAILED_PRECONDITION,
    Code.UNPROCESSABLE: grpc.StatusCode.FAILED_PRECONDITION,
    Code.UNSATISFIABLE: grpc.StatusCode.FAILED_PRECONDITION,
    Code.UNPRICED: grpc.StatusCode.FAILED_PRECONDITION,
    Code.ALREADY_EXISTS: grpc.StatusCode.ALREADY_EXISTS,
    Code.CONFLICT: grpc.StatusCode.ABORTED,
    Code.TERMINATING: grpc.StatusCode.FAILED_PRECONDITION,
    Code.IN_USE: grpc.StatusCode.FAILED_PRECONDITION,
    Code.DECIDED: grpc.StatusCode.FAILED_PRECONDITION,
    Code.ENDED: grpc.StatusCode.FAILED_PRECONDITION,
    Code.GONE: grpc.StatusCode.OUT_OF_RANGE,
    Code.QUOTA_EXCEEDED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Code.NO_CAPACITY: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Code.STALE: grpc.StatusCode.ABORTED,
    Code.FENCED: grpc.StatusCode.ABORTED,
    Code.ACCOUNT_INACTIVE: grpc.StatusCode.FAILED_PRECONDITION,
    Code.INSUFFICIENT_CREDIT: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Code.CONCURRENCY_EXCEEDED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Code.DAILY_CAP_EXCEEDED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Code.SPEND_RATE_EXCEEDED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Code.TIMEOUT: grpc.StatusCode.DEADLINE_EXCEEDED,
    Code.RATE_LIMITED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Code.OVERLOADED: grpc.StatusCode.UNAVAILABLE,
    Code.UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
}

DETAILS: Final = "grpc-status-details-bin"
# Clients accept 8 KiB of metadata. It holds message and hint as text, where a non-ASCII byte takes three, and the whole
# refusal as base64 details, where three bytes take four.
TEXT_BYTES_MAX: Final = 600
CAUSES_BYTES_MAX: Final = 1500

_STATUS_BY_CODE: Final = {str(code): status for code, status in STATUS.items()}
_CAUSE_FIELDS: Final = tuple(pb.RefusalCause.DESCRIPTOR.fields_by_name)


def status_of(document: Mapping[str, Any]) -> grpc.StatusCode:
    """The gRPC status of a REST `Status`; INTERNAL if it is not a refusal."""
    code = str((document.get("details") or {}).get("code", ""))
    return _STATUS_BY_CODE.get(code, grpc.StatusCode.INTERNAL)


def refusal_of(document: Mapping[str, Any]) -> pb.Refusal:
    """The refusal in a REST `Status`, with as many causes as fit."""
    details = document.get("details") or {}
    refusal = pb.Refusal(
        code=str(details.get("code", "internal")),
        message=_short(document.get("message", "")),
        hint=_short(details.get("hint", "")),
        retry_after_seconds=int(details.get("retryAfterSeconds", 0)),
        request_id=str(details.get("requestId", "")),
    )
    capacity = CAUSES_BYTES_MAX
    for one in details.get("causes") or ():
        cause = pb.RefusalCause(**{name: str(one[name]) for name in _CAUSE_FIELDS if name in one})
        capacity -= cause.ByteSize()
        if capacity < 0:
            break
        refusal.causes.append(cause)
    return refusal


def _short(text: str) -> str:
    """The text, cut to TEXT_BYTES_MAX."""
    return text.encode()[:TEXT_BYTES_MAX].decode(errors="ignore")


def sentence_of(refusal: pb.Refusal) -> str:
    """The message, and the hint if the message does not contain it."""
    hint = "" if refusal.hint in refusal.message else refusal.hint
    return f"{refusal.message}. {hint}".rstrip(". ")


def details_of(status: grpc.StatusCode, refusal: pb.Refusal) -> bytes:
    """The packed `google.rpc.Status` that gRPC clients read as error details."""
    packed = Packed()
    packed.Pack(refusal)
    number: int = status.value[0]
    return pb.ErrorStatus(code=number, message=refusal.message, details=[packed]).SerializeToString()
