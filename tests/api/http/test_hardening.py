"""What a hostile or unlucky client must not get: effects of dry runs, others' answers, seconds of our time."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import pytest_asyncio

from bursar.api.http import app
from bursar.api.http.problem import answer_of
from bursar.api.objects import figures
from bursar.core.quota.quota import Counter
from bursar.core.values.access import Identity, Policy, Role
from bursar.core.values.patch import PatchError, json_patch
from bursar.core.values.refusal import Code, Refusal
from bursar.store.db.database import Database
from support.api.site import APPLY, Document, Site, allocation, node, node_body
from support.runtime.runtime import bind

pytestmark = pytest.mark.asyncio(loop_scope="module")

YAML = "application/yaml"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def one_reader(site: Site) -> AsyncIterator[Database]:
    """The same database through a pool of one connection: who waits for a second one waits for ever."""
    database = await Database.open(site.context.database.url, readers=1)
    yield database
    await database.close()


# Dry runs.


async def test_a_dry_report_changes_nothing(site: Site) -> None:
    team, worker = await site.namespace(), await node(site)
    name = worker["metadata"]["name"]
    await site.post(f"namespaces/{team}/allocations", allocation("job", cpu=1))
    await bind(site.context.runtime, team, "job", name)
    before, path = await site.state(), f"namespaces/{team}/allocations/job"
    reply = await site.patch(f"{path}/status", {"status": {"phase": "Running"}}, dryRun="All")
    assert (reply.status, reply.body["status"]["phase"]) == (200, "Running")
    reply = await site.patch(f"{path}/status", {"status": {"phase": "Running"}}, dryRun="maybe")
    assert reply.status == 400
    assert await site.state() == before
    assert (await site.get(path)).body["status"]["phase"] == "Scheduled"


async def test_a_dry_bulk_release_releases_nothing_wherever_it_says_so(site: Site) -> None:
    team = await site.namespace()
    path = f"namespaces/{team}/allocations"
    await site.post(path, allocation("job", labels={"batch": "1"}, cpu=1))
    before = await site.state()
    for body, query in (({"dryRun": True}, {}), ({}, {"dryRun": "All"}), ({"dryRun": False}, {"dryRun": "All"})):
        reply = await site.post(f"{path}/bulk-release", {"labelSelector": "batch=1", **body}, **query)
        assert (reply.status, reply.body["released"]) == (200, 1), reply
    assert (await site.post(f"{path}/bulk-release", {"labelSelector": "batch=1"}, dryRun="x")).status == 400
    assert await site.state() == before


async def test_tokens_have_no_dry_run(site: Site) -> None:
    made = await site.post("tokens", {"role": "system-admin", "user": "root"})
    before = await site.state()
    for reply in (
        await site.post("tokens", {"role": "system-admin", "user": "root"}, dryRun="All"),
        await site.delete(f"tokens/{made.body['metadata']['name']}", dryRun="All"),
    ):
        assert (reply.status, reply.message) == (400, "dryRun is not supported here")
    assert await site.state() == before
    assert (await site.get("whoami", token=made.body["status"]["token"])).status == 200


# Bodies that end early or never.


def receiver(*events: Document) -> Callable[[], Awaitable[Document]]:
    left = list(events)

    async def receive() -> Document:
        if not left:
            await asyncio.sleep(3600)
        return left.pop(0)

    return receive


async def test_a_body_that_was_cut_off_is_no_body(site: Site) -> None:
    for events in (
        [{"type": "http.disconnect"}],
        [{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}],
    ):
        refusal = await app._read_body(receiver(*events), {})
        assert isinstance(refusal, Refusal)
        assert refusal.code is Code.INVALID
    assert await app._read_body(receiver({"type": "http.request", "body": b"{}"}), {}) == b"{}"


@pytest.mark.parametrize("begun", [False, True])
async def test_a_body_that_does_not_come_is_the_clients_fault(
    site: Site, monkeypatch: pytest.MonkeyPatch, begun: bool
) -> None:
    monkeypatch.setattr(app, "BODY_SECONDS_MAX", 0.05)
    events = [{"type": "http.request", "body": b"{", "more_body": True}] if begun else []
    refusal = await app._read_body(receiver(*events), {})
    assert isinstance(refusal, Refusal)
    assert (refusal.code, refusal.remembered) == (Code.TIMEOUT, False)
    answer = answer_of(refusal, "id")
    assert (answer.status, json.loads(answer.body)["reason"]) == (408, "RequestTimeout")


# YAML.


@pytest.mark.parametrize(
    "value",
    [
        "1" + ":59" * 400_000,
        "1" + ":59" * 400_000 + ".5",
        "!!int " + "1" + ":59" * 200_000,
        '!!float "' + "1" + ":59" * 200_000 + '.5"',
        "9" * 1_000_000,
        "!!int " + "9" * 1_000_000,
        "1_" * 500_000 + "1",
        "!!timestamp 2020-01-01",
        "!!set {a, b}",
        "!!binary aGVsbG8=",
        "!!float .nan",
        "1.0e+999",
    ],
    ids=lambda value: value[:12],
)
@pytest.mark.timeout(60)
async def test_numbers_of_yaml_take_no_time(site: Site, value: str) -> None:
    reply = await site.put("tenants/default", f"max_nodes: {value}\n".encode(), media=YAML)
    assert reply.status == 400, reply


async def test_plain_numbers_of_yaml_are_numbers_and_the_rest_is_text(site: Site) -> None:
    team = site.name()
    text = f"metadata: {{name: {team}, annotations: {{a: 0x1f, b: 1:30, c: 2020-01-01, d: 010, e: 1_000}}}}\n"
    text += "spec: {weight: 1.5, limits: {cpu: 2, memory: -0}, gpuHoursBudget: +7, nodeHoursBudget: .5}\n"
    reply = await site.post("tenants", text.encode(), media=YAML)
    assert reply.status == 201, reply
    noted = reply.body["metadata"]["annotations"]
    assert noted == {"a": "0x1f", "b": "1:30", "c": "2020-01-01", "d": "010", "e": "1_000"}
    spec = reply.body["spec"]
    assert (spec["weight"], spec["limits"]["cpu"], spec["gpuHoursBudget"]) == (1.5, 2, 7)


async def test_keys_of_yaml_are_text(site: Site) -> None:
    for text in ("1: 2", "{max_nodes: 5, 1: 2}", "true: 1", "metadata: {labels: {1: a}}", "null: 1", "1.5: 2"):
        reply = await site.put("tenants/default", text.encode(), media=YAML)
        assert reply.status == 400, (text, reply)


# What may be asked, and from what memory.


async def test_what_callers_ask_about_is_not_kept(site: Site) -> None:
    allowed = site.context.policy.judged
    before = allowed.cache_info().currsize
    long = "x" * 1_000_000
    for attributes in (
        {"verb": long, "resource": "nodes"},
        {"verb": "get", "resource": long},
        {"verb": "get", "resource": "nodes", "subresource": long},
    ):
        body = {"spec": {"resourceAttributes": attributes}}
        reply = await site.post("/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", body)
        assert (reply.status, reply.body["status"]["allowed"]) == (201, False)
    assert allowed.cache_info().currsize <= before + 1, "the review's own route may be new"
    assert site.context.policy.allows(Identity("root", Role.SYSTEM_ADMIN), "*", "*")


async def test_reading_events_and_tokens_needs_one_connection_at_a_time(
    site: Site, one_reader: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    team = await site.namespace()
    boss = await site.token("tenant-admin", tenant=team, user="boss")
    made = await site.post("tokens", {"role": "user", "tenant": team, "user": "ann"}, token=boss)
    assert (await site.get("whoami", token=boss)).status == 200
    monkeypatch.setattr(site.context, "database", one_reader)
    asked: tuple[tuple[str, str, Document], ...] = (
        ("GET", "events", {}),
        ("GET", f"namespaces/{team}/events", {"fieldSelector": f"involvedObject.name={team}"}),
        ("GET", "tokens", {}),
        ("DELETE", f"tokens/{made.body['metadata']['name']}", {}),
        ("GET", f"tenants/{team}/quotas", {}),
    )
    for method, path, query in asked:
        site.context.forget_tree()
        async with asyncio.timeout(3):
            reply = await site.ask(method, path, token=boss, **query)
        assert reply.status == 200, (path, reply)


# Quotas.


async def test_a_soft_limit_is_found_under_either_name_of_its_dimension(site: Site) -> None:
    spec = {"hard": {"requests.cpu": "5"}, "soft": {"cpu": "3"}}
    counters = {("s", "cpu"): Counter(hard=5_000_000_000, soft=3_000_000_000, accepted=4_000_000_000)}
    status = figures.quota_status(spec, "s", counters, {})
    assert any("soft limit 3" in one for one in status["warnings"])
    team = await site.namespace()
    quota = {"metadata": {"name": "quota"}, "spec": spec}
    assert (await site.post(f"namespaces/{team}/resourcequotas", quota)).status == 201
    assert (await site.post(f"namespaces/{team}/allocations", allocation("job", cpu=4))).status == 201
    reply = await site.get(f"namespaces/{team}/resourcequotas/quota")
    assert reply.status == 200, reply
    assert reply.body["status"]["warnings"]


# Server-side apply.


async def test_applying_what_does_not_exist_needs_the_right_to_create_it(site: Site) -> None:
    service = await site.token("approver", user="app", tenants=["*"], gates=["*"])
    team = await site.namespace()
    body: Document = {"metadata": {}, "spec": {}}
    reply = await site.patch(f"namespaces/{team}/allocations/job/status", body, APPLY)
    assert reply.status == 404, "a status is not applied to nothing"
    reply = await site.patch("nodes/phantom/status", node_body("phantom"), APPLY)
    assert reply.status == 404
    assert (await site.get("nodes/phantom")).status == 404
    reply = await site.patch("tenants/made-by-approver", body, APPLY, token=service)
    assert reply.status == 403


async def test_a_role_that_may_patch_but_not_create_cannot_create_by_applying(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Policy, "allows", lambda _, __, verb, *___: verb != "create")
    reply = await site.patch("queues/made-by-patch", {"metadata": {}, "spec": {}}, APPLY)
    assert (reply.status, reply.body["reason"]) == (403, "Forbidden")
    assert (await site.get("queues/made-by-patch")).status == 404


@pytest.mark.parametrize("name", ["UPPER", "a_b", "-a", "x" * 254, "%E2%82%AC"])
async def test_applied_names_are_checked_like_all_others(site: Site, name: str) -> None:
    reply = await site.patch(f"queues/{name}", {"metadata": {}, "spec": {}}, APPLY)
    assert reply.status == 400, reply
    assert reply.body["details"]["causes"][0]["field"] == "metadata.name"


# Repetitions.


async def test_an_answer_is_remembered_for_the_one_who_got_it(site: Site) -> None:
    team = await site.namespace()
    ann, ben = [await site.token("user", tenant=team, user=name) for name in ("ann", "ben")]
    path, key = f"namespaces/{team}/allocations", {"idempotency-key": "mine"}
    first = await site.post(path, allocation("job", cpu=1), token=ann, headers=key)
    again = await site.post(path, allocation("job", cpu=1), token=ann, headers=key, pretty="true", fieldManager="x")
    assert (first.status, again.status, first.version) == (201, 201, again.version)
    assert (await site.post(path, allocation("job", cpu=1), token=ben, headers=key)).status == 422
    other = await site.post(path, allocation("job", cpu=1), token=ann, headers=key, fieldValidation="Ignore")
    assert other.status == 422, "another query is another request"


async def test_a_dry_run_is_decided_anew_and_leaves_its_id_free(site: Site) -> None:
    team = await site.namespace()
    path, key = f"namespaces/{team}/allocations", {"idempotency-key": "dry"}
    assert (await site.post(path, allocation("job", cpu=1), headers=key, dryRun="All")).status == 201
    assert (await site.post(path, allocation("job", cpu=1), headers=key)).status == 201
    assert (await site.post(path, allocation("job", cpu=1), headers=key, dryRun="All")).status == 409
    assert (await site.delete(f"{path}/job", headers=key)).status == 200
    assert (await site.delete(f"{path}/job", headers=key)).status == 200, "repeated"
    assert (await site.delete(f"{path}/job", headers=key, dryRun="All")).status == 404, "not a repetition"


async def test_a_token_is_made_once_under_one_key(site: Site) -> None:
    key, wanted = {"idempotency-key": "token-1"}, {"role": "system-admin", "user": "root"}
    bad = await site.post("tokens", {"role": "user", "user": "ann"}, headers=key)
    assert bad.status == 400, "what was refused uses up no key"
    assert (await site.post("tokens", wanted, headers=key)).status == 201
    before = await site.state()
    replies = await asyncio.gather(*(site.post("tokens", wanted, headers=key) for _ in range(3)))
    for reply in replies:
        assert reply.status == 422
        assert "shown only once" in reply.message
    assert await site.state() == before


# Long lists of faults, and long lists.


async def test_refusals_do_not_grow_with_what_is_wrong(site: Site) -> None:
    team = await site.namespace()
    many = allocation("job", cpu=1)
    many["spec"]["command"] = ["a\u0000b"] * 500
    many["spec"]["scheduling"] = {"tolerations": [{"operator": "No", "effect": "No", "key": "-"}] * 60}
    flat = {f"unknown_{index}": 1 for index in range(5000)}
    await site.post("queues", {"metadata": {"name": "faulty"}, "spec": {}})
    for reply in (
        await site.post(f"namespaces/{team}/allocations", many),
        await site.patch(f"namespaces/{team}/allocations/job", many, APPLY),
        await site.put("tenants/default", flat),
        await site.post("nodes", {"metadata": {"name": "n"}, "spec": {"taints": [{"key": "-"}] * 10_000}}),
        await site.post("queues", {"metadata": {"name": "q"}, "spec": flat}),
    ):
        assert reply.status == 400, reply
        assert 0 < len(reply.body["details"]["causes"]) <= 50
        assert len(reply.message) < 5000


@pytest.mark.parametrize(
    ("field", "spec"),
    [
        ("spec.nodeSelector", {"nodeSelector": {f"k{n}": "v" for n in range(65)}}),
        ("spec.scheduling.nodeSelector", {"scheduling": {"nodeSelector": {f"k{n}": "v" for n in range(65)}}}),
        ("spec.scheduling.tolerations", {"scheduling": {"tolerations": [{"operator": "Exists"}] * 65}}),
        (
            "spec.scheduling.topologySpreadConstraints",
            {"scheduling": {"topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "zone"}] * 17}},
        ),
        ("spec.env", {"env": [{"name": "A"}] * 1001}),
        ("spec.env", {"env": {f"A{n}": "" for n in range(1001)}}),
        ("spec.command", {"command": ["a"] * 10_001}),
    ],
)
async def test_lists_are_bounded(site: Site, field: str, spec: Document) -> None:
    await site.post("namespaces", {"metadata": {"name": "lists", "labels": {"bursar.io/tenant": "default"}}})
    reply = await site.post("namespaces/lists/allocations", allocation(site.name("job"), spec=spec, cpu=1))
    assert reply.status == 400, reply
    assert [one["field"] for one in reply.body["details"]["causes"]] == [field]


def _long_list(length: int) -> Any:
    return {"spec": {"list": list(range(length)), "tree": [[n] for n in range(length)]}}


@pytest.mark.parametrize(
    "operations",
    [
        [{"op": "move", "from": "/spec/tree", "path": "/t"}, {"op": "move", "from": "/t", "path": "/spec/tree"}] * 500,
        [{"op": "add", "path": "/spec/list/0", "value": 1}] * 5000,
        [{"op": "remove", "path": "/spec/list/0"}] * 5000,
        [{"op": "move", "from": "/spec/list/0", "path": "/spec/list/1"}] * 5000,
    ],
    ids=["subtrees", "add", "remove", "rotate"],
)
@pytest.mark.timeout(60)
async def test_a_patch_moves_no_more_than_it_may(operations: list[Any]) -> None:
    with pytest.raises(PatchError, match=r"shifts more than|moves more than"):
        json_patch(_long_list(100_000), operations)
    json_patch(_long_list(100), operations[:90])


# Inputs that were errors of ours.


async def test_strange_texts_are_refused(site: Site) -> None:
    await site.post("queues", {"metadata": {"name": "strange"}, "spec": {}})
    for token in ([1, "a\u0000", "b"], [1, "a", "\u0000"], [-1, "a", "b"], [10**30, "a", "b"]):
        query: Document = {"continue": base64.urlsafe_b64encode(json.dumps(token).encode()).decode()}
        assert (await site.ask("GET", "queues", **query)).status == 400, token
    for version in ("9" * 5000, "9" * 30, "-1", "x"):
        options = {"preconditions": {"resourceVersion": version}}
        assert (await site.delete("queues/strange", options)).status == 400
    assert (await site.get("queues/strange")).status == 200


async def test_a_tenant_that_vanishes_meanwhile_is_not_found(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    tree, team = await site.context.tree(), await site.namespace()

    async def outdated(*_: Any, **__: Any) -> Any:
        return tree

    monkeypatch.setattr(type(site.context), "tree", outdated)
    assert team not in tree.tenants
    assert (await site.get(f"tenants/{team}/quotas")).status == 404


async def test_an_internal_error_is_told_in_json(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("bug")

    monkeypatch.setattr("bursar.api.objects.object.find", fails)
    strange = 'a"b\\c'
    reply = await site.get("queues/default", headers={"x-request-id": strange})
    assert (reply.status, reply.body["details"]["requestId"]) == (500, strange)
