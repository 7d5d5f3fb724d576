"""A real scheduler, and nodes that are claimed and given back while it is at work."""

import asyncio

import pytest

from bursar.loops.informer import Keeper, Lost
from bursar.ops.nodes import claim as ops
from bursar.ops.runtime.runtime import Office
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
async def house(office: Office) -> Office:
    for name in ("physics", "history"):
        await tenant(office, name)
        await namespace(office, name, name)
    await node(office, "n1", gpu=4)
    await allow(office, 4)
    return office


async def test_sensitive_work_waits_for_a_claim_and_goes_there(house: Office) -> None:
    async with scheduling(house):
        await submit(house, "physics", "secret", ANN, sensitive=True)
        found = await until(house, "secret", UNCLAIMED, "physics")
        assert "physics/ann has claimed none of 1" in found["message"]
        await node(house, "n2", gpu=4)
        await claim(house, "n2", ANN)
        found = await until(house, "secret", PLACED, "physics")
        assert found["nodeName"] == "n2"


async def test_others_keep_off_a_node_from_when_it_is_claimed(house: Office) -> None:
    async with scheduling(house) as scheduler:
        await claim(house, "n1", ANN)
        for number in range(3):
            await submit(house, "history", f"theirs-{number}", EVE)
        await until(house, "theirs-2", waits_for("no_matching_nodes"), "history")
        await submit(house, "physics", "hers", ANN)
        assert (await until(house, "hers", PLACED, "physics"))["nodeName"] == "n1"
        await node(house, "n2", gpu=4)
        for number in range(3):
            assert (await until(house, f"theirs-{number}", PLACED, "history"))["nodeName"] == "n2"
        await settled(scheduler)


async def test_a_node_that_was_given_back_is_used_again_once_it_is_wiped(house: Office) -> None:
    async with scheduling(house):
        await claim(house, "n1", ANN)
        await submit(house, "history", "theirs", EVE)
        await until(house, "theirs", waits_for("no_matching_nodes"), "history")
        await release(house, "n1", ANN)
        await submit(house, "physics", "hers", ANN)
        await until(house, "hers", waits_for("no_matching_nodes"), "physics")
        await ops.end_wipe(house, "n1", origin("admin", "wiped"))
        for name, where in (("theirs", "history"), ("hers", "physics")):
            await until(house, name, PLACED, where)


async def test_while_nodes_are_claimed_and_released_nobody_ends_up_on_anothers(house: Office) -> None:
    """Claims come and go as fast as they can, with work of three people; what is placed is looked at afterwards."""
    names = [f"m{number}" for number in range(4)]
    for name in names:
        await node(house, name, gpu=1)
    people = {ANN: "physics", BOB: "physics", EVE: "history"}
    async with scheduling(house):
        for turn in range(6):
            await asyncio.gather(
                *(claim(house, name, who) for name, who in zip(names, [ANN, BOB, EVE, ANN], strict=True)),
                *(
                    submit(house, where, f"{who[-3:]}-{turn}-{secret}", who, sensitive=secret)
                    for who, where in people.items()
                    for secret in (True, False)
                ),
            )
            for name in names:
                if await release_if_empty(house, name):
                    await ops.end_wipe(house, name, origin("admin", "wiped"))
            for who, where in people.items():
                for secret in (True, False):
                    if (await status(house, f"{who[-3:]}-{turn}-{secret}", where)).get("phase") == "Scheduled":
                        await end(house, where, f"{who[-3:]}-{turn}-{secret}")
        # The storm may end without a single placement on a claimed node: one more claim has all the time it needs.
        await allow(house, 5)
        await node(house, "calm", gpu=1)
        await claim(house, "calm", DAN)
        await submit(house, "physics", "calm", DAN, sensitive=True)
        await until(house, "calm", PLACED, "physics")
    rows = await bound_on_claimed(house)
    assert any(row["holder"] for row in rows)
    assert all(row["holder"] == row["who"] or (row["holder"] is None and not row["sensitive"]) for row in rows), rows


async def release_if_empty(office: Office, name: str) -> bool:
    for who in (ANN, BOB, EVE):
        reply = await release(office, name, who)
        if hasattr(reply, "doc"):
            return True
    return False


async def bound_on_claimed(office: Office) -> list[dict[str, object]]:
    """Every bind there ever was: who submitted it, and who held its node in that moment, by the audit."""
    async with office.database.reader() as db:
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


# Keeping the world true.


async def follow(office: Office, keeper: Keeper) -> None:
    async with office.database.reader() as db:
        await keeper.catch_up(db)


async def test_what_is_followed_is_what_would_be_loaded(house: Office) -> None:
    await submit(house, "physics", "plain", ANN)
    await submit(house, "physics", "secret", ANN, sensitive=True)
    keeper = await loaded(house)
    for step in (
        claim(house, "n1", ANN),
        release(house, "n1", ANN),
        ops.end_wipe(house, "n1", origin("n1", "wipe-failed"), failed="exit 1"),
        ops.end_wipe(house, "n1", origin("admin", "wiped")),
    ):
        await step
        await follow(house, keeper)
        await assert_as_if_loaded(house, keeper)


async def test_a_queue_that_becomes_one_for_sensitive_work_is_loaded_anew(house: Office) -> None:
    await create(house, "Queue", {"metadata": {"name": "secrets"}, "spec": {"profile": "default"}})
    await submit(house, "physics", "hers", ANN, queue="secrets")
    keeper = await loaded(house)
    await change(house, "Queue", "", "secrets", profile="sensitive")
    with pytest.raises(Lost):
        await follow(house, keeper)
    keeper = await loaded(house)
    (group,) = keeper.world.groups.values()
    assert (group.key.shape.where.sensitive, group.key.shape.where.claimant) == (True, ANN)


async def test_a_queue_that_is_created_anew_for_sensitive_work_has_what_was_in_it_loaded_anew(house: Office) -> None:
    await create(house, "Queue", {"metadata": {"name": "secrets"}, "spec": {"profile": "default"}})
    await submit(house, "physics", "hers", ANN, queue="secrets")
    keeper = await loaded(house)
    await delete(house, "Queue", "", "secrets")
    await create(house, "Queue", {"metadata": {"name": "secrets"}, "spec": {"profile": "sensitive"}})
    with pytest.raises(Lost):
        await follow(house, keeper)
    assert (await loaded(house)).world.groups.popitem()[1].key.shape.where.sensitive
