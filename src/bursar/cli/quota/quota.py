"""`bursar quota`: limits and usage of a tenant, and changes and requests of limits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import click

from bursar.cli.quota.admin import limit
from bursar.cli.shell import completers
from bursar.cli.shell.connection import Connection, connected, dry_run_option, namespace_option
from bursar.cli.shell.default_command import DefaultCommandGroup
from bursar.cli.shell.limit_notes import print_limit_notes, tenant_before
from bursar.cli.shell.options import json_option
from bursar.cli.shell.output import NONE, exit_with_json, pairs, print_rows
from bursar.cli.shell.resource_names import check_limited, force_option
from bursar.core.quota.quota_messages import dimension_of
from bursar.core.values.quantity import amount

Document = Mapping[str, Any]

BAR_CHARS = 20
tenant_argument = click.argument("name", metavar="TENANT", shell_complete=completers.named("tenants"))
limits_argument = click.argument("limits", nargs=-1, required=True, metavar="DIMENSION=QUANTITY...")


@click.group(cls=DefaultCommandGroup, default="show")
def quota() -> None:
    """Show limits and usage; set, remove and request limits.

    \b
    bursar quota                                     # your tenant's, or those of all tenants
    bursar quota physics
    bursar quota set physics nvidia.com/gpu=64 memory=4Ti
    bursar quota unset physics memory
    bursar quota request nvidia.com/gpu=128 --reason "training in June" -n ml-team
    """


# Showing.


@quota.command()
@click.argument("name", required=False, metavar="[TENANT]", shell_complete=completers.named("tenants"))
@json_option
@connected
def show(connection: Connection, name: str | None, as_json: bool) -> None:
    """Show each limit of a tenant with its source and usage, and the quotas of its namespaces.

    Without TENANT it is your own; callers without a tenant see all tenants.
    """
    own = name or str(connection.client.whoami().get("tenant") or "")
    names = [own] if own else [str(one["metadata"]["name"]) for one in connection.client.tenants.list()]
    found = [connection.client.tenant_limits(one) for one in names]
    quotas = list(_namespace_quotas(connection, set(names)))
    exit_with_json(as_json, {**found[0], "quotas": quotas} if own else {"items": found, "quotas": quotas})
    _print_limits(found, with_tenant=not own)
    _print_quotas(quotas)


def _print_limits(found: Sequence[Document], *, with_tenant: bool) -> None:
    header = ("Dimension", "Usage", "Requested", "Placed", "Limit", "Source")
    rows = [
        [*([str(one["tenant"])] if with_tenant else []), *_limit_row(dimension, quota)]
        for one in found
        for dimension, quota in (one.get("limits") or {}).items()
    ]
    if not rows:
        click.echo(f"tenant/{found[0]['tenant']} has no limits and no usage." if len(found) == 1 else "No limits.",
                   err=True)  # fmt: skip
        return
    print_rows(("Tenant", *header) if with_tenant else header, rows)
    _print_units(found)
    click.echo("\n#: work on nodes (placed). +: accepted work that is pending (requested).", err=True)


def _limit_row(dimension: str, one: Document) -> list[str]:
    values = [str(one.get(name) or NONE) for name in ("accepted", "bound", "limit", "source")]
    return [dimension, bar(dimension, one.get("bound"), one.get("accepted"), one.get("limit")), *values]


def bar(dimension: str, placed: Any, used: Any, limit: Any) -> str:
    """Usage as a bar and a percentage; the part on nodes is marked apart."""
    if limit is None:
        return NONE
    most, all_of_it, on_nodes = (amount(dimension, one or "0") for one in (limit, used, placed))
    if most == 0:
        return f"[{' ' * BAR_CHARS}] no headroom"
    # Rounded down, so that a full bar and 100% mean that the limit is reached.
    full, dark = (min(BAR_CHARS, one * BAR_CHARS // most) for one in (max(all_of_it, on_nodes), on_nodes))
    return f"[{('#' * dark + '+' * (full - dark)).ljust(BAR_CHARS, '-')}] {all_of_it * 100 // most}%"


def _print_units(found: Sequence[Document]) -> None:
    """Print the limits that are written in units, with the amounts that they stand for."""
    rows = [
        [str(one["tenant"]), name, str(unit["limit"]), str(unit["source"]), pairs(unit["parts"]), str(unit["used"])]
        for one in found
        for name, unit in (one.get("units") or {}).items()
    ]
    if rows:
        click.echo()
        print_rows(("Tenant", "Unit", "Limit", "Source", "One unit is", "Used"), rows)


def _namespace_quotas(connection: Connection, tenants: set[str]) -> Iterator[Document]:
    """The ResourceQuotas of the tenants' namespaces, as far as the caller sees them."""
    owners = {
        str(one["metadata"]["name"]): (one["metadata"].get("labels") or {}).get("bursar.io/tenant")
        for one in connection.client.namespaces.list()
    }
    for one in connection.client.resourcequotas.list():
        if owners.get(str(one["metadata"]["namespace"])) in tenants:
            yield one


