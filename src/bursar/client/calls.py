"""What can be done with the objects of one kind, and the few calls beside that. Each is a flow."""

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
    """Where the objects of a kind are; without a namespace, those of all namespaces."""

    plural: str
    namespaced: bool
    retries: Retries
    namespace: str = ""

    def within(self, namespace: str) -> ResourcePath:
        if not self.namespaced and namespace:
            raise ValueError(f"{self.plural} do not live in namespaces")
        return replace(self, namespace=namespace)

    @property
    def path(self) -> str:
        inside = f"/namespaces/{segment(self.namespace)}" if self.namespace else ""
        return f"{ROOT}{inside}/{self.plural}"

    def path_of(self, name: str, subresource: str = "") -> str:
        self.require_namespace()
        return f"{self.path}/{segment(name)}" + (f"/{subresource}" if subresource else "")

    def path_for(self, document: Mapping[str, Any]) -> str:
        """Where a new object goes: an object may name its namespace itself."""
        return self.owning(document).path

    def owning(self, document: Mapping[str, Any]) -> ResourcePath:
        named = str((document.get("metadata") or {}).get("namespace") or "")
        place = self.within(named) if self.namespaced and not self.namespace and named else self
        place.require_namespace()
        return place

    def require_namespace(self) -> None:
        if self.namespaced and not self.namespace:
            raise ValueError(f'{self.plural} live in a namespace: name it, as in client.{self.plural}("ml-team")')


def segment(name: str) -> str:
    """A name as one segment of a path. An empty one would address the whole collection."""
    if not name or name in (".", ".."):
        raise ValueError(f"{name!r} is not a name")
    return quote(name, safe="")


def as_document(given: Given) -> Document:
    return dict(given) if isinstance(given, Mapping) else msgspec.to_builtins(given)


# --- Reading


def get(place: ResourcePath, name: str, *, subresource: str = "") -> Flow[Document]:
    """One object, or one of its parts, such as `status`."""
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
    """One page of a list as the API answers it: `items`, and in `metadata` the revision and where it goes on."""
    query = selection(label_selector, field_selector)
    if limit:
        query["limit"] = str(limit)
    if continue_token:
        query["continue"] = continue_token
    return document_of(HttpRequest("GET", place.path, query, accepting(as_table)), place.retries)


def list_(
    place: ResourcePath, *, label_selector: str = "", field_selector: str = "", limit: int = PAGE_ITEMS
) -> Feed[Document]:
    """Every object that matches, asked for in pages of `limit`."""
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
    """What a person would want to see of one object, or of all that match: the server's own Table, in full."""
    if name:
        return (yield from document_of(HttpRequest("GET", place.path_of(name), {}, accepting(True)), place.retries))
    whole: Document = {}
    rows: list[Document] = []
    continue_token = ""
    while not whole or continue_token:
        found = yield from page(
            place,
            label_selector=label_selector,
            field_selector=field_selector,
            limit=limit,
            continue_token=continue_token,
            as_table=True,
        )
        # The first page's revision is that of all.
        whole = whole or found
        rows += found.get("rows") or []
        continue_token = continuation(found)
    return {**whole, "rows": rows}


def selection(label_selector: str, field_selector: str) -> dict[str, str]:
    given = {"labelSelector": label_selector, "fieldSelector": field_selector}
    return {name: value for name, value in given.items() if value}


def accepting(as_table: bool) -> dict[str, str]:
    return {"accept": f"{TABLE},{JSON}" if as_table else JSON}


def continuation(found: Mapping[str, Any]) -> str:
    return str((found.get("metadata") or {}).get("continue") or "")


# --- Writing


def create(place: ResourcePath, given: Given, *, dry_run: bool = False, request_id: str = "") -> Flow[Document]:
    """A new object. With the same `request_id`, a repeated call has one effect and one answer."""
    document = as_document(given)
    return _write("POST", place.path_for(document), place, document, dry_run=dry_run, request_id=request_id)


def replace_(place: ResourcePath, given: Given, *, subresource: str = "", dry_run: bool = False) -> Flow[Document]:
    """Puts an object in the place of the one that has its name; with a resourceVersion, only if that is current."""
    document = as_document(given)
    where = place.owning(document).path_of(name_of(document), subresource)
    return _write("PUT", where, place, document, dry_run=dry_run)


def patch(
    place: ResourcePath,
    name: str,
    patch: Mapping[str, Any] | list[Any],
    *,
    type: PatchType = "merge",  # noqa: A002 - what kubectl calls it
    subresource: str = "",
    dry_run: bool = False,
) -> Flow[Document]:
    """Changes part of an object: by JSON merge patch, strategic merge patch or JSON Patch."""
    if type not in PATCH_MEDIA:
        raise ValueError(f"type must be one of {', '.join(PATCH_MEDIA)}, not {type!r}")
    where = place.path_of(name, subresource)
    return _write("PATCH", where, place, patch, dry_run=dry_run, media_type=PATCH_MEDIA[type])


