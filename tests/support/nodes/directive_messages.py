"""Messages of a control plane that a test plays: directives to an agent, and the statuses that it reports."""

from collections.abc import Iterable

from bursar.agent.machine.types import Directive, PlacementState, PlacementStatus, Stop, Usage
from bursar.wire.scheduler.v1 import node_agent_pb2 as pb

STATES = {pb.PodPhase.Value(f"POD_PHASE_{state.name}"): state for state in PlacementState}


def directive_message(directive: Directive) -> pb.SchedulingDirective:
    if isinstance(directive, Stop):
        return pb.SchedulingDirective(
            type=pb.DIRECTIVE_TYPE_STOP,
            allocation_id=directive.uid,
            epoch=directive.epoch,
            grace_seconds=directive.grace_seconds,
            reason=directive.reason,
            message=directive.message,
        )
    return pb.SchedulingDirective(
        type=pb.DIRECTIVE_TYPE_WIPE if directive.wipe else pb.DIRECTIVE_TYPE_RUN,
        allocation_id=directive.uid,
        epoch=directive.epoch,
        namespace=directive.namespace,
        name=directive.name,
        tenant=directive.tenant,
        tenant_uid=directive.tenant_uid,
        resources=pb.ResourceRequirements(requests=directive.requests, limits=directive.limits),
        devices={resource: pb.DeviceIndices(indices=given) for resource, given in directive.devices.items()},
        command=directive.command,
        env=directive.env,
        working_dir=directive.working_dir,
        ttl_seconds=directive.ttl_seconds,
        leased=directive.leased,
        paid=directive.paid,
        grace_seconds=directive.grace_seconds,
        nodes=directive.nodes,
        exclusive=directive.exclusive,
        annotations=directive.annotations,
        job=directive.job,
        job_index=directive.job_index,
        prepare=directive.prepare,
    )


def read_status(message: pb.PodStatus) -> PlacementStatus | None:
    """None if the phase is unknown."""
    state = STATES.get(message.phase)
    if state is None:
        return None
    return PlacementStatus(
        uid=message.allocation_id,
        epoch=message.epoch,
        state=state,
        reason=message.reason,
        message=message.message,
        exit_code=message.exit_code if message.HasField("exit_code") else None,
        usage=Usage(
            seconds=message.usage.seconds,
            cpu_seconds=message.usage.cpu_seconds,
            memory_bytes=message.usage.memory_bytes,
            memory_bytes_max=message.usage.memory_bytes_max,
            gpu_seconds=message.usage.gpu_seconds,
        ),
    )


def read_statuses(messages: Iterable[pb.PodStatus]) -> list[PlacementStatus]:
    return [one for message in messages if (one := read_status(message)) is not None]
