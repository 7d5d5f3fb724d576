"""Kubernetes Events, served from the change feed: changes of an object, their actors and reasons."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from itertools import islice
from typing import Any

import msgspec

from bursar.api.http.route import Answer, Call, Outcome
from bursar.api.objects.table import wants_table
from bursar.commands.quota.warn import QUOTAS, RESTORE, WARN
from bursar.commands.usage.budget_alert import BUDGETS
from bursar.core.objects.event_text import ObjectState, tell
from bursar.core.objects.object import Key
from bursar.core.quota.tenant_tree import Tree, saw
from bursar.core.values.access import Reach, reach
from bursar.core.values.duration import format_age
from bursar.core.values.instant import timestamp
from bursar.core.values.refusal import invalid
from bursar.core.values.selector import Op, Selector, SelectorError, matches_fields, parse_fields
from bursar.ops.access.audit import RESOURCES
from bursar.ops.runtime.clock import now
from bursar.store.db.database import Connection
from bursar.store.objects import change as store
from bursar.store.objects.change import AuditLine
from bursar.wire.kinds.registry import BY_NAME
from bursar.wire.shared.document import encode

EVENTS_MAX = 500
# The number of lines that a selector without an object's name may examine.
LOOKED_THROUGH_MAX = 10_000
# Without an object's name, only the newest revisions are searched.
RECENT_REVISIONS = 100_000

FIELDS = (
    *(f"involvedObject.{name}" for name in ("name", "namespace", "kind", "uid", "apiVersion", "fieldPath")),
    "metadata.name", "metadata.namespace", "reason", "type", "source",
)  # fmt: skip

# Reasons and types of the events of tenants' budgets and limits.
_TOLD = {
    (BUDGETS, "warn"): ("BudgetWarning", "Warning"),
    (BUDGETS, "exhaust"): ("BudgetExhausted", "Warning"),
    (BUDGETS, "restore"): ("BudgetRestored", "Normal"),
    (QUOTAS, WARN): ("QuotaWarning", "Warning"),
    (QUOTAS, RESTORE): ("QuotaRestored", "Normal"),
}


async def list_events(call: Call) -> Outcome:
    try:
        selector = parse_fields(call.query.get("fieldSelector", ""), FIELDS)
    except SelectorError as error:
        return invalid(str(error))
    # Resolve visibility first: it takes a pool connection, and holding two could deadlock the pool.
    whose = reach(call.identity)
    tree, tenants = await call.context.tree_for(whose), await call.context.visible_tenants(call.identity)
    async with call.context.database.reader() as db:
        revision = (await store.load_position(db)).revision
        found = await _load(db, call.parameters.get("namespace", ""), selector, tenants, revision)
    allows = call.context.policy.allows
    hidden = frozenset(kind for kind, resource in RESOURCES.items() if not allows(call.identity, "list", resource))
    seen = (event_of(one) for one in found if one.key.kind not in hidden and _visible(whose, tree, one))
    newest = list(islice((event for event in seen if matches_fields(selector, _fields(event))), EVENTS_MAX))
    events = newest[::-1]
    meta = {"resourceVersion": str(revision)}
    if wants_table(call.headers.get("accept", "")):
        return Answer(200, encode(_table(events, meta, now())))
    return Answer(200, encode({"kind": "EventList", "apiVersion": "v1", "metadata": meta, "items": events}))


async def _load(
    db: Connection, namespace: str, selector: Selector, tenants: Sequence[str] | None, revision: int
) -> list[AuditLine]:
    """Load the lines that the selector may match, newest first."""
    wanted = {term.key.removeprefix("involvedObject."): term.values[0] for term in selector.terms if term.op is Op.IN}
    namespace = namespace or wanted.get("namespace", "")
    if name := wanted.get("name"):
        # Kubernetes files the events of cluster-wide objects under `default`.
        found = await store.load_happenings_of(db, namespace, name, wanted.get("kind", ""), LOOKED_THROUGH_MAX)
        return found or await store.load_happenings_of(db, "", name, wanted.get("kind", ""), LOOKED_THROUGH_MAX)
    limit = LOOKED_THROUGH_MAX if selector.terms else EVENTS_MAX
    return await store.load_happenings(db, max(0, revision - RECENT_REVISIONS), namespace, tenants, limit)


def _visible(whose: Reach, tree: Tree, one: AuditLine) -> bool:
    """Whether the reader may see the event. Events of a deleted tenant of the same name are for administrators."""
    if whose.everything:
        return True
    if tenant := _tenant(one):
        return tenant in tree.tenants and saw(tree, whose, tenant, one.revision)
    kind = BY_NAME.get(one.key.kind)
    # Other objects without a tenant are visible to administrators only.
    return kind is not None and kind.visible_to_all and not _names_actor(one)


def _tenant(one: AuditLine) -> str:
    """The tenant that the event concerns; empty for events of the cluster and of administrators."""
    if not _names_actor(one):
        return one.tenant
    tenant, of_a_tenant, _ = one.actor.removeprefix("user:").partition("/")
    return tenant if of_a_tenant else ""


def _names_actor(one: AuditLine) -> bool:
    """Whether the event names an actor that only the actor's tenant may see."""
    kind = BY_NAME.get(one.key.kind)
    return kind is not None and one.verb in kind.private_verbs


def _fields(event: dict[str, Any]) -> dict[str, str]:
    """The fields of an event that selectors match."""
    return {
        **{f"involvedObject.{name}": value for name, value in event["involvedObject"].items()},
        "metadata.name": event["metadata"]["name"],
        "metadata.namespace": event["metadata"]["namespace"],
        "reason": event["reason"],
        "type": event["type"],
        "source": event["source"]["component"],
    }


def event_of(one: AuditLine) -> dict[str, Any]:
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
    if told := _TOLD.get((one.actor, one.verb)):
        (reason, type_), message = told, one.reason
    else:
        text = tell(one.type, one.verb, one.actor, one.reason, _standing(one))
        reason, type_, message = text.reason, "Warning" if text.warning else "Normal", text.message
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
        "reason": reason,
        "message": message,
        "type": type_,
        "source": {"component": one.actor},
        "firstTimestamp": at,
        "lastTimestamp": at,
        "count": 1,
    }


class _Node(msgspec.Struct):
    name: str


class _Condition(msgspec.Struct):
    type: str
    status: str
    message: str = ""


class _Status(msgspec.Struct, rename="camel"):
    phase: str = "Pending"
    nodes: list[_Node] = []
    message: str = ""
    exit_code: int | None = None
    conditions: list[_Condition] = []


_status = msgspec.json.Decoder(_Status)


def _standing(one: AuditLine) -> ObjectState | None:
    if one.status is None:
        return None
    after = _status.decode(one.status)
    nodes = tuple([one.name for one in after.nodes])
    waits = (one.message for one in after.conditions if one.type == "Scheduled" and one.status == "False")
    return ObjectState(after.phase, nodes, after.message, after.exit_code, next(waits, ""))


def _table(events: list[dict[str, Any]], meta: dict[str, str], at: datetime) -> dict[str, Any]:
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
                    format_age(int((at - datetime.fromisoformat(one["lastTimestamp"])).total_seconds())),
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
