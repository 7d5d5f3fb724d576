"""Usage events: measured run time of a job, matched to the lease that pays for it, and the measured time of a lease.

The clocks of metering clients jump. Wall-clock times only select one of a job's leases; the run time comes from a
monotonic clock, and counts at most for the time between the lease's beginning and end by the database's clock.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from msgspec import Struct

from bursar.core.credit.lease import Lease
from bursar.core.values.money import MICROS
from bursar.core.values.refusal import Cause, Code, Refusal, field_fault, invalid
from bursar.core.values.wording import counted

JOB_CHARS_MAX = 253
SEQ_MAX = 2**53
EVENT_MICROS_MAX = 31 * 86_400 * MICROS
TIME_MAX = 2**62


class UsageEvent(Struct, frozen=True):
    """One measurement of a job. `seq` rises by one with each; `begin` and `end` are microseconds since 1970 by the
    client's clock."""

    job: str
    seq: int
    begin: int
    end: int
    micros: int  # the run time
    klass: str = ""  # the type of the GPUs, if given
    gpus: int | None = None  # in use, in thousandths; None: all leased ones
    node: str = ""
    monotonic: int | None = None  # microseconds of the client's monotonic clock
    utilization: float | None = None  # a fraction
    # The lease, if given.
    account: int = 0
    lease: int = 0

    @property
    def body(self) -> tuple[object, ...]:
        """The fields that a repeated event must repeat."""
        return (
            self.node, self.klass, self.gpus, self.begin, self.end, self.micros, self.monotonic, self.utilization
        )  # fmt: skip


class PayingLease(Struct, frozen=True):
    """A lease to which a usage event can belong: open, or ended recently."""

    id: int
    account: int
    tenant: str
    job: str
    klass: str
    gpus: int
    node: str
    begin: int
    end: int  # 0 while it is open

    def overlap(self, event: UsageEvent) -> int:
        """The overlap of the event and the lease; below zero, the gap between them."""
        return min(event.end, self.end or TIME_MAX) - max(event.begin, self.begin)


def faults(event: UsageEvent) -> list[Cause]:
    """All faults of an event by itself."""
    found = []
    if not 0 < len(event.job) <= JOB_CHARS_MAX or not event.job.isprintable():
        found.append(field_fault("job_id", f"must be printable and have 1 to {JOB_CHARS_MAX} characters"))
    if not 0 <= event.seq <= SEQ_MAX:
        found.append(field_fault("seq", f"must be between 0 and {SEQ_MAX}, got {event.seq}"))
    if not (0 <= event.begin <= TIME_MAX and 0 <= event.end <= TIME_MAX):
        found.append(field_fault("start_ts", "must be times after 1970"))
    elif event.end < event.begin:
        found.append(field_fault("end_ts", "must not lie before start_ts"))
    if not 0 <= event.micros <= EVENT_MICROS_MAX:
        days = EVENT_MICROS_MAX // MICROS // 86_400
        found.append(field_fault("seconds", f"must not be negative, nor more than {days} days in one event"))
    if event.gpus is not None and event.gpus < 0:
        found.append(field_fault("gpu_count", "must not be negative"))
    if event.utilization is not None and not 0 <= event.utilization <= 1:
        found.append(field_fault("measured_utilization", "must be a fraction between 0 and 1"))
    if event.monotonic is not None and not 0 <= event.monotonic <= TIME_MAX:
        found.append(field_fault("monotonic", "must not be negative"))
    return found


def check(event: UsageEvent) -> Refusal | None:
    """Refuse an event with faults."""
    causes = faults(event)
    if not causes:
        return None
    listed = "; ".join(f"{one.field}: {one.message}" for one in causes)
    return invalid(f"the usage is invalid: {listed}", *causes)


def lease_of_event(
    event: UsageEvent, payers: Iterable[PayingLease], *, tenants: Collection[str] | None = None, node: str = ""
) -> PayingLease | Refusal:
    """The lease to which an event belongs. `tenants` are those that the caller sees (None: all); a calling `node` sees
    only its own leases. A lease that the caller does not see is answered as one that does not exist."""
    seen = [
        one
        for one in payers
        if (tenants is None or one.tenant in tenants)
        and (not node or one.node == node)
        and event.account in (0, one.account)
        and event.lease in (0, one.id)
    ]
    if not seen:
        return unknown(event)
    if len({one.account for one in seen}) > 1:
        return Refusal(
            Code.UNPROCESSABLE,
            f"several accounts have a job named {event.job!r}",
            "Name one: give account or lease_id.",
        )
    seen = [one for one in seen if one.node == event.node] or seen
    fitting = [one for one in seen if event.klass in ("", one.klass)]
    if not fitting:
        known = ", ".join(sorted({one.klass or "no type" for one in seen}))
        return Refusal(
            Code.UNPROCESSABLE,
            f"job {event.job!r} has leased GPUs of type {known}, not of {event.klass}",
            "Give the gpu_type of the lease, or leave it out.",
        )
    # By the client's wall clock; without any overlap, the nearest lease.
    best = max(fitting, key=lambda one: (one.overlap(event), one.id))
    if event.gpus is not None and event.gpus > best.gpus:
        leased = counted(f"{best.gpus / 1000:g}", "GPU")
        return Refusal(
            Code.UNPROCESSABLE,
            f"job {event.job!r} has leased {leased} and cannot have used {event.gpus / 1000:g}",
            "Give the gpu_count in use, at most that of the lease, or leave it out.",
        )
    return best


def unknown(event: UsageEvent) -> Refusal:
    """Refuse an event of a job without a lease."""
    return Refusal(
        Code.NOT_FOUND,
        f"no lease pays for job {event.job!r}, or it ended too long ago",
        "Open a lease before sending usage: POST /api/v1/leases.",
    )


def reused(event: UsageEvent) -> Refusal:
    """Refuse a sequence number that was used with another body."""
    return Refusal(
        Code.REQUEST_REUSED,
        f"usage {event.seq} of job {event.job!r} was sent before with another body",
        "Send the same body again, or new usage with the next seq.",
        (Cause("FieldValueDuplicate", "was used before with another body", field="seq"),),
    )


def amount(event: UsageEvent, payer: PayingLease) -> int:
    """The contribution of an event to its lease: its run time, weighted by the GPUs in use if the lease has GPUs."""
    if not payer.gpus:
        return event.micros
    return event.micros * (payer.gpus if event.gpus is None else event.gpus)


def micros_of(total: int, lease: Lease) -> int:
    """The run time of the whole lease from the sum of its events."""
    return total // lease.gpus if lease.gpus else total


def measured(lease: Lease, by_node: int | None, by_events: int | None, *, told: int | None = None) -> int | None:
    """The measured run time of an ended lease; None if nothing measured it.

    The order of precedence: `told`, the node's report of the end; its last measurement before it was lost; the sum of
    the usage events. The result is at most the life of the lease, whatever the clients' clocks say.
    """
    # A node stores measurements less often than it sends heartbeats: the work ran at its last heartbeat.
    micros = max(by_node, certain(lease)) if by_node is not None else by_events
    micros = micros if told is None else told
    return None if micros is None else max(0, min(micros, lease.longest(lease.closed_at)))


def certain(lease: Lease) -> int:
    """The paid time that a lease certainly ran: until the heartbeat that paid its last window."""
    if not lease.started_at:
        return 0
    paid = lease.paid_until - lease.since + sum(micros for _, micros in lease.past)
    return max(0, paid - lease.window)
