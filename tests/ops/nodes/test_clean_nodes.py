"""A claim begins with a wipe, unless its node is known to be clean; and a tenant may demand nodes that isolate."""

from typing import Any

import msgspec
import pytest

from bursar.core.nodes.node_claim import ClaimState
from bursar.core.objects.allocation import Phase
from bursar.core.values.refusal import Refusal
from bursar.ops.nodes import claim as ops
from bursar.ops.runtime.runtime import Runtime
from bursar.wire.kinds.node import TRACELESS, WIPES
from support.credit.ledgers import funded
from support.credit.paying import account, ends
from support.nodes.claims import allow, claim, claim_of, is_clean, joins, origin, release, submit
from support.nodes.paid_claims import ANN as PAYER
from support.nodes.paid_claims import HELD, clinic, placed
from support.runtime.runtime import bind, change, code, delete, document, end, namespace, node, refusal, tenant

ANN, EVE = "physics/ann", "history/eve"


@pytest.fixture
async def context(runtime: Runtime) -> Runtime:
    for name in ("physics", "history"):
        await tenant(runtime, name)
        await namespace(runtime, name, name)
    await node(runtime, "n1", gpu=4, cpu=16)
    await node(runtime, "n2", gpu=4, cpu=16)
    await allow(runtime, 2)
    return runtime


async def used(runtime: Runtime, name: str = "n1", who: str = EVE) -> None:
    """Somebody's work was on the node, and has ended."""
    space = who.partition("/")[0]
    assert code(await submit(runtime, space, "was-here", who)) == "ok"
    assert code(await bind(runtime, space, "was-here", name)) == "ok"
    await end(runtime, space, "was-here", Phase.RUNNING)
    await end(runtime, space, "was-here")


async def wiped(runtime: Runtime, name: str = "n1", failed: str = "") -> Any:
    """What the node's agent says of the wipe that it was asked for."""
    found = await claim_of(runtime, name)
    assert found is not None
    verb = "wipe-failed" if failed else "wiped"
    said = ops.end_wipe(
        runtime, name, origin(name, verb), claim_id=found.id, attempt=found.attempt, failed=failed
    )  # fmt: skip
    return document(await said)["status"]


async def usage_open(runtime: Runtime) -> list[str]:
    async with runtime.database.reader() as db:
        return [row["uid"].partition("-")[0] for row in await db.fetch("SELECT uid FROM usage_open ORDER BY uid")]


# Which nodes are clean.


async def test_a_node_is_clean_until_work_is_placed_that_may_leave_something(context: Runtime) -> None:
    assert await is_clean(context, "n1")
    await submit(context, "history", "waits", EVE)
    await bind(context, "history", "waits", "n1")
    assert not await is_clean(context, "n1")
    await end(context, "history", "waits")
    assert not await is_clean(context, "n1")


async def test_a_sandbox_that_removes_all_that_work_writes_keeps_its_node_clean(context: Runtime) -> None:
    await joins(context, "n1", TRACELESS)
    await used(context)
    assert await is_clean(context, "n1")
    assert document(await claim(context, "n1", ANN))["status"]["claim"]["state"] == "Claimed"


@pytest.mark.parametrize("placed_then", [True, False])
async def test_an_agent_that_comes_back_without_its_sandbox_soils_what_it_may_run(
    context: Runtime, placed_then: bool
) -> None:
    await joins(context, "n1", TRACELESS)
    await submit(context, "history", "runs", EVE)
    await bind(context, "history", "runs", "n1")
    if not placed_then:
        await end(context, "history", "runs")
    await joins(context, "n1", isolation="none")
    assert await is_clean(context, "n1") is not placed_then


# Claims of nodes that are not clean.


async def test_a_used_node_is_wiped_before_it_is_handed_over(context: Runtime) -> None:
    await joins(context, "n1", WIPES)
    await used(context)
    shown = document(await claim(context, "n1", ANN))["status"]["claim"]
    assert (shown["state"], shown["attempt"], "released" in shown) == ("Wiping", 1, False)
    for who, space in ((ANN, "physics"), (EVE, "history")):
        await submit(context, space, "early", who, sensitive=who == ANN)
        early = refusal(await bind(context, space, "early", "n1"))
        assert early.message == "node n1 must be wiped before it can be used"
    assert await usage_open(context) == [], "nobody is billed for a node that they cannot use yet"
    after = await wiped(context)
    assert after["claim"]["state"] == "Claimed"
    assert await is_clean(context, "n1")
    assert await usage_open(context) == ["claim"]
    assert code(await bind(context, "physics", "early", "n1")) == "ok"


