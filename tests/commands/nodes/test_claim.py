"""Claims of nodes: who may take one, what is in the way, and that a node is wiped before others have it."""

from collections.abc import Iterable
from typing import Any

import pytest

from bursar.commands.command import Result, Written
from bursar.commands.nodes.claim import NOBODYS, ClaimNode, EndWipe, ReleaseNode, WipeNode
from bursar.core.credit.account import Account
from bursar.core.credit.ledger import Ledger
from bursar.core.credit.price import Price, PriceList
from bursar.core.nodes.node import NodeGate
from bursar.core.nodes.node_claim import ClaimState, NodeClaim
from bursar.core.objects.allocation import Phase
from bursar.core.objects.object import Key, Origin
from bursar.core.values.access import Reach
from bursar.core.values.money import NANO
from bursar.core.values.refusal import Code
from bursar.core.values.replace import replace
from support.commands.records import GPU, TEST, Records, code, key_of, node_key, refusal

ANN, BOB, EVE = "physics/ann", "physics/bob", "history/eve"


def lab(pool: int = 2, **more: Any) -> Records:
    """Two tenants, three clean nodes, and a pool."""
    records = Records(**more)
    for name in ("physics", "history"):
        records.tenant(name)
        records.namespace(name, name)
    for name in ("n1", "n2", "n3"):
        records.node(name, gpu=4, cpu=16)
    assert code(records.settings(limits={"sensitive_pool_size": str(pool)})) == "ok"
    return records


def claim(records: Records, node: str, who: str, work: Iterable[Key] = ()) -> Result:
    tenant, _, user = who.partition("/")
    draft = NodeClaim(f"claim-{node}", tenant, user, "", f"user:{who}")
    origin = Origin(f"user:{who}", "claim")
    return records.decide(
        ClaimNode(key=node_key(node), origin=origin, draft=draft, reach=Reach(tenant=tenant), work=tuple(work))
    )


def release(records: Records, node: str, who: str, over: Reach = NOBODYS) -> Result:
    return records.decide(ReleaseNode(key=node_key(node), origin=Origin(f"user:{who}", "release"), user=who, over=over))


def end_wipe(records: Records, node: str, failed: str = "", attempt: int = 0) -> Result:
    said: dict[str, Any] = {"claim_id": f"claim-{node}", "attempt": attempt} if attempt else {}
    return records.decide(EndWipe(key=node_key(node), origin=TEST, failed=failed, **said))


def state(records: Records, node: str) -> str:
    claimed = records.nodes[node].claim
    return str(claimed.state) if claimed is not None else "free"


def test_a_claim_stands_with_the_node_and_does_not_say_whose_it_is() -> None:
    records = lab()
    assert code(claim(records, "n1", ANN)) == "ok"
    held = records.nodes["n1"].claim
    assert held is not None
    assert (held.holder, held.tenant, held.since) == (ANN, "physics", "2031-01-01T12:00:00Z")
    assert records.status_of(node_key("n1"))["claim"].keys() == {"id", "state", "since"}
    assert records.nodes["n1"].generation == 2, "plans that were made for it are stale"
    assert isinstance(claim(records, "n1", ANN), Written), "who has it may say so again"


@pytest.mark.parametrize(
    ("who", "told"),
    [(BOB, "is claimed by physics/ann since 2031-01-01T12:00:00Z"), (EVE, "is claimed by somebody else")],
)
def test_only_colleagues_learn_who_holds_it(who: str, told: str) -> None:
    records = lab()
    claim(records, "n1", ANN)
    refused = refusal(claim(records, "n1", who))
    assert (refused.code, refused.message) == (Code.CONFLICT, f"node n1 {told}")
    assert ("ann" in str(refused)) is (who == BOB)
    assert ("physics" in str(refused)) is (who == BOB)


