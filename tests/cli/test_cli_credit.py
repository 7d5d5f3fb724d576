"""`bursar credit`, `balance`, `lease`, `price`, `ledger`, and the SDK's calls about credit, against a real server."""

from __future__ import annotations

import csv
import io
import json
import re
import uuid
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import click
import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner, Result

from bursar.cli.credit.credit import show_statement
from bursar.cli.credit.lease import lease_row
from bursar.cli.main import cli
from bursar.client import AsyncClient, Client, Conflict, CreditRefused, Forbidden, Invalid, NotFound
from support.process.server import Server


class Shell:
    def __init__(self, server: Server, config: Path, tenant: str) -> None:
        self.tenant = tenant
        self.environment = {"BURSAR_URL": server.url, "BURSAR_TOKEN": server.token, "BURSAR_CONFIG": str(config)}

    def __call__(self, line: str, *more: str, code: int = 0, token: str = "") -> Result:
        environment = {**self.environment, **({"BURSAR_TOKEN": token} if token else {})}
        words = [*line.replace("TENANT", self.tenant).split(), *more]
        result = CliRunner(env=environment).invoke(cli, words)
        assert result.exit_code == code, f"{words}: {result.exit_code}\n{result.output}\n{result.exception!r}"
        return result

    def said(self, line: str, *more: str, **options: Any) -> str:
        return self(line, *more, **options).stdout

    def json(self, line: str, *more: str, **options: Any) -> Any:
        return json.loads(self.said(line, *more, "--json", **options))


@pytest.fixture
def admin(empty_server: Server) -> Iterator[Client]:
    with empty_server.client() as client:
        yield client


@pytest.fixture
def shell(empty_server: Server, admin: Client, tmp_path: Path) -> Shell:
    name = f"c-{uuid.uuid4().hex[:12]}"
    admin.tenants.create({"metadata": {"name": name}, "spec": {}})
    one = Shell(empty_server, tmp_path / "config.yaml", name)
    if not admin.prices(resource="nvidia.com/gpu")["items"]:
        one("price set nvidia.com/gpu 0.01 --class h100")
    return one


def user(admin: Client, tenant: str) -> str:
    made = admin.resource("tokens", namespaced=False).create({"role": "user", "tenant": tenant, "user": "ada"})
    return str(made["status"]["token"])


def test_an_account_is_topped_up_and_spent(shell: Shell, admin: Client) -> None:
    ada = user(admin, shell.tenant)
    done = shell.said("credit topup 50 --account TENANT --reason invoice --request-id i-1")
    assert done == f"account/{shell.tenant} topped up by 50: 50 credits available\n"
    again = shell.said("credit topup 50 --account TENANT --reason invoice --request-id i-1")
    assert re.fullmatch(rf"already done at \S+Z: account/{shell.tenant} topped up by 50\n", again)
    assert "hint: At most 50 can be taken." in shell("credit adjust -51 --account TENANT --reason x", code=6).stderr
    assert shell("credit topup 51 --account TENANT --request-id i-1", code=1).stderr.startswith(
        "Error: this request_id"
    )
    opened = shell.said("lease open train-7 --gpus 4 --gpu-type h100 --window 15s", token=ada)
    assert "0.04 credits a second, 0.6 held" in opened
    lease = opened.split()[0]
    shown = shell.said("balance", token=ada)
    assert shown.splitlines()[:4] == [
        shell.tenant, "  available    49.4 credits", "  held         0.6 credits", "  posted       50 credits",
    ]  # fmt: skip
    assert "runs out in 20 min" in shown
    assert "paid until" in shell.said(f"lease extend {lease} --by 5s", token=ada)
    assert shell.json("balance", token=ada)["available"] == "49.2"
    assert lease in shell.said("lease list", token=ada)
    assert "rate per sec:" in shell.said(f"lease show {lease}", token=ada)
    assert "cost 0." in shell.said(f"lease close {lease}", token=ada)
    assert "closed" in shell.said("lease list --ended", token=ada)
    assert "nothing is being spent" in shell.said("credit forecast", token=ada)