async def test_claiming_again_while_the_node_is_wiped_changes_nothing_and_others_are_refused(context: Runtime) -> None:
    await joins(context, "n1", WIPES)
    await used(context)
    first = document(await claim(context, "n1", ANN))["status"]["claim"]
    assert document(await claim(context, "n1", ANN))["status"]["claim"] == first
    assert refusal(await claim(context, "n1", EVE)).message == "node n1 is claimed by somebody else"
    told = refusal(await claim(context, "n1", "physics/bob")).message
    assert told == f"node n1 is claimed by {ANN} since {first['since']}"


@pytest.mark.parametrize("features", [(), (TRACELESS,)], ids=["no agent's hook", "only a sandbox since"])
async def test_a_used_node_that_nothing_wipes_cannot_be_claimed(context: Runtime, features: tuple[str, ...]) -> None:
    await used(context)
    await joins(context, "n1", *features)
    said = refusal(await claim(context, "n1", ANN))
    assert (str(said.code), said.causes[0].reason) == ("conflict", "not_clean")
    assert "its agent has no wipe hook" in said.message
    assert said.hint.endswith("bursar node wiped n1")
    assert await claim_of(context, "n1") is None
    assert document(await ops.end_wipe(context, "n1", origin("admin", "wiped")))["status"].get("claim") is None
    assert document(await claim(context, "n1", ANN))["status"]["claim"]["state"] == "Claimed"


async def test_nobody_calls_a_node_clean_on_which_work_is_placed_or_that_is_clean(context: Runtime) -> None:
    assert "there is nothing to wipe" in refusal(await ops.end_wipe(context, "n1", origin("admin", "wiped"))).message
    await submit(context, "history", "runs", EVE)
    await bind(context, "history", "runs", "n1")
    assert code(await ops.end_wipe(context, "n1", origin("admin", "wiped"))) == "in_use"


async def test_own_work_on_a_node_that_must_be_wiped_first_is_in_the_way(context: Runtime) -> None:
    await joins(context, "n1", WIPES)
    await submit(context, "physics", "mine", ANN)
    await bind(context, "physics", "mine", "n1")
    assert "while work is placed there" in refusal(await claim(context, "n1", ANN)).message
    await end(context, "physics", "mine")
    assert document(await claim(context, "n1", ANN))["status"]["claim"]["state"] == "Wiping"


async def test_a_wipe_that_fails_keeps_the_node_from_its_holder_until_it_succeeds(context: Runtime) -> None:
    await joins(context, "n1", WIPES)
    await used(context)
    await claim(context, "n1", ANN)
    after = await wiped(context, failed="the hook ended with exit code 3")
    assert after["claim"]["state"] == "WipeFailed"
    assert "released" not in after["claim"]
    assert document(await ops.wipe_node(context, "n1", origin("admin", "wipe")))["status"]["claim"]["attempt"] == 2
    assert (await wiped(context))["claim"]["state"] == "Claimed"


@pytest.mark.parametrize("failed", ["", "the hook ended with exit code 3"])
async def test_who_gives_up_before_the_node_is_wiped_leaves_it_as_it_was(context: Runtime, failed: str) -> None:
    await joins(context, "n1", WIPES)
    await used(context)
    await claim(context, "n1", ANN)
    before = await claim_of(context, "n1")
    assert before is not None
    if failed:
        await wiped(context, failed=failed)
    assert "claim" not in document(await release(context, "n1", ANN))["status"]
    assert not await is_clean(context, "n1")
    # The agent ends the wipe all the same; by now it is of the past.
    await ops.end_wipe(context, "n1", origin("n1", "wiped"), claim_id=before.id, attempt=1)
    assert await claim_of(context, "n1") is None
    assert code(await submit(context, "history", "next", EVE)) == "ok"
    assert code(await bind(context, "history", "next", "n1")) == "ok"


async def test_a_node_that_is_wiped_for_somebody_counts_and_keeps_their_tenant(context: Runtime) -> None:
    await allow(context, 1)
    await joins(context, "n1", WIPES)
    await used(context)
    await tenant(context, "optics")
    await claim(context, "n1", "optics/oz")
    assert code(await claim(context, "n2", EVE)) == "quota_exceeded"
    assert "still has claimed nodes: n1" in refusal(await delete(context, "Tenant", "", "optics")).message