@pytest.mark.parametrize(
    ("obstacle", "expected"),
    [
        ("cordoned", Code.CONFLICT),
        ("in use", Code.IN_USE),
        ("soiled", Code.CONFLICT),
        ("forbidden", Code.FORBIDDEN),
        ("no pool", Code.QUOTA_EXCEEDED),
        ("unknown tenant", Code.UNPROCESSABLE),
        ("no such node", Code.NOT_FOUND),
    ],
)
def test_what_is_in_the_way_of_a_claim(obstacle: str, expected: Code) -> None:
    records = lab(pool=0 if obstacle == "no pool" else 2)
    node, who = ("n9" if obstacle == "no such node" else "n1"), ANN
    if obstacle == "cordoned":
        records.change(node_key("n1"), unschedulable=True)
    elif obstacle in ("in use", "soiled"):
        records.allocation("a", "history", user=EVE, gpu=1)
        records.bind({"a": ["n1"]}, "history")
        if obstacle == "soiled":
            records.report("a", Phase.SUCCEEDED, "history")
    elif obstacle == "forbidden":
        records.change(Key("Tenant", "", "physics"), sensitive=False)
    elif obstacle == "unknown tenant":
        who = "nobody/ann"
    refused = refusal(claim(records, node, who))
    assert refused.code == expected
    if obstacle == "no pool":
        assert refused.message == "claim rejected: no nodes may be claimed for sensitive use (sensitive_pool_size: 0)"
    assert state(records, "n1") == "free"


def test_the_pool_is_a_hard_limit_and_what_is_not_wiped_still_counts() -> None:
    records = lab(pool=1)
    claim(records, "n1", ANN)
    refused = refusal(claim(records, "n2", EVE))
    assert (refused.causes[0].limit, refused.causes[0].current_usage) == ("1", "1")
    release(records, "n1", ANN)
    assert state(records, "n1") == "Wiping"
    assert code(claim(records, "n2", EVE)) == "quota_exceeded"
    end_wipe(records, "n1", attempt=1)
    assert code(claim(records, "n2", EVE)) == "ok"


def test_a_claimed_node_takes_its_holders_sensitive_work_and_nobody_elses() -> None:
    records = lab()
    claim(records, "n1", ANN)
    for name, user, sensitive in (("own", ANN, True), ("others", BOB, True), ("plain", BOB, False)):
        spec = {"sensitive": True} if sensitive else {}
        assert code(records.allocation(name, "physics", user=user, spec=spec, gpu=1)) == "ok"
    assert refusal(records.bind({"plain": ["n1"]}, "physics")).message == "node n1 is claimed by somebody else"
    answers = {name: code(records.bind({name: ["n1"]}, "physics")) for name in ("own", "others", "plain")}
    assert answers == {"own": "ok", "others": "stale", "plain": "stale"}
    assert code(records.bind({"others": ["n2"]}, "physics")) == "stale", "sensitive work goes to its user's own nodes"
    assert refusal(release(records, "n1", ANN)).code == Code.IN_USE
    records.report("own", Phase.SUCCEEDED, "physics")
    assert code(release(records, "n1", ANN)) == "ok"


@pytest.mark.parametrize(
    ("who", "over", "expected"),
    [
        (ANN, NOBODYS, "ok"),
        (BOB, NOBODYS, "forbidden"),
        (EVE, Reach(tenant="history", subtree=True), "forbidden"),
        ("physics/boss", Reach(tenant="physics", subtree=True), "ok"),
        ("admin", Reach(everything=True), "ok"),
    ],
)
def test_only_the_holder_and_administrators_release_it(who: str, over: Reach, expected: str) -> None:
    records = lab()
    claim(records, "n1", ANN)
    assert code(release(records, "n1", who, over)) == expected
    assert state(records, "n1") == ("Wiping" if expected == "ok" else "Claimed")
    assert code(release(records, "n2", who, over)) == "conflict"


def test_a_wipe_that_failed_is_tried_again_and_late_words_change_nothing() -> None:
    records = lab()
    claim(records, "n1", ANN)
    assert refusal(records.decide(WipeNode(key=node_key("n1"), origin=TEST))).code == Code.CONFLICT
    assert [code(end_wipe(records, name)) for name in ("n1", "n2")] == ["conflict", "conflict"]
    release(records, "n1", ANN)
    end_wipe(records, "n1", "no space", attempt=1)
    assert (state(records, "n1"), code(claim(records, "n1", ANN))) == ("WipeFailed", "conflict")
    records.decide(WipeNode(key=node_key("n1"), origin=TEST))
    assert isinstance(end_wipe(records, "n1", attempt=1), Written), "that was the first attempt"
    assert state(records, "n1") == "Wiping"
    end_wipe(records, "n1", attempt=2)
    assert (state(records, "n1"), records.nodes["n1"].dirty) == ("free", False)


