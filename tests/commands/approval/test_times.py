"""The times of approvals without a database: expiry, notices, and what becomes of approved work at the end."""

from datetime import timedelta
from typing import Any

import msgspec
import pytest

from bursar.commands.command import Result, Written
from bursar.commands.scheduling.evict import Evict
from bursar.core.batch.unit_of_work import UnitOfWork
from bursar.core.nodes.eviction import EvictionReason, EvictionRule, Notice
from bursar.core.objects.allocation import Phase
from bursar.core.objects.approval import DUE_FIELD, Decision, Verdict
from bursar.core.objects.notification import Notification
from bursar.core.objects.object import Key, Origin, Write
from bursar.core.values.instant import timestamp
from bursar.ops.approval.decide import Judgement, decide_command, timer_command
from support.commands.records import GPU, Records, code, key_of, refusal

DAY = 86_400
CLAIM = Key("ResourceClaim", "lab", "c")
WORK = key_of("a", "lab")
PENDING = "pending_requests"


class Lab(Records):
    """A tenant whose requests pass gates, with all notifications that were sent."""

    def __post_init__(self) -> None:
        self.sent: list[Notification] = []
        self.written: list[Write] = []
        super().__post_init__()

    def _store(self, batch: UnitOfWork) -> None:
        super()._store(batch)
        self.sent += batch.notifications
        self.written += batch.writes

    @property
    def types(self) -> list[str]:
        return [one.type for one in self.sent]

    def claim(self, **resources: str) -> Result:
        spec = {"type": "cluster", "resources": resources or {"clusters": "2"}}
        return self.create("ResourceClaim", {"metadata": {"name": "c", "namespace": "lab"}, "spec": spec})

    def rule(
        self, key: Key, verdict: str = "approve", *, gate: str = "quota", reason: str = "", until: str = ""
    ) -> Result:
        decision = Decision(gate, Verdict(verdict), "ann", reason, until)
        return self.decide(decide_command(Judgement(self.objects[key], decision, Origin("user:ann", verdict))))

    def approve(self, key: Key, seconds: float | None = None) -> Result:
        return self.rule(key, until=self.at(seconds) if seconds is not None else "")

    def time(self, key: Key) -> Result:
        return self.decide(timer_command(self.objects[key]))

    def at(self, seconds: float) -> str:
        return timestamp(self.now + timedelta(seconds=seconds))

    def approval(self, key: Key) -> dict[str, Any]:
        found: dict[str, Any] = self.status_of(key)["approval"]
        return found

    def due(self, key: Key) -> str:
        return self.objects[key].fields.get(DUE_FIELD, "")

    def held(self, dimension: str) -> int:
        return self.used("tenant:lab", dimension)[0]


def lab(**policy: Any) -> Lab:
    records = Lab()
    records.tenant("lab", approval={"gates": ["quota"], **policy})
    records.namespace("lab", "lab")
    records.node("n1", gpu=8)
    return records


def said(notification: Notification) -> dict[str, Any]:
    decoded: dict[str, Any] = msgspec.json.decode(notification.data)
    return decoded


# Undecided.


def test_a_request_that_nobody_decides_expires_at_its_time_and_not_before() -> None:
    records = lab(pendingSeconds=60)
    records.claim()
    records.wait(59)
    assert isinstance(records.time(CLAIM), Written), "nothing is due yet"
    assert records.held(PENDING) == 1
    records.wait(1)
    assert code(records.time(CLAIM)) == "ok"
    approval, status = records.approval(CLAIM), records.status_of(CLAIM)
    assert (approval["state"], approval["reason"]) == ("expired", "Undecided")
    assert status["reason"] == "ApprovalExpired"
    assert status["message"] == "nobody decided at gate quota until 2031-01-01T12:01:00Z"
    assert (records.held(PENDING), records.held("clusters"), records.due(CLAIM)) == (0, 0, "")
    assert records.types == ["request.expired"]
    assert records.sent[0].tenant == "lab"
    assert records.sent[0].subject == "resourceclaims/lab/c"
    assert (said(records.sent[0])["reason"], said(records.sent[0])["gate"]) == ("Undecided", "quota")
    assert isinstance(records.time(CLAIM), Written), "once is enough"
    assert refusal(records.approve(CLAIM)).code == "already_decided"
    assert len(records.sent) == 1


