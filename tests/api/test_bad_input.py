"""What is wrong with a request is told, all of it, with the right status; and nothing of it is stored."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from houses import APPLY, JSON_PATCH, MERGE, STRATEGIC, Document, Reply, Site, allocation

pytestmark = pytest.mark.asyncio(loop_scope="module")


@asynccontextmanager
async def nothing_stored(site: Site) -> AsyncIterator[str]:
    """A namespace with one allocation in it, and the assertion that the block changes nothing at all."""
    if (await site.get("namespaces/quiet")).status == 404:
        await site.namespace(name="quiet")
        assert (await site.post("namespaces/quiet/allocations", allocation("there", cpu=1))).status == 201
    before = await site.state()
    yield "quiet"
    assert await site.state() == before


async def refused(site: Site, body: Any, status: int = 400, **options: Any) -> Reply:
    """Creating this allocation is refused with this status, in Kubernetes' form, and stores nothing."""
    async with nothing_stored(site) as team:
        reply = await site.post(f"namespaces/{team}/allocations", body, **options)
        assert reply.status == status, reply
        assert reply.body["kind"] == "Status"
        assert reply.body["code"] == status
        assert reply.body["details"]["requestId"]
        assert len(json.dumps(reply.body)) < 40_000, "no answer grows with its cause"
    return reply


MALFORMED: dict[str, bytes] = {
    "nothing": b"",
    "white space": b"  \n",
    "half an object": b'{"metadata": {"name": "x"',
    "a trailing comma": b'{"metadata": {"name": "x"},}',
    "single quotes": b"{'metadata': {}}",
    "two objects": b'{"metadata":{"name":"x"},"spec":{}} {}',
    "a comment": b'{"metadata":{"name":"x"}/* hello */}',
    "invalid UTF-8": b'{"metadata":{"name":"\xff\xfe"},"spec":{}}',
    "overlong UTF-8": b'{"metadata":{"name":"\xc0\xaf"},"spec":{}}',
    "UTF-16": '{"metadata":{"name":"x"},"spec":{}}'.encode("utf-16"),
    "a byte order mark": b'\xef\xbb\xbf{"metadata":{"name":"x"},"spec":{}}',
    "a lone surrogate": b'{"metadata":{"name":"x","annotations":{"a":"\\ud800"}},"spec":{}}',
    "a raw control character": b'{"metadata":{"name":"x\x00"},"spec":{}}',
    "NaN": b'{"metadata":{"name":"x"},"spec":{"priority":NaN}}',
    "Infinity": b'{"metadata":{"name":"x"},"spec":{"priority":Infinity}}',
    "a bare word": b"hello",
    "protobuf by mistake": b"k8s\x00\n\x0c\n\x02v1\x12\x04Node",
}


@pytest.mark.parametrize("raw", MALFORMED.values(), ids=MALFORMED)
async def test_what_is_not_json_is_malformed(site: Site, raw: bytes) -> None:
    reply = await refused(site, raw, media="application/json")
    assert reply.body["reason"] == "BadRequest"


@pytest.mark.parametrize("raw", [b"null", b"[]", b'"text"', b"17", b"true"])
async def test_a_body_that_is_no_object_is_refused(site: Site, raw: bytes) -> None:
    await refused(site, raw)


@pytest.mark.parametrize(
    ("opening", "closing"), [("[", "]"), ('{"a":', "}"), ("[", ""), ('{"a":', ""), ('[{"a":', "}]")]
)
@pytest.mark.parametrize("place", ["the whole body", "an annotation", "an unknown field"])
async def test_deep_nesting_is_refused_at_once(site: Site, opening: str, closing: str, place: str) -> None:
    deep = opening * 10_000 + "1" + closing * 10_000
    raw = {
        "the whole body": deep,
        "an annotation": '{"metadata":{"name":"x","annotations":{"a":' + deep + '}},"spec":{}}',
        "an unknown field": '{"metadata":{"name":"x"},"spec":{"x":' + deep + "}}",
    }[place]
    await refused(site, raw.encode())
    await refused(site, raw.encode(), fieldValidation="Ignore")
    await refused(site, raw.encode(), media="application/yaml")


