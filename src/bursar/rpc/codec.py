"""Conversion and validation of `NodeAgent` messages: heartbeats in, directives and grants out. Pure.

Nodes are not trusted: an invalid heartbeat is a refusal, and every stored field is bounded. Directives are built from
the stored spec and status of an allocation.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from datetime import datetime
from enum import IntEnum
from functools import lru_cache
from typing import Final

import msgspec
from msgspec import Struct

from bursar.core.credit.lease import FROZEN, Grant, lease_name, lease_number
from bursar.core.credit.shortfall import Shortfall, recorded_shortfall
from bursar.core.nodes.liveness import OnLost
from bursar.core.objects.allocation import Phase
from bursar.core.objects.object import Key
from bursar.core.values.address import is_address
from bursar.core.values.duration import DurationError, parse_seconds
from bursar.core.values.money import MICROS, credits_of
from bursar.core.values.names import quoted
from bursar.core.values.quantity import format_amount, is_bytes
from bursar.core.values.refusal import Code, Refusal, invalid
from bursar.store.nodes.heartbeat import UsageRow, WantedPlace
from bursar.store.objects.change import Change
from bursar.wire.kinds.allocation import JOB_INDEX
from bursar.wire.scheduler.v1 import node_agent_pb2 as pb
from bursar.wire.shared.limits import amounts_faults
from bursar.wire.shared.meta import Quantity

PROTOCOL_OLDEST: Final = 1
PROTOCOL_NEWEST: Final = 1

STATUSES_MAX: Final = 10_000
FEATURES_MAX: Final = 64
NONCE_CHARS_MAX: Final = 64
LOAD_MAX: Final = 1e15  # cores, bytes or devices; a higher value is not plausible
WORDS_CHARS_MAX: Final = 1024
REASON_CHARS_MAX: Final = 64
REQUEST_BYTES_MAX: Final = 16 << 10
GRACE_SECONDS: Final = 30
SECONDS_MAX: Final = 1e12
ANNOTATIONS: Final = "bursar.io/"

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class ReportedState(IntEnum):
    """The state of a placement on its node."""

    STARTING = pb.POD_PHASE_STARTING
    RUNNING = pb.POD_PHASE_RUNNING
    STOPPING = pb.POD_PHASE_STOPPING
    SUCCEEDED = pb.POD_PHASE_SUCCEEDED
    FAILED = pb.POD_PHASE_FAILED
    STOPPED = pb.POD_PHASE_STOPPED


# The phase of each end. A stopped placement of a deleted allocation becomes Cancelled elsewhere.
ENDS: Final = {
    ReportedState.SUCCEEDED: Phase.SUCCEEDED,
    ReportedState.FAILED: Phase.FAILED,
    ReportedState.STOPPED: Phase.FAILED,
}


class PlacementReport(Struct, frozen=True):
    """The status that a node reports of one placement."""

    uid: str
    epoch: int
    state: ReportedState
    reason: str = ""
    message: str = ""
    exit_code: int | None = None
    usage: UsageRow | None = None

    @property
    def place(self) -> tuple[str, int]:
        return self.uid, self.epoch

    @property
    def frozen(self) -> bool:
        """Whether it is frozen because its account exceeds its spend rate limit."""
        return self.state is ReportedState.RUNNING and self.reason == FROZEN


class Said(Struct, frozen=True):
    """A validated heartbeat."""

    node: str
    seq: int
    statuses: tuple[PlacementReport, ...] = ()
    capacity: Mapping[str, str] = {}
    address: str = ""
    agent: str = ""
    certificate_request: bytes = b""
    nonce: str = ""  # chosen by the agent for this stream
    load: pb.ResourceUsage | None = None
    isolation: tuple[str, str] | None = None  # the isolation and its message; None if not reported
    features: tuple[str, ...] = ()  # of the agent, beyond the oldest protocol


# Incoming.


def read_heartbeat(message: pb.HeartbeatRequest, node: str) -> Said | Refusal:
    """Validate a heartbeat of this node."""
    if refusal := _version_refusal(message.protocol_version):
        return refusal
    if message.seq < 1:
        return invalid(f"seq must be at least 1, got {message.seq}")
    if len(message.pod_statuses) > STATUSES_MAX:
        return invalid(f"a heartbeat has at most {STATUSES_MAX} pod_statuses, got {len(message.pod_statuses)}")
    if len(message.certificate_request) > REQUEST_BYTES_MAX:
        return invalid(f"a certificate request has at most {REQUEST_BYTES_MAX} bytes")
    if len(message.nonce) > NONCE_CHARS_MAX:
        return invalid(f"a nonce has at most {NONCE_CHARS_MAX} characters")
    if message.address and not is_address(message.address):
        return invalid(f"address {quoted(message.address[:300])} must be HOST:PORT")
    capacity = dict(message.capacity)
    if faults := amounts_faults("capacity", capacity):
        return invalid(f"{faults[0].field}: {faults[0].message}", *faults)
    statuses: dict[tuple[str, int], PlacementReport] = {}
    for one in message.pod_statuses:
        reports = _read_status(one, node)
        if isinstance(reports, Refusal):
            return reports
        statuses[reports.place] = reports
    return Said(
        node,
        message.seq,
        tuple(statuses.values()),
        capacity,
        message.address,
        plain(message.agent_version, REASON_CHARS_MAX),
        message.certificate_request,
        message.nonce,
        message.current_usage if message.HasField("current_usage") else None,
        _isolation(message),
        tuple(plain(one, REASON_CHARS_MAX) for one in message.features[:FEATURES_MAX]),
    )


def _isolation(message: pb.HeartbeatRequest) -> tuple[str, str] | None:
    if not message.isolation:
        return None
    return plain(message.isolation, REASON_CHARS_MAX), plain(message.isolation_message, WORDS_CHARS_MAX)


def load_document(usage: pb.ResourceUsage) -> bytes:
    """The load as quantities of the node's resources, GPUs by their busy fraction; implausible values are omitted."""
    used = {
        "cpu": usage.cpu_cores,
        "memory": usage.memory_bytes,
        "ephemeral-storage": usage.disk_bytes,
        "nvidia.com/gpu": sum(min(1.0, max(0.0, one.utilization)) for one in usage.gpus) if usage.gpus else None,
    }
    return msgspec.json.encode(
        {
            name: format_amount(name, round(value) if is_bytes(name) else round(value * 1000))
            for name, value in used.items()
            if value is not None and math.isfinite(value) and 0 <= value < LOAD_MAX
        }
    )


