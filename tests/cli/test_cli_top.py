"""`bursar top`: waits as people read them."""

from typing import Any

import pytest

from bursar.cli.nodes.top import _queue, _wait, show_cluster


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0, "0s"),
        (0.035, "35ms"),
        (0.9996, "1s"),
        (0.0001, "0s"),
        (1, "1s"),
        (9.4, "9s"),
        (4210, "70m"),
        (93_784, "26h"),
    ],
)
def test_a_wait_is_shown_as_ages_are(seconds: float, shown: str) -> None:
    assert _wait(seconds) == shown


def queue(**figures: Any) -> dict[str, Any]:
    return {"name": "default", "depth": 3, "avgWaitTime": "75s", "p99WaitTime": "4210s", "scheduledLast1h": 8} | figures


def test_a_queue_out_of_which_nothing_was_placed_has_no_waits() -> None:
    assert _queue(queue())[1:] == ["3", "<none>", "75s", "70m"]
    assert _queue(queue(scheduledLast1h=0, avgWaitTime="0s", p99WaitTime="0s"))[3:] == ["<none>", "<none>"]


@pytest.mark.parametrize(
    ("average", "longest", "told"),
    [
        (35, 240, ", after 35ms on average, p99 240ms"),
        (75_300, 4_210_000, ", after 75s on average, p99 70m"),
        (0, 0, ""),
    ],
)
def test_how_long_placing_takes(average: int, longest: int, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    measured = {"capacity": "8", "allocatable": "8", "requested": "0"}
    nodes = {"total": 6, "ready": 1, "notReady": 2, "cordoned": 3}
    scheduling = {
        "pendingAllocations": 2, "schedulingRate": "0.5/sec",
        "avgSchedulingLatencyMs": average, "p99SchedulingLatencyMs": longest,
    }  # fmt: skip
    cluster = {"nodes": nodes, "cpu": measured, "memory": measured, "gpu": measured}
    show_cluster({"cluster": cluster, "scheduling": scheduling})
    assert capsys.readouterr().out.splitlines()[:2] == [
        "6 nodes: 1 ready, 2 not ready, 3 ready but cordoned",
        f"2 pending; placed 0.5/sec{told}",
    ]
