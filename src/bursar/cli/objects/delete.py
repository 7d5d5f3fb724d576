"""`bursar delete`: deletes objects and, like kubectl, waits until they are gone."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import click

from bursar.cli.shell import completers, manifest
from bursar.cli.shell.connection import Connection, connected, dry_run_option, label_selector_option, namespace_option
from bursar.cli.shell.finite_range import FiniteRange
from bursar.cli.shell.options import grace_period_option
from bursar.cli.shell.output import full_name, say
from bursar.cli.shell.problem import UNAVAILABLE, Outcomes, Problem
from bursar.cli.shell.resource_arg import ResourceType, targets

if TYPE_CHECKING:
    from bursar.client import Resource

# The wait reads the object again this often.
_LOOK_AGAIN_SECONDS = 60.0


@click.command()
@click.argument("words", nargs=-1, metavar="[KIND NAME... | KIND/NAME...]", shell_complete=completers.target)
@manifest.files_option
@manifest.recursive_option
@namespace_option
@label_selector_option
@click.option("--all", "everything", is_flag=True, help="All objects of the kind in the namespace.")
@grace_period_option
@click.option("--ignore-not-found", is_flag=True, help="Treat missing objects as deleted.")
@click.option("--wait/--no-wait", default=True, show_default=True, help="Wait until they are gone.")
@click.option("--timeout", type=FiniteRange(0), metavar="SECONDS", help="How long to wait; else without limit.")
@dry_run_option
@connected
def delete(
    connection: Connection,
    words: Sequence[str],
    files: Sequence[str],
    recursive: bool,
    label_selector: str,
    everything: bool,
    grace_period: int | None,
    ignore_not_found: bool,
    wait: bool,
    timeout: float | None,
    dry_run: bool,
) -> None:
    """Delete objects.

    \b
    bursar delete allocation train -n ml-team --grace-period 30
    bursar delete allocations -l batch-id=job-7 --no-wait
    bursar delete -f cluster/
    """
    from bursar.client import BursarError, NotFound

    outcomes = Outcomes()
    deleted: list[tuple[ResourceType, Resource, str, str]] = []
    for noun, resource, name in list(_chosen(connection, words, files, recursive, label_selector, everything)):
        try:
            document = resource.delete(name, grace_period_seconds=grace_period, dry_run=dry_run)
            say(noun, {"metadata": {"name": name}}, "deleted", dry_run=dry_run)
            deleted.append((noun, resource, name, str((document.get("metadata") or {}).get("uid") or "")))
        except NotFound as error:
            if not ignore_not_found:
                # A file may name a namespace of its own.
                outcomes.failed(error if files else connection.located(error))
        except BursarError as error:
            outcomes.failed(error)
    if wait and not dry_run:
        end = None if timeout is None else time.monotonic() + timeout
        for noun, resource, name, uid in deleted:
            _wait_until_gone(noun, resource, name, uid, end)
    outcomes.leave()


def _chosen(
    connection: Connection,
    words: Sequence[str],
    files: Sequence[str],
    recursive: bool,
    label_selector: str,
    everything: bool,
) -> Iterator[tuple[ResourceType, Resource, str]]:
    if files:
        if words:
            raise click.UsageError("name objects or files, not both")
        # Later objects in a file may depend on earlier ones, so delete in reverse order.
        for one in reversed(manifest.read(files, recursive=recursive)):
            noun, resource = manifest.place(one, connection)
            yield noun, resource, one.require_name()
        return
    for target in targets(words, connection.client):
        resource = connection.resource(target.noun)
        if target.name:
            if label_selector or everything:
                raise click.UsageError("give names, or --selector or --all, not both")
            yield target.noun, resource, target.name
        elif label_selector or everything:
            for item in resource.list(label_selector=label_selector):
                yield target.noun, resource, item["metadata"]["name"]
        else:
            raise click.UsageError("name objects, or choose them with --selector or --all")


def _wait_until_gone(noun: ResourceType, resource: Resource, name: str, uid: str, end: float | None) -> None:
    selector = f"metadata.name={name}"
    while True:
        found = resource.page(field_selector=selector)
        there = [item for item in found.get("items") or [] if not uid or item["metadata"].get("uid") == uid]
        if not there:
            return
        left = _LOOK_AGAIN_SECONDS if end is None else min(_LOOK_AGAIN_SECONDS, end - time.monotonic())
        if left <= 0:
            raise Problem(
                f"{full_name(noun, name)} is not deleted yet", "deletion continues in the background", UNAVAILABLE
            )
        revision = found["metadata"]["resourceVersion"]
        for event in resource.watch(field_selector=selector, resource_version=revision, timeout_seconds=left):
            if event.type == "DELETED":
                return
