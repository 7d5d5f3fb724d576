"""Jobs through the API: submitted, watched, cancelled, boosted and deleted, by each role."""

from typing import Any

import pytest

from bursar.core.objects.object import Key
from bursar.ops.workloads.job_controller import step
from bursar.store.objects.change import load_happenings_of
from support.api.site import TABLE, Document, Site
from support.runtime.runtime import bind

pytestmark = pytest.mark.asyncio(loop_scope="module")

GPU = "nvidia.com/gpu"
BOOST = {
    "newPriority": 500,
    "reason": "Production incident requires immediate training",
    "duration": "3600s",
    "approvedBy": "admin@example.com",
}


def job(name: str = "train", template: Document | None = None, gpu: int = 1, **spec: Any) -> Document:
    body = {"resources": {"requests": {GPU: str(gpu)}}, **(template or {})}
    return {"metadata": {"name": name}, "spec": {"template": {"spec": body}, **spec}}


async def running(site: Site, where: str, *names: str) -> None:
    """A node of their own for these, and the report that they run."""
    node = site.name("node")
    capacity = {GPU: "8", "cpu": "64"}
    assert (await site.post("nodes", {"metadata": {"name": node}, "spec": {"capacity": capacity}})).status == 201
    for name in names:
        await bind(site.context.runtime, where, name, node)
        await report(site, where, name, "Running")


async def report(site: Site, where: str, name: str, phase: str) -> None:
    reply = await site.patch(f"namespaces/{where}/allocations/{name}/status", {"status": {"phase": phase}})
    assert reply.status == 200, reply


async def stepped(site: Site, where: str, name: str = "train") -> Document:
    await step(site.context.runtime, Key("Job", where, name))
    return dict((await site.get(f"namespaces/{where}/jobs/{name}/status")).body["status"])


async def test_the_documented_example_is_accepted_as_it_is(site: Site) -> None:
    where = await site.namespace()
    body = {
        "metadata": {"name": "distributed-training-v2", "namespace": where},
        "spec": {
            "parallelism": 8,
            "completions": 8,
            "backoffLimit": 3,
            "activeDeadlineSeconds": 86400,
            "template": {
                "spec": {
                    "resources": {
                        "requests": {"cpu": "16000m", "memory": "64Gi", GPU: "8"},
                        "limits": {"cpu": "32000m", "memory": "128Gi", GPU: "8"},
                    },
                    "scheduling": {
                        "gangScheduling": {"minMembers": 8, "timeout": "600s"},
                        "nodeSelector": {"gpu-type": "nvidia-a100"},
                        "topologySpreadConstraints": [
                            {"maxSkew": 1, "topologyKey": "rack", "whenUnsatisfiable": "DoNotSchedule"}
                        ],
                    },
                }
            },
            "priority": 200,
            "priorityClass": "batch-high",
            "queue": "gpu-training",
        },
    }
    made = await site.post(f"namespaces/{where}/jobs", body)
    assert made.status == 201
    assert made.body["metadata"]["uid"].startswith("job-")
    assert made.body["spec"] == body["spec"], "the spec is echoed as given"
    assert made.body["status"]["phase"] == "Queued"
    (condition,) = made.body["status"]["conditions"]
    assert condition.pop("lastTransitionTime")
    assert condition == {"type": "Queued", "status": "True", "reason": "WaitingForResources"}
    shown = (await site.get(f"namespaces/{where}/jobs/distributed-training-v2/status")).body
    assert shown["status"]["active"] == 8
    assert shown["status"]["allocations"][7] == {
        "name": "distributed-training-v2-7", "node": "", "phase": "Pending",
    }  # fmt: skip
    one = (await site.get(f"namespaces/{where}/allocations/distributed-training-v2-0")).body
    assert one["spec"]["scheduling"]["gangScheduling"] == {
        "groupId": "distributed-training-v2", "minMembers": 8, "timeout": "600s",
    }  # fmt: skip
    listed = await site.get(f"namespaces/{where}/allocations", labelSelector="bursar.io/job=distributed-training-v2")
    assert len(listed.names) == 8


