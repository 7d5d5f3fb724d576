"""Calls on the objects of one kind, on tenants, nodes and the cluster. Each is a flow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast
from urllib.parse import quote

import msgspec

from bursar.client.flow import (
    IDEMPOTENCY_KEY,
    JSON,
    Document,
    Feed,
    Flow,
    Give,
    HttpRequest,
    Retries,
    document_of,
    encoded,
    json_of,
)

ROOT = "/api/v1"
PAGE_ITEMS = 500
TABLE = "application/json;as=Table;v=v1;g=meta.k8s.io"

# A dict, or one of the typed objects of bursar.wire.
Given = Mapping[str, Any] | msgspec.Struct
PatchType = Literal["merge", "strategic", "json"]
PATCH_MEDIA: dict[str, str] = {
    "merge": "application/merge-patch+json",
    "strategic": "application/strategic-merge-patch+json",
    "json": "application/json-patch+json",
}


@dataclass(frozen=True, slots=True)
class ResourcePath:
    """The path of the objects of a kind, in one namespace or in all."""

    plural: str
    namespaced: bool
    retries: Retries
    namespace: str = ""
    root: str = ROOT

    def within(self, namespace: str) -> ResourcePath:
        if not self.namespaced and namespace:
            raise ValueError(f"{self.plural} are not namespaced")
        return replace(self, namespace=namespace)

    @property
    def path(self) -> str:
        inside = f"/namespaces/{segment(self.namespace)}" if self.namespace else ""
        return f"{self.root}{inside}/{self.plural}"

    def path_of(self, name: str, subresource: str = "") -> str:
        self.require_namespace()
        return f"{self.path}/{segment(name)}" + (f"/{subresource}" if subresource else "")

    def path_for(self, document: Mapping[str, Any]) -> str:
        """The path for a new object, which may have its namespace in its metadata."""
        return self.owning(document).path

    def owning(self, document: Mapping[str, Any]) -> ResourcePath:
        named = str((document.get("metadata") or {}).get("namespace") or "")
        place = self.within(named) if self.namespaced and not self.namespace and named else self
        place.require_namespace()
        return place

    def require_namespace(self) -> None:
        if self.namespaced and not self.namespace:
            raise ValueError(f'{self.plural} are namespaced: give a namespace, as in client.{self.plural}("ml-team")')


def segment(name: str) -> str:
    """A name as one segment of a path. An empty name is refused, because it would address the whole collection."""
    if not name or name in (".", ".."):
        raise ValueError(f"{name!r} is not a name")
    return quote(name, safe="")


def as_document(given: Given) -> Document:
    return dict(given) if isinstance(given, Mapping) else msgspec.to_builtins(given)


# --- Reading


def get(place: ResourcePath, name: str, *, subresource: str = "") -> Flow[Document]:
    """Read one object, or one of its subresources, such as `status`."""
    return document_of(HttpRequest("GET", place.path_of(name, subresource)), place.retries)


def page(
    place: ResourcePath,
    *,
    label_selector: str = "",
    field_selector: str = "",
    limit: int = 0,
    continue_token: str = "",
    as_table: bool = False,
) -> Flow[Document]:
    """Read one page of a list: `items`, and in `metadata` the revision and the token of the next page."""
    query = selection(label_selector, field_selector)
    if limit:
        query["limit"] = str(limit)
    if continue_token:
        query["continue"] = continue_token
    return document_of(HttpRequest("GET", place.path, query, accepting(as_table)), place.retries)


def list_(
    place: ResourcePath, *, label_selector: str = "", field_selector: str = "", limit: int = PAGE_ITEMS
) -> Feed[Document]:
    """Iterate over all matching objects, in pages of `limit`."""
    continue_token = ""
    while True:
        found = yield from page(
            place,
            label_selector=label_selector,
            field_selector=field_selector,
            limit=limit,
            continue_token=continue_token,
        )
        for item in found.get("items") or []:
            yield Give(item)
        continue_token = continuation(found)
        if not continue_token:
            return


def table(
    place: ResourcePath, name: str = "", *, label_selector: str = "", field_selector: str = "", limit: int = PAGE_ITEMS
) -> Flow[Document]:
    """Read the server's Table of one object, or of all matching objects."""
    if name:
        return (yield from document_of(HttpRequest("GET", place.path_of(name), {}, accepting(True)), place.retries))
    found = yield from every_page(place, label_selector, field_selector, limit, as_table=True)
    # The revision of the first page holds for all.
    return {**found[0], "rows": [row for one in found for row in one.get("rows") or []]}


