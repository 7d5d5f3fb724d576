"""What is wrong with a request in its path, query, version, references, patch or ids is told; and nothing is stored."""

from typing import Any

import pytest

from support.api.site import JSON_PATCH, MERGE, STRATEGIC, Document, Site, allocation, nothing_stored, refused

pytestmark = pytest.mark.asyncio(loop_scope="module")


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
    assert hint == "Create it first, or name an existing one: bursar get priorityclasses,queues"
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
    for raw, status in (("labelSelector=%ff", 400), ("a=b&" * 100, 400), ("x=" + "y" * 20_000, 414)):
        reply = await site.get(f"/api/v1/nodes?{raw}")
        assert reply.status == status, raw[:20]
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
