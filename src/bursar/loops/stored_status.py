"""Decoders of stored statuses: the fields of allocations, jobs and node claims that decisions need."""

from __future__ import annotations

from datetime import datetime
from functools import lru_cache

import msgspec

from bursar.core.nodes.node import NodeCapacity
from bursar.core.nodes.node_claim import ClaimState
from bursar.core.scheduling.state.cluster_state import Nomination
from bursar.core.scheduling.state.fleet import NOBODY, UNCLAIMED

decode_map = msgspec.json.Decoder(dict[str, str]).decode


class _NodePart(msgspec.Struct):
    name: str
    devices: dict[str, tuple[int, ...]] = {}
    phase: str = ""


class _Nominated(msgspec.Struct):
    node: str
    until: str


class _Eviction(msgspec.Struct):
    deadline: str = ""


class StoredStatus(msgspec.Struct, rename="camel"):
    """The fields of an allocation's status that decisions need."""

    phase: str = "Pending"
    reason: str = ""
    nodes: list[_NodePart] = []
    nominated: list[_Nominated] = []
    scheduled_time: str = ""
    start_time: str = ""
    epoch: int = 0  # the number of its placements
    user: str = ""
    permitted_by: str = ""
    eviction: _Eviction | None = None


class _Boost(msgspec.Struct):
    priority: int
    expires: str


class _JobStatus(msgspec.Struct):
    boost: _Boost | None = None


class _Named(msgspec.Struct):
    uid: str = ""


class _JobDocument(msgspec.Struct):
    metadata: _Named


decode_status = msgspec.json.Decoder(StoredStatus).decode
decode_job = msgspec.json.Decoder(_JobStatus).decode
decode_job_document = msgspec.json.Decoder(_JobDocument).decode


def holder_of(capacity: NodeCapacity) -> str:
    """The holder of a node, in the form that the fleet uses."""
    if capacity.claim is None:
        return UNCLAIMED
    return capacity.claim.holder if capacity.claim.state is ClaimState.HELD and not capacity.claim.unpaid else NOBODY


def nomination_of(status: StoredStatus) -> Nomination | None:
    if not status.nominated:
        return None
    return Nomination(tuple(one.node for one in status.nominated), max(epoch(one.until) for one in status.nominated))


@lru_cache(4096)
def epoch(text: str) -> float:
    return datetime.fromisoformat(text).timestamp() if text else 0.0
