"""The route table, from which the server, discovery and OpenAPI are built."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import msgspec

from bursar.api.access import review, token
from bursar.api.approval.approval import approval_routes
from bursar.api.http.body import PROTOBUF, YAML
from bursar.api.http.params import DRY_RUN, MANAGER, PRETTY, ROOT, SELECTORS, VALIDATION, base_path
from bursar.api.http.route import JSON, Handler, Param, Route
from bursar.api.nodes import jwks, node
from bursar.api.nodes.routes import node_routes
from bursar.api.objects import delete, edit, event
from bursar.api.objects import object as objects
from bursar.api.objects.watch import SSE
from bursar.api.objects.webhook import webhook_routes
from bursar.api.openshift.routes import openshift_routes
from bursar.api.quota import limits, tenant
from bursar.api.site import discovery, docs, openapi, openapi_v2, system
from bursar.api.site.credit_routes import credit_routes
from bursar.api.usage.tenant_usage import usage_routes
from bursar.api.workloads import allocation
from bursar.api.workloads.routes import workload_routes
from bursar.wire.kinds.allocation import ALLOCATION
from bursar.wire.kinds.node import NODE
from bursar.wire.kinds.registry import KINDS
from bursar.wire.kinds.tenant import TENANT
from bursar.wire.shared.kind import Kind

LISTING = (
    *SELECTORS,
    Param("limit", "Maximum number of items; fetch the rest with continue.", "integer"),
    Param("continue", "The continue token from the metadata of the previous page."),
    Param("watch", "true: stream changes instead of listing.", "boolean"),
    Param("resourceVersion", "Watch for changes after this revision."),
    Param("resourceVersionMatch", "Accepted for compatibility."),
    Param("allowWatchBookmarks", "true: send bookmarks.", "boolean"),
    Param("sendInitialEvents", "true: begin the watch with the existing objects.", "boolean"),
    Param("timeoutSeconds", "End the watch after this many seconds.", "integer"),
    Param("includeObject", "Objects in the rows of a Table: None, Metadata or Object."),
)
DELETING = (
    Param("gracePeriodSeconds", "Seconds that running work has to stop.", "integer"),
    Param("propagationPolicy", "Orphan: keep the objects that this one created."),
    DRY_RUN,
)
BODIES = (JSON, YAML[0], PROTOBUF)
QUOTA = (403, 409, 422)


@dataclass(frozen=True, slots=True)
class KindHandlers:
    """The write handlers of a kind: its own, else the common ones."""

    create: Handler = objects.create
    replace: Handler = edit.replace_object
    replace_status: Handler = edit.replace_object
    patch_status: Handler = edit.patch_object


HANDLERS = {
    ALLOCATION.name: KindHandlers(replace_status=allocation.report_status, patch_status=allocation.report_status),
    NODE.name: KindHandlers(create=node.register, replace_status=node.patch_status, patch_status=node.patch_status),
    TENANT.name: KindHandlers(replace=tenant.put_tenant),
}
COMMON = KindHandlers()


def build_routes(release: str) -> list[Route]:
    """All routes, including the documents that describe them."""
    routes = [
        *_kind_routes(),
        *workload_routes(),
        *approval_routes(),
        *openshift_routes(),
        *node_routes(),
        *tenant.tenant_routes(),
        *limits.limit_routes(),
        *_other_routes(),
        *credit_routes(ROOT),
        *usage_routes(ROOT),
        *webhook_routes(ROOT),
        *_system_routes(),
    ]
    described = [*routes]
    for path, body in discovery.documents(described, release=release).items():
        if not any(route.path == path.rstrip("/") and route.method == "GET" for route in routes):
            routes.append(Route("GET", path.rstrip("/"), system.fixed(body), "Discovery.", public=True, free=True))
    documents = openapi.documents(described, release=release)
    for path, body in documents.items():
        media = openapi_v2.MEDIA_TYPE if path == "/openapi/v2" else JSON
        routes.append(Route("GET", path, system.fixed(body, media), "OpenAPI.", public=True, free=True))
    page = docs.page(msgspec.json.decode(documents["/openapi.json"]))
    policy = {"Content-Security-Policy": docs.CONTENT_SECURITY_POLICY}
    routes.append(
        Route(
            "GET", "/docs", system.fixed(page, "text/html; charset=utf-8", policy), "This page.", public=True, free=True
        )
    )
    return routes


def _kind_routes() -> Iterator[Route]:
    for kind in KINDS:
        handlers = HANDLERS.get(kind.name, COMMON)
        yield from _collection_routes(kind, handlers)
        yield from _item_routes(kind, handlers)
        if kind.has_status:
            yield from _status_routes(kind, handlers)


def _collection_routes(kind: Kind, handlers: KindHandlers) -> Iterator[Route]:
    base, plural = base_path(kind), kind.plural
    listing = Route(
        "GET", base, objects.list_or_watch, f"List or watch {plural}.", "list", plural, kind=kind, params=LISTING,
        answer=kind.type, answer_media=(JSON, SSE), is_list=True, refusals=(410,),
    )  # fmt: skip
    yield listing
    if kind.namespaced:
        path = f"{kind.root}/{plural}"
        yield replace(listing, path=path, summary=f"List or watch {plural} across namespaces.")
    yield Route(
        "POST", base, handlers.create, f"Create {_a(kind)}.", "create", plural, kind=kind,
        params=(DRY_RUN, VALIDATION, MANAGER, PRETTY), body=kind.type, body_media=BODIES, answer=kind.type, status=201,
        refusals=QUOTA,
    )  # fmt: skip
    yield Route(
        "DELETE", base, delete.delete_collection, f"Delete all {plural} that match.", "deletecollection", plural,
        kind=kind, params=(*SELECTORS, *DELETING), body=delete.DeleteOptions, answer=kind.type, is_list=True,
        refusals=(409,),
    )  # fmt: skip


def _item_routes(kind: Kind, handlers: KindHandlers) -> Iterator[Route]:
    path, plural, a = f"{base_path(kind)}/{{name}}", kind.plural, _a(kind)
    writing = (DRY_RUN, VALIDATION, MANAGER, PRETTY)
    yield Route("GET", path, objects.get, f"Read {a}.", "get", plural, kind=kind, params=(PRETTY,), answer=kind.type)
    yield Route(
        "PUT", path, handlers.replace, f"Replace {a}.", "update", plural, kind=kind,
        params=writing, body=kind.type, body_media=BODIES, answer=kind.type, refusals=QUOTA,
    )  # fmt: skip
    yield Route(
        "PATCH", path, edit.patch_object, f"Change some fields of {a}.", "patch", plural, kind=kind,
        params=(*writing, Param("force", "Accepted for compatibility.", "boolean")), body=kind.type,
        body_media=edit.PATCHES, answer=kind.type, refusals=(*QUOTA, 201),
    )  # fmt: skip
    yield Route(
        "DELETE", path, delete.delete, f"Delete {a}.", "delete", plural, kind=kind, params=DELETING,
        body=delete.DeleteOptions, answer=kind.type, refusals=(409,),
    )  # fmt: skip


def _status_routes(kind: Kind, handlers: KindHandlers) -> Iterator[Route]:
    path, plural = f"{base_path(kind)}/{{name}}/status", kind.plural
    writing = (DRY_RUN, VALIDATION, MANAGER, PRETTY)
    common = {"resource": plural, "subresource": "status", "kind": kind, "answer": kind.type}
    yield Route("GET", path, objects.get, f"Read the status of {_a(kind)}.", "get", **common)  # type: ignore[arg-type]
    yield Route(
        "PUT", path, handlers.replace_status, f"Replace the status of {_a(kind)}.",
        "update", params=writing, body=kind.type, body_media=BODIES, refusals=QUOTA, **common,  # type: ignore[arg-type]
    )  # fmt: skip
    yield Route(
        "PATCH", path, handlers.patch_status, f"Change the status of {_a(kind)}.", "patch",
        params=writing, body=kind.type, body_media=edit.PATCHES, refusals=QUOTA, **common,  # type: ignore[arg-type]
    )  # fmt: skip


def _a(kind: Kind) -> str:
    return f"{'an' if kind.name[0] in 'AEIOU' else 'a'} {kind.singular}"


def _other_routes() -> Iterator[Route]:
    for path in (f"{ROOT}/events", f"{ROOT}/namespaces/{{namespace}}/events"):
        yield Route("GET", path, event.list_events, "List events, from the change feed.", "list", "events",
                    params=(Param("fieldSelector", "For example, involvedObject.name=job-1."),
                            Param("limit", "Accepted for compatibility.", "integer")))  # fmt: skip
    yield Route("POST", f"{ROOT}/tokens", token.create, "Create a token; only this response contains its secret.",
                "create", "tokens", body=token.NewToken, answer=token.Token, status=201,
                refusals=(403, 404))  # fmt: skip
    yield Route("GET", f"{ROOT}/tokens", token.list_tokens, "List tokens, without their secrets.", "list", "tokens")
    yield Route(
        "DELETE", f"{ROOT}/tokens/{{name}}", token.revoke, "Revoke a token.", "delete", "tokens", answer=token.Token
    )
    yield Route("GET", f"{ROOT}/whoami", review.whoami, "Read the caller's identity.", "get", answer=review.WhoAmI)
    authorization, authentication = "/apis/authorization.k8s.io/v1", "/apis/authentication.k8s.io/v1"
    reviews = (
        (
            f"{authorization}/selfsubjectaccessreviews",
            review.access_review,
            "Check whether the caller may do something.",
        ),
        (f"{authorization}/selfsubjectrulesreviews", review.rules_review, "List everything that the caller may do."),
        (
            f"{authentication}/selfsubjectreviews",
            review.subject_review,
            "Read the caller's identity, in the form of Kubernetes.",
        ),
    )
    for path, handler, summary in reviews:
        yield Route(
            "POST", path, handler, summary, "create", path.rpartition("/")[2], body_media=(JSON, PROTOBUF), status=201,
            refusals=(400, 413, 415),
        )  # fmt: skip


def _system_routes() -> Iterator[Route]:
    text = ("text/plain",)
    yield Route("GET", "/", system.api_paths, "List the paths.", public=True, free=True)
    yield Route(
        "GET", "/healthz", system.healthz, "Liveness of the process.", public=True, free=True, answer_media=text
    )
    yield Route("GET", "/livez", system.healthz, "Liveness of the process.", public=True, free=True, answer_media=text)
    yield Route("GET", "/readyz", system.readyz, "Readiness: requests can be served.", public=True, free=True,
                answer_media=text, refusals=(503,))  # fmt: skip
    yield Route(
        "GET",
        "/metrics",
        system.show_metrics,
        "Metrics in the Prometheus text format.",
        public=True,
        free=True,
        answer_media=text,
    )
    yield Route(
        "GET", "/.well-known/jwks.json", jwks.show, "The public keys that verify grants to nodes.", public=True,
        free=True, answer=jwks.KeySet, refusals=(503,),
    )  # fmt: skip
    yield Route(
        "POST", f"{ROOT}/ledger/keys", jwks.rotate, "Rotate the key that signs grants to nodes.",
        "create", "ledger", "keys", body=jwks.RotateKey, answer=jwks.RotatedKey, status=201, refusals=(422,),
    )  # fmt: skip
    yield Route(
        "GET", "/hello", system.hello, "A minimal response, as a baseline for benchmarks.", public=True, free=True
    )
