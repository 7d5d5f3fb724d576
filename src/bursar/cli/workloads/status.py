"""`bursar status`: shows the user's active work, and why it is pending."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

from bursar.cli.shell import completers
from bursar.cli.shell.connection import Connection, connected, namespace_option
from bursar.cli.shell.options import json_option
from bursar.cli.shell.output import NONE, age, due, moments, print_rows, to_json
from bursar.cli.shell.problem import NOT_FOUND, Problem
from bursar.cli.shell.resource_arg import find
from bursar.cli.workloads.run_output import ENDED, status_line
from bursar.core.credit.shortfall import OUT_OF_CREDIT
from bursar.core.values.duration import format_age

if TYPE_CHECKING:
    from bursar.client import Resource

Document = Mapping[str, Any]

# Kinds of work, and their plurals.
KINDS = {"Job": "jobs", "Allocation": "allocations"}
JOB_LABEL = "bursar.io/job"  # on each allocation of a job
EXPECTED = "give an allocation or a job, as in `train-0` or `job/train`"


@click.command()
@click.argument("name", required=False, metavar="[NAME | job/NAME]", shell_complete=completers.work)
@namespace_option
@click.option("--user", metavar="NAME", help="Another user's work: a name in your tenant, or TENANT/NAME.")
@click.option("--everybody", is_flag=True, help="The work of all users.")
@click.option("--ended", is_flag=True, help="Also finished work.")
@click.option("--all", "unfolded", is_flag=True, help="Also each allocation of a job.")
@json_option
@connected
def status(
    connection: Connection,
    name: str | None,
    user: str | None,
    everybody: bool,
    ended: bool,
    unfolded: bool,
    as_json: bool,
) -> None:
    """Show your active work, and why it is pending.

    Without -n all namespaces are searched.

    \b
    bursar status                     # your active work
    bursar status train-1 -n ml-team  # or job/train
    """
    if name is not None:
        if user or everybody or ended or unfolded:
            raise click.UsageError("a name cannot be combined with --user, --everybody, --ended or --all")
        document = _find(connection, name)
        click.echo(to_json(document) if as_json else "\n".join(details(document)))
        return
    if user and everybody:
        raise click.UsageError("--user and --everybody cannot be combined")
    owner = "" if everybody else _owner(connection, user)
    works = sorted(_works(connection, owner, ended=ended, unfolded=unfolded), key=_place)
    if as_json:
        click.echo(to_json({"apiVersion": "v1", "kind": "List", "items": works}))
    elif works:
        _print(works, with_users=everybody)
    else:
        click.echo(_nothing(connection, owner, ended=ended), err=True)
        if user and "/" not in owner:
            # A caller without a tenant has named a user of one.
            click.echo(f"Users of a tenant need its name: --user TENANT/{user}", err=True)


# One piece of work.


def _find(connection: Connection, name: str) -> Document:
    """The work of this name in the given or default namespace, else in the only namespace that has one."""
    from bursar.client import NotFound

    kinds, plain = _named(connection, name)
    error: NotFound | None = None
    for kind in kinds:
        try:
            found: Document = _all(connection, kind)(connection.effective_namespace).get(plain)
        except NotFound as missing:
            error = error or missing
        else:
            return {"kind": kind, **found}
    assert error is not None
    if connection.namespace:
        raise error
    elsewhere = [(kind, space) for kind in kinds for space in connection.spaces_with(KINDS[kind], plain)]
    if len(elsewhere) == 1:
        ((kind, space),) = elsewhere
        # A read of one object includes its queue position.
        return {"kind": kind, **_all(connection, kind)(space).get(plain)}
    hint = "give its namespace with -n" if elsewhere else "`bursar status --ended` lists all your work"
    raise Problem(str(connection.located(error)), hint, NOT_FOUND) from error


def _named(connection: Connection, name: str) -> tuple[Sequence[str], str]:
    """The possible kinds, the likelier one first, and the name."""
    word, slash, rest = name.partition("/")
    plain = rest if slash else name
    if not plain or plain in (".", "..") or not word:
        raise click.UsageError(EXPECTED)
    if not slash:
        return ("Allocation", "Job"), plain
    noun = find(word, connection.client)
    if noun.kind not in KINDS:
        raise click.UsageError(EXPECTED)
    return (noun.kind,), plain


# The work of a user.


def _owner(connection: Connection, user: str | None) -> str:
    """The user as in `status.user`: TENANT/NAME for users of a tenant."""
    me = connection.client.whoami()
    name = user or str(me.get("user") or "")
    tenant = str(me.get("tenant") or "")
    return f"{tenant}/{name}" if tenant and "/" not in name else name


def _works(connection: Connection, owner: str, *, ended: bool, unfolded: bool) -> Iterator[Document]:
    """Jobs and allocations. A job's line counts its allocations, which may be thousands, unless unfolded."""
    selector = _selector(owner, ended=ended)
    folded = {"Allocation": f"!{JOB_LABEL}"}
    for kind in KINDS:
        everything = _all(connection, kind)
        chosen = everything(connection.namespace) if connection.namespace else everything
        labels = "" if unfolded else folded.get(kind, "")
        for one in chosen.list(label_selector=labels, field_selector=selector):
            yield {"kind": kind, **one}


def _all(connection: Connection, kind: str) -> Resource:
    return connection.client.resource(KINDS[kind], namespaced=True)


