"""Tenants of Waldur's on a real server, while others change them as well."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Callable

import pytest

from bursar.bridges.waldur_tenant import CHANGES_MAX, NotTheirs, ResourceState, Tenants
from bursar.client import Client, NotFound
from bursar.loops.housekeeping import finish_namespaces
from support.api.site import Site, eventually, opened_site

OWNER = "0" * 32


@pytest.fixture
async def site(database_url: str) -> AsyncIterator[Site]:
    async with opened_site(database_url) as one:
        yield one


@pytest.fixture
async def tenants(site: Site) -> AsyncIterator[Tenants]:
    with Client(site.url, await site.token("service", user="waldur")) as client:
        made = Tenants(client)
        assert await asyncio.to_thread(made.put, "physics", OWNER, "Physics", {"nodes": 8, "gpu_hours": 10})
        yield made


async def test_what_others_change_at_the_same_time_is_kept_and_nothing_errs(site: Site, tenants: Tenants) -> None:
    async def weigh() -> None:
        for weight in range(1, CHANGES_MAX):
            assert (await site.put("tenants/physics", {"weight": weight})).status == 200

    def order() -> None:
        for nodes in range(1, 9):
            tenants.set_state("physics", OWNER, ResourceState.PAUSED if nodes % 2 else ResourceState.OPEN)
            tenants.set_limits("physics", OWNER, {"nodes": nodes})

    await asyncio.gather(weigh(), asyncio.to_thread(order))
    spec = (await site.get("tenants/physics")).body["spec"]
    assert (spec["weight"], spec["limits"]) == (CHANGES_MAX - 1, {"nodes": "8"})


async def test_the_same_order_carried_out_twice_at_a_time_makes_one_tenant(site: Site, tenants: Tenants) -> None:
    def order() -> bool:
        return tenants.put("optics", OWNER, "Optics", {"nodes": 1})

    assert all(await asyncio.gather(*(asyncio.to_thread(order) for _ in range(6))))
    found = await site.get("namespaces", labelSelector="bursar.io/tenant=optics")
    assert [one["metadata"]["name"] for one in found.body["items"]] == ["optics"]


async def test_whoever_has_the_name_now_is_not_touched_for_another_resource(tenants: Tenants) -> None:
    def orders(owner: str) -> None:
        some: list[Callable[[], None]] = [
            lambda: tenants.set_limits("physics", owner, {"nodes": 1}),
            lambda: tenants.set_state("physics", owner, ResourceState.PAUSED),
            lambda: tenants.delete("physics", owner),
        ]
        for order in some:
            with pytest.raises(NotTheirs, match="not of Waldur's resource"):
                order()

    before = await asyncio.to_thread(tenants.find, "physics", OWNER)
    for owner in ("1" * 32, ""):
        await asyncio.to_thread(orders, owner)
    assert await asyncio.to_thread(tenants.find, "physics", OWNER) == before
    with pytest.raises(NotFound):
        await asyncio.to_thread(tenants.set_limits, "nowhere", OWNER, {"nodes": 1})


async def is_ending(site: Site, namespace: str) -> bool:
    return "deletionTimestamp" in (await site.get(f"namespaces/{namespace}")).body["metadata"]


async def test_a_name_that_is_taken_while_it_is_deleted_stays_whose_it_is(site: Site, tenants: Tenants) -> None:
    """The namespaces go, and before the tenant does somebody hands it to another resource."""
    label = {"metadata": {"labels": {"bursar.io/waldur-resource": "1" * 32}}}
    with Client(site.url, site.admin) as client:
        tenants = Tenants(client, wait_seconds=60)
        ending = asyncio.create_task(asyncio.to_thread(tenants.delete, "physics", OWNER))
        await eventually(lambda: is_ending(site, "physics"))
        assert (await site.patch("tenants/physics", label)).status == 200
        await finish_namespaces(site.context.runtime)
        with pytest.raises(NotTheirs):
            await ending
    assert (await site.get("tenants/physics")).status == 200


REPORT = """
from datetime import datetime
from bursar.bridges import waldur_site_agent
waldur_site_agent.get_current_time_in_timezone = lambda zone: datetime(2999, 1, 1)
settings = {"url": "http://127.0.0.1:9", "token": "t"}
backend = waldur_site_agent.BursarBackend(settings, {"gpu_hours": {"accounting_type": "limit"}})
print(backend._get_usage_report(["physics"]))
"""


def test_a_month_that_has_begun_for_the_agent_alone_has_nothing_in_it() -> None:
    """East of Greenwich it begins earlier: what the month before has is not reported in it."""
    done = subprocess.run([sys.executable, "-c", REPORT], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout.splitlines()[-1] == "{'physics': {'TOTAL_ACCOUNT_USAGE': {'gpu_hours': 0.0}}}"
