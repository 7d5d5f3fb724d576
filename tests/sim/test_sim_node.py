"""The machine of simulated nodes, at a clock of our own."""

import asyncio
import math
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from bursar.core.nodes.node import SIMULATED
from bursar.core.objects.allocation import Phase
from bursar.sim.drive import Answer, Drive, SimPace
from bursar.sim.node import EXPIRED, PAUSE_SECONDS_MAX, REFUSALS_MAX, NodeReport, Nodes
from bursar.sim.shape import GPU, NodeShape, documents
from bursar.sim.work import EXIT, SECONDS, SimWork, Whole, read_work


def bound(*nodes: str, revision: int = 1, **but: Any) -> SimWork:
    one = SimWork("team", "job", "alloc-1", revision, Phase.SCHEDULED, nodes or ("a",))
    return replace(one, **but)


def said(reports: list[NodeReport]) -> list[tuple[str, str]]:
    return [(one.node, str(one.phase)) for one in reports]


def started(nodes: Nodes, work: SimWork, now: float = 0.0) -> None:
    """Seen, and reported Running, in the revision after that in which it was bound."""
    for report in nodes.see(work, now):
        assert report.phase is Phase.RUNNING
        assert nodes.accepted(report, work.revision + 1, now) == []


def test_what_is_bound_is_started_and_ends_when_its_time_has_come() -> None:
    nodes = Nodes(["a"])
    (running,) = nodes.see(bound(seconds=10.0), 100.0)
    assert running.phase is Phase.RUNNING
    assert nodes.running == 0
    assert nodes.accepted(running, 2, 101.0) == []
    assert (nodes.running, nodes.next_at) == (1, 111.0)
    assert nodes.due(110.9) == []
    (ended,) = nodes.due(111.0)
    assert (ended.phase, ended.exit_code, ended.reason) == (Phase.SUCCEEDED, 0, "")
    assert nodes.accepted(ended, 3, 111.1) == []
    assert (nodes.running, nodes.ended, nodes.next_at) == (0, 1, math.inf)


@pytest.mark.parametrize(
    ("work", "default", "ends_at", "phase", "reason", "exit_code"),
    [
        ({"seconds": 5.0}, 60.0, 5.0, "Succeeded", "", 0),
        ({}, 60.0, 60.0, "Succeeded", "", 0),
        ({}, None, math.inf, "", "", None),
        ({"ttl_seconds": 30}, None, 30.0, "Failed", EXPIRED, None),
        ({"ttl_seconds": 30, "seconds": 40.0}, None, 30.0, "Failed", EXPIRED, None),
        ({"ttl_seconds": 30, "seconds": 30.0}, None, 30.0, "Succeeded", "", 0),
        ({"seconds": 5.0, "exit_code": 3}, None, 5.0, "Failed", "", 3),
    ],
    ids=["its own time", "the default", "for ever", "until its ttl", "ttl before time", "time before ttl", "exit code"],
)
def test_how_a_run_ends(
    work: dict[str, Any], default: float | None, ends_at: float, phase: str, reason: str, exit_code: int | None
) -> None:
    nodes = Nodes(default_seconds=default)
    started(nodes, bound(**work))
    assert nodes.next_at == ends_at
    if ends_at < math.inf:
        (ended,) = nodes.due(ends_at)
        assert (str(ended.phase), ended.reason, ended.exit_code) == (phase, reason, exit_code)


def test_each_node_speaks_for_itself_and_others_are_not_spoken_for() -> None:
    nodes = Nodes(["a", "b"])
    work = bound("a", "b", "theirs", seconds=1.0)
    first, second = nodes.see(work, 0.0)
    nodes.accepted(first, 2, 0.0)
    nodes.accepted(second, 2, 3.0)
    (ended,) = nodes.due(1.0)
    assert (ended.node, nodes.running) == ("a", 1)
    nodes.accepted(ended, 3, 1.0)
    # What the feed says of it now leaves b alone, and does not start a again.
    assert nodes.see(replace(work, revision=3, phase=Phase.RUNNING, nodes=("b", "theirs")), 1.1) == []
    (ended,) = nodes.due(4.0)
    nodes.accepted(ended, 4, 4.0)
    assert (ended.node, nodes.ended) == ("b", 1)


def test_others_nodes_are_none_of_our_business() -> None:
    nodes = Nodes(["a"])
    assert nodes.see(bound("b"), 0.0) == []
    assert not nodes.knows("alloc-1")


def test_one_thing_is_said_at_a_time() -> None:
    nodes = Nodes()
    (running,) = nodes.see(bound(seconds=0.0), 0.0)
    assert nodes.see(bound(revision=2, seconds=0.0), 0.0) == []
    stopping = bound(revision=3, seconds=0.0, phase=Phase.TERMINATING, deleted=True)
    assert nodes.see(stopping, 0.0) == []
    assert said(nodes.accepted(running, 2, 0.0)) == [("a", "Cancelled")]


