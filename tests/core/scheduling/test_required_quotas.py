"""Accepted work that no quota covers any more, in a namespace that requires quotas: it is pending, and says why."""

from dataclasses import replace

from bursar.core.nodes.node import WHOLE
from bursar.core.quota.quota import Counter
from bursar.core.quota.tenant_tree import Namespace, ResourceQuota, Tenant, with_namespace, with_quota
from bursar.core.scheduling.explain.reason_text import help as what_helps
from bursar.core.scheduling.explain.reason_text import sentence
from support.scheduling.cluster_states import NOW, ask, bound, cluster_of, cycle, limit, machine, submit, why


def test_work_is_pending_until_a_quota_covers_it() -> None:
    cluster = cluster_of(machine("a", cpu=8))
    limit(cluster, Tenant("t"))
    required = with_namespace(cluster.limits.tree, replace(Namespace("n", "t"), quota_required=True))
    cluster.limits.load(required, {})
    submit(cluster, ask("x", cpu=1), ask("y", cpu=1, namespace="m"))
    plan = cycle(cluster)
    reason = why(cluster, plan, "x")
    assert (reason.code, reason.limits) == ("quota_exceeded", (("namespace:n", "cpu", 0, 0, WHOLE),))
    assert sentence(reason) == "namespace n requires a quota, and none covers cpu"
    assert what_helps(reason).startswith("Ask your tenant admin for a ResourceQuota")
    assert bound(cluster, plan) == {"y": ("a",)}, "other namespaces go on"
    covered = with_quota(required, ResourceQuota("n", "q", {"cpu": 2 * WHOLE}))
    cluster.limits.load(covered, {("quota:n/q", "cpu"): Counter(2 * WHOLE)})
    assert bound(cluster, cycle(cluster, NOW + 1)) == {"x": ("a",)}
