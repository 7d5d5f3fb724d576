"""How watches live and end: what was dropped is said, who may not see any more is turned out, and none is for ever."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import httpx2
import pytest
from structlog.testing import capture_logs

import bursar
import bursar.api.http.context as house_module
import bursar.api.objects.watch as watch_module
from bursar.api.http import metrics
from bursar.api.http.app import App
from bursar.api.http.route import Call, Route, Stream
from bursar.api.site.routes import build_routes
from bursar.core.values.access import Identity, Role
from bursar.store.db.database import Unavailable
from bursar.store.objects import change as change_store
from bursar.store.objects import listing
from bursar.store.objects.change import Change
from bursar.store.objects.listing import Query
from bursar.wire.kinds.registry import BY_NAME
from support.api.site import TABLE, Document, Site, allocation
from support.api.watches import newest, take, told, watching
from support.runtime.runtime import bind, end

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def rest(events: AsyncIterator[Document]) -> list[Document]:
    async with asyncio.timeout(20):
        return [one async for one in events]


# What was dropped.


async def test_what_is_dropped_just_before_it_is_read_ends_the_watch_with_an_error(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    team = await site.namespace()
    path, version = f"namespaces/{team}/allocations", await newest(site)
    await site.post(path, allocation("lost", cpu=1))

    async def dropped(db: Any, *_: Any) -> list[Change]:
        await change_store.raise_floor(db, int(await newest(site)))
        return []

    monkeypatch.setattr(change_store, "load_between", dropped)
    async with watching(site, path, resourceVersion=version, timeoutSeconds="2") as events:
        (error,) = await rest(events)
    assert (error["type"], error["object"]["code"], error["object"]["reason"]) == ("ERROR", 410, "Expired")


# What goes wrong inside.


async def test_a_watch_ends_when_the_feed_fails_and_can_be_resumed(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    team = await site.namespace()
    path, version = f"namespaces/{team}/allocations", await newest(site)
    async with watching(site, path, resourceVersion=version) as events:
        with monkeypatch.context() as broken:
            broken.setattr(change_store, "load_since", lambda *_: 1 / 0)
            await site.post(path, allocation("meanwhile", cpu=1))
            assert await rest(events) == []
    async with watching(site, path, resourceVersion=version) as events:
        assert told(await take(events, 1)) == [("ADDED", "meanwhile")]


async def test_what_fails_in_a_stream_is_logged_with_the_requests_id(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    team = await site.namespace()
    path, version = f"namespaces/{team}/allocations", await newest(site)
    await site.post(path, allocation("one", cpu=1))
    monkeypatch.setattr(watch_module, "visibility", lambda *_: 1 / 0)
    with capture_logs() as lines:
        headers = {"x-request-id": "watch-life"}
        async with watching(site, path, headers=headers, resourceVersion=version) as events:
            assert await rest(events) == []
    (line,) = [one for one in lines if one["event"] == "stream_failed"]
    assert line["request_id"] == "watch-life"
    assert isinstance(line["exc_info"], ZeroDivisionError)


# Who may see.


@pytest.mark.parametrize("busy", [False, True])
async def test_a_watch_ends_soon_after_its_token_was_revoked(
    site: Site, monkeypatch: pytest.MonkeyPatch, busy: bool
) -> None:
    monkeypatch.setattr(watch_module, "KEEPALIVE_SECONDS", 0.1)
    team = await site.namespace()
    path = f"namespaces/{team}/allocations"
    made = await site.post("tokens", {"role": "viewer", "tenant": team, "user": "leaver"})
    token, token_id = made.body["status"]["token"], made.body["metadata"]["name"]
    async with watching(site, path, token, resourceVersion=await newest(site)) as events:
        assert (await site.delete(f"tokens/{token_id}")).status == 200
        writing = asyncio.create_task(_write(site, path) if busy else asyncio.sleep(0))
        *_, error = await rest(events)
        writing.cancel()
    assert (error["type"], error["object"]["code"], error["object"]["reason"]) == ("ERROR", 401, "Unauthorized")


async def _write(site: Site, path: str) -> None:
    for index in range(1000):
        await site.post(path, allocation(f"busy-{index}", cpu=1))


async def test_while_the_database_is_away_nobody_is_turned_out(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_module, "KEEPALIVE_SECONDS", 0.05)
    asked = asyncio.Semaphore(0)

    async def away(*_: Any) -> Identity:
        asked.release()
        raise Unavailable("gone fishing")

    team = await site.namespace()
    path = f"namespaces/{team}/allocations"
    async with watching(site, path, resourceVersion=await newest(site)) as events:
        with monkeypatch.context() as patched:
            patched.setattr(site.context.authenticator, "authenticate", away)
            async with asyncio.timeout(10):
                for _ in range(3):
                    await asked.acquire()
        await site.post(path, allocation("still-here", cpu=1))
        assert told(await take(events, 1)) == [("ADDED", "still-here")]


async def test_every_node_of_an_allocation_is_told(site: Site) -> None:
    team, names = await site.namespace(), [site.name("worker") for _ in range(3)]
    for name in names:
        await site.post("nodes", {"metadata": {"name": name}, "spec": {"capacity": {"cpu": "8"}}})
    tokens = [await site.token("node", node=name, single_use=False) for name in names]
    await site.post(f"namespaces/{team}/allocations", allocation("wide", spec={"nodes": 2}, cpu=1))
    await site.post(f"namespaces/{team}/allocations", allocation("other", cpu=1))
    version = await newest(site)
    async with AsyncExitStack() as open_:
        first, second, third = [
            await open_.enter_async_context(watching(site, "allocations", token, resourceVersion=version))
            for token in tokens
        ]
        await bind(site.context.runtime, team, "wide", *names[:2])
        await site.patch(f"namespaces/{team}/allocations/wide", {"metadata": {"labels": {"a": "b"}}})
        await end(site.context.runtime, team, "wide")
        await bind(site.context.runtime, team, "other", names[2])
        for events in (first, second):
            seen = await take(events, 3)
            assert told(seen) == [("ADDED", "wide"), ("MODIFIED", "wide"), ("DELETED", "wide")]
            assert seen[-1]["object"]["status"]["phase"] == "Succeeded"
        assert told(await take(third, 1)) == [("ADDED", "other")]


@pytest.mark.parametrize("accept", ["", TABLE])
async def test_what_moves_to_another_tenant_is_deleted_for_the_one_and_added_for_the_other(
    site: Site, accept: str
) -> None:
    old, new = await site.namespace(), await site.namespace()
    moving = await site.namespace(tenant=old, name=site.name("moving"))
    loser, winner = [await site.token("viewer", tenant=one) for one in (old, new)]
    version = await newest(site)
    label = {"metadata": {"labels": {"bursar.io/tenant": new, "secret": "of-the-new-tenant"}}}
    async with (
        watching(
            site, "namespaces", loser, headers={"accept": accept} if accept else {}, resourceVersion=version
        ) as left,
        watching(site, "namespaces", winner, resourceVersion=version) as right,
        watching(site, "namespaces", resourceVersion=version) as above,
    ):
        assert (await site.patch(f"namespaces/{moving}", label)).status == 200
        (gone,), (come,), (moved,) = await take(left, 1), await take(right, 1), await take(above, 1)
    assert (gone["type"], told([come]), told([moved])) == ("DELETED", [("ADDED", moving)], [("MODIFIED", moving)])
    assert moving in json.dumps(gone)
    assert "secret" not in json.dumps(gone)
    assert new not in json.dumps(gone)


async def test_the_end_of_what_a_selector_saw_is_told_even_if_it_ended_in_another_state(site: Site) -> None:
    """An allocation that is deleted while it runs leaves its node before it is gone."""
    team, worker = await site.namespace(), site.name("worker")
    path = f"namespaces/{team}/allocations"
    await site.post("nodes", {"metadata": {"name": worker}, "spec": {"capacity": {"cpu": "8"}}})
    await site.post(path, allocation("job", cpu=1))
    await bind(site.context.runtime, team, "job", worker)
    query = {"resourceVersion": await newest(site), "fieldSelector": f"spec.nodeName={worker}"}
    async with watching(site, path, **query) as events:
        await site.delete(f"{path}/job")
        await end(site.context.runtime, team, "job")
        assert told(await take(events, 2)) == [("MODIFIED", "job"), ("DELETED", "job")]


# What there is.


async def test_everything_is_read_in_pages_of_one_snapshot(site: Site) -> None:
    team = await site.namespace()
    path = f"namespaces/{team}/allocations"
    for index in range(5):
        await site.post(path, allocation(f"job-{index}", cpu=1))
    names, revisions = [], set()
    async with site.context.database.reader() as db:
        async for page in listing.load_all(db, Query("Allocation", team), page=2):
            names += [item.name for item in page.items]
            revisions.add(page.revision)
            await site.post(path, allocation(f"late-{len(names)}", cpu=1))
            await site.delete(f"{path}/job-4")
    assert names == [f"job-{index}" for index in range(5)]
    assert len(revisions) == 1


async def test_a_big_state_is_put_away_page_by_page_and_nothing_is_missing_after_it(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch_module, "STATE_PAGE", 3)
    monkeypatch.setattr(site.context.spools, "memory_each", 2000)
    team = await site.namespace()
    path = f"namespaces/{team}/allocations"
    names = [f"job-{index:02}" for index in range(20)]
    for name in names:
        await site.post(path, allocation(name, cpu=1))
    async with watching(site, path, sendInitialEvents="true") as events:
        writing = asyncio.create_task(site.post(path, allocation("later", cpu=1)))
        seen = await take(events, 22)
        await writing
    *state, last = [one for one in seen if one["type"] != "BOOKMARK"]
    assert sorted(told([*state, last])) == sorted(("ADDED", name) for name in [*names, "later"])


async def test_those_who_list_everything_wait_for_each_other(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    load_page, at_once, most = listing.load_page, 0, 0

    async def slow(db: Any, query: Query) -> Any:
        nonlocal at_once, most
        at_once, most = at_once + 1, max(most, at_once + 1)
        await asyncio.sleep(0.05)
        at_once -= 1
        return await load_page(db, query)

    monkeypatch.setattr(listing, "load_page", slow)
    teams = [await site.namespace() for _ in range(4)]
    tokens = [await site.token("viewer", tenant=team) for team in teams]
    most = 0
    replies = await asyncio.gather(*(site.get("queues", token=token) for token in tokens for _ in range(3)))
    assert {one.status for one in replies} == {200}
    assert most == house_module.LISTS_MAX == 4
    most = 0
    replies = await asyncio.gather(*(site.get("queues", token=tokens[0]) for _ in range(6)))
    assert {one.status for one in replies} == {200}
    assert most == house_module.LISTS_EACH_MAX == 2, "the seats of others stay free"


# How many there may be.


async def test_a_tenant_has_so_many_watches_and_the_process_too(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    team, version = await site.namespace(), await newest(site)
    token, path = await site.token("viewer", tenant=team), f"namespaces/{team}/allocations"
    monkeypatch.setattr(watch_module, "WATCHES_PER_TENANT_MAX", 2)
    before = metrics.WATCHERS._value.get()
    query = {"watch": "true", "resourceVersion": version, "timeoutSeconds": "1"}
    async with watching(site, path, token), watching(site, path, token, resourceVersion=version):
        reply = await site.get(path, token=token, **query)
        assert (reply.status, reply.headers["retry-after"]) == (429, "10")
        assert (await site.get(path, **query)).status == 200, "others have seats of their own"
        monkeypatch.setattr(watch_module, "WATCHES_MAX", 2)
        reply = await site.get(path, **query)
        assert (reply.status, reply.headers["retry-after"]) == (503, "10")
    async with asyncio.timeout(10):
        while site.context.watches[f"tenant:{team}"]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert (await site.get(path, token=token, **query)).status == 200
    assert metrics.WATCHERS._value.get() == before


async def test_a_watch_that_is_closed_before_it_began_gives_its_seat_back(site: Site) -> None:
    kind = BY_NAME["Queue"]
    route = Route("GET", "/api/v1/queues", watch_module.watch, "", kind=kind)  # type: ignore[arg-type]
    query = {"watch": "true", "resourceVersion": await newest(site)}
    call = Call(site.context, route, Identity("nobody", Role.VIEWER, "gone"), "", {}, query, {})
    stream = await watch_module.watch(call, Query("Queue"))
    assert isinstance(stream, Stream)
    assert site.context.watches["tenant:gone"] == 1
    followers = site.context.feed.followers
    await stream.pieces.aclose()
    assert "tenant:gone" not in site.context.watches
    assert site.context.feed.followers == followers - 1


async def test_who_comes_again_while_the_process_stops_does_not_hold_it_up(site: Site) -> None:
    app = App(site.context, build_routes(bursar.__version__))
    app.end_streams()
    headers = {"authorization": f"Bearer {site.admin}"}
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url="http://door") as http:
        async with asyncio.timeout(5):
            answer = await http.get("/api/v1/allocations", params={"watch": "true"}, headers=headers)
    assert (answer.status_code, answer.text) == (200, "")


# Whether it is ready.


async def test_however_many_ask_whether_it_is_ready_the_database_is_asked_once(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, find_fault = 0, house_module.ApiContext._find_fault

    async def counted(self: Any) -> str:
        nonlocal asked
        asked += 1
        return await find_fault(self)

    monkeypatch.setattr(house_module, "READY_AGE_SECONDS_MAX", 30.0)
    monkeypatch.setattr(house_module.ApiContext, "_find_fault", counted)
    site.context._fault_read_at = -1e9
    replies = await asyncio.gather(*(site.get("/readyz") for _ in range(20)))
    assert {(one.status, one.body) for one in replies} == {(200, "ok")}
    assert asked == 1
