"""Evictions: the reasons and rules for which placed work is stopped, and its phase after its nodes have reported."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from enum import StrEnum

from bursar.core.objects.allocation import Phase

# The annotation that excludes an allocation from drains, unless the drain is forced.
DO_NOT_EVICT = "bursar.io/do-not-evict"

STOPPABLE = frozenset({Phase.SCHEDULED, Phase.RUNNING, Phase.TERMINATING})


class EvictionReason(StrEnum):
    """The reason of an eviction, in `status.reason` until the work is placed again."""

    PREEMPTED = "Preempted"  # the scheduler preempted it for other work
    DRAINED = "Drained"  # its node is being drained
    EVICTED = "Evicted"  # an administrator evicted it
    NODE_LOST = "NodeLost"  # its node is lost, and its run-lease has expired
    MEMBER_FAILED = "MemberFailed"  # another of its nodes or gang members failed; it is not requeued
    APPROVAL_ENDED = "ApprovalEnded"  # it was approved until a time that has passed; it is not requeued


class EvictionRule(StrEnum):
    """The rule that allowed an eviction."""

    LOWER_PRIORITY = "LowerPriority"  # the preemptor has a higher priority
    BURST = "Burst"  # its tenant is above its fair share, and that of the preemptor is not
    ADMIN = "Admin"  # an administrator asked for it
    DRAIN = "Drain"  # its node is being drained
    NODE_LOST = "NodeLost"  # its node is lost
    MEMBER_FAILED = "MemberFailed"  # another of its nodes or gang members failed
    APPROVAL_ENDED = "ApprovalEnded"  # its approval has ended


@dataclass(frozen=True, slots=True)
class Notice:
    """The eviction notice in the status of stopped work: reason, rule, initiator, message and grace period."""

    reason: str
    rule: str
    by: str  # namespace/name of the preemptor, or the actor who evicted it
    message: str
    grace_seconds: int = 30
    failure: Failure | None = None  # of the node or member that caused it


@dataclass(frozen=True, slots=True)
class Failure:
    """The first failure of an allocation or its gang: the node, the exit code and the reason."""

    node: str
    exit_code: int | None = None
    reason: str = ""
    message: str = ""
    allocation: str = ""  # the failed member, if it is another one of the gang

    @property
    def words(self) -> str:
        """The failure with its node: `exit code 5 on gpu-7`."""
        code = f"exit code {self.exit_code}" if self.exit_code is not None else "it failed"
        return (self.message or self.reason or code) + (f" on {self.node}" if self.node else "")

    @property
    def words_alone(self) -> str:
        """The failure of single-node work: a bare exit code with its node, a message or reason as reported."""
        bare = self.exit_code is not None and not self.reason and not self.message
        return self.words if bare else self.message


def member_notice(name: str, failure: Failure, gang: str = "") -> Notice:
    """The notice to the rest of a gang or allocation after one failure: it is stopped and not requeued."""
    words = f"{name} failed: {failure.words}" if gang else failure.words
    first = replace(failure, allocation=name if gang else "")
    return Notice(EvictionReason.MEMBER_FAILED, EvictionRule.MEMBER_FAILED, name, words, failure=first)


def ended_as(last: Phase, earlier: Collection[Phase], *, evicted: bool, deleted: bool) -> Phase:
    """The phase of an allocation once the last of its nodes has reported; `earlier` are the reports of the others.

    Evicted work is pending again, unless it succeeded on every node before it was stopped. A deletion outranks
    an eviction: deleted work ends.
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
