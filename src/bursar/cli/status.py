"""`bursar status`: how one's own work stands, and why it waits, in words."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import click

from bursar.cli import complete
from bursar.cli.connection import Connection, connected, namespace_option
from bursar.cli.noun import find
from bursar.cli.output import NONE, age, print_rows, to_json
from bursar.cli.problem import NOT_FOUND, Problem
from bursar.cli.telling import ENDED, standing

Document = Mapping[str, Any]

_LIVE = ",".join(f"status.phase!={phase}" for phase in sorted(ENDED))


@click.command()
@click.argument("name", required=False, metavar="[NAME | job/NAME]", shell_complete=complete.explainable)
@namespace_option
@click.option("--user", metavar="NAME", help="Somebody else's work, of the same tenant or as tenant/name.")
@click.option("--everybody", is_flag=True, help="Everybody's work.")
@click.option("--ended", is_flag=True, help="Also what has ended.")
@click.option("--json", "as_json", is_flag=True, help="The objects, as the API gives them.")
@connected
def status(
    connection: Connection, name: str | None, user: str | None, everybody: bool, ended: bool, as_json: bool
) -> None:
    """Show how your work stands, and why it waits.

    \b
    bursar status                     # all that is yours and has not ended
    bursar status train-1 -n ml-team  # or job/train
    """
    if name is not None:
        if user or everybody or ended:
            raise click.UsageError("a name is enough: leave out --user, --everybody and --ended")
        document = _find(connection, name)
        click.echo(to_json(document) if as_json else "\n".join(told(document)))
        return
    if user and everybody:
        raise click.UsageError("--user and --everybody do not go together")
    whose = "" if everybody else _whose(connection, user)
    works = sorted(_works(connection, whose, ended=ended), key=_place)
    if as_json:
        click.echo(to_json({"apiVersion": "v1", "kind": "List", "items": works}))
    elif works:
        print_rows(("Namespace", "Name", "Status", "Age", "How it stands"), map(_row, works))
    else:
        what = "was submitted" if ended else "waits or runs"
        click.echo(f"Nothing {what} for {whose or 'anybody'}.", err=True)


def _find(connection: Connection, name: str) -> Document:
    from bursar.client import NotFound

    kind, slash, rest = name.partition("/")
    noun = find(kind if slash else "allocation", connection.client)
    if noun.kind not in ("Allocation", "Job"):
        raise click.UsageError("name an allocation or a job, as in `train` or `job/train`")
    try:
        found: Document = connection.resource(noun).get(rest if slash else name)
    except NotFound as error:
        where = f"it was looked for in namespace {connection.effective_namespace}"
        hint = f"{where}; -n names another, and `bursar status` lists what is yours in all of them"
        raise Problem(error.message, "" if connection.namespace else hint, NOT_FOUND) from error
    return found


def _whose(connection: Connection, user: str | None) -> str:
    """As `status.user` has it: people of a tenant are named with it."""
    me = connection.client.whoami()
    name = user or str(me.get("user") or "")
    tenant = str(me.get("tenant") or "")
    return f"{tenant}/{name}" if tenant and "/" not in name else name


def _works(connection: Connection, whose: str, *, ended: bool) -> Iterator[Document]:
    """Jobs, and allocations, those of jobs as well: each waits or runs by itself."""
    selector = "" if ended else _LIVE
    for kind, plural in (("Job", "jobs"), ("Allocation", "allocations")):
        everything = connection.client.resource(plural, namespaced=True)
        chosen = everything(connection.namespace) if connection.namespace else everything
        for one in chosen.list(field_selector=selector):
            if not whose or (one.get("status") or {}).get("user") == whose:
                yield {"kind": kind, **one}


def _place(document: Document) -> tuple[str, str, str]:
    metadata = document["metadata"]
    return str(metadata.get("namespace") or ""), str(metadata.get("name") or ""), str(document.get("kind") or "")


def _row(document: Document) -> Sequence[str]:
    metadata, now = document["metadata"], document.get("status") or {}
    name = f"job/{metadata['name']}" if _is_job(document) else str(metadata["name"])
    phase = str(now.get("phase") or ("Queued" if _is_job(document) else "Pending"))
    where = str(metadata.get("namespace") or NONE)
    return [where, name, phase, age(metadata.get("creationTimestamp")), words(document)]


def words(document: Document) -> str:
    """How it stands, in one line."""
    now = document.get("status") or {}
    if _is_job(document):
        return "; ".join(_job_words(document, now))
    phase, message = now.get("phase") or "Pending", str(now.get("message") or "")
    if phase in ENDED:
        code = f"exit code {now['exitCode']}" if now.get("exitCode") else ""
        return " ".join((message or str(now.get("reason") or "") or code or phase.lower()).split())
    line = standing(now)
    if phase in ("Scheduled", "Running") and message:
        line += f"; {message}"
    return " ".join(line.split())


def _job_words(document: Document, now: Document) -> Iterator[str]:
    spec = document.get("spec") or {}
    wanted = spec.get("completions") or spec.get("parallelism") or 1
    failed = f", {now['failed']} failed" if now.get("failed") else ""
    yield f"{now.get('succeeded') or 0} of {wanted} done, {now.get('active') or 0} under way{failed}"
    if blocked := _true(now.get("conditions") or (), "Blocked"):
        yield " ".join(str(blocked.get("message") or "").split())
    elif now.get("message"):
        yield " ".join(str(now["message"]).split())


def told(document: Document) -> Iterator[str]:
    """One piece of work, in a few lines."""
    metadata, now = document["metadata"], document.get("status") or {}
    phase = now.get("phase") or ("Queued" if _is_job(document) else "Pending")
    yield f"{metadata['namespace']}/{metadata['name']} is {phase}"
    yield f"  how      {words(document)}"
    if now.get("reason"):
        yield f"  reason   {now['reason']}"
    if now.get("user"):
        yield f"  user     {now['user']}"
    for label, field in (("created", metadata.get("creationTimestamp")), ("started", now.get("startTime"))):
        if field:
            yield f"  {label.ljust(8)} {field} ({age(field)} ago)"
    if phase == "Pending":
        yield f"  more     bursar explain {metadata['name']} -n {metadata['namespace']}"


def _is_job(document: Document) -> bool:
    return document.get("kind") == "Job"


def _true(conditions: Iterable[Document], name: str) -> Document | None:
    return next((one for one in conditions if one["type"] == name and one["status"] == "True"), None)
