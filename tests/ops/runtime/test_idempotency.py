"""Requests with an id: one effect and one answer, however often and wherever they are repeated."""

import asyncio
from dataclasses import replace
from typing import Any

import msgspec

from bursar.commands.lifecycle.dispatch import change_command
from bursar.commands.objects.object import ChangeObject
from bursar.core.objects.object import Key
from bursar.core.values.idempotency import IdempotencyKey, RequestKey
from bursar.core.values.refusal import Code, Refusal
from bursar.ops.objects import object as object_ops
from bursar.ops.runtime.runtime import Runtime
from bursar.wire.kinds.registry import BY_NAME
from support.runtime.runtime import (
    TEST,
    allocation,
    assert_counters_equal_charges,
    claim,
    code,
    counters,
    create,
    delete,
    document,
    namespace,
    opened,
    tenant,
)


async def used(runtime: Runtime, scope: str = "tenant:default", dimension: str = "nvidia.com/gpu") -> int:
    return (await counters(runtime))[scope, dimension].accepted


async def test_the_same_body_again_gets_the_same_answer(runtime: Runtime) -> None:
    first = await allocation(runtime, "default", "one", gpu=1, claimed=claim("r", "body"))
    again = await allocation(runtime, "default", "one", gpu=1, claimed=claim("r", "body"))
    assert code(first) == "ok"
    assert again == first
    assert await used(runtime) == 1000


async def test_the_answer_is_the_one_given_then_even_when_the_object_is_gone(runtime: Runtime) -> None:
    first = await allocation(runtime, "default", "one", gpu=1, claimed=claim("r", "body"))
    await delete(runtime, "Allocation", "default", "one")
    assert await allocation(runtime, "default", "one", gpu=1, claimed=claim("r", "body")) == first
    assert await used(runtime) == 0


async def test_another_body_under_the_same_id_is_refused_and_does_nothing(runtime: Runtime) -> None:
    await allocation(runtime, "default", "one", gpu=1, claimed=claim("r", "body"))
    refused = await allocation(runtime, "default", "two", gpu=1, claimed=claim("r", "other"))
    assert code(refused) == "request_id_reused"
    assert await used(runtime) == 1000
    assert code(await delete(runtime, "Allocation", "default", "two")) == "not_found"


async def test_the_same_id_in_another_scope_is_another_request(runtime: Runtime) -> None:
    other = IdempotencyKey(RequestKey("other", "r"), "x")
    assert code(await allocation(runtime, "default", "one", gpu=1, claimed=claim("r", "a"))) == "ok"
    assert code(await allocation(runtime, "default", "two", gpu=1, claimed=other)) == "ok"


async def test_repeats_inside_one_batch_have_one_effect(runtime: Runtime) -> None:
    answers = await asyncio.gather(
        *(allocation(runtime, "default", "one", gpu=1, claimed=claim("r", "body")) for _ in range(10)),
        allocation(runtime, "default", "two", gpu=1, claimed=claim("r", "other")),
    )
    assert {code(answer) for answer in answers[:10]} == {"ok"}
    assert all(answer == answers[0] for answer in answers[:10])
    assert code(answers[10]) == "request_id_reused"
    assert await used(runtime) == 1000
    await assert_counters_equal_charges(runtime)


async def test_repeats_from_two_processes_at_once_have_one_effect(runtime: Runtime, database_url: str) -> None:
    async with opened(database_url) as other:
        for number in range(15):
            answers = await asyncio.gather(
                *(
                    allocation(one, "default", f"a-{number}", gpu=1, claimed=claim(f"r-{number}", "body"))
                    for one in (runtime, other, runtime, other)
                )
            )
            assert [code(answer) for answer in answers] == ["ok"] * 4
            assert all(answer == answers[0] for answer in answers)
    assert await used(runtime) == 15_000
    await assert_counters_equal_charges(runtime)


async def test_two_processes_with_unlike_bodies_under_one_id_do_one_of_them(
    runtime: Runtime, database_url: str
) -> None:
    async with opened(database_url) as other:
        for number in range(10):
            answers = await asyncio.gather(
                allocation(runtime, "default", f"a-{number}", gpu=1, claimed=claim(f"r-{number}", "a")),
                allocation(other, "default", f"b-{number}", gpu=1, claimed=claim(f"r-{number}", "b")),
            )
            assert sorted(map(code, answers)) == ["ok", "request_id_reused"]
    assert await used(runtime) == 10_000


