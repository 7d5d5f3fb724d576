"""Requests for higher limits on a real database: the approval raises the tenant's limits in the same transaction."""

import asyncio
from typing import Any

import msgspec

from bursar.commands.command import Reply
from bursar.core.objects.approval import Decision, Verdict
from bursar.core.objects.object import Origin
from bursar.ops.approval import decide as ops
from bursar.ops.approval.decide import Judgement
from bursar.ops.runtime.runtime import Runtime
from support.approval.requests import approval, claim, decide, gated, used
from support.runtime.runtime import (
    assert_counters_equal_charges,
    change,
    code,
    create,
    delete,
    document,
    get,
    namespace,
    refusal,
    tenant,
)

PENDING = "pending_requests"


async def owned(runtime: Runtime, name: str = "acme", **spec: Any) -> None:
    await tenant(runtime, name, **spec)
    await namespace(runtime, name, name)


async def asked(runtime: Runtime, namespace: str, name: str, **limits: Any) -> Reply:
    named = {key.replace("_", "-"): value for key, value in limits.items()}
    spec = {"limits": named, "reason": "the next model"}
    return await create(runtime, "QuotaRequest", {"metadata": {"name": name, "namespace": namespace}, "spec": spec})


async def granted(runtime: Runtime, name: str, verdict: str = "approve", namespace: str = "acme", **who: Any) -> Reply:
    return await decide(runtime, "QuotaRequest", namespace, name, verdict, gate="manual", **who)


async def by_parent(
    runtime: Runtime, parent: str, name: str, namespace: str = "acme", verdict: str = "approve"
) -> Reply:
    found = await get(runtime, "QuotaRequest", namespace, name)
    by = f"{parent}/boss"
    decision = Decision("manual", Verdict(verdict), by)
    return await ops.decide(runtime, Judgement(found, decision, Origin(f"user:{by}", verdict), within=parent))


async def limits(runtime: Runtime, name: str = "acme") -> dict[str, Any]:
    found: dict[str, Any] = msgspec.json.decode((await get(runtime, "Tenant", "", name)).doc)["spec"].get("limits", {})
    return found


async def test_the_approval_raises_the_limits_and_work_fits_at_once(runtime: Runtime) -> None:
    await owned(runtime, limits={"clusters": 1, "cpu": 4})
    await claim(runtime, "acme", "c1", clusters=1)
    assert code(await claim(runtime, "acme", "c2", clusters=1)) == "quota_exceeded"
    made = document(await asked(runtime, "acme", "more", clusters="3"))
    assert made["status"]["approval"]["gates"] == {"manual": {"state": "pending"}}, "also without a policy"
    assert (await used(runtime, "acme", PENDING), await limits(runtime)) == (1, {"clusters": 1, "cpu": 4})
    before = (await get(runtime, "Tenant", "", "acme")).revision
    done = document(await granted(runtime, "more", reason="fine"))
    assert (done["status"]["approval"]["state"], done["status"]["approval"]["by"]) == ("approved", "ann")
    after = await get(runtime, "Tenant", "", "acme")
    request = await get(runtime, "QuotaRequest", "acme", "more")
    assert before < after.revision
    assert abs(request.revision - after.revision) == 1, "one transaction"
    assert (await limits(runtime), await used(runtime, "acme", PENDING)) == ({"clusters": "3", "cpu": 4}, 0)
    assert code(await claim(runtime, "acme", "c2", clusters=2)) == "ok"
    assert code(await claim(runtime, "acme", "c3", clusters=1)) == "quota_exceeded"
    assert code(await granted(runtime, "more")) == "already_decided"
    await assert_counters_equal_charges(runtime)


async def test_a_denied_or_withdrawn_request_changes_no_limit(runtime: Runtime) -> None:
    await owned(runtime, limits={"clusters": 1})
    await asked(runtime, "acme", "no", clusters=5)
    assert code(await granted(runtime, "no", "deny", reason="not now")) == "ok"
    assert (await approval(runtime, "QuotaRequest", "acme", "no"))["state"] == "denied"
    await asked(runtime, "acme", "gone", clusters=5)
    assert code(await delete(runtime, "QuotaRequest", "acme", "gone")) == "ok"
    assert (await limits(runtime), await used(runtime, "acme", PENDING)) == ({"clusters": 1}, 0)
    await assert_counters_equal_charges(runtime)