def _version_refusal(version: int) -> Refusal | None:
    if PROTOCOL_OLDEST <= version <= PROTOCOL_NEWEST:
        return None
    understood = f"this server speaks {PROTOCOL_OLDEST} to {PROTOCOL_NEWEST}"
    if version > PROTOCOL_NEWEST:
        return Refusal(Code.UNPROCESSABLE, f"the agent speaks protocol {version}; {understood}", "Update the server.")
    return Refusal(Code.UNPROCESSABLE, f"the agent speaks protocol {version}; {understood}", "Update the agent.")


def _read_status(message: pb.PodStatus, node: str) -> PlacementReport | Refusal:
    if not _ID.fullmatch(message.allocation_id):
        return invalid(f"{quoted(message.allocation_id[:128])} is not the uid of an allocation")
    if message.epoch < 0:
        return invalid(f"the epoch of {message.allocation_id} must not be negative, got {message.epoch}")
    try:
        state = ReportedState(message.phase)
    except ValueError:
        return invalid(f"the phase of {message.allocation_id} is unknown: {int(message.phase)}")
    return PlacementReport(
        message.allocation_id,
        message.epoch,
        state,
        plain(message.reason, REASON_CHARS_MAX),
        plain(message.message, WORDS_CHARS_MAX),
        message.exit_code if message.HasField("exit_code") else None,
        _read_usage(message, node) if message.HasField("usage") else None,
    )


def _read_usage(message: pb.PodStatus, node: str) -> UsageRow | None:
    """The measured usage; None if it is implausible or zero."""
    usage = message.usage
    seconds = (usage.seconds, usage.cpu_seconds, usage.gpu_seconds)
    if not all(math.isfinite(one) and 0 <= one <= SECONDS_MAX for one in seconds):
        return None
    if usage.memory_bytes < 0 or usage.memory_bytes_max < 0 or not any((*seconds, usage.memory_bytes)):
        return None
    return UsageRow(
        message.allocation_id, message.epoch, node, usage.seconds, usage.cpu_seconds,
        usage.memory_bytes, max(usage.memory_bytes, usage.memory_bytes_max), usage.gpu_seconds,
    )  # fmt: skip


