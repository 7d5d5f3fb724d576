"""Stopping work: why it is stopped, and what becomes of it when its nodes have spoken."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from enum import StrEnum

from bursar.core.objects.allocation import Phase

# Who wrote this on an allocation wants to be asked first: only force evicts it from a node that is drained.
DO_NOT_EVICT = "bursar.io/do-not-evict"

STOPPABLE = frozenset({Phase.SCHEDULED, Phase.RUNNING, Phase.TERMINATING})


class EvictionReason(StrEnum):
    """The `status.reason` of what was stopped, until it is placed again."""

    PREEMPTED = "Preempted"
    DRAINED = "Drained"
    EVICTED = "Evicted"
    NODE_LOST = "NodeLost"
    MEMBER_FAILED = "MemberFailed"  # another of its nodes, or another member of its gang; it does not wait again


class EvictionRule(StrEnum):
    """Under which rule it had to go."""

    LOWER_PRIORITY = "LowerPriority"
    BURST = "Burst"
    ADMIN = "Admin"
    DRAIN = "Drain"
    NODE_LOST = "NodeLost"
    MEMBER_FAILED = "MemberFailed"


@dataclass(frozen=True, slots=True)
class Notice:
    """What the stopped one is told: why, under which rule, by whom, and how long it may take to end."""

    reason: str
    rule: str
    by: str  # namespace/name of what takes its place, or the person who said so
    message: str
    grace_seconds: int = 30
    failure: Failure | None = None  # of the node or member because of which it is stopped


@dataclass(frozen=True, slots=True)
class Failure:
    """How work failed on a node: the first failure of an allocation, or of its gang."""

    node: str
    exit_code: int | None = None
    reason: str = ""
    message: str = ""
    allocation: str = ""  # the member that failed, where it is another one of the gang

    @property
    def words(self) -> str:
        """`exit code 5 on gpu-7`: what its user has to know first."""
        code = f"exit code {self.exit_code}" if self.exit_code is not None else "it failed"
        return (self.message or self.reason or code) + (f" on {self.node}" if self.node else "")

    @property
    def words_alone(self) -> str:
        """Of work on one node: a bare exit code is told with its node; a message or a reason stays as reported."""
        bare = self.exit_code is not None and not self.reason and not self.message
        return self.words if bare else self.message


def member_notice(name: str, failure: Failure, gang: str = "") -> Notice:
    """What the rest of it is told when one node or member has failed: it is asked to end, and does not wait again."""
    words = f"{name} failed: {failure.words}" if gang else failure.words
    told = replace(failure, allocation=name if gang else "")
    return Notice(EvictionReason.MEMBER_FAILED, EvictionRule.MEMBER_FAILED, name, words, failure=told)


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
