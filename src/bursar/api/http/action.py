"""Bodies of actions such as preempt, drain and cancel, which are no objects, and common refusals."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from bursar.api.http.body import dry_run, idempotency_key_of, read_document
from bursar.api.http.route import Call
from bursar.core.values.access import reach
from bursar.core.values.idempotency import IdempotencyKey
from bursar.core.values.refusal import Cause, Code, Refusal, field_fault, invalid
from bursar.wire.shared.faults import all_faults

GRACE_SECONDS_MAX = 10**7
WORDS_CHARS_MAX = 1024

T = TypeVar("T", bound=msgspec.Struct)


def read_action(call: Call, wanted: type[T], what: str) -> tuple[T, IdempotencyKey | None, bool] | Refusal:
    """The body, its request id, and whether it is only to be tried."""
    document = read_document(call) if call.body.strip() else {}
    if isinstance(document, Refusal):
        return document
    request_id = document.pop("request_id", "") if isinstance(document, dict) else ""
    idempotency_key, dry = idempotency_key_of(call, request_id), dry_run(call)
    if isinstance(idempotency_key, Refusal):
        return idempotency_key
    if isinstance(dry, Refusal):
        return dry
    try:
        return msgspec.convert(document, wanted), idempotency_key, dry
    except msgspec.ValidationError as error:
        faults = all_faults(wanted, document) or [("", str(error))]
        return faulty(what, [field_fault(path, message) for path, message in faults])


def faulty(what: str, causes: list[Cause]) -> Refusal:
    listed = "; ".join(f"{one.field}: {one.message}" if one.field else one.message for one in causes)
    return invalid(f"the {what} is invalid: {listed}", *causes)


def words_faults(**texts: str) -> list[Cause]:
    return [
        field_fault(name, f"must have at most {WORDS_CHARS_MAX} characters")
        for name, text in texts.items()
        if len(text) > WORDS_CHARS_MAX
    ]


def grace_faults(seconds: int) -> list[Cause]:
    if 0 <= seconds < GRACE_SECONDS_MAX:
        return []
    return [field_fault("gracePeriodSeconds", "must be a number of seconds, not negative")]


def seen_whole(call: Call, subject: str) -> Refusal | None:
    """Refuse callers who see only some tenants what is not divided by tenants."""
    if reach(call.identity).everything:
        return None
    return Refusal(
        Code.FORBIDDEN,
        f"{call.identity.user} sees some tenants, and {subject} is that of all",
        "Use a token for all tenants.",
    )
