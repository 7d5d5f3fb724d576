"""Calls about webhooks: receivers of events, and senders of payments. Each is a flow."""

from __future__ import annotations

from collections.abc import Sequence

from bursar.client.calls import ROOT, pages, post, segment
from bursar.client.flow import Document, Feed, Flow, HttpRequest, Retries, document_of


def webhooks(retries: Retries) -> Feed[Document]:
    """Iterate over all webhooks, without their secrets."""
    return pages(retries, "webhooks")


def create_webhook(
    retries: Retries,
    name: str,
    url: str = "",
    *,
    direction: str = "out",
    tenant: str = "",
    types: Sequence[str] = (),
    allow_local: bool = False,
    secret: str = "",
) -> Flow[Document]:
    """Create a webhook: send events to `url`, or accept payments (`direction="in"`). Only this answer has its secret,
    in `status.secret`."""
    body: Document = {"name": name, "direction": direction}
    given = {"url": url, "tenant": tenant, "types": list(types), "allowLocal": allow_local, "secret": secret}
    body |= {key: value for key, value in given.items() if value}
    return post(retries, "webhooks", body)


def delete_webhook(retries: Retries, name: str) -> Flow[Document]:
    """Delete a webhook and its pending deliveries."""
    return document_of(HttpRequest("DELETE", f"{ROOT}/webhooks/{segment(name)}"), retries)


def test_webhook(retries: Retries, name: str) -> Flow[Document]:
    """Send a test event with the id `notice`. It is delivered once it is no longer among the deliveries."""
    return post(retries, f"webhooks/{segment(name)}/test", {})


def webhook_deliveries(retries: Retries, name: str) -> Feed[Document]:
    """Iterate over pending and dropped deliveries, the oldest first, with the last response."""
    return pages(retries, f"webhooks/{segment(name)}/deliveries")