def test_without_a_limit_of_time_nothing_is_due() -> None:
    records = lab(pendingSeconds=0)
    records.claim()
    assert records.due(CLAIM) == ""


def test_an_expired_allocation_and_an_expired_job_have_failed() -> None:
    records = lab(pendingSeconds=60)
    records.allocation("a", "lab", gpu=1)
    template = {"spec": {"resources": {"requests": {GPU: "1"}}}}
    job = Key("Job", "lab", "train")
    records.create("Job", {"metadata": {"name": "train", "namespace": "lab"}, "spec": {"template": template}})
    records.wait(60)
    for key in (WORK, job):
        assert code(records.time(key)) == "ok"
        status = records.status_of(key)
        assert (status["phase"], status["reason"]) == ("Failed", "ApprovalExpired")
        assert records.objects[key].fields["status.phase"] == "Failed"
    assert records.held(PENDING) == 0


def test_a_gang_expires_as_a_set() -> None:
    records = lab(pendingSeconds=60)
    gang = {"gangScheduling": {"groupId": "g", "minMembers": 3}}
    for name in ("a", "b"):
        records.allocation(name, "lab", spec=gang, gpu=1)
        records.wait(30)
    assert code(records.time(WORK)) == "ok"
    assert [records.status(name, "lab")["phase"] for name in ("a", "b")] == ["Failed", "Failed"]
    assert records.held(PENDING) == 0
    assert records.gangs["lab", "g"].members == 0


def test_growth_that_nobody_decides_expires_and_the_approved_size_stays() -> None:
    records = lab(pendingSeconds=60)
    records.claim(clusters="2")
    records.approve(CLAIM)
    records.change(CLAIM, resources={"clusters": "5"})
    assert (records.held("clusters"), records.held(PENDING)) == (2, 1)
    records.wait(60)
    assert code(records.time(CLAIM)) == "ok"
    approval = records.approval(CLAIM)
    assert (approval["state"], approval["change"]["state"]) == ("approved", "expired")
    assert (records.held("clusters"), records.held(PENDING), records.due(CLAIM)) == (2, 0, "")
    assert records.status_of(CLAIM)["granted"] == {"resources": {"clusters": "2"}}
    assert (records.types[-1], said(records.sent[-1])["growth"]) == ("request.expired", True)


# Notices.


def test_the_requester_is_notified_seven_days_and_one_day_before_the_end() -> None:
    records = lab()
    records.claim()
    records.approve(CLAIM, 10 * DAY)
    assert records.due(CLAIM) == records.at(3 * DAY)
    for days, sent in ((3, 1), (0, 1), (5.5, 1), (0.5, 2), (0.5, 2)):
        records.wait(days * DAY)
        records.time(CLAIM)
        assert records.types.count("request.ending") == sent, f"after {days} more days"
    assert "ends at 2031-01-11T12:00:00Z" in said(records.sent[-1])["message"]
    records.wait(0.5 * DAY)
    assert code(records.time(CLAIM)) == "ok"
    assert records.approval(CLAIM)["state"] == "expired"


def test_one_notice_is_enough_after_an_absence_over_both() -> None:
    records = lab()
    records.claim()
    records.approve(CLAIM, 10 * DAY)
    records.wait(9.5 * DAY)
    for _ in range(3):
        records.time(CLAIM)
    assert records.types == ["request.approved", "request.ending"]
    assert records.due(CLAIM) == records.at(0.5 * DAY)


