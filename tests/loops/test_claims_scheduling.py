"""A real scheduler, and nodes that are claimed and given back while it is at work."""

import asyncio

import pytest

from bursar.loops.informer import FeedLost, Informer
from bursar.ops.nodes import claim as ops
from bursar.ops.runtime.runtime import Runtime
from support.nodes.claims import allow, claim, origin, release, submit
from support.runtime.runtime import change, create, delete, end, namespace, node, tenant
from support.scheduling.schedulers import (
    assert_as_if_loaded,
    is_in,
    loaded,
    scheduling,
    settled,
    status,
    until,
    waits_for,
)

ANN, BOB, DAN, EVE = "physics/ann", "physics/bob", "physics/dan", "history/eve"
PLACED = is_in("Scheduled")
UNCLAIMED = waits_for("no_claimed_nodes")


@pytest.fixture
async def context(runtime: Runtime) -> Runtime:
    for name in ("physics", "history"):
        await tenant(runtime, name)
        await namespace(runtime, name, name)
    await node(runtime, "n1", gpu=4)
    await allow(runtime, 4)
    return runtime


async def test_sensitive_work_waits_for_a_claim_and_goes_there(context: Runtime) -> None:
    async with scheduling(context):
        await submit(context, "physics", "secret", ANN, sensitive=True)
        found = await until(context, "secret", UNCLAIMED, "physics")
        assert "physics/ann has claimed none of 1" in found["message"]
        await node(context, "n2", gpu=4)
        await claim(context, "n2", ANN)
        found = await until(context, "secret", PLACED, "physics")
        assert found["nodeName"] == "n2"


async def test_others_keep_off_a_node_from_when_it_is_claimed(context: Runtime) -> None:
    async with scheduling(context) as scheduler:
        await claim(context, "n1", ANN)
        for number in range(3):
            await submit(context, "history", f"theirs-{number}", EVE)
        await until(context, "theirs-2", waits_for("no_matching_nodes"), "history")
        await submit(context, "physics", "hers", ANN)
        assert (await until(context, "hers", PLACED, "physics"))["nodeName"] == "n1"
        await node(context, "n2", gpu=4)
        for number in range(3):
            assert (await until(context, f"theirs-{number}", PLACED, "history"))["nodeName"] == "n2"
        await settled(scheduler)


async def test_a_node_that_was_given_back_is_used_again_once_it_is_wiped(context: Runtime) -> None:
    async with scheduling(context):
        await claim(context, "n1", ANN)
        await submit(context, "history", "theirs", EVE)
        await until(context, "theirs", waits_for("no_matching_nodes"), "history")
        await release(context, "n1", ANN)
        await submit(context, "physics", "hers", ANN)
        await until(context, "hers", waits_for("no_matching_nodes"), "physics")
        await ops.end_wipe(context, "n1", origin("admin", "wiped"))
        for name, where in (("theirs", "history"), ("hers", "physics")):
            await until(context, name, PLACED, where)


async def test_while_nodes_are_claimed_and_released_nobody_ends_up_on_anothers(context: Runtime) -> None:
    """Claims come and go as fast as they can, with work of three people; what is placed is looked at afterwards."""
    names = [f"m{number}" for number in range(4)]
    for name in names:
        await node(context, name, gpu=1)
    people = {ANN: "physics", BOB: "physics", EVE: "history"}
    async with scheduling(context):
        for turn in range(6):
            await asyncio.gather(
                *(claim(context, name, who) for name, who in zip(names, [ANN, BOB, EVE, ANN], strict=True)),
                *(
                    submit(context, where, f"{who[-3:]}-{turn}-{secret}", who, sensitive=secret)
                    for who, where in people.items()
                    for secret in (True, False)
                ),
            )
            for name in names:
                if await release_if_empty(context, name):
                    await ops.end_wipe(context, name, origin("admin", "wiped"))
            for who, where in people.items():
                for secret in (True, False):
                    if (await status(context, f"{who[-3:]}-{turn}-{secret}", where)).get("phase") == "Scheduled":
                        await end(context, where, f"{who[-3:]}-{turn}-{secret}")
        # The storm may end without a single placement on a claimed node: one more claim has all the time it needs.
        await allow(context, 5)
        await node(context, "calm", gpu=1)
        await claim(context, "calm", DAN)
        await submit(context, "physics", "calm", DAN, sensitive=True)
        await until(context, "calm", PLACED, "physics")
    rows = await bound_on_claimed(context)
    assert any(row["holder"] for row in rows)
    assert all(row["holder"] == row["who"] or (row["holder"] is None and not row["sensitive"]) for row in rows), rows


