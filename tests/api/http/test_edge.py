"""What a request says of itself is said once and in one way, and answers tell browsers and caches what they are."""

import pytest

from bursar.api.http.app import RESERVE_PART
from bursar.api.http.ratelimit import MemoryRateLimit
from support.api.site import Site, node_body

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def raw(site: Site, path: str, headers: list[tuple[str, str]]) -> int:
    answer = await site.http.get(f"{site.url}{path}", headers=headers)
    return answer.status_code


@pytest.mark.parametrize("name", ["Authorization", "authorization"])
async def test_a_second_token_is_refused_whichever_is_good(site: Site, name: str) -> None:
    good, bad = f"Bearer {site.admin}", "Bearer wrong"
    for first, second in ((good, bad), (bad, good), (good, good)):
        assert await raw(site, "/api/v1/whoami", [("Authorization", first), (name, second)]) == 400
    assert await raw(site, "/api/v1/whoami", [("Authorization", good), ("X-A", "1"), ("X-A", "2")]) == 200


async def test_an_encoded_slash_is_part_of_a_name(site: Site) -> None:
    team = await site.namespace()
    for path in (
        f"/api/v1/namespaces/{team}%2Fallocations",
        f"/api/v1/namespaces/{team}%2fallocations",
        "/api%2Fv1/queues",
        "/api/v1/queues%2F",
        "/api/v1/%2F",
        "/api/v1/namespaces/%2F/allocations/%2F",
        "/api/v1/tenants/%00",
    ):
        assert (await site.get(path)).status == 404, path
    assert (await site.get(f"/api/v1/namespaces/{team}/%61llocations")).status == 200
    assert (await site.get("/api/v1/queues/")).status == 200


async def test_every_answer_says_that_it_is_what_it_says(site: Site) -> None:
    for path in ("/hello", "/docs", "/nothing", "queues", "whoami"):
        assert (await site.get(path)).headers["x-content-type-options"] == "nosniff", path
    query, headers = {"watch": "true", "timeoutSeconds": "0"}, {"authorization": f"Bearer {site.admin}"}
    watched = await site.http.get(f"{site.url}/api/v1/queues", params=query, headers=headers)
    assert watched.headers["x-content-type-options"] == "nosniff"
    assert "strict-transport-security" not in watched.headers, "plain HTTP cannot promise it"


async def test_secrets_are_not_kept_on_the_way(site: Site) -> None:
    made = [
        await site.post("tokens", {"role": "system-admin", "user": "ann"}),
        await site.post("nodes", node_body(site.name("worker"))),
    ]
    for reply in made:
        assert reply.status == 201, reply
        assert reply.body["status"]["token"]
        assert reply.headers["cache-control"] == "no-store"
    assert "cache-control" not in (await site.get("queues")).headers


async def test_who_has_a_tenants_name_does_not_use_its_rate(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    team = await site.namespace()
    service, viewer = await site.token("service", user=team), await site.token("viewer", tenant=team, user="vic")
    monkeypatch.setattr(site.context, "requests_per_minute", 5)
    monkeypatch.setattr(site.context, "service_requests_per_minute", 5)
    monkeypatch.setattr(site.context, "limits", MemoryRateLimit(clock_ns=lambda: 0))
    for _ in range(5):
        assert (await site.get("whoami", token=service)).status == 200
    assert (await site.get("whoami", token=service)).status == 429
    assert (await site.get("whoami", token=viewer)).status == 200


async def test_a_flood_of_one_approver_or_service_starves_no_other(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has a limit of its own, which is not that of a tenant."""
    everything = {"tenants": ["*"], "gates": ["*"]}
    flooding = await site.token("approver", user="flood", **everything)
    calm = await site.token("approver", user="calm", **everything)
    operator = await site.token("service", user="flood", tenant=await site.namespace())
    monkeypatch.setattr(site.context, "requests_per_minute", 1)
    monkeypatch.setattr(site.context, "service_requests_per_minute", 7)
    monkeypatch.setattr(site.context, "limits", MemoryRateLimit(clock_ns=lambda: 0))
    flood = [await site.get("whoami", token=flooding) for _ in range(8)]
    assert [one.status for one in flood] == [200] * 7 + [429]
    assert flood[-1].message == "Rate limit exceeded. Approver 'flood' limited to 7 req/min."
    for other in (calm, operator):
        assert [(await site.get("whoami", token=other)).status for _ in range(8)] == [200] * 7 + [429]


async def test_a_tenants_administrator_is_not_locked_out_by_its_flood(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    team = await site.namespace()
    viewer = await site.token("viewer", tenant=team, user="vic")
    boss = await site.token("tenant-admin", tenant=team, user="boss")
    monkeypatch.setattr(site.context, "requests_per_minute", 2 * RESERVE_PART)
    monkeypatch.setattr(site.context, "limits", MemoryRateLimit(clock_ns=lambda: 0))
    flood = [(await site.get("whoami", token=viewer)).status for _ in range(2 * RESERVE_PART + 1)]
    assert (flood.count(200), flood[-1]) == (2 * RESERVE_PART, 429)
    assert [(await site.get("whoami", token=boss)).status for _ in range(3)] == [200, 200, 429]