def test_what_cannot_be_paid_is_told_with_what_would_help(shell: Shell, admin: Client) -> None:
    ada = user(admin, shell.tenant)
    shell("credit topup 0.5 --account TENANT")
    failed = shell("lease open train --gpus 4 --gpu-type h100 --window 15s", code=6, token=ada)
    assert "has 0.5 credits available, 0.6 are needed" in failed.stderr
    assert failed.stderr.splitlines()[1:] == ["  hint: Top up 0.1 credits or more."]
    lease = shell.json("lease open train --gpus 1 --gpu-type h100 --window 30s", token=ada)["lease_id"]
    told, error, *_ = shell(f"lease extend {lease} --by 8m", code=6, token=ada).stderr.splitlines()
    assert re.fullmatch(rf"{lease} not extended: final, [0-9.]+ s left", told)
    assert error.startswith("Error: account ")
    shell(f"lease close {lease}", token=ada)
    unpriced = shell("lease open train --gpus 4 --gpu-type abacus", code=1, token=ada).stderr
    assert unpriced.count("there is no price") == 1
    assert unpriced.endswith("bursar price set nvidia.com/gpu CREDITS --class abacus\n")
    assert shell("credit topup 5 --account TENANT", code=4, token=ada).stderr.startswith("Error: role user may not")
    assert shell("lease show lease-999999", code=3).stderr.startswith("Error: ")
    assert shell("lease open x --resource cpu", code=2).stderr.endswith("must be NAME=AMOUNT\n")


def test_limits_are_shown_and_some_of_them_set(shell: Shell) -> None:
    shell("credit topup 50 --account TENANT")
    shown = shell.said("credit limits TENANT --gpus 64 --daily-cap 500 --time-zone Europe/Zurich")
    assert "GPUs at once" in shown
    assert "500 (Europe/Zurich; running work continues)" in shown
    rated = shell.json("credit limits TENANT --spend-rate 0.5")
    assert (rated["concurrency"], rated["spend_burst"], rated["daily_cap"]) == ("64", "60", "500")
    assert shell.json("credit limits TENANT --spend-rate 1")["spend_burst"] == "120"
    after = shell.json("credit limits TENANT --gpus none --spend-rate none --stop-at-cap")
    assert [after[name] for name in ("concurrency", "spend_rate", "spend_burst")] == [None, None, None]
    assert after["stop_at_cap"] is True
    few = shell("credit limits TENANT --gpus few", code=1)
    assert few.stderr.startswith("Error: the set of limits is invalid: concurrency: ")


def test_accounts_are_opened_suspended_and_listed(shell: Shell) -> None:
    shell("credit open TENANT/ada --credit-limit 5")
    assert shell("credit open TENANT/ada", code=5)
    assert shell.said("credit set TENANT/ada --status suspended").endswith("suspended: 5 credits available\n")
    assert f"{shell.tenant}/ada" in shell.said("credit accounts")
    assert shell.said("balance TENANT/ada").startswith(f"{shell.tenant}/ada (suspended)\n")
    assert "credit limit" in shell.said("balance TENANT/ada")
    assert shell("credit set TENANT/ada", code=2).stderr.endswith("give --status, --credit-limit or --low-balance\n")
    assert shell.json("credit set TENANT/ada --low-balance 2.5")["low_balance"] == "2.5"
    assert shell.json("credit set TENANT/ada --low-balance none")["low_balance"] is None


def test_who_names_no_account_that_exists_is_told_how_to_open_one(shell: Shell) -> None:
    assert "hint: Name TENANT" in shell("balance", code=1).stderr.replace(shell.tenant, "TENANT")
    nobody = shell("credit topup 5 --account TENANT/bob", code=3)
    assert nobody.stderr.endswith(f"bursar credit open {shell.tenant}/bob\n")
    nowhere = shell("credit topup 5 --account TENANT-x", code=3)
    assert nowhere.stderr.endswith(f"bursar create tenant {shell.tenant}-x\n")


def test_an_account_is_closed_for_ever_only_when_that_was_meant(shell: Shell) -> None:
    shell("credit topup 7 --account TENANT")
    asked = shell("credit set TENANT --status closed", code=1)
    assert "A closed account cannot be opened again." in asked.stderr
    assert shell.json("balance TENANT")["status"] == "active"
    full = shell("credit set TENANT --status closed --yes", code=5).stderr
    assert f"account {shell.tenant} has 7 credits left: only an empty account can be closed" in full
    assert f"hint: First refund or adjust: bursar credit adjust -7 --account {shell.tenant} --reason WHY" in full
    shell("credit adjust -7 --account TENANT --reason over")
    shell("credit set TENANT --status closed --yes")
    assert shell("credit set TENANT --status active", code=5).stderr.endswith("hint: It stays closed.\n")