@pytest.mark.parametrize("media", [MERGE, STRATEGIC, JSON_PATCH, APPLY])
async def test_deep_patches_are_refused(site: Site, media: str) -> None:
    async with nothing_stored(site) as team:
        for opening, closing in (("[", "]"), ('{"a":', "}")):
            raw = (opening * 10_000 + "1" + closing * 10_000).encode()
            reply = await site.patch(f"namespaces/{team}/allocations/there", raw, media)
            assert reply.status == 400, reply


async def test_every_unknown_field_is_named(site: Site) -> None:
    body = allocation("x", spec={"colour": "red", "resource": {}, "scheduling": {"nodeselector": {}}}, cpu=1)
    body["metadata"]["lables"] = {}
    body["extra"] = 1
    reply = await refused(site, body)
    fields = {one["field"] for one in reply.body["details"]["causes"]}
    assert fields == {"extra", "metadata.lables", "spec.colour", "spec.resource", "spec.scheduling.nodeselector"}
    assert all(field in reply.message for field in fields)
    assert "did you mean labels?" in reply.message


async def test_every_wrong_type_is_named(site: Site) -> None:
    body = {
        "metadata": {"name": 17, "labels": ["a"], "annotations": {"a": 1}},
        "spec": {"priority": "high", "nodes": 1.5, "exclusive": "yes", "ttl": [], "scheduling": {"tolerations": {}}},
    }
    reply = await refused(site, body)
    fields = {one["field"] for one in reply.body["details"]["causes"]}
    assert fields == {
        "metadata.name",
        "metadata.labels",
        "metadata.annotations.a",
        "spec.priority",
        "spec.nodes",
        "spec.exclusive",
        "spec.ttl",
        "spec.scheduling.tolerations",
    }


async def test_every_fault_of_a_well_typed_body_is_named(site: Site) -> None:
    body = allocation(
        "Not_A_Name",
        labels={"-bad": "x", "ok": "not ok!"},
        spec={
            "nodes": 0,
            "priority": 10**10,
            "preemptionPolicy": "Always",
            "ttl": "soon",
            "onNodeLost": "weep",
            "scheduling": {
                "tolerations": [{"key": "a", "operator": "Like"}],
                "topologySpreadConstraints": [{"maxSkew": 0, "topologyKey": "zone"}],
            },
        },
        cpu="many",
    )
    reply = await refused(site, body)
    assert {one["field"] for one in reply.body["details"]["causes"]} == {
        "metadata.name",
        "metadata.labels",
        "spec.resources.requests[cpu]",
        "spec.nodes",
        "spec.priority",
        "spec.preemptionPolicy",
        "spec.ttl",
        "spec.onNodeLost",
        "spec.scheduling.tolerations[0].operator",
        "spec.scheduling.topologySpreadConstraints[0].maxSkew",
    }


QUANTITIES: list[Any] = [
    "NaN", "nan", "Infinity", "-Infinity", "1e999", "1e31", "-1", "-0.5", "5 Gi", " 5", "5 ", "５", "١", "5GiB", "0x10",
    "+1", "1.", "", ".", "e3", "1ee3", "9" * 40, "9" * 5000, "9223372036854775808", "1Zi", "½", "5\u200bGi", "1,5",
    -1, 10**40, True, [], {}, "5\x00",
]  # fmt: skip


@pytest.mark.parametrize("value", QUANTITIES, ids=lambda value: ascii(value)[:24])
async def test_absurd_quantities_are_refused_in_every_place(site: Site, value: Any) -> None:
    async with nothing_stored(site) as team:
        one: Document = {"metadata": {"name": "x"}, "spec": {"resources": {"requests": {"cpu": value}}}}
        reply = await site.post(f"namespaces/{team}/allocations", one)
        assert reply.status == 400, reply
        assert "spec.resources.requests" in reply.message
        quota = {"metadata": {"name": "x"}, "spec": {"hard": {"cpu": "1", "memory": value}}}
        reply = await site.post(f"namespaces/{team}/resourcequotas", quota)
        assert reply.status == 400, reply
        assert "spec.hard" in reply.message
        node = {"metadata": {"name": "bad-node"}, "spec": {"capacity": {"cpu": value}}}
        assert (await site.post("nodes", node)).status == 400
        assert (await site.put(f"tenants/{team}", {"max_nodes": value})).status == 400
        assert (await site.patch(f"tenants/{team}", {"spec": {"limits": {"cpu": value}}})).status == 400


