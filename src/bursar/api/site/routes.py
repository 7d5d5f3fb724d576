"""The one route table. The server serves it, discovery announces it, OpenAPI documents it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from bursar.api.access import review, token
from bursar.api.http.body import BYTES, PROTOBUF, YAML
from bursar.api.http.route import JSON, Handler, Param, Route
from bursar.api.nodes import certificate, claim, cluster, drain, eviction, fence, jwks, node
from bursar.api.objects import delete, edit, event
from bursar.api.objects import object as objects
from bursar.api.objects.watch import SSE
from bursar.api.objects.webhook import webhook_routes
from bursar.api.quota import tenant
from bursar.api.site import discovery, docs, openapi, openapi_v2, system
from bursar.api.site.credit_routes import credit_routes
from bursar.api.usage.tenant_usage import usage_routes
from bursar.api.workloads import allocation, explain, explanation, job, log, pod, preemption, stdin
from bursar.wire.kinds.registry import KINDS
from bursar.wire.shared.kind import Kind

ROOT = "/api/v1"

DRY_RUN = Param("dryRun", "All: check and answer as if, and change nothing.")
VALIDATION = Param("fieldValidation", "What unknown fields are: Strict (refused, the default), Warn or Ignore.")
MANAGER = Param("fieldManager", "Accepted for compatibility.")
PRETTY = Param("pretty", "Accepted for compatibility.")
SELECTORS = (
    Param("labelSelector", "As in app=web,tier in (a,b),!old."),
    Param("fieldSelector", "As in status.phase=Running."),
)
LISTING = (
    *SELECTORS,
    Param("limit", "At most so many items; the rest follows with continue.", "integer"),
    Param("continue", "From the metadata of the page before."),
    Param("watch", "true: stream changes instead of listing.", "boolean"),
    Param("resourceVersion", "Watch from this revision on."),
    Param("resourceVersionMatch", "Accepted for compatibility."),
    Param("allowWatchBookmarks", "true: send bookmarks.", "boolean"),
    Param("sendInitialEvents", "true: begin the watch with what there is.", "boolean"),
    Param("timeoutSeconds", "End the watch after so long.", "integer"),
    Param("includeObject", "In tables: None, Metadata or Object."),
)
DELETING = (
    Param("gracePeriodSeconds", "How long what runs may take to stop.", "integer"),
    Param("propagationPolicy", "Orphan: what the object has made stays."),
    DRY_RUN,
)
BODIES = (JSON, YAML[0], PROTOBUF)
QUOTA = (403, 409, 422)

# Where a kind has a handler of its own.
CREATE: dict[str, Handler] = {"Node": node.register}
REPLACE: dict[str, Handler] = {"Tenant": tenant.put_tenant}
WRITE_STATUS: dict[str, Handler] = {"Allocation": allocation.report_status, "Node": node.patch_status}
WITH_STATUS = frozenset({"Allocation", "Node", "ResourceQuota", "Namespace", "Tenant"})


def build_routes(release: str) -> list[Route]:
    """Everything that is served, with the documents that describe it."""
    routes = [
        *_kind_routes(),
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
    for path, body in openapi.documents(described, release=release).items():
        media = openapi_v2.MEDIA_TYPE if path == "/openapi/v2" else JSON
        routes.append(Route("GET", path, system.fixed(body, media), "OpenAPI.", public=True, free=True))
    page = docs.page(openapi.document(described, release=release))
    policy = {"Content-Security-Policy": docs.CONTENT_SECURITY_POLICY}
    routes.append(
        Route(
            "GET", "/docs", system.fixed(page, "text/html; charset=utf-8", policy), "This page.", public=True, free=True
        )
    )
    return routes


def _kind_routes() -> Iterator[Route]:
    for kind in KINDS:
        yield from _collection_routes(kind)
        yield from _item_routes(kind)
        if kind.name in WITH_STATUS:
            yield from _status_routes(kind)


def _base(kind: Kind) -> str:
    return f"{ROOT}/namespaces/{{namespace}}/{kind.plural}" if kind.namespaced else f"{ROOT}/{kind.plural}"


def _collection_routes(kind: Kind) -> Iterator[Route]:
    base, plural = _base(kind), kind.plural
    listing = Route(
        "GET", base, objects.list_or_watch, f"List or watch {plural}.", "list", plural, kind=kind, params=LISTING,
        answer=kind.type, answer_media=(JSON, SSE), is_list=True, refusals=(410,),
    )  # fmt: skip
    yield listing
    if kind.namespaced:
        path = f"{ROOT}/{plural}"
        yield replace(listing, path=path, summary=f"List or watch {plural} across namespaces.")
    yield Route(
        "POST", base, CREATE.get(kind.name, objects.create), f"Create {_a(kind)}.", "create", plural, kind=kind,
        params=(DRY_RUN, VALIDATION, MANAGER, PRETTY), body=kind.type, body_media=BODIES, answer=kind.type, status=201,
        refusals=QUOTA,
    )  # fmt: skip
    yield Route(
        "DELETE", base, delete.delete_collection, f"Delete all {plural} that match.", "deletecollection", plural,
        kind=kind, params=(*SELECTORS, *DELETING), body=delete.DeleteOptions, answer=kind.type, is_list=True,
        refusals=(409,),
    )  # fmt: skip


def _item_routes(kind: Kind) -> Iterator[Route]:
    path, plural, a = f"{_base(kind)}/{{name}}", kind.plural, _a(kind)
    writing = (DRY_RUN, VALIDATION, MANAGER, PRETTY)
    yield Route("GET", path, objects.get, f"Read {a}.", "get", plural, kind=kind, params=(PRETTY,), answer=kind.type)
    yield Route(
        "PUT", path, REPLACE.get(kind.name, edit.replace_object), f"Replace {a}.", "update", plural, kind=kind,
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


def _status_routes(kind: Kind) -> Iterator[Route]:
    path, plural = f"{_base(kind)}/{{name}}/status", kind.plural
    writing = (DRY_RUN, VALIDATION, MANAGER, PRETTY)
    common = {"resource": plural, "subresource": "status", "kind": kind, "answer": kind.type}
    yield Route("GET", path, objects.get, f"Read the status of {_a(kind)}.", "get", **common)  # type: ignore[arg-type]
    yield Route(
        "PUT", path, WRITE_STATUS.get(kind.name, edit.replace_object), f"Replace the status of {_a(kind)}.",
        "update", params=writing, body=kind.type, body_media=BODIES, refusals=QUOTA, **common,  # type: ignore[arg-type]
    )  # fmt: skip
    yield Route(
        "PATCH", path, WRITE_STATUS.get(kind.name, edit.patch_object), f"Change the status of {_a(kind)}.", "patch",
        params=writing, body=kind.type, body_media=edit.PATCHES, refusals=QUOTA, **common,  # type: ignore[arg-type]
    )  # fmt: skip


def _a(kind: Kind) -> str:
    return f"{'an' if kind.name[0] in 'AEIOU' else 'a'} {kind.singular}"


def _other_routes() -> Iterator[Route]:
    allocations = next(kind for kind in KINDS if kind.name == "Allocation")
    tenants = next(kind for kind in KINDS if kind.name == "Tenant")
    yield Route(
        "POST", f"{_base(allocations)}/bulk-release", allocation.bulk_release, "Release all allocations that match.",
        "deletecollection", "allocations", kind=allocations, params=(DRY_RUN,), body=allocation.BulkRelease,
        answer=allocation.Released,
    )  # fmt: skip
    yield Route(
        "GET", f"{ROOT}/tenants/{{name}}/quotas", tenant.get_quotas, "Limits, where they come from, and usage.", "get",
        "tenants", "quotas", kind=tenants, answer=tenant.TenantQuotas,
    )  # fmt: skip
    for path in (f"{ROOT}/events", f"{ROOT}/namespaces/{{namespace}}/events"):
        yield Route("GET", path, event.list_events, "What happened, from the change feed.", "list", "events",
                    params=(Param("fieldSelector", "As in involvedObject.name=job-1."),
                            Param("limit", "Accepted for compatibility.", "integer")))  # fmt: skip
    for path in (f"{ROOT}/pods", f"{ROOT}/namespaces/{{namespace}}/pods"):
        yield Route("GET", path, pod.list_pods, "Allocations, as Kubernetes would show them.", "list", "pods",
                    params=(*SELECTORS, Param("limit", "Accepted for compatibility.", "integer")),
                    refusals=(405,))  # fmt: skip
    yield from _stopping_routes()
    yield from _job_routes()
    yield from _asking_routes()
    yield Route("POST", f"{ROOT}/tokens", token.create, "Make a token; its secret is in this answer only.", "create",
                "tokens", body=token.NewToken, answer=token.Token, status=201, refusals=(403, 404))  # fmt: skip
    yield Route("GET", f"{ROOT}/tokens", token.list_tokens, "List tokens, without their secrets.", "list", "tokens")
    yield Route(
        "DELETE", f"{ROOT}/tokens/{{name}}", token.revoke, "Revoke a token.", "delete", "tokens", answer=token.Token
    )
    yield Route("GET", f"{ROOT}/whoami", review.whoami, "Who you are.", "get", answer=review.WhoAmI)
    yield Route(
        "GET", f"{ROOT}/authority", certificate.show_authority, "Who signs the certificates of nodes.", "get",
        answer=certificate.AuthorityAnswer,
    )  # fmt: skip
    authorization, authentication = "/apis/authorization.k8s.io/v1", "/apis/authentication.k8s.io/v1"
    reviews = (
        (f"{authorization}/selfsubjectaccessreviews", review.access_review, "Whether you may do something."),
        (f"{authorization}/selfsubjectrulesreviews", review.rules_review, "Everything you may do."),
        (f"{authentication}/selfsubjectreviews", review.subject_review, "Who you are, as Kubernetes tells it."),
    )
    for path, handler, summary in reviews:
        yield Route(
            "POST", path, handler, summary, "create", path.rpartition("/")[2], body_media=(JSON, PROTOBUF), status=201,
            refusals=(400, 413, 415),
        )  # fmt: skip


def _job_routes() -> Iterator[Route]:
    jobs = next(kind for kind in KINDS if kind.name == "Job")
    item = f"{_base(jobs)}/{{name}}"
    yield Route(
        "GET", f"{item}/status", job.get_status, "How a job and its allocations do.", "get", "jobs", "status",
        kind=jobs, answer=jobs.type,
    )  # fmt: skip
    yield Route(
        "POST", f"{item}/cancel", job.cancel, "Stop a job and all that it runs.", "cancel", "jobs", kind=jobs,
        params=(DRY_RUN,), body=job.CancelJob, answer=job.Cancelled, refusals=(409,),
    )  # fmt: skip
    yield Route(
        "POST", f"{item}/boost", job.boost, "Give a job another priority for a while.", "boost", "jobs", kind=jobs,
        params=(DRY_RUN,), body=job.BoostJob, answer=job.Boosted, refusals=(409,),
    )  # fmt: skip


def _asking_routes() -> Iterator[Route]:
    """What the scheduler is asked: why, what if, and how it stands."""
    allocations = next(kind for kind in KINDS if kind.name == "Allocation")
    jobs = next(kind for kind in KINDS if kind.name == "Job")
    yield Route(
        "GET", f"{_base(allocations)}/{{name}}/explain", explain.explain, "Why an allocation waits.", "explain",
        "allocations", kind=allocations, answer=explanation.Explanation, refusals=(503,),
    )  # fmt: skip
    yield Route(
        "GET", f"{_base(allocations)}/{{name}}/log", log.read_log, "What an allocation has written.", "get",
        "allocations", "log", kind=allocations, params=log.PARAMS, answer_media=("text/plain",),
        refusals=(409, 410, 503),
    )  # fmt: skip
    yield Route(
        "PUT", f"{_base(allocations)}/{{name}}/stdin", stdin.send, "Send what its command reads.", "update",
        "allocations", "stdin", kind=allocations, params=(DRY_RUN,), body_media=(BYTES,), answer=stdin.Sent,
        refusals=(409, 413),
    )  # fmt: skip
    yield Route(
        "GET", f"{_base(jobs)}/{{name}}/explain", explain.explain_job, "Why a job waits.", "explain", "jobs", kind=jobs,
        answer=explanation.Explanation, refusals=(503,),
    )  # fmt: skip
    yield Route(
        "POST", f"{_base(allocations)}/simulate", explain.simulate,
        "What would become of an allocation or a job, or of several as `items`; nothing is created.", "simulate",
        "allocations",
        kind=allocations, params=(VALIDATION,), body=allocations.type, body_media=(JSON, YAML[0]),
        answer=explanation.Simulation, refusals=(403, 422, 503),
    )  # fmt: skip
    yield Route(
        "GET", f"{ROOT}/metrics/queues", cluster.queues, "How the queues stand.", "get", "metrics",
        answer=cluster.QueueStates, refusals=(503,),
    )  # fmt: skip
    yield Route(
        "GET", f"{ROOT}/metrics/cluster/utilization", cluster.utilization, "How full the cluster is.", "get", "metrics",
        answer=cluster.Utilization,
    )  # fmt: skip


def _claim_routes(nodes: Kind) -> Iterator[Route]:
    """Nodes for sensitive work."""
    item = f"{_base(nodes)}/{{name}}"
    for path, handler, summary, verb, body in (
        ("claim", claim.start, "Claim a node for sensitive work.", "claim", claim.ClaimOrder),
        ("release", claim.end, "Give a claimed node back, to be wiped.", "release", claim.ReleaseOrder),
        ("wipe", claim.wipe, "Have a node that was given back wiped again.", "wipe", claim.ReleaseOrder),
        ("wiped", claim.confirm, "Say that a node that was given back is wiped.", "wipe", claim.ReleaseOrder),
    ):
        yield Route(
            "POST", f"{item}/{path}", handler, summary, verb, "nodes", kind=nodes, params=(DRY_RUN,), body=body,
            answer=nodes.type, refusals=(409, 422),
        )  # fmt: skip
    yield Route(
        "GET", f"{ROOT}/claims", claim.list_claims, "Whose nodes are claimed, and how many may be.", "list", "claims",
        answer=claim.ClaimList,
    )  # fmt: skip


def _stopping_routes() -> Iterator[Route]:
    """Stopping work so that it waits again."""
    allocations = next(kind for kind in KINDS if kind.name == "Allocation")
    nodes = next(kind for kind in KINDS if kind.name == "Node")
    yield Route(
        "POST", f"{ROOT}/namespaces/{{namespace}}/preemptions", preemption.create,
        "Stop an allocation so that it waits again.", "preempt", "preemptions", kind=allocations, params=(DRY_RUN,),
        body=preemption.NewPreemption, answer=preemption.Preemption, status=201, refusals=(409, 422),
    )  # fmt: skip
    item = f"{_base(nodes)}/{{name}}"
    yield Route(
        "POST", f"{item}/drain", drain.start, "Empty a node: cordon it, and evict what is placed there.", "drain",
        "nodes", kind=nodes, params=(DRY_RUN,), body=drain.DrainNode, answer=drain.DrainStatus, refusals=(409, 422),
    )  # fmt: skip
    yield Route(
        "GET", f"{item}/drain", drain.show, "How far a node's drain has come.", "get", "nodes", "drain", kind=nodes,
        answer=drain.DrainStatus,
    )  # fmt: skip
    yield Route(
        "POST", f"{item}/fence", fence.start, "Say that nothing of a silent node runs any more, and end its work.",
        "fence", "nodes", kind=nodes, params=(DRY_RUN,), body=fence.FenceNode, answer=fence.FenceStatus,
        refusals=(409, 422),
    )  # fmt: skip
    yield Route(
        "DELETE", f"{item}/fence", fence.end, "Take a fence back.", "fence", "nodes", kind=nodes, params=(DRY_RUN,),
        answer=nodes.type, refusals=(409,),
    )  # fmt: skip
    yield from _claim_routes(nodes)
    yield Route(
        "GET", f"{item}/evictions", eviction.list_or_watch, "What must end on a node, and by when.", "list", "nodes",
        "evictions", kind=nodes, answer=eviction.EvictionList, answer_media=(JSON, SSE),
        params=(Param("watch", "true: stream notices as they are given.", "boolean"),
                Param("timeoutSeconds", "End the watch after so long.", "integer")),
    )  # fmt: skip
    yield Route(
        "POST", f"{item}/certificates", certificate.certify, "Certify a node's key; the node joins if it is new.",
        "create", "certificates", kind=nodes, params=(VALIDATION,), body=certificate.CertificateOrder,
        answer=certificate.Certificate, status=201, refusals=(404, 503),
    )  # fmt: skip
    one_pod = f"{ROOT}/namespaces/{{namespace}}/pods/{{name}}"
    yield Route("GET", one_pod, pod.get_pod, "An allocation, as Kubernetes would show it.", "get", "pods")
    yield Route(
        "GET", f"{one_pod}/log", log.read_pod_log, "What an allocation has written, as kubectl logs asks for it.",
        "get", "pods", "log", params=log.POD_PARAMS, answer_media=("text/plain",), refusals=(409, 410, 503),
    )  # fmt: skip
    yield Route(
        "POST", f"{one_pod}/eviction", eviction.evict_pod, "Stop an allocation, as kubectl drain asks for it.",
        "create", "pods", "eviction", params=(DRY_RUN, MANAGER, VALIDATION), body=eviction.Eviction,
        body_media=(JSON, PROTOBUF), status=201, refusals=(409,),
    )  # fmt: skip
    # Older kubectl evicts only where the policy group is; nothing here is bound by budgets.
    policy = "/apis/policy/v1"
    for path in (f"{policy}/poddisruptionbudgets", f"{policy}/namespaces/{{namespace}}/poddisruptionbudgets"):
        yield Route("GET", path, pod.list_budgets, "Disruption budgets, of which there are none.", "list",
                    params=(*SELECTORS, Param("limit", "Accepted for compatibility.", "integer")))  # fmt: skip


def _system_routes() -> Iterator[Route]:
    text = ("text/plain",)
    yield Route("GET", "/", system.api_paths, "What there is.", public=True, free=True)
    yield Route("GET", "/healthz", system.healthz, "The process lives.", public=True, free=True, answer_media=text)
    yield Route("GET", "/livez", system.healthz, "The process lives.", public=True, free=True, answer_media=text)
    yield Route("GET", "/readyz", system.readyz, "Requests can be served.", public=True, free=True, answer_media=text,
                refusals=(503,))  # fmt: skip
    yield Route("GET", "/metrics", system.show_metrics, "For Prometheus.", public=True, free=True, answer_media=text)
    yield Route(
        "GET", "/.well-known/jwks.json", jwks.show, "The keys that sign what is granted to nodes.", public=True,
        free=True, answer=jwks.KeySet, refusals=(503,),
    )  # fmt: skip
    yield Route(
        "POST", f"{ROOT}/ledger/keys", jwks.rotate, "Make the key that signs what is granted to nodes from now on.",
        "create", "ledger", "keys", body=jwks.RotateKey, answer=jwks.RotatedKey, status=201, refusals=(422,),
    )  # fmt: skip
    yield Route("GET", "/hello", system.hello, "A bare answer, for comparison.", public=True, free=True)
