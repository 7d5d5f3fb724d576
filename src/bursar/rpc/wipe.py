"""Wipe directives to agents, and their reports.

A pending wipe is state of the node: it is directed when it is decided and whenever the agent connects. The agent
reports the result until it is acknowledged. Reports for an earlier attempt are acknowledged but not applied.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from bursar.core.nodes.node_claim import UID_PREFIX, ClaimState, NodeClaim
from bursar.core.objects.object import Origin
from bursar.ops.nodes.claim import end_wipe
from bursar.ops.runtime.lane import Overloaded
from bursar.ops.runtime.runtime import Runtime
from bursar.rpc.codec import ENDS, PlacementReport
from bursar.rpc.codec import ReportedState as Stands
from bursar.store.db.database import Unavailable
from bursar.store.objects.change import Change
from bursar.wire.scheduler.v1 import node_agent_pb2 as pb

WORDS_CHARS_MAX = 512


class _Claim(msgspec.Struct):
    id: str = ""
    state: str = ""
    attempt: int = 0


class _Status(msgspec.Struct):
    claim: _Claim | None = None


_decode = msgspec.json.Decoder(_Status).decode


def is_wipe(one: PlacementReport) -> bool:
    """Whether a status is that of a wipe: the uids of claims have a prefix of their own."""
    return one.uid.startswith(f"{UID_PREFIX}-")


def wipe_wanted(claim: NodeClaim | None) -> pb.SchedulingDirective | None:
    """The wipe directive of a claim; None if no wipe is pending."""
    if claim is None or claim.state is not ClaimState.WIPING:
        return None
    return _directive(claim.id, claim.attempt)


def wipe_of_change(change: Change) -> pb.SchedulingDirective | None:
    """The wipe directive that follows from a change of a node."""
    if change.type == "DELETED" or b'"claim"' not in change.status:
        return None
    claim = _decode(change.status).claim
    return _directive(claim.id, claim.attempt) if claim is not None and claim.state == ClaimState.WIPING else None


def _directive(claim: str, attempt: int) -> pb.SchedulingDirective:
    return pb.SchedulingDirective(type=pb.DIRECTIVE_TYPE_WIPE, allocation_id=claim, epoch=attempt)


async def hear_wipes(runtime: Runtime, node: str, wipes: Iterable[PlacementReport]) -> list[PlacementReport]:
    """Record the results of wipes; returns those to acknowledge. The agent repeats the others."""
    acknowledged = []
    for one in wipes:
        if one.state not in ENDS:
            continue
        failed = "" if one.state is Stands.SUCCEEDED else _words(one)
        origin = Origin(f"node:{node}", "wiped" if not failed else "wipe-failed", failed)
        try:
            await end_wipe(runtime, node, origin, claim_id=one.uid, attempt=one.epoch, failed=failed)
        except (Unavailable, Overloaded):
            continue
        acknowledged.append(one)
    return acknowledged


def _words(one: PlacementReport) -> str:
    """The cause of a failed wipe, without the hook's output, which stays on the node."""
    if one.reason or one.message:
        return ": ".join(filter(None, (one.reason, one.message)))[:WORDS_CHARS_MAX]
    return f"the wipe hook ended with exit code {one.exit_code}"
