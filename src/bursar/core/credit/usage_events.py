"""What was measured of a job, event by event: which lease each belongs to, and what they come to.

Whoever measures has clocks that jump. Wall times only say which of a job's leases is meant; how long it ran is counted
by a clock that never jumps, and never counts for more than the time between the lease's beginning and its end, which
are ours.
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
    """One measurement. `seq` rises by one with each of a job; `begin` and `end` are microseconds since 1970 by the
    clock of whoever measured."""

    job: str
    seq: int
    begin: int
    end: int
    micros: int  # how long it ran
    klass: str = ""  # the GPUs' type, where it is said
    gpus: int | None = None  # thousandths that were in use; None: all that are leased
    node: str = ""
    monotonic: int | None = None  # microseconds, when it was measured
    utilization: float | None = None  # a fraction
    # Which lease is meant, where that is said.
    account: int = 0
    lease: int = 0

    @property
    def body(self) -> tuple[object, ...]:
        """What a repeat must say again."""
        return (
            self.node, self.klass, self.gpus, self.begin, self.end, self.micros, self.monotonic, self.utilization
        )  # fmt: skip


class PayingLease(Struct, frozen=True):
    """A lease of a job, open or ended not long ago: what an event may be of."""

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
        """How long both were; below zero, by how much they missed each other."""
        return min(event.end, self.end or TIME_MAX) - max(event.begin, self.begin)


def faults(event: UsageEvent) -> list[Cause]:
    """Everything that is wrong with an event, whatever it is of."""
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
    causes = faults(event)
    if not causes:
        return None
    listed = "; ".join(f"{one.field}: {one.message}" for one in causes)
    return invalid(f"the usage is invalid: {listed}", *causes)


def payer_of(
    event: UsageEvent, payers: Iterable[PayingLease], *, tenants: Collection[str] | None = None, node: str = ""
) -> PayingLease | Refusal:
    """The lease that an event is of. `tenants` are those that the speaker sees, None being all; a `node` that speaks
    speaks of its own leases alone. What is out of reach is answered as what does not exist."""
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
            "Say which is meant: give account or lease_id.",
        )
    seen = [one for one in seen if one.node == event.node] or seen
    fitting = [one for one in seen if event.klass in ("", one.klass)]
    if not fitting:
        known = ", ".join(sorted({one.klass or "no type" for one in seen}))
        return Refusal(
            Code.UNPROCESSABLE,
            f"job {event.job!r} has leased GPUs of {known}, and not of {event.klass}",
            "Give the gpu_type of the lease, or leave it out.",
        )
    # By the wall clocks of those who measure; where they agree with none of the leases, the nearest one is meant.
    best = max(fitting, key=lambda one: (one.overlap(event), one.id))
    if event.gpus is not None and event.gpus > best.gpus:
        leased = counted(f"{best.gpus / 1000:g}", "GPU")
        return Refusal(
            Code.UNPROCESSABLE,
            f"job {event.job!r} has leased {leased}, it cannot have used {event.gpus / 1000:g}",
            "Give the gpu_count that was used of the lease, or leave it out.",
        )
    return best


def unknown(event: UsageEvent) -> Refusal:
    return Refusal(
        Code.NOT_FOUND,
        f"no lease pays for job {event.job!r}, or it ended too long ago",
        "Open a lease before usage of it is sent: POST /api/v1/leases.",
    )


def reused(event: UsageEvent) -> Refusal:
    return Refusal(
        Code.REQUEST_REUSED,
        f"usage {event.seq} of job {event.job!r} was sent before with another body",
        "Send the same body again, or what is new under the next seq.",
        (Cause("FieldValueDuplicate", "was used before with another body", field="seq"),),
    )


def amount(event: UsageEvent, payer: PayingLease) -> int:
    """What an event adds to the sum of its lease: its time, weighted by the GPUs in use where the lease has some."""
    if not payer.gpus:
        return event.micros
    return event.micros * (payer.gpus if event.gpus is None else event.gpus)


def micros_of(total: int, lease: Lease) -> int:
    """How long the whole lease was in use, by the sum of its events."""
    return total // lease.gpus if lease.gpus else total


def measured(lease: Lease, by_node: int | None, by_events: int | None, *, told: int | None = None) -> int | None:
    """How long a lease that has ended was really used: as its node has `told` in the end, else as it had measured until
    it was lost, else as its events add up; None where nobody measured. Nothing is used longer than it is there,
    whatever the clocks of those who measure say."""
    # A node writes down what it measures now and then, and is heard far more often: it ran at its last beat.
    said = max(by_node, beaten(lease)) if by_node is not None else by_events
    said = said if told is None else told
    return None if said is None else max(0, min(said, lease.longest(lease.closed_at)))


def beaten(lease: Lease) -> int:
    """For how long of its paid time a lease ran for certain: until the beat that paid its last window."""
    if not lease.started_at:
        return 0
    paid = lease.paid_until - lease.since + sum(micros for _, micros in lease.past)
    return max(0, paid - lease.window)
