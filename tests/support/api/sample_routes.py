"""A small route table, of the forms that the real one has, for what is generated from it."""

from __future__ import annotations

from functools import partial

from bursar.api.http.route import JSON, Call, Outcome, Param, Route
from bursar.wire.kinds.allocation import ALLOCATION
from bursar.wire.kinds.node import NODE
from bursar.wire.kinds.registry import KINDS
from bursar.wire.shared.kind import Kind

PATCHES = (
    "application/merge-patch+json",
    "application/strategic-merge-patch+json",
    "application/json-patch+json",
    "application/apply-patch+yaml",
)
TABLE = "application/json;as=Table;v=v1;g=meta.k8s.io"
READ = (Param("limit", "At most so many.", "integer"), Param("watch", "Go on with what changes.", "boolean"))
WRITE = (Param("dryRun", "`All` checks and stores nothing."), Param("fieldManager", "Who writes."))


async def nobody(_: Call) -> Outcome:
    raise AssertionError("the table is only read")


def of_kind(kind: Kind) -> list[Route]:
    inside = "namespaces/{namespace}/" if kind.namespaced else ""
    every, one = f"{kind.root}/{inside}{kind.plural}", f"{kind.root}/{inside}{kind.plural}/{{name}}"
    media = (JSON, "text/event-stream", TABLE)
    route = partial(Route, handler=nobody, resource=kind.plural, kind=kind, answer=kind.type)
    routes = [
        route("GET", every, summary="List", verb="list", params=READ, is_list=True, answer_media=media),
        route("POST", every, summary="Create", verb="create", params=WRITE, body=kind.type, status=201),
        route("GET", one, summary="Read", verb="get"),
        route("PUT", one, summary="Replace", verb="update", params=WRITE, body=kind.type),
        route("PATCH", one, summary="Change", verb="patch", body=kind.type, body_media=PATCHES),
        route("DELETE", one, summary="Delete", verb="delete", body=dict),
        route("GET", f"{one}/status", summary="Read status", verb="get", subresource="status"),
        route("PATCH", f"{one}/status", summary="Report", verb="patch", subresource="status", body=kind.type),
    ]
    if kind.namespaced:
        routes.append(route("GET", f"{kind.root}/{kind.plural}", summary="List everywhere", verb="list", is_list=True))
    return routes


def _ours(method: str, path: str, verb: str, resource: str, kind: Kind | None = None) -> Route:
    body = dict if method == "POST" else None
    return Route(method, path, nobody, f"{verb.capitalize()} {resource}", verb, resource, kind=kind, body=body)


def _open(path: str, media: str = JSON) -> Route:
    return Route("GET", path, nobody, "Say how it is", public=True, free=True, answer_media=(media,))


ROUTES = [
    *(route for kind in KINDS for route in of_kind(kind)),
    _ours("POST", "/api/v1/namespaces/{namespace}/allocations/bulk-release", "release", "allocations", ALLOCATION),
    _ours("POST", "/api/v1/nodes/{name}/drain", "drain", "nodes", NODE),
    _ours("GET", "/api/v1/pods", "list", "pods"),
    _ours("GET", "/api/v1/namespaces/{namespace}/pods/{name}", "get", "pods"),
    _ours("POST", "/api/v1/namespaces/{namespace}/pods/{name}/eviction", "evict", "pods"),
    _ours("GET", "/api/v1/namespaces/{namespace}/events", "list", "events"),
    _ours("POST", "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", "create", "selfsubjectaccessreviews"),
    _ours("GET", "/api/v1/metrics/cluster/utilization", "get", "metrics"),
    _open("/healthz", "text/plain"),
    _open("/version"),
    _open("/version/"),
]
