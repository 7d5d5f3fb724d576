"""Nodes that are claimed for sensitive work: who has them, who may use them, what must happen before others may."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from datetime import datetime
from typing import Any

import msgspec
import pytest

from bursar.commands.lifecycle.dispatch import change_command
from bursar.core.nodes.node_claim import ClaimState
from bursar.core.objects.allocation import Phase
from bursar.core.objects.object import Key
from bursar.core.values.access import Reach
from bursar.core.values.refusal import Refusal
from bursar.ops.nodes import claim as ops
from bursar.ops.objects import object as object_ops
from bursar.ops.runtime.runtime import Runtime
from bursar.wire.kinds.node import TRACELESS
from bursar.wire.kinds.registry import BY_NAME
from support.nodes.claims import EVERYTHING, allow, claim, claim_of, holders, joins, origin, release, submit
from support.runtime.runtime import bind, change, code, delete, document, end, namespace, node, opened, refusal, tenant

ANN, BOB, EVE = "physics/ann", "physics/bob", "history/eve"


@pytest.fixture
async def context(runtime: Runtime) -> Runtime:
    """Two tenants, three nodes, and a pool of two."""
    for name in ("physics", "history"):
        await tenant(runtime, name)
        await namespace(runtime, name, name)
    for name in ("n1", "n2", "n3"):
        await node(runtime, name, gpu=4, cpu=16)
    await allow(runtime, 2)
    return runtime


@pytest.fixture
async def rivals(context: Runtime, database_url: str) -> AsyncIterator[list[Runtime]]:
    """Three processes, as far as the database can tell."""
    async with opened(database_url) as second, opened(database_url) as third:
        yield [context, second, third]


async def audit(runtime: Runtime, name: str) -> list[tuple[str, str, str]]:
    """What was done to a node: verb, actor and reason."""
    async with runtime.database.reader() as db:
        rows = await db.fetch(
            "SELECT verb, actor, reason FROM change WHERE kind = 'Node' AND name = $1 ORDER BY revision", name
        )
    return [(row["verb"], row["actor"], row["reason"]) for row in rows][1:]


async def usage(runtime: Runtime, table: str) -> list[dict[str, Any]]:
    async with runtime.database.reader() as db:
        return [dict(row) for row in await db.fetch(f"SELECT * FROM {table} ORDER BY uid")]


# Claiming.


async def test_a_claim_stands_with_the_node_and_in_the_audit(context: Runtime) -> None:
    shown = document(await claim(context, "n1", ANN, reason="study 42"))
    found = await claim_of(context, "n1")
    assert found is not None
    assert (found.holder, found.reason, found.state, found.by) == (ANN, "study 42", ClaimState.HELD, f"user:{ANN}")
    assert shown["status"]["claim"] == {"id": found.id, "state": "Claimed", "since": found.since}
    assert await audit(context, "n1") == [("claim", f"user:{ANN}", "")]


async def test_what_everybody_reads_of_a_claimed_node_does_not_say_whose_it_is(context: Runtime) -> None:
    await claim(context, "n1", ANN, reason="study 42")
    stored = await object_ops.get(context, Key("Node", "", "n1"))
    assert not isinstance(stored, Refusal)
    assert b"ann" not in stored.status + stored.doc
    assert b"physics" not in stored.status + stored.doc


async def test_a_node_that_others_use_or_that_takes_no_work_is_not_claimed(context: Runtime) -> None:
    await submit(context, "history", "job", EVE)
    await bind(context, "history", "job", "n1")
    said = refusal(await claim(context, "n1", ANN))
    assert (str(said.code), said.message) == ("in_use", "node n1 cannot be claimed while work is placed there")
    said = refusal(await claim(context, "n1", "history/abe"))
    assert said.message == "node n1 cannot be claimed while work is placed there: history/job"
    await change(context, "Node", "", "n2", unschedulable=True)
    assert "cordoned or not ready" in refusal(await claim(context, "n2", ANN)).message
    assert code(await claim(context, "gone", ANN)) == "not_found"
    assert await holders(context) == {}


async def test_who_is_alone_on_a_node_may_claim_it_and_is_counted_once(context: Runtime) -> None:
    await joins(context, "n1", TRACELESS)
    for name in ("one", "two"):
        await submit(context, "physics", name, ANN)
        await bind(context, "physics", name, "n1")
    await end(context, "physics", "one", Phase.RUNNING)
    assert [row["name"] for row in await usage(context, "usage_open")] == ["one"]
    await submit(context, "physics", "his", BOB)
    await bind(context, "physics", "his", "n1")
    assert code(await claim(context, "n1", ANN)) == "in_use"
    await end(context, "physics", "his")
    assert code(await claim(context, "n1", BOB)) == "in_use"
    assert code(await claim(context, "n1", ANN)) == "ok"
    assert [row["uid"].partition("-")[0] for row in await usage(context, "usage_open")] == ["claim"]
    await end(context, "physics", "two", Phase.RUNNING)
    await end(context, "physics", "one")
    await end(context, "physics", "two")
    assert [row["uid"].partition("-")[0] for row in await usage(context, "usage_open")] == ["claim"]
    await release(context, "n1", ANN)
    found = [(row["name"], row["phase"]) for row in await usage(context, "usage_record")]
    assert sorted(found) == [("n1", "Released"), ("one", "Claimed")]


async def test_a_dry_run_claims_nothing(context: Runtime) -> None:
    assert document(await claim(context, "n1", ANN, dry_run=True))["status"]["claim"]["state"] == "Claimed"
    assert await holders(context) == {}


async def test_users_of_a_tenant_that_may_not_claim_nothing(context: Runtime) -> None:
    await claim(context, "n1", ANN)
    await tenant(context, "optics", parent="physics")
    await change(context, "Tenant", "", "physics", sensitive=False)
    for who in (BOB, "optics/zoe"):
        said = refusal(await claim(context, "n2", who))
        assert str(said.code) == "forbidden"
        assert said.message == 'users of tenant "physics" may not claim nodes'
    assert await holders(context) == {"n1": ANN}, "what they have stays theirs"
    assert code(await claim(context, "n2", EVE)) == "ok"


async def test_a_tenant_whose_users_hold_nodes_is_not_deleted(context: Runtime) -> None:
    """A later tenant of the same name would have them."""
    await tenant(context, "optics")
    await claim(context, "n1", "optics/zoe")
    said = refusal(await delete(context, "Tenant", "", "optics"))
    assert (str(said.code), said.message) == ("in_use", 'tenants "optics" still has claimed nodes: n1')
    await release(context, "n1", "optics/zoe")
    assert code(await delete(context, "Tenant", "", "optics")) == "ok"
    pool = await ops.load_pool(context, EVERYTHING)
    assert [name for name, _ in pool.claims] == ["n1"], "what is left of it is an administrator's"


# The pool.


async def test_the_pool_is_a_hard_limit_with_numbers(context: Runtime) -> None:
    await claim(context, "n1", ANN)
    await claim(context, "n2", EVE)
    said = refusal(await claim(context, "n3", ANN))
    assert (
        said.message
        == "claim rejected: the system would exceed sensitive_pool_size (current: 2, requested: 1, limit: 2)"
    )
    (cause,) = said.causes
    assert (cause.dimension, cause.scope, cause.limit, cause.current_usage, cause.requested_delta) == (
        "sensitive_pool_size", "system", "2", "2", "1",
    )  # fmt: skip


async def test_a_smaller_pool_takes_nothing_from_anybody(context: Runtime) -> None:
    await claim(context, "n1", ANN)
    await claim(context, "n2", EVE)
    await allow(context, 1)
    assert await holders(context) == {"n1": ANN, "n2": EVE}
    said = refusal(await claim(context, "n3", ANN))
    assert "the system exceeds sensitive_pool_size (current: 2, requested: 1, limit: 1)" in said.message


# Races.


async def test_of_many_who_claim_one_node_at_once_the_first_has_it(rivals: list[Runtime]) -> None:
    people = [f"physics/p{number}" for number in range(12)]
    replies = await asyncio.gather(
        *(claim(runtime, "n1", who) for runtime, who in zip(itertools.cycle(rivals), people, strict=False))
    )
    won = [who for who, reply in zip(people, replies, strict=True) if code(reply) == "ok"]
    assert len(won) == 1
    assert await holders(rivals[0]) == {"n1": won[0]}
    lost = [reply for reply in replies if isinstance(reply, Refusal)]
    assert all(reply.message.startswith(f"node n1 is claimed by {won[0]} since ") for reply in lost)


async def test_however_many_claim_at_once_the_pool_is_never_passed(rivals: list[Runtime]) -> None:
    for number in range(8):
        await node(rivals[0], f"m{number}", gpu=1)
    await allow(rivals[0], 3)
    for _ in range(3):
        await asyncio.gather(
            *(
                claim(runtime, f"m{number}", ANN)
                for number, runtime in zip(range(8), itertools.cycle(rivals), strict=False)
            )
        )
        held = await holders(rivals[0])
        assert len(held) == 3
        for name in held:
            await release(rivals[0], name, ANN)
            await ops.end_wipe(rivals[1], name, origin("admin", "wiped"))


async def test_a_pool_that_shrinks_while_many_claim_is_never_passed_by_those_who_come_after(
    rivals: list[Runtime],
) -> None:
    for number in range(6):
        await node(rivals[0], f"m{number}", gpu=1)
    await allow(rivals[0], 6)
    claims = [
        claim(runtime, f"m{number}", ANN) for number, runtime in zip(range(6), itertools.cycle(rivals), strict=False)
    ]
    *replies, _ = await asyncio.gather(*claims, allow(rivals[2], 2))
    before = sum(code(reply) == "ok" for reply in replies)
    assert len(await holders(rivals[0])) == before
    if before >= 2:
        assert code(await claim(rivals[1], "n1", ANN)) == "quota_exceeded"


async def test_a_node_is_claimed_or_used_by_others_and_never_both(rivals: list[Runtime]) -> None:
    first, second, third = rivals
    for number in range(10):
        await node(first, f"m{number}", gpu=4)
        await submit(first, "history", f"job-{number}", EVE)
    await allow(first, 10)
    claims = [claim(second, f"m{number}", ANN) for number in range(10)]
    binds = [bind(third, "history", f"job-{number}", f"m{number}") for number in range(10)]
    replies = await asyncio.gather(*(one for pair in zip(claims, binds, strict=True) for one in pair))
    pairs = [(code(replies[2 * number]), code(replies[2 * number + 1])) for number in range(10)]
    assert set(pairs) <= {("ok", "stale"), ("in_use", "ok")}


async def test_of_a_release_and_a_bind_at_once_one_comes_first(rivals: list[Runtime]) -> None:
    first, second, third = rivals
    for number in range(8):
        await node(first, f"m{number}", gpu=4)
    await allow(first, 8)
    for number in range(8):
        await claim(first, f"m{number}", ANN)
        await submit(first, "physics", f"job-{number}", ANN, sensitive=True)
    releases = [release(second, f"m{number}", ANN) for number in range(8)]
    binds = [bind(third, "physics", f"job-{number}", f"m{number}") for number in range(8)]
    replies = await asyncio.gather(*(one for pair in zip(releases, binds, strict=True) for one in pair))
    pairs = [(code(replies[2 * number]), code(replies[2 * number + 1])) for number in range(8)]
    assert set(pairs) <= {("ok", "stale"), ("in_use", "ok")}


# Who may use it.


async def test_sensitive_work_goes_to_its_users_own_nodes_and_to_no_others(context: Runtime) -> None:
    await claim(context, "n1", BOB)
    await submit(context, "physics", "secret", ANN, sensitive=True)
    assert code(await bind(context, "physics", "secret", "n1")) == "stale"
    said = refusal(await bind(context, "physics", "secret", "n2"))
    assert said.message == "node n2 is not claimed by the user who submitted this sensitive work"
    await claim(context, "n2", ANN)
    assert code(await bind(context, "physics", "secret", "n2")) == "ok"


# Giving it back.


async def test_a_node_is_not_released_while_work_is_placed_there(context: Runtime) -> None:
    await claim(context, "n1", ANN)
    await submit(context, "physics", "secret", ANN, sensitive=True)
    await bind(context, "physics", "secret", "n1")
    said = refusal(await release(context, "n1", ANN))
    assert str(said.code) == "in_use"
    assert said.message == "node n1 cannot be released while work is placed there: physics/secret"
    await end(context, "physics", "secret")
    assert code(await release(context, "n1", ANN)) == "ok"


async def test_nobody_comes_near_a_node_that_is_not_wiped(context: Runtime) -> None:
    await claim(context, "n1", ANN)
    shown = document(await release(context, "n1", ANN))
    assert shown["status"]["claim"]["state"] == "Wiping"
    await submit(context, "physics", "hers", ANN, sensitive=True)
    await submit(context, "history", "theirs", EVE)
    for space, name in (("physics", "hers"), ("history", "theirs")):
        said = refusal(await bind(context, space, name, "n1"))
        assert (str(said.code), said.message) == ("stale", "node n1 must be wiped before it can be used")
    for who in (ANN, EVE):
        assert "is not wiped yet" in refusal(await claim(context, "n1", who)).message
    wiped = document(await ops.end_wipe(context, "n1", origin("admin", "wiped")))
    assert "claim" not in wiped["status"]
    assert code(await bind(context, "history", "theirs", "n1")) == "ok"


async def test_a_wipe_that_failed_is_tried_again_and_late_words_change_nothing(context: Runtime) -> None:
    await claim(context, "n1", ANN)
    await release(context, "n1", ANN)
    found = await claim_of(context, "n1")
    assert found is not None
    by_node = origin("n1", "wiped")
    shown = document(await ops.end_wipe(context, "n1", by_node, claim_id=found.id, attempt=1, failed="exit code 3"))
    assert shown["status"]["claim"]["state"] == "WipeFailed"
    (condition,) = [one for one in shown["status"]["conditions"] if one["type"] == "WipeFailed"]
    assert (condition["status"], condition["message"]) == ("True", "exit code 3")
    # That the first attempt was done after all is of the past once another was asked for.
    again = document(await ops.wipe_node(context, "n1", origin("admin", "wipe")))
    assert again["status"]["claim"] | {"since": "", "released": ""} == {
        "id": found.id, "state": "Wiping", "attempt": 2, "since": "", "released": "",
    }  # fmt: skip
    for attempt, other in ((1, found.id), (2, "claim-of-somebody-else")):
        await ops.end_wipe(context, "n1", by_node, claim_id=other, attempt=attempt)
        assert (await claim_of(context, "n1")) is not None
    done = document(await ops.end_wipe(context, "n1", by_node, claim_id=found.id, attempt=2))
    assert "claim" not in done["status"]
    assert "WipeFailed" not in {one["type"] for one in done["status"]["conditions"]}
    assert [verb for verb, _, _ in await audit(context, "n1")] == ["claim", "release", "wiped", "wipe", "wiped"]


# What else happens to nodes.


async def test_what_a_node_says_of_itself_does_not_touch_its_claim(context: Runtime) -> None:
    await claim(context, "n1", ANN)
    kind = BY_NAME["Node"]

    def edit(before: Any, known: dict[str, Any]) -> Any:
        known["status"] = {"phase": "Ready", "claim": {"state": "Claimed", "id": "mine"}}
        return change_command(
            kind, before, msgspec.convert(known, kind.type), origin("n1", "patch"), spec_changed=False
        )

    for name, state in (("n1", "Claimed"), ("n2", None)):
        reply = await object_ops.change(context, Key("Node", "", name), edit, tenant="")
        shown = document(reply)["status"].get("claim") or {}
        assert shown.get("state") == state
        assert shown.get("id") != "mine"
    assert await holders(context) == {"n1": ANN}


async def test_work_and_cordons_leave_a_claim_as_it_is(context: Runtime) -> None:
    await claim(context, "n1", ANN)
    await submit(context, "physics", "hers", ANN)
    await bind(context, "physics", "hers", "n1")
    await change(context, "Node", "", "n1", unschedulable=True)
    await end(context, "physics", "hers")
    assert await holders(context) == {"n1": ANN}


# Hours.


async def test_a_claim_counts_as_the_whole_node_used_or_idle(context: Runtime) -> None:
    await claim(context, "n1", ANN)
    found = await claim_of(context, "n1")
    assert found is not None
    (row,) = await usage(context, "usage_open")
    assert (row["uid"], row["node"], row["tenant"], row["username"]) == (found.id, "n1", "physics", ANN)
    assert msgspec.json.decode(row["amounts"]) == {"nvidia.com/gpu": 4000, "cpu": 16_000, "nodes": 1000}
    assert abs((row["started_at"] - datetime.fromisoformat(found.since)).total_seconds()) <= 1
    await release(context, "n1", ANN)
    assert await usage(context, "usage_open") == []
    (row,) = await usage(context, "usage_record")
    assert (row["uid"], row["username"], row["phase"]) == (found.id, ANN, "Released")
    await ops.end_wipe(context, "n1", origin("admin", "wiped"))
    assert len(await usage(context, "usage_record")) == 1


async def test_a_claim_that_was_refused_counts_for_nothing(context: Runtime) -> None:
    await claim(context, "n1", ANN)
    await claim(context, "n1", EVE)
    await claim(context, "n2", EVE, dry_run=True)
    assert {row["username"] for row in await usage(context, "usage_open")} == {ANN}


# Reading.


async def test_everybody_sees_how_full_the_pool_is_and_whose_claims_they_may_know(context: Runtime) -> None:
    await claim(context, "n1", ANN)
    await claim(context, "n2", EVE)
    for reach, seen in (
        (EVERYTHING, ["n1", "n2"]),
        (Reach(tenant="physics"), ["n1"]),
        (Reach(tenant="history", subtree=True), ["n2"]),
        (Reach(), []),
    ):
        pool = await ops.load_pool(context, reach)
        assert (pool.size, pool.claimed) == (2, 2)
        assert [name for name, _ in pool.claims] == seen