async def test_without_capacity_it_is_403_with_numbers_and_nothing_is_stored(site: Site) -> None:
    where = await site.namespace()
    hard = {GPU: "4"}
    await site.post(f"namespaces/{where}/resourcequotas", {"metadata": {"name": "small"}, "spec": {"hard": hard}})
    # Counters of what was asked for are there from then on; the first one who asks makes them.
    assert (await site.post(f"namespaces/{where}/jobs", job(gpu=5))).status == 403
    before = await site.state()
    refused = await site.post(f"namespaces/{where}/jobs", job(gpu=2, parallelism=3))
    assert refused.status == 403
    assert refused.message == "exceeded quota: nvidia.com/gpu limit 4, requested 6, used 0"
    assert refused.body["details"]["causes"][0]["requested_delta"] == "6"
    assert await site.state() == before
    assert (await site.post(f"namespaces/{where}/jobs", job(gpu=2, parallelism=2, completions=8))).status == 201


async def test_a_dry_run_makes_nothing(site: Site) -> None:
    where = await site.namespace()
    before = await site.state()
    assert (await site.post(f"namespaces/{where}/jobs", job(parallelism=3), dryRun="All")).status == 201
    assert await site.state() == before


async def test_a_repeated_submission_makes_one_job(site: Site) -> None:
    where = await site.namespace()
    body = {**job(parallelism=2), "request_id": "submit-1"}
    first = await site.post(f"namespaces/{where}/jobs", body)
    again = await site.post(f"namespaces/{where}/jobs", body)
    assert (first.status, again.status) == (201, 201)
    assert again.body == first.body
    other = await site.post(f"namespaces/{where}/jobs", {**job("else"), "request_id": "submit-1"})
    assert other.status == 422
    assert (await site.get(f"namespaces/{where}/allocations")).names == ["train-0", "train-1"]


async def test_names_that_are_taken_are_409(site: Site) -> None:
    where = await site.namespace()
    await site.post(f"namespaces/{where}/jobs", job())
    assert (await site.post(f"namespaces/{where}/jobs", job())).status == 409
    await site.post(
        f"namespaces/{where}/allocations", {"metadata": {"name": "two-1"}, "spec": {"resources": {"requests": {}}}}
    )
    taken = await site.post(f"namespaces/{where}/jobs", job("two", parallelism=2))
    assert (taken.status, taken.message) == (409, 'allocations "two-1" already exists')


async def test_every_fault_is_listed(site: Site) -> None:
    where = await site.namespace()
    template = {
        "metadata": {"labels": {"bad label": "x"}, "annotations": {"scheduler.example.com/gang-size": "none"}},
        "spec": {"resources": {"requests": {"cpu": "lots"}}, "ttl": "soon", "preemptionPolicy": "Always"},
    }
    spec = {
        "parallelism": 10_001, "completions": 0, "backoffLimit": -1, "activeDeadlineSeconds": 0,
        "priority": 10**12, "template": template,
    }  # fmt: skip
    before = await site.state()
    refused = await site.post(f"namespaces/{where}/jobs", {"metadata": {"name": "x" * 64}, "spec": spec})
    assert refused.status == 400
    fields = [one["field"] for one in refused.body["details"]["causes"]]
    assert fields == [
        "metadata.name",
        "spec.parallelism",
        "spec.completions",
        "spec.backoffLimit",
        "spec.activeDeadlineSeconds",
        "spec.priority",
        "spec.template.spec.resources.requests[cpu]",
        "spec.template.spec.preemptionPolicy",
        "spec.template.spec.ttl",
        "spec.template.metadata.labels",
        "spec.template.metadata.annotations[scheduler.example.com/gang-size]",
    ]
    assert await site.state() == before


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"metadata": {"name": "a"}, "spec": {}}, "spec.template"),
        ({"metadata": {"name": "a"}}, "spec"),
        (job(suspend=True), "spec.suspend"),
        (job(parallelism="many"), "spec.parallelism"),
        (job(template={"gpus": 1}), "spec.template.spec.gpus"),
        (
            job(parallelism=2, template={"gangScheduling": {"minMembers": 3}}),
            "spec.template.spec.gangScheduling.minMembers",
        ),
        (
            job(parallelism=4, completions=2, template={"scheduling": {"gangScheduling": {"minMembers": 4}}}),
            "spec.template.spec.scheduling.gangScheduling.minMembers",
        ),
        (job(queue="nowhere"), "spec.queue"),
        (job(template={"priorityClass": "none-such"}), "spec.template.spec.priorityClass"),
    ],
)
async def test_what_is_wrong_is_named(site: Site, body: Document, field: str) -> None:
    where = await site.namespace()
    refused = await site.post(f"namespaces/{where}/jobs", body)
    assert refused.status == 400
    assert field in [one["field"] for one in refused.body["details"]["causes"]]
    assert (await site.get(f"namespaces/{where}/allocations")).names == []


