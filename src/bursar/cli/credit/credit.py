"""`bursar credit` and `bursar balance`: balances, limits, bookings and statements of accounts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from bursar.cli.shell import completers
from bursar.cli.shell.connection import Connection, connected
from bursar.cli.shell.options import json_option
from bursar.cli.shell.output import exit_with_json, print_rows, to_json
from bursar.core.values.wording import counted

Document = Mapping[str, Any]

account_argument = click.argument("account", required=False, default="", shell_complete=completers.account)
account_option = click.option(
    "--account",
    default="",
    metavar="TENANT[/USER]",
    help="Account (default: yours).",
    shell_complete=completers.account,
)
request_option = click.option(
    "--request-id", default="", help="Idempotency key: takes effect once however often it is sent."
)


@click.group()
def credit() -> None:
    """Top up accounts, set their limits, show statements."""


@click.command()
@account_argument
@click.option("--at", default="", metavar="TIME", help="The balance before a time, such as 2026-11-01.")
@json_option
@connected
def balance(connection: Connection, account: str, at: str, as_json: bool) -> None:
    """Show an account's balance, and how long it lasts.

    \b
    bursar balance
    bursar balance physics/ada --at 2026-11-01
    """
    client = connection.client
    found = client.balance(account, at=at)
    ahead = {} if at else client.forecast(found["account"])
    exit_with_json(as_json, {**found, **({"forecast": ahead} if ahead else {})})
    click.echo(_heading(found))
    if at:
        _figures({"posted": found["posted"]})
        return
    _figures({"available": found["available"], "held": found["holds"], "posted": found["posted"]})
    if found["credit_limit"] != "0":
        _figures({"credit limit": found["credit_limit"]})
    click.echo(_lasting(ahead))


credit.add_command(balance)


@credit.command()
@account_argument
@json_option
@connected
def forecast(connection: Connection, account: str, as_json: bool) -> None:
    """Show how long an account lasts at the current rate."""
    found = connection.client.forecast(account)
    click.echo(to_json(found) if as_json else f"{found['account']}: {_lasting(found)}")


# Bookings.


@credit.command()
@click.argument("amount")
@account_option
@click.option("--reason", default="", help="The reason; it is recorded.")
@request_option
@json_option
@connected
def topup(connection: Connection, amount: str, account: str, reason: str, request_id: str, as_json: bool) -> None:
    """Add credit to an account.

    For billing administrators. The first top-up opens a tenant's account.

    \b
    bursar credit topup 500 --account physics --request-id invoice-2026-118
    """
    found = connection.client.top_up(amount, account=account, reason=reason, request_id=request_id)
    _print_booking(found, "topped up by", as_json)


@credit.command()
@click.argument("amount")
@account_option
@click.option("--reason", required=True, help="The reason; it is recorded.")
@click.option("--lease", "lease_id", default="", metavar="LEASE", help="The lease to refund.")
@request_option
@json_option
@connected
def refund(
    connection: Connection, amount: str, account: str, reason: str, lease_id: str, request_id: str, as_json: bool
) -> None:
    """Refund spent credit.

    \b
    bursar credit refund 12.5 --account physics --lease lease-381 --reason "the node was broken"
    """
    found = connection.client.refund(amount, account=account, reason=reason, lease_id=lease_id, request_id=request_id)
    _print_booking(found, "refunded", as_json)


@credit.command(context_settings={"ignore_unknown_options": True})
@click.argument("amount")
@account_option
@click.option("--reason", required=True, help="The reason; it is recorded.")
@request_option
@json_option
@connected
def adjust(connection: Connection, amount: str, account: str, reason: str, request_id: str, as_json: bool) -> None:
    """Raise or lower a balance by hand.

    \b
    bursar credit adjust -3.25 --account physics --reason "counted twice"
    """
    found = connection.client.adjust(amount, account=account, reason=reason, request_id=request_id)
    _print_booking(found, "adjusted by", as_json)


def _print_booking(found: Document, done: str, as_json: bool) -> None:
    exit_with_json(as_json, found)
    if found.get("replayed"):
        click.echo(f"already done at {moment(found['at'])}: account/{found['account']} {done} {found['amount']}")
        return
    click.echo(
        f"account/{found['account']} {done} {found['amount']}: {counted(found['available'], 'credit')} available"
    )


# Accounts.


@credit.command()
@json_option
@connected
def accounts(connection: Connection, as_json: bool) -> None:
    """List the accounts you may see."""
    found = list(connection.client.accounts())
    exit_with_json(as_json, {"items": found})
    header = ("Account", "Status", "Available", "Held", "Posted", "Credit limit", "Drift")
    columns = ("account", "status", "available", "holds", "posted", "credit_limit")
    print_rows(header, ([*(one[name] for name in columns), _drift(one.get("drift"))] for one in found))


def _drift(drift: Document | None) -> str:
    """The sum of an account's adjustments, and the limit if it is exceeded. Older servers send none."""
    if drift is None:
        return "-"
    return f"{drift['credits']} in {drift['hours']} h{', above ' + drift['limit'] if drift['exceeded'] else ''}"


