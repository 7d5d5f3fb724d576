"""Decisions at approval gates on a real database: nothing unapproved is charged or bound, and approving charges."""

import asyncio

from bursar.ops.runtime.runtime import Runtime
from bursar.wire.kinds.registry import BY_NAME
from support.approval.requests import approval, claim, decide, gated, status, used
from support.runtime.runtime import (
    allocation,
    assert_counters_equal_charges,
    bind,
    change,
    code,
    create,
    delete,
    document,
    get,
    node,
    opened,
    refusal,
)

PENDING = "pending_requests"


async def test_a_request_is_recorded_and_holds_nothing(runtime: Runtime) -> None:
    await gated(runtime, limits={"clusters": 1})
    await node(runtime, "n1", cpu=8)
    made = document(await claim(runtime, "acme", "c1", clusters=1))
    assert made["status"]["approval"]["state"] == "pending"
    assert (made["status"]["reason"], "granted" in made["status"]) == ("awaiting_approval", False)
    assert (await used(runtime, "acme", "clusters"), await used(runtime, "acme", PENDING)) == (0, 1)
    await allocation(runtime, "acme", "a", cpu=4)
    assert (await used(runtime, "acme", "cpu"), await used(runtime, "acme", PENDING)) == (0, 2)
    assert code(await bind(runtime, "acme", "a", "n1")) == "stale"
    await assert_counters_equal_charges(runtime)


async def test_the_decision_that_closes_the_last_gate_charges(runtime: Runtime) -> None:
    await gated(runtime, gates=("quota", "manual"), limits={"clusters": 1})
    await claim(runtime, "acme", "c1", clusters=1)
    assert code(await decide(runtime, "ResourceClaim", "acme", "c1", gate="manual")) == "conflict"
    assert code(await decide(runtime, "ResourceClaim", "acme", "c1", gate="other")) == "unprocessable"
    assert code(await decide(runtime, "ResourceClaim", "acme", "c1", gate="quota")) == "ok"
    assert await used(runtime, "acme", "clusters") == 0
    done = document(await decide(runtime, "ResourceClaim", "acme", "c1", gate="manual", reason="fine"))["status"]
    assert (done["approval"]["state"], done["approval"]["by"], done["approval"]["reason"]) == (
        "approved",
        "ann",
        "fine",
    )
    assert done["granted"] == {"resources": {"clusters": "1"}}
    assert "reason" not in done
    assert (await used(runtime, "acme", "clusters"), await used(runtime, "acme", PENDING)) == (1, 0)
    assert code(await decide(runtime, "ResourceClaim", "acme", "c1", gate="manual")) == "already_decided"
    await assert_counters_equal_charges(runtime)


async def test_without_headroom_the_last_gate_stays_pending_and_says_why(runtime: Runtime) -> None:
    await gated(runtime, gates=("manual", "quota"), limits={"baremetal-hosts": 20})
    await claim(runtime, "acme", "big", baremetal_hosts=18)
    await claim(runtime, "acme", "more", baremetal_hosts=5)
    for name in ("big", "more"):
        assert code(await decide(runtime, "ResourceClaim", "acme", name, gate="manual")) == "ok"
    assert code(await decide(runtime, "ResourceClaim", "acme", "big")) == "ok"
    denied = refusal(await decide(runtime, "ResourceClaim", "acme", "more"))
    assert (denied.code, denied.causes[0].limit, denied.causes[0].requested_delta) == ("quota_exceeded", "20", "5")
    now = await approval(runtime, "ResourceClaim", "acme", "more")
    assert now["state"] == "pending"
    assert now["gates"]["manual"]["state"] == "approved"
    said = "would exceed baremetal-hosts by 3: limit 20, used 18, requested 5"
    assert (now["gates"]["quota"]["state"], now["gates"]["quota"]["reason"], now["reason"]) == ("pending", said, said)
    before = (await get(runtime, "ResourceClaim", "acme", "more")).revision
    assert code(await decide(runtime, "ResourceClaim", "acme", "more")) == "quota_exceeded"
    assert (await get(runtime, "ResourceClaim", "acme", "more")).revision == before, "the same reason is no change"
    await change(runtime, "Tenant", "", "acme", limits={"baremetal-hosts": 23})
    assert code(await decide(runtime, "ResourceClaim", "acme", "more")) == "ok"
    await assert_counters_equal_charges(runtime)