async def test_a_request_asks_for_more_than_the_present_limit(runtime: Runtime) -> None:
    await create(runtime, "Tier", {"metadata": {"name": "std"}, "spec": {"limits": {"nodes": 2}}})
    await owned(runtime, limits={"clusters": 3}, tier="std")
    lower = refusal(await asked(runtime, "acme", "a", clusters=2, nodes=4))
    assert (lower.code, lower.message) == ("unprocessable", "the limit on max_clusters is 3 already, requested 2")
    assert (lower.causes[0].limit, lower.causes[0].requested_delta) == ("3", "2")
    assert code(await asked(runtime, "acme", "b", clusters=3)) == "unprocessable"
    assert code(await asked(runtime, "acme", "c", nodes=2)) == "unprocessable", "the tier's limit counts"
    free = refusal(await asked(runtime, "acme", "d", widgets=5))
    assert "no limit on max_widgets" in free.message
    assert await used(runtime, "acme", PENDING) == 0
    await asked(runtime, "acme", "e", nodes=3)
    assert code(await granted(runtime, "e")) == "ok"
    assert await limits(runtime) == {"clusters": 3, "nodes": 3}


async def test_what_was_raised_meanwhile_is_left_as_it_is(runtime: Runtime) -> None:
    await owned(runtime, limits={"clusters": 1, "hosts": 1})
    await asked(runtime, "acme", "more", clusters=3, hosts=4)
    await change(runtime, "Tenant", "", "acme", limits={"clusters": 10, "hosts": 2})
    assert code(await granted(runtime, "more")) == "ok"
    assert await limits(runtime) == {"clusters": 10, "hosts": 4}
    await asked(runtime, "acme", "again", hosts=5)
    await change(runtime, "Tenant", "", "acme", limits={"clusters": 10, "hosts": 7})
    before = (await get(runtime, "Tenant", "", "acme")).revision
    assert code(await granted(runtime, "again")) == "ok"
    assert (await limits(runtime))["hosts"] == 7
    assert (await get(runtime, "Tenant", "", "acme")).revision == before, "nothing of the tenant changes"
    await assert_counters_equal_charges(runtime)


async def test_the_quota_gate_does_not_grant_limits(runtime: Runtime) -> None:
    await gated(runtime, gates=("quota",), limits={"clusters": 1})
    made = document(await asked(runtime, "acme", "more", clusters=3))
    assert list(made["status"]["approval"]["gates"]) == ["manual"]
    await gated(runtime, "beta", gates=("quota", "external:itsm"), limits={"clusters": 1})
    made = document(await asked(runtime, "beta", "more", clusters=3))
    assert list(made["status"]["approval"]["gates"]) == ["external:itsm"]


async def test_the_parents_administrator_grants_within_its_own_headroom(runtime: Runtime) -> None:
    await tenant(runtime, "top", limits={"clusters": 100})
    await tenant(runtime, "institute", parent="top", limits={"clusters": 10})
    await tenant(runtime, "sister", parent="institute", limits={"clusters": 5})
    await tenant(runtime, "free", parent="institute")
    await owned(runtime, parent="institute", limits={"clusters": 2, "hosts": 1})
    await asked(runtime, "acme", "more", clusters=6)
    lacking = refusal(await by_parent(runtime, "institute", "more"))
    assert lacking.code == "quota_exceeded"
    assert (lacking.causes[0].limit, lacking.causes[0].current_usage, lacking.causes[0].requested_delta) == (
        "10", "5", "6",
    )  # fmt: skip
    assert (await limits(runtime), (await approval(runtime, "QuotaRequest", "acme", "more"))["state"]) == (
        {"clusters": 2, "hosts": 1}, "pending",
    )  # fmt: skip
    for stranger in ("top", "acme", "sister"):
        assert code(await by_parent(runtime, stranger, "more")) == "forbidden"
        assert code(await by_parent(runtime, stranger, "more", verdict="deny")) == "forbidden"
    await change(runtime, "Tenant", "", "institute", parent="top", limits={"clusters": 11})
    assert code(await by_parent(runtime, "institute", "more")) == "ok"
    assert (await limits(runtime))["clusters"] == "6" or (await limits(runtime))["clusters"] == 6
    await asked(runtime, "acme", "hosts", hosts=50)
    assert code(await by_parent(runtime, "institute", "hosts")) == "ok", "a parent without a limit has headroom"
    await assert_counters_equal_charges(runtime)


