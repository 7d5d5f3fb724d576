"""Routes of nodes beside those of every kind: claims, drains, fences, certificates, and the utilization of the
cluster."""

from __future__ import annotations

from collections.abc import Iterator

from bursar.api.http.body import PROTOBUF
from bursar.api.http.params import DRY_RUN, MANAGER, ROOT, VALIDATION, base_path
from bursar.api.http.route import JSON, Param, Route
from bursar.api.nodes import certificate, claim, cluster, drain, eviction, fence
from bursar.api.objects.watch import SSE
from bursar.wire.kinds.node import NODE


def node_routes() -> Iterator[Route]:
    item = f"{base_path(NODE)}/{{name}}"
    yield Route(
        "POST", f"{item}/drain", drain.start, "Drain a node: cordon it, and evict its allocations.", "drain",
        NODE.plural, kind=NODE, params=(DRY_RUN,), body=drain.DrainNode, answer=drain.DrainStatus, refusals=(409, 422),
    )  # fmt: skip
    yield Route(
        "GET", f"{item}/drain", drain.show, "Get the progress of a drain.", "get", NODE.plural, "drain", kind=NODE,
        answer=drain.DrainStatus,
    )  # fmt: skip
    yield Route(
        "POST", f"{item}/fence", fence.start, "Fence a silent node: confirm that nothing runs on it, and end its work.",
        "fence", NODE.plural, kind=NODE, params=(DRY_RUN,), body=fence.FenceNode, answer=fence.FenceStatus,
        refusals=(409, 422),
    )  # fmt: skip
    yield Route(
        "DELETE", f"{item}/fence", fence.end, "Remove a fence.", "fence", NODE.plural, kind=NODE, params=(DRY_RUN,),
        answer=NODE.type, refusals=(409,),
    )  # fmt: skip
    yield from _claim_routes()
    yield Route(
        "GET", f"{item}/evictions", eviction.list_or_watch, "List the evictions on a node, with deadlines.", "list",
        NODE.plural, "evictions", kind=NODE, answer=eviction.EvictionList, answer_media=(JSON, SSE),
        params=(Param("watch", "true: stream new notices.", "boolean"),
                Param("timeoutSeconds", "End the watch after this many seconds.", "integer")),
    )  # fmt: skip
    yield Route(
        "POST", f"{item}/certificates", certificate.certify, "Certify a node's key; the node joins if it is new.",
        "create", "certificates", kind=NODE, params=(VALIDATION,), body=certificate.CertificateOrder,
        answer=certificate.Certificate, status=201, refusals=(404, 503),
    )  # fmt: skip
    yield Route(
        "POST", f"{ROOT}/namespaces/{{namespace}}/pods/{{name}}/eviction", eviction.evict_pod,
        "Evict an allocation, in the form of kubectl drain.",
        "create", "pods", "eviction", params=(DRY_RUN, MANAGER, VALIDATION), body=eviction.Eviction,
        body_media=(JSON, PROTOBUF), status=201, refusals=(409,),
    )  # fmt: skip
    yield Route(
        "GET", f"{ROOT}/authority", certificate.show_authority, "Get the certificate authority of nodes.", "get",
        answer=certificate.AuthorityAnswer,
    )  # fmt: skip
    yield Route(
        "GET", f"{ROOT}/metrics/queues", cluster.queues, "Get the metrics of queues.", "get", "metrics",
        answer=cluster.QueueStates, refusals=(503,),
    )  # fmt: skip
    yield Route(
        "GET", f"{ROOT}/metrics/cluster/utilization", cluster.utilization, "Get the utilization of the cluster.", "get",
        "metrics", answer=cluster.Utilization,
    )  # fmt: skip


def _claim_routes() -> Iterator[Route]:
    """Routes of nodes for sensitive work."""
    item = f"{base_path(NODE)}/{{name}}"
    for path, handler, summary, verb, body in (
        ("claim", claim.start, "Claim a node for sensitive work.", "claim", claim.ClaimOrder),
        ("release", claim.end, "Release a claimed node, which is then wiped.", "release", claim.ReleaseOrder),
        ("wipe", claim.wipe, "Retry the wipe of a released node.", "wipe", claim.ReleaseOrder),
        ("wiped", claim.confirm, "Confirm that a released node is wiped.", "wipe", claim.ReleaseOrder),
    ):
        yield Route(
            "POST", f"{item}/{path}", handler, summary, verb, NODE.plural, kind=NODE, params=(DRY_RUN,), body=body,
            answer=NODE.type, refusals=(409, 422),
        )  # fmt: skip
    yield Route(
        "GET", f"{ROOT}/claims", claim.list_claims, "List node claims and the limits of the pool.", "list", "claims",
        answer=claim.ClaimList,
    )  # fmt: skip
