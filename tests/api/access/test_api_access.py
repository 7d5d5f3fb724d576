"""Who sees and does what, over HTTP: another tenant's things do not exist, and every role ends where its table ends."""

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from joserfc import jwt
from joserfc.jwk import OKPKey

from bursar.api.http.oidc_settings import OidcSettings
from bursar.api.site.routes import build_routes
from bursar.config import ConfigError, requests_per_minute_from_environment
from support.api.site import STRATEGIC, Site, allocation, eventually, opened_site
from support.api.two_tenants import TwoTenants

pytestmark = pytest.mark.asyncio(loop_scope="module")


# Other tenants' things.


async def test_another_tenants_objects_do_not_exist_whatever_is_done_to_them(site: Site, cast: TwoTenants) -> None:
    before = await site.state()
    paths = (
        "namespaces/biology/allocations/biology-job",
        "namespaces/biology/resourcequotas/quota",
        "namespaces/biology",
    )
    for token in (cast.boss, cast.user, cast.viewer, cast.junior):
        for path in (*paths, "tenants/biology", "tenants/biology/quotas"):
            reply = await site.get(path, token=token)
            assert reply.status == 404, (path, reply)
            name = path.removesuffix("/quotas").rpartition("/")[2]
            assert f'"{name}" not found' in reply.message
    for path in paths:
        for reply in (
            await site.delete(path, token=cast.boss),
            await site.patch(path, {"metadata": {"labels": {"mine": "now"}}}, token=cast.boss),
            await site.put(path, {"metadata": {}, "spec": {}}, token=cast.boss),
        ):
            assert reply.status in (404, 400), reply
    path = "namespaces/biology/allocations"
    for reply in (
        await site.post(path, allocation("intruder", cpu=1), token=cast.user),
        await site.post(path, allocation("intruder", cpu=1), token=cast.user, dryRun="All"),
        await site.get(f"{path}/biology-job/status", token=cast.user),
    ):
        assert (reply.status, reply.body["reason"]) == (404, "NotFound"), reply
    for where in (path, "namespaces/nobodys/allocations"):
        assert (await site.get(where, token=cast.user)).body["items"] == [], "as if there were no such namespace"
        assert (await site.delete(where, token=cast.user)).status == 200
        assert (await site.post(f"{where}/bulk-release", {"labelSelector": "!nothing"}, token=cast.user)).status == 404
    assert await site.state() == before


async def test_a_dry_run_reaches_no_handler_that_would_change_something(site: Site) -> None:
    before = await site.state()
    checked = 0
    for route in build_routes("test"):
        if route.method == "GET" or route.offers_dry_run:
            continue
        path = re.sub(r"{[a-z]+}", "default", route.path)
        reply = await site.ask(route.method, path, {}, dryRun="All")
        assert (reply.status, reply.message) == (400, "dryRun is not supported here"), route
        checked += 1
    assert checked > 20
    assert await site.state() == before


async def test_what_is_hidden_answers_exactly_like_what_is_not_there(site: Site, cast: TwoTenants) -> None:
    for hidden, absent in (
        ("namespaces/biology/allocations/biology-job", "namespaces/biologx/allocations/biologx-job"),
        ("tenants/biology", "tenants/biologx"),
        ("namespaces/biology", "namespaces/biologx"),
    ):
        first = await site.get(hidden, token=cast.user, headers={"x-request-id": "same"})
        second = await site.get(absent, token=cast.user, headers={"x-request-id": "same"})
        assert json.dumps(first.body).replace("biology", "biologx") == json.dumps(second.body)
        assert first.status == second.status == 404


