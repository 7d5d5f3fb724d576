"""Refusals for quota, word for word: users, their scripts and their support tickets rely on them."""

import pytest

from bursar.core.quota.quota import Exceeded
from bursar.core.quota.quota_messages import dimension_label, dimension_of, quota_refusal
from bursar.core.values.refusal import Code

NODE = 1000  # amounts of nodes and GPUs are counted in thousandths


def test_a_tenant_reads_current_requested_and_limit() -> None:
    refusal = quota_refusal(
        "allocation", [Exceeded("tenant:physics", "nodes", limit=200 * NODE, used=195 * NODE, requested=10 * NODE)]
    )
    assert refusal.code is Code.QUOTA_EXCEEDED
    assert refusal.message == (
        'allocation rejected: tenant "physics" would exceed max_nodes quota (current: 195, requested: 10, limit: 200)'
    )


def test_a_tenant_above_a_lowered_limit_reads_that_it_exceeds_it() -> None:
    refusal = quota_refusal(
        "allocation", [Exceeded("tenant:physics", "nodes", limit=100 * NODE, used=150 * NODE, requested=NODE)]
    )
    assert refusal.message == (
        'allocation rejected: tenant "physics" exceeds max_nodes quota\n'
        "  Current usage: 150 nodes\n"
        "  New limit: 100 nodes\n"
        "  Hint: Wait for running allocations to complete, or contact your tenant admin."
    )
    assert refusal.hint == "Wait for running allocations to complete, or contact your tenant admin."


def test_usage_that_just_fills_the_limit_would_exceed_it() -> None:
    refusal = quota_refusal("allocation", [Exceeded("tenant:a", "nodes", 2 * NODE, 2 * NODE, NODE)])
    assert refusal.message.startswith('allocation rejected: tenant "a" would exceed max_nodes quota (current: 2,')


def test_a_resource_quota_reads_as_in_kubernetes() -> None:
    refusal = quota_refusal("allocation", [Exceeded("quota:ml/gpus", "nvidia.com/gpu", 100_000, 98_000, 4000)])
    assert refusal.message == "exceeded quota: nvidia.com/gpu limit 100, requested 4, used 98"


def test_the_system_is_named_as_such() -> None:
    refusal = quota_refusal("allocation", [Exceeded("system", "nodes", 5000, 4000, 2000)])
    assert refusal.message == (
        "allocation rejected: the system would exceed max_nodes quota (current: 4, requested: 2, limit: 5)"
    )


def test_the_first_limit_speaks_and_every_limit_is_a_cause_with_its_numbers() -> None:
    refusal = quota_refusal(
        "volume",
        [
            Exceeded("quota:ml/q", "memory", 8 << 30, 6 << 30, 4 << 30),
            Exceeded("tenant:lab", "cpu", 1500, 1000, 1000),
            Exceeded("system", "volumes", 1000, 1000, 1000),
        ],
    )
    assert refusal.message == "exceeded quota: memory limit 8Gi, requested 4Gi, used 6Gi"
    assert [
        (one.dimension, one.scope, one.limit, one.current_usage, one.requested_delta) for one in refusal.causes
    ] == [
        ("memory", "quota:ml/q", "8Gi", "6Gi", "4Gi"),
        ("cpu", "tenant:lab", "1500m", "1", "1"),
        ("max_volumes", "system", "1", "1", "1"),
    ]
    assert {one.reason for one in refusal.causes} == {"QuotaExceeded"}
    assert refusal.causes[2].message == (
        "volume rejected: the system would exceed max_volumes quota (current: 1, requested: 1, limit: 1)"
    )


@pytest.mark.parametrize(
    ("dimension", "label"),
    [
        ("nodes", "max_nodes"),
        ("instances", "max_instances"),
        ("allocations", "max_concurrent_allocations"),
        ("clusters", "max_clusters"),
        ("cpu", "cpu"),
        ("memory", "memory"),
        ("pods", "pods"),
        ("limits.cpu", "limits.cpu"),
        ("nvidia.com/gpu", "nvidia.com/gpu"),
        ("baremetal-hosts", "baremetal-hosts"),
    ],
)
def test_platform_limits_are_printed_with_max_and_resources_by_their_name(dimension: str, label: str) -> None:
    assert dimension_label(dimension) == label
    assert dimension_of(label) == dimension
