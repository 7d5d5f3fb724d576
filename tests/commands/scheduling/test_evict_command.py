"""Eviction and preemption: stopped work keeps what it holds until it is gone, and its first deadline stands."""

from datetime import timedelta

import pytest

from bursar.commands.command import Result
from bursar.commands.scheduling.evict import Evict, EvictionVictim, Preempt
from bursar.core.nodes.eviction import EvictionReason, EvictionRule, Notice
from bursar.core.objects.allocation import Phase
from bursar.core.values.refusal import Code
from support.commands.records import TEST, Records, code, key_of, refusal

PREEMPTED = Notice(EvictionReason.PREEMPTED, EvictionRule.ADMIN, "prod/urgent", "Preempted by prod/urgent", 60)
GANG = {"gangScheduling": {"groupId": "g", "minMembers": 2}}


def running(*names: str, gang: bool = False, **spec: object) -> Records:
    """Each runs on one GPU of node n1."""
    records = Records()
    records.node("n1", gpu=4)
    for name in names:
        records.allocation(name, spec=GANG if gang else spec, gpu=1)
    assert code(records.bind(dict.fromkeys(names, ("n1",)))) == "ok"
    for name in names:
        records.report(name, Phase.RUNNING)
    return records


def stop(records: Records, name: str, notice: Notice = PREEMPTED) -> Result:
    one = records.objects[key_of(name)]
    return records.decide(Evict(key=one.key, uid=one.uid, gang=one.gang, notice=notice, origin=TEST))


def test_what_is_evicted_is_told_why_by_whom_and_by_when() -> None:
    records = running("low")
    assert code(stop(records, "low")) == "ok"
    told = records.status("low")
    assert (told["phase"], told["reason"], told["message"]) == ("Terminating", "Preempted", "Preempted by prod/urgent")
    notice = told["eviction"]
    assert (notice["by"], notice["gracePeriodSeconds"], notice["requeue"]) == ("prod/urgent", 60, True)
    assert notice["deadline"] == "2031-01-01T12:01:00Z"
    assert [one.wanted for one in records.placements.values()] == [False]
    assert records.used("tenant:default") == (1, 1), "nothing comes back before it is gone"


@pytest.mark.parametrize("phase", [Phase.FAILED, Phase.CANCELLED, Phase.PENDING])
def test_what_was_stopped_is_pending_again_and_keeps_what_it_was_accepted_for(phase: Phase) -> None:
    records = running("low")
    submitted = records.objects[key_of("low")].doc
    stop(records, "low")
    assert code(records.report("low", phase, exit_code=143)) == "ok"
    status = records.status("low")
    assert records.objects[key_of("low")].doc == submitted, "the time of its submission stays"
    assert (status["phase"], status["reason"], status["restarts"]) == ("Pending", "Preempted", 1)
    assert status["message"] == "Preempted by prod/urgent"
    assert {one["type"]: one["status"] for one in status["conditions"]} == {"Scheduled": "False"}
    assert not {"eviction", "nodes", "nodeName"} & set(status)
    assert records.used("tenant:default") == (1, 0)
    assert code(records.bind({"low": ["n1"]})) == "ok"


def test_what_had_succeeded_by_itself_has_succeeded() -> None:
    records = running("low")
    stop(records, "low")
    # A node that patches the phase alone repeats the reason that stood there.
    records.report("low", Phase.SUCCEEDED, reason="Preempted", message="Preempted by prod/urgent")
    assert records.status("low")["phase"] == "Succeeded"
    assert not {"eviction", "reason", "message"} & set(records.status("low"))
    assert "Terminating" not in {one["type"] for one in records.status("low")["conditions"]}


@pytest.mark.parametrize(
    ("first", "last", "becomes"),
    [
        (Phase.SUCCEEDED, Phase.SUCCEEDED, "Succeeded"),
        (Phase.SUCCEEDED, Phase.CANCELLED, "Pending"),
        (Phase.FAILED, Phase.SUCCEEDED, "Pending"),
    ],
)
def test_work_on_two_nodes_waits_again_when_both_have_spoken(first: Phase, last: Phase, becomes: str) -> None:
    records = Records()
    for name in ("a", "b"):
        records.node(name, gpu=2)
    records.allocation("wide", spec={"nodes": 2}, gpu=1)
    records.bind({"wide": ["a", "b"]})
    stop(records, "wide")
    records.report("wide", first, node="a")
    assert records.status("wide")["phase"] == "Terminating"
    records.report("wide", last, node="b")
    assert records.status("wide")["phase"] == becomes