async def test_a_refusal_for_quota_is_remembered_when_there_is_capacity_again(runtime: Runtime) -> None:
    await tenant(runtime, "lab", limits={"nvidia.com/gpu": 1})
    await namespace(runtime, "lab", "lab")
    await allocation(runtime, "lab", "first", gpu=1)
    refused = await allocation(runtime, "lab", "one", gpu=1, claimed=claim("r", "body"))
    assert code(refused) == "quota_exceeded"
    await delete(runtime, "Allocation", "lab", "first")
    again = await allocation(runtime, "lab", "one", gpu=1, claimed=claim("r", "body"))
    assert again == refused
    assert isinstance(again, Refusal)
    assert again.causes
    assert code(await allocation(runtime, "lab", "one", gpu=1, claimed=claim("r2", "body"))) == "ok"


async def test_an_invalid_reference_is_not_remembered(runtime: Runtime) -> None:
    spec = {"priorityClass": "later"}
    refused = await allocation(runtime, "default", "one", spec=spec, claimed=claim("r", "body"))
    assert code(refused) == "invalid"
    await create(runtime, "PriorityClass", {"metadata": {"name": "later"}, "value": 5})
    assert code(await allocation(runtime, "default", "one", spec=spec, claimed=claim("r", "body"))) == "ok"


async def test_a_conflict_of_versions_is_not_remembered(runtime: Runtime) -> None:
    await allocation(runtime, "default", "one", gpu=1)
    key = Key("Allocation", "default", "one")

    async def label(revision: int | None = None) -> Any:
        before = await object_ops.get(runtime, key)
        assert not isinstance(before, Refusal)
        text = msgspec.json.decode(before.doc)
        text["metadata"]["labels"] = {"seen": "yes"}
        one = msgspec.convert(text, BY_NAME["Allocation"].type)
        command = change_command(BY_NAME["Allocation"], before, one, TEST, claim("r", "body"), spec_changed=False)
        assert isinstance(command, ChangeObject)
        if revision is not None:
            command = replace(command, expected=revision)
        return await object_ops.submit(runtime, command, tenant="test")

    refused = await label(revision=1)
    assert isinstance(refused, Refusal)
    assert refused.code is Code.CONFLICT
    done = await label()
    assert document(done)["metadata"]["labels"] == {"seen": "yes"}
    assert await label(revision=1) == done  # now there is an answer to repeat


async def test_a_claim_whose_transaction_was_undone_is_free_again(runtime: Runtime, database_url: str) -> None:
    """A rival that claimed the id and died leaves nothing behind; the request that waited for it does the work."""
    async with runtime.database.reader() as db:
        transaction = db.transaction()
        await transaction.start()
        await db.execute("INSERT INTO request (scope, request_id, fingerprint) VALUES ('test', 'r', 'body')")
        waiting = asyncio.create_task(allocation(runtime, "default", "one", gpu=1, claimed=claim("r", "body")))
        async with opened(database_url) as other, other.database.reader() as watcher, asyncio.timeout(5):
            while not await watcher.fetchval(  # noqa: ASYNC110
                "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
            ):
                await asyncio.sleep(0.01)
        assert not waiting.done()
        await transaction.rollback()
    assert code(await waiting) == "ok"


async def test_changes_of_the_tree_are_repeated_as_well(runtime: Runtime) -> None:
    body = {"metadata": {"name": "lab"}, "spec": {}}
    first = await create(runtime, "Tenant", body, claimed=claim("r", "body"))
    assert await create(runtime, "Tenant", body, claimed=claim("r", "body")) == first
    dangling = {"metadata": {"name": "x"}, "spec": {"parent": "nobody"}}
    assert code(await create(runtime, "Tenant", dangling, claimed=claim("r3", "b"))) == "invalid"
    await tenant(runtime, "nobody")
    assert code(await create(runtime, "Tenant", dangling, claimed=claim("r3", "b"))) == "ok"
