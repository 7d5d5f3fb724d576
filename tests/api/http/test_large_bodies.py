"""No body takes long to refuse: values are bounded, few are held against the schema, and long bodies have a thread."""

import json
import re
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from bursar.api.credit import credit as credit_module
from bursar.api.http import body as body_module
from bursar.api.http.context import BODY_BYTES_MAX
from bursar.wire.kinds.allocation import ALLOCATION
from bursar.wire.kinds.registry import KINDS
from bursar.wire.kinds.settings import SETTINGS
from bursar.wire.shared import faults
from bursar.wire.shared.bounds import require_unique_keys
from support.api.site import APPLY, JSON_PATCH, MERGE, STRATEGIC, Site, allocation, collection

pytestmark = pytest.mark.asyncio(loop_scope="module")

YAML = "application/yaml"
PROTOBUF = "application/vnd.kubernetes.protobuf"

# What stands before many small values, one of them, and what stands after them.
SHAPES: dict[str, tuple[str, str, str]] = {
    "amounts": ('{"metadata":{"name":"a"},"spec":{"resources":{"requests":{', '"%d":[]', "}}}}"),
    "amounts of a template": (
        '{"metadata":{"name":"a"},"spec":{"template":{"spec":{"resources":{"requests":{',
        '"%d":[]',
        "}}}}}}",
    ),
    "limits": ('{"metadata":{"name":"a"},"spec":{"limits":{', '"%d":{}', "}}}"),
    "labels": ('{"metadata":{"name":"a","labels":{', '"%d":"!"', '}},"spec":{}}'),
    "annotations": ('{"metadata":{"name":"a","annotations":{', '"%d":1', '}},"spec":{}}'),
    "unknown fields": ('{"metadata":{"name":"a"},', '"f%d":1', "}"),
    "unknown fields below": ('{"metadata":{"name":"a"},"spec":{', '"f%d":{}', "}}"),
    "tolerations": ('{"metadata":{"name":"a"},"spec":{"scheduling":{"tolerations":[', '{"key":1}', "]}}}"),
    "taints": ('{"metadata":{"name":"a"},"spec":{"taints":[', '{"key":"!"}', "]}}"),
    "owners": ('{"metadata":{"name":"a","ownerReferences":[', "{}", ']},"spec":{}}'),
    "items": ('{"items":[', "{}", "]}"),
    "events": ('{"events":[', "{}", "]}"),
    "a list": ("[", "[]", "]"),
    "operations": ("[", '{"op":"add"}', "]"),
}


def shaped(shape: str, count: int) -> bytes:
    begin, piece, end = SHAPES[shape]
    pieces = ",".join(piece % index if "%" in piece else piece for index in range(count))
    return f"{begin}{pieces}{end}".encode()


MADE = [kind for kind in KINDS if kind not in (ALLOCATION, SETTINGS)]