async def test_nobody_decides_on_their_own_request(runtime: Runtime) -> None:
    await owned(runtime, limits={"clusters": 1})
    await asked(runtime, "acme", "more", clusters=2)
    requester = (msgspec.json.decode((await get(runtime, "QuotaRequest", "acme", "more")).status))["user"]
    assert code(await granted(runtime, "more", by=requester)) == "forbidden"
    assert await limits(runtime) == {"clusters": 1}


async def test_decisions_race_with_charges_and_changes_of_limits(runtime: Runtime) -> None:
    await owned(runtime, limits={"clusters": 1})
    for number in range(6):
        await asked(runtime, "acme", f"r{number}", clusters=number + 2)
    replies = await asyncio.gather(
        *(granted(runtime, f"r{number}") for number in range(6)),
        *(claim(runtime, "acme", f"c{number}", clusters=1) for number in range(12)),
        change(runtime, "Tenant", "", "acme", limits={"clusters": 4}),
    )
    assert {code(one) for one in replies[:6]} == {"ok"}
    assert int((await limits(runtime))["clusters"]) in (4, 7)
    assert await used(runtime, "acme", PENDING) == 0
    assert await used(runtime, "acme", "clusters") <= 7
    await assert_counters_equal_charges(runtime)


async def test_many_decisions_in_one_call_include_requests_for_limits(runtime: Runtime) -> None:
    await gated(runtime, gates=("manual",), limits={"clusters": 1})
    await claim(runtime, "acme", "c1", clusters=1)
    await asked(runtime, "acme", "more", clusters=2)
    await claim(runtime, "acme", "c2", clusters=1)
    items = []
    for kind, name in (("ResourceClaim", "c1"), ("QuotaRequest", "more"), ("ResourceClaim", "c2")):
        found = await get(runtime, kind, "acme", name)
        items.append(Judgement(found, Decision("manual", Verdict.APPROVE, "ann"), Origin("user:ann", "approve")))
    assert [code(one) for one in await ops.decide_many(runtime, items)] == ["ok", "ok", "quota_exceeded"]
    assert code(await decide(runtime, "ResourceClaim", "acme", "c2", gate="manual")) == "ok"
    await assert_counters_equal_charges(runtime)


async def test_limits_in_units_are_raised_in_units(runtime: Runtime) -> None:
    await change(runtime, "Settings", "", "system", quotas={"units": {"su": {"cpu": 1, "memory": "4Gi"}}})
    await tenant(runtime, "top", limits={"cpu": 12})
    await owned(runtime, parent="top", limits={"su": 2, "hosts": 1})
    assert code(await asked(runtime, "acme", "less", su=2)) == "unprocessable"
    await asked(runtime, "acme", "more", su=20)
    lacking = refusal(await by_parent(runtime, "top", "more"))
    assert [(one.dimension, one.limit, one.requested_delta) for one in lacking.causes] == [("cpu", "12", "20")]
    assert code(await granted(runtime, "more")) == "ok"
    assert await limits(runtime) == {"su": 20, "hosts": 1}
    await owned(runtime, "beta", limits={"cpu": 2})
    assert code(await asked(runtime, "beta", "more", su=5)) == "unprocessable", "its limits are not written in units"
    await assert_counters_equal_charges(runtime)
