"""`bursar approvals`: the inbox of approvers, decisions on requests, and the history of a decision."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import click

from bursar.cli.shell import completers
from bursar.cli.shell.connection import Connection, connected, dry_run_option, namespace_option
from bursar.cli.shell.default_command import DefaultCommandGroup
from bursar.cli.shell.options import json_option
from bursar.cli.shell.output import NONE, age, exit_with_json, pairs, print_rows
from bursar.cli.shell.problem import Outcomes, Problem
from bursar.cli.shell.resource_arg import one_target, targets

Document = Mapping[str, Any]

ITEMS_MAX = 500  # of one call
REASON_CHARS_MAX = 60

gate_option = click.option("--gate", metavar="NAME", default="", help="quota, manual or external:NAME.")


@click.group(cls=DefaultCommandGroup, default="list")
def approvals() -> None:
    """List and decide requests that await approval.

    \b
    bursar approvals                                                # the inbox, oldest first
    bursar approvals approve resourceclaim/train -n ml-team --gate manual
    bursar approvals deny job/big job/huge -n ml-team --reason "after the release"
    bursar approvals history resourceclaim/train -n ml-team
    """


# The inbox.


@approvals.command("list")
@gate_option
@click.option("--tenant", metavar="NAME", default="", help="Only of this tenant.",
              shell_complete=completers.named("tenants"))  # fmt: skip
@json_option
@connected
def list_(connection: Connection, gate: str, tenant: str, as_json: bool) -> None:
    """List the requests that await approval, the oldest first."""
    found = list(connection.client.approvals(gate=gate, tenant=tenant))
    exit_with_json(as_json, {"items": found})
    if not found:
        click.echo("No request awaits approval.", err=True)
        return
    print_rows(("Age", "Gate", "Tenant", "Namespace", "Request", "User", "Requested", "Reason"), map(_row, found))


def _row(one: Document) -> list[str]:
    document = one["object"]
    status = document.get("status") or {}
    name = f"{one['kind'].lower()}/{one['name']}"
    reason = " ".join(str(_open(status).get("reason") or _asked_because(document) or NONE).split())
    shown = reason if len(reason) <= REASON_CHARS_MAX else f"{reason[: REASON_CHARS_MAX - 1]}…"
    user = str(status.get("user") or NONE)
    return [age(one["since"]), one["gate"], one["tenant"], one["namespace"] or NONE, name, user,
            pairs(one.get("requested") or (document.get("spec") or {}).get("limits")), shown]  # fmt: skip


def _open(status: Document) -> Document:
    """The part of an approval that is pending: of the request, or of its growth."""
    approval = status.get("approval") or {}
    return approval if approval.get("state") == "pending" else approval.get("change") or {}


def _asked_because(document: Document) -> str:
    return str((document.get("spec") or {}).get("reason") or "")


# Decisions.


def _decision_options(command: Any) -> Any:
    for option in reversed((
        click.argument("words", nargs=-1, required=True, metavar="KIND/NAME...", shell_complete=completers.target),
        namespace_option,
        click.option("--gate", metavar="NAME", default="", help="The gate; else the one that is decided next."),
        click.option("--reason", metavar="TEXT", default="", help="The reason, which the requester reads."),
    )):  # fmt: skip
        command = option(command)
    return command


@approvals.command()
@_decision_options
@click.option("--until", metavar="TIME", default="", help="The end of the approval, such as 2027-01-31T00:00:00Z.")
@dry_run_option
@connected
def approve(
    connection: Connection, words: Sequence[str], gate: str, reason: str, until: str, dry_run: bool
) -> None:  # fmt: skip
    """Approve requests at a gate. The approval at the last gate charges them.

    \b
    bursar approvals approve resourceclaim/train -n ml-team --until 2027-01-31T00:00:00Z
    """
    _decide(connection, words, {"decision": "approve", "gate": gate, "reason": reason, "until": until}, dry_run=dry_run)


@approvals.command()
@_decision_options
@dry_run_option
@connected
def deny(connection: Connection, words: Sequence[str], gate: str, reason: str, dry_run: bool) -> None:
    """Deny requests at a gate.

    \b
    bursar approvals deny resourceclaim/train -n ml-team --reason "use the shared cluster"
    """
    _decide(connection, words, {"decision": "deny", "gate": gate, "reason": reason}, dry_run=dry_run)


def _decide(connection: Connection, words: Sequence[str], decision: Document, *, dry_run: bool) -> None:
    found = targets(words, connection.client)
    if not all(one.name for one in found):
        raise click.UsageError("name requests, as in resourceclaim/train")
    given = {name: value for name, value in decision.items() if value}
    items = [
        {"kind": one.noun.kind, "namespace": connection.effective_namespace, "name": one.name, **given} for one in found
    ]
    outcomes = Outcomes()
    for at in range(0, len(items), ITEMS_MAX):
        for one in connection.client.decide_approvals(items[at : at + ITEMS_MAX], dry_run=dry_run):
            with outcomes.each():
                _print_decided(one, str(decision["decision"]), dry_run=dry_run)
    outcomes.leave()


def _print_decided(one: Document, verb: str, *, dry_run: bool) -> None:
    if refusal := one.get("refusal"):
        from bursar.client.errors import api_error

        raise api_error(one["status"], refusal, {})
    done = {"approved": "approved", "denied": "denied"}.get(str(one.get("state")), _PASSED[verb])
    click.echo(f"{one['kind'].lower()}/{one['name']} {done}{' (dry run)' if dry_run else ''}")


_PASSED = {"approve": "approved at this gate; another gate is pending", "deny": "denied"}


# History.


@approvals.command()
@click.argument("words", nargs=-1, required=True, metavar="KIND/NAME", shell_complete=completers.target)
@namespace_option
@json_option
@connected
def history(connection: Connection, words: Sequence[str], as_json: bool) -> None:
    """Show the gates of a request, the decisions at each, and its events."""
    target = one_target(words, connection.client)
    document = connection.resource(target.noun).get(target.name)
    approval = (document.get("status") or {}).get("approval")
    if approval is None:
        raise Problem(f"{target.noun.singular}/{target.name} needs no approval")
    events = _events(connection, document, target.noun.kind, target.name)
    exit_with_json(as_json, {"approval": approval, "events": events})
    click.echo("\n".join(_summary(f"{target.noun.singular}/{target.name}", approval)))
    print_rows(("Gate", "State", "By", "At", "Reason"), _gates(approval))
    if events:
        click.echo()
        print_rows(("Age", "Event", "By", "Message"), map(_event, events))


def _events(connection: Connection, document: Document, kind: str, name: str) -> Sequence[Document]:
    selector = f"involvedObject.kind={kind},involvedObject.name={name}"
    path = f"/api/v1/namespaces/{document['metadata']['namespace']}/events"
    found = connection.client.request("GET", path, query={"fieldSelector": selector})
    return list(found.get("items") or [])


def _summary(name: str, approval: Document) -> Iterator[str]:
    words = (("since", "at"), ("by", "by"), ("until", "until"))
    parts = [f"{word} {approval[field]}" for word, field in words if approval.get(field)]
    yield f"{name} is {approval['state']}: {', '.join([*parts, *filter(None, [str(approval.get('reason') or '')])])}"
    if pending := approval.get("pendingUntil"):
        yield f"  it expires if it is not decided until {pending}"
    if change := approval.get("change"):
        yield f"  its growth is {change['state']}: {change.get('reason') or 'no reason given'}"


def _gates(approval: Document) -> Iterable[list[str]]:
    change = approval.get("change") or {}
    for label, gates in (("", approval.get("gates") or {}), (" (growth)", change.get("gates") or {})):
        for name, gate in gates.items():
            said = [str(gate.get(field) or NONE) for field in ("state", "by", "at", "reason")]
            yield [f"{name}{label}", *said]


def _event(one: Document) -> list[str]:
    by = (one.get("source") or {}).get("component") or one.get("reportingComponent")
    return [
        age(one.get("lastTimestamp")),
        str(one.get("reason") or NONE),
        str(by or NONE),
        str(one.get("message") or ""),
    ]