@credit.command("open")
@click.argument("account")
@click.option("--credit-limit", default="0", metavar="CREDITS", help="How far the balance may go below zero.")
@json_option
@connected
def open_(connection: Connection, account: str, credit_limit: str, as_json: bool) -> None:
    """Open an account.

    A user's own account then pays for that user instead of the tenant's account.

    \b
    bursar credit open physics/ada
    """
    tenant, _, user = account.partition("/")
    found = connection.client.open_account(tenant, user, credit_limit=credit_limit)
    click.echo(to_json(found) if as_json else f"account/{found['account']} opened")


@credit.command("set")
@click.argument("account", shell_complete=completers.account)
@click.option("--status", type=click.Choice(["active", "suspended", "closed"]), help="closed is final.")
@click.option("--credit-limit", metavar="CREDITS", help="How far the balance may go below zero.")
@click.option("--low-balance", metavar="CREDITS", help="Notify the owner below this balance; none for never.")
@click.option("--yes", "-y", is_flag=True, help="Do not ask for confirmation.")
@json_option
@connected
def set_(connection: Connection, account: str, yes: bool, as_json: bool, **given: str | None) -> None:
    """Change an account's status or limits.

    A closed account cannot be opened again. Suspend it to stop spending for a while.

    \b
    bursar credit set physics --status suspended
    bursar credit set physics --credit-limit 100 --low-balance 20
    """
    changes = {name: _none(value) for name, value in given.items() if value is not None}
    if not changes:
        raise click.UsageError("give --status, --credit-limit or --low-balance")
    if given["status"] == "closed" and not yes:
        click.echo("A closed account cannot be opened again. It must be empty: take out its credit first.", err=True)
        click.confirm(f"Close {account}?", abort=True, err=True)
    found = connection.client.change_account(account, changes)
    exit_with_json(as_json, found)
    click.echo(f"account/{found['account']} {found['status']}: {counted(found['available'], 'credit')} available")


@credit.command()
@account_argument
@click.option("--gpus", metavar="NUMBER", help="GPUs leased at once.")
@click.option("--spend-rate", metavar="CREDITS", help="Credits per second, on average.")
@click.option("--spend-burst", metavar="CREDITS", help="Credits at once; else one window's.")
@click.option("--daily-cap", metavar="CREDITS", help="Credits per day.")
@click.option("--stop-at-cap/--finish-at-cap", default=None, help="Whether the cap also stops running work.")
@click.option("--time-zone", metavar="NAME", help="The time zone of a day, such as Europe/Zurich.")
@json_option
@connected
def limits(connection: Connection, account: str, as_json: bool, **given: Any) -> None:
    """Show or set an account's spending limits.

    Other limits stay unchanged; `none` removes a limit.

    \b
    bursar credit limits
    bursar credit limits physics --gpus 64 --daily-cap 500 --spend-rate none
    """
    client = connection.client
    found = client.limits(account)
    wanted = {("concurrency" if name == "gpus" else name): value for name, value in given.items() if value is not None}
    if wanted:
        names = ("concurrency", "spend_rate", "spend_burst", "daily_cap", "stop_at_cap", "time_zone")
        # A default burst depends on the rate, so it changes with it.
        kept = {name: found[name] for name in names if name != "spend_burst" or "spend_rate" not in wanted}
        whole = {**kept, **{name: _none(value) for name, value in wanted.items()}}
        if whole.get("spend_rate") is None:
            whole.pop("spend_burst", None)
        found = client.set_limits(found["account"], whole)
    exit_with_json(as_json, found)
    print_rows(("Limit", "Value", "In use"), _limit_rows(found))


def _limit_rows(found: Document) -> list[list[str]]:
    cap = "running work is stopped" if found["stop_at_cap"] else "running work continues"
    daily = found["daily_cap"]
    rate = found["spend_rate"]
    return [
        ["GPUs at once", found["concurrency"] or "unlimited", found["gpus_in_use"]],
        ["credits a second", f"{rate}, {found['spend_burst']} at once" if rate else "unlimited", ""],
        ["credits a day", f"{daily} ({found['time_zone']}; {cap})" if daily else "unlimited", found["spent_today"]],
    ]


