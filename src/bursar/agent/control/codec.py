"""Conversion between protobuf messages and the agent's values, in both directions. Pure.

Unknown or invalid directives of a newer control plane are skipped: one bad directive must not block the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from bursar import __version__
from bursar.agent.host.probe import Load
from bursar.agent.machine.types import Directive, LeaseGrant, Place, PlacementState, PlacementStatus, Run, Stop
from bursar.wire.scheduler.v1 import node_agent_pb2 as pb

PROTOCOL_VERSION = 1
FEATURES = ("stdin",)  # features that older agents do not have
TRACELESS = "traceless"  # everything a placement writes is removed when it ends
WIPES = "wipe"  # there is a wipe hook
WIPE = "wipe"  # the name of a wipe, which has no allocation

_PHASES = {
    PlacementState.STARTING: pb.POD_PHASE_STARTING,
    PlacementState.RUNNING: pb.POD_PHASE_RUNNING,
    PlacementState.STOPPING: pb.POD_PHASE_STOPPING,
    PlacementState.SUCCEEDED: pb.POD_PHASE_SUCCEEDED,
    PlacementState.FAILED: pb.POD_PHASE_FAILED,
    PlacementState.STOPPED: pb.POD_PHASE_STOPPED,
}


NO_LOAD = Load()


@dataclass(frozen=True, slots=True)
class OutgoingHeartbeat:
    """A heartbeat to send. `capacity` is sent in the first heartbeat of a stream and when it changes."""

    statuses: Sequence[PlacementStatus] = ()
    inventory: bool = False
    load: Load = NO_LOAD
    capacity: Mapping[str, str] = field(default_factory=dict)
    address: str = ""
    certificate_request: bytes = b""
    # In the first heartbeat of a stream:
    nonce: str = ""  # lease tokens must contain it
    isolation: str = ""  # how tenants are isolated on this node
    isolation_message: str = ""  # why they are not
    features: tuple[str, ...] = ()  # of this agent, in addition to FEATURES


@dataclass(frozen=True, slots=True)
class HeartbeatAnswer:
    """A message of the control plane. `seq` is the heartbeat that it answers; 0 for a push."""

    seq: int = 0
    directives: tuple[Directive, ...] = ()
    complete: bool = False
    acknowledged: tuple[Place, ...] = ()
    lease_seconds: float = 0.0
    kill_grace_seconds: float | None = None  # from SIGTERM to SIGKILL for work without a run-lease
    leases: Mapping[Place, LeaseGrant] = field(default_factory=dict)
    certificate: bytes = b""
    beat_seconds: float = 0.0
    lease_token: str = ""  # signature of `leases`
    signing_keys: Mapping[str, bytes] = field(default_factory=dict)  # trusted from now on; empty if unchanged


# Outgoing.


def heartbeat_message(heartbeat: OutgoingHeartbeat, *, node: str, seq: int, timestamp_ms: int) -> pb.HeartbeatRequest:
    return pb.HeartbeatRequest(
        node_id=node,
        timestamp=timestamp_ms,
        seq=seq,
        protocol_version=PROTOCOL_VERSION,
        agent_version=__version__,
        inventory=heartbeat.inventory,
        pod_statuses=[status_message(one) for one in heartbeat.statuses],
        current_usage=load_message(heartbeat.load),
        capacity=heartbeat.capacity,
        address=heartbeat.address,
        certificate_request=heartbeat.certificate_request,
        nonce=heartbeat.nonce,
        isolation=heartbeat.isolation,
        isolation_message=heartbeat.isolation_message,
        features=(*FEATURES, *heartbeat.features) if heartbeat.inventory else (),
    )


def status_message(status: PlacementStatus) -> pb.PodStatus:
    return pb.PodStatus(
        allocation_id=status.uid,
        epoch=status.epoch,
        phase=_PHASES[status.state],
        reason=status.reason,
        message=status.message,
        exit_code=status.exit_code,
        usage=pb.AllocationUsage(
            seconds=status.usage.seconds,
            cpu_seconds=status.usage.cpu_seconds,
            memory_bytes=status.usage.memory_bytes,
            memory_bytes_max=status.usage.memory_bytes_max,
            gpu_seconds=status.usage.gpu_seconds,
        ),
    )


def load_message(load: Load) -> pb.ResourceUsage:
    gpus = [
        pb.GpuUsage(index=one.index, utilization=one.utilization, memory_bytes=one.memory_bytes) for one in load.gpus
    ]
    return pb.ResourceUsage(
        cpu_cores=load.cpu_cores, memory_bytes=load.memory_bytes, disk_bytes=load.disk_bytes, gpus=gpus
    )


# Incoming.


def read_answer(message: pb.HeartbeatResponse) -> HeartbeatAnswer:
    directives = [read_directive(one) for one in message.directives]
    return HeartbeatAnswer(
        seq=message.seq,
        directives=tuple(one for one in directives if one is not None),
        # A wanted set with an unreadable entry is not complete: nothing may be stopped for being absent from it.
        complete=message.complete and None not in directives,
        acknowledged=tuple((one.allocation_id, one.epoch) for one in message.acknowledgements),
        lease_seconds=float(max(0, message.lease_duration_seconds)),
        kill_grace_seconds=max(0, message.kill_grace_seconds) if message.HasField("kill_grace_seconds") else None,
        leases={(one.allocation_id, one.epoch): read_grant(one) for one in message.leases},
        certificate=message.certificate,
        beat_seconds=float(max(0, message.beat_seconds)),
        lease_token=message.lease_token,
        signing_keys={one.id: one.public_key for one in message.signing_keys},
    )


def read_grant(message: pb.LeaseGrant) -> LeaseGrant:
    seconds = float(max(0, message.seconds))
    if not message.final:
        return LeaseGrant(seconds)
    return LeaseGrant(seconds, message.reason or "no reason was given", float(max(0, message.freeze_seconds)))


def read_directive(message: pb.SchedulingDirective) -> Directive | None:
    """Convert a directive; None if its type is unknown or it names no allocation."""
    if not message.allocation_id:
        return None
    if message.type == pb.DIRECTIVE_TYPE_RUN:
        return _read_run(message)
    if message.type == pb.DIRECTIVE_TYPE_WIPE:
        return Run(message.allocation_id, message.epoch, "", WIPE, wipe=True)
    if message.type == pb.DIRECTIVE_TYPE_STOP:
        return Stop(
            uid=message.allocation_id,
            epoch=message.epoch,
            grace_seconds=max(0, message.grace_seconds),
            reason=message.reason,
            message=message.message,
        )
    return None


def _read_run(message: pb.SchedulingDirective) -> Run:
    return Run(
        uid=message.allocation_id,
        epoch=message.epoch,
        namespace=message.namespace,
        name=message.name,
        tenant=message.tenant,
        tenant_uid=message.tenant_uid,
        requests=dict(message.resources.requests),
        limits=dict(message.resources.limits),
        devices={resource: tuple(given.indices) for resource, given in message.devices.items()},
        command=tuple(message.command),
        env=dict(message.env),
        working_dir=message.working_dir,
        ttl_seconds=max(0, message.ttl_seconds),
        leased=message.leased,
        paid=message.paid,
        grace_seconds=max(0, message.grace_seconds),
        nodes=tuple(message.nodes),
        exclusive=message.exclusive,
        annotations=dict(message.annotations),
        job=message.job,
        job_index=message.job_index if message.HasField("job_index") else None,
        prepare=message.prepare,
    )
