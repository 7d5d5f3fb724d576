"""`bursar explain`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import click

from bursar.cli.shell import completers
from bursar.cli.shell.connection import Connection, connected, namespace_option
from bursar.cli.shell.options import json_option
from bursar.cli.shell.output import due, moments, pairs, to_json
from bursar.cli.shell.problem import NOT_FOUND, Problem
from bursar.cli.shell.resource_arg import find

Document = Mapping[str, Any]

POINTS_MIN = 0.0005  # factors that add less to a score are left out


@click.command()
@click.argument("words", nargs=-1, required=True, metavar="[KIND] NAME", shell_complete=completers.explainable)
@namespace_option
@json_option
@connected
def explain(connection: Connection, words: Sequence[str], as_json: bool) -> None:
    """Show why work is pending, and what would help.

    \b
    bursar explain train-1 -n ml-team
    bursar explain job/train -n ml-team
    """
    from bursar.client import NotFound

    kind, name = _target(words)
    try:
        answer = connection.resource(find(kind, connection.client)).explain(name)
    except NotFound as error:
        if name == words[0] and _is_job(connection, name):
            hint = f"a job has this name: bursar explain job/{name}"
            raise Problem(str(connection.located(error)), hint, NOT_FOUND) from error
        raise
    click.echo(to_json(answer) if as_json else "\n".join(lines(answer)))


def _target(words: Sequence[str]) -> tuple[str, str]:
    """Parse `train`, `allocation train` or `job/train` into kind and name; a name alone is an allocation's."""
    if len(words) == 2:
        return words[0], words[1]
    kind, slash, name = words[0].partition("/")
    if len(words) > 2 or (slash and not (kind and name)):
        raise click.UsageError("name one allocation or job, as in `train` or `job/train`")
    return (kind, name) if slash else ("allocation", words[0])


def _is_job(connection: Connection, name: str) -> bool:
    from bursar.client import BursarError

    try:
        connection.resource(find("job", connection.client)).get(name)
    except BursarError:
        return False
    return True


def lines(answer: Document) -> Iterator[str]:
    yield f"{answer['namespace']}/{answer['name']} is {answer['phase']}"
    reason = answer.get("reason")
    if not reason:
        yield f"  {moments(answer['message'])}"
        return
    yield f"  why      {moments(reason['message'])}"
    if reason.get("help"):
        yield f"  help     {moments(reason['help'])}"
    for other in answer.get("otherReasons") or []:
        yield f"  also     {moments(other['message'])}"
    yield from _queue(answer)
    yield from _reserved(answer)
    yield from _priority(answer)


def _queue(answer: Document) -> Iterator[str]:
    ahead = answer.get("ahead")
    if answer.get("queuePosition") and ahead is not None:
        asked = f" asking for {pairs(ahead['resources'])}" if ahead["allocations"] else ""
        # Other tenants' work is counted only for readers who see it.
        overall = f", {answer['overallPosition']} overall" if "overallPosition" in answer else ""
        counted = f"{ahead['allocations']} {'ahead' if overall else 'of your tenant ahead'}{asked}"
        yield f"  queue    position {answer['queuePosition']} in {answer['queue']}{overall}; {counted}"
    if answer.get("estimatedStartTime"):
        yield f"  start    {due(answer['estimatedStartTime'])} (estimate)"


def _reserved(answer: Document) -> Iterator[str]:
    if reservation := answer.get("reservation"):
        yield f"  reserved {', '.join(reservation['nodes'])} from {moments(reservation['fromTime'])}"
    if nomination := answer.get("nomination"):
        yield f"  reserved {', '.join(nomination['nodes'])} until {moments(nomination['until'])}"


def _priority(answer: Document) -> Iterator[str]:
    if share := answer.get("share"):
        parts = f"holds {share['actual']:.1%} of the cluster, its share is {share['target']:.1%}"
        left = share["budgetPenalty"]
        penalty = f", budget use reduces its score to {left:.0%}" if left < 1 else ""
        yield f"  share    tenant {share['tenant']} {parts}{penalty}"
    if score := answer.get("score"):
        terms = [f"{one['factor']} {one['points']:.3f}" for one in score["terms"] if one["points"] >= POINTS_MIN]
        yield f"  score    {score['total']:.3f} ({score['profile']}): {', '.join(terms)}"
