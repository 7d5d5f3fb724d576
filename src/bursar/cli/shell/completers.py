"""Shell completion of kinds and names. It asks the server for at most one second, and ignores every error, because
the user is in the middle of typing."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from bursar.client import Client

# A shell that blocks is worse than one that completes nothing.
SECONDS_MAX = float(os.environ.get("BURSAR_COMPLETION_SECONDS", "1"))
NAMES_MAX = 500


def target(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Complete kinds first, then the names of that kind. After `kind/` complete names at once."""
    before = tuple(ctx.params.get(param.name or "") or ())
    kind, slash, _ = incomplete.partition("/")
    if slash:
        return _starting(incomplete, (f"{kind}/{name}" for name in within_time(lambda: names(ctx, kind))))
    if before and "/" not in before[0]:
        return _starting(incomplete, within_time(lambda: names(ctx, before[0])))
    return _starting(incomplete, kinds())


def kind(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    del ctx, param
    return _starting(incomplete, kinds())


def named(plural: str) -> Callable[[click.Context, click.Parameter, str], list[str]]:
    """A completer for the names of one kind."""

    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
        del param
        return _starting(incomplete, within_time(lambda: names(ctx, plural)))

    return complete


def explainable(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Complete allocations, unless another kind is named first."""
    if "/" in incomplete or ctx.params.get(param.name or ""):
        return target(ctx, param, incomplete)
    return named("allocations")(ctx, param, incomplete)


def work(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Complete allocations, and jobs as `job/NAME`, in all namespaces unless one is named."""
    del param
    if not ctx.params.get("namespace"):
        ctx.params["all_namespaces"] = True
    kind, slash, _ = incomplete.partition("/")
    if slash:
        return _starting(incomplete, (f"{kind}/{name}" for name in within_time(lambda: names(ctx, kind))))
    own = within_time(lambda: names(ctx, "allocations"))
    return _starting(incomplete, dict.fromkeys((*own, "job/")))


def account(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    del param
    return _starting(incomplete, within_time(lambda: listed(ctx, "accounts", "account")))


def lease(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    del param
    return _starting(incomplete, within_time(lambda: listed(ctx, "leases", "lease_id")))


def webhook(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    del param
    return _starting(incomplete, within_time(lambda: [one["name"] for one in listed(ctx, "webhooks", "metadata")]))


def context_name(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    del ctx, param
    from bursar.client.contexts import config_path, load

    with suppress(Exception):
        return _starting(incomplete, load(config_path()).known)
    return []


def kinds() -> list[str]:
    from bursar.cli.shell.resource_arg import known

    return [noun.plural for noun in known()]


def listed(ctx: click.Context, path: str, field: str) -> list[Any]:
    """One field of each item on the first page of a list that is not a kind."""
    with _client(ctx) as client:
        found = client.request("GET", f"/api/v1/{path}", query={"limit": str(NAMES_MAX)})
        return [item[field] for item in found["items"]]


def _client(ctx: click.Context) -> Client:
    from bursar.cli.shell.connection import make_client

    options = {name: ctx.params.get(name) for name in ("context", "url", "token", "ca_file")}
    return make_client(**options, timeout_seconds=SECONDS_MAX, seconds_max=0.0)


def names(ctx: click.Context, word: str) -> list[str]:
    from bursar.cli.shell.connection import Connection
    from bursar.cli.shell.resource_arg import find

    given: dict[str, Any] = ctx.params
    with _client(ctx) as client:
        connection = Connection(client, given.get("namespace") or "", bool(given.get("all_namespaces")))
        found = connection.resource(find(word, client)).page(limit=NAMES_MAX)
        return [item["metadata"]["name"] for item in found.get("items") or []]


def within_time(ask: Callable[[], list[str]]) -> list[str]:
    """The answer if it arrives in time, else nothing. A thread that is still waiting ends with the process."""
    from threading import Thread

    answer: list[str] = []

    def run() -> None:
        with suppress(Exception):
            answer.extend(ask())

    thread = Thread(target=run, daemon=True)
    thread.start()
    thread.join(SECONDS_MAX)
    return list(answer)


def _starting(incomplete: str, words: Iterable[str]) -> list[str]:
    return [word for word in words if word.startswith(incomplete)]
