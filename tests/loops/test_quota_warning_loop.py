"""Watching over limits: from charges that cross a mark to what people are told, and what is looked at."""

import asyncio
from typing import Any

import msgspec
import pytest

from bursar.commands.quota.warn import tenant_key
from bursar.core.objects.object import Stored
from bursar.loops import quota_warning
from bursar.loops.quota_warning import Reviewed, review
from bursar.ops.objects import object as object_ops
from bursar.ops.runtime.runtime import Runtime
from bursar.store.quota import quota as quota_store
from support.approval.requests import claim
from support.runtime.runtime import change, code, create, delete, namespace, tenant
from support.scheduling.schedulers import term


@pytest.fixture
async def acme(runtime: Runtime) -> Runtime:
    await tenant(runtime, "acme", limits={"clusters": 10, "hosts": 10})
    await namespace(runtime, "acme", "acme")
    return runtime


async def status(runtime: Runtime, name: str = "acme") -> dict[str, Any]:
    found = await object_ops.get(runtime, tenant_key(name))
    assert isinstance(found, Stored)
    decoded: dict[str, Any] = msgspec.json.decode(found.status)
    return {**decoded, "field": found.fields.get("status.quota", "")}


async def notices(runtime: Runtime) -> list[tuple[str, str, float]]:
    async with runtime.database.reader() as db:
        rows = await db.fetch("SELECT tenant, type, data FROM notice ORDER BY id")
    data = [msgspec.json.decode(row["data"]) for row in rows]
    return [(row["tenant"], one["dimension"], one["threshold"]) for row, one in zip(rows, data, strict=True)
            if row["type"] == "quota.warning"]  # fmt: skip


async def test_each_mark_is_reported_once_and_withdrawn_below(acme: Runtime) -> None:
    last = Reviewed()
    await claim(acme, "acme", "a", clusters=7)
    assert await review(acme, last) == 0
    await claim(acme, "acme", "b", clusters=1)
    assert (await review(acme, last), await review(acme, last)) == (1, 0)
    told = await status(acme)
    assert (told["quotaWarnings"], told["field"]) == ({"clusters": 80}, "Warning")
    assert told["conditions"][0]["message"] == "80 % of the limit on max_clusters is used: 8 of 10"
    assert (told["conditions"][0]["type"], told["conditions"][0]["status"]) == ("QuotaWarning", "True")
    await claim(acme, "acme", "c", clusters=2)
    assert await review(acme, last) == 1
    assert await notices(acme) == [("acme", "clusters", 0.8), ("acme", "clusters", 0.95)]
    await delete(acme, "ResourceClaim", "acme", "a")
    assert await review(acme, last) == 1
    told = await status(acme)
    assert ("quotaWarnings" in told, told["field"], told["conditions"][0]["status"]) == (False, "Within", "False")
    assert len(await notices(acme)) == 2, "only warnings are sent"
    await claim(acme, "acme", "a", clusters=7)
    assert await review(acme, last) == 1
    assert (await notices(acme))[2:] == [("acme", "clusters", 0.95)]


async def test_a_new_leader_repeats_nothing_and_two_at_once_report_once(acme: Runtime, rival: Runtime) -> None:
    one, other = Reviewed(), Reviewed()
    await review(acme, one)
    await claim(acme, "acme", "a", clusters=9, hosts=10)
    assert sorted(await asyncio.gather(review(acme, one), review(rival, other))) in ([0, 1], [1, 1])
    assert sorted(await notices(acme)) == [("acme", "clusters", 0.8), ("acme", "hosts", 0.95)]
    assert await review(acme, Reviewed()) == 0
    await delete(acme, "ResourceClaim", "acme", "a")
    assert await review(rival, fresh := Reviewed()) == 1
    assert (await status(acme)).get("quotaWarnings") is None
    assert fresh.told == {"acme": {}}


async def test_limits_that_change_are_looked_at_too(acme: Runtime) -> None:
    last = Reviewed()
    await claim(acme, "acme", "a", clusters=4)
    await review(acme, last)
    await change(acme, "Tenant", "", "acme", limits={"clusters": 5})
    assert await review(acme, last) == 1
    await change(acme, "Tenant", "", "acme", limits={})
    assert await review(acme, last) == 1
    await create(acme, "Tier", {"metadata": {"name": "std"}, "spec": {"limits": {"clusters": 100}}})
    await change(acme, "Tenant", "", "acme", tier="std")
    assert await review(acme, last) == 0
    await change(acme, "Tier", "", "std", limits={"clusters": 4})
    assert await review(acme, last) == 1
    await change(acme, "Tier", "", "std", warnAt={"clusters": []})
    assert await review(acme, last) == 1
    await change(acme, "Settings", "", "system", quotas={"warnAt": {"*": [10]}})
    assert await review(acme, last) == 0
    assert [mark for _, _, mark in await notices(acme)] == [0.8, 0.95]


async def test_tenants_above_are_told_of_their_own_limits_and_strangers_nothing(runtime: Runtime) -> None:
    last = Reviewed()
    await tenant(runtime, "top", limits={"clusters": 5})
    await tenant(runtime, "acme", parent="top")
    await tenant(runtime, "other", limits={"clusters": 5})
    await namespace(runtime, "acme", "acme")
    await review(runtime, last)
    await claim(runtime, "acme", "a", clusters=4)
    await review(runtime, last)
    assert await notices(runtime) == [("top", "clusters", 0.8)]
    assert code(await change(runtime, "Tenant", "", "acme", parent="other")) == "ok"
    await review(runtime, last)
    assert await notices(runtime) == [("top", "clusters", 0.8), ("other", "clusters", 0.8)]
    assert (await status(runtime, "top"))["field"] == "Within"


async def test_work_grows_with_what_changed(acme: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(5):
        await tenant(acme, f"idle{number}", limits={"clusters": 1})
    last = Reviewed()
    await review(acme, last)
    asked: list[list[str]] = []
    load = quota_store.load_scopes

    async def counted(db: Any, scopes: list[str]) -> Any:
        asked.append(list(scopes))
        return await load(db, scopes)

    monkeypatch.setattr(quota_store, "load_scopes", counted)
    await review(acme, last)
    assert asked == [], "nothing changed"
    await claim(acme, "acme", "a", clusters=1)
    await review(acme, last)
    assert asked == [["tenant:acme"]]


async def test_who_was_deposed_reports_nothing(acme: Runtime) -> None:
    await claim(acme, "acme", "a", clusters=9)
    old = await term(acme)
    new = await term(acme, "another", depose=True)
    assert await review(acme, Reviewed(), old) == 0
    assert await notices(acme) == []
    assert await review(acme, Reviewed(), new) == 1


async def test_the_leader_reports_by_itself(acme: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quota_warning, "REVIEW_SECONDS", 0.02)
    task = asyncio.create_task(quota_warning.run_quota_warnings(acme, await term(acme)))
    try:
        await claim(acme, "acme", "a", clusters=9)
        async with asyncio.timeout(20):
            while (await status(acme)).get("quotaWarnings") != {"clusters": 80}:  # noqa: ASYNC110 - the loop's own pace
                await asyncio.sleep(0.02)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
