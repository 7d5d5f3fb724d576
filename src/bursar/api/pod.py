"""Allocations shown as pods, for clients that ask what runs where: `kubectl describe node` and its like."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import msgspec

from bursar.api.route import Answer, Call, Outcome
from bursar.api.table import table, wants_table
from bursar.core.allocation import Phase
from bursar.core.refusal import Code, Refusal, invalid
from bursar.core.selector import Op, Selector, SelectorError, matches_fields, parse, parse_fields
from bursar.store import listing
from bursar.store.listing import Item, Query
from bursar.wire.document import encode, render
from bursar.wire.kind import Kind, column
from bursar.wire.meta import Wire

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
    description="An allocation, as Kubernetes would show it.",
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
        return Refusal(Code.METHOD_NOT_ALLOWED, "pods cannot be watched", "Watch the allocations they stand for.")
    tenants = await call.house.visible_tenants(call.identity)
    query = Query("Allocation", call.parameters.get("namespace", ""), tenants, labels=labels)
    if call.identity.node:
        query = replace(query, tenants=None, node=call.identity.node)
    elif (named := _node_named(fields)) is not None:
        query = replace(query, node=named)
    async with call.house.database.reader() as db:
        page = await listing.load_page(db, query)
    pods = [pod for item in page.items if matches_fields(fields, _fields(pod := pod_of(item, query.node)))]
    meta = {"resourceVersion": str(page.revision)}
    if wants_table(call.headers.get("accept", "")):
        return Answer(200, encode(table(POD, pods, now_seconds=time.time(), list_meta=meta)))
    return Answer(200, encode({"kind": "PodList", "apiVersion": "v1", "metadata": meta, "items": pods}))


def _node_named(fields: Selector) -> str | None:
    for term in fields.terms:
        if term.key == "spec.nodeName" and term.op is Op.IN and len(term.values) == 1:
            return term.values[0] or None
    return None


def pod_of(item: Item, node: str = "") -> dict[str, Any]:
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
        "metadata": one["metadata"],
        "spec": spec,
        "status": {"phase": _PHASES[Phase(status.get("phase", Phase.PENDING))], "startTime": status.get("startTime")},
    }


def _fields(pod: dict[str, Any]) -> dict[str, str]:
    metadata = pod["metadata"]
    return {
        "metadata.name": metadata["name"],
        "metadata.namespace": metadata["namespace"],
        "spec.nodeName": pod["spec"].get("nodeName", ""),
        "status.phase": pod["status"]["phase"],
    }
