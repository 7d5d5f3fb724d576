"""Standard input through the API: by who submitted the work, once, and kept from everybody else."""

import asyncio

import pytest

from bursar.core.objects.allocation import Phase
from bursar.store.objects import stdin as store
from bursar.wire.kinds.allocation import STDIN_BYTES_MAX
from support.api.site import Site, node
from support.runtime.runtime import bind, end

pytestmark = pytest.mark.asyncio(loop_scope="module")

BYTES = "application/octet-stream"
READS = {"resources": {"requests": {"cpu": "1"}}, "command": ["cat"], "stdin": True}


async def reader(site: Site, where: str, name: str = "a", *, token: str | None = None, **spec: object) -> str:
    body = {"metadata": {"name": name}, "spec": {**READS, **spec}}
    reply = await site.post(f"namespaces/{where}/allocations", body, token=token)
    assert reply.status == 201, reply
    return f"namespaces/{where}/allocations/{name}/stdin"


async def test_it_is_sent_once_and_the_first_wins(site: Site) -> None:
    path = await reader(site, await site.namespace())
    dry = await site.put(path, b"x", media=BYTES, dryRun="All")
    assert (dry.status, dry.body) == (200, {"bytes": 1})
    replies = await asyncio.gather(*(site.put(path, b"%d" % one, media=BYTES) for one in range(5)))
    assert sorted(one.status for one in replies) == [200, 409, 409, 409, 409]
    assert (await site.put(path, b"x", media=BYTES, dryRun="All")).status == 409


async def test_only_who_submitted_it_or_an_admin_sends_it(site: Site) -> None:
    where = await site.namespace()
    ann, bob, boss = [
        await site.token(role, tenant=where, user=user)
        for role, user in (("user", "ann"), ("user", "bob"), ("tenant-admin", "boss"))
    ]
    path = await reader(site, where, token=ann)
    assert (await site.put(path, b"x", media=BYTES, token=bob)).status == 403
    stranger = await site.token("user", tenant=await site.namespace(), user="eve")
    assert (await site.put(path, b"x", media=BYTES, token=stranger)).status == 404
    assert (await site.put(path, b"x", media=BYTES, token=ann)).status == 200
    other = await reader(site, where, "b", token=ann)
    assert (await site.put(other, b"x", media=BYTES, token=boss)).status == 200


async def test_it_is_shown_nowhere(site: Site) -> None:
    where = await site.namespace()
    path = await reader(site, where)
    await site.put(path, b"hush-hush", media=BYTES)
    shown = [
        await site.get(f"namespaces/{where}/allocations/a"),
        await site.get(f"namespaces/{where}/allocations"),
        await site.get(f"namespaces/{where}/events"),
        await site.get(path),
    ]
    assert not any("hush-hush" in str(one.body) for one in shown)
    assert shown[-1].status == 405


async def test_what_is_not_read_or_is_too_much_is_refused(site: Site) -> None:
    where = await site.namespace()
    assert (await site.put(await reader(site, where, stdin=False), b"x", media=BYTES)).status == 409
    path, most = await reader(site, where, "b"), b"[" * STDIN_BYTES_MAX
    assert (await site.put(path, most + b"[", media=BYTES)).status == 413
    assert (await site.put(path, most, media=BYTES)).status == 200


async def test_what_has_ended_reads_no_more_and_leaves_nothing(site: Site) -> None:
    where = await site.namespace()
    path = await reader(site, where)
    await site.put(path, b"x", media=BYTES)
    on = (await node(site))["metadata"]["name"]
    await bind(site.context.runtime, where, "a", on)
    await end(site.context.runtime, where, "a", Phase.SUCCEEDED)
    assert (await site.put(path, b"x", media=BYTES)).status == 409
    async with site.context.database.reader() as db:
        await store.forget(db)
        uid = (await site.get(f"namespaces/{where}/allocations/a")).body["metadata"]["uid"]
        assert not await store.is_there(db, uid)


async def test_jobs_make_nothing_that_reads(site: Site) -> None:
    where = await site.namespace()
    body = {"metadata": {"name": "j"}, "spec": {"template": {"spec": READS}}}
    assert (await site.post(f"namespaces/{where}/jobs", body)).status == 400