async def test_a_denied_request_holds_nothing_and_work_ends(runtime: Runtime) -> None:
    await gated(runtime, gates=("manual",))
    await node(runtime, "n1", cpu=8)
    await allocation(runtime, "acme", "a", cpu=4)
    assert code(await decide(runtime, "Allocation", "acme", "a", "deny", gate="manual", reason="too much")) == "ok"
    now = await status(runtime, "Allocation", "acme", "a")
    assert (now["phase"], now["reason"], now["message"]) == (
        "Failed",
        "ApprovalDenied",
        "denied at gate manual by ann: too much",
    )
    assert (await get(runtime, "Allocation", "acme", "a")).fields["status.phase"] == "Failed"
    assert (await used(runtime, "acme", "cpu"), await used(runtime, "acme", PENDING)) == (0, 0)
    assert code(await decide(runtime, "Allocation", "acme", "a", gate="manual")) == "already_decided"
    await assert_counters_equal_charges(runtime)


async def test_an_approved_allocation_is_bound_and_a_pending_one_is_not(runtime: Runtime) -> None:
    await gated(runtime)
    await node(runtime, "n1", cpu=8)
    await allocation(runtime, "acme", "a", cpu=4)
    await decide(runtime, "Allocation", "acme", "a")
    assert (await used(runtime, "acme", "cpu"), await used(runtime, "acme", PENDING)) == (4, 0)
    assert code(await bind(runtime, "acme", "a", "n1")) == "ok"
    await assert_counters_equal_charges(runtime)


async def test_an_approved_job_gets_its_allocations_and_they_pass_no_gate(runtime: Runtime) -> None:
    await gated(runtime, limits={"cpu": 5})
    await node(runtime, "n1", cpu=8)
    template = {"spec": {"resources": {"requests": {"cpu": "2"}}}}
    for name in ("train", "more"):
        spec = {"parallelism": 2, "completions": 3, "template": template}
        await create(runtime, "Job", {"metadata": {"name": name, "namespace": "acme"}, "spec": spec})
    assert await used(runtime, "acme", PENDING) == 2
    now = document(await decide(runtime, "Job", "acme", "train"))["status"]
    assert (now["approval"]["state"], now["active"], now["startedIndexes"]) == ("approved", 2, 2)
    assert (await used(runtime, "acme", "cpu"), await used(runtime, "acme", PENDING)) == (4, 1)
    assert "approval" not in await status(runtime, "Allocation", "acme", "train-0")
    assert code(await bind(runtime, "acme", "train-0", "n1")) == "ok"
    assert code(await decide(runtime, "Job", "acme", "more")) == "quota_exceeded"
    said = (await approval(runtime, "Job", "acme", "more"))["reason"]
    assert "would exceed cpu by 3: limit 5, used 4, requested 4" in said
    assert code(await delete(runtime, "Job", "acme", "more")) == "ok"
    assert await used(runtime, "acme", PENDING) == 0
    await assert_counters_equal_charges(runtime)


async def test_a_gang_is_decided_as_a_set(runtime: Runtime) -> None:
    await gated(runtime, limits={"cpu": 4})
    await node(runtime, "n1", cpu=8)
    gang = {"gangScheduling": {"groupId": "g", "minMembers": 2}}
    await allocation(runtime, "acme", "m1", spec=gang, cpu=2)
    assert code(await decide(runtime, "Allocation", "acme", "m1")) == "conflict"
    await allocation(runtime, "acme", "m2", spec=gang, cpu=2)
    assert code(await decide(runtime, "Allocation", "acme", "m2")) == "ok"
    for name in ("m1", "m2"):
        assert (await approval(runtime, "Allocation", "acme", name))["state"] == "approved"
    assert await used(runtime, "acme", "cpu") == 4
    await assert_counters_equal_charges(runtime)


