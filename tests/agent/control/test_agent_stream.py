"""The agent's stream against a real peer: what is said and when, what counts from when, and how it comes back."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs

from bursar.agent.control import stream as streams
from bursar.agent.control.certificates import NoCredentials, NodeCertificates, NodeCredentials
from bursar.agent.control.codec import HeartbeatAnswer, OutgoingHeartbeat
from bursar.agent.control.identity import load
from bursar.agent.control.stream import BACKOFF_SECONDS_MAX, ControlStream, backoff_seconds
from bursar.agent.machine.types import PlacementState, PlacementStatus, Run, Stop
from support.nodes.played_control_plane import Control, authority, joined, serving
from support.process.server import free_port


@dataclass(slots=True)
class Said:
    """A speaker that says what the test puts there, and remembers what it heard."""

    news: list[PlacementStatus] = field(default_factory=list)
    heard: list[tuple[HeartbeatAnswer, float | None]] = field(default_factory=list)
    heartbeats: int = 0

    def heartbeat(self, *, first: bool) -> OutgoingHeartbeat:
        self.heartbeats += 1
        told, self.news = self.news, []
        return OutgoingHeartbeat(
            statuses=told, inventory=first, capacity={"cpu": "4"} if first else {}, address="127.0.0.1:9"
        )

    def hear(self, answer: HeartbeatAnswer, sent_at: float | None) -> None:
        self.heard.append((answer, sent_at))


@asynccontextmanager
async def talking(credentials: NodeCredentials, speaker: Said, **options: Any) -> AsyncIterator[ControlStream]:
    stream = ControlStream("node-1", credentials, speaker, **options)
    task = asyncio.create_task(stream.run())
    try:
        yield stream
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def until(what: Callable[[], Any], seconds: float = 20.0) -> Any:
    async with asyncio.timeout(seconds):
        while not (result := what()):  # noqa: ASYNC110 - whatever it is, not all of it has an event
            await asyncio.sleep(0.01)
    return result


async def test_the_first_heartbeat_says_everything_and_the_later_ones_the_news() -> None:
    said = Said(news=[PlacementStatus("a", 1, PlacementState.RUNNING)])
    async with serving(Control(beat_seconds=600)) as control, talking(NoCredentials([control.address]), said) as stream:
        await until(lambda: said.heard)
        said.news.append(PlacementStatus("b", 1, PlacementState.STARTING))
        stream.poke()
        await control.until(lambda its: len(its.heartbeats) == 2)
    first, second = control.heartbeats
    assert (first.node_id, first.seq, first.inventory, first.protocol_version) == ("node-1", 1, True, 1)
    assert dict(first.capacity) == {"cpu": "4"}
    assert [one.allocation_id for one in first.pod_statuses] == ["a"]
    assert (second.seq, second.inventory, dict(second.capacity)) == (2, False, {})
    assert [one.allocation_id for one in second.pod_statuses] == ["b"]


async def test_it_sends_heartbeats_as_often_as_it_is_told() -> None:
    said = Said()
    async with serving(Control(beat_seconds=1)) as control, talking(NoCredentials([control.address]), said):
        await control.until(lambda its: len(its.heartbeats) >= 3)
    assert [heartbeat.seq for heartbeat in control.heartbeats[:3]] == [1, 2, 3]


async def test_an_answer_comes_with_the_moment_its_heartbeat_was_sent() -> None:
    ticks = iter(range(10_000))
    sent: list[float] = []

    def clock() -> float:
        return float(next(ticks))

    class Noting(Said):
        def heartbeat(self, *, first: bool) -> OutgoingHeartbeat:
            sent.append(clock())
            return OutgoingHeartbeat(inventory=first)

    said = Noting()
    async with (
        serving(Control(lease_seconds=120, beat_seconds=600)) as control,
        talking(NoCredentials([control.address]), said, clock=clock) as stream,
    ):
        await until(lambda: said.heard)
        await control.say(Stop("x", 1))
        await until(lambda: len(said.heard) == 2)
        stream.poke()
        await until(lambda: len(said.heard) == 3)
    answers = {answer.seq: (answer, sent_at) for answer, sent_at in said.heard}
    assert answers[1][0].lease_seconds == 120
    assert answers[1][1] is not None
    assert answers[2][1] is not None
    # After the heartbeat was gathered, and before anything else happened.
    assert sent[0] < answers[1][1] < sent[1] < answers[2][1]
    assert answers[0][1] is None, "what the control plane says by itself grants nothing"


async def test_what_is_wanted_is_heard_at_once_and_whole() -> None:
    run = Run("a", 3, "ml", "train", "physics", {"cpu": "1"}, {"memory": "1Gi"}, {"nvidia.com/gpu": (0, 2)}, ("true",))
    said = Said()
    async with (
        serving(Control(wanted=[run, Stop("b", 1, 7, "Preempted")], beat_seconds=600)) as control,
        talking(NoCredentials([control.address]), said),
    ):
        await until(lambda: said.heard)
        await control.say(Stop("a", 3, 0, "Deleted", "by trainer"))
        await until(lambda: len(said.heard) == 2)
    (first, _), (second, _) = said.heard
    assert first.complete
    assert first.directives == (run, Stop("b", 1, 7, "Preempted"))
    assert not second.complete
    assert second.directives == (Stop("a", 3, 0, "Deleted", "by trainer"),)


async def test_news_waits_for_the_answer_to_the_heartbeat_before() -> None:
    said = Said()
    async with serving(Control(beat_seconds=600)) as control, talking(NoCredentials([control.address]), said) as stream:
        await until(lambda: said.heard)
        control.silent = True
        stream.poke()
        await control.until(lambda its: len(its.heartbeats) == 2)
        for index in range(50):
            said.news.append(PlacementStatus(f"n{index}", 1, PlacementState.RUNNING))
            stream.poke()
            await asyncio.sleep(0)
        assert len(control.heartbeats) == 2
        control.silent = False
        await control.write(control.calls[-1], control.answer(control.heartbeats[-1]))
        await control.until(lambda its: len(its.heartbeats) == 3)
    assert len(control.heartbeats[2].pod_statuses) == 50


async def test_a_stream_that_ends_is_opened_again_with_everything() -> None:
    said = Said()
    port = free_port()
    credentials = NoCredentials([f"127.0.0.1:{port}"])
    async with talking(credentials, said):
        async with serving(Control(), f"127.0.0.1:{port}"):
            await until(lambda: said.heard)
        heard = len(said.heard)
        async with serving(Control(), f"127.0.0.1:{port}") as second:
            await until(lambda: len(said.heard) > heard)
    assert second.heartbeats[0].inventory
    assert second.heartbeats[0].seq == 1


async def test_another_address_is_used_when_one_is_gone() -> None:
    said, opened = Said(), {}
    for control in (Control(beat_seconds=600), Control(beat_seconds=600)):
        opened[id(control)] = control, AsyncExitStack()
        await opened[id(control)][1].enter_async_context(serving(control))
    addresses = [f"127.0.0.1:{free_port()}", *(control.address for control, _ in opened.values())]
    async with talking(NoCredentials(addresses), said):
        await until(lambda: said.heard)
        (held, its_end), (other, other_end) = sorted(opened.values(), key=lambda one: not one[0].heartbeats)
        await its_end.aclose()
        await other.until(lambda its: its.heartbeats)
    await other_end.aclose()
    assert held.heartbeats[0].inventory
    assert other.heartbeats[0].inventory


async def test_a_peer_that_is_silent_for_too_long_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "SILENCE_SECONDS_MIN", 0.2)
    monkeypatch.setattr(streams, "HEARTBEAT_SECONDS", 0.1)
    said = Said()
    async with (
        serving(Control(silent=True)) as dumb,
        serving(Control(beat_seconds=600)) as other,
        talking(NoCredentials([dumb.address, other.address]), said),
    ):
        await until(lambda: said.heard)
    assert other.heartbeats[0].inventory


async def test_a_refusal_is_told_with_the_next_step_and_only_once() -> None:
    said = Said()
    refusal = (grpc.StatusCode.PERMISSION_DENIED, "node 'node-1' was deleted")
    async with serving(Control(refusal=refusal)) as control:
        with capture_logs() as lines:
            async with talking(NoCredentials([control.address]), said):
                await until(lambda: control.streams >= 3)
    told = [line for line in lines if line["event"] == "stream_unavailable"]
    assert len(told) == 1
    assert told[0]["log_level"] == "error"
    assert "node 'node-1' was deleted" in told[0]["error"]
    assert "bursar node token --name node-1" in told[0]["next"]


def test_waits_grow_are_spread_and_stay_short() -> None:
    waits = [[backoff_seconds(troubles) for _ in range(50)] for troubles in range(30)]
    assert max(max(each) for each in waits) <= BACKOFF_SECONDS_MAX
    assert max(waits[0]) <= 0.1
    assert min(waits[29]) >= BACKOFF_SECONDS_MAX / 2
    assert len(set(waits[5])) > 1


# With certificates.


def papers_in(directory: Path, addresses: Sequence[str] = ()) -> NodeCertificates:
    return NodeCertificates(directory, "node-1", urls=[], token_file=None, document=dict, addresses=addresses)


async def test_it_speaks_with_the_nodes_certificate(tmp_path: Path) -> None:
    ours, said = authority(), Said()
    async with serving(Control(authority=ours, beat_seconds=600)) as control:
        joined(tmp_path, ours, "node-1", [control.address])
        async with talking(papers_in(tmp_path), said):
            await until(lambda: said.heard)
    assert b"bursar://node/node-1" in control.callers[0]["x509_subject_alternative_name"]


async def test_a_server_of_another_authority_hears_nothing(tmp_path: Path) -> None:
    said = Said()
    async with serving(Control(authority=authority())) as control:
        joined(tmp_path, authority(), "node-1", [control.address])
        with capture_logs() as lines:
            async with talking(papers_in(tmp_path), said):
                await until(lambda: [one for one in lines if one["event"] == "stream_unavailable"])
    assert not control.heartbeats


async def test_the_certificate_is_renewed_on_the_stream_and_used_at_once(tmp_path: Path) -> None:
    ours, said = authority(), Said()
    async with serving(Control(authority=ours, beat_seconds=600)) as control:
        old = joined(tmp_path, ours, "node-1", [control.address], ago=timedelta(hours=17))
        async with talking(papers_in(tmp_path), said):
            await control.until(lambda its: its.streams == 2 and len(its.heartbeats) >= 2)
    kept = load(tmp_path, "node-1")
    assert kept is not None
    assert kept.expires > old.expires
    assert not kept.is_due(datetime.now(UTC))
    assert control.heartbeats[0].certificate_request
    assert not control.heartbeats[1].certificate_request
    assert control.callers[1]["x509_pem_cert"] == [kept.certificate]


async def test_a_certificate_that_is_somebody_elses_is_not_taken(tmp_path: Path) -> None:
    ours, said = authority(), Said()

    class Wrong(Control):
        def signed(self, request: bytes, node: str) -> bytes:
            return super().signed(request, "node-2")

    async with serving(Wrong(authority=ours, beat_seconds=600)) as control:
        old = joined(tmp_path, ours, "node-1", [control.address], ago=timedelta(hours=17))
        with capture_logs() as lines:
            async with talking(papers_in(tmp_path), said):
                await until(lambda: [one for one in lines if "not that of node" in str(one.get("error"))])
    assert load(tmp_path, "node-1") == old
