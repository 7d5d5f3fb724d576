"""Messages and values are two forms of one thing; what is not understood is passed over."""

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bursar.agent.control.codec import (
    OutgoingHeartbeat,
    heartbeat_message,
    read_answer,
    read_directive,
    status_message,
)
from bursar.agent.host.probe import GpuLoad, Load
from bursar.agent.machine.types import Directive, LeaseGrant, PlacementState, PlacementStatus, Run, Stop, Usage
from bursar.wire.scheduler.v1 import node_agent_pb2 as pb
from support.nodes.directive_messages import directive_message, read_status

words = st.text(st.characters(codec="utf-8"), max_size=12)
names = words.filter(bool)
counts = st.integers(0, 2**62)
texts: st.SearchStrategy[Mapping[str, str]] = st.dictionaries(words, words, max_size=3)
indices = st.lists(st.integers(0, 2**31 - 1), max_size=3).map(tuple)
runs = st.builds(
    Run,
    uid=names,
    epoch=counts,
    namespace=words,
    name=words,
    tenant=words,
    tenant_uid=words,
    requests=texts,
    limits=texts,
    devices=st.dictionaries(words, indices, max_size=2),
    command=st.lists(words, max_size=3).map(tuple),
    env=texts,
    working_dir=words,
    ttl_seconds=counts,
    leased=st.booleans(),
    grace_seconds=counts,
    nodes=st.lists(words, max_size=3).map(tuple),
    exclusive=st.booleans(),
    annotations=texts,
)
stops = st.builds(Stop, uid=names, epoch=counts, grace_seconds=counts, reason=words, message=words)
figures = st.floats(0, 1e12)
statuses = st.builds(
    PlacementStatus,
    uid=words,
    epoch=counts,
    state=st.sampled_from(PlacementState),
    reason=words,
    message=words,
    exit_code=st.none() | st.integers(-(2**31), 2**31 - 1),
    usage=st.builds(
        Usage,
        seconds=figures,
        cpu_seconds=figures,
        memory_bytes=counts,
        memory_bytes_max=counts,
        gpu_seconds=figures,
    ),
)


@given(runs | stops)
def test_a_directive_comes_through_whole(directive: Directive) -> None:
    sent = directive_message(directive).SerializeToString()
    assert read_directive(pb.SchedulingDirective.FromString(sent)) == directive


@given(statuses)
def test_a_status_comes_through_whole(status: PlacementStatus) -> None:
    assert read_status(pb.PodStatus.FromString(status_message(status).SerializeToString())) == status


def test_an_exit_code_of_zero_is_not_the_same_as_none() -> None:
    assert status_message(PlacementStatus("a", 1, PlacementState.SUCCEEDED, exit_code=0)).HasField("exit_code")
    assert not status_message(PlacementStatus("a", 1, PlacementState.RUNNING)).HasField("exit_code")


def test_a_heartbeat_says_who_where_and_how_busy() -> None:
    heartbeat = OutgoingHeartbeat(
        load=Load(1.5, 2, 3, (GpuLoad(1, 0.5, 7),)), capacity={"cpu": "4"}, address="n:1", certificate_request=b"x"
    )
    message = heartbeat_message(heartbeat, node="node-1", seq=7, timestamp_ms=1234)
    assert (message.node_id, message.seq, message.timestamp, message.protocol_version) == ("node-1", 7, 1234, 1)
    assert (message.address, message.certificate_request, dict(message.capacity)) == ("n:1", b"x", {"cpu": "4"})
    assert message.current_usage.cpu_cores == 1.5
    assert [(one.index, one.utilization, one.memory_bytes) for one in message.current_usage.gpus] == [(1, 0.5, 7)]


def test_an_answer_is_read_whole() -> None:
    answer = read_answer(
        pb.HeartbeatResponse(
            seq=3,
            complete=True,
            lease_duration_seconds=120,
            beat_seconds=5,
            directives=[directive_message(Stop("a", 1, 5))],
            acknowledgements=[pb.Acknowledgement(allocation_id="b", epoch=2)],
            leases=[
                pb.LeaseGrant(allocation_id="c", epoch=3, seconds=9, reason="ignored", freeze_seconds=4),
                pb.LeaseGrant(allocation_id="d", epoch=1, seconds=2, final=True, reason="slow", freeze_seconds=5),
                pb.LeaseGrant(allocation_id="e", epoch=1, final=True),
            ],
            certificate=b"pem",
        )
    )
    assert (answer.seq, answer.complete, answer.lease_seconds, answer.beat_seconds) == (3, True, 120.0, 5.0)
    assert answer.directives == (Stop("a", 1, 5),)
    assert answer.acknowledged == (("b", 2),)
    last = {("d", 1): LeaseGrant(2.0, "slow", 5.0), ("e", 1): LeaseGrant(0.0, "no reason was given")}
    assert answer.leases == {("c", 3): LeaseGrant(9.0), **last}
    assert answer.certificate == b"pem"


@pytest.mark.parametrize(
    "unknown",
    [
        pb.SchedulingDirective(type=pb.DIRECTIVE_TYPE_RUN),
        pb.SchedulingDirective(allocation_id="a"),
        pb.SchedulingDirective.FromString(b"\x08\x63\x12\x01a"),  # a type that a later version may have
    ],
)
def test_what_is_not_understood_is_passed_over_and_stops_nothing(unknown: pb.SchedulingDirective) -> None:
    known = directive_message(Stop("b", 1))
    answer = read_answer(pb.HeartbeatResponse(directives=[unknown, known], complete=True))
    assert answer.directives == (Stop("b", 1),)
    assert not answer.complete, "of a set with a gap nobody knows what else it wants"


def test_a_state_of_a_later_version_is_no_status() -> None:
    assert read_status(pb.PodStatus(allocation_id="a")) is None


def test_nonsense_grants_nothing() -> None:
    answer = read_answer(
        pb.HeartbeatResponse(
            lease_duration_seconds=-5,
            beat_seconds=-1,
            leases=[pb.LeaseGrant(allocation_id="a", epoch=1, seconds=-9)],
            directives=[pb.SchedulingDirective(type=pb.DIRECTIVE_TYPE_STOP, allocation_id="a", grace_seconds=-1)],
        )
    )
    assert (answer.lease_seconds, answer.beat_seconds, answer.leases) == (0.0, 0.0, {("a", 1): LeaseGrant(0.0)})
    assert answer.directives == (Stop("a", 0, 0),)