async def test_what_no_node_could_ever_give_is_422(site: Site) -> None:
    where = await site.namespace()
    await site.post("nodes", {"metadata": {"name": site.name("small")}, "spec": {"capacity": {GPU: "8"}}})
    refused = await site.post(f"namespaces/{where}/jobs", job(gpu=100))
    assert refused.status == 422
    assert refused.body["details"]["causes"][0]["field"] == f"spec.template.spec.resources.requests[{GPU}]"
    assert (await site.get(f"namespaces/{where}/jobs")).names == []


async def test_its_spec_stays_and_its_labels_may_change(site: Site) -> None:
    where = await site.namespace()
    await site.post(f"namespaces/{where}/jobs", job(parallelism=2))
    path = f"namespaces/{where}/jobs/train"
    assert (await site.patch(path, {"spec": {"parallelism": 3}})).status == 422
    labelled = await site.patch(path, {"metadata": {"labels": {"team": "ml"}}})
    assert (labelled.status, labelled.body["metadata"]["labels"]) == (200, {"team": "ml"})
    assert labelled.body["status"]["active"] == 2
    assert (await stepped(site, where))["phase"] == "Queued"
    assert (await site.get(f"namespaces/{where}/jobs", fieldSelector="status.phase=Queued")).names == ["train"]


async def test_its_table_tells_how_far_it_is(site: Site) -> None:
    where = await site.namespace()
    await site.post(f"namespaces/{where}/jobs", job(parallelism=2, completions=8, queue="gpu-training"))
    await running(site, where, "train-0", "train-1")
    await report(site, where, "train-1", "Succeeded")
    shown = await stepped(site, where)
    assert shown["phase"] == "Running"
    assert [one["phase"] for one in shown["allocations"]] == ["Running", "Succeeded", "Pending"]
    assert shown["allocations"][0]["node"].startswith("node-")
    table = (await site.get(f"namespaces/{where}/jobs", headers={"accept": TABLE})).body
    names = [one["name"] for one in table["columnDefinitions"]]
    cells = dict(zip(names, table["rows"][0]["cells"], strict=True))
    assert cells["Name"] == "train"
    assert (cells["Status"], cells["Completions"], cells["Active"], cells["Queue"]) == (
        "Running", "1/8", 2, "gpu-training",
    )  # fmt: skip


async def test_a_change_of_labels_leaves_all_that_is_known_of_it(site: Site) -> None:
    where = await site.namespace()
    await site.post(f"namespaces/{where}/jobs", job(parallelism=2, completions=3, backoffSeconds=0))
    await running(site, where, "train-0", "train-1")
    await report(site, where, "train-0", "Succeeded")
    await report(site, where, "train-1", "Failed")
    await stepped(site, where)
    await site.post(f"namespaces/{where}/jobs/train/boost", BOOST)
    before = (await site.get(f"namespaces/{where}/jobs/train")).body["status"]
    assert {"boost", "failedTries", "completedIndexes", "startTime"} <= set(before)
    changed = await site.patch(f"namespaces/{where}/jobs/train", {"metadata": {"labels": {"a": "b"}}})
    assert changed.body["status"] == before
    assert (await stepped(site, where))["active"] == 2