async def test_amounts_that_overflow_only_when_multiplied_or_summed_are_refused(site: Site) -> None:
    """Each number is a good one; their product or sum is not."""
    huge = "9223372036854775"
    async with nothing_stored(site) as team:
        body = allocation("x", spec={"nodes": 100_000}, cpu=huge)
        reply = await site.post(f"namespaces/{team}/allocations", body)
        assert reply.status in (400, 403, 422), reply
    team = await site.namespace()
    first = await site.post(f"namespaces/{team}/allocations", allocation("a", cpu=huge))
    second = await site.post(f"namespaces/{team}/allocations", allocation("b", cpu=huge))
    assert first.status == 201
    assert second.status in (400, 403, 422), second
    await site.delete(f"namespaces/{team}/allocations")


NAMES = [
    "UPPER", "-a", "a-", "a_b", "a..b", ".a", "a.", "a b", "ä", "a/b", "..", "", "x" * 254, "a\x00b", "a\nb", "ａ",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES, ids=lambda name: ascii(name)[:24])
async def test_names_outside_the_rules_are_refused(site: Site, name: str) -> None:
    async with nothing_stored(site) as team:
        for path in (
            f"namespaces/{team}/allocations",
            "tenants",
            "nodes",
            "namespaces",
            f"namespaces/{team}/resourcequotas",
        ):
            body: Document = {"metadata": {"name": name}}
            if path not in ("namespaces", "tenants", "nodes"):
                body["spec"] = {"hard": {"cpu": "1"}} if path.endswith("quotas") else {}
            reply = await site.post(path, body)
            assert reply.status == 400, (path, reply)
            assert "metadata.name" in reply.message


@pytest.mark.parametrize("where", ["labels", "annotations"])
async def test_bombs_of_labels_and_annotations_are_one_fault(site: Site, where: str) -> None:
    body = allocation("x", cpu=1)
    body["metadata"][where] = {f"key-{index}": "x" * 50 for index in range(20_000)}
    reply = await refused(site, body)
    assert reply.message.count(f"metadata.{where}") == 1
    assert "at most" in reply.message


async def test_a_label_value_that_breaks_the_rules_is_named(site: Site) -> None:
    for bad in ("x" * 64, "-x", "a b", "ü", "a\x00"):
        reply = await refused(site, allocation("x", labels={"key": bad}, cpu=1))
        assert "metadata.labels" in reply.message


@pytest.mark.parametrize("body_bytes", [1_500_001, 4_000_000])
async def test_a_body_that_is_too_large_is_refused_before_it_is_read(site: Site, body_bytes: int) -> None:
    body = allocation("x", cpu=1)
    body["metadata"]["annotations"] = {"a": "x" * body_bytes}
    reply = await refused(site, body, 413)
    assert "1500000 bytes" in reply.message


async def test_a_body_in_pieces_without_a_length_is_bounded_too(site: Site) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(40):
            yield b" " * 100_000

    async with nothing_stored(site) as team:
        answer = await site.http.post(
            f"{site.url}/api/v1/namespaces/{team}/allocations",
            content=pieces(),
            headers={"authorization": f"Bearer {site.admin}", "content-type": "application/json"},
        )
        assert answer.status_code == 413


@pytest.mark.parametrize(
    "media", ["text/plain", "application/xml", "multipart/form-data", "application/x-www-form-urlencoded"]
)
async def test_a_content_type_that_is_not_understood_is_415(site: Site, media: str) -> None:
    await refused(site, b'{"metadata":{"name":"x"},"spec":{}}', 415, media=media)
    async with nothing_stored(site) as team:
        for wrong in (media, "application/json"):
            reply = await site.patch(f"namespaces/{team}/allocations/there", {"metadata": {}}, wrong)
            assert reply.status == 415
            assert MERGE in reply.body["details"]["hint"]


