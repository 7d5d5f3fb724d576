"""Watches: every change once and in order, however often a watcher leaves and comes back; or 410, and it lists anew."""

import asyncio
import random
import socket
import subprocess
from contextlib import contextmanager
from typing import Any

import pytest

import bursar.api.objects.watch as watch_module
import bursar.ops.runtime.feed as feed_module
from bursar.api.http import metrics
from bursar.ops.runtime.feed import Feed
from bursar.store.db.database import Database
from bursar.store.objects import change as change_store
from support.api.site import Site, allocation, eventually, opened_site
from support.api.watches import newest, revision, take, told, watching
from support.process.server import AS_WE_ARE, BURSAR, free_port

pytestmark = pytest.mark.asyncio(loop_scope="module")


# Order and completeness.


async def test_watchers_that_leave_and_resume_see_every_change_once_and_in_order(site: Site) -> None:
    """Writers create, label and delete; watchers hang up at random and come back with the last revision they saw."""
    team = await site.namespace()
    path, dice = f"namespaces/{team}/allocations", random.Random(7)
    start = int(await newest(site))

    async def write(writer: int) -> None:
        for index in range(20):
            name = f"job-{writer}-{index}"
            await site.post(path, allocation(name, cpu=1))
            await site.patch(f"{path}/{name}", {"metadata": {"labels": {"round": str(index)}}})
            if index % 2:
                await site.delete(f"{path}/{name}")

    async def follow(seed: int) -> list[tuple[int, str, str]]:
        own, seen, position, name = random.Random(seed), [], start, ""
        headers = {"accept": "text/event-stream"} if seed % 2 else {}
        while name != "last":
            stay = own.randint(1, 30)
            query = {"resourceVersion": str(position)}
            async with watching(site, path, headers=headers, **query) as events, asyncio.timeout(30):
                while stay and name != "last":
                    event = await anext(events)
                    position, name = revision(event), event["object"]["metadata"]["name"]
                    seen.append((position, event["type"], name))
                    stay -= 1
        return seen

    watchers = [asyncio.create_task(follow(dice.randrange(1000) * 2 + index % 2)) for index in range(6)]
    await asyncio.gather(*(write(index) for index in range(4)))
    await site.post(path, allocation("last", cpu=1))
    async with site.context.database.reader() as db:
        rows = await db.fetch(
            "SELECT revision, type, name FROM change WHERE kind = 'Allocation' AND namespace = $1 ORDER BY revision",
            team,
        )
    expected = [(row["revision"], row["type"], row["name"]) for row in rows]
    assert len(expected) == 4 * (20 + 20 + 10) + 1
    for seen in await asyncio.gather(*watchers):
        assert seen == expected


async def test_a_watch_from_zero_tells_what_there_is_and_goes_on(site: Site) -> None:
    team = await site.namespace()
    path = f"namespaces/{team}/allocations"
    await site.post(path, allocation("a", cpu=1))
    await site.post(path, allocation("b", cpu=1))
    async with watching(site, path) as events:
        assert told(await take(events, 2)) == [("ADDED", "a"), ("ADDED", "b")]
        await site.delete(f"{path}/a")
        assert told(await take(events, 1)) == [("DELETED", "a")]


async def test_a_list_and_the_watch_after_it_have_no_gap(site: Site) -> None:
    team = await site.namespace()
    path = f"namespaces/{team}/allocations"

    async def write() -> None:
        for index in range(60):
            await site.post(path, allocation(f"job-{index:02}", cpu=1))

    async def list_then_watch() -> list[str]:
        listed = await site.get(path)
        names = listed.names
        async with watching(site, path, resourceVersion=listed.version) as events, asyncio.timeout(20):
            while len(names) < 60:
                event = await anext(events)
                assert event["type"] == "ADDED"
                names.append(event["object"]["metadata"]["name"])
        return names

    results = await asyncio.gather(write(), *(list_then_watch() for _ in range(8)))
    for names in results[1:]:
        assert names == [f"job-{index:02}" for index in range(60)]


async def test_the_events_of_a_feed_that_slept_are_not_lost(site: Site) -> None:
    """A watcher that is alone comes and goes; between its visits nobody reads the feed."""
    team = await site.namespace()
    path, version = f"namespaces/{team}/allocations", await newest(site)
    for index in range(5):
        await site.post(path, allocation(f"away-{index}", cpu=1))
        async with watching(site, path, resourceVersion=version) as events:
            await site.post(path, allocation(f"here-{index}", cpu=1))
            seen = await take(events, 2)
            assert told(seen) == [("ADDED", f"away-{index}"), ("ADDED", f"here-{index}")]
            version = str(revision(seen[-1]))


