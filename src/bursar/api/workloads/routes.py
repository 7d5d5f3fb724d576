"""Routes of allocations and jobs beside those of every kind, and of the pods as which Kubernetes clients see them."""

from __future__ import annotations

from collections.abc import Iterator

from bursar.api.http.body import BYTES, YAML
from bursar.api.http.params import DRY_RUN, ROOT, SELECTORS, VALIDATION, base_path
from bursar.api.http.route import JSON, Param, Route
from bursar.api.workloads import allocation, explain, explanation, job, log, pod, preemption, stdin
from bursar.wire.kinds.allocation import ALLOCATION
from bursar.wire.kinds.job import JOB


def workload_routes() -> Iterator[Route]:
    yield Route(
        "POST", f"{base_path(ALLOCATION)}/bulk-release", allocation.bulk_release,
        "Release all allocations that match.", "deletecollection", ALLOCATION.plural,
        kind=ALLOCATION, params=(DRY_RUN,), body=allocation.BulkRelease,
        answer=allocation.Released,
    )  # fmt: skip
    yield Route(
        "POST", f"{ROOT}/namespaces/{{namespace}}/preemptions", preemption.create,
        "Stop an allocation and requeue it.", "preempt", "preemptions", kind=ALLOCATION, params=(DRY_RUN,),
        body=preemption.NewPreemption, answer=preemption.Preemption, status=201, refusals=(409, 422),
    )  # fmt: skip
    yield from _job_routes()
    yield from _asking_routes()
    yield from _pod_routes()


def _job_routes() -> Iterator[Route]:
    item = f"{base_path(JOB)}/{{name}}"
    yield Route(
        "GET", f"{item}/status", job.get_status, "Get the status of a job and its allocations.", "get", JOB.plural,
        "status", kind=JOB, answer=JOB.type,
    )  # fmt: skip
    yield Route(
        "POST", f"{item}/cancel", job.cancel, "Cancel a job and its allocations.", "cancel", JOB.plural, kind=JOB,
        params=(DRY_RUN,), body=job.CancelJob, answer=job.Cancelled, refusals=(409,),
    )  # fmt: skip
    yield Route(
        "POST", f"{item}/boost", job.boost, "Change the priority of a job for a limited time.", "boost", JOB.plural,
        kind=JOB, params=(DRY_RUN,), body=job.BoostJob, answer=job.Boosted, refusals=(409,),
    )  # fmt: skip


def _asking_routes() -> Iterator[Route]:
    """Queries to the scheduler, and the log and standard input of allocations."""
    yield Route(
        "GET", f"{base_path(ALLOCATION)}/{{name}}/explain", explain.explain, "Explain why an allocation is pending.",
        "explain", ALLOCATION.plural, kind=ALLOCATION, answer=explanation.Explanation, refusals=(503,),
    )  # fmt: skip
    yield Route(
        "GET", f"{base_path(ALLOCATION)}/{{name}}/log", log.read_log, "Read the output of an allocation.", "get",
        ALLOCATION.plural, "log", kind=ALLOCATION, params=log.PARAMS, answer_media=("text/plain",),
        refusals=(409, 410, 503),
    )  # fmt: skip
    yield Route(
        "PUT", f"{base_path(ALLOCATION)}/{{name}}/stdin", stdin.send, "Send the standard input of its command.",
        "update", ALLOCATION.plural, "stdin", kind=ALLOCATION, params=(DRY_RUN,), body_media=(BYTES,),
        answer=stdin.Sent, refusals=(409, 413),
    )  # fmt: skip
    yield Route(
        "GET", f"{base_path(JOB)}/{{name}}/explain", explain.explain_job, "Explain why a job is pending.", "explain",
        JOB.plural, kind=JOB, answer=explanation.Explanation, refusals=(503,),
    )  # fmt: skip
    yield Route(
        "POST", f"{base_path(ALLOCATION)}/simulate", explain.simulate,
        "Simulate an allocation or a job, or several as `items`; nothing is created.", "simulate",
        ALLOCATION.plural,
        kind=ALLOCATION, params=(VALIDATION,), body=ALLOCATION.type, body_media=(JSON, YAML[0]),
        answer=explanation.Simulation, refusals=(403, 422, 503),
    )  # fmt: skip


def _pod_routes() -> Iterator[Route]:
    for path in (f"{ROOT}/pods", f"{ROOT}/namespaces/{{namespace}}/pods"):
        yield Route("GET", path, pod.list_pods, "List allocations in the form of Kubernetes pods.", "list", "pods",
                    params=(*SELECTORS, Param("limit", "Accepted for compatibility.", "integer")),
                    refusals=(405,))  # fmt: skip
    one_pod = f"{ROOT}/namespaces/{{namespace}}/pods/{{name}}"
    yield Route("GET", one_pod, pod.get_pod, "Read an allocation in the form of a Kubernetes pod.", "get", "pods")
    yield Route(
        "GET", f"{one_pod}/log", log.read_pod_log, "Read the output of an allocation, for kubectl logs.",
        "get", "pods", "log", params=log.POD_PARAMS, answer_media=("text/plain",), refusals=(409, 410, 503),
    )  # fmt: skip
    # Older kubectl evicts only if the policy group exists; there are no disruption budgets.
    policy = "/apis/policy/v1"
    for path in (f"{policy}/poddisruptionbudgets", f"{policy}/namespaces/{{namespace}}/poddisruptionbudgets"):
        yield Route("GET", path, pod.list_budgets, "List disruption budgets: there are none.", "list",
                    params=(*SELECTORS, Param("limit", "Accepted for compatibility.", "integer")))  # fmt: skip