NULS: dict[str, Document] = {
    "a name": {"metadata": {"name": "a\x00b"}, "spec": {}},
    "an annotation": {"metadata": {"name": "x", "annotations": {"a": "b\x00c"}}, "spec": {}},
    "a label": {"metadata": {"name": "x", "labels": {"a": "b\x00c"}}, "spec": {}},
    "a command": {"metadata": {"name": "x"}, "spec": {"command": ["echo", "a\x00b"]}},
    "a queue": {"metadata": {"name": "x"}, "spec": {"queue": "a\x00b"}},
    "a class": {"metadata": {"name": "x"}, "spec": {"priorityClass": "a\x00b"}},
    "a directory": {"metadata": {"name": "x"}, "spec": {"workingDir": "/a\x00b"}},
    "an environment": {"metadata": {"name": "x"}, "spec": {"env": [{"name": "a", "value": "b\x00"}]}},
    "an environment's map": {"metadata": {"name": "x"}, "spec": {"env": {"a": "b\x00"}}},
    "a gang": {"metadata": {"name": "x"}, "spec": {"gangScheduling": {"groupId": "a\x00", "minMembers": 2}}},
    "a node selector": {"metadata": {"name": "x"}, "spec": {"nodeSelector": {"a": "b\x00"}}},
    "an owner": {
        "metadata": {"name": "x", "ownerReferences": [{"kind": "a", "name": "b\x00", "uid": "c"}]},
        "spec": {},
    },
    "a finalizer": {"metadata": {"name": "x", "finalizers": ["a\x00"]}, "spec": {}},
    "a toleration": {
        "metadata": {"name": "x"},
        "spec": {"scheduling": {"tolerations": [{"key": "a", "operator": "Equal", "value": "b\x00"}]}},
    },
}


@pytest.mark.parametrize("body", NULS.values(), ids=NULS)
async def test_nul_characters_are_refused_wherever_they_stand(site: Site, body: Document) -> None:
    await refused(site, body)


async def test_nul_characters_in_paths_and_queries_are_harmless(site: Site) -> None:
    async with nothing_stored(site) as team:
        for path in (
            f"namespaces/{team}/allocations/a%00b",
            "namespaces/a%00b/allocations",
            "tenants/%00",
            "nodes/%ff",
        ):
            reply = await site.get(path)
            assert reply.status in (200, 400, 404), (path, reply)
            assert (await site.delete(path)).status in (200, 400, 404), path
            assert (await site.patch(path, {"metadata": {}})).status in (400, 404, 405), path
        for name in (
            "labelSelector",
            "fieldSelector",
            "continue",
            "limit",
            "resourceVersion",
            "dryRun",
            "timeoutSeconds",
        ):
            reply = await site.get(f"namespaces/{team}/allocations", **{name: "a\x00b", "watch": "false"})
            assert reply.status in (200, 400), (name, reply)
        for value in ("a\x00b", "metadata.name=a\x00b", "a in (b\x00)"):
            assert (await site.get("allocations", labelSelector=value)).status == 400
        assert (await site.get("allocations", fieldSelector="metadata.name=a\x00b")).status in (200, 400)
        assert (await site.get("events", fieldSelector="involvedObject.name=a\x00b")).status in (200, 400)
        assert (await site.get("events", fieldSelector="involvedObject.namespace=a\x00b")).status in (200, 400)


async def test_nuls_in_tokens_and_request_ids_are_refused(site: Site) -> None:
    async with nothing_stored(site) as team:
        for body in (
            {"role": "user", "tenant": team, "user": "a\x00b"},
            {"role": "user", "tenant": "a\x00b"},
            {"role": "node", "node": "a\x00b"},
            {"role": "a\x00b"},
        ):
            assert (await site.post("tokens", body)).status in (400, 404), body
        reply = await site.post(f"namespaces/{team}/allocations", {**allocation("x", cpu=1), "request_id": "a\x00b"})
        assert reply.status == 400
        assert (await site.delete("tokens/a%00b")).status in (400, 404)


@pytest.mark.parametrize("media", [MERGE, STRATEGIC])
async def test_nuls_in_status_reports_are_refused(site: Site, media: str) -> None:
    async with nothing_stored(site) as team:
        status = {"phase": "Failed", "reason": "a\x00b", "message": "c\x00d"}
        reply = await site.patch(f"namespaces/{team}/allocations/there/status", {"status": status}, media)
        assert reply.status in (400, 422), reply


async def test_of_duplicate_keys_one_is_taken_and_never_both(site: Site) -> None:
    team = await site.namespace()
    raw = b'{"metadata":{"name":"first","name":"second"},"spec":{"resources":{"requests":{"cpu":"1","cpu":"2"}}}}'
    reply = await site.post(f"namespaces/{team}/allocations", raw)
    assert reply.status in (201, 400)
    if reply.status == 201:
        assert reply.body["metadata"]["name"] == "second"
        accepted = (await site.get(f"tenants/{team}/quotas")).body["quotas"]["cpu"]["accepted"]
        assert accepted == reply.body["spec"]["resources"]["requests"]["cpu"], "what is charged is what is shown"


