"""`bursar lease`: the paid right to run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click

from bursar.cli.credit.credit import account_option, json_option, moment, request_option
from bursar.cli.nodes.drain import seconds_of
from bursar.cli.shell import completers
from bursar.cli.shell.connection import Connection, connected
from bursar.cli.shell.output import NONE, print_rows, to_json
from bursar.core.values.wording import counted

Document = Mapping[str, Any]
lease_argument = click.argument("lease_id", metavar="LEASE", shell_complete=completers.lease)


@click.group()
def lease() -> None:
    """Pay for running time, also of work that is placed elsewhere."""


@lease.command("list")
@account_option
@click.option("--job", "job_id", default="", help="Of this job alone.")
@click.option("--ended", is_flag=True, help="Those that have ended, the last one first.")
@click.option("--limit", type=click.IntRange(1), default=100, show_default=True, help="At most so many.")
@json_option
@connected
def list_(connection: Connection, account: str, job_id: str, ended: bool, limit: int, as_json: bool) -> None:
    """List leases that are open, or have ended."""
    from itertools import islice

    found = list(islice(connection.client.leases(account, state="ended" if ended else "", job_id=job_id), limit))
    if as_json:
        click.echo(to_json({"items": found}))
        return
    header = ("Lease", "Account", "For", "GPUs", "Type", "Rate/s", "Cost", "Ended" if ended else "Paid until", "State")
    print_rows(header, map(lease_row, found))


@lease.command()
@lease_argument
@json_option
@connected
def show(connection: Connection, lease_id: str, as_json: bool) -> None:
    """Show how a lease stands."""
    found = connection.client.lease(lease_id)
    if as_json:
        click.echo(to_json(found))
        return
    width = max(map(len, found)) + 2
    for name, value in found.items():
        if value not in ("", None, {}, []):
            click.echo(f"{name.replace('_', ' ') + ':':<{width}}{_shown(value)}")


def _shown(value: Any) -> Any:
    """Resources by name, and segments of paid time in their order."""
    if isinstance(value, list):
        return ", then ".join(f"{one['seconds']:g} s at {one['rate_per_sec']}" for one in value)
    return ", ".join(f"{key}: {one}" for key, one in value.items()) if isinstance(value, dict) else value


@lease.command("open")
@click.argument("job_id", metavar="JOB")
@click.option("--gpus", default="0", metavar="NUMBER", help="How many.")
@click.option("--gpu-type", default="", metavar="TYPE", help="Of which type, such as h100.")
@click.option(
    "--resource", "resources", multiple=True, metavar="NAME=AMOUNT", help="What else is paid for; repeatable."
)
@click.option("--window", callback=seconds_of, metavar="TIME", help="For how long at first, such as 2m.")
@account_option
@request_option
@json_option
@connected
def open_(
    connection: Connection,
    job_id: str,
    gpus: str,
    gpu_type: str,
    resources: Sequence[str],
    window: int | None,
    account: str,
    request_id: str,
    as_json: bool,
) -> None:
    """Pay for the first window of a job.

    \b
    bursar lease open train-7 --gpus 4 --gpu-type h100 --window 2m
    """
    found = connection.client.open_lease(
        job_id,
        gpu_type=gpu_type,
        gpu_count=gpus,
        resources=dict(_pair(one) for one in resources),
        window_seconds=window,
        account=account,
        request_id=request_id,
    )
    if as_json:
        click.echo(to_json(found))
        return
    click.echo(
        f"{found['lease_id']} opened: {counted(found['rate_per_sec'], 'credit')} a second,"
        f" {found['held']} held on {found['account']}, paid until {found['expires_at']}"
    )


@lease.command()
@lease_argument
@click.option("--by", "delta", callback=seconds_of, required=True, metavar="TIME", help="How much more, such as 5m.")
@request_option
@json_option
@connected
def extend(connection: Connection, lease_id: str, delta: int, request_id: str, as_json: bool) -> None:
    """Pay for more time. Where that is refused, the lease ends with what is paid already."""
    from bursar.client.errors import ApiError

    try:
        found = connection.client.extend_lease(lease_id, delta, request_id=request_id)
    except ApiError as error:
        if (left := error.details.get("seconds_left")) is not None:
            click.echo(f"{lease_id} not extended: final, {left:g} s left", err=True)
        raise
    click.echo(to_json(found) if as_json else f"{lease_id} extended: paid until {found['expires_at']}")


@lease.command()
@lease_argument
@request_option
@json_option
@connected
def close(connection: Connection, lease_id: str, request_id: str, as_json: bool) -> None:
    """Settle a lease; the rest of what was held is free again."""
    found = connection.client.close_lease(lease_id, request_id=request_id)
    click.echo(to_json(found) if as_json else f"{lease_id} closed: it cost {counted(found['cost'], 'credit')}")


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise click.BadParameter(f"{text!r} must be NAME=AMOUNT", param_hint="--resource")
    return name, value


def lease_row(one: Document) -> list[str]:
    """A lease among others: what it is for is told by name, where we placed it."""
    state = f"{one['state']}, final: {one['reason']}" if one.get("final") else one["state"]
    until = moment(one.get("closed_at") or one["expires_at"])
    what_for = one.get("work") or one["job_id"]
    values = (one["lease_id"], one["account"], what_for, one["gpu_count"], one["gpu_type"])
    return [*(value or NONE for value in values), one["rate_per_sec"], one["cost"], until, state]