async def release_if_empty(runtime: Runtime, name: str) -> bool:
    for who in (ANN, BOB, EVE):
        reply = await release(runtime, name, who)
        if hasattr(reply, "doc"):
            return True
    return False


async def bound_on_claimed(runtime: Runtime) -> list[dict[str, object]]:
    """Every bind there ever was: who submitted it, and who held its node in that moment, by the audit."""
    async with runtime.database.reader() as db:
        rows = await db.fetch(
            """
            SELECT bound.status::json ->> 'user' AS who,
                   coalesce(bound.doc::json -> 'spec' ->> 'sensitive' = 'true', false) AS sensitive,
                   (SELECT CASE WHEN past.verb = 'claim' THEN replace(past.actor, 'user:', '')
                                WHEN past.verb = 'release' THEN 'nobody' END
                      FROM change AS past
                     WHERE past.kind = 'Node' AND past.name = bound.status::json ->> 'nodeName'
                       AND past.revision < bound.revision AND past.verb IN ('claim', 'release', 'wiped')
                     ORDER BY past.revision DESC LIMIT 1) AS holder
              FROM (SELECT change.revision, change.status, object.doc
                      FROM change JOIN object USING (kind, namespace, name)
                     WHERE change.kind = 'Allocation' AND change.verb = 'bind') AS bound
            """
        )
    return [dict(row) for row in rows]


# Keeping the cluster state up to date.


async def follow(runtime: Runtime, informer: Informer) -> None:
    async with runtime.database.reader() as db:
        await informer.catch_up(db)


async def test_what_is_followed_is_what_would_be_loaded(context: Runtime) -> None:
    await submit(context, "physics", "plain", ANN)
    await submit(context, "physics", "secret", ANN, sensitive=True)
    informer = await loaded(context)
    for step in (
        claim(context, "n1", ANN),
        release(context, "n1", ANN),
        ops.end_wipe(context, "n1", origin("n1", "wipe-failed"), failed="exit 1"),
        ops.end_wipe(context, "n1", origin("admin", "wiped")),
    ):
        await step
        await follow(context, informer)
        await assert_as_if_loaded(context, informer)


async def test_a_queue_that_becomes_one_for_sensitive_work_is_loaded_anew(context: Runtime) -> None:
    await create(context, "Queue", {"metadata": {"name": "secrets"}, "spec": {"profile": "default"}})
    await submit(context, "physics", "hers", ANN, queue="secrets")
    informer = await loaded(context)
    await change(context, "Queue", "", "secrets", profile="sensitive")
    with pytest.raises(FeedLost):
        await follow(context, informer)
    informer = await loaded(context)
    (group,) = informer.cluster.groups.values()
    assert (group.key.shape.where.sensitive, group.key.shape.where.claimant) == (True, ANN)


async def test_a_queue_that_is_created_anew_for_sensitive_work_has_what_was_in_it_loaded_anew(context: Runtime) -> None:
    await create(context, "Queue", {"metadata": {"name": "secrets"}, "spec": {"profile": "default"}})
    await submit(context, "physics", "hers", ANN, queue="secrets")
    informer = await loaded(context)
    await delete(context, "Queue", "", "secrets")
    await create(context, "Queue", {"metadata": {"name": "secrets"}, "spec": {"profile": "sensitive"}})
    with pytest.raises(FeedLost):
        await follow(context, informer)
    assert (await loaded(context)).cluster.groups.popitem()[1].key.shape.where.sensitive
