"""Kubernetes Events, served from the change feed: what happened to an object, who did it, and why."""

from __future__ import annotations

from typing import Any

from bursar.api.route import Answer, Call, Outcome
from bursar.api.table import wants_table
from bursar.core.access import reach
from bursar.core.object import Key
from bursar.core.refusal import Refusal, invalid
from bursar.core.selector import Op, SelectorError, parse_fields
from bursar.core.tree import lineage
from bursar.ops.office import timestamp
from bursar.store import change as store
from bursar.store.change import Happening
from bursar.wire.document import encode

EVENTS_MAX = 500
# Without an object's name, only the newest revisions are looked through.
RECENT_REVISIONS = 100_000

FIELDS = (
    *(f"involvedObject.{name}" for name in ("name", "namespace", "kind", "uid", "apiVersion", "fieldPath")),
    "metadata.name", "metadata.namespace", "reason", "type", "source",
)  # fmt: skip

_REASONS = {"ADDED": "Created", "MODIFIED": "Changed", "DELETED": "Deleted"}


async def list_events(call: Call) -> Outcome:
    try:
        selector = parse_fields(call.query.get("fieldSelector", ""), FIELDS)
    except SelectorError as error:
        return invalid(str(error))
    wanted = {term.key.removeprefix("involvedObject."): term.values[0] for term in selector.terms if term.op is Op.IN}
    found = await _load(call, wanted)
    if isinstance(found, Refusal):
        return found
    if uid := wanted.get("uid"):
        found = [one for one in found if one.uid == uid]
    async with call.house.database.reader() as db:
        revision = (await store.load_position(db)).revision
    events = [event_of(one) for one in reversed(found) if await _visible(call, one)]
    meta = {"resourceVersion": str(revision)}
    if wants_table(call.headers.get("accept", "")):
        return Answer(200, encode(_table(events, meta)))
    return Answer(200, encode({"kind": "EventList", "apiVersion": "v1", "metadata": meta, "items": events}))


async def _load(call: Call, wanted: dict[str, str]) -> list[Happening] | Refusal:
    namespace = call.parameters.get("namespace", "") or wanted.get("namespace", "")
    async with call.house.database.reader() as db:
        if name := wanted.get("name"):
            # Kubernetes files the events of cluster-wide objects under `default`.
            found = await store.load_happenings_of(db, namespace, name, wanted.get("kind", ""), EVENTS_MAX)
            return found or await store.load_happenings_of(db, "", name, wanted.get("kind", ""), EVENTS_MAX)
        tenants = await call.house.visible_tenants(call.identity)
        since = max(0, (await store.load_position(db)).revision - RECENT_REVISIONS)
        return await store.load_happenings(db, since, namespace, tenants, EVENTS_MAX)


async def _visible(call: Call, one: Happening) -> bool:
    whose = reach(call.identity)
    return whose.everything or not one.tenant or whose.sees(lineage(await call.house.tree(), one.tenant))


def event_of(one: Happening) -> dict[str, Any]:
    key: Key = one.key
    at = timestamp(one.at)
    what = {
        "name": key.name,
        "kind": key.kind,
        "apiVersion": "v1",
        "uid": one.uid,
        "resourceVersion": str(one.revision),
    }
    if key.namespace:
        what["namespace"] = key.namespace
    message = f"{one.verb} by {one.actor}" + (f": {one.reason}" if one.reason else "")
    return {
        "kind": "Event",
        "apiVersion": "v1",
        "metadata": {
            "name": f"{key.name}.{one.revision:x}",
            "namespace": key.namespace or "default",
            "uid": f"event-{one.revision}",
            "resourceVersion": str(one.revision),
            "creationTimestamp": at,
        },
        "involvedObject": what,
        "reason": _REASONS[one.type],
        "message": message,
        "type": "Normal",
        "source": {"component": one.actor},
        "firstTimestamp": at,
        "lastTimestamp": at,
        "count": 1,
    }


def _table(events: list[dict[str, Any]], meta: dict[str, str]) -> dict[str, Any]:
    columns = ("Last Seen", "Type", "Reason", "Object", "Message")
    return {
        "kind": "Table",
        "apiVersion": "meta.k8s.io/v1",
        "metadata": meta,
        "columnDefinitions": [
            {"name": name, "type": "string", "format": "", "description": "", "priority": 0} for name in columns
        ],
        "rows": [
            {
                "cells": [
                    one["lastTimestamp"],
                    one["type"],
                    one["reason"],
                    f"{one['involvedObject']['kind'].lower()}/{one['involvedObject']['name']}",
                    one["message"],
                ],
                "object": {
                    "kind": "PartialObjectMetadata",
                    "apiVersion": "meta.k8s.io/v1",
                    "metadata": one["metadata"],
                },
            }
            for one in events
        ],
    }