def test_after_an_absence_over_the_end_there_is_no_notice_of_it() -> None:
    records = lab()
    records.claim()
    records.approve(CLAIM, 10 * DAY)
    records.wait(11 * DAY)
    records.time(CLAIM)
    assert records.types == ["request.approved", "request.expired"]


def test_an_approval_for_a_short_time_names_its_end_itself() -> None:
    records = lab()
    records.claim()
    records.approve(CLAIM, 2 * DAY)
    records.time(CLAIM)
    assert records.types == ["request.approved"]
    assert said(records.sent[0])["until"] == records.at(2 * DAY)
    assert records.due(CLAIM) == records.at(DAY), "the notice one day before"


# The end.


def test_a_released_claim_gives_its_charge_back_and_may_ask_again() -> None:
    records = lab()
    records.claim(clusters="2")
    records.approve(CLAIM, 10)
    records.wait(10)
    assert code(records.time(CLAIM)) == "ok"
    status = records.status_of(CLAIM)
    assert (status["approval"]["state"], status["approval"]["reason"]) == ("expired", "Ended")
    assert "granted" not in status
    assert (status["reason"], status["message"]) == ("ApprovalEnded", "its approval ended at 2031-01-01T12:00:10Z")
    assert (records.held("clusters"), records.due(CLAIM)) == (0, "")
    assert records.types == ["request.approved", "request.expired"]
    records.change(CLAIM, resources={"clusters": "1"})
    assert records.approval(CLAIM)["state"] == "pending"
    records.approve(CLAIM)
    assert (records.held("clusters"), "reason" in records.status_of(CLAIM)) == (1, False)


def test_a_claim_with_growth_pending_gives_all_of_it_back() -> None:
    records = lab()
    records.claim(clusters="2")
    records.approve(CLAIM, 10)
    records.change(CLAIM, resources={"clusters": "5"})
    records.wait(10)
    records.time(CLAIM)
    assert (records.held("clusters"), records.held(PENDING)) == (0, 0)
    assert "change" not in records.approval(CLAIM)


def test_a_claim_with_an_operators_finalizer_stays_as_an_object() -> None:
    records = lab()
    body = {
        "metadata": {"name": "c", "namespace": "lab", "finalizers": ["operator.example/cluster"]},
        "spec": {"resources": {"clusters": "2"}},
    }
    records.create("ResourceClaim", body)
    records.approve(CLAIM, 10)
    records.wait(10)
    records.time(CLAIM)
    assert CLAIM in records.objects
    assert records.held("clusters") == 0


def test_a_claim_that_is_being_deleted_keeps_its_charge_until_it_is_gone() -> None:
    records = lab()
    body = {
        "metadata": {"name": "c", "namespace": "lab", "finalizers": ["operator.example/cluster"]},
        "spec": {"resources": {"clusters": "2"}},
    }
    records.create("ResourceClaim", body)
    records.approve(CLAIM, 8 * DAY)
    records.delete(CLAIM)
    for _ in range(4):
        records.wait(3 * DAY)
        records.time(CLAIM)
    assert (records.approval(CLAIM)["state"], records.held("clusters")) == ("expired", 2)
    assert (records.types, records.due(CLAIM)) == (["request.approved"], "")


def test_the_pending_growth_of_a_deleted_claim_is_withdrawn() -> None:
    records = lab()
    body = {
        "metadata": {"name": "c", "namespace": "lab", "finalizers": ["operator.example/cluster"]},
        "spec": {"resources": {"clusters": "2"}},
    }
    records.create("ResourceClaim", body)
    records.approve(CLAIM)
    records.change(CLAIM, resources={"clusters": "5"})
    records.delete(CLAIM)
    assert records.approval(CLAIM)["change"]["reason"] == "Withdrawn"
    assert (records.held("clusters"), records.held(PENDING), records.due(CLAIM)) == (2, 0, "")
    assert isinstance(records.delete(CLAIM), Written), "again is no change"


