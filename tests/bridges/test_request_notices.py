"""News of requests come to the webhooks of the requester's tenant, as signed CloudEvents, and to no other tenant."""

from datetime import timedelta

from bursar.core.objects.object import Key
from bursar.core.values.instant import timestamp
from bursar.ops.approval.decide import run_timer
from bursar.ops.runtime.clock import now
from bursar.ops.runtime.runtime import Runtime
from support.approval.requests import claim, decide, gated
from support.process.receivers import receiving
from support.process.webhook_sending import hook, send_all
from support.runtime.runtime import get


async def test_a_tenants_webhooks_get_what_became_of_its_requests(runtime: Runtime) -> None:
    for name in ("acme", "other"):
        await gated(runtime, name, limits={"hosts": 2})
    async with receiving() as theirs, receiving() as others:
        secret = await hook(runtime, "theirs", theirs, tenant="acme")
        await hook(runtime, "others", others, tenant="other", types=("request.approved",))
        for name, hosts in (("c1", 1), ("c2", 5), ("c3", 1)):
            await claim(runtime, "acme", name, hosts=hosts)
        end = timestamp(now() - timedelta(seconds=1))
        await decide(runtime, "ResourceClaim", "acme", "c1", until=end)
        await decide(runtime, "ResourceClaim", "acme", "c2")
        await decide(runtime, "ResourceClaim", "acme", "c3", "deny", reason="not now")
        await run_timer(runtime, Key("ResourceClaim", "acme", "c1"))
        await send_all(runtime)
        assert others.got == []
        assert all(one.is_signed_with(secret) for one in theirs.got)
        events = sorted((one.event for one in theirs.got), key=lambda event: str(event["time"]))
    assert [(event["type"].removeprefix("io.bursar."), event["subject"]) for event in events] == [
        ("request.approved", "resourceclaims/acme/c1"),
        ("request.pending", "resourceclaims/acme/c2"),
        ("request.denied", "resourceclaims/acme/c3"),
        ("request.expired", "resourceclaims/acme/c1"),
    ]
    assert {(event["source"], event["tenant"]) for event in events} == {("/bursar/approvals", "acme")}
    full = "would exceed max_hosts by 4: limit 2, used 1, requested 5"
    assert events[1]["data"] == {
        "kind": "ResourceClaim",
        "namespace": "acme",
        "name": "c2",
        "uid": (await get(runtime, "ResourceClaim", "acme", "c2")).uid,
        "tenant": "acme",
        "user": "test",
        "state": "pending",
        "gate": "quota",
        "reason": full,
        "by": "ann",
        "message": f"left pending at gate quota by ann: {full}",
        "growth": False,
    }
    last = events[-1]["data"]
    assert (last["state"], last["reason"], last["until"], last["onEnd"]) == ("expired", "Ended", end, "release")
