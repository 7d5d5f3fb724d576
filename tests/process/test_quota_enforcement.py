"""Quotas through every API: REST, SDK and command line, with a scheduler that leads and nodes that act.

Each test is named after what is promised.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from click.testing import CliRunner, Result

from bursar.cli.main import cli
from bursar.client import AsyncClient
from bursar.core.scheduling.cycle.plan import SchedulingPolicy
from bursar.loops import budget as budget_loop
from bursar.loops.budget import review
from bursar.loops.schedule import run_schedule
from bursar.ops.runtime.runtime import Runtime
from support.api.site import Site, allocation, eventually, opened_site
from support.runtime.runtime import code, node
from support.scheduling.schedulers import acting, stopped, term
from support.usage.spent_hours import spend

GPU = "nvidia.com/gpu"
UPDATE = {
    "max_nodes": 250,
    "max_concurrent_allocations": 50,
    "gpu_hours_budget": 150000,
    "node_hours_budget": 500000,
}


@pytest.fixture
async def site(database_url: str) -> AsyncIterator[Site]:
    """One tenant, physics, with a namespace of the same name."""
    async with opened_site(database_url) as one:
        await one.namespace(name="physics")
        yield one


@pytest.fixture
async def led(site: Site, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Site]:
    """The same with a leader, and a node of four GPUs that runs what is bound to it."""
    monkeypatch.setattr(budget_loop, "REVIEW_SECONDS", 0.5)
    runtime = site.context.runtime
    assert code(await node(runtime, "n1", gpu=4, cpu=8)) == "ok"
    policy = SchedulingPolicy(min_runtime_seconds=0.0, grace_seconds=0.0)
    leading = asyncio.create_task(run_schedule(runtime, await term(runtime), policy=policy))
    try:
        async with acting(runtime):
            yield site
    finally:
        await stopped(leading)


# Short words.


async def bursar(site: Site, *words: str, token: str = "") -> Result:
    """A command, as somebody types it."""
    environment = {"BURSAR_URL": site.url, "BURSAR_TOKEN": token or site.admin, "BURSAR_CONFIG": "/nonexistent/c.yaml"}
    done = await asyncio.to_thread(CliRunner(env=environment).invoke, cli, list(words))
    assert done.exit_code == 0, (words, done.output)
    return done


async def put(site: Site, fields: dict[str, Any], **options: Any) -> dict[str, Any]:
    reply = await site.put("tenants/physics", fields, **options)
    assert reply.status == 200, reply
    spec: dict[str, Any] = reply.body["spec"]
    return spec


async def submit(site: Site, name: str, expected: int = 201, **requests: Any) -> str:
    """The message of what was answered, where it was refused."""
    reply = await site.post("namespaces/physics/allocations", allocation(name, **requests))
    assert reply.status == expected, reply
    return reply.message if expected >= 400 else ""


async def phase(site: Site, name: str) -> str:
    reply = await site.get(f"namespaces/physics/allocations/{name}")
    return str(reply.body["status"].get("phase")) if reply.status == 200 else "gone"


async def until_in(site: Site, name: str, *phases: str) -> None:
    async def holds() -> bool:
        return await phase(site, name) in phases

    await eventually(holds, 60)


async def explained(site: Site, name: str) -> dict[str, Any]:
    reply = await site.get(f"namespaces/physics/allocations/{name}/explain")
    return dict(reply.body) if reply.status == 200 else {}


# Updating quotas.


async def by_command_line(site: Site) -> None:
    options = [(f"--{name.replace('_', '-')}", str(value)) for name, value in UPDATE.items()]
    done = await bursar(site, "admin", "tenant", "update", "physics", *(word for pair in options for word in pair))
    assert done.stdout == "tenant/physics updated\n"


async def by_python_sdk(site: Site) -> None:
    async with AsyncClient(site.url, site.admin) as client:
        await client.update_tenant("physics", UPDATE)


async def by_rest(site: Site) -> None:
    await put(site, UPDATE)


@pytest.mark.parametrize("how", [by_command_line, by_python_sdk, by_rest])
async def test_an_administrator_updates_quotas(site: Site, how: Callable[[Site], Awaitable[None]]) -> None:
    await put(site, {"fair_share_target": 0.15, "max_volumes": 3})
    await how(site)
    spec = (await site.get("tenants/physics")).body["spec"]
    assert spec == {
        "limits": {"nodes": 250, "allocations": 50, "volumes": 3},
        "gpuHoursBudget": 150000,
        "nodeHoursBudget": 500000,
        "fairShareTarget": 0.15,  # What is not named stays as it was.
    }
    quotas = (await site.get("tenants/physics/quotas")).body["quotas"]
    assert (quotas["nodes"]["limit"], quotas["nodes"]["source"]) == ("250", "override")


async def test_everything_about_a_tenant_can_be_updated_on_the_command_line(site: Site) -> None:
    await site.post("tenants", {"metadata": {"name": "science"}, "spec": {}})
    await site.post("tiers", {"metadata": {"name": "gold"}, "spec": {}})
    words = (
        "--fair-share-target 0.15 --burst-allowance 1.5 --weight 2 --tier gold --parent science --billing-mode prepaid "
        "--approval-policy manual --no-sensitive --enforcement Queue --gpu-hours-budget 10 --max-nodes 4"
    )
    await bursar(site, "admin", "tenant", "update", "physics", *words.split(), "--display-name", "Physics")
    assert (await site.get("tenants/physics")).body["spec"] == {
        "fairShareTarget": 0.15, "burstAllowance": 1.5, "weight": 2, "tier": "gold", "parent": "science",
        "billing": {"mode": "prepaid"}, "approvalPolicy": "manual", "sensitive": False, "enforcement": "Queue",
        "gpuHoursBudget": 10, "limits": {"nodes": 4}, "displayName": "Physics",
    }  # fmt: skip
    words = "--gpu-hours-budget none --fair-share-target none --billing-mode none --tier none --parent none"
    await bursar(site, "admin", "tenant", "update", "physics", *words.split(), "--max-nodes", "none")
    spec = (await site.get("tenants/physics")).body["spec"]
    assert spec["billing"] == {"mode": "none"}
    assert not {"gpuHoursBudget", "fairShareTarget", "tier", "parent"} & spec.keys()
    assert not spec.get("limits")


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"gpu_hours_budget": -1}, "spec.gpuHoursBudget"),
        ({"gpu_hours_budget": "much"}, "spec.gpuHoursBudget"),
        ({"approval_policy": "later"}, "spec.approvalPolicy"),
        ({"billing_mode": "later"}, "spec.billing.mode"),
        ({"sensitive": "yes"}, "spec.sensitive"),
        ({"max_nodes": -1}, "spec.limits"),
        ({"nodes": 5}, "nodes"),
    ],
)
async def test_an_update_that_makes_no_sense_is_refused_and_changes_nothing(
    site: Site, body: dict[str, Any], field: str
) -> None:
    before = await site.state()
    reply = await site.put("tenants/physics", {"max_nodes": 7, **body})
    assert reply.status == 400, reply
    assert field in json.dumps(reply.body)
    assert await site.state() == before


async def test_hard_quota_changes_take_effect_with_their_commit(led: Site) -> None:
    await put(led, {"max_concurrent_allocations": 1})
    await submit(led, "one", gpu=1)
    assert "(current: 1, requested: 1, limit: 1)" in await submit(led, "two", 403, gpu=1)
    await put(led, {"max_concurrent_allocations": 2})
    await submit(led, "two", gpu=1)


async def test_soft_quota_changes_reach_the_scheduler(led: Site) -> None:
    """Pending work shows the penalty of its budget: it follows the budget, whether that is lowered or raised."""
    await submit(led, "waits", spec={"nodeSelector": {"none": "such"}}, gpu=1)

    async def is_penalised(by: float) -> None:
        async def holds() -> bool:
            share = (await explained(led, "waits")).get("share") or {}
            return bool(share) and abs(share["budgetPenalty"] - by) < 1e-6

        await eventually(holds, 60)

    await is_penalised(1.0)
    await put(led, {"gpu_hours_budget": 0})
    await is_penalised(0.05)
    await put(led, {"gpu_hours_budget": 1000})
    await is_penalised(1.0)
    await put(led, {"node_hours_budget": 0})  # The worse of the two counts.
    await is_penalised(0.05)
    await put(led, {"node_hours_budget": None})
    await is_penalised(1.0)


# Pushed by Waldur, or whatever else keeps contracts.


async def test_waldur_pushes_quota_changes_with_its_service_token(led: Site) -> None:
    waldur = await led.token("service", user="waldur")
    spec = await put(led, {"max_nodes": 200, "gpu_hours_budget": 150000}, token=waldur)
    assert (spec["limits"], spec["gpuHoursBudget"]) == ({"nodes": 200}, 150000)
    changed = (await led.get("events", fieldSelector="involvedObject.kind=Tenant,involvedObject.name=physics")).body
    assert changed["items"][-1]["source"]["component"] == "service:waldur"
    for role, tenant, status in (
        ("tenant-admin", "physics", 403),
        ("user", "physics", 403),
        ("viewer", "physics", 403),
    ):
        token = await led.token(role, tenant=tenant, user="ann")
        assert (await led.put("tenants/physics", {"max_nodes": 900}, token=token)).status == status
    assert (await led.put("tenants/physics", {"max_nodes": 900}, token="nobody")).status == 401
    assert (await led.put("tenants/nobody", {"max_nodes": 900}, token=waldur)).status == 404
    assert (await led.get("tenants/physics")).body["spec"]["limits"] == {"nodes": 200}


async def test_reducing_max_nodes_below_current_usage_preempts_nothing_and_prevents_new_ones(led: Site) -> None:
    waldur = await led.token("service", user="waldur")
    assert code(await node(led.context.runtime, "n2", gpu=1)) == "ok"
    for name in ("a", "b"):
        await submit(led, name, spec={"exclusive": True}, gpu=1)
        await until_in(led, name, "Running")
    await put(led, {"max_nodes": 1}, token=waldur)
    message = await submit(led, "c", 403, spec={"exclusive": True}, gpu=1)
    assert message == (
        'allocation rejected: tenant "physics" exceeds max_nodes quota\n'
        "  Current usage: 2 nodes\n"
        "  New limit: 1 nodes\n"
        "  Hint: Wait for running allocations to complete, or contact your tenant admin."
    )
    assert [await phase(led, name) for name in ("a", "b", "c")] == ["Running", "Running", "gone"]


# Max nodes exhausted.


async def test_max_nodes_exhausted_is_rejected_with_a_clear_error_and_nothing_is_queued(led: Site) -> None:
    await put(led, {"max_nodes": 1})
    await submit(led, "one", spec={"exclusive": True}, gpu=1)
    before = await led.get("namespaces/physics/allocations")
    message = await submit(led, "two", 403, spec={"exclusive": True}, gpu=1)
    assert message == (
        'allocation rejected: tenant "physics" would exceed max_nodes quota (current: 1, requested: 1, limit: 1)'
    )
    assert (await led.get("namespaces/physics/allocations")).names == before.names == ["one"]


async def test_the_user_waits_for_what_runs_or_cancels_it_and_submits_again(led: Site) -> None:
    await put(led, {"max_nodes": 1})
    await submit(led, "one", spec={"exclusive": True}, gpu=1)
    await until_in(led, "one", "Running")
    await submit(led, "two", 403, spec={"exclusive": True}, gpu=1)
    assert (await led.delete("namespaces/physics/allocations/one")).status in (200, 202)
    await until_in(led, "one", "gone")
    assert await phase(led, "two") == "gone"  # It was not kept waiting for this.
    await submit(led, "two", spec={"exclusive": True}, gpu=1)
    await until_in(led, "two", "Running")


# Work that is pending for headroom.


async def test_status_shows_waiting_for_quota_headroom(led: Site) -> None:
    ann = await led.token("user", tenant="physics", user="ann")
    await put(led, {"max_concurrent_allocations": 2})
    for name in ("a", "b"):
        body = allocation(name, spec={"nodeSelector": {"zone": "x"}}, gpu=1)
        assert (await led.post("namespaces/physics/allocations", body, token=ann)).status == 201
    await put(led, {"max_concurrent_allocations": 1})
    assert (await led.patch("nodes/n1", {"metadata": {"labels": {"zone": "x"}}})).status == 200
    await until_in(led, "a", "Running")
    words = "waiting for quota headroom: tenant physics has 1 of 1 allocations bound, 1 asked"

    async def is_told() -> bool:
        return words in json.dumps((await led.get("namespaces/physics/allocations/b")).body["status"])

    await eventually(is_told, 60)
    mine = (await bursar(led, "status", token=ann)).stdout
    lines = [line.split(maxsplit=4) for line in mine.splitlines()]
    assert lines[0] == ["NAMESPACE", "NAME", "STATUS", "AGE", "DETAIL"]
    assert [line[:3] for line in lines[1:]] == [["physics", "a", "Running"], ["physics", "b", "Pending"]]
    assert lines[1][4] == "runs on n1"
    assert lines[2][4] == words
    one = (await bursar(led, "status", "b", "-n", "physics", token=ann)).stdout
    assert one.startswith(f"physics/b is Pending\n  detail   {words}")
    assert "  user     physics/ann\n" in one
    assert f"  why      {words}" in (await bursar(led, "explain", "b", "-n", "physics", token=ann)).stdout
    assert words in (await bursar(led, "get", "allocation", "b", "-n", "physics", "-o", "wide", token=ann)).stdout
    assert words in (await bursar(led, "get", "allocation", "b", "-n", "physics", "-o", "yaml", token=ann)).stdout
    bob = await led.token("user", tenant="physics", user="bob")
    assert (await bursar(led, "status", token=bob)).stderr == (
        "No active work of physics/bob. Add --ended to see finished work.\n"
    )
    assert "physics" in (await bursar(led, "status", "--user", "ann", token=bob)).stdout
    assert json.loads((await bursar(led, "status", "--json", token=ann)).stdout)["items"][1]["kind"] == "Allocation"
    # It is not cancelled, and runs when the limit allows.
    await put(led, {"max_concurrent_allocations": 2})
    await until_in(led, "b", "Running")


# An exhausted budget.


async def test_the_tenants_admin_is_notified_by_an_api_event_when_the_budget_is_exhausted(site: Site) -> None:
    runtime: Runtime = site.context.runtime
    admin = await site.token("tenant-admin", tenant="physics", user="ann")
    await site.namespace(name="chemistry")
    other = await site.token("tenant-admin", tenant="chemistry", user="bob")
    await put(site, {"gpu_hours_budget": 100})
    await spend(runtime, "physics", gpu_hours=130)
    assert await review(runtime) == 1
    selector = "involvedObject.kind=Tenant,reason=BudgetExhausted"
    (event,) = (await site.get("events", token=admin, fieldSelector=selector)).body["items"]
    assert (event["type"], event["involvedObject"]["name"]) == ("Warning", "physics")
    assert event["message"] == (
        "the budget is used up: 130.0 of 100 GPU-hours in the last 90 days. Running work continues; new work "
        "runs on capacity nobody else wants"
    )
    assert (await site.get("events", token=other, fieldSelector=selector)).body["items"] == []
    (shown,) = (await site.get("tenants", token=admin, fieldSelector="status.budget=Exhausted")).body["items"]
    conditions = {one["type"]: one for one in shown["status"]["conditions"]}
    assert conditions["BudgetExhausted"]["status"] == conditions["BudgetWarning"]["status"] == "True"
    assert conditions["BudgetExhausted"]["message"] == event["message"]
    metrics = (await site.get("/metrics")).body
    assert 'bursar_budget_utilization{source="internal",tenant="physics"} 1.3' in metrics
    assert 'bursar_budget_hours_used{of="gpu",tenant="physics"} 130.0' in metrics
    assert 'bursar_budget_hours{of="gpu",tenant="physics"} 100.0' in metrics


async def test_a_webhook_is_told_of_budgets(site: Site) -> None:
    made = await site.post(
        "webhooks", {"name": "ops", "url": "https://hooks.example/b", "types": ["budget.warning", "budget.exhausted"]}
    )
    assert made.status == 201, made
    refused = await site.post("webhooks", {"name": "no", "url": "https://hooks.example/b", "types": ["budget.low"]})
    assert refused.status == 400


async def test_waldur_can_update_an_exhausted_budget_and_the_tenants_admin_cannot(site: Site) -> None:
    runtime: Runtime = site.context.runtime
    waldur = await site.token("service", user="waldur")
    admin = await site.token("tenant-admin", tenant="physics", user="ann")
    await put(site, {"gpu_hours_budget": 100})
    await spend(runtime, "physics", gpu_hours=130)
    await review(runtime)
    assert (await site.put("tenants/physics", {"gpu_hours_budget": 900}, token=admin)).status == 403
    await put(site, {"gpu_hours_budget": 900}, token=waldur)
    assert await review(runtime) == 1
    selector = "involvedObject.kind=Tenant,reason=BudgetRestored"
    (event,) = (await site.get("events", token=admin, fieldSelector=selector)).body["items"]
    assert event["message"] == "14 % of the budget is used: 130.0 of 900 GPU-hours in the last 90 days"


async def test_an_exhausted_budget_rejects_nothing(led: Site) -> None:
    await put(led, {"gpu_hours_budget": 0})
    await submit(led, "one", gpu=1)
    await until_in(led, "one", "Running")


async def test_what_runs_beyond_the_share_is_marked_as_burst(led: Site) -> None:
    """The newest is: it is what brings the tenant above its share."""
    await put(led, {"fair_share_target": 0.5, "burst_allowance": 1.5})
    for name in ("old", "new"):
        await submit(led, name, gpu=2)
        await until_in(led, name, "Running")

    async def is_marked() -> bool:
        return bool((await explained(led, "new")).get("burst"))

    await eventually(is_marked, 60)
    told = await explained(led, "new")
    assert told["share"] | {"deficit": 0.0} == told["share"]
    assert (told["share"]["actual"], told["share"]["target"]) == (1.0, 0.5)
    assert told["message"].endswith(
        "; it is beyond its tenant's fair share, and is evicted first when other tenants need theirs"
    )
    assert "burst" not in await explained(led, "old")
    assert "evicted first" in (await bursar(led, "explain", "new", "-n", "physics")).stdout


async def test_whoever_leads_looks_after_budgets(led: Site) -> None:
    await put(led, {"gpu_hours_budget": 0})

    async def is_told() -> bool:
        return bool((await led.get("tenants", fieldSelector="status.budget=Exhausted")).names)

    await eventually(is_told, 30)
