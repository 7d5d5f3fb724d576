"""Binding: a unit is placed whole or not at all, by capacity, quota, credit and the terms of its nodes."""

from dataclasses import replace as changed
from typing import Any

import pytest

from bursar.commands.scheduling.bind import Bind, NotePending
from bursar.core.credit.account import Account
from bursar.core.credit.price import Price, PriceList
from bursar.core.nodes.bind_check import Target
from bursar.core.objects.allocation import Phase
from bursar.core.objects.object import Key
from bursar.core.values.money import NANO
from bursar.core.values.refusal import Code
from bursar.core.values.replace import replace
from support.commands.records import GPU, TEST, Records, code, key_of, node_key, refusal

GANG = {"gangScheduling": {"groupId": "g", "minMembers": 3}}
EVERYTHING_TOLERATED = {"scheduling": {"tolerations": [{"operator": "Exists"}]}}
HALF = {"resources": {"requests": {GPU: "0.5"}}}


def with_gang(**nodes: int) -> Records:
    """Nodes with so many GPUs, and a gang of three."""
    records = Records()
    for name, gpus in nodes.items():
        records.node(name, gpu=gpus)
    for name in "abc":
        assert code(records.allocation(name, spec=GANG, gpu=1)) == "ok"
    return records


# Whole or not at all.


def test_a_gang_is_placed_whole() -> None:
    records = with_gang(n1=2, n2=2)
    writes = records.bind({"a": ["n1"], "b": ["n1"], "c": ["n2"]})
    assert isinstance(writes, tuple)
    assert [one.key.name for one in writes] == ["a", "b", "c"]
    # Each bind saw the capacity that those before it had left.
    assert records.given() == [("n1", "a", (0,)), ("n1", "b", (1,)), ("n2", "c", (0,))]
    assert records.used("tenant:default") == (3, 3)
    assert [(records.status(name)["rank"], records.status(name)["size"]) for name in "abc"] == [(0, 3), (1, 3), (2, 3)]


def test_a_node_without_capacity_for_the_last_member_refuses_them_all() -> None:
    records = with_gang(n1=2)
    refused = refusal(records.bind(dict.fromkeys("abc", ("n1",))))
    assert (refused.code, refused.message) == (Code.NO_CAPACITY, "c: node n1 has 0 nvidia.com/gpu free, 1 needed")
    assert refused.causes[0].field == "members[2]"
    assert records.given() == []
    # What the first two would have taken is free for others.
    records.allocation("other", gpu=2)
    assert code(records.bind({"other": ["n1"]})) == "ok"


def test_a_quota_without_capacity_for_the_last_member_refuses_them_all() -> None:
    records = Records()
    records.tenant("lab", limits={GPU: 2}, enforcement="Queue")
    records.namespace("lab", "lab")
    records.node("n1", gpu=8)
    for name in "abc":
        records.allocation(name, "lab", spec=GANG, gpu=1)
    assert code(records.bind(dict.fromkeys("abc", ("n1",)), "lab")) == "quota_exceeded"
    assert records.given() == []
    records.change(Key("Tenant", "", "lab"), limits={GPU: 3})
    assert code(records.bind(dict.fromkeys("abc", ("n1",)), "lab")) == "ok"
    assert records.used("tenant:lab") == (3, 3)


def test_a_node_that_changed_under_the_last_member_refuses_them_all() -> None:
    records = with_gang(n1=2, n2=2)
    records.change(node_key("n2"), unschedulable=False)  # its generation is 2 now
    targets = {"a": [Target("n1", 1)], "b": [Target("n1", 1)], "c": [Target("n2", 1)]}
    refused = refusal(records.bind(targets))
    assert (refused.code, refused.message) == (Code.STALE, "c: node n2 has changed since the plan was made")
    assert code(records.bind({**targets, "c": [Target("n2", 2)]})) == "ok"