def plain(text: str, chars_max: int) -> str:
    """A node's text as one printable line of bounded length."""
    return "".join(char if char.isprintable() else " " for char in text[:chars_max]).strip()


# Outgoing.


class _Resources(Struct):
    requests: dict[str, Quantity] = {}
    limits: dict[str, Quantity] = {}


class _EnvVar(Struct):
    name: str
    value: str = ""


class _Spec(Struct, rename="camel"):
    resources: _Resources = msgspec.field(default_factory=_Resources)
    exclusive: bool = False
    ttl: str | int = 0
    command: list[str] = []
    env: list[_EnvVar] | dict[str, str] = []
    working_dir: str = ""
    stdin: bool = False
    on_node_lost: str = ""


class _Owner(Struct):
    kind: str = ""
    name: str = ""


class _Metadata(Struct, rename="camel"):
    annotations: dict[str, str] = {}
    owner_references: list[_Owner] = []
    deletion_timestamp: str = ""
    deletion_grace_period_seconds: int = GRACE_SECONDS


class _Document(Struct):
    metadata: _Metadata
    spec: _Spec


class _PlacedOn(Struct, rename="camel"):
    name: str
    devices: dict[str, list[int]] = {}
    phase: str = ""  # its end on this node, while it still runs on others
    lease: str = ""  # the lease that pays for it
    frozen: bool = False
    unpaid: str = ""  # why no more time is granted
    paid_until: str = ""


class _Eviction(Struct, rename="camel"):
    reason: str = ""
    message: str = ""
    grace_period_seconds: int = GRACE_SECONDS
    deadline: str = ""


class _Status(Struct, rename="camel"):
    phase: str = ""
    epoch: int = 0
    reason: str = ""
    message: str = ""
    nodes: list[_PlacedOn] = []
    size: int = 0  # of its gang
    eviction: _Eviction | None = None


_decode_document = msgspec.json.Decoder(_Document).decode
_decode_status = msgspec.json.Decoder(_Status).decode


class WantedAllocation(Struct, frozen=True):
    """A stored allocation, decoded for the directives to its nodes."""

    key: Key
    uid: str
    tenant: str
    document: _Document
    status: _Status
    epoch: int
    tenant_uid: str = ""

    @property
    def phase(self) -> str:
        return self.status.phase

    @property
    def nodes(self) -> list[str]:
        return [one.name for one in self.status.nodes]

    @property
    def nodes_left(self) -> list[str]:
        """The nodes that have not reported its end."""
        return [one.name for one in self.status.nodes if not one.phase]

    def lease_on(self, node: str) -> int:
        """The number of the lease that pays for it on a node; 0: none."""
        name = next((one.lease for one in self.status.nodes if one.name == node), "")
        return (lease_number(name) or 0) if name else 0


def order_of_change(change: Change, tenant_uid: str = "") -> WantedAllocation:
    status = _decode_status(change.status)
    return WantedAllocation(
        change.key, change.uid, change.tenant, _decode_document(change.doc), status, status.epoch, tenant_uid
    )


def order_of_place(place: WantedPlace) -> WantedAllocation:
    status = _decode_status(place.status)
    document = _decode_document(place.doc)
    return WantedAllocation(place.key, place.uid, place.tenant, document, status, place.epoch, place.tenant_uid)


def phase_of_place(place: WantedPlace) -> str:
    """The phase; empty if the status cannot be read, so that its end can still be recorded."""
    try:
        return _decode_status(place.status).phase
    except msgspec.MsgspecError:
        return ""


def frozen_place(place: WantedPlace, node: str) -> bool:
    """Whether it is recorded as frozen on a node."""
    there = _place_on(place, node)
    return there is not None and there.frozen


def short_place(place: WantedPlace, node: str) -> Shortfall | None:
    """The recorded shortfall on a node."""
    there = _place_on(place, node)
    return recorded_shortfall(there.unpaid, there.paid_until) if there is not None else None


def _place_on(place: WantedPlace, node: str) -> _PlacedOn | None:
    try:
        return next((one for one in _decode_status(place.status).nodes if one.name == node), None)
    except msgspec.MsgspecError:
        return None