def test_versions_older_than_an_answer_change_nothing() -> None:
    nodes = Nodes()
    started(nodes, bound(revision=4, seconds=10.0))
    assert nodes.see(bound(revision=4, seconds=10.0), 9.0) == []
    assert nodes.next_at == 10.0
    (ended,) = nodes.due(10.0)
    nodes.accepted(ended, 6, 10.0)
    # The feed lags behind: it still shows it running, and then its end.
    assert nodes.see(bound(revision=5, phase=Phase.RUNNING, started_at=0.0, seconds=10.0), 10.1) == []
    assert nodes.knows("alloc-1")
    assert nodes.see(bound(revision=6, phase=Phase.SUCCEEDED, nodes=()), 10.2) == []
    assert not nodes.knows("alloc-1")


def test_what_was_placed_anew_starts_anew() -> None:
    nodes = Nodes()
    started(nodes, bound(seconds=10.0, epoch=1))
    # That it had waited in between was not seen.
    assert said(nodes.see(bound(revision=9, seconds=10.0, epoch=2), 8.0)) == [("a", "Running")]
    assert nodes.due(10.0) == []


def test_what_runs_already_is_taken_over_with_the_time_it_has_left() -> None:
    nodes = Nodes()
    running = bound(phase=Phase.RUNNING, started_at=100.0, seconds=30.0)
    assert nodes.see(running, 120.0) == []
    assert (nodes.running, nodes.next_at) == (1, 130.0)
    late = Nodes()
    assert said(late.see(running, 500.0)) == [("a", "Succeeded")]


@pytest.mark.parametrize(
    ("grace", "stop", "expected"),
    [(30.0, 0.0, 0.0), (30.0, 5.0, 5.0), (2.0, 5.0, 2.0), (None, 5.0, 5.0)],
    ids=["at once", "as long as it takes", "the grace is shorter", "no grace is told"],
)
@pytest.mark.parametrize("deleted", [True, False], ids=["deleted", "evicted"])
def test_what_has_to_go_is_stopped_in_time(grace: float | None, stop: float, expected: float, deleted: bool) -> None:
    nodes = Nodes(stop_seconds=stop)
    started(nodes, bound())
    going = bound(
        revision=5, phase=Phase.TERMINATING, deleted=deleted, grace_seconds=grace, reason="" if deleted else "Preempted"
    )
    reports = nodes.see(going, 100.0) + nodes.due(100.0 + expected)
    assert nodes.due(1000.0) == []
    (ended,) = reports
    wanted = (Phase.CANCELLED, "") if deleted else (Phase.FAILED, "Preempted")
    assert (ended.phase, ended.reason, ended.exit_code) == (*wanted, None)


def test_asked_twice_to_stop_it_takes_no_longer() -> None:
    nodes = Nodes(stop_seconds=10.0)
    started(nodes, bound())
    going = bound(revision=5, phase=Phase.TERMINATING, deleted=True, grace_seconds=8.0)
    nodes.see(going, 100.0)
    nodes.see(replace(going, revision=6), 105.0)
    assert nodes.next_at == 108.0
    nodes.see(replace(going, revision=7, grace_seconds=1.0), 105.0)
    assert said(nodes.due(106.0)) == [("a", "Cancelled")]


def test_a_refused_report_is_made_again_so_often_and_no_more_until_something_changes() -> None:
    nodes = Nodes()
    made = 0
    reports = nodes.see(bound(), 0.0)
    while reports:
        made += 1
        nodes.refused(reports[0])
        reports = nodes.see(bound(), 0.0)
    assert made == REFUSALS_MAX + 1
    assert nodes.next_at == math.inf
    assert said(nodes.see(bound(revision=2), 0.0)) == [("a", "Running")]


def test_what_does_not_get_through_is_said_again_later_for_as_long_as_it_takes() -> None:
    nodes = Nodes()
    now = 0.0
    (report,) = nodes.see(bound(), now)
    for _ in range(50):
        nodes.postponed(report, now)
        assert now < nodes.next_at <= now + PAUSE_SECONDS_MAX
        now = nodes.next_at
        (report,) = nodes.due(now)
    assert report.phase is Phase.RUNNING
    assert nodes.accepted(report, 2, now) == []


def test_answers_that_come_too_late_are_nobodys() -> None:
    nodes = Nodes()
    (report,) = nodes.see(bound(seconds=1.0), 0.0)
    nodes.forget("alloc-1")
    assert nodes.accepted(report, 2, 0.0) == []
    nodes.refused(report)
    nodes.postponed(report, 0.0)
    assert (nodes.running, nodes.next_at) == (0, math.inf)


def test_what_a_list_does_not_name_is_gone() -> None:
    nodes = Nodes()
    started(nodes, bound(seconds=1.0))
    nodes.keep(["alloc-2"])
    assert not nodes.knows("alloc-1")
    assert nodes.due(5.0) == []


class Deaf:
    """A way to a server that never answers."""

    async def say(self, _: Sequence[NodeReport]) -> list[Answer]:
        return await asyncio.Event().wait() and []

    async def look(self, _: SimWork) -> None:
        return None


