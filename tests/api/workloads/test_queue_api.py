"""Queues over the API: one for sensitive work is kept while it has any."""

import pytest

from support.api.site import Site, allocation

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_a_queue_for_sensitive_work_is_kept_while_work_is_in_it(site: Site) -> None:
    team = await site.namespace()
    queue = site.name("secrets")
    assert (await site.post("queues", {"metadata": {"name": queue}, "spec": {"profile": "sensitive"}})).status == 201
    path = f"namespaces/{team}/allocations"
    assert (await site.post(path, allocation("study", spec={"queue": queue}, cpu=1))).status == 201
    before = await site.state()
    for refused in (
        await site.delete(f"queues/{queue}"),
        await site.patch(f"queues/{queue}", {"spec": {"profile": "ml"}}),
        await site.put(f"queues/{queue}", {"metadata": {"name": queue}, "spec": {}}),
    ):
        assert (refused.status, refused.body["details"]["code"]) == (409, "in_use")
        assert "1 pending allocation" in refused.message
        assert f"--field-selector spec.queue={queue}" in refused.body["details"]["hint"]
    assert await site.state() == before
    assert (await site.delete(f"{path}/study")).status == 200
    assert (await site.delete(f"queues/{queue}")).status == 200
    assert (await site.post(path, allocation("late", spec={"queue": queue}, cpu=1))).status in (400, 422)