@pytest.mark.parametrize(
    ("who", "expected"),
    [
        ("user", {"physics-job"}),
        ("viewer", {"physics-job"}),
        ("junior", {"optics-job"}),
        ("boss", {"physics-job", "optics-job"}),
        ("rival", {"biology-job"}),
        ("node", {"physics-job"}),
        ("other_node", {"biology-job"}),
    ],
)
async def test_lists_show_only_ones_own(site: Site, cast: TwoTenants, who: str, expected: set[str]) -> None:
    token = getattr(cast, who)
    assert set((await site.get("allocations", token=token)).names) == expected
    table = await site.get(
        "allocations", token=token, headers={"accept": "application/json;as=Table;v=v1;g=meta.k8s.io"}
    )
    assert {row["cells"][0] for row in table.body["rows"]} == expected
    if not who.endswith("node"):
        owners = {name.removesuffix("-job") for name in expected}
        assert set((await site.get("namespaces", token=token)).names) == owners
        assert set((await site.get("tenants", token=token)).names) == owners
        quotas = await site.get("resourcequotas", token=token)
        assert {one["metadata"]["namespace"] for one in quotas.body["items"]} == owners
        events = await site.get("events", token=token)
        tenants = {one["involvedObject"].get("namespace") for one in events.body["items"]} - {None}
        assert tenants <= owners
        assert tenants


async def test_events_of_a_named_object_of_another_are_not_told(site: Site, cast: TwoTenants) -> None:
    selector = "involvedObject.name=biology-job,involvedObject.namespace=biology"
    assert (await site.get("events", token=cast.user, fieldSelector=selector)).body["items"] == []
    assert (await site.get("namespaces/biology/events", token=cast.user)).body.get("items", []) == []
    assert (await site.get("events", token=cast.rival, fieldSelector=selector)).body["items"] != []


async def test_a_watch_tells_only_of_ones_own(site: Site, cast: TwoTenants) -> None:
    async def first_names(token: str, count: int) -> list[str]:
        names: list[str] = []
        version = (await site.get("allocations", token=token)).version
        started.release()
        query = {"watch": "true", "resourceVersion": version, "timeoutSeconds": "20"}
        headers = {"authorization": f"Bearer {token}"}
        async with site.http.stream("GET", f"{site.url}/api/v1/allocations", params=query, headers=headers) as answer:
            async for line in answer.aiter_lines():
                names.append(json.loads(line)["object"]["metadata"]["name"])
                if len(names) == count:
                    break
        return names

    started = asyncio.Semaphore(0)
    watching = [asyncio.create_task(first_names(token, 2)) for token in (cast.user, cast.rival, cast.boss)]
    for _ in watching:
        await started.acquire()
    for index in range(2):
        for team in ("biology", "physics"):
            assert (
                await site.post(f"namespaces/{team}/allocations", allocation(f"{team}-w{index}", cpu=1))
            ).status == 201
    mine, theirs, bosses = await asyncio.gather(*watching)
    assert mine == bosses == ["physics-w0", "physics-w1"]
    assert theirs == ["biology-w0", "biology-w1"]
    for team in ("biology", "physics"):
        for index in range(2):
            await site.delete(f"namespaces/{team}/allocations/{team}-w{index}")


async def test_a_request_id_of_one_tenant_means_nothing_to_another(site: Site, cast: TwoTenants) -> None:
    headers = {"idempotency-key": "the-same"}
    first = await site.post(
        "namespaces/physics/allocations", allocation("same", cpu=1), token=cast.user, headers=headers
    )
    second = await site.post(
        "namespaces/biology/allocations", allocation("same", cpu=1), token=cast.rival, headers=headers
    )
    assert (first.status, second.status) == (201, 201)
    assert first.body["metadata"]["uid"] != second.body["metadata"]["uid"]
    await site.delete("namespaces/physics/allocations/same")
    await site.delete("namespaces/biology/allocations/same")


# Roles.