@pytest.mark.parametrize(("grace", "deadline"), [(600, "12:01:00"), (60, "12:01:00"), (5, "12:00:05")])
def test_evicting_twice_never_moves_the_deadline_back(grace: int, deadline: str) -> None:
    records = running("low")
    stop(records, "low")
    first = records.status("low")["eviction"]
    stop(records, "low", Notice(EvictionReason.DRAINED, EvictionRule.DRAIN, "user:admin", "drained", grace))
    again = records.status("low")
    assert again["eviction"]["deadline"] == f"2031-01-01T{deadline}Z"
    assert (again["eviction"]["id"], again["reason"]) == (first["id"], "Preempted"), "the first reason stands"


def test_what_is_not_placed_cannot_be_evicted() -> None:
    records = running("done")
    records.allocation("waiting", gpu=1)
    records.report("done", Phase.SUCCEEDED)
    assert [code(stop(records, name)) for name in ("waiting", "done")] == ["stale", "stale"]
    command = Evict(key=key_of("nobody"), origin=TEST, notice=PREEMPTED)
    assert refusal(records.decide(command)).code == Code.NOT_FOUND


def test_another_of_the_same_name_is_left_alone() -> None:
    records = running("low")
    command = Evict(key=key_of("low"), uid="alloc-another", origin=TEST, notice=PREEMPTED)
    assert refusal(records.decide(command)).code == Code.CONFLICT
    assert records.status("low")["phase"] == "Running"


@pytest.mark.parametrize("order", [("delete", "evict"), ("evict", "delete")])
def test_what_is_being_deleted_just_ends(order: tuple[str, str]) -> None:
    records = running("low")
    for step in order:
        assert code(stop(records, "low") if step == "evict" else records.delete(key_of("low"))) == "ok"
    assert records.status("low")["eviction"]["requeue"] is False
    records.report("low", Phase.PENDING)
    assert key_of("low") not in records.objects
    assert records.used("tenant:default") == (0, 0)


def test_a_gang_is_evicted_as_a_whole() -> None:
    records = running("one", "two", gang=True)
    records.allocation("alone", gpu=1)
    records.bind({"alone": ["n1"]})
    stop(records, "one")
    phases = {name: records.status(name)["phase"] for name in ("one", "two", "alone")}
    assert phases == {"one": "Terminating", "two": "Terminating", "alone": "Scheduled"}
    assert len({records.status(name)["eviction"]["id"] for name in ("one", "two")}) == 1


# Preemption.


def plan(records: Records, nominee: str, *victims: str) -> Preempt:
    one, others = records.objects[key_of(nominee)], [records.objects[key_of(name)] for name in victims]
    return Preempt(
        key=one.key, uid=one.uid, nominated=("n1",), until=records.now + timedelta(seconds=90), origin=TEST,
        victims=tuple(EvictionVictim(it.key, it.uid, PREEMPTED, it.gang) for it in others),
    )  # fmt: skip


def test_victims_are_stopped_and_their_capacity_is_held_in_one_step() -> None:
    records = running("one", "two")
    records.allocation("urgent", gpu=4)
    assert code(records.decide(plan(records, "urgent", "one", "two"))) == "ok"
    assert [records.status(name)["phase"] for name in ("one", "two", "urgent")] == ["Terminating"] * 2 + ["Pending"]
    assert records.status("urgent")["nominated"] == [{"node": "n1", "until": "2031-01-01T12:01:30Z"}]


@pytest.mark.parametrize("gone", ["nominee placed", "nominee deleted", "victim anew"])
def test_a_plan_that_went_stale_stops_nobody(gone: str) -> None:
    records = running("one", "two")
    records.allocation("urgent", gpu=1)
    command = plan(records, "urgent", "one", "two")
    if gone == "nominee placed":
        records.bind({"urgent": ["n1"]})
    elif gone == "nominee deleted":
        records.delete(key_of("urgent"))
    else:
        records.report("two", Phase.SUCCEEDED)
        records.delete(key_of("two"))
        records.allocation("two", gpu=1)
    assert refusal(records.decide(command)).code == Code.STALE
    assert records.status("one")["phase"] == "Running"


def test_a_victim_that_has_ended_is_skipped() -> None:
    records = running("one", "two")
    records.allocation("urgent", gpu=1)
    command = plan(records, "urgent", "one", "two")
    records.report("one", Phase.SUCCEEDED)
    assert code(records.decide(command)) == "ok"
    assert [records.status(name)["phase"] for name in ("one", "two")] == ["Succeeded", "Terminating"]
