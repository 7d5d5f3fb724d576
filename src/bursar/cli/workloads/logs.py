"""`bursar logs`: what an allocation has written."""

from __future__ import annotations

import errno
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from bursar.cli.shell import completers
from bursar.cli.shell.connection import Connection, connected, namespace_option
from bursar.cli.shell.problem import NOT_FOUND, Outcomes, Problem
from bursar.cli.workloads.log_follow import Copying, LineSink
from bursar.cli.workloads.run_output import ENDED

if TYPE_CHECKING:
    from bursar.client import Resource

JOB_LABEL = "bursar.io/job"
LOOK_SECONDS = 1.0  # between one look for new members of a job and the next
AT_ONCE_MAX = 256  # members whose logs are followed


@click.command()
@click.argument("name", metavar="NAME | job/NAME", shell_complete=completers.work)
@click.option("-f", "--follow", is_flag=True, help="Go on with what is written, until it has ended.")
@click.option("--tail", "tail_lines", type=click.IntRange(0), metavar="N", help="Only the last N lines.")
@click.option(
    "--node",
    default="",
    metavar="NODE",
    help="Of one of its nodes; else of all.",
    shell_complete=completers.named("nodes"),
)
@click.option("--epoch", type=click.IntRange(1), metavar="N", help="Of an earlier placement; with --node.")
@namespace_option
@connected
def logs(connection: Connection, name: str, follow: bool, tail_lines: int | None, node: str, epoch: int | None) -> None:
    """Print the output of an allocation or a job.

    Where it runs on several nodes, each line is preceded by its node's name; of a job, by the allocation's.

    \b
    bursar logs train -n ml-team
    bursar logs -f --tail 20 train
    bursar logs -f job/sweep
    """
    if epoch and not node:
        raise click.UsageError("--epoch goes with --node: every placement may be elsewhere")
    allocations = connection.client.allocations(connection.effective_namespace)
    kind, slash, rest = name.partition("/")
    if slash and kind in ("job", "jobs"):
        if node:
            raise click.UsageError("--node goes with an allocation: those of a job may be anywhere")
        _finish(*_job_logs(connection, rest, follow=follow, tail_lines=tail_lines))
        return
    nodes = [node]
    if not node:
        status = _found(connection, name.removeprefix("allocation/")).get("status") or {}
        # While it has none, the server says why.
        nodes = [one["name"] for one in status.get("nodes") or []] or [""]
        epoch = int(status.get("epoch") or 0) if len(nodes) > 1 else 0
    lines = LineSink(named=len(nodes) > 1)
    copying = Copying(allocations, name.removeprefix("allocation/"), lines)
    copying.begin(nodes, epoch or 0, follow=follow, tail_lines=tail_lines)
    copying.wait()
    _finish(lines, [copying])


def _finish(lines: LineSink, copyings: Sequence[Copying]) -> None:
    if any(one.left for one in copyings):
        raise BrokenPipeError(errno.EPIPE, "nobody reads any more")
    lines.finish()
    for gap in (gap for one in copyings for gap in one.gaps()):
        click.echo(f"bursar: {gap}", err=True)
    outcomes = Outcomes()
    for copy in (copy for one in copyings for copy in one.copies):
        if copy.error is not None:
            outcomes.failed(copy.error)
    outcomes.leave()


def _found(connection: Connection, name: str) -> Mapping[str, Any]:
    """The allocation; or, where it is a job that has the name, how to name that."""
    from bursar.client import BursarError, NotFound

    try:
        return connection.client.allocations(connection.effective_namespace).get(name)
    except NotFound as error:
        try:
            connection.client.jobs(connection.effective_namespace).get(name)
        except BursarError:
            raise error from None
        hint = f"{name} is a job: bursar logs job/{name} prints what all its allocations have written"
        raise Problem(str(connection.located(error)), hint, NOT_FOUND) from error


# Of a job.


def _job_logs(
    connection: Connection, name: str, *, follow: bool, tail_lines: int | None
) -> tuple[LineSink, list[Copying]]:
    """Of each allocation the last placement: one after the other, or, to be followed, all at once as they come."""
    jobs = connection.client.jobs(connection.effective_namespace)
    allocations = connection.client.allocations(connection.effective_namespace)
    lines, copyings = LineSink(named=True), dict[str, Copying]()
    while True:
        over = (jobs.get(name).get("status") or {}).get("phase") in ENDED
        for one in _members(allocations, name):
            if one["metadata"]["uid"] in copyings:
                continue
            if follow and len(copyings) >= AT_ONCE_MAX:
                raise Problem(f"{name} has more than {AT_ONCE_MAX} allocations", "name one of them, or leave out -f")
            copyings[one["metadata"]["uid"]] = copying = _begun(allocations, one, lines, follow, tail_lines)
            if not follow:
                copying.wait()
        if not follow or any(one.left for one in copyings.values()):
            break
        if over and all(copy.over.is_set() for one in copyings.values() for copy in one.copies):
            break
        time.sleep(LOOK_SECONDS)
    if not copyings:
        click.echo(f"bursar: nothing of job {name} has run yet: bursar status job/{name}", err=True)
    return lines, list(copyings.values())


def _members(allocations: Resource, job: str) -> list[Mapping[str, Any]]:
    """Those that were placed, in the order of their names."""
    found = [one for one in allocations.list(label_selector=f"{JOB_LABEL}={job}") if _nodes(one)]
    return sorted(found, key=lambda one: (len(one["metadata"]["name"]), one["metadata"]["name"]))


def _nodes(allocation: Mapping[str, Any]) -> list[str]:
    return [str(one["name"]) for one in (allocation.get("status") or {}).get("nodes") or []]


def _begun(
    allocations: Resource, one: Mapping[str, Any], lines: LineSink, follow: bool, tail_lines: int | None
) -> Copying:
    name, nodes = str(one["metadata"]["name"]), _nodes(one)

    def sink(node: str, data: bytes) -> None:
        lines(f"{name} {node}" if len(nodes) > 1 else name, data)

    copying = Copying(allocations, name, sink)
    copying.begin(nodes, int(one["status"].get("epoch") or 0), follow=follow, tail_lines=tail_lines)
    return copying