def test_part_of_a_gang_is_not_placed_until_the_rest_runs() -> None:
    records = with_gang(n1=8)
    refused = refusal(records.bind(dict.fromkeys("ab", ("n1",))))
    assert refused.message == "the plan places 2 of the 3 members of gang g"
    assert code(records.bind(dict.fromkeys("abc", ("n1",)))) == "ok"
    # A member that joins or rejoins a running gang comes alone.
    records.allocation("d", spec=GANG, gpu=1)
    assert code(records.bind({"d": ["n1"]})) == "ok"
    records.report("a", Phase.PENDING)
    assert code(records.bind({"a": ["n1"]})) == "ok"


def test_what_is_left_of_a_gang_that_lost_members_may_run_again() -> None:
    records = with_gang(n1=8)
    records.bind(dict.fromkeys("abc", ("n1",)))
    records.report("c", Phase.SUCCEEDED)
    for name in "ab":
        records.report(name, Phase.PENDING)
    assert code(records.bind({"a": ["n1"]})) == "stale"
    assert code(records.bind(dict.fromkeys("ab", ("n1",)))) == "ok"
    assert records.used("tenant:default") == (2, 2)


@pytest.mark.parametrize("other", [{"uid": "alloc-of-before"}, {"gang": "g"}])
def test_a_plan_for_what_was_deleted_and_created_anew_is_stale(other: Any) -> None:
    records = Records()
    records.node("n1", gpu=2)
    records.allocation("a", gpu=1)
    member = records.member("a", ["n1"])
    refused = refusal(records.decide(Bind.unit([replace(member, **other)], TEST)))
    assert (refused.code, refused.message) == (Code.STALE, "a was deleted and created again")
    assert code(records.decide(Bind.unit([member], TEST))) == "ok"
    assert refusal(records.decide(Bind.unit([member], TEST))).message == "a is Scheduled, not Pending"


def test_a_member_of_a_gang_that_is_not_complete_is_not_placed() -> None:
    records = Records()
    records.node("n1", gpu=2)
    records.allocation("a", spec=GANG, gpu=1)
    assert refusal(records.bind({"a": ["n1"]})).message == "the gang of a is not complete"


def test_members_of_several_nodes_each() -> None:
    records = Records()
    for name in ("n1", "n2"):
        records.node(name, gpu=2)
    for name in ("wide", "other"):
        records.allocation(name, spec={"nodes": 2}, gpu=1)
    assert code(records.bind({"wide": ["n1", "n2"], "other": ["n2", "n1"]})) == "ok"
    assert records.given() == [("n1", "other", (1,)), ("n1", "wide", (0,)), ("n2", "other", (1,)), ("n2", "wide", (0,))]


# The terms of nodes.


@pytest.mark.parametrize(
    ("gate", "spec", "fine"),
    [
        pytest.param({"tenants": ["acme"]}, {}, True, id="the tenant's own node"),
        pytest.param({"tenants": ["rival"]}, {}, False, id="another tenant's node"),
        pytest.param({"taints": [{"key": "dedicated", "value": "x"}]}, {}, False, id="a taint that is not tolerated"),
        pytest.param(
            {"taints": [{"key": "dedicated", "value": "x"}]}, EVERYTHING_TOLERATED, True, id="everything is tolerated"
        ),
        pytest.param(
            {"taints": [{"key": "tenant", "value": "rival"}]}, EVERYTHING_TOLERATED, False, id="but no reserved taint"
        ),
        pytest.param({"gpuFractions": "Refused"}, HALF, False, id="whole devices only"),
        pytest.param({"gpuFractions": "Enforced"}, HALF, True, id="enforced"),
    ],
)
def test_what_keeps_work_off_a_node_is_checked_again_when_it_is_bound(
    gate: dict[str, Any], spec: dict[str, Any], fine: bool
) -> None:
    records = Records()
    for name in ("acme", "rival"):
        records.tenant(name)
    records.namespace("acme", "acme")
    records.node("n1", gpu=4)
    assert code(records.change(node_key("n1"), **gate)) == "ok"
    assert code(records.allocation("a", "acme", spec=spec, gpu=1)) == "ok"
    assert code(records.bind({"a": ["n1"]}, "acme")) == ("ok" if fine else "stale")


