"""A claim begins with a wipe, unless its node is known to be clean; and a tenant may demand nodes that isolate."""

from typing import Any

import msgspec
import pytest

from bursar.core.nodes.node_claim import State
from bursar.core.objects.allocation import Phase
from bursar.core.values.refusal import Refusal
from bursar.ops.nodes import claim as ops
from bursar.ops.runtime.runtime import Office
from bursar.wire.kinds.node import TRACELESS, WIPES
from support.credit.ledgers import funded
from support.credit.paying import account, ends
from support.nodes.claims import allow, claim, claim_of, is_clean, joins, origin, release, submit
from support.nodes.paid_claims import ANN as PAYER
from support.nodes.paid_claims import HELD, clinic, placed
from support.runtime.runtime import bind, change, code, delete, document, end, namespace, node, refusal, tenant

ANN, EVE = "physics/ann", "history/eve"


@pytest.fixture
async def house(office: Office) -> Office:
    for name in ("physics", "history"):
        await tenant(office, name)
        await namespace(office, name, name)
    await node(office, "n1", gpu=4, cpu=16)
    await node(office, "n2", gpu=4, cpu=16)
    await allow(office, 2)
    return office


async def used(office: Office, name: str = "n1", who: str = EVE) -> None:
    """Somebody's work was on the node, and has ended."""
    space = who.partition("/")[0]
    assert code(await submit(office, space, "was-here", who)) == "ok"
    assert code(await bind(office, space, "was-here", name)) == "ok"
    await end(office, space, "was-here", Phase.RUNNING)
    await end(office, space, "was-here")


async def wiped(office: Office, name: str = "n1", failed: str = "") -> Any:
    """What the node's agent says of the wipe that it was asked for."""
    found = await claim_of(office, name)
    assert found is not None
    verb = "wipe-failed" if failed else "wiped"
    said = ops.end_wipe(
        office, name, origin(name, verb), claim_id=found.id, attempt=found.attempt, failed=failed
    )  # fmt: skip
    return document(await said)["status"]


async def usage_open(office: Office) -> list[str]:
    async with office.database.reader() as db:
        return [row["uid"].partition("-")[0] for row in await db.fetch("SELECT uid FROM usage_open ORDER BY uid")]


# Which nodes are clean.


async def test_a_node_is_clean_until_work_is_placed_that_may_leave_something(house: Office) -> None:
    assert await is_clean(house, "n1")
    await submit(house, "history", "waits", EVE)
    await bind(house, "history", "waits", "n1")
    assert not await is_clean(house, "n1")
    await end(house, "history", "waits")
    assert not await is_clean(house, "n1")


async def test_a_sandbox_that_removes_all_that_work_writes_keeps_its_node_clean(house: Office) -> None:
    await joins(house, "n1", TRACELESS)
    await used(house)
    assert await is_clean(house, "n1")
    assert document(await claim(house, "n1", ANN))["status"]["claim"]["state"] == "Claimed"


@pytest.mark.parametrize("placed_then", [True, False])
async def test_an_agent_that_comes_back_without_its_sandbox_soils_what_it_may_run(
    house: Office, placed_then: bool
) -> None:
    await joins(house, "n1", TRACELESS)
    await submit(house, "history", "runs", EVE)
    await bind(house, "history", "runs", "n1")
    if not placed_then:
        await end(house, "history", "runs")
    await joins(house, "n1", isolation="none")
    assert await is_clean(house, "n1") is not placed_then


# Claims of nodes that are not clean.


async def test_a_used_node_is_wiped_before_it_is_handed_over(house: Office) -> None:
    await joins(house, "n1", WIPES)
    await used(house)
    shown = document(await claim(house, "n1", ANN))["status"]["claim"]
    assert (shown["state"], shown["attempt"], "released" in shown) == ("Wiping", 1, False)
    for who, space in ((ANN, "physics"), (EVE, "history")):
        await submit(house, space, "early", who, sensitive=who == ANN)
        assert refusal(await bind(house, space, "early", "n1")).message == "node n1 is not wiped yet"
    assert await usage_open(house) == [], "nobody is billed for a node that they cannot use yet"
    after = await wiped(house)
    assert after["claim"]["state"] == "Claimed"
    assert await is_clean(house, "n1")
    assert await usage_open(house) == ["claim"]
    assert code(await bind(house, "physics", "early", "n1")) == "ok"


