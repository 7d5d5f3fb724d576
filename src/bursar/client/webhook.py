"""Calls about webhooks: where notices are sent, and whose payments are believed. Each is a flow."""

from __future__ import annotations

from collections.abc import Sequence

from bursar.client.calls import ROOT, segment
from bursar.client.flow import JSON, Document, Feed, Flow, Give, HttpRequest, Retries, document_of, encoded


def webhooks(retries: Retries) -> Feed[Document]:
    """All webhooks, without their secrets."""
    found = yield from document_of(HttpRequest("GET", f"{ROOT}/webhooks"), retries)
    for item in found.get("items") or []:
        yield Give(item)


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
    """Has notices sent to `url`, or (`direction` `in`) payments believed. Its secret is in `status.secret` of this
    answer, and nothing else ever shows it."""
    body: Document = {"name": name, "direction": direction}
    given = {"url": url, "tenant": tenant, "types": list(types), "allowLocal": allow_local, "secret": secret}
    body |= {key: value for key, value in given.items() if value}
    headers = {"content-type": JSON, "accept": JSON}
    return document_of(HttpRequest("POST", f"{ROOT}/webhooks", {}, headers, encoded(body)), retries)


def delete_webhook(retries: Retries, name: str) -> Flow[Document]:
    """Removes it, with what it was still to get."""
    return document_of(HttpRequest("DELETE", f"{ROOT}/webhooks/{segment(name)}"), retries)


def test_webhook(retries: Retries, name: str) -> Flow[Document]:
    """Sends a notice that tells of nothing; `notice` is its id. It is taken once it is among the deliveries no more."""
    headers = {"content-type": JSON, "accept": JSON}
    return document_of(HttpRequest("POST", f"{ROOT}/webhooks/{segment(name)}/test", {}, headers, b"{}"), retries)


def webhook_deliveries(retries: Retries, name: str) -> Feed[Document]:
    """What a webhook has not taken yet, the oldest first, with what its receiver said last."""
    following = ""
    while True:
        query = {"continue": following} if following else {}
        request = HttpRequest("GET", f"{ROOT}/webhooks/{segment(name)}/deliveries", query)
        found = yield from document_of(request, retries)
        for item in found.get("items") or []:
            yield Give(item)
        following = str(found.get("continue") or "")
        if not following:
            return