def run_directive(
    order: WantedAllocation, node: str, kill_grace_seconds: int = GRACE_SECONDS
) -> pb.SchedulingDirective:
    spec, metadata = order.document.spec, order.document.metadata
    devices = next((one.devices for one in order.status.nodes if one.name == node), {})
    job = next((one.name for one in metadata.owner_references if one.kind == "Job"), "")
    index = metadata.annotations.get(JOB_INDEX, "") if job else ""
    env = spec.env if isinstance(spec.env, dict) else {one.name: one.value for one in spec.env}
    return pb.SchedulingDirective(
        type=pb.DIRECTIVE_TYPE_RUN,
        allocation_id=order.uid,
        epoch=order.epoch,
        namespace=order.key.namespace,
        name=order.key.name,
        tenant=order.tenant,
        tenant_uid=order.tenant_uid,
        resources=pb.ResourceRequirements(
            # Per node. A limit without a request is the request, too.
            requests={name: str(value) for name, value in {**spec.resources.limits, **spec.resources.requests}.items()},
            limits={name: str(value) for name, value in spec.resources.limits.items()},
        ),
        devices={name: pb.DeviceIndices(indices=indices) for name, indices in devices.items()},
        command=spec.command,
        env=env,
        working_dir=spec.working_dir,
        ttl_seconds=_ttl_seconds(spec.ttl),
        leased=spec.on_node_lost == OnLost.REQUEUE,
        paid=order.lease_on(node) > 0,
        grace_seconds=kill_grace_seconds,
        nodes=order.nodes,
        exclusive=spec.exclusive,
        job=job,
        job_index=int(index) if index.isdigit() else None,
        # Peers and standard input are not in the directive: the agent fetches them before the start.
        prepare=bool(spec.command) and (spec.stdin or order.status.size > 1 or len(order.nodes) > 1),
        annotations={name: text for name, text in metadata.annotations.items() if name.startswith(ANNOTATIONS)},
    )


def stop_directive(order: WantedAllocation, now: datetime) -> pb.SchedulingDirective:
    """Stop an allocation. A repeated directive has only the rest of the grace."""
    metadata, eviction = order.document.metadata, order.status.eviction
    graces = []
    if metadata.deletion_timestamp:
        graces.append(_grace_left(metadata.deletion_grace_period_seconds, metadata.deletion_timestamp, now))
    if eviction is not None:
        graces.append(_grace_left(eviction.grace_period_seconds, eviction.deadline, now))
    cause: _Eviction | _Status = eviction or order.status
    return end_directive(
        order.uid, order.epoch, cause.reason, cause.message, grace_seconds=min(graces, default=GRACE_SECONDS)
    )


def end_directive(uid: str, epoch: int, reason: str, message: str, *, grace_seconds: int = 0) -> pb.SchedulingDirective:
    return pb.SchedulingDirective(
        type=pb.DIRECTIVE_TYPE_STOP,
        allocation_id=uid,
        epoch=epoch,
        grace_seconds=grace_seconds,
        reason=reason,
        message=message,
    )


def grant_message(uid: str, epoch: int, grant: Grant | Refusal, freeze_seconds: int) -> pb.LeaseGrant | None:
    """The answer to a lease extension; None if it changes nothing. Seconds are rounded down, so that never more than
    the paid time is granted."""
    if isinstance(grant, Refusal):
        if grant.code is not Code.FENCED:
            return None
        return pb.LeaseGrant(allocation_id=uid, epoch=epoch, final=True, reason=str(Code.FENCED))
    freezes = grant.final and grant.reason == Code.SPEND_RATE_EXCEEDED
    return pb.LeaseGrant(
        allocation_id=uid,
        epoch=epoch,
        seconds=grant.micros // MICROS,
        final=grant.final,
        reason=grant.reason,
        freeze_seconds=freeze_seconds if freezes else 0,
        lease=lease_name(grant.lease),
        rate_per_sec=credits_of(grant.rate),
        expires_at=grant.paid_until // MICROS,
    )


def _grace_left(grace_seconds: int, deadline: str, now: datetime) -> int:
    """The rest of a grace period. Deadlines are stored in whole seconds, rounded down, so one second is added."""
    try:
        left = (datetime.fromisoformat(deadline) - now).total_seconds() + 1
    except ValueError:
        return grace_seconds
    return max(0, min(grace_seconds, math.ceil(left)))


@lru_cache(256)
def _ttl_seconds(ttl: str | int) -> int:
    try:
        return parse_seconds(ttl)
    except DurationError:
        return 0