# Statements.


@credit.command()
@account_argument
@click.option("--tenant", default="", help="Sums of a tenant's accounts.", shell_complete=completers.named("tenants"))
@click.option("--from", "begin", default="", metavar="TIME", help="The begin; else the begin of this month.")
@click.option("--to", "end", default="", metavar="TIME", help="The end, exclusive; else now.")
@click.option("--month", default="", metavar="YYYY-MM", help="A whole month instead of --from and --to.")
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV.")
@json_option
@connected
def statement(
    connection: Connection, account: str, tenant: str, begin: str, end: str, month: str, as_csv: bool, as_json: bool
) -> None:
    """Show an account's opening balance, bookings and closing balance.

    \b
    bursar credit statement physics --month 2026-10
    bursar credit statement --tenant physics --month 2026-10
    bursar credit statement --from 2026-11-01 --csv > november.csv
    """
    if as_csv and as_json:
        raise click.UsageError("give --csv or --json, not both")
    if tenant and (account or as_csv):
        raise click.UsageError("--tenant sums all accounts: leave out the account and --csv")
    if month:
        if begin or end:
            raise click.UsageError("--month is a whole month: leave out --from and --to")
        begin, end = _month(month)
    client = connection.client
    if as_csv:
        click.echo(client.statement_csv(account, begin=begin, end=end), nl=False)
        return
    found = client.statement(account, tenant=tenant, begin=begin, end=end)
    if as_json:
        click.echo(to_json(found))
    elif tenant:
        show_sums(found)
    else:
        show_statement(found)


def show_sums(found: Document) -> None:
    """Print the sums of a tenant's accounts, and their total."""
    click.echo(f"{found['tenant']}, {moment(found['from'])} to {moment(found['to'])}\n")
    sums = [*found["accounts"], {**found, "account": "all"}]
    rows = [
        [one["account"], one["opening"], *(one["totals"].get(type_, "0") for type_ in TYPES), one["closing"]]
        for one in sums
    ]
    header = ["Account", "Opening", *(type_.capitalize() for type_ in TYPES), "Closing"]
    print_rows(header, rows)


TYPES = ("topup", "debit", "refund", "adjustment")


def show_statement(found: Document) -> None:
    click.echo(f"{found['account']}, {moment(found['from'])} to {moment(found['to'])}\n")
    rows = [["opening", "", "", found["opening"]]]
    rows += [
        [one["type"], moment(one["at"]), one["reason"] or one["request_id"], one["amount"]] for one in found["items"]
    ]
    rows += [["lease", moment(one["to"]), _lease_words(one), one["amount"]] for one in found["leases"]]
    rows.append(["closing", "", "", found["closing"]])
    width = max(len(row[3]) for row in rows)
    print_rows(("Type", "Time", "For", "Credits".rjust(width)), [[*row[:3], row[3].rjust(width)] for row in rows])
    if found.get("continue"):
        click.echo("\nmore lines follow; --csv prints all", err=True)


def _lease_words(one: Document) -> str:
    devices = f"{one['gpu_count']} {one['gpu_type'] or 'GPU'}, " if one["gpu_count"] != "0" else ""
    besides = "".join(f", {name} {one[name]}" for name in ("refunded", "adjusted") if one[name] != "0")
    return f"{one.get('work') or one['job_id'] or one['lease_id']} ({devices}{one['seconds']} s{besides})"


def _month(text: str) -> tuple[str, str]:
    from datetime import date

    try:
        first = date.fromisoformat(f"{text}-01")
    except ValueError:
        raise click.BadParameter("must be a month, such as 2026-10", param_hint="--month") from None
    following = date(first.year + first.month // 12, first.month % 12 + 1, 1)
    return first.isoformat(), following.isoformat()


# Rendering.


def _heading(found: Document) -> str:
    if found.get("at"):
        return f"{found['account']} before {found['at']}"
    status = found["status"]
    return found["account"] if status == "active" else f"{found['account']} ({status})"


def _figures(figures: Mapping[str, str]) -> None:
    for name, amount in figures.items():
        click.echo(f"  {name:<13}{counted(amount, 'credit')}")


def _lasting(found: Document) -> str:
    rate = found["rate_per_sec"]
    return found["message"] if rate == "0" else f"{found['message']} ({counted(rate, 'credit')} a second)"


def moment(timestamp: str | None) -> str:
    """A timestamp to the second."""
    return f"{timestamp[:19]}Z" if timestamp else ""


def _none(value: Any) -> Any:
    return None if value == "none" else value
