"""`bursar top`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from bursar.cli.shell.connection import Connection, connected
from bursar.cli.shell.options import json_option
from bursar.cli.shell.output import NONE, age, exit_with_json, print_rows
from bursar.core.values.duration import format_age
from bursar.core.values.quantity import amount, percent, readable
from bursar.core.values.wording import counted

Document = Mapping[str, Any]


@click.command()
@json_option
@connected
def top(connection: Connection, as_json: bool) -> None:
    """Show the utilization of the cluster and its queues."""
    from bursar.client import Unavailable

    cluster = connection.client.cluster_utilization()
    try:
        queues: Document = connection.client.queue_metrics() if cluster.get("scheduling") else {}
    except Unavailable:
        queues = {}
    exit_with_json(as_json, {**cluster, **queues})
    show_cluster(cluster)
    if queues:
        click.echo()
        print_rows(("Queue", "Pending", "Oldest", "Avg wait", "P99 wait"), map(_queue, queues["queues"]))
    else:
        click.echo("\nno scheduler is leading, so no queue figures are available", err=True)


def show_cluster(answer: Document) -> None:
    cluster, scheduling = answer["cluster"], answer.get("scheduling")
    nodes = cluster["nodes"]
    counts = f"{nodes['ready']} ready, {nodes['notReady']} not ready, {nodes['cordoned']} ready but cordoned"
    click.echo(f"{counted(nodes['total'], 'node')}: {counts}")
    if scheduling:
        average, longest = (_wait(scheduling[f"{one}SchedulingLatencyMs"] / 1000) for one in ("avg", "p99"))
        waits = f", after {average} on average, p99 {longest}" if scheduling["p99SchedulingLatencyMs"] else ""
        click.echo(f"{scheduling['pendingAllocations']} pending; placed {scheduling['schedulingRate']}{waits}")
    click.echo()
    header = ("Resource", "Capacity", "Allocatable", "Requested", "Used", "Utilization")
    print_rows(header, [_resource(name, cluster[name]) for name in ("cpu", "memory", "gpu")])


def _resource(name: str, one: Document) -> list[str]:
    share = one.get("utilization")
    capacity, allocatable, requested, used = (
        _amount(name, one.get(column)) for column in ("capacity", "allocatable", "requested", "used")
    )
    full = percent(amount(name, str(one["requested"])), amount(name, str(one["allocatable"])))
    return [name, capacity, allocatable, f"{requested} ({full})", used, NONE if share is None else f"{share:.0%}"]


def _amount(name: str, value: object) -> str:
    """An amount for people: whole cores instead of thousandths, and memory in the largest unit."""
    return NONE if value is None else readable(name, amount(name, value))


def _queue(one: Document) -> list[str]:
    oldest = age(one["oldestItem"]) if "oldestItem" in one else NONE
    placed = one.get("scheduledLast1h", 0)
    waits = (_wait(int(one[column].removesuffix("s"))) if placed else NONE for column in ("avgWaitTime", "p99WaitTime"))
    return [one["name"], str(one["depth"]), oldest, *waits]


def _wait(seconds: float) -> str:
    """A wait as an age, or in milliseconds below a second."""
    milliseconds = round(seconds * 1000)
    return f"{milliseconds}ms" if 0 < milliseconds < 1000 else format_age(round(seconds))
