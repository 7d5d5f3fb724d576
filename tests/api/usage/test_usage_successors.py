"""Who takes the name of a tenant that is gone is told nothing of what that one used, and is charged for none of it."""

from __future__ import annotations

import csv
import io
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from bursar.ops.usage.usage_rollup import roll
from support.api.site import Site
from support.usage.spent_usage import GPU, aged, spent

pytestmark = pytest.mark.asyncio(loop_scope="module")

NOW = datetime.now(UTC).replace(microsecond=0)
MIDNIGHT = NOW.replace(hour=0, minute=0, second=0)
# The successor came in the middle of a day, two days ago.
CREATED = MIDNIGHT - timedelta(days=2) + timedelta(hours=12, minutes=30)


async def successor(site: Site, parent: str = "", *, created: datetime = CREATED) -> str:
    name = site.name("heir")
    body = {"metadata": {"name": name}, "spec": {"parent": parent} if parent else {}}
    assert (await site.post("tenants", body)).status == 201
    await aged(site.context.database, name, (datetime.now(UTC) - created).total_seconds() / 86_400)
    return name


async def use(
    site: Site, tenant: str, gpus: int, begin: datetime, hours: float, user: str = "ann", klass: str = ""
) -> None:
    amounts = {GPU: gpus * 1000}
    await spent(site.context.database, tenant, f"{tenant}/{user}", amounts, begin=begin, hours=hours, klass=klass)


async def entered(site: Site) -> None:
    while await roll(site.context.database):
        pass


async def table(site: Site, **query: Any) -> list[dict[str, str]]:
    reply = await site.get("usage/export", **{"from": f"{MIDNIGHT - timedelta(days=9):%Y-%m-%d}"}, **query)
    assert reply.status == 200, reply
    return list(csv.DictReader(io.StringIO(reply.body)))


@pytest.mark.parametrize("is_entered", [False, True])
async def test_a_day_that_both_had_is_the_successors_from_its_creation_on(site: Site, is_entered: bool) -> None:
    name = await successor(site)
    await use(site, name, 8, CREATED - timedelta(hours=9), 4)
    await use(site, name, 2, CREATED + timedelta(hours=1), 3)
    if is_entered:
        await entered(site)
    whole = (await site.get(f"tenants/{name}/usage", by="day", days=30)).body
    assert [one["gpu_hours_used"] for one in whole["daily"]] == [6]
    own = (await site.get("usage", user=f"{name}/ann", by="day", days=30)).body
    assert [one["gpu_hours_used"] for one in own["daily"]] == [6]


async def test_a_window_that_begins_later_on_the_day_of_the_creation_has_nothing_from_before(site: Site) -> None:
    day, gone_by = MIDNIGHT - timedelta(days=2), NOW - MIDNIGHT
    name = await successor(site, created=day + gone_by / 2)
    await use(site, name, 8, day, gone_by.total_seconds() / 3600 / 4)
    tenants = await site.get(f"tenants/{name}/usage", by="day", days=2)
    users = await site.get("usage", user=f"{name}/ann", by="day", days=2)
    assert (tenants.body["daily"], users.body["daily"]) == ([], [])


async def test_the_peak_of_the_first_day_is_of_that_day(site: Site) -> None:
    name = await successor(site)
    await use(site, name, 8, CREATED - timedelta(hours=9), 4)
    await use(site, name, 2, CREATED + timedelta(hours=1), 3)
    await use(site, name, 5, CREATED + timedelta(days=1), 3)
    await entered(site)
    token = await site.token("tenant-admin", tenant=name, user="ann")
    rows = [(one["hours"], one["peak"]) for one in await table(site, token=token) if one["resource"] == GPU]
    assert rows == [("6.000000", "5"), ("15.000000", "5")]


async def test_the_peak_of_a_period_is_none_of_a_predecessors(site: Site) -> None:
    name = await successor(site)
    for klass in ("a100", "h100"):  # Two classes: their peaks are added up by the hour.
        await use(site, name, 8, CREATED - timedelta(hours=20), 4, klass=klass)
        await use(site, name, 1, CREATED + timedelta(hours=3), 3, klass=klass)
    for period in ("7d", "30d"):
        shown = (await site.get(f"metrics/tenants/{name}/usage", period=period)).body
        assert shown["resources"][GPU]["peakUsage"] == "2", period


@pytest.mark.parametrize(("is_shared", "peak"), [(False, "4"), (True, "0")])
async def test_the_peak_of_the_first_hour_is_told_where_nobody_else_had_any_of_it(
    site: Site, is_shared: bool, peak: str
) -> None:
    name = await successor(site)
    if is_shared:
        await use(site, name, 8, CREATED - timedelta(minutes=20), 0.25)
    await use(site, name, 4, CREATED + timedelta(minutes=5), 0.25)
    await entered(site)
    shown = (await site.get(f"metrics/tenants/{name}/usage", period="7d")).body
    assert shown["resources"][GPU]["peakUsage"] == peak


async def test_a_tenant_that_is_named_is_charged_for_its_own_use_and_the_whole_table_has_everybodys(site: Site) -> None:
    name = await successor(site)
    await use(site, name, 8, CREATED - timedelta(hours=9), 4)
    await use(site, name, 2, CREATED + timedelta(hours=1), 3)
    service = await site.token("service", user="waldur")
    for by in ("day", "month"):
        named = [one for one in await table(site, token=service, tenant=name, by=by) if one["resource"] == GPU]
        assert [one["hours"] for one in named] == ["6.000000"]
    everybodys = [one for one in await table(site, token=service, by="month") if one["tenant"] == name]
    assert sum(float(one["hours"]) for one in everybodys if one["resource"] == GPU) == 38


async def test_whose_tenant_is_gone_is_told_nothing_of_it(site: Site) -> None:
    name = await successor(site)
    await use(site, name, 2, CREATED + timedelta(hours=1), 3)
    token = await site.token("tenant-admin", tenant=name, user="ann")
    assert await table(site, token=token)
    assert (await site.delete(f"tenants/{name}")).status == 200
    reply = await site.get("usage/export", token=token)
    # Its tokens end with it; one that was just used is known for a moment longer.
    assert reply.status == 401 or len(reply.body.splitlines()) == 1, reply
