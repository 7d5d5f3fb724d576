"""What is wrong with a body is told, all of it, with the right status; and nothing of it is stored."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from support.api.site import APPLY, JSON_PATCH, MERGE, STRATEGIC, Document, Site, allocation, nothing_stored, refused

pytestmark = pytest.mark.asyncio(loop_scope="module")


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


async def test_wrong_types_hide_no_other_faults(site: Site) -> None:
    body = {
        "metadata": {"name": "Not_A_Name", "labels": {"-bad": "x"}},
        "spec": {
            "nodes": "2",
            "priority": 1.0,
            "ttl": "soon",
            "colour": "red",
            "resources": {"requests": {"cpu": "x", "memory": []}},
            "scheduling": {"tolerations": [{"key": "a", "operator": "Like"}, {"key": 7}]},
        },
    }
    reply = await refused(site, body)
    assert {one["field"] for one in reply.body["details"]["causes"]} == {
        "metadata.name",
        "metadata.labels",
        "spec.nodes",
        "spec.priority",
        "spec.ttl",
        "spec.colour",
        "spec.resources.requests[cpu]",
        "spec.resources.requests.memory",
        "spec.scheduling.tolerations[0].operator",
        "spec.scheduling.tolerations[1].key",
    }
    assert "spec.priority: expected int, got float" in reply.message


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
