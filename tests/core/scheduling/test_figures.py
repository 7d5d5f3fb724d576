"""The figures of pending work and of recent decisions: asked of small cluster states."""

import pytest

from bursar.core.objects.allocation import Gang
from bursar.core.scheduling.cycle.cycle import decide
from bursar.core.scheduling.explain.explain import figures, queues, waiting_by_reason
from bursar.core.scheduling.explain.wait_stats import WaitStats
from bursar.core.scheduling.state.cluster_state import ClusterState
from support.scheduling.questions import NOW, POLICY, ask, charged, cluster_of, limited, placed, waiting


def test_queues_tell_their_depth_their_oldest_and_how_long_one_waits() -> None:
    cluster, waits = cluster_of(1), WaitStats()
    cluster.profiles = {"default": "default", "gpu-training": "ml"}
    waiting(cluster, ask("a", submitted_at=NOW - 100), ask("b", submitted_at=NOW - 50), ask("c", queue="odd"))
    waits.bound("default", NOW - 40, NOW - 10)
    waits.bound("default", NOW - 20, NOW - 10)
    waits.bound("default", NOW - 9000, NOW - 8000)
    found = {one.name: one for one in queues(cluster, waits, NOW)}
    assert list(found) == ["default", "gpu-training", "odd"]
    assert (found["default"].depth, found["default"].oldest_at) == (2, NOW - 100)
    assert (found["default"].wait.count, found["default"].wait.avg_seconds) == (2, 20)
    assert (found["default"].wait.p50_seconds, found["default"].wait.p99_seconds) == (10, 30)
    assert (found["gpu-training"].depth, found["gpu-training"].oldest_at) == (0, None)


def test_the_oldest_may_be_one_for_whom_capacity_is_being_made() -> None:
    cluster = cluster_of(4)
    placed(cluster, ask("low", 4), "n0", (0, 1, 2, 3))
    waiting(cluster, ask("high", 4, priority=100, submitted_at=NOW - 70), ask("later", 4, submitted_at=NOW - 7))
    decide(cluster, POLICY, NOW)
    assert queues(cluster, WaitStats(), NOW)[0].oldest_at == NOW - 70


def test_what_waits_is_counted_by_its_reason() -> None:
    cluster = limited(cluster_of(4), hard=2, bound=0)
    placed(cluster, ask("low", 4), "n0", (0, 1, 2, 3))
    waiting(cluster, charged("q1", 3), charged("q2", 3), ask("g", gang=Gang("g", 2)), ask("high", 4, priority=9))
    decide(cluster, POLICY, NOW)
    waiting(cluster, ask("new", 2, queue="other"))
    assert waiting_by_reason(cluster) == {
        "gang_incomplete": 1,
        "not_yet_tried": 1,
        "quota_exceeded": 2,
        "waiting_for_preemption": 1,
    }


def test_rates_and_preemptions_of_late() -> None:
    waits = WaitStats()
    for second in range(200):
        for _ in range(3):
            waits.bound("q", NOW - second - 1, NOW - 200 + second)
    waits.preempted(NOW - 4000)
    waits.preempted(NOW - 10)
    found = figures(ClusterState(), waits, NOW)
    assert found.per_second == pytest.approx(3.0, abs=0.1)
    assert (found.preemptions, found.latency.count, found.waiting) == (1, 600, 0)


def test_only_so_much_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bursar.core.scheduling.explain.wait_stats.QUEUES_MAX", 2)
    waits = WaitStats()
    for index, queue in enumerate(("old", "middle", "new")):
        waits.bound(queue, NOW - 10 + index, NOW + index)
    assert waits.queue("old", NOW).count == 0
    assert waits.queue("new", NOW).count == 1
