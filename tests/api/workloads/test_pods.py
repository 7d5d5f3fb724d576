"""Allocations shown as pods: what runs on a node, to those who may see it."""

import pytest

from bursar.api.workloads.pod import pod_of
from bursar.store.objects.listing import ListedObject
from support.api.site import Site
from support.runtime.runtime import allocation, bind, node

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_pods_on_a_node_are_the_allocations_bound_to_it(site: Site) -> None:
    runtime = site.context.runtime
    await node(runtime, "n1", cpu=8)
    await node(runtime, "n2", cpu=8)
    await allocation(runtime, "default", "wide", spec={"nodes": 2}, cpu=2)
    await allocation(runtime, "default", "waiting", cpu=1)
    await bind(runtime, "default", "wide", "n1", "n2")
    found = await site.get("pods", fieldSelector="spec.nodeName=n2,status.phase!=Failed")
    assert [one["metadata"]["name"] for one in found.body["items"]] == ["wide"]
    assert found.body["items"][0]["spec"]["nodeName"] == "n2"
    everything = await site.get("namespaces/default/pods")
    assert {"wide", "waiting"} <= {one["metadata"]["name"] for one in everything.body["items"]}


async def test_pods_are_not_watched(site: Site) -> None:
    refused = await site.get("pods", watch="true")
    assert refused.status == 405


@pytest.mark.parametrize(
    ("phase", "shown"), [("Scheduled", "Pending"), ("Running", "Running"), ("Cancelled", "Failed")]
)
async def test_phases_are_told_in_kubernetes_words(phase: str, shown: str) -> None:
    doc = b'{"apiVersion":"v1","kind":"Allocation","metadata":{"name":"a","namespace":"b"},"spec":{}}'
    assert pod_of(ListedObject("b", "a", "t", 1, doc, b'{"phase":"%s"}' % phase.encode()))["status"]["phase"] == shown
