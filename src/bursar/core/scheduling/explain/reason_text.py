"""Why something waits, in plain words: what the reason is, with its numbers, and what would help.

Quota is not capacity, and the words keep them apart: quota is what somebody may have, capacity is what there is. What
cannot be paid for is told as the account said it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from bursar.core.objects.pending_reason import MEMBERS, NODES, PendingReason, ReasonCode, Short
from bursar.core.quota.quota_messages import dimension_label
from bursar.core.quota.visibility import ABOVE
from bursar.core.values.quantity import format_amount
from bursar.core.values.wording import counted

# Of what runs: said behind where it does.
BEYOND_SHARE: Final = "; it is beyond its tenant's fair share, and the first to go when others need theirs"
CONSTRAINTS_TOLD_MAX: Final = 8
SHORTAGES_TOLD_MAX: Final = 4
NODES_TOLD_MAX: Final = 3

# Constraints that have no name of their own.
_CONSTRAINTS: Final = {
    "not_ready_or_cordoned": "not ready or cordoned",
    "labels": "node selector or affinity",
    "taints": "taints that are not tolerated",
    "claims": "claims of others, or the lack of a claim of its user",
    "tenants": "being kept for other tenants",
    "fractions": "taking whole devices only",
    "isolation": "not isolating tenants from each other",
    str(ReasonCode.AFFINITY): "pod affinity",
    str(ReasonCode.ANTI_AFFINITY): "pod anti-affinity",
    str(ReasonCode.SPREAD): "topology spread",
}
_INTER_POD: Final = frozenset({str(ReasonCode.AFFINITY), str(ReasonCode.ANTI_AFFINITY), str(ReasonCode.SPREAD)})

# What is said without numbers, and what would help.
_PLAIN: Final = {
    ReasonCode.HELD: "the room there is is kept for work that has waited longer, and this would delay it",
    ReasonCode.PREEMPTING: "room is being made: less urgent work was told to stop",
    ReasonCode.NOT_TRIED: "waiting for its turn: the scheduler has not come to it yet",
}
_PLAIN_HELP: Final = {
    ReasonCode.NO_CLAIMED_NODES: "Claim a node: bursar node claim NAME. What is in use cannot be claimed.",
    ReasonCode.HELD: "Set a ttl: what is known to end in time may go first.",
    ReasonCode.PREEMPTING: "Wait: it starts when they have stopped.",
    ReasonCode.NOT_TRIED: "Wait: it is looked at in the next cycle.",
}
_TOGETHER: Final = "together"  # how many nodes have room for one part, where all parts together find none


def sentence(reason: PendingReason) -> str:
    """What keeps it waiting."""
    match reason.why:
        case ReasonCode.NO_NODES_ACTIVE:
            return _no_nodes(reason) + _closed(reason)
        case ReasonCode.GANG_INCOMPLETE:
            return f"waiting for gang members: {reason.members} of {reason.members_min} are there"
        case ReasonCode.QUOTA_EXCEEDED:
            return _no_headroom(reason)
        case ReasonCode.NO_CLAIMED_NODES:
            return _not_claimed(reason)
        case ReasonCode.NO_MATCHING_NODES:
            return f"none of {counted(reason.nodes, 'node')} is of the kind that is asked for{_kept_out(reason)}"
        case ReasonCode.AFFINITY:
            return _not_near(reason)
        case ReasonCode.ANTI_AFFINITY:
            kept_out = _kept_out(reason, ReasonCode.ANTI_AFFINITY)
            return f"every node with room is too near those it must be apart from{kept_out}"
        case ReasonCode.SPREAD:
            return (
                f"every node with room is where too many of its kind are already{_kept_out(reason, ReasonCode.SPREAD)}"
            )
        case ReasonCode.NO_CAPACITY:
            return _no_capacity(reason) + _kept_out_by_inter_pod(reason) + _closed(reason)
        case _:  # it needs no numbers, or cannot be paid for
            return _PLAIN.get(reason.why) or reason.said or "it cannot be paid for"


def help(reason: PendingReason) -> str:  # noqa: A001 - the word for it
    """What would let it run."""
    match reason.why:
        case ReasonCode.NO_NODES_ACTIVE:
            return _open_nodes(reason) or "Add a node, uncordon one, or bring one back that is not ready."
        case ReasonCode.GANG_INCOMPLETE:
            missing = reason.members_min - reason.members
            return f"Submit {missing} more with the same groupId, or ask for a smaller minMembers."
        case ReasonCode.QUOTA_EXCEEDED:
            return _raise_quota(reason)
        case ReasonCode.NO_MATCHING_NODES:
            return f"Change {_which(reason)}, or label, untaint or add a node so that one matches."
        case ReasonCode.AFFINITY:
            return _bring_near(reason)
        case ReasonCode.ANTI_AFFINITY:
            return "Wait until one of those it must be apart from has ended, add a node, or make it a preference."
        case ReasonCode.SPREAD:
            return "Free room in the emptier domains, raise maxSkew, or use whenUnsatisfiable: ScheduleAnyway."
        case ReasonCode.NO_CAPACITY:
            return _open_nodes(reason) + _more_room(reason) + _easier_inter_pod(reason)
        case _:
            return _PLAIN_HELP.get(reason.why) or reason.hint or "Top up the account, or ask a billing admin."


def _no_nodes(reason: PendingReason) -> str:
    if not reason.nodes:
        return "there are no nodes"
    return f"none of {counted(reason.nodes, 'node')} takes work: all are cordoned or not ready"


def _not_claimed(reason: PendingReason) -> str:
    whose = f"{reason.said} has" if reason.said else "who submitted it has"
    return f"sensitive work runs on nodes that its user has claimed, and {whose} claimed none of {reason.nodes}"


# Quota.


def _no_headroom(reason: PendingReason) -> str:
    told = [
        f"{_whose(scope)} has {_amount(dimension, bound)} of {_amount(dimension, hard)} {dimension} bound, "
        f"{_amount(dimension, asked)} asked"
        if scope != ABOVE
        else f"a limit above its tenant has no room for {_amount(dimension, asked)} {dimension}"
        for scope, dimension, hard, bound, asked in reason.limits
    ]
    return "waiting for quota headroom" + (f": {'; '.join(told)}" if told else "")


def _raise_quota(reason: PendingReason) -> str:
    steps = [
        f"raise {dimension_label(dimension)} of {_whose(scope)} by {_amount(dimension, bound + asked - hard)}"
        if scope != ABOVE
        else f"ask a system admin to raise {dimension_label(dimension)} above the tenant"
        for scope, dimension, hard, bound, asked in reason.limits
    ]
    wait = "Wait for work under the same limit to end"
    return f"{wait}, or {' and '.join(steps)}." if steps else f"{wait}, or ask for a higher limit."


def _whose(scope: str) -> str:
    kind, _, name = scope.partition(":")
    return f"{kind} {name}" if name else "the system"


# Capacity.


def _no_capacity(reason: PendingReason) -> str:
    matching = _matching(reason)
    together = dict(reason.excluded).get(_TOGETHER)
    if together is not None:
        (one,) = reason.short
        where = f"on {counted(together, 'node')} of {matching}"
        return f"there is no room for all {one.needs} {one.resource} at once: {one.has} would fit now, {where}"
    if not reason.short:
        what = f" {reason.resource}" if reason.resource else ""
        return f"no node has enough{what} free"
    everywhere = [one for one in reason.short if one.nodes >= matching or one.resource == NODES]
    if everywhere:
        return "; ".join(_short(one, matching) for one in everywhere[:SHORTAGES_TOLD_MAX])
    lacking = [f"{one.nodes} lack {_needed(one)}" for one in reason.short[:SHORTAGES_TOLD_MAX]]
    return f"none of {counted(matching, 'matching node')} has all of it free: {', '.join(lacking)}"


def _short(one: Short, matching: int) -> str:
    if one.resource == NODES:
        return f"{counted(one.needs, 'whole node')} asked: {one.has} of {counted(matching, 'matching node')} are empty"
    if not one.has:
        none = "the only matching node has none" if matching == 1 else f"none of {matching} matching nodes has any"
        return f"no node has {_needed(one)} free: {none}"
    if one.has >= one.needs:
        where = f"of {counted(matching, 'matching node')}"
        return f"no node has {_needed(one)} free on devices that nothing else uses, {where}"
    return f"no node has {_needed(one)} free: the most is {_amount(one.resource, one.has)}, on {_part(one, matching)}"


def _needed(one: Short) -> str:
    return f"{_amount(one.resource, one.needs)} {one.resource}"


def _part(one: Short, matching: int) -> str:
    return f"{max(1, one.most_nodes)} of {counted(matching, 'matching node')}"


def _more_room(reason: PendingReason) -> str:
    lacking = [one for one in reason.short if one.resource not in (MEMBERS, NODES) and one.has < one.needs]
    if not lacking:
        return "Wait for something to end, add a node, or ask for less."
    more = " and ".join(f"{_amount(one.resource, one.needs - one.has)} more {one.resource}" for one in lacking)
    wait = f"Wait for {more} to come free on one node, or add a node"
    if any(one.has <= 0 for one in lacking):
        return f"{wait}."
    fits = " and ".join(f"{_amount(one.resource, one.has)} {one.resource}" for one in lacking)
    return f"{wait}; {fits} would fit now."


def _kept_out_by_inter_pod(reason: PendingReason) -> str:
    """Nodes with room may be among them."""
    told = [f"{constraint(name)} ({count})" for name, count in reason.excluded if name in _INTER_POD and count]
    return f"; others are kept out by {', '.join(told)}" if told else ""


def _easier_inter_pod(reason: PendingReason) -> str:
    named = [constraint(name) for name, count in reason.excluded if name in _INTER_POD and count]
    return f" Or make {' and '.join(named)} a preference." if named else ""


def _closed(reason: PendingReason) -> str:
    """The matching nodes that take no work, by name."""
    if not reason.closed:
        return ""
    told = [f"{name} is {state}" for name, state in reason.closed[:NODES_TOLD_MAX]]
    more = len(reason.closed) - len(told)
    return "; " + ", ".join([*told, *([f"{more} more are cordoned or not ready"] if more else [])])


def _open_nodes(reason: PendingReason) -> str:
    """How to let matching nodes take work again."""
    cordoned = [name for name, state in reason.closed if state == "cordoned"]
    silent = [name for name, state in reason.closed if state != "cordoned"]
    steps = [f"uncordon {_some(cordoned)}"] if cordoned else []
    steps += [f"bring {_some(silent)} back"] if silent else []
    return f"An administrator can {' or '.join(steps)}. " if steps else ""


def _some(names: Sequence[str]) -> str:
    told = ", ".join(names[:NODES_TOLD_MAX])
    return f"{told} and {len(names) - NODES_TOLD_MAX} more" if len(names) > NODES_TOLD_MAX else told


def _matching(reason: PendingReason) -> int:
    """The nodes that take work and that no rule about labels, taints or company keeps out."""
    kept_out = sum(count for name, count in reason.excluded if name in _INTER_POD)
    return max([reason.matching - kept_out, *(one.nodes for one in reason.short), 0])


# Constraints.


def _not_near(reason: PendingReason) -> str:
    if reason.absent:
        return f"none of those it must be near runs on a node with the label {reason.absent}"
    return f"no node with room is near those it must be near{_kept_out(reason, ReasonCode.AFFINITY)}"


def _bring_near(reason: PendingReason) -> str:
    if reason.absent:
        return "Start those that it must be near first, correct the labelSelector, or make it a preference."
    return "Free room where those are that it must be near, or make the affinity a preference."


def _kept_out(reason: PendingReason, first: ReasonCode | None = None) -> str:
    told = [(name, count) for name, count in reason.excluded if name != _TOGETHER and count]
    if first is not None:
        told = [pair for pair in told if pair[0] == str(first)]
    if not told:
        return ""
    words = ", ".join(f"{constraint(name)} ({count})" for name, count in told[:CONSTRAINTS_TOLD_MAX])
    return f"; kept out by {words}"


def constraint(name: str) -> str:
    """A constraint as it is told: most say themselves what they are."""
    return _CONSTRAINTS.get(name, name)


def _which(reason: PendingReason) -> str:
    named = [constraint(name) for name, count in reason.excluded if count and name not in _CONSTRAINTS]
    return ", ".join(named[:CONSTRAINTS_TOLD_MAX]) or "the node selector, affinity or tolerations"


# Words.


def _amount(resource: str, amount: int) -> str:
    return format_amount(resource, amount)