async def test_a_tenant_admin_manages_the_subtree_and_nothing_above_or_beside(site: Site, cast: TwoTenants) -> None:
    created = await site.post("namespaces", {"metadata": {"name": "physics-2"}}, token=cast.boss)
    assert created.status == 201
    assert created.body["metadata"]["labels"]["bursar.io/tenant"] == "physics", "it is the creator's"
    below = {"metadata": {"name": "optics-2", "labels": {"bursar.io/tenant": "optics"}}}
    assert (await site.post("namespaces", below, token=cast.boss)).status == 201
    quota = {"metadata": {"name": "more"}, "spec": {"hard": {"memory": "1Gi"}}}
    assert (await site.post("namespaces/optics-2/resourcequotas", quota, token=cast.boss)).status == 201
    assert (await site.get("tenants/optics/quotas", token=cast.boss)).status == 200
    assert (await site.get("tenants/physics", token=cast.junior)).status == 404, "a child does not see its parent"
    before = await site.state()
    beside = {"metadata": {"name": "foreign", "labels": {"bursar.io/tenant": "biology"}}}
    assert (await site.post("namespaces", beside, token=cast.boss)).status == 403
    for path, body in (
        ("tenants/physics", {"spec": {"limits": {"cpu": "1000000"}}}),
        ("tenants/optics", {"spec": {"limits": {"cpu": "1000000"}}}),
        ("nodes/worker-1", {"spec": {"unschedulable": True}}),
        ("queues/default", {"spec": {}}),
    ):
        assert (await site.patch(path, body, token=cast.boss)).status == 403, path
    assert await site.state() == before


async def test_a_namespace_cannot_be_moved_out_of_its_owners_sight(site: Site, cast: TwoTenants) -> None:
    await site.post("namespaces", {"metadata": {"name": "moving"}}, token=cast.boss)
    before = await site.state()
    whole = (await site.get("namespaces/moving", token=cast.boss)).body
    for labels in ({"bursar.io/tenant": "biology"}, {"bursar.io/tenant": None}, {"bursar.io/tenant": "nobody"}):
        reply = await site.patch("namespaces/moving", {"metadata": {"labels": labels}}, token=cast.boss)
        assert reply.status in (400, 403, 404, 422), reply
    remove = [{"op": "remove", "path": "/metadata/labels/bursar.io~1tenant"}]
    reply = await site.patch("namespaces/moving", remove, "application/json-patch+json", token=cast.boss)
    assert reply.status in (400, 403, 422), reply
    whole["metadata"]["labels"] = {"bursar.io/tenant": "biology"}
    assert (await site.put("namespaces/moving", whole, token=cast.boss)).status in (400, 403, 404)
    del whole["metadata"]["labels"]
    assert (await site.put("namespaces/moving", whole, token=cast.boss)).status in (400, 403, 404)
    assert await site.state() == before
    inside = {"metadata": {"labels": {"bursar.io/tenant": "optics"}}}
    assert (await site.patch("namespaces/moving", inside, token=cast.boss)).status == 200
    assert (await site.get("namespaces/moving", token=cast.junior)).status == 200
    assert (await site.patch("namespaces/moving", inside, token=cast.user)).status == 403


@pytest.mark.parametrize("who", ["user", "viewer", "boss", "junior"])
async def test_nobody_below_the_system_changes_the_limits_of_a_tenant(site: Site, cast: TwoTenants, who: str) -> None:
    token = getattr(cast, who)
    before = await site.state()
    for reply in (
        await site.put("tenants/physics", {"max_nodes": 100}, token=token),
        await site.patch("tenants/physics", {"spec": {"limits": {"nodes": "100"}}}, token=token),
        await site.post("tenants", {"metadata": {"name": "mine"}, "spec": {}}, token=token),
        await site.delete("tenants/optics", token=token),
        await site.post("tiers", {"metadata": {"name": "mine"}, "spec": {"limits": {}}}, token=token),
        await site.patch("settings/system", {"spec": {}}, token=token),
        await site.post("nodes", {"metadata": {"name": "mine"}, "spec": {"capacity": {"cpu": "1"}}}, token=token),
    ):
        assert (reply.status, reply.body["reason"]) == (403, "Forbidden"), reply
    if who != "boss":
        quota = {"metadata": {"name": "mine"}, "spec": {"hard": {"cpu": "1"}}}
        assert (await site.post("namespaces/physics/resourcequotas", quota, token=token)).status == 403
        assert (await site.patch("namespaces/physics/resourcequotas/quota", {"spec": {}}, token=token)).status == 403
        assert (await site.post("namespaces", {"metadata": {"name": "mine"}}, token=token)).status == 403
    assert await site.state() == before


