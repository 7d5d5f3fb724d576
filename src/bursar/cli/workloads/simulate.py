"""`bursar simulate`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import click

from bursar.cli.shell import manifest
from bursar.cli.shell.connection import Connection, connected, namespace_option
from bursar.cli.shell.options import json_option
from bursar.cli.shell.output import due, moments, to_json
from bursar.cli.shell.problem import Problem
from bursar.cli.shell.resource_arg import find
from bursar.core.values.duration import format_age
from bursar.core.values.wording import counted

Document = Mapping[str, Any]


@click.command()
@manifest.files_option
@manifest.recursive_option
@namespace_option
@json_option
@connected
def simulate(connection: Connection, files: Sequence[str], recursive: bool, as_json: bool) -> None:
    """Show whether, where and when allocations would run.

    All allocations in the files are tried together. A job counts as its first allocations. Nothing is created.

    \b
    bursar simulate -f allocation.yaml
    """
    if not files:
        raise click.UsageError("name a file with -f; -f - is standard input")
    wanted = manifest.read(files, recursive=recursive)
    resources = {}
    for one in wanted:
        noun, _ = manifest.place(one, connection, "allocation")
        if noun.plural not in ("allocations", "jobs"):
            raise Problem(f"{one.source}: only allocations and jobs can be simulated, not {noun.kind}")
        own = str((one.document.get("metadata") or {}).get("namespace") or connection.effective_namespace)
        resources[own] = connection.resource(find("allocations", connection.client), own)
    if len(resources) > 1:
        raise Problem(
            "allocations that are simulated together must be in one namespace", f"found: {', '.join(resources)}"
        )
    (resource,) = resources.values()
    answer = resource.simulate([one.document for one in wanted])
    click.echo(to_json(answer) if as_json else "\n".join(line for one in answer["allocations"] for line in lines(one)))


def lines(one: Document) -> Iterator[str]:
    yield f"allocation/{one['name']}: {moments(one['message'])}"
    reason = one.get("reason")
    if reason and reason.get("help"):
        yield f"  help     {moments(reason['help'])}"
    for other in one.get("otherReasons") or []:
        yield f"  also     {moments(other['message'])}"
    for victim in one.get("evictions") or []:
        yield f"  evicts   {victim['namespace']}/{victim['name']} ({victim['rule']})"
    if others := one.get("evictionsOfOtherTenants"):
        yield f"  evicts   {others} of other tenants"
    if cost := one.get("cost"):
        hourly = counted(cost["perHour"], "credit")
        yield f"  cost     {hourly} an hour ({cost['perSecond']} a second), paid by {cost['account']}"
        first = f"{cost['firstWindow']} for the first {cost['windowSeconds']} s"
        yield f"  held     {first}, of {cost['available']} available"
        if lasts := _lasts(cost):
            yield f"  lasts    {lasts} on the available credit, if nothing else runs"
    if one.get("queuePosition") and not one["wouldRun"]:
        yield f"  queue    position {one['queuePosition']}; {one['ahead']['allocations']} ahead"
    if one.get("estimatedStartTime") and not one["wouldRun"]:
        yield f"  start    {due(one['estimatedStartTime'])} (estimate)"


def _lasts(cost: Document) -> str:
    """How long the available credit lasts for this allocation alone."""
    from decimal import Decimal

    rate, available = Decimal(cost["perSecond"]), Decimal(cost["available"])
    return format_age(int(available / rate)) if rate and available >= Decimal(cost["firstWindow"]) else ""
