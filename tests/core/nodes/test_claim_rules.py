"""Where sensitive work goes, who keeps off claimed nodes, and what is said of it."""

from dataclasses import replace
from typing import Any

import pytest

from bursar.core.nodes.node_claim import ClaimState, NodeClaim, held, in_use, is_of, kept_off, open_to, pool_exhausted
from bursar.core.objects.ask import Ask, Where
from bursar.core.objects.pending_reason import ReasonCode
from bursar.core.scheduling.cycle.plan import SchedulingPolicy
from bursar.core.scheduling.explain.explain import explain, simulate
from bursar.core.scheduling.explain.reason_text import help as what_helps
from bursar.core.scheduling.explain.reason_text import sentence
from bursar.core.scheduling.state.cluster_state import ClusterState
from bursar.core.scheduling.state.fleet import NOBODY
from support.scheduling.cluster_states import (
    NOW,
    ask,
    cluster_of,
    cycle,
    evicted,
    machine,
    place,
    put,
    run,
    submit,
    why,
)

ANN, BOB = "physics/ann", "physics/bob"


def claimed(cluster: ClusterState, name: str, holder: str, gpus: int = 4) -> None:
    """A node is claimed, given back (NOBODY), or open again."""
    one = machine(name, gpus=gpus)
    cluster.put_node(one.name, one.offers, labels=one.labels, claim=holder)


def of(cluster: ClusterState, user: str, name: str, *, sensitive: bool = False, **what: Any) -> Ask:
    """Work of somebody, as the scheduler comes to know it."""
    return cluster.as_user(ask(name, gpus=1, where=Where(sensitive=sensitive), **what), user)


NOON = "2026-11-16T12:00:00Z"


def claim(**more: Any) -> NodeClaim:
    return NodeClaim("claim-1", "physics", "ann", "2026-11-16T10:00:00Z", "user:physics/ann", **more)


# The rule.


@pytest.mark.parametrize(
    ("one", "is_theirs"),
    [
        pytest.param(claim(tenant_uid="tenant-1", state=ClaimState.WIPING, released=NOON), True, id="their own"),
        pytest.param(
            claim(tenant_uid="tenant-0", state=ClaimState.WIPING, released=NOON),
            False,
            id="of one that had the name before",
        ),
        pytest.param(
            claim(tenant_uid="tenant-0", state=ClaimState.WIPE_FAILED, released=NOON),
            False,
            id="also where wiping failed",
        ),
        pytest.param(claim(state=ClaimState.WIPING, released=NOON), False, id="of nobody knows whom"),
        pytest.param(
            claim(tenant_uid="tenant-1", state=ClaimState.WIPING), True, id="wiped for them: its tenant is there"
        ),
        pytest.param(claim(), True, id="held: its tenant is there"),
    ],
)
def test_what_is_left_of_a_tenant_is_not_its_namesakes(one: NodeClaim, is_theirs: bool) -> None:
    assert is_of(one, "tenant-1") is is_theirs


@pytest.mark.parametrize(
    ("holding", "user", "sensitive", "allowed"),
    [
        pytest.param(None, ANN, False, True, id="anybody on a node that nobody claimed"),
        pytest.param(None, ANN, True, False, id="sensitive work on a node that nobody claimed"),
        pytest.param(claim(), ANN, False, True, id="the holder's ordinary work"),
        pytest.param(claim(), ANN, True, True, id="the holder's sensitive work"),
        pytest.param(claim(), BOB, False, False, id="a colleague's work"),
        pytest.param(claim(), BOB, True, False, id="a colleague's sensitive work"),
        pytest.param(claim(), "", False, False, id="nobody's work"),
        pytest.param(claim(lease=7), ANN, True, True, id="the holder, who pays beforehand"),
        pytest.param(claim(lease=7, unpaid="closed"), ANN, True, False, id="the holder, who pays no more"),
        pytest.param(claim(lease=7, unpaid="closed"), BOB, False, False, id="a colleague, when nobody pays any more"),
        pytest.param(claim(state=ClaimState.WIPING), ANN, False, False, id="the holder, once it was given back"),
        pytest.param(claim(state=ClaimState.WIPE_FAILED), ANN, True, False, id="the holder, when wiping failed"),
    ],
)
def test_who_may_use_a_node(holding: NodeClaim | None, user: str, sensitive: bool, allowed: bool) -> None:
    assert open_to(holding, user, sensitive=sensitive) is allowed
    refusal = kept_off("n1", holding, user, sensitive=sensitive)
    assert (refusal is None) is allowed
    assert refusal is None or "ann" not in refusal.message


def test_who_may_not_know_is_told_that_it_is_held_and_nothing_else() -> None:
    assert held("n1", claim(), told=True).message == "node n1 is claimed by physics/ann since 2026-11-16T10:00:00Z"
    assert "ann" not in str(held("n1", claim(), told=False))
    waiting = claim(state=ClaimState.WIPE_FAILED, released="2026-11-16T11:00:00Z", message="exit 1")
    assert held("n1", waiting, told=True).message.endswith("is not wiped yet, because wiping it failed")


def test_refusals_have_their_numbers() -> None:
    assert "(current: 4, requested: 1, limit: 4)" in pool_exhausted(4, 4).message
    assert "exceeds" in pool_exhausted(5, 4).message
    assert "would exceed" in pool_exhausted(4, 4).message
    named = in_use("n1", [f"physics/j{number}" for number in range(10)], "released")
    assert named.message.endswith("physics/j7 and 2 more")


# Placing.


