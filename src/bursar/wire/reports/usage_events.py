"""Usage events in requests: measured usage of a job, counted once per `job_id` and `seq`."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from msgspec import Meta, Struct

from bursar.core.credit.usage_events import UsageEvent
from bursar.core.values.money import MICROS, NANO, MoneyError, nanocredits
from bursar.core.values.quantity import amount
from bursar.core.values.refusal import Cause, field_fault
from bursar.wire.reports.credit import GPU, Devices, device_faults
from bursar.wire.shared.instant import instant_faults, moment_of
from bursar.wire.shared.limits import quantity_text

Moment: TypeAlias = Annotated[str | int | float, Meta(description="A time: RFC 3339, or seconds since 1970.")]
Seconds: TypeAlias = Annotated[str | int | float, Meta(description="Seconds, to the microsecond.")]


class NewUsage(Struct, forbid_unknown_fields=True, kw_only=True):
    """A usage event. `start_ts` and `end_ts` are by the clock of the reporter; `seconds` is the duration by a monotonic
    clock, by default the time between the two."""

    job_id: str
    seq: int
    start_ts: Moment
    end_ts: Moment
    gpu_type: str = ""
    gpu_count: Devices | None = None
    seconds: Seconds | None = None
    monotonic: Seconds | None = None
    measured_utilization: float | None = None
    node_id: str = ""
    account: str = ""
    lease_id: str = ""
    request_id: str = ""


class UsageBatch(Struct, forbid_unknown_fields=True):
    events: list[NewUsage]
    request_id: str = ""


class RefusedUsage(Struct):
    index: int
    job_id: str
    seq: int
    code: str
    message: str


class UsageTaken(Struct):
    """Counts of accepted, duplicate and late events (after their lease was reconciled), and the refused ones."""

    accepted: int
    duplicates: int
    late: int
    refused: list[RefusedUsage]


def usage_faults(path: str, one: NewUsage) -> list[Cause]:
    faults = [*instant_faults(f"{path}start_ts", one.start_ts), *instant_faults(f"{path}end_ts", one.end_ts)]
    for name, value in (("seconds", one.seconds), ("monotonic", one.monotonic)):
        try:
            if value is not None and _micros(value) < 0:
                faults.append(field_fault(f"{path}{name}", "must not be negative"))
        except MoneyError:
            faults.append(field_fault(f"{path}{name}", "must be a number of seconds, such as 5.25"))
    if one.gpu_count is not None:
        faults += device_faults(f"{path}gpu_count", one.gpu_count)
    if not -(2**62) < one.seq < 2**62:
        faults.append(field_fault(f"{path}seq", "is too large"))
    return faults


def event_of(one: NewUsage, *, node: str = "", account: int = 0, lease: int = 0) -> UsageEvent:
    """Convert an event without faults."""
    begin, end = moment_of(one.start_ts), moment_of(one.end_ts)
    return UsageEvent(
        one.job_id,
        one.seq,
        begin,
        end,
        max(0, end - begin) if one.seconds is None else _micros(one.seconds),
        one.gpu_type,
        None if one.gpu_count is None else amount(GPU, quantity_text(one.gpu_count)),
        node or one.node_id,
        None if one.monotonic is None else _micros(one.monotonic),
        one.measured_utilization,
        account,
        lease,
    )


def _micros(given: str | float) -> int:
    """Convert seconds exactly to microseconds; smaller digits are cut off."""
    return nanocredits(quantity_text(given)) * MICROS // NANO