def every_page(
    place: ResourcePath, label_selector: str, field_selector: str, limit: int, *, as_table: bool
) -> Flow[list[Document]]:
    """Read all pages of a list."""
    found: list[Document] = []
    while not found or continuation(found[-1]):
        token = continuation(found[-1]) if found else ""
        asked = {"label_selector": label_selector, "field_selector": field_selector, "continue_token": token}
        found.append((yield from page(place, **asked, limit=limit, as_table=as_table)))
    return found


def selection(label_selector: str, field_selector: str) -> dict[str, str]:
    return given(labelSelector=label_selector, fieldSelector=field_selector)


def accepting(as_table: bool) -> dict[str, str]:
    return {"accept": f"{TABLE},{JSON}" if as_table else JSON}


def continuation(found: Mapping[str, Any]) -> str:
    return str((found.get("metadata") or {}).get("continue") or "")


# --- Writing


def create(place: ResourcePath, given: Given, *, dry_run: bool = False, request_id: str = "") -> Flow[Document]:
    """Create an object. `request_id` is the idempotency key: repeated calls have one effect and one answer."""
    document = as_document(given)
    return _write("POST", place.path_for(document), place, document, dry_run=dry_run, request_id=request_id)


def replace_(place: ResourcePath, given: Given, *, subresource: str = "", dry_run: bool = False) -> Flow[Document]:
    """Replace the object of this name; with a resourceVersion, only if it is current (optimistic concurrency)."""
    document = as_document(given)
    where = place.owning(document).path_of(name_of(document), subresource)
    return _write("PUT", where, place, document, dry_run=dry_run)


def patch(
    place: ResourcePath,
    name: str,
    patch: Mapping[str, Any] | list[Any],
    *,
    type: PatchType = "merge",  # noqa: A002 - kubectl's name
    subresource: str = "",
    dry_run: bool = False,
) -> Flow[Document]:
    """Change part of an object by JSON merge patch, strategic merge patch or JSON Patch."""
    if type not in PATCH_MEDIA:
        raise ValueError(f"type must be one of {', '.join(PATCH_MEDIA)}, not {type!r}")
    where = place.path_of(name, subresource)
    return _write("PATCH", where, place, patch, dry_run=dry_run, media_type=PATCH_MEDIA[type])


def delete(
    place: ResourcePath, name: str, *, grace_period_seconds: int | None = None, dry_run: bool = False
) -> Flow[Document]:
    """Delete an object. Running work gets its grace period first; the answer shows the object as it is until then."""
    options: Document = {"kind": "DeleteOptions", "apiVersion": "v1"}
    if grace_period_seconds is not None:
        options["gracePeriodSeconds"] = grace_period_seconds
    return _write("DELETE", place.path_of(name), place, options, dry_run=dry_run)


def delete_collection(
    place: ResourcePath, *, label_selector: str = "", field_selector: str = "", dry_run: bool = False
) -> Flow[Document]:
    """Delete all matching objects; without a selector, all objects of the kind in the namespace."""
    query = selection(label_selector, field_selector)
    return _write("DELETE", place.path, place, None, dry_run=dry_run, query=query)