@pytest.mark.parametrize(
    "number", [10**18, 2**63, 2**64, 10**40, 10**400, -(10**40)], ids=lambda one: f"{len(str(one))}d"
)
async def test_huge_integers_are_refused_where_small_ones_belong(site: Site, number: int) -> None:
    for spec in (
        {"priority": number},
        {"nodes": number},
        {"ttl": number},
        {"gangScheduling": {"groupId": "g", "minMembers": number}},
        {"scheduling": {"tolerations": [{"key": "a", "operator": "Exists", "tolerationSeconds": number}]}},
        {"scheduling": {"topologySpreadConstraints": [{"maxSkew": number, "topologyKey": "zone"}]}},
    ):
        body = allocation("x", spec=spec, cpu=1)
        async with nothing_stored(site) as team:
            reply = await site.post(f"namespaces/{team}/allocations", body)
            assert reply.status == 400, (spec, reply)


async def test_huge_numbers_in_the_query_and_in_options_are_refused(site: Site) -> None:
    async with nothing_stored(site) as team:
        path = f"namespaces/{team}/allocations"
        for name in ("limit", "timeoutSeconds", "resourceVersion"):
            for value in ("9" * 30, "-1", "1.5", "x", "１"):
                reply = (
                    await site.get(path, watch="true", **{name: value})
                    if name != "limit"
                    else await site.get(path, limit=value)
                )
                assert reply.status in (400, 410), (name, value, reply)
        for value in ("9" * 30, "-1", "x"):
            assert (await site.delete(f"{path}/there", gracePeriodSeconds=value)).status == 400
        for number in (-1, 10**40, 1.5, "x"):
            assert (await site.delete(f"{path}/there", {"gracePeriodSeconds": number})).status == 400
            bulk = {"labelSelector": "a=b", "gracePeriodSeconds": number}
            assert (await site.post(f"{path}/bulk-release", bulk)).status == 400
        assert (await site.delete(f"{path}/there", {"preconditions": {"resourceVersion": "x"}})).status == 400
        huge = await site.delete(f"{path}/there", {"preconditions": {"resourceVersion": "9" * 40}})
        assert huge.status in (400, 409)


@pytest.mark.parametrize(
    "selector",
    ["=", "a=b=c", "a in", "a in (", "a in ()", "a in b", "!a=b", "a,,b", ",", "a b", "(a)", "a=b,", "-a=b", "a=ü",
     "a" * 5000, ",".join(f"k{index}=v" for index in range(100))],
    ids=lambda one: one[:20],
)  # fmt: skip
async def test_selectors_that_cannot_be_read_are_refused(site: Site, selector: str) -> None:
    async with nothing_stored(site) as team:
        path = f"namespaces/{team}/allocations"
        for reply in (
            await site.get(path, labelSelector=selector),
            await site.get(path, labelSelector=selector, watch="true"),
            await site.delete(path, labelSelector=selector),
            await site.post(f"{path}/bulk-release", {"labelSelector": selector}),
        ):
            assert reply.status == 400, reply
            assert reply.message


@pytest.mark.parametrize(
    "selector", ["spec.colour=red", "status.phase", "status.phase>1", "=", "metadata.name=a,nothing=b"]
)
async def test_fields_that_cannot_be_selected_are_named(site: Site, selector: str) -> None:
    async with nothing_stored(site) as team:
        for method in ("GET", "DELETE"):
            reply = await site.ask(method, f"namespaces/{team}/allocations", fieldSelector=selector)
            assert reply.status == 400, reply
            assert "selector" in reply.message


@pytest.mark.parametrize("token", ["x", "!!!", "e30=", "WzEsMl0=", "WyJhIiwiYiIsImMiXQ==", "é", "AAAA" * 1000])
async def test_a_continue_token_of_anothers_making_is_refused(site: Site, token: str) -> None:
    async with nothing_stored(site) as team:
        reply = await site.get(f"namespaces/{team}/allocations", limit=1, **{"continue": token})
        assert reply.status == 400, reply
        assert "continue" in reply.message


async def test_a_stale_version_is_a_conflict_and_a_future_one_too(site: Site) -> None:
    async with nothing_stored(site) as team:
        path = f"namespaces/{team}/allocations/there"
        whole = (await site.get(path)).body
        for version in ("1", "999999999", "x", "-1"):
            whole["metadata"]["resourceVersion"] = version
            reply = await site.put(path, whole)
            assert (reply.status, reply.body["reason"]) == (409, "Conflict"), reply
        other = {"metadata": {"uid": "alloc-of-another"}}
        assert (await site.patch(path, other)).status == 409