def delete(
    place: ResourcePath, name: str, *, grace_period_seconds: int | None = None, dry_run: bool = False
) -> Flow[Document]:
    """Asks for an object to go. What runs is given its grace first: the answer shows the object as it is until then."""
    options: Document = {"kind": "DeleteOptions", "apiVersion": "v1"}
    if grace_period_seconds is not None:
        options["gracePeriodSeconds"] = grace_period_seconds
    return _write("DELETE", place.path_of(name), place, options, dry_run=dry_run)


def delete_collection(
    place: ResourcePath, *, label_selector: str = "", field_selector: str = "", dry_run: bool = False
) -> Flow[Document]:
    """Deletes all that match; without a selector, all there are in the namespace."""
    query = selection(label_selector, field_selector)
    return _write("DELETE", place.path, place, None, dry_run=dry_run, query=query)


def bulk_release(
    place: ResourcePath, *, label_selector: str, grace_period_seconds: int | None = None, dry_run: bool = False
) -> Flow[Document]:
    """Releases every allocation of a namespace that matches: how many, and what that frees."""
    body: Document = {"labelSelector": label_selector, "dryRun": dry_run}
    if grace_period_seconds is not None:
        body["gracePeriodSeconds"] = grace_period_seconds
    return _write("POST", place.path_of("bulk-release"), place, body)


def action(place: ResourcePath, name: str, verb: str, body: Mapping[str, Any] | None = None) -> Flow[Document]:
    """What a kind can do beside being changed: `client.jobs("ml-team").action("train", "cancel", {"reason": …})`."""
    return _write("POST", place.path_of(name, segment(verb)), place, dict(body or {}))


def send_stdin(place: ResourcePath, name: str, data: bytes) -> Flow[Document]:
    """Sends what an allocation's command reads from its standard input: once, before it is started."""
    headers = {"content-type": "application/octet-stream"}
    return document_of(HttpRequest("PUT", place.path_of(name, "stdin"), {}, headers, data), place.retries)


def cancel(
    place: ResourcePath, name: str, *, reason: str = "", grace_period_seconds: int | None = None
) -> Flow[Document]:
    """Stops a job: what waits goes at once, what runs is given its grace. The answer has its phase and a message."""
    body: Document = {"reason": reason} if reason else {}
    if grace_period_seconds is not None:
        body["gracePeriodSeconds"] = grace_period_seconds
    return action(place, name, "cancel", body)


def boost(
    place: ResourcePath, name: str, *, priority: int, reason: str, duration: str | int, approved_by: str
) -> Flow[Document]:
    """Gives a job another priority for a while: which it had, which it has, and until when."""
    body = {"newPriority": priority, "reason": reason, "duration": duration, "approvedBy": approved_by}
    return action(place, name, "boost", body)


def explain(place: ResourcePath, name: str) -> Flow[Document]:
    """Why an allocation, or a job, waits: the reasons with their numbers, its place in line, and what would help."""
    return document_of(HttpRequest("GET", place.path_of(name, "explain")), place.retries)


def simulate(place: ResourcePath, given: Given | Sequence[Given]) -> Flow[Document]:
    """What would become of an allocation, or of several together, if it were created now; nothing is."""
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


# --- Calls that belong to no one kind


def request(
    retries: Retries,
    method: str,
    path: str,
    *,
    query: Mapping[str, str] | None = None,
    body: object = None,
    headers: Mapping[str, str] | None = None,
) -> Flow[Any]:
    """Any request: the answer's JSON, its text if it is something else, or None if it is empty."""
    content = b"" if body is None else encoded(body)
    sent = {"content-type": JSON, "accept": JSON, **(headers or {})}
    return json_of(HttpRequest(method.upper(), path, query or {}, sent, content), retries)


def update_tenant(retries: Retries, name: str, changes: Mapping[str, Any], *, dry_run: bool = False) -> Flow[Document]:
    """Changes the named fields of a tenant: `{"max_nodes": 250, "gpu_hours_budget": 150000}`."""
    query = {"dryRun": "All"} if dry_run else {}
    sent = {"content-type": JSON, "accept": JSON}
    return document_of(HttpRequest("PUT", f"{ROOT}/tenants/{segment(name)}", query, sent, encoded(changes)), retries)


def tenant_quotas(retries: Retries, name: str) -> Flow[Document]:
    """Each of a tenant's limits, where it comes from, and what is used of it."""
    return document_of(HttpRequest("GET", f"{ROOT}/tenants/{segment(name)}/quotas"), retries)


def drain(
    retries: Retries,
    name: str,
    *,
    grace_period_seconds: int | None = None,
    force: bool = False,
    reason: str = "",
    dry_run: bool = False,
) -> Flow[Document]:
    """Empties a node: it takes nothing new, and what is placed there is evicted; how far that has come."""
    body: Document = {"force": force, "reason": reason}
    if grace_period_seconds is not None:
        body["gracePeriodSeconds"] = grace_period_seconds
    return _post(retries, f"{ROOT}/nodes/{segment(name)}/drain", body, dry_run=dry_run)


