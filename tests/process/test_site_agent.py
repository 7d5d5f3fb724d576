"""Orders, states and use between a Waldur on loopback and Bursar, carried by waldur-site-agent with our backend."""

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest
from waldur_api_client.models import OrderDetails, OrderState, RequestTypes, Resource, ResourceState

from bursar.core.usage.usage_levels import UsageBegan, UsageEnded
from bursar.loops.housekeeping import finish_namespaces
from bursar.ops.runtime.runtime import Runtime
from bursar.ops.usage.usage_rollup import roll
from bursar.store.usage import usage_levels as usage_store
from support.api.site import Site, allocation, opened_site
from support.process.site_agents import SiteAgent, running
from support.process.waldurs import TOKEN, WaldurServer, serving
from support.usage.spent_usage import aged

LIMITS = {"gpu_hours": 1000, "node_hours": 50, "max_nodes": 8}
pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def agent() -> Iterator[SiteAgent]:
    with running() as one:
        yield one


@pytest.fixture
def waldur() -> Iterator[WaldurServer]:
    with serving() as server:
        yield server
        assert not server.faults, "\n".join(server.faults)


@pytest.fixture
async def site(database_url: str) -> AsyncIterator[Site]:
    async with opened_site(database_url) as one:
        yield one


@asynccontextmanager
async def ending_namespaces(site: Site) -> AsyncIterator[None]:
    """Meanwhile namespaces that are to end do end."""

    async def end() -> None:
        while True:
            await finish_namespaces(site.context.runtime)
            await asyncio.sleep(0.05)

    task = asyncio.create_task(end())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@dataclass(slots=True)
class Desk:
    """Where orders are placed, and where it is seen what became of them."""

    site: Site
    waldur: WaldurServer
    agent: SiteAgent
    settings: dict[str, Any]

    async def round(self, mode: str = "order_process", **settings: Any) -> None:
        component = {"measured_unit": "hours", "unit_factor": 1, "accounting_type": "limit"}
        components = {name: {**component, "label": name} for name in LIMITS}
        components["cpu_hours"] = {**component, "label": "cpu", "accounting_type": "usage", "unit_factor": 10}
        settings = {"dimensions": {"cpu_hours": "cpu"}, **self.settings, **settings}
        offering = {
            "name": "Bursar", "waldur_api_url": f"{self.waldur.url}/api/", "waldur_api_token": TOKEN,
            "waldur_offering_uuid": self.waldur.offering.hex, "backend_type": "bursar",
            "order_processing_backend": "bursar", "reporting_backend": "bursar", "membership_sync_backend": "bursar",
            "backend_settings": settings, "backend_components": components,
        }  # fmt: skip
        await asyncio.to_thread(self.agent.round, mode, offering)

    async def order(self, resource: Resource, type_: RequestTypes, **settings: Any) -> OrderDetails:
        limits = settings.pop("limits", None)
        order = self.waldur.order(resource, type_, limits)
        await self.round(**settings)
        return order

    async def created(self, slug: str = "physics", limits: dict[str, int] | None = None, **settings: Any) -> Resource:
        resource = self.waldur.resource(slug=slug, state="Creating", limits=limits or LIMITS)
        order = await self.order(resource, RequestTypes.CREATE, **settings)
        assert order.state is OrderState.DONE, self.agent.said()
        return resource

    async def tenant(self, name: str = "physics") -> dict[str, Any]:
        found = await self.site.get(f"tenants/{name}")
        assert found.status == 200, found
        return dict(found.body)


@pytest.fixture
async def desk(site: Site, waldur: WaldurServer, agent: SiteAgent) -> Desk:
    """With a service's token, as Waldur has one."""
    settings = {"url": site.url, "token": await site.token("service", user="waldur")}
    return Desk(site, waldur, agent, settings)


