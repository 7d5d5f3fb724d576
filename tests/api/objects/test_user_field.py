"""`status.user` selects what somebody submitted: in lists, tables and watches, never more than the caller may see."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from support.api.site import TABLE, Site, allocation
from support.runtime.runtime import bind, end

pytestmark = pytest.mark.asyncio(loop_scope="module")


class Team:
    """A tenant of two, each with a token, and its one namespace."""

    def __init__(self, name: str, ann: str, bob: str) -> None:
        self.name, self.ann, self.bob = name, ann, bob
        self.path = f"namespaces/{name}/allocations"

    def of(self, user: str) -> str:
        return f"status.user={self.name}/{user}"


async def team(site: Site) -> Team:
    name = await site.namespace()
    tokens = [await site.token("user", tenant=name, user=user) for user in ("ann", "bob")]
    return Team(name, *tokens)


async def submit(site: Site, path: str, name: str, token: str, **requests: Any) -> str:
    reply = await site.post(path, allocation(name, **(requests or {"cpu": 1})), token=token)
    assert reply.status == 201, reply
    return str(reply.version)


def job(name: str) -> dict[str, Any]:
    template = {"spec": {"resources": {"requests": {"cpu": "1"}}}}
    return {"metadata": {"name": name}, "spec": {"parallelism": 2, "completions": 2, "template": template}}


async def test_a_list_and_a_table_have_what_somebody_submitted(site: Site) -> None:
    lab = await team(site)
    await submit(site, lab.path, "a", lab.ann)
    await submit(site, lab.path, "b", lab.bob)
    await submit(site, lab.path, "c", site.admin)
    for token in (lab.ann, lab.bob, site.admin):
        assert (await site.get(lab.path, token=token, fieldSelector=lab.of("ann"))).names == ["a"]
    assert (await site.get(lab.path, fieldSelector="status.user=admin")).names == ["c"]
    assert (await site.get(lab.path, fieldSelector=lab.of("ann").replace("=", "!="))).names == ["b", "c"]
    assert (await site.get("allocations", fieldSelector=f"{lab.of('bob')},status.phase=Pending")).names == ["b"]
    assert (await site.get("allocations", fieldSelector=f"{lab.of('bob')},status.phase=Running")).names == []
    table = await site.get(lab.path, fieldSelector=lab.of("ann"), headers={"accept": TABLE})
    assert [row["cells"][0] for row in table.body["rows"]] == ["a"]


async def test_a_job_and_what_it_makes_are_its_submitters(site: Site) -> None:
    lab = await team(site)
    jobs = f"namespaces/{lab.name}/jobs"
    for name, token in (("train", lab.ann), ("other", lab.bob)):
        assert (await site.post(jobs, job(name), token=token)).status == 201
    assert (await site.get("jobs", fieldSelector=lab.of("ann"))).names == ["train"]
    made = (await site.get("allocations", fieldSelector=lab.of("ann"))).body["items"]
    assert [one["metadata"]["labels"]["bursar.io/job"] for one in made] == ["train", "train"]
    # What is changed of it later leaves it whose it is.
    assert (await site.patch(f"{jobs}/train", {"metadata": {"labels": {"a": "b"}}}, token=lab.bob)).status == 200
    assert (await site.get("jobs", fieldSelector=lab.of("ann"))).names == ["train"]
    assert (await site.post(f"{jobs}/train/cancel", {}, token=lab.ann)).status < 300
    assert (await site.get("jobs", fieldSelector=lab.of("ann"))).names == ["train"]


async def test_pages_of_what_somebody_submitted_are_full_and_miss_nothing(site: Site) -> None:
    lab = await team(site)
    for index in range(12):
        await submit(site, lab.path, f"job-{index:02}", lab.bob if index % 3 else lab.ann)
    pages: list[list[str]] = []
    following = ""
    while following or not pages:
        page = await site.get("allocations", fieldSelector=lab.of("bob"), limit=3, **{"continue": following})
        pages.append(page.names)
        following = page.body["metadata"].get("continue", "")
    assert [len(names) for names in pages] == [3, 3, 2]
    assert [name for names in pages for name in names] == [f"job-{index:02}" for index in range(12) if index % 3]


async def test_nobody_sees_more_by_it(site: Site) -> None:
    """A caller who names a user of another tenant gets the response for a missing user."""
    lab, other = await team(site), await team(site)
    version = await submit(site, lab.path, "secret", lab.ann)
    assert (await site.get("allocations", token=other.ann, fieldSelector=lab.of("ann"))).names == []
    async with watching(site, "allocations", other.ann, resourceVersion=version, fieldSelector=lab.of("ann")) as told:
        await submit(site, lab.path, "more", lab.ann)
        assert [one async for one in told] == []


async def test_a_watch_tells_when_somebodys_work_comes_into_it_and_leaves_it(site: Site) -> None:
    lab, worker = await team(site), site.name("worker")
    await site.post("nodes", {"metadata": {"name": worker}, "spec": {"capacity": {"cpu": "8", "memory": "8Gi"}}})
    version = (await site.get("allocations", limit=1)).version
    runtime = site.context.runtime
    placed = f"{lab.of('ann')},status.phase=Scheduled"
    async with (
        watching(site, "allocations", lab.bob, "9", resourceVersion=version, fieldSelector=placed) as starting,
        watching(site, "allocations", lab.bob, "9", resourceVersion=version, fieldSelector=lab.of("ann")) as own,
    ):
        for name, token in (("hers", lab.ann), ("his", lab.bob)):
            await submit(site, lab.path, name, token, cpu=1, memory="1Gi")
            await bind(runtime, lab.name, name, worker)
            await site.patch(f"{lab.path}/{name}", {"metadata": {"labels": {"a": "b"}}}, token=token)
            await end(runtime, lab.name, name)
            await site.delete(f"{lab.path}/{name}", token=token)
        assert await take(starting, 3) == [("ADDED", "hers"), ("MODIFIED", "hers"), ("DELETED", "hers")]
        assert await take(own, 5) == [("ADDED", "hers"), *[("MODIFIED", "hers")] * 3, ("DELETED", "hers")]


async def test_the_field_is_listed_where_another_is_refused(site: Site) -> None:
    for plural in ("allocations", "jobs"):
        refused = await site.get(plural, fieldSelector="status.username=ann")
        assert refused.status == 400
        assert "status.user," in f"{refused.message},"
    assert (await site.get("nodes", fieldSelector="status.user=ann")).status == 400


@asynccontextmanager
async def watching(
    site: Site, path: str, token: str, seconds: str = "1", **query: str
) -> AsyncIterator[AsyncIterator[tuple[str, str]]]:
    """What a watch tells, as (type, name); it ends by itself."""
    params = {"watch": "true", "timeoutSeconds": seconds, **query}
    headers = {"authorization": f"Bearer {token}"}
    async with site.http.stream("GET", f"{site.url}/api/v1/{path}", params=params, headers=headers) as answer:
        assert answer.status_code == 200, await answer.aread()
        yield _told(answer.aiter_lines())


async def _told(lines: AsyncIterator[str]) -> AsyncIterator[tuple[str, str]]:
    async for line in lines:
        if line.startswith("{"):
            event = json.loads(line)
            yield event["type"], event["object"]["metadata"]["name"]


async def take(events: AsyncIterator[tuple[str, str]], count: int) -> list[tuple[str, str]]:
    async with asyncio.timeout(20):
        return [await anext(events) for _ in range(count)]