async def test_a_service_may_set_limits_and_a_billing_admin_may_not(site: Site, cast: TwoTenants) -> None:
    service, billing = await site.token("service", user="waldur"), await site.token("billing-admin", user="bill")
    assert (await site.put("tenants/physics", {"max_nodes": 250}, token=service)).status == 200
    assert (await site.put("tenants/physics", {"max_nodes": 300}, token=billing)).status == 403
    assert (await site.get("tenants/physics", token=billing)).status == 200
    assert (await site.get("allocations", token=billing)).status == 403
    assert (await site.delete("tenants/optics", token=service)).status == 403


async def test_a_viewer_reads_and_writes_nothing(site: Site, cast: TwoTenants) -> None:
    before = await site.state()
    path = "namespaces/physics/allocations"
    for reply in (
        await site.get(path, token=cast.viewer),
        await site.get(f"{path}/physics-job", token=cast.viewer),
        await site.get(f"{path}/physics-job/status", token=cast.viewer),
        await site.get("tenants/physics/quotas", token=cast.viewer),
        await site.get("nodes", token=cast.viewer),
        await site.get("events", token=cast.viewer),
    ):
        assert reply.status == 200, reply
    for reply in (
        await site.post(path, allocation("x", cpu=1), token=cast.viewer),
        await site.put(f"{path}/physics-job", allocation("physics-job", cpu=1), token=cast.viewer),
        await site.patch(f"{path}/physics-job", {"metadata": {"labels": {"a": "b"}}}, token=cast.viewer),
        await site.patch(f"{path}/physics-job/status", {"status": {"phase": "Failed"}}, token=cast.viewer),
        await site.delete(f"{path}/physics-job", token=cast.viewer),
        await site.delete(path, token=cast.viewer),
        await site.post(f"{path}/bulk-release", {"labelSelector": "a=b"}, token=cast.viewer),
        await site.post("tokens", {"role": "viewer", "tenant": "physics"}, token=cast.viewer),
        await site.get("tokens", token=cast.viewer),
    ):
        assert reply.status == 403, reply
        assert "role viewer may not" in reply.message
    assert await site.state() == before


async def test_a_user_may_not_report_the_status_of_what_runs(site: Site, cast: TwoTenants) -> None:
    path = "namespaces/physics/allocations/physics-job/status"
    for token in (cast.user, cast.boss):
        assert (await site.patch(path, {"status": {"phase": "Succeeded"}}, token=token)).status == 403


async def test_a_node_speaks_only_for_itself_and_for_what_is_bound_to_it(site: Site, cast: TwoTenants) -> None:
    heartbeat = {"status": {"conditions": [{"type": "Ready", "status": "True"}]}}
    assert (await site.patch("nodes/worker-1/status", heartbeat, STRATEGIC, token=cast.node)).status == 200
    path = "namespaces/{0}/allocations/{0}-job"
    running = await site.patch(path.format("physics") + "/status", {"status": {"phase": "Running"}}, token=cast.node)
    assert (running.status, running.body["status"]["phase"]) == (200, "Running")
    assert (await site.get(path.format("physics"), token=cast.node)).status == 200
    before = await site.state()
    assert (await site.patch("nodes/worker-2/status", heartbeat, STRATEGIC, token=cast.node)).status == 403
    for team in ("biology", "optics"):  # bound to another, and to nobody
        assert (await site.get(path.format(team), token=cast.node)).status == 404
        reply = await site.patch(path.format(team) + "/status", {"status": {"phase": "Failed"}}, token=cast.node)
        assert reply.status == 404
    for reply in (
        await site.patch("nodes/worker-1", {"spec": {"capacity": {"cpu": "1000"}}}, token=cast.node),
        await site.delete("nodes/worker-1", token=cast.node),
        await site.delete(path.format("physics"), token=cast.node),
        await site.patch(path.format("physics"), {"metadata": {"labels": {"a": "b"}}}, token=cast.node),
        await site.post("namespaces/physics/allocations", allocation("x", cpu=1), token=cast.node),
        await site.get("namespaces", token=cast.node),
        await site.get("tenants/physics", token=cast.node),
        await site.get("tokens", token=cast.node),
        await site.post("nodes", {"metadata": {"name": "second"}, "spec": {}}, token=cast.node),
    ):
        assert reply.status == 403, reply
    assert await site.state() == before


