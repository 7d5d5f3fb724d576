"""Allocations shown as pods, for clients that ask what runs where: `kubectl describe node`, `kubectl drain`.

A pod is one placement of an allocation: when that is evicted and pending again, the pod is gone, and another one of
the same name replaces it. So a pod's uid is made of the allocation's uid and the epoch of the placement.
"""

from __future__ import annotations

import time
import uuid
from dataclasses import replace
from typing import Any

import msgspec

from bursar.api.http.route import Answer, Call, Outcome
from bursar.api.objects.object import find, item
from bursar.api.objects.table import table, wants_table
from bursar.core.nodes.eviction import DO_NOT_EVICT, STOPPABLE
from bursar.core.objects.allocation import Phase
from bursar.core.objects.object import Key, Stored
from bursar.core.values.redaction import redacted
from bursar.core.values.refusal import Code, Refusal, invalid
from bursar.core.values.selector import Op, Selector, SelectorError, matches_fields, parse, parse_fields
from bursar.store.objects import listing
from bursar.store.objects.listing import ListedObject, Query
from bursar.wire.shared.document import encode, render
from bursar.wire.shared.kind import Kind, column
from bursar.wire.shared.meta import Wire

SELECTABLE = ("metadata.name", "metadata.namespace", "spec.nodeName", "status.phase")

_PHASES = {
    Phase.PENDING: "Pending",
    Phase.SCHEDULED: "Pending",
    Phase.RUNNING: "Running",
    Phase.TERMINATING: "Running",
    Phase.SUCCEEDED: "Succeeded",
    Phase.FAILED: "Failed",
    Phase.CANCELLED: "Failed",
}

POD = Kind(
    name="Pod",
    plural="pods",
    type=Wire,
    namespaced=True,
    description="An allocation in the form of a Kubernetes pod.",
    short_names=("po",),
    columns=(column("Status", "status.phase"), column("Node", "spec.nodeName", default="<none>")),
)


async def list_pods(call: Call) -> Outcome:
    """Allocations that selectors match, as pods. They are not watched: watch the allocations."""
    try:
        labels = parse(call.query.get("labelSelector", ""))
        fields = parse_fields(call.query.get("fieldSelector", ""), SELECTABLE)
    except SelectorError as error:
        return invalid(str(error))
    if call.query.get("watch", "") in ("true", "1"):
        return Refusal(Code.METHOD_NOT_ALLOWED, "pods cannot be watched", "Watch their allocations.")
    tenants = await call.context.visible_tenants(call.identity)
    query = Query("Allocation", call.parameters.get("namespace", ""), tenants, labels=labels)
    if call.identity.node:
        query = replace(query, tenants=None, node=call.identity.node)
    elif (named := _node_named(fields)) is not None:
        query = replace(query, node=named)
    async with call.context.database.reader() as db:
        page = await listing.load_page(db, query)
    pods = [pod for item in page.items if matches_fields(fields, _fields(pod := pod_of(item, query.node)))]
    meta = {"resourceVersion": str(page.revision)}
    if wants_table(call.headers.get("accept", "")):
        return Answer(200, encode(table(POD, pods, now_seconds=time.time(), list_meta=meta)))
    return Answer(200, encode({"kind": "PodList", "apiVersion": "v1", "metadata": meta, "items": pods}))


async def get_pod(call: Call) -> Outcome:
    found = await find_pod(call)
    if isinstance(found, Refusal):
        return found
    pod = pod_of(item(found))
    if wants_table(call.headers.get("accept", "")):
        meta = {"resourceVersion": str(found.revision)}
        return Answer(200, encode(table(POD, [pod], now_seconds=time.time(), list_meta=meta)))
    return Answer(200, encode(pod))


async def find_pod(call: Call) -> Stored | Refusal:
    """The allocation that the path calls a pod."""
    namespace, name = call.parameters["namespace"], call.parameters["name"]
    found = await find(call, Key("Allocation", namespace, name))
    return pod_not_found(name) if isinstance(found, Refusal) and found.code is Code.NOT_FOUND else found


async def list_budgets(_: Call) -> Outcome:
    found = {"kind": "PodDisruptionBudgetList", "apiVersion": "policy/v1", "metadata": {}, "items": []}
    return Answer(200, encode(found))


def pod_not_found(name: str) -> Refusal:
    return Refusal(Code.NOT_FOUND, f'pods "{name}" not found')


def _node_named(fields: Selector) -> str | None:
    for term in fields.terms:
        if term.key == "spec.nodeName" and term.op is Op.IN and len(term.values) == 1:
            return term.values[0] or None
    return None


def pod_of(item: ListedObject, node: str = "") -> dict[str, Any]:
    """An allocation as a pod on one node: the one asked about, else its first."""
    one: dict[str, Any] = msgspec.json.decode(render(item.doc, item.status, item.revision))
    status = one.get("status", {})
    resources = one["spec"].get("resources", {})
    container = {"name": "allocation", "image": "", "resources": resources}
    placed = [place["name"] for place in status.get("nodes", ())]
    spec: dict[str, Any] = {"containers": [container]}
    if placed:
        spec["nodeName"] = node if node in placed else placed[0]
    return {
        "kind": "Pod",
        "apiVersion": "v1",
        "metadata": _metadata(one["metadata"], status),
        "spec": spec,
        "status": {"phase": _PHASES[Phase(status.get("phase", Phase.PENDING))], "startTime": status.get("startTime")},
    }


def _metadata(of_allocation: dict[str, Any], status: dict[str, Any]) -> dict[str, Any]:
    uid = of_allocation.get("uid", "")
    # Pods are also shown to roles that do not see allocations.
    metadata = redacted({**of_allocation, "uid": pod_uid(uid, status)})
    metadata.pop("ownerReferences", None)
    if (of_allocation.get("annotations") or {}).get(DO_NOT_EVICT) != "true":
        # The allocation is what brings the pod back. A protected one has no owner here, so that `kubectl drain`
        # requires --force, as `bursar drain` does.
        owner = {"apiVersion": "v1", "kind": "Allocation", "name": of_allocation["name"], "uid": uid}
        metadata["ownerReferences"] = [{**owner, "controller": True, "blockOwnerDeletion": False}]
    if notice := status.get("eviction"):
        metadata.setdefault("deletionTimestamp", notice["deadline"])
        metadata.setdefault("deletionGracePeriodSeconds", notice["gracePeriodSeconds"])
    return metadata


def pod_uid(uid: str, status: dict[str, Any]) -> str:
    """A different uid for each placement, and for the time after it: clients see an evicted pod as deleted."""
    epoch = status.get("epoch", 0)
    placement = f"{epoch}" if status.get("phase") in STOPPABLE else f"after {epoch}"
    return str(uuid.uuid5(uuid.NAMESPACE_OID, f"{uid}/{placement}"))


def _fields(pod: dict[str, Any]) -> dict[str, str]:
    metadata = pod["metadata"]
    return {
        "metadata.name": metadata["name"],
        "metadata.namespace": metadata["namespace"],
        "spec.nodeName": pod["spec"].get("nodeName", ""),
        "status.phase": pod["status"]["phase"],
    }
