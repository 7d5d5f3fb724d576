"""What a watch shows: its forms, what selectors leave of it, bookmarks and initial events."""

import asyncio

import pytest

import bursar.api.objects.watch as watch_module
from support.api.site import TABLE, Site, allocation
from support.api.watches import newest, revision, take, told, watching

pytestmark = pytest.mark.asyncio(loop_scope="module")


# Forms.


async def test_server_sent_events_carry_ids_to_resume_from(site: Site) -> None:
    team = await site.namespace()
    path, version = f"namespaces/{team}/allocations", await newest(site)
    sse = {"accept": "text/event-stream"}
    for index in range(4):
        await site.post(path, allocation(f"job-{index}", cpu=1))
    async with watching(site, path, headers=sse, resourceVersion=version) as events:
        first = await take(events, 2)
    assert told(first) == [("ADDED", "job-0"), ("ADDED", "job-1")]
    assert all(one["id"] == one["object"]["metadata"]["resourceVersion"] for one in first)
    async with watching(site, path, headers={**sse, "last-event-id": first[-1]["id"]}) as events:
        assert told(await take(events, 2)) == [("ADDED", "job-2"), ("ADDED", "job-3")]


async def test_the_media_type_is_that_of_the_form(site: Site) -> None:
    headers = {"authorization": f"Bearer {site.admin}"}
    for accept, media in (
        ("text/event-stream", "text/event-stream"),
        ("application/json", "application/json"),
        (TABLE, "application/json"),
    ):
        params = {"watch": "1", "timeoutSeconds": "1"}
        url = f"{site.url}/api/v1/queues"
        async with site.http.stream("GET", url, params=params, headers={**headers, "accept": accept}) as answer:
            assert answer.headers["content-type"].startswith(media)
            assert answer.headers["cache-control"] == "no-cache"


async def test_the_events_of_a_table_watch_are_tables(site: Site) -> None:
    team = await site.namespace()
    path = f"namespaces/{team}/allocations"
    async with watching(site, path, headers={"accept": TABLE}, resourceVersion=await newest(site)) as events:
        await site.post(path, allocation("one", gpu=1))
        await site.post(path, allocation("two", gpu=1))
        first, second = await take(events, 2)
    assert first["object"]["kind"] == "Table"
    assert first["object"]["columnDefinitions"][0]["name"] == "Name"
    assert second["object"]["columnDefinitions"] is None, "columns are said once"
    assert second["object"]["rows"][0]["cells"][0] == "two"


async def test_a_watch_ends_at_its_timeout(site: Site) -> None:
    async with watching(site, "queues", resourceVersion=await newest(site), timeoutSeconds="1") as events:
        async with asyncio.timeout(10):
            assert [one async for one in events] == []


# Selectors.


async def test_leaving_a_selector_is_deleted_and_entering_it_is_added(site: Site) -> None:
    team = await site.namespace()
    path = f"namespaces/{team}/allocations"
    await site.post(path, allocation("outside", labels={"tier": "silver"}, cpu=1))
    await site.post(path, allocation("inside", labels={"tier": "gold"}, cpu=1))
    async with watching(
        site, path, resourceVersion=await newest(site), labelSelector="tier in (gold,platinum)"
    ) as events:
        for name, tier in (("outside", "gold"), ("outside", "platinum"), ("inside", "bronze"), ("inside", "tin")):
            await site.patch(f"{path}/{name}", {"metadata": {"labels": {"tier": tier}}})
        await site.delete(f"{path}/inside")
        await site.delete(f"{path}/outside")
        assert told(await take(events, 4)) == [
            ("ADDED", "outside"),
            ("MODIFIED", "outside"),
            ("DELETED", "inside"),
            ("DELETED", "outside"),
        ]