async def test_a_body_that_contradicts_its_path_is_refused(site: Site) -> None:
    async with nothing_stored(site) as team:
        path = f"namespaces/{team}/allocations"
        for change in (
            {"kind": "Node"},
            {"apiVersion": "v2"},
            {"metadata": {"name": "x", "namespace": "elsewhere"}},
        ):
            reply = await site.post(path, {**allocation("x", cpu=1), **change})
            assert reply.status == 400, reply
        put = await site.put(f"{path}/there", allocation("another", cpu=1))
        assert put.status == 400
        tenant = {"metadata": {"name": "x", "namespace": team}}
        assert (await site.post("tenants", tenant)).status == 400


async def test_references_to_what_does_not_exist_are_named(site: Site) -> None:
    body = allocation("x", spec={"queue": "no-queue", "priorityClass": "no-class"}, cpu=1)
    reply = await refused(site, body)
    assert "no-queue" in reply.message
    assert "no-class" in reply.message
    hint = reply.body["details"]["hint"]
    assert hint == "Create it first, or name one that there is: bursar get priorityclasses,queues"
    async with nothing_stored(site):
        for spec in ({"parent": "nobody"}, {"tier": "none"}):
            reply = await site.post("tenants", {"metadata": {"name": "orphan"}, "spec": spec})
            assert reply.status in (400, 404, 422), reply
        labels = {"bursar.io/tenant": "nobody"}
        reply = await site.post("namespaces", {"metadata": {"name": "orphan", "labels": labels}})
        assert reply.status in (400, 404, 422), reply


async def test_a_cycle_in_the_tree_is_refused(site: Site) -> None:
    above, below = site.name("above"), site.name("below")
    await site.post("tenants", {"metadata": {"name": above}, "spec": {}})
    await site.post("tenants", {"metadata": {"name": below}, "spec": {"parent": above}})
    before = await site.state()
    for name, parent in ((above, below), (above, above)):
        reply = await site.patch(f"tenants/{name}", {"spec": {"parent": parent}})
        assert reply.status in (400, 409, 422), reply
    assert await site.state() == before


async def test_bad_patches_are_refused(site: Site) -> None:
    async with nothing_stored(site) as team:
        path = f"namespaces/{team}/allocations/there"
        for media, body in (
            (MERGE, []),
            (MERGE, "x"),
            (MERGE, None),
            (MERGE, {"metadata": "x"}),
            (MERGE, {"spec": None}),
            (MERGE, {"metadata": {"labels": {"a b": "c"}}}),
            (MERGE, {"metadata": {"labels": ["a"]}}),
            (MERGE, {"metadata": {"name": "another"}}),
            (STRATEGIC, {"metadata": {"labels": [{"a": "b"}]}}),
            (STRATEGIC, {"metadata": {"finalizers": {"$patch": 17}}}),
            (STRATEGIC, {"$patch": "explode"}),
            (JSON_PATCH, {}),
            (JSON_PATCH, [{"op": "explode", "path": "/metadata"}]),
            (JSON_PATCH, [{"op": "add", "path": "no-slash", "value": 1}]),
            (JSON_PATCH, [{"op": "add", "path": "/metadata/labels"}]),
            (JSON_PATCH, [{"op": "replace", "path": "", "value": []}]),
            (JSON_PATCH, [{"op": "replace", "path": "/metadata", "value": 17}]),
            (JSON_PATCH, [{"op": "copy", "from": "", "path": "/metadata/annotations"}]),
            (JSON_PATCH, [17]),
        ):
            raw = b"null" if body is None else body
            reply = await site.patch(path, raw, media)
            assert reply.status in (400, 422), (media, body, reply)
            assert reply.message


async def test_a_json_patch_that_doubles_itself_is_bounded(site: Site) -> None:
    async with nothing_stored(site) as team:
        path = f"namespaces/{team}/allocations/there"
        patch: list[Document] = [{"op": "add", "path": "/metadata/annotations", "value": {"a0": "x" * 100}}]
        patch += [{"op": "copy", "from": "/metadata", "path": f"/metadata/x{index}"} for index in range(40)]
        reply = await site.patch(path, patch, JSON_PATCH)
        assert reply.status in (400, 413, 422), reply