async def test_an_order_makes_a_tenant_with_limits_budgets_and_a_namespace(desk: Desk) -> None:
    resource = await desk.created(limits={**LIMITS, "cpu_hours": 3, "unknown": 1})
    assert (resource.backend_id, resource.state) == ("physics", ResourceState.OK)
    tenant = await desk.tenant()
    assert isinstance(resource.uuid, UUID)
    assert tenant["metadata"]["labels"] == {"bursar.io/waldur-resource": resource.uuid.hex}
    spec = {name: tenant["spec"][name] for name in ("gpuHoursBudget", "nodeHoursBudget", "limits", "displayName")}
    limits = {"nodes": "8", "cpu": "30"}
    assert spec == {"gpuHoursBudget": 1000, "nodeHoursBudget": 50, "limits": limits, "displayName": "Resource physics"}
    namespace = (await desk.site.get("namespaces/physics")).body
    assert namespace["metadata"]["labels"]["bursar.io/tenant"] == "physics"
    revision = int(tenant["metadata"]["resourceVersion"])
    async with desk.site.context.database.reader() as db:
        assert await db.fetchval("SELECT actor FROM change WHERE revision = $1", revision) == "service:waldur"


async def test_an_order_that_broke_off_halfway_is_carried_out_again(desk: Desk) -> None:
    resource = await desk.created()
    resource.backend_id, resource.state = "", ResourceState.CREATING
    order = await desk.order(resource, RequestTypes.CREATE)
    assert (order.state, resource.backend_id) == (OrderState.DONE, "physics")


async def test_a_tenant_that_is_not_waldurs_is_never_touched(desk: Desk) -> None:
    await desk.site.post("tenants", {"metadata": {"name": "physics"}, "spec": {"limits": {"nodes": "3"}}})
    before = await desk.tenant()
    resource = desk.waldur.resource(slug="physics", state="Creating", limits=LIMITS)
    order = await desk.order(resource, RequestTypes.CREATE)
    assert order.state is OrderState.ERRED
    assert "already exist" in str(order.error_message)
    resource = desk.waldur.resource("physics", slug="other")
    resource.paused = True
    await desk.round("membership_sync")
    for type_ in (RequestTypes.UPDATE, RequestTypes.TERMINATE):
        order = await desk.order(resource, type_, limits={"max_nodes": 1})
        assert order.state is OrderState.ERRED
        assert "it has no label bursar.io/waldur-resource" in str(order.error_message)
    assert await desk.tenant() == before


async def test_the_tenant_of_another_resource_is_neither_changed_ended_nor_reported(desk: Desk) -> None:
    resource = await desk.created()
    await aged(desk.site.context.database, "physics", 40)
    await ran(desk.site.context.runtime, datetime.now(UTC).replace(day=1, hour=0, minute=0, second=0), gpu_hours=12)
    before = await desk.tenant()
    other = desk.waldur.resource("physics", slug="other", limits=LIMITS)
    await desk.round("report")
    assert [uuid for uuid, _ in desk.waldur.usages] == [resource.uuid]
    other.paused = True
    await desk.round("membership_sync")
    for type_, settings in (
        (RequestTypes.UPDATE, {"limits": {"max_nodes": 1}}),
        (RequestTypes.TERMINATE, {"token": desk.site.admin, "soft_delete": True}),
        (RequestTypes.TERMINATE, {"token": desk.site.admin}),
    ):
        order = await desk.order(other, type_, **settings)
        assert order.state is OrderState.ERRED
        assert "it belongs to another resource" in str(order.error_message)
    assert await desk.tenant() == before
    assert not other.backend_metadata


async def test_an_update_of_what_is_gone_errs_and_an_end_of_it_is_done(desk: Desk) -> None:
    resource = desk.waldur.resource("physics", slug="physics", limits=LIMITS)
    assert (await desk.order(resource, RequestTypes.UPDATE, limits={"max_nodes": 1})).state is OrderState.ERRED
    assert (await desk.order(resource, RequestTypes.TERMINATE)).state is OrderState.DONE
    never = desk.waldur.resource(slug="never", limits=LIMITS)
    assert (await desk.order(never, RequestTypes.TERMINATE)).state is OrderState.DONE


async def test_where_the_namespace_is_anothers_no_tenant_is_left_behind(desk: Desk) -> None:
    await desk.site.post("tenants", {"metadata": {"name": "history"}, "spec": {}})
    await desk.site.namespace("history", "physics")
    resource = desk.waldur.resource(slug="physics", state="Creating", limits=LIMITS)
    assert (await desk.order(resource, RequestTypes.CREATE)).state is OrderState.ERRED
    assert (await desk.site.get("tenants/physics")).status == 404


