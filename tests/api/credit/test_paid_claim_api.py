"""Claims of who pays beforehand over the API: what is refused, what pays, and who is told of it."""

import pytest

from bursar.loops.claims import keep_claims
from bursar.ops.credit.credit import lapse
from support.api.credit_site import Bank, bank, code
from support.api.site import Site, allocation
from support.credit.paying import leases, machine
from support.runtime.runtime import bind

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def prepaid(site: Site, credit: str) -> tuple[Bank, str]:
    """A tenant that pays beforehand, and a node of four H100s at 0.01 credits a second."""
    one, name = await bank(site, credit), site.name("n")
    await site.patch("settings/system", {"spec": {"limits": {"sensitive_pool_size": "100"}}})
    await site.patch(f"tenants/{one.tenant}", {"spec": {"billing": {"mode": "prepaid"}}})
    await machine(site.context.runtime, name, gpus=4)
    return one, name


async def test_a_claim_is_refused_for_want_of_credit_and_paid_for_once_there_is_some(site: Site) -> None:
    lab, name = await prepaid(site, "20.5")
    refused = await site.post(f"nodes/{name}/claim", {}, token=lab.user)
    assert code(refused) == (403, "insufficient_credit")
    assert refused.message == f"account {lab.tenant} has 20.5 credits available, 24 are needed"
    assert (await site.get("claims", token=lab.user)).body["items"] == []
    assert (await lab.topup("9.5")).status == 201
    assert (await site.post(f"nodes/{name}/claim", {}, token=lab.user)).status == 200
    assert (await lab.balance())["holds"] == "24"
    (lease,) = (await site.get("leases", account=lab.tenant)).body["items"]
    assert (lease["work"], lease["node"], lease["gpu_count"], lease["window_seconds"]) == (
        f"claim of {name}", name, "4", 600,
    )  # fmt: skip
    closed = await lab.act(lease["lease_id"], "close")
    assert code(closed) == (409, "in_use")
    assert (await site.post(f"nodes/{name}/release", {}, token=lab.user)).status == 200
    assert (await lab.balance())["holds"] == "0"


async def test_that_nobody_pays_any_more_is_told_to_its_own_tenant_alone(site: Site) -> None:
    lab, name = await prepaid(site, "30")
    eve = await site.token("user", tenant=await site.namespace(), user="eve")
    runtime, work = site.context.runtime, site.name()
    await site.post(f"nodes/{name}/claim", {}, token=lab.user)
    body = allocation(work, gpu=1)
    assert (await site.post(f"namespaces/{lab.tenant}/allocations", body, token=lab.user)).status == 201
    await bind(runtime, lab.tenant, work, name)
    (lease,) = [one for one in await leases(runtime) if one["node"] == name]
    assert await lapse(runtime, {lease["id"]: lease["paid_until"]})
    assert name not in await keep_claims(runtime)
    (told,) = (await site.get("claims", token=lab.user)).body["items"]
    assert told["state"] == "Claimed"
    assert told["message"] == ("it is no longer paid for, and is released once it is empty: insufficient_credit")
    stopped = (await site.get(f"namespaces/{lab.tenant}/allocations/{work}", token=lab.user)).body["status"]
    assert (stopped["phase"], stopped["reason"]) == ("Terminating", "CreditExhausted")
    for reply in (
        await site.get(f"nodes/{name}", token=eve),
        await site.get("claims", token=eve),
        await site.get("events", fieldSelector=f"involvedObject.name={name}", token=eve),
    ):
        assert reply.status == 200
        assert lab.tenant not in str(reply.body)
        assert "redit" not in str(reply.body)
    events = (await site.get("events", fieldSelector=f"involvedObject.name={name}")).body["items"]
    assert events[-1]["message"] == "release by system:credit: CreditExhausted: insufficient_credit"