def bulk_release(
    place: ResourcePath, *, label_selector: str, grace_period_seconds: int | None = None, dry_run: bool = False
) -> Flow[Document]:
    """Release all matching allocations of a namespace. The answer has their number and the freed resources."""
    body: Document = {"labelSelector": label_selector, "dryRun": dry_run}
    if grace_period_seconds is not None:
        body["gracePeriodSeconds"] = grace_period_seconds
    return _write("POST", place.path_of("bulk-release"), place, body)


def action(place: ResourcePath, name: str, verb: str, body: Mapping[str, Any] | None = None) -> Flow[Document]:
    """Run an action of a kind: `client.jobs("ml-team").action("train", "cancel", {"reason": …})`."""
    return _write("POST", place.path_of(name, segment(verb)), place, dict(body or {}))


def send_stdin(place: ResourcePath, name: str, data: bytes) -> Flow[Document]:
    """Send the standard input of an allocation's command: once, before it starts."""
    headers = {"content-type": "application/octet-stream"}
    return document_of(HttpRequest("PUT", place.path_of(name, "stdin"), {}, headers, data), place.retries)


def cancel(
    place: ResourcePath, name: str, *, reason: str = "", grace_period_seconds: int | None = None
) -> Flow[Document]:
    """Cancel a job: delete its pending allocations at once and stop running ones within their grace period."""
    body: Document = {"reason": reason} if reason else {}
    if grace_period_seconds is not None:
        body["gracePeriodSeconds"] = grace_period_seconds
    return action(place, name, "cancel", body)


def boost(
    place: ResourcePath, name: str, *, priority: int, reason: str, duration: str | int, approved_by: str
) -> Flow[Document]:
    """Give a job another priority for a limited time. The answer has both priorities and the end."""
    body = {"newPriority": priority, "reason": reason, "duration": duration, "approvedBy": approved_by}
    return action(place, name, "boost", body)


def explain(place: ResourcePath, name: str) -> Flow[Document]:
    """Explain why an allocation or a job is pending: reasons with numbers, queue position, and what would help."""
    return document_of(HttpRequest("GET", place.path_of(name, "explain")), place.retries)


def simulate(place: ResourcePath, given: Given | Sequence[Given]) -> Flow[Document]:
    """Simulate whether, where and when allocations would run if they were created together now."""
    alone = as_document(given) if isinstance(given, Mapping | msgspec.Struct) else None
    body = alone if alone is not None else {"items": [as_document(one) for one in cast("Sequence[Given]", given)]}
    return _write("POST", place.path_of("simulate"), place, body)


def name_of(document: Mapping[str, Any]) -> str:
    name = (document.get("metadata") or {}).get("name")
    if not name:
        raise ValueError("the object has no metadata.name")
    return str(name)


def _write(
    method: str,
    path: str,
    place: ResourcePath,
    body: object,
    *,
    dry_run: bool = False,
    request_id: str = "",
    media_type: str = JSON,
    query: Mapping[str, str] | None = None,
) -> Flow[Document]:
    headers = {"content-type": media_type, "accept": JSON}
    if request_id:
        headers[IDEMPOTENCY_KEY] = request_id
    options = {**(query or {}), **({"dryRun": "All"} if dry_run else {})}
    content = b"" if body is None else encoded(body)
    return document_of(HttpRequest(method, path, options, headers, content), place.retries)


# --- Calls that belong to no kind


def request(
    retries: Retries,
    method: str,
    path: str,
    *,
    query: Mapping[str, str] | None = None,
    body: object = None,
    headers: Mapping[str, str] | None = None,
) -> Flow[Any]:
    """Send any request. Returns the answer's JSON, else its text, or None if it is empty."""
    content = b"" if body is None else encoded(body)
    sent = {"content-type": JSON, "accept": JSON, **(headers or {})}
    return json_of(HttpRequest(method.upper(), path, query or {}, sent, content), retries)