def requests(team: str) -> Iterator[tuple[str, str, str]]:
    """Routes of all sorts, and the media types that each takes."""
    yield from (("POST", f"namespaces/{team}/allocations", media) for media in ("application/json", YAML, PROTOBUF))
    yield from (("PATCH", f"tenants/{team}", media) for media in (MERGE, APPLY))
    yield from (("POST", path, "application/json") for path in ("usage", *(collection(kind, team) for kind in MADE)))
    yield "PUT", "settings/system", "application/json"


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many values were held against a schema, each time."""
    seen: list[int] = []
    compiled = faults._compiled

    class Watched:
        def __init__(self, validator: Any) -> None:
            self._validator = validator

        def iter_errors(self, document: Any) -> Any:
            seen.append(json.dumps(document).count(":") + json.dumps(document).count(",") + 1)
            return self._validator.iter_errors(document)

    def watched(kind_type: type) -> tuple[dict[str, Any], Any]:
        schema, validator = compiled(kind_type)
        return schema, Watched(validator)

    monkeypatch.setattr(faults, "_compiled", watched)
    return seen


@pytest.mark.parametrize("shape", SHAPES)
async def test_a_body_with_many_values_is_refused_and_few_are_compared(
    site: Site, compared: list[int], shape: str
) -> None:
    team = await site.namespace()
    for count in (600, 60_000):
        raw = shaped(shape, count)
        assert len(raw) <= BODY_BYTES_MAX
        for method, path, media in requests(team):
            reply = await site.ask(method, path, raw, media=media, dryRun="All")
            assert reply.status == 400, (method, path, media, reply)
    assert all(values <= 4 * faults.VALUES_COMPARED_MAX for values in compared)


async def test_a_body_with_too_many_values_is_told_how_many_there_may_be(site: Site) -> None:
    team = await site.namespace()
    reply = await site.post(f"namespaces/{team}/allocations", shaped("amounts", 100_000), dryRun="All")
    assert (reply.status, reply.message) == (400, "the body has more than 25000 values")
    assert "at most 25000 values" in reply.body["details"]["hint"]
    sound = allocation("a", cpu=1)
    sound["metadata"]["annotations"] = {"table": ",[{" * 20_000}
    assert (await site.post(f"namespaces/{team}/allocations", sound)).status == 201, "text has no values"


@pytest.mark.parametrize("text", ["x" * 1_400_000, "x " * 700_000], ids=["a word", "words"])
async def test_a_refusal_does_not_grow_with_what_it_quotes(site: Site, text: str) -> None:
    team = await site.namespace()
    bodies: list[tuple[str, Any]] = []
    for field in ("queue", "priorityClass", "ttl", "onNodeLost"):
        one = allocation("a", cpu=1)
        job = {"metadata": {"name": "a"}, "spec": {"template": {"spec": {**one["spec"], field: text}}}}
        one["spec"][field] = text
        bodies += [(f"namespaces/{team}/allocations", one), (f"namespaces/{team}/jobs", job)]
    named, limited = allocation(text, cpu=1), allocation("a", cpu=1)
    limited["spec"]["resources"]["requests"][text] = 1
    bodies += [(f"namespaces/{team}/allocations", one) for one in (named, limited)]
    bodies += [
        ("tenants", {"metadata": {"name": "a"}, "spec": spec})
        for spec in ({"parent": text}, {"tier": text}, {"limits": {text: 1}}, {text: 1})
    ]
    bodies += [("leases", {"request_id": "a", "account": text}), ("accounts", {"tenant": text})]
    for path, body in bodies:
        tried = {} if path in ("leases", "accounts") else {"dryRun": "All"}
        reply = await site.post(path, body, **tried)
        assert 400 <= reply.status < 500, reply
        assert len(json.dumps(reply.body)) < 16_384, (path, str(reply.body)[:1000])


async def test_json_that_says_it_is_yaml_is_bounded_too(site: Site) -> None:
    team = await site.namespace()
    reply = await site.post(f"namespaces/{team}/allocations", b"[" + b"1," * 700_000 + b"1]", media=YAML)
    assert reply.status == 400
    assert "20000 parts" in reply.message, "it was refused before it was built"


async def test_long_bodies_are_read_beside_the_loop(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    team = await site.namespace()
    readers: list[threading.Thread] = []
    for name in ("checked", "read_document"):
        own = getattr(body_module, name)

        def noted(*arguments: Any, own: Any = own) -> Any:
            readers.append(threading.current_thread())
            return own(*arguments)

        monkeypatch.setattr(body_module, name, noted)
    short = allocation("short", cpu=1)
    assert (await site.post(f"namespaces/{team}/allocations", short)).status == 201
    assert readers == [threading.main_thread()], "what is short and sound is not handed over"
    readers.clear()
    long = allocation("long", cpu=1)
    long["metadata"]["annotations"] = {"text": "x" * 100_000}
    assert (await site.post(f"namespaces/{team}/allocations", long)).status == 201
    assert (await site.post(f"namespaces/{team}/allocations", shaped("labels", 4_000))).status == 400
    text = "metadata: {name: yaml}\nspec: {resources: {requests: {cpu: 1}}}\n" + "# yaml\n" * 500
    assert (await site.post(f"namespaces/{team}/allocations", text.encode(), media=YAML)).status == 201
    assert readers
    assert readers.count(threading.main_thread()) <= 1, "only what was read from YAML is checked where it is used"


async def test_every_route_reads_long_bodies_beside_the_loop(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    readers: list[threading.Thread] = []
    plain = credit_module._plain

    def noted(raw: bytes, value: Any) -> None:
        readers.append(threading.current_thread())
        require_unique_keys(raw, value)

    def noted_plain(value: Any) -> Any:
        readers.append(threading.current_thread())
        return plain(value)

    monkeypatch.setattr(body_module, "require_unique_keys", noted)
    monkeypatch.setattr(credit_module, "_plain", noted_plain)
    twice = b'{"x":1,"x":2,"text":"%s"}' % (b"x" * body_module.INLINE_BYTES_MAX)
    asked = 0
    for path, item in (await site.get("/openapi.json")).body["paths"].items():
        for method in {"post", "put", "patch", "delete"} & item.keys() - (
            {"put"} if path.endswith("/stdin") else set()
        ):
            reply = await site.ask(method.upper(), re.sub(r"\{\w+\}", "absent", path), twice)
            assert (reply.status, "twice" in reply.message) == (400, True), (method, path, reply)
            asked += 1
    assert len(readers) == asked > 50
    for path in ("leases", "accounts", "prices"):
        reply = await site.post(path, {"text": "x" * body_module.INLINE_BYTES_MAX})
        assert reply.status == 400, reply
    assert len(readers) > asked + 3, "exact numbers are read from the same bytes"
    assert threading.main_thread() not in readers


@pytest.mark.parametrize(
    ("raw", "media"),
    [
        (b'{"metadata":{"name":"a"},"spec":{"resources":{"requests":{"cpu":"1","cpu":"2"}}}}', "application/json"),
        (b'{"metadata":{"name":"a"},"metadata":{"name":"b"},"spec":{}}', "application/json"),
        (b'{"metadata":{"name":"a"},"x":1,"x":2}', "application/json"),
        (b'{"metadata":{"name":"a"},"spec":{"x":1,"x":2}}', YAML),
        (b"metadata: {name: a}\nspec: {}\nspec: {}\n", YAML),
    ],
)
async def test_a_key_that_comes_twice_is_refused(site: Site, raw: bytes, media: str) -> None:
    team = await site.namespace()
    reply = await site.post(f"namespaces/{team}/allocations", raw, media=media)
    assert reply.status == 400
    assert "twice" in reply.message


@pytest.mark.parametrize("media", [MERGE, STRATEGIC, APPLY])
async def test_a_key_that_comes_twice_in_a_patch_is_refused(site: Site, media: str) -> None:
    team = await site.namespace()
    reply = await site.patch(f"tenants/{team}", b'{"spec":{"weight":1,"weight":2}}', media)
    assert (reply.status, "twice" in reply.message) == (400, True)


@pytest.mark.parametrize("text", ["!!map [a]", "!!seq {a: b}", "!!str [a]", "metadata: !!map [a]", "a: &x b\nc: *x"])
async def test_yaml_of_odd_shapes_is_refused(site: Site, text: str) -> None:
    for method, path, media in (("POST", "queues", YAML), ("PATCH", "tenants/default", APPLY)):
        reply = await site.ask(method, path, text.encode(), media=media)
        assert reply.status == 400, reply


async def test_a_patch_that_multiplies_values_is_refused(site: Site) -> None:
    team = await site.namespace()
    values = list(range(20_000))
    steps = [{"op": "add", "path": "/spec/x", "value": values}]
    steps += [{"op": "copy", "from": "/spec/x", "path": f"/spec/y{index}"} for index in range(50)]
    reply = await site.patch(f"tenants/{team}", steps, JSON_PATCH)
    assert (reply.status, "copies and moves more than" in reply.message) == (400, True), reply
    reply = await site.patch(f"tenants/{team}", steps[:3], JSON_PATCH)
    assert (reply.status, "more than 25000 values" in reply.message) == (400, True), reply
