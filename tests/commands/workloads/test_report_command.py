"""Reports of nodes, and the release of allocations: what ends when, and what comes back."""

import pytest

from bursar.commands.workloads.report import Report
from bursar.core.objects.allocation import Phase
from bursar.core.values.refusal import Code
from support.commands.records import GPU, TEST, Records, code, key_of, refusal, written

GANG = {"gangScheduling": {"groupId": "ring", "minMembers": 3}}


def wide(**spec: str) -> Records:
    """Work on two GPUs of each of two nodes."""
    records = Records()
    for name in ("a", "b"):
        records.node(name, gpu=2)
    records.allocation("wide", spec={"nodes": 2, **spec}, gpu=2)
    assert code(records.bind({"wide": ["a", "b"]})) == "ok"
    return records


def test_work_on_two_nodes_ends_when_both_have_said_so() -> None:
    records = wide()
    records.report("wide", Phase.SUCCEEDED, node="a")
    assert records.status("wide")["phase"] == "Scheduled"
    assert [records.nodes[name].allocated.get(GPU, 0) for name in ("a", "b")] == [0, 2000]
    assert records.used("tenant:default") == (4, 4)
    assert refusal(records.report("wide", Phase.SUCCEEDED, node="a")).code == Code.FORBIDDEN
    records.report("wide", Phase.SUCCEEDED, node="b")
    assert records.status("wide")["phase"] == "Succeeded"
    assert records.used("tenant:default") == (0, 0)


@pytest.mark.parametrize(
    ("first", "last", "becomes"),
    [
        (Phase.FAILED, Phase.SUCCEEDED, "Failed"),
        (Phase.SUCCEEDED, Phase.FAILED, "Failed"),
        (Phase.SUCCEEDED, Phase.SUCCEEDED, "Succeeded"),
    ],
)
def test_work_that_failed_on_one_node_has_failed(first: Phase, last: Phase, becomes: str) -> None:
    records = wide()
    records.report("wide", first, node="a")
    records.report("wide", last, node="b")
    assert records.status("wide")["phase"] == becomes


def test_the_first_node_that_fails_stops_the_others_and_its_exit_code_is_told() -> None:
    records = wide()
    records.report("wide", Phase.FAILED, node="b", exit_code=5)
    first = records.status("wide")
    assert (first["phase"], first["reason"], first["message"]) == ("Terminating", "MemberFailed", "exit code 5 on b")
    assert [(one.node, one.wanted) for one in records.placements.values()] == [("a", False)]
    records.report("wide", Phase.FAILED, node="a", exit_code=143)
    last = records.status("wide")
    assert (last["phase"], last["exitCode"], last["message"]) == ("Failed", 5, "exit code 5 on b")
    assert last["failure"] == {"node": "b", "exitCode": 5}
    assert [(one["name"], one["exitCode"]) for one in last["nodes"]] == [("a", 143), ("b", 5)]
    assert "reason" not in last


def test_the_others_go_on_where_the_work_asked_for_that() -> None:
    records = wide(onMemberFailure="wait")
    records.report("wide", Phase.FAILED, node="b", exit_code=5)
    assert records.status("wide")["phase"] == "Scheduled"
    records.report("wide", Phase.SUCCEEDED, node="a")
    last = records.status("wide")
    assert (last["phase"], last["exitCode"], last["message"]) == ("Failed", 5, "exit code 5 on b")


def test_a_member_that_fails_stops_its_gang_and_nothing_else() -> None:
    records = Records()
    records.node("a", gpu=8)
    for name in ("one", "two", "three"):
        records.allocation(name, spec=GANG, gpu=1)
    records.allocation("alone", gpu=1)
    records.bind(dict.fromkeys(("one", "two", "three"), ("a",)))
    records.bind({"alone": ["a"]})
    records.report("two", Phase.FAILED, node="a", exit_code=3)
    phases = {name: records.status(name)["phase"] for name in ("one", "two", "three", "alone")}
    assert phases == {"one": "Terminating", "two": "Failed", "three": "Terminating", "alone": "Scheduled"}
    assert records.status("two")["failure"] == {"node": "a", "exitCode": 3}
    for name in ("one", "three"):
        told = records.status(name)
        assert (told["message"], told["eviction"]["requeue"]) == ("two failed: exit code 3 on a", False)
        records.report(name, Phase.FAILED, node="a", exit_code=0)
        ended = records.status(name)
        assert (ended["phase"], ended["exitCode"], ended["reason"]) == ("Failed", 0, "MemberFailed")
        assert ended["message"] == "two failed: exit code 3 on a"
        assert ended["failure"] == {"allocation": "two", "node": "a", "exitCode": 3}
    assert records.used("tenant:default") == (1, 1)


def test_a_report_that_says_nothing_new_is_no_change() -> None:
    records = wide()
    records.report("wide", Phase.RUNNING, node="a")
    revision = records.revision
    assert code(records.report("wide", Phase.RUNNING, node="b")) == "ok"
    assert records.revision == revision


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"uid": "alloc-another"}, Code.CONFLICT),
        ({"gang": "other"}, Code.CONFLICT),
        ({"expected": 1}, Code.CONFLICT),
        ({"epoch": 7}, Code.STALE),
        ({"node": "c"}, Code.FORBIDDEN),
    ],
)
def test_a_report_about_something_else_is_refused(said: dict[str, object], expected: Code) -> None:
    command = Report(key=key_of("wide"), origin=TEST, phase=Phase.FAILED, **said)  # type: ignore[arg-type]
    records = wide()
    assert refusal(records.decide(command)).code == expected
    assert records.status("wide")["phase"] == "Scheduled"


def test_what_has_ended_stays_ended() -> None:
    records = wide()
    for name in ("a", "b"):
        records.report("wide", Phase.SUCCEEDED, node=name)
    assert refusal(records.report("wide", Phase.RUNNING)).code == Code.IMMUTABLE


def test_deleting_what_runs_waits_for_its_end() -> None:
    records = wide()
    assert written(records.delete(key_of("wide"))).type == "MODIFIED"
    assert records.status("wide")["phase"] == "Terminating"
    assert {one.wanted for one in records.placements.values()} == {False}
    assert records.used("tenant:default") == (4, 4)
    records.report("wide", Phase.CANCELLED, node="a")
    assert key_of("wide") in records.objects
    assert written(records.report("wide", Phase.CANCELLED, node="b")).type == "DELETED"
    assert records.used("tenant:default") == (0, 0)
    assert records.placements == {}


def test_usage_begins_with_the_first_word_and_ends_node_by_node() -> None:
    records = wide()
    records.report("wide", Phase.RUNNING, node="a")
    assert records.last is not None
    assert {node for node, _ in records.last.begun} == {"a", "b"}
    records.report("wide", Phase.SUCCEEDED, node="b")
    assert [(node, ended.phase) for (node, _), ended in records.last.ended.items()] == [("b", "Succeeded")]