async def test_a_bootstrap_token_is_good_for_joining_and_for_nothing_else(site: Site, cast: TwoTenants) -> None:
    bootstrap = await site.token("node", node="joiner")
    for path in ("nodes", "allocations", "namespaces", "tenants/physics", "tokens"):
        assert (await site.get(path, token=bootstrap)).status == 403, path
    assert (await site.patch("nodes/worker-1/status", {"status": {}}, token=bootstrap)).status == 403
    assert (await site.get("whoami", token=bootstrap)).body["role"] == "node"


# Rates.


@pytest_asyncio.fixture(loop_scope="module")
async def slow_site(site: Site, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Site]:
    """A second API process on the same database that allows five requests a minute."""
    monkeypatch.setenv("BURSAR_REQUESTS_PER_MINUTE", "5")
    limit = requests_per_minute_from_environment()
    async with opened_site(site.context.database.url, requests_per_minute=limit) as one:
        yield one


async def test_a_tenant_above_its_rate_is_told_so_in_the_designs_words(slow_site: Site, cast: TwoTenants) -> None:
    allowed = [await slow_site.get("nodes", token=cast.user) for _ in range(5)]
    assert [one.status for one in allowed] == [200] * 5
    assert [one.headers["x-ratelimit-remaining"] for one in allowed] == ["4", "3", "2", "1", "0"]
    reply = await slow_site.get("nodes", token=cast.viewer)  # of the same tenant
    assert reply.status == 429
    assert reply.headers["x-ratelimit-limit"] == "5"
    assert reply.headers["x-ratelimit-remaining"] == "0"
    assert 0 <= int(reply.headers["x-ratelimit-reset"]) - time.time() <= 61
    assert 1 <= int(reply.headers["retry-after"]) <= 60
    assert {name: reply.body[name] for name in ("kind", "code", "reason", "message")} == {
        "kind": "Status",
        "code": 429,
        "reason": "TooManyRequests",
        "message": "Rate limit exceeded. Tenant 'physics' limited to 5 req/min.",
    }
    assert (await slow_site.get("nodes", token=cast.rival)).status == 200, "another tenant has its own"
    assert (await slow_site.get("nodes", token=cast.node)).status == 200, "and so has a node"
    assert (await slow_site.get("/healthz", token=cast.user)).status == 200
    many = [await slow_site.get("nodes", token=slow_site.admin) for _ in range(20)]
    assert {one.status for one in many} == {200}, "administrators are exempt"
    assert "x-ratelimit-limit" not in many[0].headers