# The feed itself.


class SlowToLeave:
    """A connection that takes its time to close."""

    def __init__(self, inner: Any, closing: asyncio.Event, may_close: asyncio.Event) -> None:
        self._inner, self._closing, self._may_close = inner, closing, may_close

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def close(self) -> None:
        self._closing.set()
        await self._may_close.wait()
        await self._inner.close()


async def test_a_follower_that_comes_while_the_feed_lies_down_is_served(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = await Database.open(site.context.database.url)
    connected, closing, may_close = asyncio.Event(), asyncio.Event(), asyncio.Event()
    connect = database.connect

    async def slow_connect() -> Any:
        connected.set()
        return SlowToLeave(await connect(), closing, may_close)

    monkeypatch.setattr(database, "connect", slow_connect)
    feed = Feed(database)
    first = await feed.follow("Tenant")
    async with asyncio.timeout(10):
        await connected.wait()
        feed.leave(first)
        await closing.wait()
        follower = await feed.follow("Tenant")
        may_close.set()
        name = site.name("late")
        await site.post("tenants", {"metadata": {"name": name}})
        fed: list[Any] = []
        while not fed:
            fed = await follower.wait(0.2)
    assert fed[0].change.key.name == name
    feed.leave(follower)
    await feed.close()
    await database.close()


async def test_those_who_wake_the_feed_together_all_hear_what_came_between(site: Site) -> None:
    """The second reader of the feed's position must not move it past the revision that the first one waits for."""
    database = await Database.open(site.context.database.url)
    for _ in range(10):
        feed, name = Feed(database), site.name("between")
        create = site.post("tenants", {"metadata": {"name": name}})
        creating = asyncio.create_task(create)
        followers = await asyncio.gather(*(feed.follow("Tenant") for _ in range(4)))
        created = await creating
        for follower in followers:
            if follower.after < int(created.version):
                async with asyncio.timeout(10):
                    fed = await follower.wait(10)
                assert [one.change.key.name for one in fed] == [name]
            feed.leave(follower)
        await feed.close()
    await database.close()


# 410.


async def test_a_future_revision_is_gone_at_once(site: Site) -> None:
    reply = await site.get("allocations", watch="true", resourceVersion=str(int(await newest(site)) + 1000))
    assert (reply.status, reply.body["reason"]) == (410, "Expired")
    sse = {"accept": "text/event-stream"}
    assert (await site.get("allocations", watch="true", resourceVersion="999999999", headers=sse)).status == 410


async def test_a_compacted_revision_is_gone_at_once_and_one_above_the_floor_is_not(site: Site) -> None:
    team = await site.namespace()
    path = f"namespaces/{team}/allocations"
    await site.post(path, allocation("old", cpu=1))
    before = await newest(site)
    await site.post(path, allocation("new", cpu=1))
    floor = int(await newest(site))
    async with site.context.database.reader() as db:
        await change_store.raise_floor(db, floor)
    for version in (before, "1"):
        reply = await site.get(path, watch="true", resourceVersion=version)
        assert (reply.status, reply.body["reason"]) == (410, "Expired")
        assert "List again" in reply.body["details"]["hint"]
    async with watching(site, path, resourceVersion=str(floor)) as events:
        await site.post(path, allocation("newer", cpu=1))
        assert told(await take(events, 1)) == [("ADDED", "newer")]


async def test_what_is_compacted_while_a_watch_catches_up_ends_it_with_an_error(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    team = await site.namespace()
    path, version = f"namespaces/{team}/allocations", await newest(site)
    for index in range(6):
        await site.post(path, allocation(f"job-{index}", cpu=1))
    load_between, pages = change_store.load_between, iter(range(9))

    async def compacted_after_the_first_page(db: Any, *arguments: Any) -> Any:
        if next(pages):
            await change_store.raise_floor(db, int(await newest(site)))
        return await load_between(db, *arguments)

    monkeypatch.setattr(watch_module, "CATCH_UP", 2)
    monkeypatch.setattr(change_store, "load_between", compacted_after_the_first_page)
    async with watching(site, path, resourceVersion=version) as events, asyncio.timeout(10):
        seen = [one async for one in events]
    assert told(seen[:-1]) == [("ADDED", "job-0"), ("ADDED", "job-1")], "what was read in time is told"
    assert seen[-1]["type"] == "ERROR"
    assert (seen[-1]["object"]["code"], seen[-1]["object"]["reason"]) == (410, "Expired")


# Slow watchers.


async def test_a_watcher_that_does_not_read_is_let_go_and_costs_a_bounded_queue(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed_module, "QUEUE_MAX", 20)
    name, host, port = site.name("loud"), *site.url.removeprefix("http://").split(":")
    await site.post("tenants", {"metadata": {"name": name}})
    version, let_go = await newest(site), metrics.WATCHERS_LET_GO._value.get()
    with socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(deaf, (host, int(port)))
        query = f"watch=true&resourceVersion={version}&fieldSelector=metadata.name%3D{name}"
        request = f"GET /api/v1/tenants?{query} HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {site.admin}\r\n\r\n"
        await loop.sock_sendall(deaf, request.encode())
        head = await loop.sock_recv(deaf, 64)
        assert head.startswith(b"HTTP/1.1 200")
        (follower,) = [one for one in site.context.feed._followers["Tenant"] if one.after >= int(version)]
        longest = 0
        for index in range(80):  # 16 MB, more than the sockets between us hold
            note = {"metadata": {"annotations": {"note": f"{index}" + "x" * 200_000}}}
            assert (await site.patch(f"tenants/{name}", note)).status == 200
            longest = max(longest, len(follower._queue))
            if follower.lagging:
                break
        assert follower.lagging
        assert longest <= 20
        assert len(follower._queue) == 0, "what it will never read is not kept"
        read = 0
        async with asyncio.timeout(20):
            while piece := await loop.sock_recv(deaf, 1 << 20):
                read += len(piece)
        assert read > 0, "what was on its way still arrives, and then the connection ends"
    assert metrics.WATCHERS_LET_GO._value.get() == let_go + 1
    assert follower not in site.context.feed._followers["Tenant"]


async def test_watchers_that_hang_up_leave_nothing_behind(site: Site) -> None:
    version = await newest(site)
    for _ in range(10):
        async with watching(site, "queues", resourceVersion=version):
            pass

    async def nobody_left() -> bool:
        return not site.context.feed._followers.get("Queue")

    await eventually(nobody_left)


# Several processes.


async def test_a_tenants_admin_hears_of_a_tenant_that_was_born_through_another_process(site: Site) -> None:
    """The watching process wrote nothing itself: it must learn of the new tenant from the database."""
    parent = await site.namespace()
    boss = await site.token("tenant-admin", tenant=parent)
    async with opened_site(site.context.database.url) as second:
        version = (await second.get("allocations", token=boss)).version
        async with watching(second, "allocations", token=boss, resourceVersion=version) as events:
            child = site.name("child")
            await site.post("tenants", {"metadata": {"name": child}, "spec": {"parent": parent}})
            await site.namespace(tenant=child, name=child)
            await site.post(f"namespaces/{child}/allocations", allocation("first", cpu=1))
            assert told(await take(events, 1, seconds=10)) == [("ADDED", "first")]


@contextmanager
def _api_process(database_url: str) -> Any:
    port = free_port()
    command = [str(BURSAR), "api", "--http", f"127.0.0.1:{port}", "--database-url", database_url, *AS_WE_ARE]
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        try:
            yield process, f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(20)


async def test_a_watch_resumes_through_another_api_process(site: Site) -> None:
    team = await site.namespace()
    path, version = f"namespaces/{team}/allocations", await newest(site)
    with _api_process(site.context.database.url) as (process, url):
        assert await asyncio.to_thread(process.stdout.readline) == b"ready\n"

        async def is_ready() -> bool:
            return (await site.http.get(f"{url}/readyz")).status_code == 200

        await eventually(is_ready)
        async with watching(site, path, url=url, resourceVersion=version) as there:
            await site.post(path, allocation("through-one", cpu=1))
            seen = await take(there, 1)
        assert told(seen) == [("ADDED", "through-one")]
        answer = await site.http.post(
            f"{url}/api/v1/{path}",
            json=allocation("through-two", cpu=1),
            headers={"authorization": f"Bearer {site.admin}"},
        )
        assert answer.status_code == 201
        async with watching(site, path, resourceVersion=str(revision(seen[-1]))) as here:
            assert told(await take(here, 1)) == [("ADDED", "through-two")]
