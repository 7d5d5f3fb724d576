"""Nodes that are to be wiped, and what their agents say of that.

That a node is to be wiped is state, kept with the node: it is told when its agent comes and when it is decided, and
how it ended is told by the agent until it is acknowledged. So whoever dies meanwhile, it is neither forgotten nor
believed twice: what is said of another attempt than the last is of the past.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from bursar.core.nodes.node_claim import UID_PREFIX, ClaimState, NodeClaim
from bursar.core.objects.object import Origin
from bursar.ops.nodes.claim import end_wipe
from bursar.ops.runtime.lane import Overloaded
from bursar.ops.runtime.runtime import Runtime
from bursar.rpc.codec import ENDS, Spoken
from bursar.rpc.codec import ReportedState as Stands
from bursar.store.db.database import Unavailable
from bursar.store.objects.change import Change
from bursar.wire.scheduler.v1 import node_agent_pb2 as pb

WORDS_CHARS_MAX = 512


class _Told(msgspec.Struct):
    id: str = ""
    state: str = ""
    attempt: int = 0


class _Status(msgspec.Struct):
    claim: _Told | None = None


_decode = msgspec.json.Decoder(_Status).decode


def is_wipe(one: Spoken) -> bool:
    """Claims are told apart from allocations by their uids."""
    return one.uid.startswith(f"{UID_PREFIX}-")


def wipe_wanted(claim: NodeClaim | None) -> pb.SchedulingDirective | None:
    """What is told to an agent whose node is to be wiped; None where it is not."""
    if claim is None or claim.state is not ClaimState.WIPING:
        return None
    return _directive(claim.id, claim.attempt)


def wipe_of_change(change: Change) -> pb.SchedulingDirective | None:
    """The same, when a node was changed."""
    if change.type == "DELETED" or b'"claim"' not in change.status:
        return None
    told = _decode(change.status).claim
    return _directive(told.id, told.attempt) if told is not None and told.state == ClaimState.WIPING else None


def _directive(claim: str, attempt: int) -> pb.SchedulingDirective:
    return pb.SchedulingDirective(type=pb.DIRECTIVE_TYPE_WIPE, allocation_id=claim, epoch=attempt)


async def hear_wipes(runtime: Runtime, node: str, wipes: Iterable[Spoken]) -> list[Spoken]:
    """Record how wiping ended; what is recorded, or of the past, is to be acknowledged. The rest is said again."""
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


def _words(one: Spoken) -> str:
    """Not what the hook wrote: that stays on the node."""
    if one.reason or one.message:
        return ": ".join(filter(None, (one.reason, one.message)))[:WORDS_CHARS_MAX]
    return f"the wipe hook ended with exit code {one.exit_code}"
