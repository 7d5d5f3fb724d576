"""AdminService over a real socket: the same roles, effects and refusals as over REST."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import grpc
import pytest
import pytest_asyncio

from bursar.api.http.tls import ensure_server_certificate
from bursar.api.serve import app_of
from bursar.core.values.refusal import Code
from bursar.rpc.admin import flat_of, message_of
from bursar.rpc.problem import DETAILS, STATUS, details_of, refusal_of, sentence_of, status_of
from bursar.rpc.serve import opened_admin
from bursar.wire.scheduler.v1 import admin_pb2 as pb
from bursar.wire.scheduler.v1 import admin_pb2_grpc as pb_grpc
from support.api.site import Site, opened_site
from support.runtime.postgres import PostgresServer, _url, clone_database, drop_database
from support.usage.spent_usage import GPU, aged, ago, priced, spent

pytestmark = pytest.mark.asyncio(loop_scope="module")


@dataclass(frozen=True, slots=True)
class AdminServer:
    """An API process, and its AdminService."""

    site: Site
    stub: Any

    async def ask(self, call: str, request: Any, token: str | None = None) -> Any:
        shown = self.site.admin if token is None else token
        metadata = (("authorization", f"Bearer {shown}"),) if shown else ()
        return await getattr(self.stub, call)(request, metadata=metadata, timeout=20)

    async def refusal(self, call: str, request: Any, token: str | None = None) -> tuple[grpc.StatusCode, pb.Refusal]:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self.ask(call, request, token)
        return caught.value.code(), told(caught.value)


def told(error: grpc.aio.AioRpcError) -> pb.Refusal:
    """What the status carries, as any client of gRPC would read it."""
    details = dict(error.trailing_metadata() or ())[DETAILS]
    assert isinstance(details, bytes)
    status = pb.ErrorStatus.FromString(details)
    assert status.code == error.code().value[0]
    refusal = pb.Refusal()
    assert status.details[0].Unpack(refusal)
    return refusal


@asynccontextmanager
async def opened(site: Site) -> AsyncIterator[AdminServer]:
    async with (
        opened_admin(site.context.database, app_of(site.context), "127.0.0.1:0") as port,
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        yield AdminServer(site, pb_grpc.AdminServiceStub(channel))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def admin(embedded_postgres: PostgresServer, database_template: str) -> AsyncIterator[AdminServer]:
    name = await clone_database(embedded_postgres, database_template)
    async with opened_site(_url(embedded_postgres, name)) as site, opened(site) as one:
        yield one
    await drop_database(embedded_postgres, name)


async def test_a_tenants_named_fields_are_changed_and_the_others_left(admin: AdminServer) -> None:
    name = await admin.site.namespace()
    await admin.site.put(f"tenants/{name}", {"weight": 3, "max_volumes": 7})
    changes = pb.UpdateTenantRequest(
        name=name, max_nodes=250, max_concurrent_allocations=50, gpu_hours_budget=150_000, node_hours_budget=500_000.5,
        limits={"nvidia.com/gpu": "512"}, enforcement="Queue",
    )  # fmt: skip
    tenant = (await admin.ask("UpdateTenant", changes)).tenant
    assert dict(tenant.limits) == {"nodes": "250", "allocations": "50", "nvidia.com/gpu": "512", "volumes": "7"}
    assert (tenant.gpu_hours_budget, tenant.node_hours_budget, tenant.weight) == (150_000, 500_000.5, 3)
    shown = (await admin.site.get(f"tenants/{name}")).body
    assert shown["spec"]["gpuHoursBudget"] == 150_000
    assert shown["spec"]["enforcement"] == "Queue"
    assert shown["metadata"]["resourceVersion"] == tenant.resource_version


async def test_a_limit_is_taken_away_and_a_field_unset(admin: AdminServer) -> None:
    name = await admin.site.namespace()
    await admin.site.put(f"tenants/{name}", {"max_nodes": 4, "max_volumes": 7, "gpu_hours_budget": 10})
    changes = pb.UpdateTenantRequest(name=name, limits={"volumes": ""}, clear=["gpu_hours_budget"])
    tenant = (await admin.ask("UpdateTenant", changes)).tenant
    assert dict(tenant.limits) == {"nodes": "4"}
    assert not tenant.HasField("gpu_hours_budget")


async def test_repeated_with_its_request_id_a_change_is_made_once(admin: AdminServer) -> None:
    name = await admin.site.namespace()
    first = pb.UpdateTenantRequest(name=name, max_nodes=5, request_id="once")
    one = (await admin.ask("UpdateTenant", first)).tenant
    await admin.site.put(f"tenants/{name}", {"max_nodes": 6})
    again = (await admin.ask("UpdateTenant", first)).tenant
    assert again.resource_version == one.resource_version
    assert (await admin.site.get(f"tenants/{name}")).body["spec"]["limits"] == {"nodes": 6}
    code, refusal = await admin.refusal(
        "UpdateTenant", pb.UpdateTenantRequest(name=name, max_nodes=9, request_id="once")
    )
    assert (code, refusal.code) == (grpc.StatusCode.FAILED_PRECONDITION, Code.REQUEST_REUSED)


async def test_a_dry_run_answers_and_changes_nothing(admin: AdminServer) -> None:
    name = await admin.site.namespace()
    before = await admin.site.state()
    tenant = (await admin.ask("UpdateTenant", pb.UpdateTenantRequest(name=name, max_nodes=5, dry_run=True))).tenant
    assert dict(tenant.limits) == {"nodes": "5"}
    assert await admin.site.state() == before


async def test_who_it_was_is_in_the_audit(admin: AdminServer) -> None:
    name = await admin.site.namespace()
    token = await admin.site.token("service", user="waldur")
    tenant = (await admin.ask("UpdateTenant", pb.UpdateTenantRequest(name=name, max_nodes=5), token)).tenant
    async with admin.site.context.database.reader() as db:
        actor = await db.fetchval("SELECT actor FROM change WHERE revision = $1", int(tenant.resource_version))
    assert actor == "service:waldur"


REFUSED = {
    "nobody": (pb.UpdateTenantRequest(name="default", max_nodes=5), "", Code.UNAUTHENTICATED),
    "a user": (pb.UpdateTenantRequest(name="default", max_nodes=5), "user", Code.FORBIDDEN),
    "absent": (pb.UpdateTenantRequest(name="nobody", max_nodes=5), "admin", Code.NOT_FOUND),
    "below zero": (pb.UpdateTenantRequest(name="default", max_nodes=-5), "admin", Code.INVALID),
    "no weight": (pb.UpdateTenantRequest(name="default", weight=-1), "admin", Code.INVALID),
    "nothing to change": (pb.UpdateTenantRequest(name="default"), "admin", Code.INVALID),
    "no name": (pb.UpdateTenantRequest(max_nodes=5), "admin", Code.INVALID),
    "a path": (pb.UpdateTenantRequest(name="default/quotas", max_nodes=5), "admin", Code.INVALID),
    "no such field": (pb.UpdateTenantRequest(name="default", clear=["colour"]), "admin", Code.INVALID),
}


@pytest.mark.parametrize("what", REFUSED)
async def test_what_is_refused_says_so_and_leaves_nothing(admin: AdminServer, what: str) -> None:
    request, role, code = REFUSED[what]
    token = await admin.site.token(role, tenant="default", user="ann") if role == "user" else None
    before = await admin.site.state()
    status, refusal = await admin.refusal("UpdateTenant", request, token if role else "")
    assert (status, refusal.code) == (STATUS[code], code)
    assert refusal.message
    assert await admin.site.state() == before


async def test_a_fault_is_named_by_its_field(admin: AdminServer) -> None:
    _, refusal = await admin.refusal("UpdateTenant", pb.UpdateTenantRequest(name="default", fair_share_target=2))
    assert [one.field for one in refusal.causes] == ["spec.fairShareTarget"]
    assert "at most 1" in refusal.causes[0].message


async def test_a_field_that_is_named_twice_is_refused(admin: AdminServer) -> None:
    for twice in (
        pb.UpdateTenantRequest(name="default", max_nodes=5, limits={"nodes": "6"}),
        pb.UpdateTenantRequest(name="default", weight=2, clear=["weight"]),
    ):
        _, refusal = await admin.refusal("UpdateTenant", twice)
        assert "named twice" in refusal.message


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
async def test_what_is_no_number_unsets_nothing(admin: AdminServer, value: float) -> None:
    name = await admin.site.namespace()
    await admin.site.put(f"tenants/{name}", {"gpu_hours_budget": 100})
    code, refusal = await admin.refusal("UpdateTenant", pb.UpdateTenantRequest(name=name, gpu_hours_budget=value))
    assert (code, refusal.message) == (grpc.StatusCode.INVALID_ARGUMENT, "gpu_hours_budget must be a number")
    assert (await admin.site.get(f"tenants/{name}")).body["spec"]["gpuHoursBudget"] == 100


@pytest.mark.parametrize("name", ["😀" * 5000, "é" * 9000, "x" * 15_000])
async def test_a_refusal_fits_into_metadata_whatever_it_is_about(admin: AdminServer, name: str) -> None:
    code, refusal = await admin.refusal("GetTenantUsage", pb.GetTenantUsageRequest(tenant=name))
    assert (code, refusal.code) == (grpc.StatusCode.NOT_FOUND, Code.NOT_FOUND)
    assert refusal.message.startswith(f'tenants "{name[:100]}')
    texts = {"message": name, "details": {"code": "invalid", "hint": name, "causes": [{"message": name[:300]}] * 50}}
    status = status_of(texts)
    sent = quote(sentence_of(refusal_of(texts))), b64encode(details_of(status, refusal_of(texts)))
    assert sum(map(len, sent)) < 8192 - 128


async def test_a_hint_is_said_once(admin: AdminServer) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await admin.ask("GetUserUsage", pb.GetUserUsageRequest(), "no-token")
    assert (caught.value.details() or "").count("bursar login") == 1


async def test_usage_is_told_as_over_rest(admin: AdminServer) -> None:
    site, database = admin.site, admin.site.context.database
    name = await site.namespace()
    await site.put(f"tenants/{name}", {"gpu_hours_budget": 100})
    await aged(database, name, 10)
    await priced(database, {GPU: "0.001"})
    await spent(database, name, f"{name}/ann", {GPU: 4000, "nodes": 500}, begin=ago(hours=9), hours=5, klass="a100")
    rest = (await site.get(f"tenants/{name}/usage", days=30)).body
    found = await admin.ask("GetTenantUsage", pb.GetTenantUsageRequest(tenant=name, days=30))
    assert (found.tenant, found.days, found.gpu_hours_used, found.node_hours_used) == (name, 30, 20, 2.5)
    assert (found.gpu_hours_budget, found.utilization, found.source) == (100, 0.2, "internal")
    assert not found.HasField("node_hours_budget")
    assert found.end.seconds - found.begin.seconds == 30 * 86_400
    assert (found.cost.credits, found.cost.total) == (rest["cost"]["credits"], "$72.00")
    assert dict(found.cost.breakdown) == rest["cost"]["breakdown"]
    assert [(one.resource, one.device_class, one.hours) for one in found.resources] == [
        ("nodes", "", 2.5), (GPU, "a100", 20),
    ]  # fmt: skip
    assert [(one.user, one.gpu_hours_used) for one in found.users] == [(f"{name}/ann", 20)]
    token = await site.token("user", tenant=name, user="ann")
    for user in ("", "ann", f"{name}/ann"):
        own = await admin.ask("GetUserUsage", pb.GetUserUsageRequest(user=user), token)
        assert (own.user, own.days, own.gpu_hours_used) == (f"{name}/ann", 90, 20)
        assert [one.tenant for one in own.tenants] == [name]


async def test_others_usage_does_not_exist(admin: AdminServer) -> None:
    mine, theirs = await admin.site.namespace(), await admin.site.namespace()
    token = await admin.site.token("tenant-admin", tenant=mine, user="ann")
    for call, request in (
        ("GetTenantUsage", pb.GetTenantUsageRequest(tenant=theirs)),
        ("GetUserUsage", pb.GetUserUsageRequest(user=f"{theirs}/bob")),
    ):
        code, refusal = await admin.refusal(call, request, token)
        assert (code, refusal.code) == (grpc.StatusCode.NOT_FOUND, Code.NOT_FOUND)
    code, refusal = await admin.refusal("GetTenantUsage", pb.GetTenantUsageRequest(tenant=mine, days=-1), token)
    assert (code, [one.field for one in refusal.causes]) == (grpc.StatusCode.INVALID_ARGUMENT, ["days"])


async def test_over_tls_the_certificate_is_that_of_https(admin: AdminServer, tmp_path: Path) -> None:
    certificate, key, authority = ensure_server_certificate(tmp_path, ["127.0.0.1", "localhost"])
    database, app = admin.site.context.database, app_of(admin.site.context)
    async with opened_admin(database, app, "127.0.0.1:0", tls=(certificate, key)) as port:
        trusting = grpc.ssl_channel_credentials(authority.read_bytes())
        async with grpc.aio.secure_channel(f"127.0.0.1:{port}", trusting) as channel:
            runtime = AdminServer(admin.site, pb_grpc.AdminServiceStub(channel))
            request = pb.UpdateTenantRequest(name="default", weight=1)
            assert (await runtime.ask("UpdateTenant", request)).tenant.name == "default"
        async with grpc.aio.secure_channel(f"127.0.0.1:{port}", grpc.ssl_channel_credentials()) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await pb_grpc.AdminServiceStub(channel).UpdateTenant(request, timeout=5)
            assert caught.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


async def test_every_code_has_its_status_and_causes_fit_into_metadata() -> None:
    assert set(STATUS) == set(Code)
    many = [{"reason": "FieldValueInvalid", "message": "x" * 500, "field": f"spec.{n}"} for n in range(50)]
    refusal = refusal_of({"message": "m" * 5000, "details": {"code": "invalid", "causes": many, "hint": "h" * 5000}})
    assert 0 < len(refusal.causes) < 50
    assert refusal.ByteSize() < 6000


async def test_answers_keep_their_names() -> None:
    shown = {"user": "physics/ann", "days": 90, "from": "2026-11-01T00:00:00Z", "gpu_hours_used": 1.5, "later": 1}
    message = message_of(shown, pb.GetUserUsageResponse())
    assert (message.user, message.days, message.gpu_hours_used) == ("physics/ann", 90, 1.5)
    assert message.begin.ToJsonString() == "2026-11-01T00:00:00Z"
    assert flat_of(pb.UpdateTenantRequest(weight=2.0, burst_allowance=1.5)) == {"weight": 2, "burst_allowance": 1.5}
