"""`bursar usage`, and the SDK's usage calls, against a real server."""

from __future__ import annotations

import asyncio
import csv
import io
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio
from click.testing import CliRunner, Result

from bursar.cli.credit.usage import number
from bursar.cli.main import cli
from bursar.client import AsyncClient, Client, NotFound
from support.api.site import Site, opened_site
from support.runtime.postgres import PostgresServer, _url, clone_database, drop_database
from support.usage.spent_usage import GPU, aged, ago, priced, spent

pytestmark = pytest.mark.asyncio(loop_scope="module")


@dataclass(frozen=True, slots=True)
class Shell:
    """What is typed at the prompt of somebody of a tenant."""

    site: Site
    tenant: str
    ann: str  # the token of one of its users

    async def run(self, line: str, *, token: str = "", code: int = 0) -> Result:
        words = ["usage", *line.replace("TENANT", self.tenant).split()]
        environment = {"BURSAR_URL": self.site.url, "BURSAR_TOKEN": token or self.ann, "BURSAR_CONFIG": "/nonexistent"}
        result = await asyncio.to_thread(CliRunner(env=environment).invoke, cli, words)
        assert result.exit_code == code, f"{words}: {result.output}\n{result.exception!r}"
        return result

    async def lines(self, line: str, **options: Any) -> list[str]:
        return [" ".join(one.split()) for one in (await self.run(line, **options)).stdout.splitlines()]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shell(embedded_postgres: PostgresServer, database_template: str) -> AsyncIterator[Shell]:
    name = await clone_database(embedded_postgres, database_template)
    async with opened_site(_url(embedded_postgres, name)) as site:
        tenant = await site.namespace()
        await site.put(f"tenants/{tenant}", {"gpu_hours_budget": 100, "node_hours_budget": 1000})
        await aged(site.context.database, tenant, 100)
        await priced(site.context.database, {GPU: "0.001"})
        for user, gpus, hours in (("ann", 4, 10), ("bob", 2, 5)):
            amounts = {GPU: gpus * 1000, "nodes": gpus * 125}
            begin = ago(days=2)
            await spent(
                site.context.database, tenant, f"{tenant}/{user}", amounts, begin=begin, hours=hours, klass="a100"
            )
        yield Shell(site, tenant, await site.token("user", tenant=tenant, user="ann"))
    await drop_database(embedded_postgres, name)


async def test_plain_usage_is_the_callers_own(shell: Shell) -> None:
    lines = await shell.lines("")
    assert lines[0].startswith(f"{shell.tenant}/ann, 90 days to ")
    assert lines[2:5] == ["GPU-hours 40", "node-hours 5", "cost 144 credits ($144.00)"]
    assert lines[6:] == ["RESOURCE CLASS UNIT HOURS CREDITS", "nodes node-hours 5 0", f"{GPU} a100 device-hours 40 144"]


async def test_a_tenants_usage_is_told_against_its_budgets_and_by_user(shell: Shell) -> None:
    lines = await shell.lines("--tenant TENANT --days 30")
    assert lines[0].startswith(f"{shell.tenant}, 30 days to ")
    assert lines[2:6] == [
        "GPU-hours 50 of 100 (50.0%)", "node-hours 6.25 of 1,000 (0.6%)", "budget used 50.0%",
        "cost 180 credits ($180.00)",
    ]  # fmt: skip
    assert lines[7:] == [
        "USER GPU-HOURS NODE-HOURS CREDITS", f"{shell.tenant}/ann 40 5 144", f"{shell.tenant}/bob 10 1.25 36",
    ]  # fmt: skip


async def test_lines_are_of_what_is_asked_for(shell: Shell) -> None:
    resources = (await shell.lines("--tenant TENANT --by resource"))[8:]
    assert resources == ["nodes node-hours 6.25 0", f"{GPU} a100 device-hours 50 180"]
    days = await shell.lines("--tenant TENANT --by day")
    assert days[7] == "DAY GPU-HOURS NODE-HOURS CREDITS"
    assert sum(float(one.split()[1]) for one in days[8:]) == pytest.approx(50, abs=0.02)
    assert (await shell.lines("--user bob"))[2] == "GPU-hours 10"


async def test_json_is_the_answer_and_csv_the_table(shell: Shell) -> None:
    shown = json.loads((await shell.run("--tenant TENANT --json")).stdout)
    assert (shown["tenant"], shown["gpu_hours_used"]) == (shell.tenant, 50)
    rows = list(csv.DictReader(io.StringIO((await shell.run("--csv --days 30 --by month")).stdout)))
    assert {one["tenant"] for one in rows} == {shell.tenant}
    assert sum(float(one["hours"]) for one in rows if one["resource"] == GPU) == pytest.approx(50, abs=0.001)
    rows = list(csv.DictReader(io.StringIO((await shell.run("--csv --days 30 --by user")).stdout)))
    assert {one["user"].partition("/")[0] for one in rows} == {shell.tenant}
    assert sum(float(one["hours"]) for one in rows if one["resource"] == GPU) == pytest.approx(50, abs=0.001)


@pytest.mark.parametrize(
    "line",
    [
        "--tenant a --user b",
        "--csv --json",
        "--csv --user b",
        "--csv --by resource",
        "--by month",
        "--by user",
        "--days 0",
    ],
)
async def test_what_does_not_go_together_is_refused(shell: Shell, line: str) -> None:
    assert "Error:" in (await shell.run(line, code=2)).output


async def test_another_tenants_usage_is_not_found(shell: Shell) -> None:
    other = await shell.site.namespace()
    assert "not found" in (await shell.run(f"--tenant {other}", code=3)).output
    assert "not found" in (await shell.run(f"--user {other}/zoe", code=3)).output


async def test_both_clients_tell_it(shell: Shell) -> None:
    async with AsyncClient(shell.site.url, shell.ann) as client:
        assert (await client.tenant_usage(shell.tenant, 90))["gpu_hours_used"] == 50
        assert (await client.user_usage("bob", 90))["gpu_hours_used"] == 10
        assert (await client.user_usage())["user"] == f"{shell.tenant}/ann"
        assert (await client.period_usage(shell.tenant, "7d"))["period"] == "7d"
        assert (await client.export_usage(begin="2026-01-01")).startswith("period,tenant,resource,class,")
        with pytest.raises(NotFound):
            await client.tenant_usage("nobody")

    def ask() -> list[Any]:
        with Client(shell.site.url, shell.ann) as client:
            return [client.tenant_usage(shell.tenant, 90)["days"], client.user_usage(days=1)["days"]]

    assert await asyncio.to_thread(ask) == [90, 1]


async def test_hours_have_two_decimals_at_most() -> None:
    assert [number(one) for one in (0.0, 1.5, 87_500.0, 1234.567)] == ["0", "1.5", "87,500", "1,234.57"]


async def test_a_little_is_not_told_as_nothing() -> None:
    assert [number(one) for one in (0.000_001, 0.004_9, 0.005_1)] == ["<0.01", "<0.01", "0.01"]
