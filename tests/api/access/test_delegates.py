"""Services whose token names tenants: they manage the tenants below these, and reach nothing else."""

from collections.abc import AsyncIterator

import pytest

from support.api.site import Site, opened_site


@pytest.fixture
async def site(database_url: str) -> AsyncIterator[Site]:
    async with opened_site(database_url) as one:
        for name in ("portal", "other"):
            assert (
                await one.post("tenants", {"metadata": {"name": name}, "spec": {"limits": {"gpu": 8}}})
            ).status == 201
        yield one


async def delegate(site: Site, *tenants: str) -> str:
    made = await site.post("tokens", {"role": "service", "user": "coldfront", "tenants": list(tenants)})
    assert made.status == 201, made.body
    return str(made.body["status"]["token"])


async def test_a_delegate_makes_and_changes_tenants_below_its_own(site: Site) -> None:
    token = await delegate(site, "portal")
    tenant = {"metadata": {"name": "p1"}, "spec": {"parent": "portal", "limits": {"gpu": 4}}}
    assert (await site.post("tenants", tenant, token=token)).status == 201
    below = {"metadata": {"name": "p2"}, "spec": {"parent": "p1"}}
    assert (await site.post("tenants", below, token=token)).status == 201
    assert (await site.ask("PATCH", "tenants/p1", {"spec": {"limits": {"gpu": 5}}}, token=token,
                           media="application/merge-patch+json")).status == 200  # fmt: skip
    namespace = {"metadata": {"name": "p1-a", "labels": {"bursar.io/tenant": "p1"}}}
    assert (await site.post("namespaces", namespace, token=token)).status == 201
    quota = {"metadata": {"name": "q"}, "spec": {"hard": {"nvidia.com/gpu": 2}}}
    assert (await site.post("namespaces/p1-a/resourcequotas", quota, token=token)).status == 201
    assert (await site.ask("DELETE", "namespaces/p1-a/resourcequotas/q", token=token)).status == 200


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "tenants", {"metadata": {"name": "x"}, "spec": {"parent": "other"}}, 403),
        ("POST", "tenants", {"metadata": {"name": "x"}, "spec": {}}, 403),
        ("PATCH", "tenants/portal", {"spec": {"limits": {"gpu": 99}}}, 403),
        ("PATCH", "tenants/other", {"spec": {"limits": {"gpu": 99}}}, 404),
        ("PATCH", "tenants/p1", {"spec": {"parent": "other"}}, 403),
        ("PUT", "tenants/p1", {"max_gpu": 3, "parent": "other"}, 403),
        ("GET", "tenants/other", None, 404),
        ("POST", "namespaces", {"metadata": {"name": "n", "labels": {"bursar.io/tenant": "other"}}}, 403),
        ("POST", "tiers", {"metadata": {"name": "t"}}, 403),
        ("PATCH", "settings/system", {"spec": {"limits": {"gpu": 1}}}, 403),
        ("POST", "topups", {"account": "other", "amount": "5", "request_id": "r"}, 403),
        ("DELETE", "tenants/p1", None, 403),
        ("POST", "tokens", {"role": "user", "tenant": "p1"}, 403),
    ],
)  # fmt: skip
async def test_a_delegate_reaches_nothing_else(
    site: Site, method: str, path: str, body: dict[str, object] | None, status: int
) -> None:
    token = await delegate(site, "portal")
    tenant = {"metadata": {"name": "p1"}, "spec": {"parent": "portal"}}
    assert (await site.post("tenants", tenant, token=token)).status == 201
    media = "application/merge-patch+json" if method == "PATCH" else ""
    reply = await site.ask(method, path, body, token=token, media=media)
    assert reply.status == status, reply.body


async def test_a_later_tenant_of_the_name_is_not_the_delegates(site: Site) -> None:
    token = await delegate(site, "portal")
    assert (await site.ask("DELETE", "tenants/portal")).status == 200
    assert (await site.post("tenants", {"metadata": {"name": "portal"}, "spec": {}})).status == 201
    assert (await site.get("tenants/portal", token=token)).status == 404


async def test_a_list_shows_the_delegates_tenants_only(site: Site) -> None:
    token = await delegate(site, "portal")
    names = [one["metadata"]["name"] for one in (await site.get("tenants", token=token)).body["items"]]
    assert names == ["portal"]


async def test_only_approvers_and_services_name_tenants(site: Site) -> None:
    for body in ({"role": "user", "tenant": "portal", "tenants": ["portal"]}, {"role": "service", "gates": ["quota"]}):
        assert (await site.post("tokens", body)).status == 400
    assert (await site.post("tokens", {"role": "service", "tenants": ["absent"]})).status == 404