def _print_quotas(quotas: Sequence[Document]) -> None:
    rows = [row for one in quotas for row in _quota_rows(one)]
    if rows:
        click.echo()
        print_rows(("Namespace", "Quota", "Dimension", "Usage", "Requested", "Placed", "Hard", "Soft"), rows)


def _quota_rows(one: Document) -> Iterator[list[str]]:
    spec, status = one.get("spec") or {}, one.get("status") or {}
    hard, soft, used, bound = (
        spec.get("hard") or {},
        spec.get("soft") or {},
        status.get("used") or {},
        status.get("bound"),
    )
    for name in sorted({*hard, *soft}):
        dimension, placed = name.removeprefix("requests."), (bound or {}).get(name)
        values = [str(value or NONE) for value in (used.get(name), placed, hard.get(name), soft.get(name))]
        shown = bar(dimension, placed, used.get(name), hard.get(name))
        yield [str(one["metadata"]["namespace"]), str(one["metadata"]["name"]), name, shown, *values]


# Changing.


@quota.command("set")
@tenant_argument
@limits_argument
@force_option
@dry_run_option
@connected
def set_(connection: Connection, name: str, limits: Sequence[str], force: bool, dry_run: bool) -> None:
    """Set limits of a tenant, all or none; other limits stay. For system administrators.

    \b
    bursar quota set physics nvidia.com/gpu=64 memory=4Ti
    """
    wanted = _limits_in(limits, force=force)
    _change(connection, name, wanted, dry_run=dry_run)


@quota.command()
@tenant_argument
@click.argument("dimensions", nargs=-1, required=True, metavar="DIMENSION...")
@dry_run_option
@connected
def unset(connection: Connection, name: str, dimensions: Sequence[str], dry_run: bool) -> None:
    """Remove a tenant's own limits: those of its tier apply. For system administrators.

    \b
    bursar quota unset physics nvidia.com/gpu
    """
    _change(connection, name, {dimension_of(one): None for one in dimensions}, dry_run=dry_run)


def _limits_in(texts: Sequence[str], *, force: bool = False) -> dict[str, str | int | None]:
    wanted = dict(limit(text) for text in texts)
    for dimension in wanted:
        check_limited(dimension, force=force)
    return wanted


def _change(connection: Connection, name: str, wanted: Mapping[str, str | int | None], *, dry_run: bool) -> None:
    before = None if dry_run else tenant_before(connection, "tenants", name)
    fields = {f"max_{dimension}": quantity for dimension, quantity in wanted.items()}
    after = connection.client.update_tenant(name, fields, dry_run=dry_run)
    click.echo(f"tenant/{name} updated{' (dry run)' if dry_run else ''}")
    if not dry_run:
        limited = [dimension for dimension, quantity in wanted.items() if quantity is not None]
        print_limit_notes(connection, before, after, limited)


# Requesting.


@quota.command()
@limits_argument
@click.option("--reason", metavar="TEXT", required=True, help="The reason, which the approver reads.")
@click.option("--name", metavar="NAME", default="", help="The request's name; else one is made.")
@namespace_option
@force_option
@dry_run_option
@json_option
@connected
def request(
    connection: Connection, limits: Sequence[str], reason: str, name: str, force: bool, dry_run: bool, as_json: bool
) -> None:
    """Request higher limits for the tenant of a namespace. For administrators of the tenant.

    \b
    bursar quota request nvidia.com/gpu=128 --reason "training in June" -n ml-team
    """
    wanted = _limits_in(limits, force=force)
    if None in wanted.values():
        raise click.UsageError("a request names amounts: none would remove a limit")
    metadata = {"name": name} if name else {"generateName": "quota-"}
    document = {"metadata": metadata, "spec": {"limits": wanted, "reason": reason}}
    made = connection.client.quotarequests(connection.effective_namespace).create(document, dry_run=dry_run)
    exit_with_json(as_json, made)
    said = (made.get("status") or {}).get("message") or "created"
    click.echo(f"quotarequest/{made['metadata']['name']} created{' (dry run)' if dry_run else ''}: {said}")