async def test_claiming_again_while_the_node_is_wiped_changes_nothing_and_others_are_refused(house: Office) -> None:
    await joins(house, "n1", WIPES)
    await used(house)
    first = document(await claim(house, "n1", ANN))["status"]["claim"]
    assert document(await claim(house, "n1", ANN))["status"]["claim"] == first
    assert refusal(await claim(house, "n1", EVE)).message == "node n1 is claimed by somebody else"
    told = refusal(await claim(house, "n1", "physics/bob")).message
    assert told == f"node n1 is claimed by {ANN} since {first['since']}"


@pytest.mark.parametrize("features", [(), (TRACELESS,)], ids=["no agent's hook", "only a sandbox since"])
async def test_a_used_node_that_nothing_wipes_cannot_be_claimed(house: Office, features: tuple[str, ...]) -> None:
    await used(house)
    await joins(house, "n1", *features)
    said = refusal(await claim(house, "n1", ANN))
    assert (str(said.code), said.causes[0].reason) == ("conflict", "not_clean")
    assert "its agent has no wipe hook" in said.message
    assert said.hint.endswith("bursar node wiped n1")
    assert await claim_of(house, "n1") is None
    assert document(await ops.end_wipe(house, "n1", origin("admin", "wiped")))["status"].get("claim") is None
    assert document(await claim(house, "n1", ANN))["status"]["claim"]["state"] == "Claimed"


async def test_nobody_calls_a_node_clean_on_which_work_is_placed_or_that_is_clean(house: Office) -> None:
    assert "there is nothing to wipe" in refusal(await ops.end_wipe(house, "n1", origin("admin", "wiped"))).message
    await submit(house, "history", "runs", EVE)
    await bind(house, "history", "runs", "n1")
    assert code(await ops.end_wipe(house, "n1", origin("admin", "wiped"))) == "in_use"


async def test_own_work_on_a_node_that_must_be_wiped_first_is_in_the_way(house: Office) -> None:
    await joins(house, "n1", WIPES)
    await submit(house, "physics", "mine", ANN)
    await bind(house, "physics", "mine", "n1")
    assert "while work is placed there" in refusal(await claim(house, "n1", ANN)).message
    await end(house, "physics", "mine")
    assert document(await claim(house, "n1", ANN))["status"]["claim"]["state"] == "Wiping"


async def test_a_wipe_that_fails_keeps_the_node_from_its_holder_until_it_succeeds(house: Office) -> None:
    await joins(house, "n1", WIPES)
    await used(house)
    await claim(house, "n1", ANN)
    after = await wiped(house, failed="the hook ended with exit code 3")
    assert after["claim"]["state"] == "WipeFailed"
    assert "released" not in after["claim"]
    assert document(await ops.wipe_node(house, "n1", origin("admin", "wipe")))["status"]["claim"]["attempt"] == 2
    assert (await wiped(house))["claim"]["state"] == "Claimed"


@pytest.mark.parametrize("failed", ["", "the hook ended with exit code 3"])
async def test_who_gives_up_before_the_node_is_wiped_leaves_it_as_it_was(house: Office, failed: str) -> None:
    await joins(house, "n1", WIPES)
    await used(house)
    await claim(house, "n1", ANN)
    before = await claim_of(house, "n1")
    assert before is not None
    if failed:
        await wiped(house, failed=failed)
    assert "claim" not in document(await release(house, "n1", ANN))["status"]
    assert not await is_clean(house, "n1")
    # The agent ends the wipe all the same; by now it is of the past.
    await ops.end_wipe(house, "n1", origin("n1", "wiped"), claim_id=before.id, attempt=1)
    assert await claim_of(house, "n1") is None
    assert code(await submit(house, "history", "next", EVE)) == "ok"
    assert code(await bind(house, "history", "next", "n1")) == "ok"


async def test_a_node_that_is_wiped_for_somebody_counts_and_keeps_their_tenant(house: Office) -> None:
    await allow(house, 1)
    await joins(house, "n1", WIPES)
    await used(house)
    await tenant(house, "optics")
    await claim(house, "n1", "optics/oz")
    assert code(await claim(house, "n2", EVE)) == "quota_exceeded"
    assert "still has claimed nodes: n1" in refusal(await delete(house, "Tenant", "", "optics")).message