def drain_status(retries: Retries, name: str) -> Flow[Document]:
    """How far a node's drain has come: `status`, `allocationsToEvict` and `progress`."""
    return document_of(HttpRequest("GET", f"{ROOT}/nodes/{segment(name)}/drain"), retries)


def certify(
    retries: Retries, name: str, certificate_request: str, node: Mapping[str, Any] | None = None
) -> Flow[Document]:
    """A certificate for a node's key: `certificate`, `authority`, `address` and `expires`. A new node is registered as
    `node` describes it."""
    body = {"certificateRequest": certificate_request, "node": dict(node or {})}
    return _post(retries, f"{ROOT}/nodes/{segment(name)}/certificates", body)


def authority(retries: Retries) -> Flow[Document]:
    """Who signs the certificates of nodes, as PEM in `authority`, and at which `address` agents are served."""
    return document_of(HttpRequest("GET", f"{ROOT}/authority"), retries)


def fence(retries: Retries, name: str, *, reason: str, dry_run: bool = False) -> Flow[Document]:
    """Says that nothing of a silent node runs any more: what was placed there waits again or fails at once."""
    return _post(retries, f"{ROOT}/nodes/{segment(name)}/fence", {"reason": reason}, dry_run=dry_run)


def unfence(retries: Retries, name: str, *, dry_run: bool = False) -> Flow[Document]:
    """Takes a fence back; the node as it stands then."""
    query = {"dryRun": "All"} if dry_run else {}
    return document_of(HttpRequest("DELETE", f"{ROOT}/nodes/{segment(name)}/fence", query, {"accept": JSON}), retries)


def claim(
    retries: Retries, name: str, *, user: str = "", reason: str = "", dry_run: bool = False, request_id: str = ""
) -> Flow[Document]:
    """Claims a node for sensitive work, for oneself or, as an administrator, for `tenant/name`; the node as it stands
    then."""
    body = {"user": user, "reason": reason}
    return _post(retries, f"{ROOT}/nodes/{segment(name)}/claim", body, dry_run=dry_run, request_id=request_id)


def release_node(
    retries: Retries, name: str, *, reason: str = "", dry_run: bool = False, request_id: str = ""
) -> Flow[Document]:
    """Gives a claimed node back: it is wiped, and then anybody's again; the node as it stands then."""
    body = {"reason": reason}
    return _post(retries, f"{ROOT}/nodes/{segment(name)}/release", body, dry_run=dry_run, request_id=request_id)


def wipe(retries: Retries, name: str, *, reason: str = "", dry_run: bool = False) -> Flow[Document]:
    """Has a node that was given back wiped again, as when that failed."""
    return _post(retries, f"{ROOT}/nodes/{segment(name)}/wipe", {"reason": reason}, dry_run=dry_run)


def confirm_wiped(retries: Retries, name: str, *, reason: str = "", dry_run: bool = False) -> Flow[Document]:
    """Says that a node that was given back is wiped: from then on anybody may use it."""
    return _post(retries, f"{ROOT}/nodes/{segment(name)}/wiped", {"reason": reason}, dry_run=dry_run)


def claims(retries: Retries) -> Flow[Document]:
    """The nodes that are claimed, as far as one may know by whom, as `items`; `pool` is how many may be and are."""
    return document_of(HttpRequest("GET", f"{ROOT}/claims"), retries)


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
    """Stops an allocation so that it waits again: until when it may take, and what that frees."""
    body: Document = {"targetAllocation": name, "reason": reason, "initiatedBy": initiated_by}
    if grace_period_seconds is not None:
        body["gracePeriodSeconds"] = grace_period_seconds
    path = f"{ROOT}/namespaces/{segment(namespace)}/preemptions"
    return _post(retries, path, body, dry_run=dry_run, request_id=request_id)


def _post(retries: Retries, path: str, body: object, *, dry_run: bool = False, request_id: str = "") -> Flow[Document]:
    headers = {"content-type": JSON, "accept": JSON}
    if request_id:
        headers[IDEMPOTENCY_KEY] = request_id
    query = {"dryRun": "All"} if dry_run else {}
    return document_of(HttpRequest("POST", path, query, headers, encoded(body)), retries)


def queue_metrics(retries: Retries) -> Flow[Document]:
    """How many wait in each queue, since when, and how long one waits there."""
    return document_of(HttpRequest("GET", f"{ROOT}/metrics/queues"), retries)


def cluster_utilization(retries: Retries) -> Flow[Document]:
    """How full the cluster is, and how its scheduler does."""
    return document_of(HttpRequest("GET", f"{ROOT}/metrics/cluster/utilization"), retries)


def whoami(retries: Retries) -> Flow[Document]:
    """Who the server takes us for: `user`, `role` and, where it has them, `tenant` and `node`."""
    return document_of(HttpRequest("GET", f"{ROOT}/whoami"), retries)