def test_a_statement_as_text_and_as_a_table(shell: Shell) -> None:
    shell("credit topup 50 --account TENANT --reason", "first invoice")
    shell("credit adjust -3.25 --account TENANT --reason", "counted twice")
    shell("credit refund 1 --account TENANT --reason", "a gift")
    shown = shell.said("credit statement TENANT").splitlines()
    assert [line.split()[0] for line in shown[2:]] == ["TYPE", "opening", "topup", "adjustment", "refund", "closing"]
    assert shown[-1].endswith("47.75")
    assert len({len(line) for line in shown[3:]}) == 1
    rows = list(csv.DictReader(io.StringIO(shell.said("credit statement TENANT --csv"))))
    assert sum(Decimal(row["amount"]) for row in rows[1:-1]) == Decimal(rows[-1]["amount"]) == Decimal("47.75")
    assert shell.json("credit statement TENANT --month 2020-12")["to"] == "2021-01-01T00:00:00Z"
    assert shell("credit statement TENANT --month May", code=2)
    assert shell("credit statement TENANT --from soon", code=1)
    assert shell("credit statement TENANT --csv --json", code=2)
    assert shell("credit statement TENANT --month 2020-12 --from 2020-12-02", code=2)
    assert shell.said("balance TENANT --at 2020-01-01").splitlines()[1:] == ["  posted       0 credits"]


def test_the_sums_of_all_accounts_of_a_tenant(shell: Shell, admin: Client) -> None:
    shell("credit topup 50 --account TENANT")
    shell("credit open TENANT/ada")
    shell("credit topup 7.5 --account TENANT/ada")
    shell("credit adjust -2 --account TENANT --reason counted-twice")
    heading, _, header, *rows = shell.said("credit statement --tenant TENANT").splitlines()
    assert heading.startswith(f"{shell.tenant}, ")
    assert header.split() == ["ACCOUNT", "OPENING", "TOPUP", "DEBIT", "REFUND", "ADJUSTMENT", "CLOSING"]
    assert [row.split() for row in rows] == [
        [shell.tenant, "0", "50", "0", "0", "-2", "48"],
        [f"{shell.tenant}/ada", "0", "7.5", "0", "0", "0", "7.5"],
        ["all", "0", "57.5", "0", "0", "-2", "55.5"],
    ]
    assert shell.json("credit statement --tenant TENANT --month 2020-01")["closing"] == "0"
    assert shell("credit statement TENANT --tenant TENANT", code=2)
    assert shell("credit statement --tenant TENANT --csv", code=2)
    assert shell("credit statement --tenant TENANT", code=3, token=user(admin, shell.tenant))


def test_what_was_refunded_stands_with_its_lease(shell: Shell, admin: Client) -> None:
    ada = user(admin, shell.tenant)
    shell("credit topup 50 --account TENANT")
    lease = shell.said("lease open train-8 --gpus 4 --gpu-type h100 --window 15s", token=ada).split()[0]
    cost = shell.json(f"lease close {lease}", token=ada)["cost"]
    refused = shell(f"credit refund 2 --account TENANT --lease {lease} --reason", "the node was slow", code=1).stderr
    assert refused.startswith(
        f"Error: {lease} cost {cost} credits, of which 0 are refunded: 2 more cannot be refunded\n"
    )
    shell(f"credit refund {cost} --account TENANT --lease {lease} --reason", "the node was slow")
    assert f" s, refunded {cost})" in shell.said("credit statement TENANT")
    rows = csv.DictReader(io.StringIO(shell.said("credit statement TENANT --csv")))
    assert [row["refunded"] for row in rows if row["lease_id"] == lease] == [cost]


def test_a_lease_of_no_type_is_of_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    lease = {"job_id": "x", "gpu_count": "2", "gpu_type": "", "seconds": "20", "refunded": "0", "adjusted": "0"}
    period = {"account": "physics", "from": "2026-11-01T00:00:00Z", "to": "2026-12-01T00:00:00Z", "items": []}
    line = {**lease, "to": period["to"], "amount": "-0.07"}
    show_statement({**period, "opening": "1", "closing": "0.93", "leases": [line]})
    assert "x (2 GPU, 20 s)" in capsys.readouterr().out
    show_statement({**period, "opening": "1", "closing": "0.93", "leases": [{**line, "work": "lab/train"}]})
    assert "lab/train (2 GPU, 20 s)" in capsys.readouterr().out


def test_a_lease_is_listed_with_what_it_pays_for() -> None:
    """By its name where we placed it, and not by a uid that nobody knows."""
    lease = {"lease_id": "lease-1", "account": "physics", "job_id": "0f8f-uid", "gpu_count": "2", "gpu_type": ""}
    lease |= {"rate_per_sec": "0.01", "cost": "0", "expires_at": "2026-11-01T00:00:00Z", "state": "open"}
    assert lease_row(lease)[2] == "0f8f-uid"
    assert lease_row({**lease, "work": "lab/train"})[2] == "lab/train"