def test_a_cordoned_node_and_one_that_is_gone_take_nothing() -> None:
    records = Records()
    records.node("n1", gpu=4)
    records.allocation("a", gpu=1)
    records.change(node_key("n1"), unschedulable=True)
    assert refusal(records.bind({"a": ["n1"]})).message == "node n1 takes no new work"
    assert refusal(records.bind({"a": ["n2"]})).message == "node n2 is gone"


# Credit.


def prepaid(credit: int) -> Records:
    """A tenant that pays one credit a second for a GPU, a minute ahead, with this many credits."""
    records = Records(prices=PriceList.of([Price(GPU, "", NANO, 0), Price("cpu", "", 0, 0)]))
    records.tenant("lab", billing={"mode": "prepaid", "leaseSeconds": 60})
    records.namespace("lab", "lab")
    records.accounts[7] = Account(7, "lab", posted=credit * NANO)
    records.node("n1", gpu=8)
    return records


def test_what_is_placed_is_paid_for_and_says_by_which_lease() -> None:
    records = prepaid(60)
    records.allocation("a", "lab", gpu=1)
    assert code(records.bind({"a": ["n1"]}, "lab")) == "ok"
    (lease,) = records.leases.values()
    assert (lease.account, lease.node, lease.gpus) == (7, "n1", 1000)
    assert (records.accounts[7].held, records.accounts[7].available) == (60 * NANO, 0)
    assert [one["lease"] for one in records.status("a", "lab")["nodes"]] == [lease.name]
    assert [one.lease for one in records.placements.values()] == [lease.id]


def test_a_gang_is_paid_for_as_a_whole_or_not_at_all() -> None:
    records = prepaid(179)
    for name in "abc":
        records.allocation(name, "lab", spec=GANG, gpu=1)
    refused = refusal(records.bind(dict.fromkeys("abc", ("n1",)), "lab"))
    assert refused.code == Code.INSUFFICIENT_CREDIT
    assert (records.given(), records.leases, records.accounts[7].held) == ([], {}, 0)
    records.accounts[7].posted += NANO
    assert code(records.bind(dict.fromkeys("abc", ("n1",)), "lab")) == "ok"
    assert records.accounts[7].available == 0


def test_without_an_account_nothing_is_placed() -> None:
    records = prepaid(60)
    records.accounts.clear()
    records.allocation("a", "lab", gpu=1)
    refused = refusal(records.bind({"a": ["n1"]}, "lab"))
    assert "account" in refused.message
    assert records.given() == []


def test_the_end_of_work_settles_what_it_ran() -> None:
    records = prepaid(60)
    records.allocation("a", "lab", gpu=1)
    records.bind({"a": ["n1"]}, "lab")
    records.report("a", Phase.RUNNING, "lab")
    records.wait(20)
    assert code(records.report("a", Phase.SUCCEEDED, "lab", measured=15_000_000)) == "ok"
    assert (records.accounts[7].posted, records.accounts[7].held) == (45 * NANO, 0)


# Notes on pending work.


def test_a_note_is_written_once_and_only_while_the_work_is_pending() -> None:
    records = Records()
    records.node("n1", gpu=2)
    records.allocation("a", gpu=1)
    uid = records.objects[key_of("a")].uid
    note = NotePending(key=key_of("a"), origin=TEST, uid=uid, reason="no_capacity", message="no node has 1 GPU free")
    assert code(records.decide(note)) == "ok"
    revision = records.revision
    assert code(records.decide(note)) == "ok"
    assert records.revision == revision
    assert records.status("a")["reason"] == "no_capacity"
    for other in (changed(note, uid="alloc-of-before"), changed(note, key=key_of("nobody"))):
        assert refusal(records.decide(other)).code == Code.STALE
    records.bind({"a": ["n1"]})
    assert refusal(records.decide(changed(note, message="other"))).code == Code.STALE
    assert "reason" not in records.status("a")
