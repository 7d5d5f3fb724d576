"""Events as they are sent: CloudEvents 1.0 in structured JSON form."""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec

MEDIA_TYPE = "application/cloudevents+json"
SOURCE = "/bursar/ledger"
BUDGET_SOURCE = "/bursar/budget"
REQUEST_SOURCE = "/bursar/approvals"
QUOTA_SOURCE = "/bursar/quota"
BUDGET = "budget."  # prefix of the types of notifications about a tenant's hours
REQUEST = "request."  # prefix of those about requests that pass approval gates
QUOTA = "quota."  # prefix of those about a tenant's limits
TYPE_PREFIX = "io.bursar."


class CloudEvent(msgspec.Struct):
    id: str
    type: str
    subject: str
    tenant: str
    time: str
    data: msgspec.Raw
    source: str = SOURCE
    specversion: str = "1.0"
    datacontenttype: str = "application/json"


_SOURCES = {QUOTA: QUOTA_SOURCE, BUDGET: BUDGET_SOURCE, REQUEST: REQUEST_SOURCE}

_encode = msgspec.json.Encoder().encode


def event_id(number: int, at: datetime) -> str:
    """The id of an event: the same in every delivery, and different after a restore from a backup."""
    return f"notice-{number}-{round(at.timestamp() * 1_000_000)}"


def cloud_event(number: int, type_: str, tenant: str, subject: str, data: bytes, at: datetime) -> bytes:
    time = at.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
    source = next((source for prefix, source in _SOURCES.items() if type_.startswith(prefix)), SOURCE)
    told = msgspec.Raw(data.strip())
    return _encode(CloudEvent(event_id(number, at), TYPE_PREFIX + type_, subject, tenant, time, told, source))
