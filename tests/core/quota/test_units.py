"""Units of quotas: limits and charges in units count as their parts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bursar.core.objects.charge import Charge, Facts
from bursar.core.quota.tenant_tree import (
    Limit,
    Namespace,
    ResourceQuota,
    ScopeTerm,
    Tenant,
    Tier,
    Tree,
    effective_limits,
    uncovered,
)
from bursar.core.quota.units import QuotaPolicy, charged, in_parts, limits_in_parts, units_in
from bursar.core.values.quantity import AMOUNT_MAX

GI = 2**30
UNITS = {"su": {"cpu": 1000, "memory": 4 * GI}, "gu": {"cpu": 8000, "nvidia.com/gpu": 1000}}


@pytest.mark.parametrize(
    ("written", "counted"),
    [
        ({"cpu": 5000}, {"cpu": 5000}),
        ({"su": 10_000}, {"cpu": 10_000, "memory": 40 * GI}),
        ({"su": 10_000, "gu": 2000}, {"cpu": 26_000, "memory": 40 * GI, "nvidia.com/gpu": 2000}),
        ({"su": 10_000, "cpu": 4000}, {"cpu": 4000, "memory": 40 * GI}),
        ({"su": 1}, {"cpu": 1, "memory": 4 * GI // 1000}),
        ({"su": 0}, {"cpu": 0, "memory": 0}),
    ],
)
def test_limits_in_units_are_limits_on_the_parts(written: dict[str, int], counted: dict[str, int]) -> None:
    assert limits_in_parts(UNITS, written) == counted


@pytest.mark.parametrize(
    ("asked", "counted"),
    [
        ({"clusters": 1000}, {"clusters": 1000}),
        ({"su": 2000, "cpu": 500}, {"cpu": 2500, "memory": 8 * GI}),
        ({"su": 1}, {"cpu": 1, "memory": -(-4 * GI // 1000)}),
    ],
)
def test_amounts_in_units_are_charged_as_their_parts(asked: dict[str, int], counted: dict[str, int]) -> None:
    assert in_parts(UNITS, asked) == counted


@given(st.integers(0, AMOUNT_MAX), st.integers(0, AMOUNT_MAX))
def test_a_claim_of_a_limit_fits_and_one_of_more_does_not(limit: int, asked: int) -> None:
    limits, charge = limits_in_parts(UNITS, {"su": limit}), in_parts(UNITS, {"su": asked})
    fits = all(charge[part] <= limits[part] for part in limits)
    assert not fits or asked <= limit + 1, "rounding never admits a whole thousandth of a unit"
    assert fits or asked > limit - 1 or max(charge.values()) == AMOUNT_MAX
    assert max(charge.values()) <= AMOUNT_MAX


def test_usage_is_shown_as_the_units_of_its_scarcest_part() -> None:
    assert units_in(UNITS["su"], {"cpu": 2000, "memory": 40 * GI}) == 10_000
    assert units_in(UNITS["su"], {}) == 0
    assert units_in(UNITS["su"], {"cpu": 1}) == 1


def test_a_charge_is_converted_once_for_each_template_and_policy() -> None:
    policy = QuotaPolicy(units=UNITS)
    charge = Charge(accepted={"su": 1000}, bound={"su": 1000})
    after = charged(policy, charge, placed=False)
    assert after.accepted == after.bound == {"cpu": 1000, "memory": 4 * GI}
    assert charged(policy, charge, placed=False) is after
    other = charged(QuotaPolicy(units={"su": {"cpu": 2000}}), charge, placed=False)
    assert other.accepted == {"cpu": 2000}
    assert charged(QuotaPolicy(), charge, placed=False) is charge
    assert charged(policy, plain := Charge(accepted={"cpu": 1}), placed=False) is plain


def test_exclusive_work_charges_its_hosts_by_a_setting() -> None:
    policy = QuotaPolicy(counts_hosts=True)
    exclusive = Charge(accepted={"cpu": 4000, "nodes": 3000})
    assert charged(policy, exclusive, placed=True).accepted == {"cpu": 4000, "nodes": 3000, "baremetal-hosts": 3000}
    shared = Charge(accepted={"cpu": 4000})
    assert charged(policy, shared, placed=True) is shared
    claim = Charge(accepted={"nodes": 3000})
    assert charged(policy, claim, placed=False) is claim, "claims name the hosts themselves"


def test_the_default_limit_is_below_those_of_the_tier_and_the_tenant() -> None:
    policy = QuotaPolicy(frozenset({"a", "b", "c"}), {"u": {"c": 1000}})
    tree = Tree(
        tenants={"t": Tenant("t", tier="std", limits={"a": 1})}, tiers={"std": Tier("std", {"b": 2, "u": 3000})},
        quota_policy=policy,
    )  # fmt: skip
    assert effective_limits(tree, tree.tenants["t"]) == {
        "a": Limit(1, "override"), "b": Limit(2, "tier:std"), "c": Limit(3000, "tier:std"),
    }  # fmt: skip
    bare = Tree(tenants={"t": Tenant("t")}, quota_policy=policy)
    assert effective_limits(bare, bare.tenants["t"]) == {name: Limit(0, "default") for name in ("a", "b", "c")}


WORK = ("cpu", "memory", "pods", "allocations", "nodes", "pending_requests")


@pytest.mark.parametrize(
    ("hard", "asked", "bare"),
    [
        (("cpu", "memory"), WORK, []),
        (("cpu",), WORK, ["memory"]),
        ((), WORK, ["cpu", "memory"]),
        ((), ("pods", "allocations"), ["allocations", "pods"]),
        (("pods",), ("pods", "allocations"), []),
        (("pods",), WORK, ["cpu", "memory"]),
        (("limits.cpu", "memory"), WORK, ["cpu"]),
        (("limits.cpu", "memory"), (*WORK, "limits.cpu"), []),
        (("cpu", "memory"), (*WORK, "limits.cpu"), []),
        ((), ("pending_requests",), []),
        (("clusters",), ("clusters",), []),
    ],
)
def test_what_a_namespace_that_requires_quotas_does_not_cover(
    hard: tuple[str, ...], asked: tuple[str, ...], bare: list[str]
) -> None:
    quotas = (ResourceQuota("ns", "q", dict.fromkeys(hard, 1)),) if hard else ()
    tree = Tree(namespaces={"ns": Namespace("ns", "t", quota_required=True)}, quotas={"ns": quotas})
    assert uncovered(tree, "ns", Facts(scoped=True), asked) == bare
    assert tree.covered == {"ns"}


def test_a_quota_of_other_work_covers_nothing_and_neither_do_soft_limits() -> None:
    quotas = (
        ResourceQuota("ns", "long", {"cpu": 1}, terms=(ScopeTerm("Terminating", "Exists"),)),
        ResourceQuota("ns", "soft", soft={"cpu": 1}),
    )
    tree = Tree(namespaces={"ns": Namespace("ns", "t", quota_required=True)}, quotas={"ns": quotas})
    assert uncovered(tree, "ns", Facts(scoped=True), ("cpu",)) == ["cpu"]
    assert uncovered(tree, "ns", Facts(scoped=True, terminating=True), ("cpu",)) == []