async def test_what_another_tenant_of_the_name_used_before_is_not_reported(desk: Desk) -> None:
    resource = await desk.created()
    month = datetime.now(UTC).replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    await ran(desk.site.context.runtime, month, gpu_hours=100)
    await desk.round("report")
    assert isinstance(resource.uuid, UUID)
    assert reported(desk.waldur, resource.uuid, month)["gpu_hours"] == 0


async def test_an_update_sets_limits_and_budgets_and_leaves_the_others(desk: Desk) -> None:
    resource = await desk.created()
    await desk.site.put("tenants/physics", {"max_gpus": 3, "weight": 2})
    order = await desk.order(resource, RequestTypes.UPDATE, limits={"gpu_hours": 2000, "max_nodes": 4})
    assert order.state is OrderState.DONE
    spec = (await desk.tenant())["spec"]
    assert (spec["gpuHoursBudget"], spec["nodeHoursBudget"], spec["weight"]) == (2000, 50, 2)
    assert spec["limits"] == {"nodes": "4", "gpus": 3}


async def test_what_is_paused_or_downscaled_takes_nothing_new_and_comes_back_as_it_was(desk: Desk) -> None:
    resource = await desk.created()
    await desk.site.put("tenants/physics", {"max_concurrent_allocations": "20"})

    async def state(*, paused: bool = False, downscaled: bool = False) -> tuple[str, Any]:
        resource.paused, resource.downscaled = paused, downscaled
        await desk.round("membership_sync")
        metadata: Any = resource.backend_metadata
        assert metadata, desk.agent.said()
        return (await desk.tenant())["spec"]["limits"]["allocations"], metadata["state"]

    assert await state(paused=True) == ("0", "paused")
    refused = await desk.site.post("namespaces/physics/allocations", allocation("a", cpu=1))
    assert (refused.status, refused.body["details"]["dimension"]) == (403, "max_concurrent_allocations")
    assert await state(downscaled=True) == ("1", "downscaled")
    order = await desk.order(resource, RequestTypes.UPDATE, limits={"max_nodes": 5})
    assert order.state is OrderState.DONE
    assert await state(downscaled=True) == ("1", "downscaled")
    assert await state() == ("20", "ok")
    tenant = await desk.tenant()
    assert tenant["spec"]["limits"] == {"nodes": "5", "allocations": "20"}
    assert "bursar.io/waldur-state" not in (tenant["metadata"].get("annotations") or {})


async def test_the_end_of_a_resource_closes_the_tenant_and_a_restored_one_opens_it(desk: Desk) -> None:
    resource = await desk.created()
    order = await desk.order(resource, RequestTypes.TERMINATE, soft_delete=True)
    assert (order.state, resource.state) == (OrderState.DONE, ResourceState.TERMINATED)
    assert (await desk.tenant())["spec"]["limits"] == {"nodes": "8", "allocations": "0"}
    order = await desk.order(resource, RequestTypes.RESTORE)
    assert order.state is OrderState.DONE
    assert (await desk.tenant())["spec"]["limits"] == {"nodes": "8"}


async def test_a_service_may_not_delete_and_the_order_says_so(desk: Desk) -> None:
    resource = await desk.created()
    order = await desk.order(resource, RequestTypes.TERMINATE)
    assert order.state is OrderState.ERRED
    assert re.search("role service may not delete", str(order.error_message))
    assert (await desk.tenant())["spec"]["limits"]["allocations"] == "0"


async def test_an_admin_deletes_the_tenant_with_what_is_in_it_as_soon_as_that_has_ended(desk: Desk) -> None:
    resource = await desk.created()
    made = await desk.site.post("namespaces/physics/allocations", allocation("a", cpu=1))
    assert made.status == 201, made
    order = await desk.order(resource, RequestTypes.TERMINATE, token=desk.site.admin, delete_wait_seconds=0)
    assert str(order.state) == "executing"
    async with ending_namespaces(desk.site):
        await desk.round(token=desk.site.admin, delete_wait_seconds=30)
    assert str(order.state) == "done"
    assert (await desk.site.get("tenants/physics")).status == 404
    assert (await desk.site.get("namespaces/physics")).status == 404


