"""A request that is repeated has one effect and one answer, over HTTP."""

import asyncio

import pytest

from support.api.site import Site, allocation, made

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.mark.parametrize("where", ["header", "body"])
async def test_a_repeated_request_has_one_effect_and_one_answer(site: Site, where: str) -> None:
    team = await site.namespace()
    key = f"{team}-{where}"
    body = {"metadata": {"generateName": "job-"}, "spec": {"resources": {"requests": {"cpu": "1"}}}}
    headers = {"idempotency-key": key} if where == "header" else {}
    sent = body if where == "header" else {**body, "request_id": key}
    path = f"namespaces/{team}/allocations"
    replies = await asyncio.gather(*(site.post(path, sent, headers=headers) for _ in range(8)))
    assert {one.status for one in replies} == {201}
    assert len({one.body["metadata"]["uid"] for one in replies}) == 1
    assert len((await site.get(path)).names) == 1

    other = {**sent, "metadata": {"generateName": "other-"}}
    reused = await site.post(path, other, headers=headers)
    assert (reused.status, reused.body["details"]["code"]) == (422, "request_id_reused")
    assert len((await site.get(path)).names) == 1


async def test_a_refusal_is_remembered_too_and_a_mistake_is_not(site: Site) -> None:
    team = await site.namespace()
    await site.put(f"tenants/{team}", {"max_concurrent_allocations": 0})
    path, headers = f"namespaces/{team}/allocations", {"idempotency-key": f"{team}-refused"}
    first = await site.post(path, allocation("one", cpu=1), headers=headers)
    assert first.status == 403
    await site.put(f"tenants/{team}", {"max_concurrent_allocations": 5})
    assert (await site.post(path, allocation("one", cpu=1), headers=headers)).message == first.message
    mistaken = {"idempotency-key": f"{team}-mistaken"}
    assert (await site.post(path, allocation("UPPER", cpu=1), headers=mistaken)).status == 400
    assert (await site.post(path, allocation("lower", cpu=1), headers=mistaken)).status == 201


async def test_a_repeated_patch_and_a_repeated_delete_answer_as_the_first_time(site: Site) -> None:
    team = await site.namespace()
    await made(site, team, "one", cpu=1)
    path, headers = f"namespaces/{team}/allocations/one", {"idempotency-key": f"{team}-patch"}
    first = await site.patch(path, {"metadata": {"labels": {"a": "1"}}}, headers=headers)
    await site.patch(path, {"metadata": {"labels": {"a": "2"}}})
    again = await site.patch(path, {"metadata": {"labels": {"a": "1"}}}, headers=headers)
    assert (again.status, again.body) == (first.status, first.body)
    assert (await site.get(path)).body["metadata"]["labels"] == {"a": "2"}
    gone = {"idempotency-key": f"{team}-delete"}
    assert (await site.delete(path, headers=gone)).status == 200
    assert (await site.delete(path, headers=gone)).status == 200, "a repeated delete is answered like the first"


async def test_a_caller_finds_its_own_request_id_in_the_answer_and_in_errors(site: Site) -> None:
    reply = await site.get("nodes/none", headers={"x-request-id": "my-own-id"})
    assert reply.headers["x-request-id"] == "my-own-id"
    assert reply.body["details"]["requestId"] == "my-own-id"