async def test_what_a_holder_left_is_gone_with_the_wipe_after_it(context: Runtime) -> None:
    await claim(context, "n1", ANN)
    await submit(context, "physics", "secret", ANN, sensitive=True)
    await bind(context, "physics", "secret", "n1")
    await end(context, "physics", "secret")
    assert not await is_clean(context, "n1")
    await release(context, "n1", ANN)
    await wiped(context)
    assert await is_clean(context, "n1")


# Paid claims.


async def prepared(runtime: Runtime, amount: str) -> None:
    """A prepaid tenant with this much credit claims a node that is wiped first."""
    await clinic(runtime)
    await funded(runtime, amount)
    await joins(runtime, "n1", WIPES)
    await placed(runtime, "was-here", "n1")
    await ends(runtime, "n1", "was-here")


async def test_a_claim_is_paid_from_the_end_of_its_wipe(runtime: Runtime) -> None:
    await prepared(runtime, "100")
    shown = document(await claim(runtime, "n1", PAYER))["status"]["claim"]
    assert shown["state"] == "Wiping"
    assert (await account(runtime))["held"] == 0
    assert (await wiped(runtime))["claim"]["state"] == "Claimed"
    found = await claim_of(runtime, "n1")
    assert found is not None
    assert found.lease
    assert (await account(runtime))["held"] == HELD


async def test_who_cannot_pay_is_refused_before_anything_is_wiped(runtime: Runtime) -> None:
    await prepared(runtime, "47")
    assert refusal(await claim(runtime, "n1", PAYER)).message.endswith("48 are needed")
    assert await claim_of(runtime, "n1") is None


async def test_who_cannot_pay_any_more_once_it_is_wiped_has_no_claim(runtime: Runtime) -> None:
    await prepared(runtime, "48")
    assert code(await claim(runtime, "n1", PAYER)) == "ok"
    await placed(runtime, "dear", "n2", gpus=8)
    assert "claim" not in await wiped(runtime)
    assert await claim_of(runtime, "n1") is None
    assert await is_clean(runtime, "n1")
    assert await usage_open(runtime) == []


# Tenants that demand isolation.


async def demands(runtime: Runtime, name: str, isolation: str = "required") -> None:
    assert not isinstance(await change(runtime, "Tenant", "", name, isolation=isolation), Refusal)


@pytest.mark.parametrize(
    ("isolation", "bound"), [("bubblewrap", "ok"), ("none", "stale")], ids=["a sandbox", "an agent without one"]
)
async def test_work_that_demands_isolation_is_bound_only_where_there_is_a_sandbox(
    context: Runtime, isolation: str, bound: str
) -> None:
    await demands(context, "physics")
    await joins(context, "n1", isolation=isolation)
    await submit(context, "physics", "careful", ANN)
    await submit(context, "history", "careless", EVE)
    said = await bind(context, "physics", "careful", "n1")
    assert code(said) == bound
    if bound == "stale":
        assert refusal(said).message == "node n1 does not isolate tenants from each other"
    assert code(await bind(context, "history", "careless", "n1")) == "ok"


async def test_a_node_that_says_nothing_of_isolation_has_none_and_tenants_below_demand_the_same(
    context: Runtime,
) -> None:
    await demands(context, "physics")
    await tenant(context, "optics", parent="physics")
    await namespace(context, "optics", "optics")
    await submit(context, "optics", "careful", "optics/oz")
    assert code(await bind(context, "optics", "careful", "n1")) == "stale"
    await demands(context, "physics", "none")
    assert code(await bind(context, "optics", "careful", "n1")) == "ok"


def test_the_word_is_required_or_none() -> None:
    from bursar.wire.kinds.registry import BY_NAME

    one = msgspec.convert({"metadata": {"name": "t"}, "spec": {"isolation": "maybe"}}, BY_NAME["Tenant"].type)
    assert [fault.field for fault in BY_NAME["Tenant"].check(one)] == ["spec.isolation"]


def test_states_of_a_claim_tell_whether_the_node_is_prepared() -> None:
    from bursar.core.nodes.node_claim import NodeClaim

    one = NodeClaim("claim-1", "physics", "ann", "", "user:physics/ann")
    assert not one.prepares
    assert msgspec.structs.replace(one, state=ClaimState.WIPING).prepares
    assert not msgspec.structs.replace(one, state=ClaimState.WIPING, released="2026-11-16T12:00:00Z").prepares