async def test_asking_for_more_waits_while_the_old_size_goes_on_and_less_is_at_once(runtime: Runtime) -> None:
    await gated(runtime, limits={"clusters": 4})
    await claim(runtime, "acme", "c", clusters=2, hosts=3)
    await decide(runtime, "ResourceClaim", "acme", "c")
    await change(runtime, "ResourceClaim", "acme", "c", resources={"clusters": 3, "hosts": 1})
    now = await status(runtime, "ResourceClaim", "acme", "c")
    assert (now["approval"]["state"], now["approval"]["change"]["state"]) == ("approved", "pending")
    assert now["granted"]["resources"] == {"clusters": "2", "hosts": "1"}
    assert (await used(runtime, "acme", "clusters"), await used(runtime, "acme", "hosts")) == (2, 1)
    assert await used(runtime, "acme", PENDING) == 1
    await decide(runtime, "ResourceClaim", "acme", "c")
    now = await status(runtime, "ResourceClaim", "acme", "c")
    assert "change" not in now["approval"]
    assert now["granted"]["resources"] == {"clusters": "3", "hosts": "1"}
    assert (await used(runtime, "acme", "clusters"), await used(runtime, "acme", PENDING)) == (3, 0)
    await change(runtime, "ResourceClaim", "acme", "c", resources={"clusters": 1})
    assert (await used(runtime, "acme", "clusters"), await used(runtime, "acme", "hosts")) == (1, 0)
    await change(runtime, "ResourceClaim", "acme", "c", resources={"clusters": 9})
    assert code(await decide(runtime, "ResourceClaim", "acme", "c")) == "quota_exceeded"
    await decide(runtime, "ResourceClaim", "acme", "c", "deny", reason="no")
    now = await status(runtime, "ResourceClaim", "acme", "c")
    assert (now["approval"]["state"], now["approval"]["change"]["state"]) == ("approved", "denied")
    assert (await used(runtime, "acme", "clusters"), await used(runtime, "acme", PENDING)) == (1, 0)
    await assert_counters_equal_charges(runtime)


async def test_nobody_approves_their_own_request(runtime: Runtime) -> None:
    await gated(runtime)
    await claim(runtime, "acme", "c", clusters=1)
    assert code(await decide(runtime, "ResourceClaim", "acme", "c", by="test")) == "forbidden"
    await gated(runtime, "free", approval={"selfApproval": True})
    await claim(runtime, "free", "c", clusters=1)
    assert code(await decide(runtime, "ResourceClaim", "free", "c", by="test")) == "ok"


async def test_pending_requests_are_bounded(runtime: Runtime) -> None:
    await gated(runtime, limits={"pending_requests": 2}, enforcement="Queue")
    answers = [code(await claim(runtime, "acme", f"c{number}", clusters=1)) for number in range(3)]
    assert answers == ["ok", "ok", "quota_exceeded"]
    await gated(runtime, "wide")
    assert code(await claim(runtime, "wide", "c", clusters=1)) == "ok"
    assert BY_NAME["ResourceClaim"].requestable


async def test_of_many_racing_approvals_as_many_succeed_as_the_limit_allows(
    runtime: Runtime, database_url: str
) -> None:
    await gated(runtime, limits={"clusters": 3})
    for number in range(8):
        await claim(runtime, "acme", f"c{number}", clusters=1)
    async with opened(database_url) as rival:
        each = [
            decide(who, "ResourceClaim", "acme", f"c{number}", by=by)
            for number in range(8)
            for who, by in ((runtime, "ann"), (rival, "bob"))
        ]
        answers = [code(one) for one in await asyncio.gather(*each)]
    assert answers.count("ok") == 3, answers
    assert await used(runtime, "acme", "clusters") == 3
    await assert_counters_equal_charges(runtime)