def update_tenant(retries: Retries, name: str, changes: Mapping[str, Any], *, dry_run: bool = False) -> Flow[Document]:
    """Change fields of a tenant: `{"max_nodes": 250, "gpu_hours_budget": 150000}`."""
    query = {"dryRun": "All"} if dry_run else {}
    sent = {"content-type": JSON, "accept": JSON}
    return document_of(HttpRequest("PUT", f"{ROOT}/tenants/{segment(name)}", query, sent, encoded(changes)), retries)


def tenant_quotas(retries: Retries, name: str) -> Flow[Document]:
    """Read a tenant's limits, their sources and their usage."""
    return read(retries, f"tenants/{segment(name)}/quotas")


def tenant_limits(retries: Retries, name: str) -> Flow[Document]:
    """Read a tenant's limits by dimension, with their sources and usage."""
    return read(retries, f"tenants/{segment(name)}/limits")


def set_limit(
    retries: Retries, name: str, dimension: str, limit: str | int, *, dry_run: bool = False, request_id: str = ""
) -> Flow[Document]:
    """Set a tenant's limit on a dimension. The answer has the limit with its source and usage."""
    return _change_limit(retries, "PUT", name, dimension, {"limit": limit}, dry_run=dry_run, request_id=request_id)


def unset_limit(
    retries: Retries, name: str, dimension: str, *, dry_run: bool = False, request_id: str = ""
) -> Flow[Document]:
    """Remove a tenant's own limit on a dimension: its tier's applies. The answer is as that of `set_limit`."""
    return _change_limit(retries, "DELETE", name, dimension, None, dry_run=dry_run, request_id=request_id)


def _change_limit(
    retries: Retries, method: str, name: str, dimension: str, body: object, *, dry_run: bool, request_id: str
) -> Flow[Document]:
    path = f"{ROOT}/tenants/{segment(name)}/limits/{segment(dimension)}"
    headers = {"content-type": JSON, "accept": JSON, **({IDEMPOTENCY_KEY: request_id} if request_id else {})}
    content = b"" if body is None else encoded(body)
    return document_of(HttpRequest(method, path, {"dryRun": "All"} if dry_run else {}, headers, content), retries)


def drain(
    retries: Retries,
    name: str,
    *,
    grace_period_seconds: int | None = None,
    force: bool = False,
    reason: str = "",
    dry_run: bool = False,
) -> Flow[Document]:
    """Drain a node: cordon it and evict its work. The answer is the progress."""
    body: Document = {"force": force, "reason": reason}
    if grace_period_seconds is not None:
        body["gracePeriodSeconds"] = grace_period_seconds
    return post(retries, f"nodes/{segment(name)}/drain", body, dry_run=dry_run)


def drain_status(retries: Retries, name: str) -> Flow[Document]:
    """Read the progress of a drain: `status`, `allocationsToEvict` and `progress`."""
    return read(retries, f"nodes/{segment(name)}/drain")


def certify(
    retries: Retries, name: str, certificate_request: str, node: Mapping[str, Any] | None = None
) -> Flow[Document]:
    """Certify a node's key: `certificate`, `authority`, `address` and `expires`. `node` describes a new node."""
    body = {"certificateRequest": certificate_request, "node": dict(node or {})}
    return post(retries, f"nodes/{segment(name)}/certificates", body)


def authority(retries: Retries) -> Flow[Document]:
    """Read the CA of node certificates, as PEM in `authority`, and the `address` that serves agents."""
    return read(retries, "authority")


def fence(retries: Retries, name: str, *, reason: str, dry_run: bool = False) -> Flow[Document]:
    """Fence a silent node: confirm that nothing runs there, so that its work is requeued or fails at once."""
    return post(retries, f"nodes/{segment(name)}/fence", {"reason": reason}, dry_run=dry_run)


def unfence(retries: Retries, name: str, *, dry_run: bool = False) -> Flow[Document]:
    """Remove a node's fence. Returns the node."""
    query = {"dryRun": "All"} if dry_run else {}
    return document_of(HttpRequest("DELETE", f"{ROOT}/nodes/{segment(name)}/fence", query, {"accept": JSON}), retries)