async def test_tables_tell_the_priority_that_is_in_force(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bursar.ops.workloads.priority.AGE_SECONDS_MAX", 0.0)
    where, high = await site.namespace(), site.name("high")
    await site.post("priorityclasses", {"metadata": {"name": high}, "value": 700})
    asked: dict[str, Document] = {"own": {"priority": 5, "priorityClass": high}, "by-class": {"priorityClass": high}}
    for name, spec in asked.items():
        await site.post(f"namespaces/{where}/jobs", job(name, template=spec))
    await site.post(f"namespaces/{where}/jobs", job())

    async def shown() -> dict[str, Any]:
        table = (await site.get(f"namespaces/{where}/allocations", headers={"accept": TABLE})).body
        at = [column["name"] for column in table["columnDefinitions"]].index("Priority")
        return {row["cells"][0]: row["cells"][at] for row in table["rows"]}

    assert await shown() == {"own-0": 5, "by-class-0": 700, "train-0": 0}
    boosted = await site.post(f"namespaces/{where}/jobs/own/boost", BOOST)
    assert boosted.status == 200, boosted
    assert await shown() == {"own-0": 500, "by-class-0": 700, "train-0": 0}
    plain = (await site.get(f"namespaces/{where}/allocations/own-0")).body
    assert "priority" not in plain["status"], "it is not stored"


# Cancelling.


async def test_cancelling_what_waits_and_what_runs(site: Site) -> None:
    where = await site.namespace()
    asked = {"reason": "Superseded by newer model version", "gracePeriodSeconds": 60}
    await site.post(f"namespaces/{where}/jobs", job("waiting", parallelism=2))
    at_once = await site.post(f"namespaces/{where}/jobs/waiting/cancel", asked)
    words = "Graceful cancellation initiated, 60s grace period"
    assert (at_once.status, at_once.body["status"]["phase"], at_once.body["status"]["message"]) == (
        200, "Cancelled", words,
    )  # fmt: skip
    await site.post(f"namespaces/{where}/jobs", job(parallelism=2))
    await running(site, where, "train-0")
    told = await site.post(f"namespaces/{where}/jobs/train/cancel", asked)
    assert told.status == 200
    assert told.body["status"] == {
        "phase": "Cancelling",
        "message": words,
        "cancellationReason": "Superseded by newer model version",
    }
    assert (await site.get(f"namespaces/{where}/allocations")).names == ["train-0"]
    await report(site, where, "train-0", "Cancelled")
    assert (await stepped(site, where))["phase"] == "Cancelled"
    again = await site.post(f"namespaces/{where}/jobs/train/cancel", {})
    assert (again.status, again.body["status"]["phase"]) == (200, "Cancelled")
    async with site.context.database.reader() as db:
        happened = await load_happenings_of(db, where, "train", "Job", 50)
    (cancelled,) = [one for one in happened if one.verb == "cancel"]
    assert (cancelled.actor, cancelled.reason) == ("user:admin", "Superseded by newer model version")


async def test_what_ended_is_not_cancelled_and_what_is_not_there_is_not_found(site: Site) -> None:
    where = await site.namespace()
    await site.post(f"namespaces/{where}/jobs", job())
    await running(site, where, "train-0")
    await report(site, where, "train-0", "Succeeded")
    # Also before the controller has seen it.
    refused = await site.post(f"namespaces/{where}/jobs/train/cancel", {})
    assert (refused.status, refused.body["details"]["code"]) == (409, "ended")
    assert (await stepped(site, where))["phase"] == "Succeeded"
    assert (await site.post(f"namespaces/{where}/jobs/train/cancel", {})).status == 409
    assert (await site.post(f"namespaces/{where}/jobs/none/cancel", {})).status == 404


async def test_a_repeated_cancellation_is_answered_as_the_first_time(site: Site) -> None:
    where = await site.namespace()
    await site.post(f"namespaces/{where}/jobs", job())
    await running(site, where, "train-0")
    body = {"reason": "enough", "request_id": "cancel-1"}
    first = await site.post(f"namespaces/{where}/jobs/train/cancel", body)
    await report(site, where, "train-0", "Cancelled")
    await stepped(site, where)
    again = await site.post(f"namespaces/{where}/jobs/train/cancel", body)
    assert again.body == first.body
    await site.delete(f"namespaces/{where}/jobs/train")
    assert (await site.post(f"namespaces/{where}/jobs/train/cancel", body)).body == first.body


@pytest.mark.parametrize(
    ("verb", "body", "fields"),
    [
        ("cancel", {"gracePeriodSeconds": -1, "reason": "x" * 2000}, ["reason", "gracePeriodSeconds"]),
        ("cancel", {"why": "x"}, ["why"]),
        ("boost", {}, ["approvedBy", "duration", "newPriority", "reason"]),
        ("boost", {**BOOST, "reason": " ", "approvedBy": ""}, ["reason", "approvedBy"]),
        ("boost", {**BOOST, "newPriority": 10**12, "duration": "soon"}, ["newPriority", "duration"]),
        ("boost", {**BOOST, "duration": "0s"}, ["duration"]),
    ],
)
async def test_what_is_wrong_with_a_verb_is_named(site: Site, verb: str, body: Document, fields: list[str]) -> None:
    where = await site.namespace()
    await site.post(f"namespaces/{where}/jobs", job())
    refused = await site.post(f"namespaces/{where}/jobs/train/{verb}", body)
    assert refused.status == 400
    assert [one["field"] for one in refused.body["details"]["causes"]] == fields
    assert (await stepped(site, where))["phase"] == "Queued"


# Boosting.


async def test_an_administrator_boosts_a_job_for_a_while(site: Site) -> None:
    where = await site.namespace()
    await site.post(f"namespaces/{where}/jobs", job(priority=200))
    boosted = await site.post(f"namespaces/{where}/jobs/train/boost", BOOST)
    assert boosted.status == 200
    assert (boosted.body["previousPriority"], boosted.body["newPriority"]) == (200, 500)
    stored = (await site.get(f"namespaces/{where}/jobs/train")).body["status"]["boost"]
    assert stored == {
        "priority": 500,
        "previousPriority": 200,
        "reason": BOOST["reason"],
        "approvedBy": "admin@example.com",
        "by": "user:admin",
        "expires": boosted.body["boostExpires"],
    }
    async with site.context.database.reader() as db:
        happened = await load_happenings_of(db, where, "train", "Job", 50)
    (line,) = [one for one in happened if one.verb == "boost"]
    assert line.actor == "user:admin"
    assert line.reason == f"{BOOST['reason']} (approved by admin@example.com)"
    await site.post(f"namespaces/{where}/jobs/train/cancel", {})
    refused = await site.post(f"namespaces/{where}/jobs/train/boost", BOOST)
    assert (refused.status, refused.body["details"]["code"]) == (409, "ended")


async def test_who_may_do_what(site: Site) -> None:
    where, elsewhere = await site.namespace(), await site.namespace()
    user = await site.token("user", tenant=where, user="ann")
    stranger = await site.token("user", tenant=elsewhere, user="bob")
    viewer = await site.token("viewer", tenant=where, user="eve")
    path = f"namespaces/{where}/jobs"
    assert (await site.post(path, job(), token=viewer)).status == 403
    assert (await site.post(path, job(), token=stranger)).status == 404
    assert (await site.post(path, job(), token=user)).status == 201
    for suffix in ("", "/status"):
        assert (await site.get(f"{path}/train{suffix}", token=viewer)).status == 200
        assert (await site.get(f"{path}/train{suffix}", token=stranger)).status == 404
    assert (await site.post(f"{path}/train/boost", BOOST, token=user)).status == 403
    assert (await site.post(f"{path}/train/cancel", {}, token=viewer)).status == 403
    assert (await site.post(f"{path}/train/cancel", {}, token=stranger)).status == 404
    assert (await site.patch(f"{path}/train/status", {"status": {"phase": "Succeeded"}}, token=user)).status == 405
    assert (await site.post(f"{path}/train/cancel", {}, token=user)).status == 200


# Deleting.


async def test_deleting_takes_the_allocations_along_unless_they_are_orphaned(site: Site) -> None:
    where = await site.namespace()
    await site.post(f"namespaces/{where}/jobs", job(parallelism=2))
    await running(site, where, "train-0")
    deleted = await site.delete(f"namespaces/{where}/jobs/train", {"gracePeriodSeconds": 5})
    assert deleted.status == 200
    assert deleted.body["metadata"]["deletionTimestamp"]
    assert (await site.get(f"namespaces/{where}/allocations")).names == ["train-0"]
    await report(site, where, "train-0", "Cancelled")
    await step(site.context.runtime, Key("Job", where, "train"))
    assert (await site.get(f"namespaces/{where}/jobs/train")).status == 404
    await site.post(f"namespaces/{where}/jobs", job("kept"))
    await site.delete(f"namespaces/{where}/jobs/kept", {"propagationPolicy": "Orphan"})
    assert (await site.get(f"namespaces/{where}/jobs")).names == []
    assert (await site.get(f"namespaces/{where}/allocations")).names == ["kept-0"]
    odd = await site.delete(f"namespaces/{where}/jobs/kept", {"propagationPolicy": "Everything"})
    assert odd.status == 400


async def test_deleting_all_jobs_of_a_namespace(site: Site) -> None:
    where = await site.namespace()
    for name in ("a", "b"):
        await site.post(f"namespaces/{where}/jobs", job(name, parallelism=2))
    assert (await site.delete(f"namespaces/{where}/jobs")).status == 200
    assert (await site.get(f"namespaces/{where}/jobs")).names == []
    assert (await site.get(f"namespaces/{where}/allocations")).names == []
