"""`bursar logs`: prints the output of an allocation or a job."""

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
POLL_SECONDS = 1.0  # between two looks for new allocations of a job
FOLLOWED_MAX = 256  # allocations of a job whose logs are followed at once


@click.command()
@click.argument("name", metavar="NAME | job/NAME", shell_complete=completers.work)
@click.option("-f", "--follow", is_flag=True, help="Keep printing new output until the work has ended.")
@click.option("--tail", "tail_lines", type=click.IntRange(0), metavar="N", help="Print only the last N lines.")
@click.option("--node", default="", metavar="NODE", help="Only on this node.", shell_complete=completers.named("nodes"))
@click.option("--epoch", type=click.IntRange(1), metavar="N", help="The output of an earlier placement; needs --node.")
@namespace_option
@connected
def logs(connection: Connection, name: str, follow: bool, tail_lines: int | None, node: str, epoch: int | None) -> None:
    """Print the output of an allocation or a job.

    With several nodes each line begins with its node's name, with a job it begins with the allocation's.

    \b
    bursar logs train -n ml-team
    bursar logs -f --tail 20 train
    bursar logs -f job/sweep
    """
    if epoch and not node:
        raise click.UsageError("--epoch needs --node: each placement may be on other nodes")
    allocations = connection.client.allocations(connection.effective_namespace)
    kind, slash, rest = name.partition("/")
    if slash and kind in ("job", "jobs"):
        if node:
            raise click.UsageError("--node works for an allocation, not for a job")
        _finish(*_job_logs(connection, rest, follow=follow, tail_lines=tail_lines))
        return
    nodes = [node]
    if not node:
        status = _found(connection, name.removeprefix("allocation/")).get("status") or {}
        # Without a node the server's answer gives the reason.
        nodes = [one["name"] for one in status.get("nodes") or []] or [""]
        epoch = int(status.get("epoch") or 0) if len(nodes) > 1 else 0
    lines = LineSink(named=len(nodes) > 1)
    copying = Copying(allocations, name.removeprefix("allocation/"), lines)
    copying.begin(nodes, epoch or 0, follow=follow, tail_lines=tail_lines)
    copying.wait()
    _finish(lines, [copying])


def _finish(lines: LineSink, copyings: Sequence[Copying]) -> None:
    if any(one.pipe_closed for one in copyings):
        raise BrokenPipeError(errno.EPIPE, "the reader has closed the pipe")
    lines.finish()
    for gap in (gap for one in copyings for gap in one.gaps()):
        click.echo(f"bursar: {gap}", err=True)
    outcomes = Outcomes()
    for copy in (copy for one in copyings for copy in one.copies):
        if copy.error is not None:
            outcomes.failed(copy.error)
    outcomes.leave()


def _found(connection: Connection, name: str) -> Mapping[str, Any]:
    """The allocation. If only a job has the name, the error says how to read the job's logs."""
    from bursar.client import BursarError, NotFound

    try:
        return connection.client.allocations(connection.effective_namespace).get(name)
    except NotFound as error:
        try:
            connection.client.jobs(connection.effective_namespace).get(name)
        except BursarError:
            raise error from None
        hint = f"{name} is a job: bursar logs job/{name} prints the output of all its allocations"
        raise Problem(str(connection.located(error)), hint, NOT_FOUND) from error


# Logs of a job.


def _job_logs(
    connection: Connection, name: str, *, follow: bool, tail_lines: int | None
) -> tuple[LineSink, list[Copying]]:
    """Copy the log of each allocation's last placement: one after the other, or all at once to follow them."""
    jobs = connection.client.jobs(connection.effective_namespace)
    allocations = connection.client.allocations(connection.effective_namespace)
    lines, copyings = LineSink(named=True), dict[str, Copying]()
    while True:
        ended = (jobs.get(name).get("status") or {}).get("phase") in ENDED
        for one in _members(allocations, name):
            if one["metadata"]["uid"] in copyings:
                continue
            if follow and len(copyings) >= FOLLOWED_MAX:
                raise Problem(f"{name} has more than {FOLLOWED_MAX} allocations", "choose one of them, or leave out -f")
            copyings[one["metadata"]["uid"]] = copying = _begun(allocations, one, lines, follow, tail_lines)
            if not follow:
                copying.wait()
        if not follow or any(one.pipe_closed for one in copyings.values()):
            break
        if ended and all(copy.finished.is_set() for one in copyings.values() for copy in one.copies):
            break
        time.sleep(POLL_SECONDS)
    if not copyings:
        click.echo(f"bursar: job {name} has no output yet: bursar status job/{name}", err=True)
    return lines, list(copyings.values())


def _members(allocations: Resource, job: str) -> list[Mapping[str, Any]]:
    """The placed allocations of a job, by name."""
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