@pytest.mark.parametrize("text", ["0", "-1", "many", "１"])
async def test_a_rate_that_is_no_number_is_refused_at_the_start(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("BURSAR_REQUESTS_PER_MINUTE", text)
    with pytest.raises(ConfigError, match="BURSAR_REQUESTS_PER_MINUTE"):
        requests_per_minute_from_environment()


# JWTs.


async def test_a_jwt_of_the_issuer_is_an_identity(site: Site, cast: TwoTenants, tmp_path: Path) -> None:
    key, stranger = OKPKey.generate_key("Ed25519", {"kid": "k"}), OKPKey.generate_key("Ed25519", {"kid": "k"})
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps({"keys": [key.as_dict(private=False)]}))
    oidc = OidcSettings(issuer="https://idp.example", audience="bursar", jwks=str(keys))

    def signed(by: OKPKey = key, **changes: Any) -> str:
        claims = {"iss": "https://idp.example", "aud": "bursar", "sub": "ann", "exp": int(time.time()) + 300}
        claims |= {"bursar_tenant": "physics", "bursar_role": "user", "iat": int(time.time()), **changes}
        said = {name: value for name, value in claims.items() if value is not None}
        return jwt.encode({"alg": "Ed25519", "kid": "k"}, said, by, algorithms=["Ed25519"])

    async with opened_site(site.context.database.url, oidc=oidc) as one:
        who = await one.get("whoami", token=signed())
        assert who.body == {"user": "ann", "role": "user", "tenant": "physics"}
        assert set((await one.get("allocations", token=signed())).names) == {"physics-job"}
        assert (await one.get("tenants/biology", token=signed())).status == 404
        assert (await one.put("tenants/physics", {"max_nodes": 1}, token=signed())).status == 403
        for bad in (
            signed(by=stranger),
            signed(exp=int(time.time()) - 300),
            signed(aud="another"),
            signed(iss="https://evil.example"),
            signed(bursar_role="emperor"),
            signed(bursar_tenant=""),
            signed(bursar_tenant="nowhere"),
            signed(iat=int(time.time()) - 86_400),
            signed(iat=None),
            signed(bursar_role="system-admin", bursar_tenant="", sub="biology/bob"),
        ):
            reply = await one.get("whoami", token=bad)
            assert reply.status in (401, 403), reply
    assert (await site.get("whoami", token=signed())).status == 401, "where no issuer is configured"


async def test_a_jwt_is_good_for_the_tenant_that_it_was_issued_for(site: Site, tmp_path: Path) -> None:
    """One that is given the name of a deleted tenant is another."""
    key, keys = OKPKey.generate_key("Ed25519", {"kid": "k"}), tmp_path / "keys.json"
    keys.write_text(json.dumps({"keys": [key.as_dict(private=False)]}))
    name = site.name("ghost")

    def signed(issued_at: float) -> str:
        claims = {"iss": "https://idp.example", "aud": "bursar", "sub": "ann", "exp": int(time.time()) + 900}
        claims |= {"bursar_tenant": name, "bursar_role": "tenant-admin", "iat": int(issued_at)}
        return jwt.encode({"alg": "Ed25519", "kid": "k"}, claims, key, algorithms=["Ed25519"])

    oidc = OidcSettings(issuer="https://idp.example", audience="bursar", jwks=str(keys))
    async with opened_site(site.context.database.url, oidc=oidc) as one:
        old = signed(time.time() - 60)
        reply = await one.get("whoami", token=old)
        assert (reply.status, "does not exist" in reply.message) == (401, True)
        for _ in range(2):
            assert (await site.post("tenants", {"metadata": {"name": name}, "spec": {}})).status == 201
            born = (await site.get(f"tenants/{name}")).body["metadata"]["creationTimestamp"]
            new = signed(datetime.fromisoformat(born).timestamp())
            # For seconds another process may know the tree of before, and then nobody is shown anything.
            await eventually(partial(_lists, one, new, [name]))
            reply = await one.get("whoami", token=old)
            assert (reply.status, "before its tenant was created" in reply.message) == (401, True)
            assert (await site.delete(f"tenants/{name}")).status == 200
            # The server remembers for seconds that the JWT was good. What it is good for is asked each time.
            await eventually(partial(_lists, one, new, []))


async def _lists(site: Site, token: str, names: list[str]) -> bool:
    reply = await site.get("tenants", token=token)
    return (reply.names if reply.status == 200 else []) == names