def _selector(owner: str, *, ended: bool) -> str:
    """A field selector, so that the server filters out other users' and finished work."""
    from bursar.core.values.selector import Op, Selector, SelectorTerm, to_text

    terms = [SelectorTerm("status.user", Op.IN, (owner,))] if owner else []
    if not ended:
        terms += [SelectorTerm("status.phase", Op.NOT_IN, (phase,)) for phase in sorted(ENDED)]
    return to_text(Selector(tuple(terms)))


def _place(document: Document) -> tuple[str, str, str]:
    metadata = document["metadata"]
    return str(metadata.get("namespace") or ""), str(metadata.get("name") or ""), str(document.get("kind") or "")


def _print(works: Sequence[Document], *, with_users: bool) -> None:
    header = ("Namespace", "Name", *(("User",) if with_users else ()), "Status", "Age", "Detail")
    print_rows(header, (_row(one, with_users=with_users) for one in works))


def _row(document: Document, *, with_users: bool) -> Sequence[str]:
    metadata, now = document["metadata"], document.get("status") or {}
    name = f"job/{metadata['name']}" if _is_job(document) else str(metadata["name"])
    user = [str(now.get("user") or NONE)] if with_users else []
    where = str(metadata.get("namespace") or NONE)
    return [where, name, *user, _phase(document), age(metadata.get("creationTimestamp")), words(document)]


def _nothing(connection: Connection, owner: str, *, ended: bool) -> str:
    where = f" in namespace {connection.namespace}" if connection.namespace else ""
    whose = f" of {owner}" if owner else ""
    if ended:
        return f"No work{whose}{where}."
    return f"No active work{whose}{where}. Add --ended to see finished work."


# In words.


def words(document: Document) -> str:
    """The status as one line."""
    now = document.get("status") or {}
    if _is_job(document):
        return "; ".join(_job_words(document, now))
    phase, message = _phase(document), str(now.get("message") or "")
    if phase in ENDED:
        code = f"exit code {now['exitCode']}" if now.get("exitCode") else ""
        parts = [message or str(now.get("reason") or "") or code or phase.lower(), *_ran(now)]
    else:
        parts = [status_line(now)]
        # The status line already has the remaining time of work without credit.
        if phase in ("Scheduled", "Running") and message and now.get("reason") != OUT_OF_CREDIT:
            parts.append(message)
    parts += _restarts(now)
    return moments(" ".join("; ".join(parts).split()))


def _ran(now: Document) -> Iterator[str]:
    """The run time, if it ran."""
    try:
        begun, over = (datetime.fromisoformat(str(now[field])) for field in ("startTime", "endTime"))
    except (KeyError, ValueError):
        return
    yield f"ran {format_age(int((over - begun).total_seconds()))}"


def _restarts(now: Document) -> Iterator[str]:
    """The number of restarts, and the reason of the last one."""
    if not now.get("restarts"):
        return
    last = now.get("lastRestart") or {}
    at = str(last.get("time") or "")[11:16]
    yield f"restarts: {now['restarts']} ({str(last.get('reason') or 'requeued').lower()}{f' at {at}' if at else ''})"


def _job_words(document: Document, now: Document) -> Iterator[str]:
    spec = document.get("spec") or {}
    wanted = spec.get("completions") or spec.get("parallelism") or 1
    failed = f", {now['failed']} failed" if now.get("failed") else ""
    phase = _phase(document)
    open_ = "" if phase in ENDED else f", {now.get('active') or 0} {'pending' if phase == 'Queued' else 'active'}"
    yield f"{now.get('succeeded') or 0} of {wanted} done{open_}{failed}"
    if now.get("queuePosition"):
        yield f"queue position {now['queuePosition']}"
    if now.get("nextRetryTime"):
        yield f"retries {due(now['nextRetryTime'])}"
    if blocked := _true(now.get("conditions") or (), "Blocked"):
        yield " ".join(str(blocked.get("message") or "").split())
    elif now.get("message"):
        yield " ".join(str(now["message"]).split())


def details(document: Document) -> Iterator[str]:
    """One job or allocation in a few lines."""
    metadata, now = document["metadata"], document.get("status") or {}
    phase = _phase(document)
    yield f"{'job ' if _is_job(document) else ''}{metadata['namespace']}/{metadata['name']} is {phase}"
    yield f"  detail   {words(document)}"
    if now.get("reason"):
        yield f"  reason   {now['reason']}"
    if now.get("user"):
        yield f"  user     {now['user']}"
    ended = now.get("endTime") or now.get("completionTime")
    times = (("created", metadata.get("creationTimestamp")), ("started", now.get("startTime")), ("ended", ended))
    for label, field in times:
        if field:
            yield f"  {label.ljust(8)} {field} ({age(field)} ago)"
    if phase in ("Pending", "Queued"):
        name = f"job/{metadata['name']}" if _is_job(document) else metadata["name"]
        yield f"  more     bursar explain {name} -n {metadata['namespace']}"
    elif now.get("startTime") and not _is_job(document):
        yield f"  more     bursar logs {metadata['name']} -n {metadata['namespace']}"


def _phase(document: Document) -> str:
    phase = (document.get("status") or {}).get("phase")
    return str(phase or ("Queued" if _is_job(document) else "Pending"))


def _is_job(document: Document) -> bool:
    return document.get("kind") == "Job"


def _true(conditions: Iterable[Document], name: str) -> Document | None:
    return next((one for one in conditions if one["type"] == name and one["status"] == "True"), None)
