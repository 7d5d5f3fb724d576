"""`bursar lease`: opens, extends, closes and shows leases, the paid right to run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click

from bursar.cli.credit.credit import account_option, moment, request_option
from bursar.cli.shell import completers
from bursar.cli.shell.connection import Connection, connected
from bursar.cli.shell.options import json_option, seconds_of
from bursar.cli.shell.output import NONE, exit_with_json, moments, print_rows, to_json
from bursar.core.values.wording import counted

Document = Mapping[str, Any]
lease_argument = click.argument("lease_id", metavar="LEASE", shell_complete=completers.lease)


@click.group()
def lease() -> None:
    """Open, extend and close leases, which pay for running time."""


@lease.command("list")
@account_option
@click.option("--job", "job_id", default="", help="Only leases of this job.")
@click.option("--ended", is_flag=True, help="Ended leases, the last first.")
@click.option("--limit", type=click.IntRange(1), default=100, show_default=True, help="The maximum number.")
@json_option
@connected
def list_(connection: Connection, account: str, job_id: str, ended: bool, limit: int, as_json: bool) -> None:
    """List open leases, or ended ones."""
    from itertools import islice

    found = list(islice(connection.client.leases(account, state="ended" if ended else "", job_id=job_id), limit))
    exit_with_json(as_json, {"items": found})
    header = ("Lease", "Account", "For", "GPUs", "Type", "Rate/s", "Cost", "Ended" if ended else "Paid until", "State")
    print_rows(header, map(lease_row, found))


@lease.command()
@lease_argument
@json_option
@connected
def show(connection: Connection, lease_id: str, as_json: bool) -> None:
    """Show a lease."""
    found = connection.client.lease(lease_id)
    exit_with_json(as_json, found)
    width = max(map(len, found)) + 2
    for name, value in found.items():
        if value not in ("", None, {}, []):
            click.echo(f"{name.replace('_', ' ') + ':':<{width}}{_shown(value)}")


def _shown(value: Any) -> Any:
    """A value as text: resources by name, segments of paid time in order."""
    if isinstance(value, list):
        return ", then ".join(f"{one['seconds']:g} s at {one['rate_per_sec']}" for one in value)
    return ", ".join(f"{key}: {one}" for key, one in value.items()) if isinstance(value, dict) else value


@lease.command("open")
@click.argument("job_id", metavar="JOB")
@click.option("--gpus", default="0", metavar="NUMBER", help="The number of GPUs.")
@click.option("--gpu-type", default="", metavar="TYPE", help="The GPU type, such as h100.")
@click.option("--resource", "resources", multiple=True, metavar="NAME=AMOUNT", help="Another resource; repeatable.")
@click.option("--window", callback=seconds_of, metavar="TIME", help="The first window, such as 2m.")
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
    """Open a lease: pay for the first window of a job.

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
    exit_with_json(as_json, found)
    click.echo(
        f"{found['lease_id']} opened: {counted(found['rate_per_sec'], 'credit')} a second,"
        f" {found['held']} held on {found['account']}, paid until {moments(moment(found['expires_at']))}"
    )


@lease.command()
@lease_argument
@click.option("--by", "delta", callback=seconds_of, required=True, metavar="TIME", help="Additional time, such as 5m.")
@request_option
@json_option
@connected
def extend(connection: Connection, lease_id: str, delta: int, request_id: str, as_json: bool) -> None:
    """Pay for more time. After a refusal the lease ends with the time already paid for."""
    from bursar.client.errors import ApiError

    try:
        found = connection.client.extend_lease(lease_id, delta, request_id=request_id)
    except ApiError as error:
        if (left := error.details.get("seconds_left")) is not None:
            click.echo(f"{lease_id} not extended: final, {left:g} s left", err=True)
        raise
    paid_until = moments(moment(found["expires_at"]))
    click.echo(to_json(found) if as_json else f"{lease_id} extended: paid until {paid_until}")


@lease.command()
@lease_argument
@request_option
@json_option
@connected
def close(connection: Connection, lease_id: str, request_id: str, as_json: bool) -> None:
    """Close a lease: pay for the used time, and release the rest of the hold."""
    found = connection.client.close_lease(lease_id, request_id=request_id)
    click.echo(to_json(found) if as_json else f"{lease_id} closed: cost {counted(found['cost'], 'credit')}")


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise click.BadParameter(f"{text!r} must be NAME=AMOUNT", param_hint="--resource")
    return name, value


def lease_row(one: Document) -> list[str]:
    """A row of the list. Work that Bursar placed appears under its name."""
    state = f"{one['state']}, final: {one['reason']}" if one.get("final") else one["state"]
    until = moment(one.get("closed_at") or one["expires_at"])
    what_for = one.get("work") or one["job_id"]
    values = (one["lease_id"], one["account"], what_for, one["gpu_count"], one["gpu_type"])
    return [*(value or NONE for value in values), one["rate_per_sec"], one["cost"], until, state]
