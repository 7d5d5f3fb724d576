"""`bursar usage`: shows usage and its cost by user, resource, day or month."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click

from bursar.cli.shell import completers
from bursar.cli.shell.connection import Connection, connected
from bursar.cli.shell.options import json_option
from bursar.cli.shell.output import exit_with_json, print_rows
from bursar.core.values.wording import counted

Document = Mapping[str, Any]


@click.command()
@click.option("--tenant", metavar="NAME", help="The tenant.", shell_complete=completers.named("tenants"))
@click.option("--user", metavar="NAME", help="The user: a name in your tenant, or TENANT/NAME.")
@click.option("--days", type=click.IntRange(1, 3650), metavar="N", help="The last N days; else the budget window.")
@click.option("--by", type=click.Choice(["user", "resource", "day", "month"]), help="The rows; month only with --csv.")
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV with every day, tenant and resource.")
@json_option
@connected
def usage(
    connection: Connection,
    tenant: str | None,
    user: str | None,
    days: int | None,
    by: str | None,
    as_csv: bool,
    as_json: bool,
) -> None:
    """Show usage and its cost.

    The default is your own usage. --tenant includes the tenants below it.

    \b
    bursar usage
    bursar usage --tenant physics --days 30 --by user
    bursar usage --csv --by month --days 365 > chargeback.csv
    """
    _check(tenant, user, by, as_csv=as_csv, as_json=as_json)
    client = connection.client
    if as_csv:
        click.echo(client.export_usage(tenant or "", begin=_since(days), by=by or "day"), nl=False)
        return
    wanted = "day" if by == "day" else ""
    found = client.tenant_usage(tenant, days, by=wanted) if tenant else client.user_usage(user, days, by=wanted)
    exit_with_json(as_json, found)
    show_usage(found, by or ("user" if tenant else "resource"))


def _check(tenant: str | None, user: str | None, by: str | None, *, as_csv: bool, as_json: bool) -> None:
    if tenant and user:
        raise click.UsageError("give --tenant or --user, not both")
    if as_csv and as_json:
        raise click.UsageError("give --csv or --json, not both")
    if as_csv and (user or by == "resource"):
        raise click.UsageError(
            "--csv has every tenant and resource, by day, month or user: leave out --user and --by resource"
        )
    if by == "month" and not as_csv:
        raise click.UsageError("--by month needs --csv")
    if by == "user" and not tenant and not as_csv:
        raise click.UsageError("--by user needs --tenant")


def _since(days: int | None) -> str:
    """The first day; empty without a number, for the begin of this month."""
    from datetime import UTC, datetime, timedelta

    return "" if days is None else (datetime.now(UTC) - timedelta(days=days)).date().isoformat()


def show_usage(found: Document, by: str) -> None:
    click.echo(f"{found.get('tenant') or found['user']}, {_days(found['days'])} to {found['to']}\n")
    _figure("GPU-hours", _of_budget(found["gpu_hours_used"], found.get("gpu_hours_budget")))
    _figure("node-hours", _of_budget(found["node_hours_used"], found.get("node_hours_budget")))
    if found.get("utilization") is not None:
        source = "" if found["source"] == "internal" else f" (source: {found['source']})"
        _figure("budget used", f"{found['utilization']:.1%}{source}")
    _figure("cost", f"{counted(found['cost']['credits'], 'credit')} ({found['cost']['total']})")
    header, rows = _lines(found, by)
    if rows:
        click.echo()
        print_rows(header, rows)
    left = found.get("user_count", 0) - len(found.get("users") or ())
    if by == "user" and left > 0:
        click.echo(f"\nand {left} more users", err=True)


def _days(days: int) -> str:
    return f"{days} day{'' if days == 1 else 's'}"


def _figure(name: str, value: str) -> None:
    click.echo(f"  {name:<13}{value}")


def _of_budget(used: float, budget: float | None) -> str:
    if budget is None:
        return number(used)
    share = f" ({used / budget:.1%})" if budget else ""
    return f"{number(used)} of {number(budget)}{share}"


def number(hours: float) -> str:
    """Hours with at most two decimals; amounts that would round to zero are shown as <0.01."""
    if 0 < hours < 0.005:
        return "<0.01"
    return f"{hours:,.2f}".rstrip("0").rstrip(".")


def _lines(found: Document, by: str) -> tuple[Sequence[str], list[list[str]]]:
    if by == "resource":
        from bursar.core.usage.report import unit_of

        rows = [
            [one["resource"], one["class"], f"{unit_of(one['resource'])}-hours", number(one["hours"]), one["credits"]]
            for one in found["resources"]
        ]
        return ("Resource", "Class", "Unit", "Hours", "Credits"), rows
    name, listed = ("User", found.get("users")) if by == "user" else ("Day", found.get("daily"))
    key = name.lower()
    rows = [
        [one[key], number(one["gpu_hours_used"]), number(one["node_hours_used"]), one["credits"]]
        for one in listed or ()
    ]
    return (name, "GPU-hours", "Node-hours", "Credits"), rows
