"""Work that is paid for beforehand, over the API: how a tenant pays, what it would cost, and why it waits."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bursar.cli.main import cli
from bursar.commands.workloads.report import Report
from bursar.core.credit.account import Owner
from bursar.core.credit.lease import FROZEN
from bursar.core.credit.shortfall import OUT_OF_CREDIT
from bursar.core.objects.allocation import Phase
from bursar.core.objects.object import Key
from bursar.loops.schedule import run_schedule
from bursar.ops.credit.agentless_billing import pay_on
from bursar.ops.scheduling.leader import resign, stand
from bursar.ops.scheduling.placement import report
from support.api.site import TABLE, Document, Reply, Site, allocation, eventually
from support.credit.ledgers import funded, priced
from support.credit.paying import account
from support.runtime.runtime import TEST, bind, code

pytestmark = pytest.mark.asyncio(loop_scope="module")

GPU = "nvidia.com/gpu"
PREPAID = {"mode": "prepaid", "leaseSeconds": 15}


@asynccontextmanager
async def scheduling(site: Site) -> AsyncIterator[None]:
    """A leader that places what it can, and answers."""
    fence = await stand(site.context.database, "test", 60.0)
    assert fence is not None
    site.context.leader_queries._silent_until = float("-inf")
    task = asyncio.create_task(run_schedule(site.context.runtime, fence.number))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await resign(site.context.database, "test")


async def paying_team(site: Site, **billing: Any) -> str:
    team = await site.namespace()
    reply = await site.patch(f"tenants/{team}", {"spec": {"billing": {**PREPAID, **billing}}})
    assert reply.status == 200, reply
    return team


async def h100(site: Site, team: str, gpus: int = 8) -> None:
    """A node for this team alone, at 0.01 credits a second."""
    labels = {"gpu-type": f"h100-{team}", "team": team}
    body = {"metadata": {"name": f"node-{team}", "labels": labels}, "spec": {"capacity": {GPU: str(gpus)}}}
    assert (await site.post("nodes", body)).status == 201
    await priced(site.context.runtime, klass=f"h100-{team}")


def asking(name: str, team: str, gpu: int = 4, **spec: Any) -> Document:
    return allocation(name, spec={"nodeSelector": {"team": team}, **spec}, gpu=gpu)


# How a tenant pays.


async def test_how_a_tenant_pays_is_kept_and_shown(site: Site) -> None:
    team = await paying_team(site, discountPercent=2.5, leaseMode="reserve")
    shown = (await site.get(f"tenants/{team}")).body["spec"]["billing"]
    assert shown == {"mode": "prepaid", "leaseMode": "reserve", "leaseSeconds": 15, "discountPercent": 2.5}


@pytest.mark.parametrize("kind", ["tenants", "tiers"])
@pytest.mark.parametrize(
    ("billing", "field"),
    [
        ({"mode": "later"}, "mode"),
        ({"leaseMode": "lax"}, "leaseMode"),
        ({"leaseSeconds": 0}, "leaseSeconds"),
        ({"leaseSeconds": 604_801}, "leaseSeconds"),
        ({"discountPercent": -1}, "discountPercent"),
        ({"discountPercent": 100.01}, "discountPercent"),
        ({"discountPercent": 0.001}, "discountPercent"),
    ],
)
async def test_terms_that_mean_nothing_are_refused(site: Site, kind: str, billing: Document, field: str) -> None:
    before = await site.state()
    reply = await site.post(kind, {"metadata": {"name": site.name("bad")}, "spec": {"billing": billing}})
    assert reply.status in (400, 422), reply
    assert reply.body["details"]["causes"][0]["field"] == f"spec.billing.{field}"
    assert await site.state() == before


async def test_a_tenant_cannot_decide_that_it_need_not_pay(site: Site) -> None:
    team = await paying_team(site)
    token = await site.token("tenant-admin", tenant=team, user="ann")
    reply = await site.patch(f"tenants/{team}", {"spec": {"billing": {"mode": "none"}}}, token=token)
    assert reply.status == 403


# Who pays.


async def test_who_submitted_it_is_what_the_server_knows_and_not_what_they_say(site: Site) -> None:
    team = await paying_team(site)
    token = await site.token("user", tenant=team, user="ann")
    where = f"namespaces/{team}"
    forged = {**allocation("mine", gpu=1), "status": {"user": f"{team}/bob"}}
    made = await site.post(f"{where}/allocations", forged, token=token)
    assert (made.status, made.body["status"]["user"]) == (201, f"{team}/ann")
    job = {"metadata": {"name": "sweep"}, "spec": {"template": {"spec": {"resources": {"requests": {GPU: "1"}}}}}}
    made = await site.post(f"{where}/jobs", {**job, "status": {"user": f"{team}/bob"}}, token=token)
    assert made.status == 201, made
    changed: list[Reply] = [
        await site.patch(f"{where}/allocations/mine", {"status": {"user": f"{team}/bob"}}, token=token),
        await site.patch(f"{where}/jobs/sweep", {"status": {"user": f"{team}/bob"}}, token=token),
        await site.patch(f"{where}/allocations/mine/status", {"status": {"user": f"{team}/bob"}}, token=token),
    ]
    assert changed[2].status == 403
    for path in ("allocations/mine", "jobs/sweep", "allocations/sweep-0"):
        assert (await site.get(f"{where}/{path}")).body["status"]["user"] == f"{team}/ann", path


# What it would cost.


async def test_what_is_tried_out_tells_what_it_would_cost(site: Site) -> None:
    team = await paying_team(site)
    await h100(site, team)
    await funded(site.context.runtime, "50", Owner(team))
    async with scheduling(site):
        found = await site.post(f"namespaces/{team}/allocations/simulate", asking("train", team))
    assert found.status == 200, found
    (shown,) = found.body["allocations"]
    assert shown["wouldRun"]
    assert shown["cost"] == {
        "account": team, "perSecond": "0.04", "perHour": "144", "firstWindow": "0.6", "windowSeconds": 15,
        "available": "50",
    }  # fmt: skip
    assert (await account(site.context.runtime, team))["held"] == 0
    assert (await site.get(f"namespaces/{team}/allocations")).names == []


async def test_several_share_one_account_when_they_are_tried_out(site: Site) -> None:
    team = await paying_team(site)
    await h100(site, team)
    await funded(site.context.runtime, "0.65", Owner(team))
    async with scheduling(site):
        body = {"items": [asking("a", team, 2), asking("b", team, 4)]}
        found = await site.post(f"namespaces/{team}/allocations/simulate", body)
    assert found.status == 200, found
    first, second = found.body["allocations"]
    assert (first["wouldRun"], second["wouldRun"], found.body["wouldRun"]) == (True, False, False)
    assert second["reason"]["code"] == "insufficient_credit"
    assert second["message"].startswith(f"it would wait: account {team} has 0.35 credits available, 0.6 are needed")
    assert second["reason"]["help"] == "Top up 0.25 credits or more."
    assert second["cost"]["perSecond"] == "0.04"


async def test_what_has_no_price_or_no_account_would_wait(site: Site) -> None:
    team = await paying_team(site)
    await h100(site, team)
    async with scheduling(site):
        found = await site.post(f"namespaces/{team}/allocations/simulate", asking("a", team))
    (shown,) = found.body["allocations"]
    assert (shown["wouldRun"], shown["reason"]["code"]) == (False, "insufficient_credit")
    assert "cost" not in shown
    assert "no account" in shown["message"]


async def test_what_has_no_price_is_not_told_to_cost_nothing(site: Site) -> None:
    team = await paying_team(site)
    await funded(site.context.runtime, "5", Owner(team))
    labels = {"gpu-type": f"unpriced-{team}", "team": team}
    body = {"metadata": {"name": f"node-{team}", "labels": labels}, "spec": {"capacity": {GPU: "8"}}}
    assert (await site.post("nodes", body)).status == 201
    async with scheduling(site):
        found = await site.post(f"namespaces/{team}/allocations/simulate", asking("a", team))
    (shown,) = found.body["allocations"]
    assert (shown["wouldRun"], shown["reason"]["code"]) == (False, "unpriced")
    assert shown["reason"]["help"].endswith(f"bursar price set {GPU} CREDITS --class unpriced-{team}")
    assert "cost" not in shown


async def test_who_does_not_pay_beforehand_is_told_no_cost(site: Site) -> None:
    team = await site.namespace()
    await h100(site, team)
    async with scheduling(site):
        found = await site.post(f"namespaces/{team}/allocations/simulate", asking("a", team))
    (shown,) = found.body["allocations"]
    assert shown["wouldRun"]
    assert "cost" not in shown


# Explain.


async def test_why_it_waits_is_told_with_what_is_missing(site: Site) -> None:
    team = await paying_team(site)
    await h100(site, team)
    await funded(site.context.runtime, "0.5", Owner(team))
    where = f"namespaces/{team}/allocations"
    async with scheduling(site):
        assert (await site.post(where, asking("train", team))).status == 201

        async def waits() -> bool:
            told: Document = (await site.get(f"{where}/train")).body["status"]
            return bool(told.get("reason") == "insufficient_credit")

        await eventually(waits)
        body = (await site.get(f"{where}/train/explain")).body
        assert body["reason"]["code"] == "insufficient_credit"
        assert body["message"] == f"account {team} has 0.5 credits available, 0.6 are needed"
        assert body["reason"]["help"] == "Top up 0.1 credits or more."
        await funded(site.context.runtime, "0.1", Owner(team))

        async def runs() -> bool:
            return bool((await site.get(f"{where}/train")).body["status"]["phase"] == "Scheduled")

        await eventually(runs)
    shown = (await site.get(f"{where}/train")).body["status"]
    assert shown["nodes"][0]["lease"].startswith("lease-")
    assert "reason" not in shown


async def test_what_runs_and_is_paid_no_further_is_told_so(site: Site, tmp_path: Path) -> None:
    team = await paying_team(site, leaseSeconds=500)
    await h100(site, team)
    await funded(site.context.runtime, "20", Owner(team))
    where = f"namespaces/{team}/allocations"
    assert (await site.post(where, asking("train", team))).status == 201
    await bind(site.context.runtime, team, "train", f"node-{team}")
    assert (await site.patch(f"{where}/train/status", {"status": {"phase": "Running"}})).status == 200
    assert (await site.get(f"{where}/train/explain")).body["message"].endswith("Z")
    await pay_on(site.context.runtime, [f"node-{team}"])
    await pay_on(site.context.runtime, [f"node-{team}"])
    ends = re.compile(r"out of credit: ends in \d+ s unless topped up")
    said = (await site.get(f"{where}/train/explain")).body["message"]
    assert ends.search(said.rpartition(" (")[2]), said
    status = (await site.get(f"{where}/train")).body["status"]
    until = status["nodes"][0]["paidUntil"]
    told = f"out of credit: ends at {until} unless topped up"
    assert (status["reason"], status["message"], status["nodes"][0]["unpaid"]) == (
        OUT_OF_CREDIT, told, "insufficient_credit",
    )  # fmt: skip
    for line in ("status train", "status"):
        assert ends.search(await command(site, tmp_path, f"{line} -n {team}")), line
    assert (await events(site, team, "train"))[-1] == ("Warning", OUT_OF_CREDIT, told)
    revision = (await site.get(f"{where}/train")).body["metadata"]["resourceVersion"]
    await pay_on(site.context.runtime, [f"node-{team}"])
    assert (await site.get(f"{where}/train")).body["metadata"]["resourceVersion"] == revision, "that is no news"

    await funded(site.context.runtime, "5", Owner(team))
    await pay_on(site.context.runtime, [f"node-{team}"])
    after = (await site.get(f"{where}/train")).body["status"]
    assert not {"reason", "message"} & after.keys()
    assert OUT_OF_CREDIT not in {one["type"] for one in after["conditions"]}
    assert (await events(site, team, "train"))[-1] == ("Normal", "CreditRestored", "its lease is extended again")
    assert "out of credit" not in (await site.get(f"{where}/train/explain")).body["message"]
    assert "out of credit" not in await command(site, tmp_path, f"status train -n {team}")


async def command(site: Site, folder: Path, line: str) -> str:
    """The output of a command of the CLI."""
    environment = {"BURSAR_URL": site.url, "BURSAR_TOKEN": site.admin, "BURSAR_CONFIG": str(folder / "config.yaml")}
    result = await asyncio.to_thread(CliRunner(env=environment).invoke, cli, line.split())
    assert result.exit_code == 0, result.output
    return result.stdout


async def events(site: Site, namespace: str, name: str) -> list[tuple[str, str, str]]:
    """(type, reason, message) of what happened to an allocation, the last one last."""
    found = await site.get(f"namespaces/{namespace}/events", fieldSelector=f"involvedObject.name={name}")
    return [(one["type"], one["reason"], one["message"]) for one in found.body["items"]]


async def test_a_lease_remembers_what_it_paid_for_after_that_is_gone(site: Site) -> None:
    team = await paying_team(site)
    await h100(site, team)
    await funded(site.context.runtime, "5", Owner(team))
    where = f"namespaces/{team}/allocations"
    assert (await site.post(where, asking("train", team))).status == 201
    await bind(site.context.runtime, team, "train", f"node-{team}")
    (lease,) = (await site.get("leases", account=team)).body["items"]
    assert lease["work"] == f"{team}/train"
    assert (await site.get(f"leases/{lease['lease_id']}")).body["work"] == f"{team}/train"
    for phase in ("Running", "Succeeded"):
        # Sooner or later than its end by our clock, it cost something.
        await pay_on(site.context.runtime, [f"node-{team}"])
        assert (await site.patch(f"{where}/train/status", {"status": {"phase": phase}})).status == 200
    assert (await site.delete(f"{where}/train")).status == 200
    (ended,) = (await site.get("leases", account=team, state="ended")).body["items"]
    assert ended["work"] == f"{team}/train"
    (line,) = (await site.get("statements", account=team)).body["leases"]
    assert (line["work"], line["job_id"]) == (f"{team}/train", lease["uid"])
    table = (await site.get("statements", account=team, format="csv")).body
    assert f"{team}/train" in table
    command = {"job_id": "elsewhere", "gpu_type": f"h100-{team}", "gpu_count": 1, "account": team, "request_id": "r"}
    assert (await site.post("leases", command)).status == 201
    (other,) = (await site.get("leases", account=team)).body["items"]
    assert "work" not in other


async def test_what_stands_still_is_told_so_wherever_it_is_looked_at(site: Site) -> None:
    team = await paying_team(site)
    await h100(site, team)
    await funded(site.context.runtime, "5", Owner(team))
    where = f"namespaces/{team}/allocations"
    assert (await site.post(where, asking("train", team))).status == 201
    await bind(site.context.runtime, team, "train", f"node-{team}")
    key = Key("Allocation", team, "train")
    for frozen in (False, True):
        said = Report(key=key, origin=TEST, phase=Phase.RUNNING, node=f"node-{team}", frozen=frozen)
        assert code(await report(site.context.runtime, said)) == "ok"
    still = f"its account spends too fast: it is frozen on node-{team}, and resumes once the account may spend more"
    status = (await site.get(f"{where}/train")).body["status"]
    assert (status["reason"], status["message"]) == (FROZEN, still)
    assert (await site.get(f"{where}/train/explain")).body["message"].endswith(f" ({FROZEN}: {still})")
    table = (await site.get(where, headers={"accept": TABLE})).body
    reason = [one["name"] for one in table["columnDefinitions"]].index("Reason")
    assert table["rows"][0]["cells"][reason] == FROZEN
    said = Report(key=key, origin=TEST, phase=Phase.RUNNING, node=f"node-{team}", frozen=False)
    assert code(await report(site.context.runtime, said)) == "ok"
    assert FROZEN not in (await site.get(f"{where}/train/explain")).body["message"]
