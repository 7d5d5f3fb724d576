"""Approvals and quotas of the SDK: the watches driven by hand, and the calls against a real server."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from bursar.client import AsyncClient, Client, Event, NotFound, QuotaExceeded
from bursar.client import approval as calls
from bursar.client.flow import Feed, Give, Open, Pause, Response, Retries, SendRequest, resume
from support.client.driving import JSON, LOST
from support.process.server import Server

OPENED = Response(200, JSON)
END = None


def request(name: str, revision: int, kind: str = "ResourceClaim") -> dict[str, Any]:
    metadata = {"name": name, "namespace": "acme", "uid": f"uid-{kind}-{name}", "resourceVersion": str(revision)}
    return {"kind": kind, "namespace": "acme", "name": name, "gate": "quota", "object": {"metadata": metadata}}


def listed(revision: int, *items: dict[str, Any], following: str = "") -> Response:
    metadata = {"resourceVersion": str(revision), **({"continue": following} if following else {})}
    return Response(200, JSON, json.dumps({"metadata": metadata, "items": list(items)}).encode())


def line(kind: str, one: dict[str, Any]) -> bytes:
    return json.dumps({"type": kind, "object": one}).encode() + b"\n"


def scope(name: str, used: int) -> dict[str, Any]:
    return {"scope": name, "quotas": {"clusters": {"limit": "9", "accepted": str(used)}}, "metadata": {}}


COMPLETE = line("BOOKMARK", {"metadata": {"annotations": {calls.INITIAL_END: "true"}}})


def driven(feed: Feed[Event], *outcomes: Any, asked: list[dict[str, str]] | None = None) -> Iterator[Event]:
    """The events of a watch whose steps have these outcomes, in order; it ends when they do."""
    left, step = list(outcomes), next(feed)
    while True:
        if isinstance(step, Give):
            yield step.value
            step = feed.send(None)
        elif isinstance(step, Pause):
            step = feed.send(None)
        elif not left:
            return
        else:
            if asked is not None and isinstance(step, Open | SendRequest):
                asked.append(dict(step.request.query))
            step = resume(feed, left.pop(0))


def test_requests_are_listed_in_pages_then_watched_from_the_first_pages_revision() -> None:
    asked: list[dict[str, str]] = []
    feed = calls.watch_approvals(Retries(), gate="quota")
    both = (listed(7, request("a", 3), following="x"), listed(9, request("a", 8, "Job")))
    stream = (OPENED, line("MODIFIED", request("a", 8, "Job")), line("DELETED", request("a", 9)), END)
    found = [(one.type, one.object["kind"]) for one in driven(feed, *both, *stream, asked=asked)]
    assert found == [("ADDED", "ResourceClaim"), ("ADDED", "Job"), ("DELETED", "ResourceClaim")]
    assert (asked[1]["continue"], asked[2]["resourceVersion"], asked[2]["gate"]) == ("x", "7", "quota")


def test_after_compacted_history_what_was_missed_is_told() -> None:
    gone = Response(410, JSON, json.dumps({"code": 410, "message": "too old"}).encode())
    feed = calls.watch_approvals(Retries())
    outcomes = (listed(7, request("a", 3), request("b", 4)), gone, listed(20, request("b", 15), request("c", 16)))
    found = [(one.type, one.object["name"]) for one in driven(feed, *outcomes)]
    assert found == [("ADDED", "a"), ("ADDED", "b"), ("DELETED", "a"), ("MODIFIED", "b"), ("ADDED", "c")]


def test_after_a_lost_connection_only_changed_figures_are_told() -> None:
    feed = calls.watch_quotas(Retries())
    first = (line("ADDED", scope("tenant:a", 1)), line("ADDED", scope("tenant:b", 1)), COMPLETE)
    changed = line("MODIFIED", scope("tenant:a", 2))
    again = (line("ADDED", scope("tenant:a", 2)), line("ADDED", scope("tenant:c", 5)), COMPLETE)
    found = list(driven(feed, OPENED, *first, changed, LOST, OPENED, *again, END))
    assert [(one.type, one.object.get("scope")) for one in found] == [
        ("ADDED", "tenant:a"), ("ADDED", "tenant:b"), ("BOOKMARK", None), ("MODIFIED", "tenant:a"),
        ("ADDED", "tenant:c"), ("DELETED", "tenant:b"), ("BOOKMARK", None),
    ]  # fmt: skip


@pytest.fixture
def tenant(admin: Client, request: pytest.FixtureRequest) -> str:
    """A tenant whose claims wait at a gate that no service decides, with a namespace of its name."""
    name = str(request.node.name).replace("_", "-").removeprefix("test-")[:40].strip("-")
    approval = {"gates": ["manual"], "selfApproval": True}
    admin.tenants.create({"metadata": {"name": name}, "spec": {"approval": approval, "limits": {"clusters": 1}}})
    admin.namespaces.create({"metadata": {"name": name, "labels": {"bursar.io/tenant": name}}})
    return name


def claim(client: Client, tenant: str, name: str) -> None:
    client.resourceclaims(tenant).create({"metadata": {"name": name}, "spec": {"resources": {"clusters": 1}}})


def test_one_request_is_noted_approved_and_denied(admin: Client, tenant: str) -> None:
    claims = admin.resourceclaims(tenant)
    for name in ("a", "b"):
        claim(admin, tenant, name)
    assert [one["name"] for one in admin.approvals(tenant=tenant, limit=1)] == ["a", "b"]
    assert claims.note("a", "patience")["status"]["approval"]["reason"] == "patience"
    assert claims.approve("a", gate="manual", reason="fine")["status"]["approval"]["state"] == "approved"
    with pytest.raises(QuotaExceeded):
        claims.approve("b")
    assert claims.deny("b", reason="no")["status"]["approval"]["state"] == "denied"
    with pytest.raises(NotFound):
        claims.approve("c")


def test_many_are_decided_and_watched_with_both_clients(server: Server, admin: Client, tenant: str) -> None:
    for name in ("a", "b"):
        claim(admin, tenant, name)
    items = [{"kind": "ResourceClaim", "namespace": tenant, "name": name, "decision": "approve"} for name in "abc"]
    assert [one["status"] for one in admin.decide_approvals(items, dry_run=True)] == [200, 409, 404]

    async def decided() -> list[str]:
        async with AsyncClient(server.url, server.token) as client:
            found = []
            async for event in client.watch_approvals(tenant=tenant, timeout_seconds=30):
                found.append(f"{event.type} {event.object['name']}")
                if found == ["ADDED a", "ADDED b"]:
                    answers = await client.decide_approvals(items[:1])
                    assert answers[0]["state"] == "approved"
                if len(found) == 3:
                    return found
        raise AssertionError(found)

    assert asyncio.run(decided())[-1] == "DELETED a"
    shown = {one["scope"]: one["quotas"]["clusters"]["accepted"] for one in admin.quotas(tenant=tenant)}
    assert shown == {f"tenant:{tenant}": "1"}
    for event in admin.watch_tenant_quotas(tenant, timeout_seconds=30):
        assert event.object["quotas"]["clusters"]["accepted"] == "1"
        break
