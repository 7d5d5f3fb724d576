"""Stopping work so that it waits again: why it is stopped, and what becomes of it when its nodes have spoken."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum

from bursar.core.allocation import Phase

# Who wrote this on an allocation wants to be asked first: only force evicts it from a node that is drained.
DO_NOT_EVICT = "bursar.io/do-not-evict"

STOPPABLE = frozenset({Phase.SCHEDULED, Phase.RUNNING, Phase.TERMINATING})


class Reason(StrEnum):
    """The `status.reason` of what was stopped, until it is placed again."""

    PREEMPTED = "Preempted"
    DRAINED = "Drained"
    EVICTED = "Evicted"
    NODE_LOST = "NodeLost"


class Rule(StrEnum):
    """Under which rule it had to go."""

    LOWER_PRIORITY = "LowerPriority"
    BURST = "Burst"
    ADMIN = "Admin"
    DRAIN = "Drain"
    NODE_LOST = "NodeLost"


@dataclass(frozen=True, slots=True)
class Notice:
    """What the stopped one is told: why, under which rule, by whom, and how long it may take to end."""

    reason: str
    rule: str
    by: str  # namespace/name of what takes its place, or the person who said so
    message: str
    grace_seconds: int = 30


def ended_as(last: Phase, earlier: Collection[Phase], *, evicted: bool, deleted: bool) -> Phase:
    """What an allocation is once the last of its nodes has spoken; `earlier` is what the others said before.

    What was evicted waits again, unless it had come to its own good end everywhere before it was stopped. What is
    being deleted ends, whatever else was wanted of it.
    """
    said = {last, *earlier}
    if evicted and not deleted:
        return Phase.SUCCEEDED if said == {Phase.SUCCEEDED} else Phase.PENDING
    if Phase.FAILED in said:
        return Phase.FAILED
    return Phase.CANCELLED if deleted and last is Phase.PENDING else last


def admin_message(by: str, why: str) -> str:
    return f"Preempted by {by}" + (f": {why}" if why else "")


def drain_message(node: str, by: str, why: str) -> str:
    return f"Node {node} is being drained by {by}" + (f": {why}" if why else "")
