"""Calls about approvals and quotas: list, watch and decide undecided requests; read and watch limits and usage. Each is
a flow."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from bursar.client.calls import PAGE_ITEMS, ROOT, ResourcePath, accepting, action, given, patch, post, read, segment
from bursar.client.calls import continuation as continuation_of
from bursar.client.flow import Document, Feed, Flow, Give, Retries
from bursar.client.watch import (
    ADDED,
    BOOKMARK,
    DELETED,
    MODIFIED,
    Event,
    Listed,
    WatchSource,
    end_of,
    reopened,
    revision_of,
    stream,
    watch_source,
)

INITIAL_END = "k8s.io/initial-events-end"


# Undecided requests.


def approvals(retries: Retries, *, gate: str = "", tenant: str = "", limit: int = PAGE_ITEMS) -> Feed[Document]:
    """Iterate over the undecided requests that the caller sees, oldest first. Each has its gate, the amounts that its
    approval would charge as `requested`, and the `object` itself."""
    listed = yield from _open_requests(retries, gate, tenant, limit)
    for one in listed.items:
        yield Give(one)


def watch_approvals(
    retries: Retries,
    *,
    gate: str = "",
    tenant: str = "",
    resource_version: str = "",
    timeout_seconds: float | None = None,
) -> Feed[Event]:
    """Watch undecided requests: present ones as ADDED, then each change, and DELETED when a request is undecided at
    that gate no more."""

    def relist() -> Flow[Listed]:
        return (yield from _open_requests(retries, gate, tenant, PAGE_ITEMS))

    source = WatchSource(
        f"{ROOT}/approvals", retries, relist, given(gate=gate, tenant=tenant), metadata=_metadata_of_request, gone=_gone
    )
    return watch_source(source, resource_version=resource_version, timeout_seconds=timeout_seconds)


def decide_approvals(
    retries: Retries, items: Sequence[Mapping[str, Any]], *, dry_run: bool = False
) -> Flow[list[Document]]:
    """Decide up to 500 requests in one transaction: `{"kind", "namespace", "name", "decision": "approve"}`, where the
    decision is approve, deny or note. Returns the answer to each, with its `status` and the `refusal`."""
    answer = yield from post(retries, "approvals/decide", {"items": list(items)}, dry_run=dry_run)
    return list(answer["items"])


def approve(
    place: ResourcePath, name: str, *, gate: str = "", reason: str = "", until: str = "", request_id: str = ""
) -> Flow[Document]:
    """Approve a request at a gate, by default the one that is decided next. Returns the object."""
    return action(place, name, "approve", given(gate=gate, reason=reason, until=until, request_id=request_id))


def deny(place: ResourcePath, name: str, *, gate: str = "", reason: str = "", request_id: str = "") -> Flow[Document]:
    """Deny a request at a gate, by default the one that is decided next. Returns the object."""
    return action(place, name, "deny", given(gate=gate, reason=reason, request_id=request_id))


def note(place: ResourcePath, name: str, reason: str, *, gate: str = "") -> Flow[Document]:
    """Leave a request pending, and say why. Returns the object."""
    return patch(place, name, given(gate=gate, reason=reason), subresource="approval")


def _open_requests(retries: Retries, gate: str, tenant: str, limit: int) -> Flow[Listed]:
    items: list[Document] = []
    revision = following = ""
    while True:
        asked = given(gate=gate, tenant=tenant, limit=str(limit), **{"continue": following})
        found = yield from read(retries, "approvals", **asked)
        items += found.get("items") or []
        # The revision of the first page holds for all.
        revision = revision or revision_of(found)
        following = continuation_of(found)
        if not following:
            return Listed(items, revision)


def _metadata_of_request(item: Mapping[str, Any]) -> Document:
    if "object" not in item:
        return dict(item.get("metadata") or {})  # a bookmark
    return {**(item["object"].get("metadata") or {}), "kind": item["kind"]}


def _gone(metadata: Document) -> Document:
    identity = {name: metadata.get(name, "") for name in ("kind", "namespace", "name")}
    return {**identity, "object": {"kind": identity["kind"], "metadata": metadata}}


# Limits and usage.


def quotas(retries: Retries, *, tenant: str = "") -> Feed[Document]:
    """Iterate over the limits and the usage of all scopes that the caller sees: tenants, ResourceQuotas of namespaces,
    and the system."""
    following = ""
    while True:
        found = yield from read(retries, "quotas", tenant=tenant, **{"continue": following})
        for item in found.get("items") or []:
            yield Give(item)
        following = continuation_of(found)
        if not following:
            return


def watch_quotas(retries: Retries, *, tenant: str = "", timeout_seconds: float | None = None) -> Feed[Event]:
    """Watch limits and usage: those of each scope as ADDED, a BOOKMARK when all are given, then each scope whose
    figures have changed. After a lost connection, the scopes that changed meanwhile are given."""
    return _watch_figures(retries, f"{ROOT}/quotas", given(tenant=tenant), timeout_seconds)


def watch_tenant_quotas(retries: Retries, name: str, *, timeout_seconds: float | None = None) -> Feed[Event]:
    """Watch the limits and the usage of one tenant, as `tenant_quotas` reads them."""
    return _watch_figures(retries, f"{ROOT}/tenants/{segment(name)}/quotas", {}, timeout_seconds)


class _Figures:
    """The figures given by a watch, which begins with all of them at every connection."""

    def __init__(self) -> None:
        self.received_at = time.monotonic()
        self._known: dict[str, Document] = {}
        self._sent: set[str] | None = None  # by the present connection, until it has given all

    def begin(self) -> None:
        self._sent = set()

    def events(self, event: Event) -> list[Event]:
        """The events to give for an event of the server."""
        scope = str(event.object.get("scope") or event.object.get("tenant") or "")
        figures = {name: value for name, value in event.object.items() if name != "metadata"}
        if event.type == BOOKMARK:
            return self._ended(event)
        if event.type == DELETED:
            return [event] if self._known.pop(scope, None) is not None else []
        if self._sent is not None:
            self._sent.add(scope)
        before = self._known.get(scope)
        self._known[scope] = figures
        if before == figures:
            return []
        return [Event(ADDED if before is None else MODIFIED, event.object)]

    def _ended(self, event: Event) -> list[Event]:
        """The end of the present figures: scopes that were not among them are gone. Other bookmarks say nothing."""
        if INITIAL_END not in ((event.object.get("metadata") or {}).get("annotations") or {}):
            return []
        lost = [Event(DELETED, self._known.pop(one)) for one in sorted(self._known.keys() - (self._sent or set()))]
        self._sent = None
        return [*lost, event]


def _watch_figures(retries: Retries, path: str, query: Mapping[str, str], timeout_seconds: float | None) -> Feed[Event]:
    end = end_of(timeout_seconds)
    figures = _Figures()

    def once() -> Feed[Event]:
        figures.begin()
        asked = {**query, "sendInitialEvents": "true"}
        yield from stream(path, asked, accepting(as_table=False), end, figures, figures.events)

    return reopened(retries, end, figures, once)
