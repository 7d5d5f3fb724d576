"""The tree of tenants: which counters a charge raises, and which limits hold."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bursar.core.objects.charge import Charge, Facts
from bursar.core.quota.tenant_tree import (
    Enforcement,
    Limit,
    Namespace,
    ResourceQuota,
    ScopeTerm,
    Tenant,
    Tier,
    Tree,
    children_of,
    effective_limits,
    enforcement_of,
    hard_of,
    lineage,
    matches,
    rows_of,
    soft_of,
    subtree,
    with_quota,
    with_system,
    with_tenant,
    with_tier,
    without_quota,
    without_tenant,
)
from bursar.core.values.quantity import UNLIMITED

TREE = Tree(
    tenants={
        "root": Tenant("root", limits={"cpu": 100}),
        "lab": Tenant("lab", parent="root", tier="gold", limits={"gpu": 3}),
        "team": Tenant("team", parent="lab"),
    },
    tiers={"gold": Tier("gold", {"gpu": 8, "nodes": 4})},
    namespaces={"team-a": Namespace("team-a", "team"), "lab-a": Namespace("lab-a", "lab")},
    quotas={
        "team-a": (
            ResourceQuota("team-a", "all", hard={"cpu": 10, "gpu": 2}, soft={"memory": 5}),
            ResourceQuota("team-a", "short", hard={"cpu": 4}, terms=(ScopeTerm("Terminating", "Exists"),)),
        )
    },
    system={"gpu": 1000},
)


def test_an_override_wins_over_the_tier_and_each_limit_names_its_source() -> None:
    assert effective_limits(TREE, TREE.tenants["lab"]) == {
        "gpu": Limit(3, "override"),
        "nodes": Limit(4, "tier:gold"),
    }
    assert effective_limits(TREE, TREE.tenants["team"]) == {}


def test_a_tier_that_is_not_there_limits_nothing() -> None:
    assert effective_limits(TREE, Tenant("x", tier="lost", limits={"cpu": 1})) == {"cpu": Limit(1, "override")}


def test_an_override_may_raise_a_tier_s_limit_and_may_be_zero() -> None:
    tenant = Tenant("x", tier="gold", limits={"gpu": 9, "nodes": 0})
    assert effective_limits(TREE, tenant) == {"gpu": Limit(9, "override"), "nodes": Limit(0, "override")}


def test_a_charge_raises_quotas_then_its_tenant_then_limiting_ancestors_then_the_system() -> None:
    charge = Charge(Facts(scoped=True), {"gpu": 1, "cpu": 1, "memory": 1})
    assert rows_of(TREE, "team-a", charge) == (
        ("quota:team-a/all", "cpu"),
        ("quota:team-a/all", "gpu"),
        ("quota:team-a/all", "memory"),
        ("tenant:team", "cpu"),
        ("tenant:team", "gpu"),
        ("tenant:team", "memory"),
        ("tenant:lab", "gpu"),
        ("tenant:root", "cpu"),
        ("system", "gpu"),
    )


def test_what_is_bound_raises_counters_too() -> None:
    charge = Charge(Facts(scoped=True), {}, {"gpu": 1})
    assert ("tenant:lab", "gpu") in rows_of(TREE, "team-a", charge)


def test_what_is_only_due_raises_nothing() -> None:
    assert rows_of(TREE, "team-a", Charge(Facts(scoped=True), due={"gpu": 1})) == ()


def test_a_changed_tree_forgets_what_the_old_one_worked_out() -> None:
    charge = Charge(Facts(scoped=True), {"cpu": 1})
    before = rows_of(TREE, "lab-a", charge)
    after = rows_of(with_tenant(TREE, Tenant("lab", limits={"gpu": 3})), "lab-a", charge)
    assert before == (("tenant:lab", "cpu"), ("tenant:root", "cpu"))
    assert after == (("tenant:lab", "cpu"),)
    assert rows_of(with_system(TREE, {"cpu": 1}), "lab-a", charge)[-1] == ("system", "cpu")
    assert hard_of(with_tier(TREE, Tier("gold", {"nodes": 9})), ("tenant:lab", "nodes")) == 9


def test_limits_and_enforcement_of_a_counter() -> None:
    queued = with_quota(TREE, ResourceQuota("lab-a", "q", hard={"gpu": 1}, enforcement=Enforcement.QUEUE))
    assert hard_of(TREE, ("tenant:lab", "nodes")) == 4
    assert hard_of(TREE, ("tenant:team", "nodes")) == UNLIMITED
    assert hard_of(TREE, ("quota:team-a/short", "cpu")) == 4
    assert hard_of(TREE, ("quota:team-a/all", "memory")) == UNLIMITED  # soft only
    assert soft_of(TREE, ("quota:team-a/all", "memory")) == 5
    assert soft_of(TREE, ("tenant:lab", "gpu")) is None
    assert hard_of(TREE, ("system", "gpu")) == 1000
    assert enforcement_of(queued, "quota:lab-a/q") is Enforcement.QUEUE
    assert enforcement_of(queued, "tenant:lab") is Enforcement.REJECT
    assert enforcement_of(queued, "system") is Enforcement.REJECT


def test_quotas_of_a_namespace_stand_in_name_order_however_they_came() -> None:
    tree = with_quota(with_quota(Tree(), ResourceQuota("n", "b")), ResourceQuota("n", "a"))
    assert [one.name for one in tree.quotas["n"]] == ["a", "b"]
    again = with_quota(tree, ResourceQuota("n", "b", hard={"cpu": 1}))
    assert [(one.name, dict(one.hard)) for one in again.quotas["n"]] == [("a", {}), ("b", {"cpu": 1})]
    assert [one.name for one in without_quota(again, "n", "a").quotas["n"]] == ["b"]


def test_lineage_children_and_subtree() -> None:
    assert list(lineage(TREE, "team")) == ["team", "lab", "root"]
    assert list(lineage(TREE, "nobody")) == []
    assert children_of(TREE)["root"] == ["lab"]
    assert subtree(TREE, "lab") == {"lab", "team"}
    assert list(lineage(without_tenant(TREE, "lab"), "team")) == ["team"]


ENDLESS, ENDING = Facts(scoped=True), Facts(scoped=True, terminating=True)
NOTHING_ASKED = Facts(scoped=True, best_effort=True)
URGENT = Facts(scoped=True, priority_class="high")
VOLUME = Facts(scoped=False)


@pytest.mark.parametrize(
    ("scope", "operator", "values", "counted"),
    [
        ("Terminating", "Exists", (), {ENDING, VOLUME}),
        ("NotTerminating", "Exists", (), {ENDLESS, NOTHING_ASKED, URGENT, VOLUME}),
        ("BestEffort", "Exists", (), {NOTHING_ASKED, VOLUME}),
        ("NotBestEffort", "Exists", (), {ENDLESS, ENDING, URGENT, VOLUME}),
        ("PriorityClass", "In", ("high", "other"), {URGENT, VOLUME}),
        ("PriorityClass", "NotIn", ("high",), {ENDLESS, ENDING, NOTHING_ASKED, VOLUME}),
        ("PriorityClass", "Exists", (), {URGENT, VOLUME}),
        ("PriorityClass", "DoesNotExist", (), {ENDLESS, ENDING, NOTHING_ASKED, VOLUME}),
        ("Unheard", "Exists", (), {VOLUME}),
    ],
)
def test_scopes_choose_what_a_quota_counts(
    scope: str, operator: str, values: tuple[str, ...], counted: set[Facts]
) -> None:
    quota = ResourceQuota("n", "q", terms=(ScopeTerm(scope, operator, frozenset(values)),))
    everything = (ENDLESS, ENDING, NOTHING_ASKED, URGENT, VOLUME)
    assert {facts for facts in everything if matches(quota, facts)} == counted


TERMS = st.builds(
    ScopeTerm,
    st.sampled_from(["Terminating", "NotTerminating", "BestEffort", "NotBestEffort"]),
    st.just("Exists"),
)
FACTS = st.builds(Facts, st.booleans(), st.booleans(), st.booleans(), st.sampled_from(["", "high"]))


@given(st.lists(TERMS, max_size=3), FACTS)
def test_all_terms_of_a_quota_must_hold(terms: list[ScopeTerm], facts: Facts) -> None:
    each = [matches(ResourceQuota("n", "q", terms=(term,)), facts) for term in terms]
    assert matches(ResourceQuota("n", "q", terms=tuple(terms)), facts) == all(each)