def test_frozen_claims_keep_what_they_hold_and_grow_only_by_a_new_approval() -> None:
    records = lab(onEnd="freeze")
    records.claim(clusters="2")
    records.approve(CLAIM, 10)
    records.wait(10)
    records.time(CLAIM)
    assert (records.approval(CLAIM)["state"], records.held("clusters")) == ("expired", 2)
    assert records.status_of(CLAIM)["granted"] == {"resources": {"clusters": "2"}}
    records.change(Key("Tenant", "", "lab"), approval={"gates": []})
    records.change(CLAIM, resources={"clusters": "3"})
    assert (records.held("clusters"), records.held(PENDING)) == (2, 1), "also if the policy has no gates any more"
    records.approve(CLAIM, 20)
    approval = records.approval(CLAIM)
    assert (approval["state"], approval["until"], records.held("clusters")) == ("approved", records.at(20), 3)
    records.wait(20)
    records.time(CLAIM)
    assert (records.approval(CLAIM)["state"], records.held("clusters")) == ("expired", 0), "the new policy releases"


def test_growth_that_is_pending_at_the_end_of_a_kept_claim_is_still_to_be_decided() -> None:
    records = lab(onEnd="keep")
    records.claim(clusters="2")
    records.approve(CLAIM, 10)
    records.change(CLAIM, resources={"clusters": "3"})
    records.wait(10)
    records.time(CLAIM)
    assert (records.approval(CLAIM)["state"], records.held(PENDING)) == ("expired", 1)
    records.approve(CLAIM)
    assert (records.approval(CLAIM)["state"], "until" in records.approval(CLAIM)) == ("approved", False)
    assert (records.held("clusters"), records.held(PENDING), records.due(CLAIM)) == (3, 0, "")


def test_a_kept_claim_shrinks_and_the_end_comes_once() -> None:
    records = lab(onEnd="keep")
    records.claim(clusters="2")
    records.approve(CLAIM, 10)
    records.wait(10)
    records.time(CLAIM)
    records.time(CLAIM)
    records.change(CLAIM, resources={"clusters": "1"})
    assert records.held("clusters") == 1
    assert records.types.count("request.expired") == 1


def test_pending_allocations_end_and_placed_ones_are_stopped_and_not_requeued() -> None:
    records = lab()
    for name in ("a", "b"):
        records.allocation(name, "lab", gpu=2)
        records.approve(key_of(name, "lab"), 10)
    records.bind({"a": ["n1"]}, "lab")
    records.report("a", Phase.RUNNING, "lab")
    records.wait(10)
    for name in ("a", "b"):
        assert code(records.time(key_of(name, "lab"))) == "ok"
    placed, pending = records.status("a", "lab"), records.status("b", "lab")
    assert (pending["phase"], pending["reason"]) == ("Failed", "ApprovalEnded")
    assert (placed["phase"], placed["eviction"]["requeue"]) == ("Terminating", False)
    assert placed["eviction"]["gracePeriodSeconds"] == 30
    assert [one.wanted for one in records.placements.values()] == [False]
    assert records.used("tenant:lab") == (2, 2), "the charge is given back when it has stopped"
    records.report("a", Phase.FAILED, "lab", node="n1", stopped=True)
    ended = records.status("a", "lab")
    assert (ended["phase"], ended["reason"], ended["approval"]["state"]) == ("Failed", "ApprovalEnded", "expired")
    assert records.used("tenant:lab") == (0, 0)


def test_members_of_a_pending_gang_leave_it() -> None:
    records = lab()
    gang = {"gangScheduling": {"groupId": "g", "minMembers": 2}}
    for name in ("a", "b"):
        records.allocation(name, "lab", spec=gang, gpu=1)
    records.approve(WORK, 10)
    assert records.used("tenant:lab") == (2, 0)
    records.wait(10)
    for name in ("a", "b"):
        assert code(records.time(key_of(name, "lab"))) == "ok"
    assert records.used("tenant:lab") == (0, 0)
    assert records.gangs["lab", "g"].members == 0