async def test_what_a_holder_left_is_gone_with_the_wipe_after_it(house: Office) -> None:
    await claim(house, "n1", ANN)
    await submit(house, "physics", "secret", ANN, sensitive=True)
    await bind(house, "physics", "secret", "n1")
    await end(house, "physics", "secret")
    assert not await is_clean(house, "n1")
    await release(house, "n1", ANN)
    await wiped(house)
    assert await is_clean(house, "n1")


# Paid claims.


async def prepared(office: Office, amount: str) -> None:
    """A prepaid tenant with this much credit claims a node that is wiped first."""
    await clinic(office)
    await funded(office, amount)
    await joins(office, "n1", WIPES)
    await placed(office, "was-here", "n1")
    await ends(office, "n1", "was-here")


async def test_a_claim_is_paid_from_the_end_of_its_wipe(office: Office) -> None:
    await prepared(office, "100")
    shown = document(await claim(office, "n1", PAYER))["status"]["claim"]
    assert shown["state"] == "Wiping"
    assert (await account(office))["held"] == 0
    assert (await wiped(office))["claim"]["state"] == "Claimed"
    found = await claim_of(office, "n1")
    assert found is not None
    assert found.lease
    assert (await account(office))["held"] == HELD


async def test_who_cannot_pay_is_refused_before_anything_is_wiped(office: Office) -> None:
    await prepared(office, "47")
    assert refusal(await claim(office, "n1", PAYER)).message.endswith("48 are needed")
    assert await claim_of(office, "n1") is None


async def test_who_cannot_pay_any_more_once_it_is_wiped_has_no_claim(office: Office) -> None:
    await prepared(office, "48")
    assert code(await claim(office, "n1", PAYER)) == "ok"
    await placed(office, "dear", "n2", gpus=8)
    assert "claim" not in await wiped(office)
    assert await claim_of(office, "n1") is None
    assert await is_clean(office, "n1")
    assert await usage_open(office) == []


# Tenants that demand isolation.


async def demands(office: Office, name: str, isolation: str = "required") -> None:
    assert not isinstance(await change(office, "Tenant", "", name, isolation=isolation), Refusal)


@pytest.mark.parametrize(
    ("isolation", "bound"), [("bubblewrap", "ok"), ("none", "stale")], ids=["a sandbox", "an agent without one"]
)
async def test_work_that_demands_isolation_is_bound_only_where_there_is_a_sandbox(
    house: Office, isolation: str, bound: str
) -> None:
    await demands(house, "physics")
    await joins(house, "n1", isolation=isolation)
    await submit(house, "physics", "careful", ANN)
    await submit(house, "history", "careless", EVE)
    said = await bind(house, "physics", "careful", "n1")
    assert code(said) == bound
    if bound == "stale":
        assert refusal(said).message == "node n1 does not isolate tenants from each other"
    assert code(await bind(house, "history", "careless", "n1")) == "ok"


async def test_a_node_that_says_nothing_of_isolation_has_none_and_tenants_below_demand_the_same(house: Office) -> None:
    await demands(house, "physics")
    await tenant(house, "optics", parent="physics")
    await namespace(house, "optics", "optics")
    await submit(house, "optics", "careful", "optics/oz")
    assert code(await bind(house, "optics", "careful", "n1")) == "stale"
    await demands(house, "physics", "none")
    assert code(await bind(house, "optics", "careful", "n1")) == "ok"


def test_the_word_is_required_or_none() -> None:
    from bursar.wire.kinds.registry import BY_NAME

    one = msgspec.convert({"metadata": {"name": "t"}, "spec": {"isolation": "maybe"}}, BY_NAME["Tenant"].type)
    assert [fault.field for fault in BY_NAME["Tenant"].check(one)] == ["spec.isolation"]


def test_states_of_a_claim_tell_whether_the_node_is_prepared() -> None:
    from bursar.core.nodes.node_claim import Claim

    one = Claim("claim-1", "physics", "ann", "", "user:physics/ann")
    assert not one.prepares
    assert msgspec.structs.replace(one, state=State.WIPING).prepares
    assert not msgspec.structs.replace(one, state=State.WIPING, released="2026-11-16T12:00:00Z").prepares