def test_a_claimed_node_is_its_holders_alone() -> None:
    cluster = cluster_of(machine("a", gpus=4), machine("b", gpus=4))
    claimed(cluster, "a", ANN)
    placed = place(cluster, *(of(cluster, BOB, f"his-{number}") for number in range(6)))
    assert set(placed.values()) == {("b",)}
    assert len(placed) == 4


def test_the_holder_may_use_both_and_sensitive_work_only_the_claimed_one() -> None:
    cluster = cluster_of(machine("a", gpus=4), machine("b", gpus=4))
    claimed(cluster, "a", ANN)
    placed = place(cluster, *(of(cluster, ANN, f"plain-{number}") for number in range(6)))
    assert (len(placed), set(placed.values())) == (6, {("a",), ("b",)})
    cluster = cluster_of(machine("a", gpus=4), machine("b", gpus=4))
    claimed(cluster, "a", ANN)
    placed = place(cluster, *(of(cluster, ANN, f"secret-{number}", sensitive=True) for number in range(6)))
    assert set(placed.values()) == {("a",)}
    assert len(placed) == 4


def test_a_node_that_is_not_wiped_takes_nothing() -> None:
    cluster = cluster_of(machine("a", gpus=4))
    claimed(cluster, "a", NOBODY)
    assert place(cluster, of(cluster, ANN, "hers"), of(cluster, BOB, "his")) == {}
    claimed(cluster, "a", "")
    assert place(cluster, of(cluster, BOB, "later")).keys() >= {"later"}


def test_a_queue_for_sensitive_work_makes_its_work_sensitive() -> None:
    cluster = cluster_of(machine("a", gpus=4), machine("b", gpus=4), profiles={"secrets": "sensitive"})
    claimed(cluster, "b", ANN)
    assert place(cluster, of(cluster, ANN, "hers", queue="secrets"), of(cluster, BOB, "his", queue="secrets")) == {
        "hers": ("b",)
    }


def test_who_has_claimed_nothing_asks_as_everybody_does() -> None:
    cluster = cluster_of(machine("a", gpus=4))
    assert of(cluster, ANN, "one").shape is not None
    assert of(cluster, ANN, "one").shape.where.claimant == ""
    claimed(cluster, "a", ANN)
    assert of(cluster, ANN, "one").shape.where.claimant == ANN
    assert of(cluster, BOB, "two").shape.where.claimant == ""
    assert of(cluster, BOB, "two", sensitive=True).shape.where.claimant == BOB


def test_many_nodes_keep_their_claims_as_columns_grow() -> None:
    cluster = ClusterState()
    for number in range(200):
        put(cluster, machine(f"n{number:03}", gpus=1))
    claimed(cluster, "n150", ANN, gpus=1)
    assert place(cluster, of(cluster, ANN, "secret", sensitive=True)) == {"secret": ("n150",)}
    cluster.remove_node("n150")
    assert not cluster.fleet.holds_any(ANN)


# Preemption.


def test_sensitive_work_is_never_evicted() -> None:
    cluster = cluster_of(machine("a", gpus=1))
    claimed(cluster, "a", ANN, gpus=1)
    run(cluster, of(cluster, ANN, "secret", sensitive=True), "a")
    submit(cluster, of(cluster, ANN, "urgent", sensitive=True, priority=1000))
    assert evicted(cycle(cluster)) == {}
    cluster.forget("secret")
    run(cluster, of(cluster, ANN, "plain"), "a")
    assert evicted(cycle(cluster)).keys() == {"plain"}


def test_nobody_is_evicted_from_a_claimed_node_for_somebody_else() -> None:
    cluster = cluster_of(machine("a", gpus=1))
    claimed(cluster, "a", ANN, gpus=1)
    run(cluster, of(cluster, ANN, "plain"), "a")
    submit(cluster, of(cluster, BOB, "urgent", priority=1000))
    assert evicted(cycle(cluster)) == {}


# Reasons.


def test_sensitive_work_without_a_claim_says_so_and_what_would_help() -> None:
    cluster = cluster_of(machine("a", gpus=4), machine("b", gpus=4))
    submit(cluster, of(cluster, ANN, "secret", sensitive=True))
    reason = why(cluster, cycle(cluster), "secret")
    assert reason.code == "no_claimed_nodes"
    assert sentence(reason).endswith("; physics/ann has claimed none of 2")
    assert "bursar node claim" in what_helps(reason)
    explained = explain(cluster, "secret", SchedulingPolicy(), NOW)
    assert explained is not None
    assert explained.reason.why is ReasonCode.NO_CLAIMED_NODES


def test_others_are_told_how_many_nodes_claims_keep_from_them() -> None:
    cluster = cluster_of(machine("a", gpus=4), machine("b", gpus=4))
    claimed(cluster, "a", ANN)
    claimed(cluster, "b", NOBODY)
    submit(cluster, of(cluster, BOB, "his"))
    reason = why(cluster, cycle(cluster), "his")
    assert (reason.code, dict(reason.excluded)["claims"]) == ("no_matching_nodes", 2)
    assert "claims of other users" in sentence(reason)
    explained = explain(cluster, "his", SchedulingPolicy(), NOW)
    assert explained is not None
    assert dict(explained.reason.excluded)["claims"] == 2
    assert "ann" not in str(explained)


def test_what_if_knows_claims() -> None:
    cluster = cluster_of(machine("a", gpus=4), machine("b", gpus=4))
    claimed(cluster, "a", ANN)
    hers, his = (of(cluster, who, f"new-{who[-3:]}", sensitive=True) for who in (ANN, BOB))
    first, second = simulate(cluster, [replace(hers, submitted_at=NOW), his], SchedulingPolicy(), NOW)
    assert (first.runs_now, [one.node for one in first.places]) == (True, ["a"])
    assert not second.runs_now
