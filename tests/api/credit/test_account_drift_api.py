"""Drift of accounts as it is shown: over HTTP, to its owner, by `bursar credit accounts` and in /metrics."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from bursar.cli.main import cli
from support.api.site import Site
from support.credit.metering import event, furnish, lapse, lease, pass_time, reconcile, send
from support.runtime.runtime import change

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def drift(site: Site, *jobs: str) -> None:
    """Jobs that paid for 15 s and used 14: each is 0.04 credits of drift of the default tenant's account."""
    runtime = site.context.runtime
    leases = [await lease(runtime, job) for job in jobs]
    await pass_time(runtime, 60, *leases)
    await lapse(runtime, *leases)
    await send(runtime, *(event(job, 1, 14) for job in jobs))
    await reconcile(runtime)


async def command(site: Site, folder: Path, line: str) -> Result:
    environment = {"BURSAR_URL": site.url, "BURSAR_TOKEN": site.admin, "BURSAR_CONFIG": str(folder / "config.yaml")}
    result = await asyncio.to_thread(CliRunner(env=environment).invoke, cli, line.split())
    assert result.exit_code == 0, result.output
    return result


async def gauge(site: Site) -> str:
    lines: list[str] = (await site.get("/metrics")).body.splitlines()
    return next(line for line in lines if line.startswith("bursar_drifting_accounts"))


async def test_the_drift_of_an_account_is_shown_until_its_period_is_over(site: Site, tmp_path: Path) -> None:
    await furnish(site.context.runtime)
    policy = {"reconcileSeconds": 0, "driftAccountCredits": "0.1", "driftAccountHours": 12}
    await change(site.context.runtime, "Settings", "", "system", credits=policy)
    owner = await site.token("user", tenant="default", user="ada")
    assert (await site.get("accounts/default")).body["drift"] == {
        "credits": "0", "limit": "0.1", "hours": 12, "exceeded": False,
    }  # fmt: skip

    await drift(site, "one", "two")
    assert (await site.get("accounts/default")).body["drift"]["exceeded"] is False
    assert await gauge(site) == "bursar_drifting_accounts 0.0"
    assert "  0.08 in 12 h\n" in (await command(site, tmp_path, "credit accounts")).stdout

    await drift(site, "three")
    shown = {"credits": "0.12", "limit": "0.1", "hours": 12, "exceeded": True}
    assert (await site.get("accounts/default", token=owner)).body["drift"] == shown
    (listed,) = [one for one in (await site.get("accounts")).body["items"] if one["account"] == "default"]
    assert listed["drift"] == shown
    assert await gauge(site) == "bursar_drifting_accounts 1.0"
    assert "  0.12 in 12 h, above 0.1\n" in (await command(site, tmp_path, "credit accounts")).stdout

    async with site.context.database.reader() as db:
        await db.execute("UPDATE account_drift SET hour = hour - 13")
    assert (await site.get("accounts/default")).body["drift"]["credits"] == "0"
    assert await gauge(site) == "bursar_drifting_accounts 0.0"


async def test_a_webhook_may_ask_for_drift_of_accounts_alone(site: Site) -> None:
    body = {"name": "drifts", "url": "https://hooks.example/x", "types": ["credit.account-drift"]}
    made = await site.post("webhooks", body)
    assert made.status == 201, made
