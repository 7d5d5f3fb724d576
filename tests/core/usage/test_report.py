"""Figures of reports."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bursar.core.credit.price import GIB
from bursar.core.quota.quota import Counter
from bursar.core.quota.tenant_tree import Namespace, ResourceQuota, ScopeTerm, Tenant, Tree, tenant_scope
from bursar.core.usage.report import (
    add_up,
    average,
    bound_below,
    is_metered,
    peaks_together,
    plain_units,
    quotas_below,
    together,
    unit_hours,
    unit_of,
)
from bursar.core.usage.usage_levels import HOUR, Used


def test_gpus_of_all_makers_and_nodes_are_added_up() -> None:
    sums = add_up(
        {
            ("nvidia.com/gpu", "a100"): Used(4000 * HOUR, 5_000),
            ("amd.com/gpu", ""): Used(2000 * HOUR),
            ("nodes", ""): Used(500 * HOUR),
            ("cpu", ""): Used(64_000 * HOUR, 1_000),
        }.items()
    )
    assert (sums.gpu_hours, sums.node_hours, sums.nano) == (6.0, 0.5, 6)


def test_hours_are_of_cores_devices_and_gib() -> None:
    assert unit_hours("cpu", 1500 * HOUR) == 1.5
    assert unit_hours("memory", 3 * GIB * HOUR) == 3.0
    assert [unit_of(one) for one in ("cpu", "memory", "nodes", "nvidia.com/gpu", "ephemeral-storage")] == [
        "core", "GiB", "node", "device", "GiB",
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["cpu", "memory", "nodes", "nvidia.com/gpu", "ephemeral-storage"])
def test_what_is_used_over_time_is_metered(name: str) -> None:
    assert is_metered(name)


@pytest.mark.parametrize("name", ["pods", "allocations", "limits.cpu", "limits.nvidia.com/gpu", "volumes", "services"])
def test_numbers_of_things_are_not(name: str) -> None:
    assert not is_metered(name)


@given(st.lists(st.dictionaries(st.sampled_from([("cpu", ""), ("nodes", "")]), st.builds(Used, st.integers(0, 99)))))
def test_together_nothing_is_lost(several: list[dict[tuple[str, str], Used]]) -> None:
    whole = together(several)
    assert sum(one.total for one in whole.values()) == sum(one.total for uses in several for one in uses.values())


def test_a_counter_that_limits_has_all_below_it_and_others_only_their_own() -> None:
    tree = Tree(
        tenants={
            "top": Tenant("top"),
            "mid": Tenant("mid", parent="top", limits={"cpu": 9000}),
            "low": Tenant("low", parent="mid"),
            "side": Tenant("side", parent="top"),
            "else": Tenant("else"),
        }
    )
    bound = {"top": 1000, "mid": 2000 + 4000, "low": 4000, "side": 8000, "else": 16_000}
    counters = {(tenant_scope(name), "cpu"): Counter(bound=amount) for name, amount in bound.items()}
    assert bound_below(tree, counters, "top", ["cpu", "memory"]) == {"cpu": 15_000, "memory": 0}
    assert bound_below(tree, counters, "mid", ["cpu"]) == {"cpu": 6000}
    assert bound_below(tree, counters, "low", ["cpu"]) == {"cpu": 4000}


def test_a_quota_is_the_tenants_own_or_the_sum_of_those_in_namespaces_below_it() -> None:
    batch = (ScopeTerm("PriorityClass", "In", frozenset({"batch"})),)
    tree = Tree(
        tenants={
            "top": Tenant("top", limits={"memory": 7}),
            "low": Tenant("low", parent="top"),
            "else": Tenant("else"),
        },
        namespaces={name: Namespace(name, tenant) for name, tenant in (("a", "top"), ("b", "low"), ("c", "else"))},
        quotas={
            "a": (
                ResourceQuota("a", "one", {"cpu": 10, "memory": 4}),
                ResourceQuota("a", "tighter", {"cpu": 8}),
                ResourceQuota("a", "batch", {"cpu": 100}, terms=batch),
            ),
            "b": (ResourceQuota("b", "one", {"cpu": 1000, "pods": 5}, soft={"nodes": 3}),),
            "c": (ResourceQuota("c", "one", {"cpu": 10_000}),),
        },
    )
    assert quotas_below(tree, "top") == {"cpu": 8 + 100 + 1000, "memory": 7, "pods": 5}
    assert quotas_below(tree, "low") == {"cpu": 1000, "pods": 5}
    assert quotas_below(tree, "nobody") == {}


def test_the_peak_of_several_is_the_highest_sum_of_one_time() -> None:
    rows = [(0, "cpu", 5), (0, "cpu", 2), (3600, "cpu", 6), (3600, "gpu", 1), (7200, "gpu", 3)]
    assert peaks_together(rows) == {"cpu": 7, "gpu": 3}


def test_an_average_is_whole_and_that_of_bytes_is_told_to_the_mib() -> None:
    assert average("cpu", 1000 * HOUR, 3 * HOUR) == 333
    assert average("memory", GIB * HOUR, 3 * HOUR) == 341 << 20
    assert average("memory", 4000, 2) == 2000


@pytest.mark.parametrize(
    ("resource", "amount", "plain"),
    [
        ("cpu", 500, "0.5"),
        ("cpu", 32_000, "32"),
        ("memory", 128 << 30, "128"),
        ("memory", 1 << 29, "0.5"),
        ("nvidia.com/gpu", 0, "0"),
    ],
)
def test_tables_for_spreadsheets_have_plain_numbers(resource: str, amount: int, plain: str) -> None:
    assert plain_units(resource, amount) == plain