async def test_while_bursar_is_away_orders_wait_and_settings_that_lack_something_are_said(desk: Desk) -> None:
    resource = desk.waldur.resource(slug="physics", state="Creating", limits=LIMITS)
    order = await desk.order(resource, RequestTypes.CREATE, url="http://127.0.0.1:9")
    assert str(order.state) == "pending-provider"
    await desk.round(token="")
    assert (str(order.state), "needs token or token_file" in desk.agent.said()) == ("pending-provider", True)
    await desk.round()
    assert str(order.state) == "done"


async def test_what_a_tenant_used_this_month_is_reported_by_component(desk: Desk) -> None:
    resource = await desk.created()
    await aged(desk.site.context.database, "physics", 40)
    month = datetime.now(UTC).replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    await ran(desk.site.context.runtime, month, gpu_hours=12, node_hours=1.5, cpu_hours=40)
    await ran(desk.site.context.runtime, month - timedelta(hours=1), gpu_hours=100)
    await desk.round("report")
    assert isinstance(resource.uuid, UUID)
    assert reported(desk.waldur, resource.uuid, month) == {"gpu_hours": 12.0, "node_hours": 1.5, "cpu_hours": 4.0}

    sent = [one for one in desk.waldur.calls if one.path.endswith("/set_usage/")]
    await desk.round("report")
    assert [one for one in desk.waldur.calls if one.path.endswith("/set_usage/")] == sent
    await ran(desk.site.context.runtime, month, gpu_hours=3)
    await desk.round("report")
    assert reported(desk.waldur, resource.uuid, month)["gpu_hours"] == 15.0


async def test_what_each_user_used_is_reported_beside_what_all_did(desk: Desk) -> None:
    resource = await desk.created()
    await desk.site.post("tenants", {"metadata": {"name": "optics"}, "spec": {"parent": "physics"}})
    month = datetime.now(UTC).replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    for tenant in ("physics", "optics"):
        await aged(desk.site.context.database, tenant, 40)
    runtime = desk.site.context.runtime
    await ran(runtime, month, gpu_hours=12, cpu_hours=40)
    await ran(runtime, month, gpu_hours=3, user="physics/bob")
    await ran(runtime, month, gpu_hours=5, user="optics/ann", tenant="optics")
    for nobody in ("admin", "-"):
        await ran(runtime, month, gpu_hours=7, user=nobody)
    await ran(runtime, month - timedelta(hours=1), gpu_hours=100, user="physics/eve")
    await desk.round("report")
    assert isinstance(resource.uuid, UUID)
    assert reported(desk.waldur, resource.uuid, month) == {"gpu_hours": 34.0, "node_hours": 0.0, "cpu_hours": 4.0}
    whole = desk.waldur.usages[resource.uuid, f"{month:%Y-%m}"]
    uuids = {name: one.uuid for name, one in whole.items() if isinstance(one.uuid, UUID)}
    by_user = {name: desk.waldur.user_usages[uuid] for name, uuid in uuids.items()}
    assert by_user == {
        "gpu_hours": {"ann": 12.0, "bob": 3.0, "optics/ann": 5.0},
        "node_hours": {"ann": 0.0, "bob": 0.0, "optics/ann": 0.0},
        "cpu_hours": {"ann": 4.0, "bob": 0.0, "optics/ann": 0.0},
    }


def reported(waldur: WaldurServer, resource: UUID, month: datetime) -> dict[str, float]:
    found = waldur.usages[resource, f"{month:%Y-%m}"]
    return {name: float(one.usage) for name, one in found.items()}  # type: ignore[arg-type]


async def ran(
    runtime: Runtime, at: datetime, *, gpu_hours: float = 0, node_hours: float = 0, cpu_hours: float = 0,
    user: str = "physics/ann", tenant: str = "physics",
) -> None:  # fmt: skip
    """Something of the tenant's ran then for a minute, on as much as makes up these hours."""
    hours = {"nvidia.com/gpu": gpu_hours, "nodes": node_hours, "cpu": cpu_hours}
    amounts = {name: round(value * 60 * 1000) for name, value in hours.items() if value}
    uid, begin = uuid4().hex, int(at.timestamp())
    began = UsageBegan(uid, "n0", 1, tenant, user, tenant, uid, amounts, "", begin, 0)
    async with runtime.database.reader() as db, db.transaction():
        await usage_store.save(db, (), (), [(began, UsageEnded(uid, "n0", begin + 60, "Succeeded", ""))])
    while await roll(runtime.database):
        pass