async def test_a_field_selector_follows_the_phase(site: Site) -> None:
    team, worker = await site.namespace(), site.name("worker")
    await site.post("nodes", {"metadata": {"name": worker}, "spec": {"capacity": {"cpu": "8"}}})
    version = await newest(site)
    ready = {"resourceVersion": version, "fieldSelector": f"metadata.name={worker},status.phase=Ready"}
    async with watching(site, "nodes", **ready) as events:
        await site.post("nodes", {"metadata": {"name": f"{worker}-x"}, "spec": {"capacity": {"cpu": "8"}}})
        await site.patch(f"nodes/{worker}/status", {"status": {"phase": "NotReady"}})
        await site.patch(f"nodes/{worker}/status", {"status": {"phase": "Ready"}})
        assert told(await take(events, 2)) == [("DELETED", worker), ("ADDED", worker)]
    assert team


async def test_a_watch_of_one_namespace_hears_nothing_of_another(site: Site) -> None:
    here, there = await site.namespace(), await site.namespace()
    version = await newest(site)
    async with watching(site, f"namespaces/{here}/allocations", resourceVersion=version) as events:
        await site.post(f"namespaces/{there}/allocations", allocation("x", cpu=1))
        await site.post(f"namespaces/{here}/allocations", allocation("y", cpu=1))
        assert told(await take(events, 1)) == [("ADDED", "y")]
    async with watching(site, "allocations", resourceVersion=version) as events:
        assert told(await take(events, 2)) == [("ADDED", "x"), ("ADDED", "y")]


# Bookmarks and initial events.


async def test_a_quiet_watch_is_given_bookmarks_when_it_asks(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_module, "BOOKMARK_SECONDS", 0.05)
    monkeypatch.setattr(watch_module, "KEEPALIVE_SECONDS", 0.05)
    team = await site.namespace()
    version = await newest(site)
    query = {"resourceVersion": version, "allowWatchBookmarks": "true"}
    async with watching(site, f"namespaces/{team}/allocations", **query) as events:
        await site.post("tenants", {"metadata": {"name": site.name("other")}})
        async with asyncio.timeout(10):
            while True:
                event = await anext(events)
                assert event["type"] == "BOOKMARK"
                assert event["object"]["kind"] == "Allocation"
                if revision(event) > int(version):
                    break
    async with watching(site, f"namespaces/{team}/allocations", resourceVersion=str(revision(event))) as events:
        await site.post(f"namespaces/{team}/allocations", allocation("after", cpu=1))
        assert told(await take(events, 1)) == [("ADDED", "after")]


async def test_no_bookmarks_come_unasked_and_sse_is_kept_alive_by_comments(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch_module, "BOOKMARK_SECONDS", 0.02)
    monkeypatch.setattr(watch_module, "KEEPALIVE_SECONDS", 0.02)
    params = {"watch": "true", "resourceVersion": await newest(site), "timeoutSeconds": "1"}
    for accept in ("application/json", "text/event-stream"):
        headers = {"authorization": f"Bearer {site.admin}", "accept": accept}
        answer = await site.http.get(f"{site.url}/api/v1/queues", params=params, headers=headers)
        lines = {line for line in answer.text.splitlines() if line}
        assert lines == (set() if accept == "application/json" else {": still here"})


async def test_initial_events_end_with_a_marked_bookmark(site: Site) -> None:
    team = await site.namespace()
    path = f"namespaces/{team}/allocations"
    await site.post(path, allocation("a", cpu=1))
    query = {"sendInitialEvents": "true", "resourceVersionMatch": "NotOlderThan", "allowWatchBookmarks": "true"}
    async with watching(site, path, **query) as events:
        added, mark = await take(events, 2)
        assert told([added]) == [("ADDED", "a")]
        assert mark["type"] == "BOOKMARK"
        assert mark["object"]["metadata"]["annotations"] == {"k8s.io/initial-events-end": "true"}
        await site.post(path, allocation("b", cpu=1))
        (after,) = await take(events, 1)
        assert told([after]) == [("ADDED", "b")]
        assert revision(after) > revision(mark) >= revision(added)