def test_prices_are_set_and_listed(shell: Shell) -> None:
    name = f"example.com/{shell.tenant}"
    assert shell.said(f"price set {name} 0.25 --class big").startswith(f"price of {name} big: 0.25 credits a second")
    shell(f"price set {name} 0.5 --class big --from 2100-01-01")
    assert [one["per_second"] for one in shell.json(f"price list --resource {name}")["items"]] == ["0.25"]
    listed = shell.said(f"price list --resource {name} --history").splitlines()
    assert listed[0].split() == ["RESOURCE", "CLASS", "PER", "SECOND", "FROM"]
    assert len(listed) == 3
    assert shell(f"price set {name} 0.5 --class big --from 2020-01-01", code=1)
    gone = shell.said(f"price delete {name} --class big --from 2100-01-01")
    assert gone == f"price of {name} big from 2100-01-01T00:00:00Z deleted\n"
    assert shell(f"price delete {name} --class big --from 2100-01-01", code=3)
    begun = shell.json(f"price list --resource {name} --history")["items"][0]["effective_from"]
    kept = shell(f"price delete {name} --class big --from {begun}", code=5).stderr
    assert "has begun, or is about to" in kept
    for wrong in ("gpu", "vram"):
        assert f"unknown resource '{wrong}'" in shell(f"price set {wrong} 0.5", code=2).stderr
    made_up = f"vram-{shell.tenant}"
    assert shell.said(f"price set {made_up} 0.5 --force").startswith(f"price of {made_up}: 0.5 credits a second")


def test_the_ledger_is_whole(shell: Shell) -> None:
    shell("credit topup 50 --account TENANT")
    assert shell.said("ledger verify").startswith("ledger OK: ")
    assert shell.json("ledger verify")["sound"] is True
    assert "system/topups:" in shell.said("ledger status")
    assert "signs from now on" in shell.said("ledger rotate-key --overlap 1h")


def test_accounts_and_leases_are_completed(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    shell("credit topup 50 --account TENANT")
    lease = shell.json("lease open train --gpus 1 --gpu-type h100 --account TENANT")["lease_id"]
    for name, value in shell.environment.items():
        monkeypatch.setenv(name, value)

    def offered(words: list[str], incomplete: str) -> list[str]:
        shell_complete = ShellComplete(cli, {}, "bursar", "_BURSAR_COMPLETE")
        return [item.value for item in shell_complete.get_completions(words, incomplete)]

    assert offered(["balance"], shell.tenant[:9]) == [shell.tenant]
    assert offered(["credit", "topup", "5", "--account"], shell.tenant) == [shell.tenant]
    assert lease in offered(["lease", "extend"], "lease-")
    assert isinstance(cli, click.Group)


# The SDK.


def test_the_sdk_takes_exact_amounts_and_no_others(shell: Shell, admin: Client) -> None:
    account = shell.tenant
    assert admin.top_up(Decimal("0.123456789"), account=account)["new_balance"] == "0.123456789"
    first, again = [admin.top_up(10, account=account, request_id="r-1") for _ in range(2)]
    assert again == {**first, "replayed": True}
    with pytest.raises(TypeError, match="not exact"):
        admin.top_up(0.1, account=account)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="not exact"):
        admin.set_limits(account, {"daily_cap": 0.1})
    with pytest.raises(Invalid) as invalid:
        admin.top_up("-1", account=account)
    assert [cause.field for cause in invalid.value.causes] == ["amount"]
    with pytest.raises(CreditRefused) as refused:
        admin.open_lease("a", gpu_type="h100", gpu_count=64, window_seconds=3600, account=account)
    assert refused.value.causes[0].dimension == "credits"
    assert isinstance(refused.value, Forbidden)
    with pytest.raises(NotFound):
        admin.balance("no-such-tenant")
    lease = admin.open_lease("a", gpu_type="h100", gpu_count=1, window_seconds=15, account=account)
    assert admin.close_lease(lease["lease_id"])["finalized"] is True
    with pytest.raises(Conflict) as fenced:
        admin.extend_lease(lease["lease_id"], 5)
    assert fenced.value.code == "fenced"
    times = {"start_ts": "2026-11-16T07:00:00Z", "end_ts": "2026-11-16T07:00:01Z", "lease_id": lease["lease_id"]}
    assert admin.report_usage([{"job_id": "a", "seq": 1, **times}])["accepted"] == 1


async def test_the_asynchronous_sdk_has_the_same_calls(empty_server: Server, shell: Shell) -> None:
    async with AsyncClient(empty_server.url, empty_server.token) as client:
        await client.top_up("5", account=shell.tenant)
        assert (await client.balance(shell.tenant))["posted"] == "5"
        assert [one["account"] async for one in client.accounts() if one["tenant"] == shell.tenant] == [shell.tenant]
        assert (await client.statement_csv(shell.tenant)).startswith("type,at,amount")