def test_a_node_with_work_or_a_claim_is_not_deleted() -> None:
    records = lab()
    claim(records, "n1", ANN)
    records.allocation("a", "history", user=EVE, gpu=1)
    records.bind({"a": ["n2"]}, "history")
    assert [code(records.delete(node_key(name))) for name in ("n1", "n2", "n3")] == ["in_use", "in_use", "ok"]
    assert sorted(records.nodes) == ["n1", "n2"]
    release(records, "n1", ANN)
    assert code(records.delete(node_key("n1"))) == "in_use"
    end_wipe(records, "n1")
    assert code(records.delete(node_key("n1"))) == "ok"


def test_other_changes_of_a_node_leave_its_claim_alone() -> None:
    records = lab()
    claim(records, "n1", ANN)
    shown = records.status_of(node_key("n1"))["claim"]
    assert code(records.change(node_key("n1"), unschedulable=True)) == "ok"
    assert records.status_of(node_key("n1"))["claim"] == shown
    held = records.nodes["n1"].claim
    assert held is not None
    assert held.holder == ANN


# Paid claims.


def prepaid(credit: int) -> Records:
    """A claim by a user of physics costs four credits a second, paid ten minutes ahead."""
    records = lab(prices=PriceList.of([Price(GPU, "", NANO, 0), Price("cpu", "", 0, 0)]))
    records.change(Key("Tenant", "", "physics"), billing={"mode": "prepaid", "leaseSeconds": 60})
    records.accounts[7] = Account(7, "physics", posted=credit * NANO)
    return records


def test_all_of_the_node_is_held_with_the_claim_and_settled_with_its_end() -> None:
    records = prepaid(2400)
    assert code(claim(records, "n1", ANN)) == "ok"
    held = records.nodes["n1"].claim
    assert held is not None
    assert (held.lease, records.accounts[7].available) == (1, 0)
    records.wait(100)
    release(records, "n1", ANN)
    assert (records.accounts[7].posted, records.accounts[7].held) == (2000 * NANO, 0)


def test_without_credit_nothing_is_claimed() -> None:
    records = prepaid(2399)
    assert refusal(claim(records, "n1", ANN)).code == Code.INSUFFICIENT_CREDIT
    assert (state(records, "n1"), records.leases, records.accounts[7].held) == ("free", {}, 0)


def test_what_is_placed_on_a_claimed_node_is_paid_by_the_claims_lease() -> None:
    records = prepaid(2400)
    claim(records, "n1", ANN)
    records.allocation("a", "physics", user=ANN, spec={"sensitive": True}, gpu=1)
    assert code(records.bind({"a": ["n1"]}, "physics")) == "ok"
    assert [one.lease for one in records.placements.values()] == [1]
    records.report("a", Phase.SUCCEEDED, "physics", measured=1_000_000)
    assert str(records.leases[1].state) == "open", "it goes on, for the node is still claimed"


def test_own_work_that_runs_there_goes_on_by_the_claims_lease() -> None:
    records = prepaid(2460)
    records.nodes["n1"] = replace(records.nodes["n1"], gate=NodeGate(traceless=True))
    records.allocation("a", "physics", user=ANN, gpu=1)
    records.bind({"a": ["n1"]}, "physics")
    records.report("a", Phase.RUNNING, "physics")
    assert records.accounts[7].held == 60 * NANO
    Ledger(records.micros, records.prices, records.accounts, records.leases).heartbeat(records.leases[1], 1)
    records.wait(10)
    assert code(claim(records, "n1", ANN, [key_of("a", "physics")])) == "ok"
    assert [one.lease for one in records.placements.values()] == [2]
    assert (records.accounts[7].posted, records.accounts[7].held) == (2450 * NANO, 2400 * NANO)


def test_a_node_that_must_be_wiped_first_costs_nothing_until_it_is() -> None:
    records = prepaid(2400)
    records.nodes["n1"] = replace(records.nodes["n1"], dirty=True, gate=NodeGate(wipes=True))
    assert code(claim(records, "n1", ANN)) == "ok"
    assert (state(records, "n1"), records.accounts[7].held) == (ClaimState.WIPING, 0)
    records.wait(300)
    assert code(end_wipe(records, "n1", attempt=1)) == "ok"
    assert (state(records, "n1"), records.accounts[7].held) == (ClaimState.HELD, 2400 * NANO)