def test_work_that_is_being_evicted_at_the_end_is_not_requeued() -> None:
    records = lab()
    records.allocation("a", "lab", gpu=2)
    records.approve(WORK, 10)
    records.bind({"a": ["n1"]}, "lab")
    records.report("a", Phase.RUNNING, "lab")
    notice = Notice(EvictionReason.DRAINED, EvictionRule.DRAIN, "user:root", "drained")
    assert code(records.decide(Evict(key=WORK, origin=Origin("user:root", "drain"), notice=notice))) == "ok"
    assert records.status("a", "lab")["eviction"]["requeue"]
    records.wait(10)
    assert code(records.time(WORK)) == "ok"
    assert records.used("tenant:lab") == (2, 2)
    records.report("a", Phase.FAILED, "lab", node="n1", stopped=True)
    ended = records.status("a", "lab")
    assert (ended["phase"], ended["reason"]) == ("Failed", "ApprovalEnded")
    assert records.used("tenant:lab") == (0, 0)


@pytest.mark.parametrize("on_end", ["freeze", "keep"])
def test_frozen_and_kept_allocations_run_on(on_end: str) -> None:
    records = lab(onEnd=on_end)
    records.allocation("a", "lab", gpu=2)
    records.approve(WORK, 10)
    records.bind({"a": ["n1"]}, "lab")
    records.wait(10)
    records.time(WORK)
    assert records.approval(WORK)["state"] == "expired"
    assert records.status("a", "lab")["phase"] == "Scheduled"
    assert records.used("tenant:lab") == (2, 2)


def test_for_work_that_has_ended_nothing_is_due() -> None:
    records = lab()
    records.allocation("a", "lab", gpu=2)
    records.approve(WORK, 10)
    assert records.due(WORK)
    records.bind({"a": ["n1"]}, "lab")
    records.report("a", Phase.RUNNING, "lab")
    records.report("a", Phase.SUCCEEDED, "lab", node="n1")
    assert records.due(WORK) == ""
    records.wait(10)
    assert isinstance(records.time(WORK), Written)
    assert records.approval(WORK)["state"] == "approved"


# Events.


def test_the_events_of_a_request_name_gate_approver_and_reason() -> None:
    records = lab(gates=["manual", "quota"])
    records.claim()
    records.rule(CLAIM, "note", gate="manual", reason="ask\nyour dean")
    records.rule(CLAIM, gate="manual", reason="fine")
    records.rule(CLAIM, gate="quota", until=records.at(10))
    records.wait(10)
    records.time(CLAIM)
    released = "work is stopped with its grace period, and its charge given back"
    assert [one.origin.reason for one in records.written if one.key == CLAIM] == [
        "AwaitingApproval: awaiting approval at gate manual: an approver decides",
        "ApprovalNoted: left pending at gate manual by ann: ask your dean",
        "GateApproved: gate manual approved by ann, next is gate quota: fine",
        "Approved: approved at gate quota by ann, until 2031-01-01T12:00:10Z",
        f"ApprovalEnded: its approval ended at 2031-01-01T12:00:10Z: {released}",
    ]
    assert records.types == ["request.pending", "request.approved", "request.expired"]
    assert (said(records.sent[0])["by"], said(records.sent[0])["reason"]) == ("ann", "ask\nyour dean")


def test_the_same_note_is_no_news() -> None:
    records = lab()
    records.claim()
    for reason in ("soon", "soon", "later"):
        records.rule(CLAIM, "note", reason=reason)
    assert records.types == ["request.pending", "request.pending"]


def test_a_denial_is_news_with_its_reason() -> None:
    records = lab()
    records.allocation("a", "lab", gpu=2)
    records.rule(WORK, "deny", reason="too much")
    assert records.types == ["request.denied"]
    assert said(records.sent[0])["message"] == "denied at gate quota by ann: too much"
    assert records.written[-1].origin.reason == "Denied: denied at gate quota by ann: too much"
