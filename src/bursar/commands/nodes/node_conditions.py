"""Liveness in a node's status: a silent node's state, since when it is silent, and who fenced it.

Only the control plane writes these fields; changes by users and reports of the node keep them.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

import msgspec

from bursar.commands.objects.status import set_condition
from bursar.core.batch.unit_of_work import UnitOfWork
from bursar.core.nodes.liveness import Liveness, SeenHeartbeat, Sighting
from bursar.core.nodes.node import NodeCapacity
from bursar.core.objects.object import Stored
from bursar.core.values.instant import timestamp
from bursar.core.values.replace import replace
from bursar.wire.kinds.node import SILENT, SILENT_SINCE
from bursar.wire.shared.document import encode, is_ending

# The reasons of the condition Ready that the control plane sets; the node reports any other.
SILENT_REASON, LOST_REASON, FENCED_REASON = "NodeSilent", "NodeLost", "NodeFenced"
HEARD_REASON = "NodeHeard"
OURS = frozenset({SILENT_REASON, LOST_REASON, FENCED_REASON})
FINGERPRINTS = ("silentSince", "fence")

_CONDITIONS = {
    Liveness.NOT_READY: ("False", SILENT_REASON),
    Liveness.LOST: ("Unknown", LOST_REASON),
    Liveness.FENCED: ("False", FENCED_REASON),
}


def is_silent(node: Stored) -> bool:
    return SILENT in node.fields


def standing_of(node: Stored) -> Liveness:
    return Liveness(node.fields.get(SILENT, Liveness.READY))


def silent_since(node: Stored) -> datetime | None:
    """The time of the last heartbeat before the node was marked silent."""
    since = node.fields.get(SILENT_SINCE)
    return datetime.fromisoformat(since) if since else None


def sighting_of(node: Stored, heartbeat: SeenHeartbeat | None) -> Sighting:
    return Sighting(node.key.name, standing_of(node), heartbeat, silent_since(node))


def silenced(
    batch: UnitOfWork,
    node: Stored,
    standing: Liveness,
    since: datetime,
    message: str,
    fence: dict[str, Any] | None = None,
) -> Stored:
    """The node, marked silent; it accepts no new work."""
    status, (value, reason) = _status(node), _CONDITIONS[standing]
    status |= {"phase": standing.phase, "silentSince": since.isoformat()}
    if fence is not None:
        status["fence"] = fence
    set_condition(status, "Ready", value, reason, message, timestamp(batch.now))
    _open(batch, batch.nodes[node.key.name], schedulable=False)
    fields = {**node.fields, "status.phase": standing.phase, SILENT: str(standing), SILENT_SINCE: since.isoformat()}
    return replace(node, status=encode(status), fields=fields)


def heard(batch: UnitOfWork, node: Stored) -> Stored:
    """The node, Ready again; one that is cordoned, or being deleted, still accepts no new work."""
    status = _status(node)
    for name in FINGERPRINTS:
        status.pop(name, None)
    status["phase"] = Liveness.READY
    if any(one["type"] == "Ready" and one.get("reason") in OURS for one in status.get("conditions", ())):
        set_condition(status, "Ready", "True", HEARD_REASON, "", timestamp(batch.now))
    cordoned = node.fields.get("spec.unschedulable") == "true" or is_ending(node.doc)
    _open(batch, batch.nodes[node.key.name], schedulable=not cordoned)
    fields = {name: value for name, value in node.fields.items() if name not in (SILENT, SILENT_SINCE)}
    return replace(node, status=encode(status), fields={**fields, "status.phase": Liveness.READY})


def keep_silence(before: Stored, after: Stored) -> Stored:
    """The next version of a node, with its liveness fields unchanged."""
    marked = is_silent(before)
    if not marked and not is_silent(after) and not any(f'"{name}"'.encode() in after.status for name in FINGERPRINTS):
        return after
    status, was = _status(after), _status(before)
    for name in FINGERPRINTS:
        status.pop(name, None)
    status |= {name: was[name] for name in FINGERPRINTS if name in was}
    fields = {name: value for name, value in after.fields.items() if name not in (SILENT, SILENT_SINCE)}
    if marked:
        status["phase"] = was["phase"]
        fields |= {name: before.fields[name] for name in (SILENT, SILENT_SINCE, "status.phase")}
    return replace(after, status=encode(status), fields=fields)


def _open(batch: UnitOfWork, capacity: NodeCapacity, *, schedulable: bool) -> None:
    if capacity.schedulable is not schedulable:
        batch.set_node(replace(capacity, generation=capacity.generation + 1, schedulable=schedulable))


def _status(node: Stored) -> dict[str, Any]:
    status: dict[str, Any] = msgspec.json.decode(node.status)
    return status
