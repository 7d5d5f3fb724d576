"""Notes on standard error after a change of a tenant: limits that were removed, lowered, or are below
current usage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import click

from bursar.cli.shell.connection import Connection
from bursar.core.quota.quota_messages import dimension_label
from bursar.core.values.quantity import amount

_STILL_APPLY = "limits of its tier, of the tenants above it and of the system apply"


def tenant_before(connection: Connection, plural: str, name: str) -> Mapping[str, Any] | None:
    """The tenant before a change; None for other kinds, and for a tenant that cannot be read or is new."""
    from bursar.client import BursarError

    if plural != "tenants":
        return None
    try:
        return connection.client.resource("tenants", namespaced=False).get(name)
    except BursarError:
        return None  # The change itself will fail with the reason.


def print_limit_notes(
    connection: Connection, before: Mapping[str, Any] | None, after: Mapping[str, Any], limited: Sequence[str] = ()
) -> None:
    """Print the notes on a change of a tenant. `limited` are the dimensions that the user set by name; without them
    the dimensions that differ from `before` count."""
    if before is None and not limited:
        return
    name, new = after["metadata"]["name"], _limits(after)
    old = new if before is None else _limits(before)
    changed = limited or [dimension for dimension, limit in new.items() if old.get(dimension) != limit]
    changes = (*removed_notes(name, old, new), *lowered_notes(name, old, new))
    for line in (*changes, *_below_use(connection, name, changed)):
        click.echo(line, err=True)


def removed_notes(name: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    """Notes on the limits that the change removed."""
    gone = sorted(dimension_label(dimension) for dimension in before.keys() - after.keys())
    if gone and not after:
        yield f"note: tenant {name} has no limits of its own now; {_STILL_APPLY}"
    elif gone:
        limits = "limit" if len(gone) == 1 else "limits"
        yield f"note: tenant {name} has no {limits} of its own now for {', '.join(gone)}; {_STILL_APPLY}"


def lowered_notes(name: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    """Notes on the limits that the change lowered."""
    for dimension in sorted(before.keys() & after.keys()):
        old, new = before[dimension], after[dimension]
        if amount(dimension, new) < amount(dimension, old):
            yield f"note: tenant {name} has a lower limit: {dimension_label(dimension)}: {old} → {new}"


def _limits(tenant: Mapping[str, Any]) -> Mapping[str, Any]:
    return (tenant.get("spec") or {}).get("limits") or {}


def _below_use(connection: Connection, name: str, limited: Sequence[str]) -> Iterator[str]:
    """Warn that a limit that was just set is below current use."""
    from bursar.client import BursarError

    if not limited:
        return
    try:
        answer = connection.client.tenant_quotas(name)
    except BursarError:
        return  # The limits are set; a note that cannot be written is no failure.
    becomes = "stays pending" if answer["enforcement"] == "Queue" else "is refused"
    for dimension in limited:
        quota = answer["quotas"].get(dimension)
        if quota and quota["limit"] and amount(dimension, quota["accepted"]) > amount(dimension, quota["limit"]):
            above = f"the limit is {quota['limit']}, and {quota['accepted']} are in use"
            what = f"running work continues, new work {becomes} until usage is below the limit"
            yield f"note: {dimension_label(dimension)}: {above}; {what}"
