"""Calls about approvals: the undecided requests of all kinds, and decisions on many at once. Each is a flow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bursar.client.calls import continuation, post, read
from bursar.client.flow import Document, Feed, Flow, Give, Retries


def approvals(retries: Retries, *, gate: str = "", tenant: str = "") -> Feed[Document]:
    """Iterate over the undecided requests that the caller sees, the oldest first."""
    following = ""
    while True:
        found = yield from read(retries, "approvals", gate=gate, tenant=tenant, **{"continue": following})
        for item in found.get("items") or []:
            yield Give(item)
        following = continuation(found)
        if not following:
            return


def decide(retries: Retries, items: Sequence[Mapping[str, Any]], *, dry_run: bool = False) -> Flow[Document]:
    """Decide up to 500 requests, such as `{"kind": "Job", "namespace": "lab", "name": "train", "decision": "approve"}`
    with `gate`, `reason` and `until`. The answer has one item for each, in order."""
    return post(retries, "approvals/decide", {"items": [dict(one) for one in items]}, dry_run=dry_run)
