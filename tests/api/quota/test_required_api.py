"""Namespaces that require quotas, over the API: the refusal names what no quota covers; a quota closes the gap."""

import pytest

from support.api.site import Site, allocation

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_a_namespace_that_requires_quotas_refuses_what_none_covers(site: Site) -> None:
    team = await site.namespace()
    boss = await site.token("tenant-admin", tenant=team, user="boss")
    required = await site.patch(f"namespaces/{team}", {"spec": {"quotaRequired": True}}, token=boss)
    assert (required.status, required.body["spec"]) == (200, {"quotaRequired": True})
    refused = await site.post(f"namespaces/{team}/allocations", allocation("a", cpu=2, gpu=1), token=boss)
    assert (refused.status, refused.body["details"]["code"]) == (403, "quota_exceeded")
    assert refused.message == (
        f"allocation rejected: namespace {team} requires a quota, and none covers cpu, nvidia.com/gpu"
    )
    assert [(one["reason"], one["dimension"]) for one in refused.body["details"]["causes"]] == [
        ("QuotaRequired", "cpu"), ("QuotaRequired", "nvidia.com/gpu"),
    ]  # fmt: skip
    claim = {"metadata": {"name": "c"}, "spec": {"resources": {"clusters": 1}}}
    assert (await site.post(f"namespaces/{team}/resourceclaims", claim, token=boss)).status == 409
    quota = {"metadata": {"name": "q"}, "spec": {"hard": {"requests.cpu": "4", "nvidia.com/gpu": "1"}}}
    assert (await site.post(f"namespaces/{team}/resourcequotas", quota, token=boss)).status == 201
    assert (await site.post(f"namespaces/{team}/allocations", allocation("a", cpu=2, gpu=1), token=boss)).status == 201
    wrong = await site.patch(f"namespaces/{team}", {"spec": {"quotaRequired": "yes"}}, token=boss)
    assert wrong.status == 400
