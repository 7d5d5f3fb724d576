"""Reasons in plain words, with their numbers, and what would help."""

import pytest

from bursar.core.objects.pending_reason import UNPAID, PendingReason, ReasonCode, Short
from bursar.core.scheduling.cycle.diagnosis import INTER_POD
from bursar.core.scheduling.explain.reason_text import CONSTRAINT_TEXTS, help, sentence  # noqa: A004
from bursar.core.scheduling.state.node_filter import CONSTRAINTS, OPEN

GPU = "nvidia.com/gpu"


@pytest.mark.parametrize(
    ("reason", "said", "helps"),
    [
        (
            PendingReason(ReasonCode.NO_CAPACITY, GPU, 15, short=(Short(GPU, 4000, 2000, 12, 3),), matching=12),
            "needs 4 nvidia.com/gpu on one node; the most free is 2, on 3 of 12 matching nodes",
            "Wait for 2 more nvidia.com/gpu to come free on one node, or add a node; 2 nvidia.com/gpu would fit now.",
        ),
        (
            PendingReason(ReasonCode.NO_CAPACITY, GPU, 1, short=(Short(GPU, 4000, 0, 1, 1),), matching=1),
            "needs 4 nvidia.com/gpu on one node; 0 free on the only matching node",
            "Wait for 4 more nvidia.com/gpu to come free on one node, or add a node.",
        ),
        (
            PendingReason(
                ReasonCode.NO_CAPACITY,
                GPU,
                12,
                short=(Short(GPU, 4000, 8000, 9, 3), Short("memory", 64 << 30, 96 << 30, 3, 1)),
                matching=12,
            ),
            "none of 12 matching nodes has everything free: 9 lack 4 nvidia.com/gpu, 3 lack 64Gi memory",
            "Wait for work to end, add a node, or ask for less.",
        ),
        (
            PendingReason(
                ReasonCode.NO_CAPACITY,
                GPU,
                12,
                (("pod_anti_affinity", 10),),
                (Short(GPU, 4000, 1000, 2, 1),),
                matching=12,
            ),
            (
                "needs 4 nvidia.com/gpu on one node; the most free is 1, on 1 of 2 matching nodes; "
                "more nodes are excluded by pod anti-affinity (10)"
            ),
            (
                "Wait for 3 more nvidia.com/gpu to come free on one node, or add a node; "
                "1 nvidia.com/gpu would fit now. Or make pod anti-affinity a preference."
            ),
        ),
        (
            PendingReason(
                ReasonCode.NO_CAPACITY,
                GPU,
                6,
                (("not_ready_or_cordoned", 1), ("taint maintenance:NoSchedule", 3)),
                (Short(GPU, 8000, 2000, 2, 1),),
                matching=2,
                closed=(("a", "cordoned"),),
            ),
            (
                "needs 8 nvidia.com/gpu on one node; the most free is 2, on 1 of 2 matching nodes; "
                "more nodes are excluded by taint maintenance:NoSchedule (3); a is cordoned"
            ),
            (
                "An administrator can uncordon a. Wait for 6 more nvidia.com/gpu to come free on one node, "
                "or add a node; 2 nvidia.com/gpu would fit now."
            ),
        ),
        (
            PendingReason(
                ReasonCode.NO_CAPACITY,
                GPU,
                4,
                (("together", 3),),
                (Short("nodes", 4, 3, 0),),
                matching=3,
                closed=(("a", "cordoned"), ("b", "not ready")),
            ),
            (
                "not enough capacity for all 4 nodes at once: 3 would fit now, on 3 nodes of 3; "
                "a is cordoned, b is not ready"
            ),
            ("An administrator can uncordon a or bring b back. Wait for work to end, add a node, or ask for less."),
        ),
        (
            PendingReason(ReasonCode.NO_CAPACITY, "nodes", 4, short=(Short("nodes", 3, 1, 3),), matching=4),
            "needs 3 whole nodes; 1 of 4 matching nodes empty",
            "Wait for work to end, add a node, or ask for less.",
        ),
        (
            PendingReason(ReasonCode.NO_CAPACITY, GPU, 4, (("together", 2),), (Short("members", 8, 5, 2),), matching=4),
            "not enough capacity for all 8 members at once: 5 would fit now, on 2 nodes of 4",
            "Wait for work to end, add a node, or ask for less.",
        ),
        (
            PendingReason(ReasonCode.NO_CAPACITY, GPU, 9, (("together", 2),), (Short("nodes", 4, 2, 7),), matching=9),
            "not enough capacity for all 4 nodes at once: 2 would fit now, on 2 nodes of 9",
            "Wait for work to end, add a node, or ask for less.",
        ),
        (
            PendingReason(ReasonCode.AFFINITY, nodes=3, excluded=(("pod_affinity", 3),), matching=3),
            "no node with free capacity is near the allocations it must be near; excluded by pod affinity (3)",
            "Free capacity near the allocations it must be near, or make the affinity a preference.",
        ),
        (
            PendingReason(ReasonCode.AFFINITY, nodes=3, excluded=(("pod_affinity", 3),), matching=3, absent="rack"),
            "none of the allocations it must be near runs on a node with the label rack",
            "Start the allocations it must be near first, correct the labelSelector, or make it a preference.",
        ),
        (
            PendingReason(ReasonCode.QUOTA_EXCEEDED, limits=(("tenant:physics", GPU, 100_000, 98_000, 4000),)),
            "waiting for quota headroom: tenant physics has 98 of 100 nvidia.com/gpu bound, 4 asked",
            "Wait for work under the same limit to end, or raise nvidia.com/gpu of tenant physics by 2.",
        ),
        (
            PendingReason(
                ReasonCode.QUOTA_EXCEEDED,
                limits=(
                    ("quota:team/small", "memory", 1 << 30, 1 << 30, 1 << 29),
                    ("system", "nodes", 2000, 2000, 500),
                ),
            ),
            (
                "waiting for quota headroom: quota team/small has 1Gi of 1Gi memory bound, 512Mi asked; "
                "the system has 2 of 2 nodes bound, 500m asked"
            ),
            (
                "Wait for work under the same limit to end, or raise memory of quota team/small by 512Mi"
                " and raise max_nodes of the system by 500m."
            ),
        ),
        (
            PendingReason(
                ReasonCode.NO_MATCHING_NODES,
                nodes=3,
                excluded=(("nodeSelector zone=b", 2), ("not_ready_or_cordoned", 1)),
            ),
            ("none of 3 nodes matches; excluded by nodeSelector zone=b (2), not ready or cordoned (1)"),
            "Change nodeSelector zone=b, or label, untaint or add a node so that one matches.",
        ),
        (
            PendingReason(ReasonCode.NO_MATCHING_NODES, nodes=3, excluded=(("labels", 3),)),
            "none of 3 nodes matches; excluded by node selector or affinity (3)",
            "Change the node selector, affinity or tolerations, or label, untaint or add a node so that one matches.",
        ),
        (
            PendingReason(ReasonCode.GANG_INCOMPLETE, members=2, members_min=4),
            "waiting for gang members: 2 of 4 submitted",
            "Submit 2 more with the same groupId, or ask for a smaller minMembers.",
        ),
        (
            PendingReason(ReasonCode.NO_NODES_ACTIVE),
            "there are no nodes",
            "Add a node, uncordon one, or bring one back that is not ready.",
        ),
        (
            PendingReason(ReasonCode.NO_NODES_ACTIVE, nodes=2),
            "none of 2 nodes accepts work: all are cordoned or not ready",
            "Add a node, uncordon one, or bring one back that is not ready.",
        ),
        (
            PendingReason(ReasonCode.SPREAD, nodes=9, excluded=(("topology_spread", 9),), matching=9),
            (
                "every node with free capacity is in a domain where one more would exceed maxSkew; "
                "excluded by topology spread (9)"
            ),
            "Free capacity in the emptier domains, raise maxSkew, or use whenUnsatisfiable: ScheduleAnyway.",
        ),
    ],
)
def test_the_words(reason: PendingReason, said: str, helps: str) -> None:
    assert sentence(reason) == said
    assert help(reason) == helps


@pytest.mark.parametrize("why", list(ReasonCode))
def test_every_reason_has_its_words_and_says_what_would_help(why: ReasonCode) -> None:
    said, helps = sentence(PendingReason(why)), help(PendingReason(why))
    assert said[0].islower()
    assert not said.endswith(".")
    assert helps[0].isupper()
    assert helps.endswith(".")


def test_the_words_of_quota_and_of_capacity_differ() -> None:
    quota, capacity = (
        sentence(PendingReason(ReasonCode.QUOTA_EXCEEDED)),
        sentence(PendingReason(ReasonCode.NO_CAPACITY, GPU)),
    )
    assert "quota" in quota
    assert "quota" not in capacity


def test_every_constraint_of_nodes_has_a_text() -> None:
    assert set(CONSTRAINT_TEXTS) == {OPEN, *CONSTRAINTS, *map(str, INTER_POD)}


@pytest.mark.parametrize("why", ReasonCode)
def test_only_reasons_of_payment_read_as_such(why: ReasonCode) -> None:
    about_payment = "account" in sentence(PendingReason(why)) or "account" in help(PendingReason(why))
    assert about_payment is (why in UNPAID)