async def test_whoever_keeps_time_is_cancelled_also_at_the_moment_when_something_comes() -> None:
    drive = Drive(Nodes(), Deaf(), SimPace(speakers=1, batch_max=1))
    running = asyncio.create_task(drive.run())
    started = bound(phase=Phase.RUNNING, started_at=time.time())
    drive.see(replace(started, uid="alloc-1", seconds=2000.0))
    for _ in range(5):
        await asyncio.sleep(0)
    drive.see(replace(started, uid="alloc-2", seconds=1000.0))
    running.cancel()
    await asyncio.wait((running,), timeout=10)
    assert running.cancelled()


@given(st.lists(st.sampled_from(["accept", "refuse", "postpone", "wait", "delete", "evict"]), max_size=40))
def test_whatever_happens_each_node_ends_what_it_has_at_most_once(events: list[str]) -> None:
    nodes = Nodes(stop_seconds=1.0)
    now, revision, work = 0.0, 1, bound("a", "b", seconds=3.0)
    waiting = nodes.see(work, now)
    ended: list[str] = []
    for event in events:
        revision += 1
        if event == "wait":
            now += 1.0
            waiting += nodes.due(now)
        elif event in ("delete", "evict"):
            left = tuple(one for one in ("a", "b") if one not in ended)
            work = replace(
                work, revision=revision, phase=Phase.TERMINATING, deleted=event == "delete" or work.deleted, nodes=left
            )
            waiting += nodes.see(work, now)
        elif waiting:
            report = waiting.pop(0)
            assert report.node not in ended
            if event == "accept":
                ended += [report.node] if report.phase is not Phase.RUNNING else []
                waiting += nodes.accepted(report, revision, now)
            elif event == "refuse":
                nodes.refused(report)
            else:
                nodes.postponed(report, now)
        assert len({one.node for one in waiting}) == len(waiting)
    assert len(ended) == len(set(ended))


def whole(status: dict[str, Any], **metadata: Any) -> SimWork:
    document = {
        "metadata": {"name": "job", "namespace": "team", "uid": "alloc-1", "resourceVersion": "7", **metadata},
        "spec": {"ttl": "2m", "resources": {"requests": {"cpu": "1"}}},
        "status": status,
    }
    one = msgspec.convert(document, Whole)
    return read_work(one, one.status, 7)


def test_an_allocation_is_read() -> None:
    status = {
        "phase": "Running",
        "startTime": "2024-01-15T10:30:05Z",
        "nodes": [{"name": "a", "devices": {"nvidia.com/gpu": [0]}, "phase": "Succeeded"}, {"name": "b"}],
    }
    work = whole(status, annotations={SECONDS: "1.5", EXIT: "9", "other": "x"}, labels={"app": "train"})
    assert (work.nodes, work.seconds, work.exit_code, work.ttl_seconds) == (("b",), 1.5, 9, 120)
    assert (work.started_at, work.deleted, work.reason) == (1705314605.0, False, "")


@pytest.mark.parametrize("words", ["", "soon", "-1", "nan", "inf", "١"])
def test_annotations_that_cannot_be_read_are_not_there(words: str) -> None:
    work = whole({"phase": "Scheduled"}, annotations={SECONDS: words, EXIT: words})
    assert (work.seconds, work.exit_code) == (None, 0)


@pytest.mark.parametrize("phase", ["Pending", "Succeeded", "Failed", "Cancelled"])
def test_what_waits_or_has_ended_is_nowhere(phase: str) -> None:
    assert whole({"phase": phase, "nodes": [{"name": "a"}]}).nodes == ()


def test_an_eviction_and_a_deletion_are_read() -> None:
    eviction = {"reason": "Preempted", "gracePeriodSeconds": 30, "rule": "LowerPriority"}
    work = whole({"phase": "Terminating", "reason": "Preempted", "eviction": eviction})
    assert (work.deleted, work.reason, work.grace_seconds) == (False, "Preempted", 30)
    deletion = {"deletionTimestamp": "2024-01-15T10:30:05Z", "deletionGracePeriodSeconds": 5}
    work = whole({"phase": "Terminating", "eviction": eviction}, **deletion)
    assert (work.deleted, work.grace_seconds) == (True, 5)
    assert whole({"phase": "Terminating"}).reason == "Evicted"


def test_nodes_are_dealt_out_over_racks_and_zones() -> None:
    made = documents(NodeShape(8, gpus=4, racks=4, zones=2, labels={"pool": "test"}))
    labels = [one["metadata"]["labels"] for one in made]
    assert [one["metadata"]["name"] for one in made][:2] == ["sim-0001", "sim-0002"]
    assert [one["rack"] for one in labels[:5]] == ["rack-1", "rack-2", "rack-3", "rack-4", "rack-1"]
    # A rack is in one zone.
    assert len({(one["rack"], one["zone"]) for one in labels}) == 4
    assert {one["zone"] for one in labels} == {"zone-1", "zone-2"}
    assert all(one[SIMULATED] == "true" and one["pool"] == "test" for one in labels)
    assert made[0]["spec"]["capacity"][GPU] == "4"
    assert all(one["spec"]["taints"] == [{"key": SIMULATED, "effect": "NoSchedule"}] for one in made)
    assert GPU not in documents(NodeShape(1, gpus=0))[0]["spec"]["capacity"]
