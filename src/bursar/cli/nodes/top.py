"""`bursar top`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from bursar.cli.shell.connection import Connection, connected
from bursar.cli.shell.output import NONE, age, print_rows, to_json
from bursar.core.values.duration import format_age
from bursar.core.values.quantity import amount, percent, readable
from bursar.core.values.wording import counted

Document = Mapping[str, Any]


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Both answers, as the API gives them.")
@connected
def top(connection: Connection, as_json: bool) -> None:
    """Show how full the cluster is, and how its queues stand."""
    from bursar.client import Unavailable

    cluster = connection.client.cluster_utilization()
    try:
        queues: Document = connection.client.queue_metrics() if cluster.get("scheduling") else {}
    except Unavailable:
        queues = {}
    if as_json:
        click.echo(to_json({**cluster, **queues}))
        return
    show_cluster(cluster)
    if queues:
        click.echo()
        print_rows(("Queue", "Waiting", "Oldest", "Avg wait", "P99 wait"), map(_queue, queues["queues"]))
    else:
        click.echo("\nno scheduler leads at the moment: nothing is known of the queues", err=True)


def show_cluster(answer: Document) -> None:
    cluster, scheduling = answer["cluster"], answer.get("scheduling")
    nodes = cluster["nodes"]
    counts = f"{nodes['ready']} ready, {nodes['notReady']} not ready, {nodes['cordoned']} ready but cordoned"
    click.echo(f"{counted(nodes['total'], 'node')}: {counts}")
    if scheduling:
        average, longest = (_wait(scheduling[f"{one}SchedulingLatencyMs"] / 1000) for one in ("avg", "p99"))
        waits = f", after {average} on average, p99 {longest}" if scheduling["p99SchedulingLatencyMs"] else ""
        click.echo(f"{scheduling['pendingAllocations']} waiting; placed {scheduling['schedulingRate']}{waits}")
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
    """For people: whole cores, not thousandths of them, and memory in the largest unit."""
    return NONE if value is None else readable(name, amount(name, value))


def _queue(one: Document) -> list[str]:
    oldest = age(one["oldestItem"]) if "oldestItem" in one else NONE
    placed = one.get("scheduledLast1h", 0)
    waits = (_wait(int(one[column].removesuffix("s"))) if placed else NONE for column in ("avgWaitTime", "p99WaitTime"))
    return [one["name"], str(one["depth"]), oldest, *waits]


def _wait(seconds: float) -> str:
    """As ages are shown; of a wait below a second, how little it was."""
    milliseconds = round(seconds * 1000)
    return f"{milliseconds}ms" if 0 < milliseconds < 1000 else format_age(round(seconds))