async def test_a_reused_request_id_with_another_body_does_nothing(site: Site) -> None:
    team = await site.namespace()
    path = f"namespaces/{team}/allocations"
    body = {**allocation("one", cpu=1), "request_id": f"{team}-id"}
    assert (await site.post(path, body)).status == 201
    before = await site.state()
    for other in ({**allocation("two", cpu=1)}, {**allocation("one", cpu=2)}):
        reply = await site.post(path, {**other, "request_id": f"{team}-id"})
        assert (reply.status, reply.body["details"]["code"]) == (422, "request_id_reused")
    assert await site.state() == before


@pytest.mark.parametrize("request_id", ["x" * 129, "ü", "a\nb", "\x7f"], ids=["long", "umlaut", "newline", "delete"])
async def test_a_request_id_that_is_not_plain_text_is_refused(site: Site, request_id: str) -> None:
    await refused(site, {**allocation("x", cpu=1), "request_id": request_id})


@pytest.mark.parametrize("request_id", [17, ["a"], {"a": "b"}, True])
async def test_a_request_id_of_another_type_is_refused_and_not_ignored(site: Site, request_id: Any) -> None:
    await refused(site, {**allocation("x", cpu=1), "request_id": request_id})


@pytest.mark.parametrize(
    "headers",
    [{"authorization": ""}, {"authorization": "Bearer"}, {"authorization": "Bearer x"}, {"authorization": "Basic eDp5"},
     {"authorization": "Bearer " + "x" * 5000}, {"authorization": "Bearer bsr_000000000000_" + "A" * 43},
     {"authorization": "Bearer a.b.c"}],
    ids=lambda one: one["authorization"][:14],
)  # fmt: skip
async def test_whoever_is_not_known_is_401_and_told_how(site: Site, headers: dict[str, str]) -> None:
    async with nothing_stored(site) as team:
        for method, path in (
            ("GET", "nodes"),
            ("POST", f"namespaces/{team}/allocations"),
            ("DELETE", f"tenants/{team}"),
        ):
            reply = await site.ask(method, path, {} if method == "POST" else None, headers=headers)
            assert (reply.status, reply.body["reason"]) == (401, "Unauthorized")
            assert reply.headers["www-authenticate"].startswith("Bearer")


async def test_unknown_paths_are_not_found(site: Site) -> None:
    for path in (
        "/api/v1/unicorns",
        "/api/v2/nodes",
        "/nothing",
        "/api/v1/namespaces/default/allocations/a/b/c",
        "/%2e%2e/x",
    ):
        reply = await site.get(path)
        assert reply.status == 404, (path, reply)
    for name in ("%7B%7D", "%7Bname%7D", "%2F", "%252F", "%20"):
        for path in (f"nodes/{name}", f"namespaces/{name}/allocations/{name}"):
            reply = await site.get(path)
            assert reply.status == 404, (path, reply)
    assert "/api/v1" in (await site.get("/")).body["paths"]


async def test_a_query_that_is_malformed_or_too_long_is_refused(site: Site) -> None:
    for raw in ("labelSelector=%ff", "a=b&" * 100, "x=" + "y" * 20_000):
        reply = await site.get(f"/api/v1/nodes?{raw}")
        assert reply.status == 400, raw[:20]
    assert (await site.get("nodes", fieldValidation="Sometimes")).status in (200, 400)


async def test_bad_tokens_are_not_made(site: Site) -> None:
    async with nothing_stored(site) as team:
        bodies: tuple[Any, ...] = (
            {},
            {"role": "emperor"},
            {"role": "user"},
            {"role": "node"},
            {"role": "user", "tenant": team, "ttl": "-5s"},
            {"role": "user", "tenant": team, "ttl": "soon"},
            {"role": "user", "tenant": team, "ttl": 10**40},
            {"role": "user", "tenant": team, "ttl": "99999999999h"},
            {"role": "user", "tenant": team, "colour": "red"},
            {"role": "user", "tenant": team, "single_use": True},
            {"role": "user", "tenant": team, "user": "x" * 300},
            {"role": "system-admin", "node": "a"},
            [],
            "x",
            17,
        )
        for body in bodies:
            reply = await site.post("tokens", body)
            assert reply.status == 400, (body, reply)
        assert (await site.post("tokens", {"role": "user", "tenant": "nobody"})).status == 404