def claim(
    retries: Retries, name: str, *, user: str = "", reason: str = "", dry_run: bool = False, request_id: str = ""
) -> Flow[Document]:
    """Claim a node for sensitive work, for oneself or, as an administrator, for `tenant/name`. Returns the node."""
    body = {"user": user, "reason": reason}
    return post(retries, f"nodes/{segment(name)}/claim", body, dry_run=dry_run, request_id=request_id)


def release_node(
    retries: Retries, name: str, *, reason: str = "", dry_run: bool = False, request_id: str = ""
) -> Flow[Document]:
    """Release a claimed node, which is wiped before others may use it. Returns the node."""
    body = {"reason": reason}
    return post(retries, f"nodes/{segment(name)}/release", body, dry_run=dry_run, request_id=request_id)


def wipe(retries: Retries, name: str, *, reason: str = "", dry_run: bool = False) -> Flow[Document]:
    """Retry the wipe of a released node."""
    return post(retries, f"nodes/{segment(name)}/wipe", {"reason": reason}, dry_run=dry_run)


def confirm_wiped(retries: Retries, name: str, *, reason: str = "", dry_run: bool = False) -> Flow[Document]:
    """Confirm that a released node is wiped, so that others may use it."""
    return post(retries, f"nodes/{segment(name)}/wiped", {"reason": reason}, dry_run=dry_run)


def claims(retries: Retries) -> Flow[Document]:
    """Read the claimed nodes as `items`, with the holders that the caller may see, and the size of the `pool`."""
    return read(retries, "claims")


def preempt(
    retries: Retries,
    namespace: str,
    name: str,
    *,
    reason: str = "",
    grace_period_seconds: int | None = None,
    initiated_by: str = "",
    dry_run: bool = False,
    request_id: str = "",
) -> Flow[Document]:
    """Stop an allocation and requeue it. The answer has the end of its grace period and the freed resources."""
    body: Document = {"targetAllocation": name, "reason": reason, "initiatedBy": initiated_by}
    if grace_period_seconds is not None:
        body["gracePeriodSeconds"] = grace_period_seconds
    path = f"namespaces/{segment(namespace)}/preemptions"
    return post(retries, path, body, dry_run=dry_run, request_id=request_id)


def post(retries: Retries, path: str, body: object, *, dry_run: bool = False, request_id: str = "") -> Flow[Document]:
    headers = {"content-type": JSON, "accept": JSON}
    if request_id:
        headers[IDEMPOTENCY_KEY] = request_id
    query = {"dryRun": "All"} if dry_run else {}
    return document_of(HttpRequest("POST", f"{ROOT}/{path}", query, headers, encoded(body)), retries)


def read(retries: Retries, path: str, **query: str) -> Flow[Document]:
    return document_of(HttpRequest("GET", f"{ROOT}/{path}", given(**query)), retries)


def pages(retries: Retries, path: str, **query: str) -> Feed[Document]:
    """Give the items of a list that is not of a kind, page by page."""
    following = ""
    while True:
        found = yield from read(retries, path, **query, **{"continue": following})
        for item in found.get("items") or []:
            yield Give(item)
        following = str(found.get("continue") or "")
        if not following:
            return


def given(**query: str) -> dict[str, str]:
    """The query parameters that have a value."""
    return {name: value for name, value in query.items() if value}


def queue_metrics(retries: Retries) -> Flow[Document]:
    """Read the number of pending allocations and the waiting times of each queue."""
    return read(retries, "metrics/queues")


def cluster_utilization(retries: Retries) -> Flow[Document]:
    """Read the utilization of the cluster, and the figures of its scheduler."""
    return read(retries, "metrics/cluster/utilization")


def whoami(retries: Retries) -> Flow[Document]:
    """Read the caller's identity: `user`, `role`, and `tenant` and `node` if it has them."""
    return read(retries, "whoami")
