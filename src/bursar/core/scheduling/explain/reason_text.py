"""Pending reasons in plain words: the reason with its numbers, and the remedy.

Quota limits tenants, capacity is the hardware of the cluster; the texts keep the two apart. A refusal by the account
that pays is quoted verbatim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, assert_never

from bursar.core.objects.pending_reason import MEMBERS, NODES, PendingReason, ReasonCode, Short
from bursar.core.quota.quota_messages import UNCOVERED, dimension_label
from bursar.core.quota.visibility import ABOVE
from bursar.core.scheduling.state.node_filter import OPEN
from bursar.core.values.quantity import format_amount
from bursar.core.values.wording import counted

# Added to the message of placed work.
BEYOND_SHARE: Final = "; it is beyond its tenant's fair share, and is evicted first when other tenants need theirs"
CONSTRAINTS_SHOWN_MAX: Final = 8
SHORTAGES_SHOWN_MAX: Final = 4
NODES_SHOWN_MAX: Final = 3

# Constraints that have no name of their own. `node_filter.CONSTRAINTS` has the rules of nodes.
CONSTRAINT_TEXTS: Final = {
    OPEN: "not ready or cordoned",
    "labels": "node selector or affinity",
    "taints": "taints that it does not tolerate",
    "claims": "claims of other users, or no claim of its own user",
    "tenants": "being dedicated to other tenants",
    "fractions": "accepting whole devices only",
    "isolation": "not isolating tenants",
    str(ReasonCode.AFFINITY): "pod affinity",
    str(ReasonCode.ANTI_AFFINITY): "pod anti-affinity",
    str(ReasonCode.SPREAD): "topology spread",
}
_INTER_POD: Final = frozenset({str(ReasonCode.AFFINITY), str(ReasonCode.ANTI_AFFINITY), str(ReasonCode.SPREAD)})

_TOGETHER: Final = "together"  # the number of nodes with capacity for one part, where all parts together find none


_WITHOUT_NUMBERS: Final = {
    ReasonCode.HELD: (
        "free capacity is reserved for work ahead of it in the queue; this one would delay it",
        "Set spec.ttl (bursar run --ttl): work that ends in time may run first.",
    ),
    ReasonCode.PREEMPTING: (
        "the scheduler is evicting less urgent work for it",
        "Wait: it starts when the evicted work has stopped.",
    ),
    ReasonCode.NOT_TRIED: ("the scheduler has not tried it yet", "Wait for the next scheduling cycle."),
}


def sentence(reason: PendingReason) -> str:
    """The reason in one sentence, with its numbers."""
    return _texts(reason)[0]


def help(reason: PendingReason) -> str:  # noqa: A001 - the word for it
    """The remedy: one or two sentences."""
    return _texts(reason)[1]


def _texts(reason: PendingReason) -> tuple[str, str]:
    """The sentence and the remedy."""
    match reason.why:
        case ReasonCode.AWAITING_APPROVAL:
            return reason.said or "awaiting approval", reason.hint or "Ask an approver: bursar approvals."
        case ReasonCode.GANG_INCOMPLETE:
            missing = f"waiting for gang members: {reason.members} of {reason.members_min} submitted"
            more = reason.members_min - reason.members
            return missing, f"Submit {more} more with the same groupId, or ask for a smaller minMembers."
        case ReasonCode.QUOTA_EXCEEDED:
            return _no_headroom(reason), _raise_quota(reason)
        case (
            ReasonCode.UNPRICED
            | ReasonCode.ACCOUNT_INACTIVE
            | ReasonCode.INSUFFICIENT_CREDIT
            | ReasonCode.CONCURRENCY_EXCEEDED
            | ReasonCode.DAILY_CAP_EXCEEDED
            | ReasonCode.SPEND_RATE_EXCEEDED
        ):
            said = reason.said or "its account cannot pay for it"
            return said, reason.hint or "Top up the account, or ask a billing admin."
        case ReasonCode.NO_NODES_ACTIVE | ReasonCode.NO_CLAIMED_NODES | ReasonCode.NO_MATCHING_NODES:
            return _no_node(reason)
        case ReasonCode.AFFINITY:
            return _not_near(reason), _bring_near(reason)
        case ReasonCode.ANTI_AFFINITY:
            return (
                "every node with free capacity is too near an allocation it must avoid" + _kept_out(reason, reason.why),
                "Wait until an allocation it must avoid has ended, add a node, or make it a preference.",
            )
        case ReasonCode.SPREAD:
            return (
                "every node with free capacity is in a domain where one more would exceed maxSkew"
                + _kept_out(reason, reason.why),
                "Free capacity in the emptier domains, raise maxSkew, or use whenUnsatisfiable: ScheduleAnyway.",
            )
        case ReasonCode.NO_CAPACITY:
            return (
                _no_capacity(reason) + _more_kept_out(reason) + _closed(reason),
                _open_nodes(reason) + _more_capacity(reason) + _easier_inter_pod(reason),
            )
        case ReasonCode.HELD | ReasonCode.PREEMPTING | ReasonCode.NOT_TRIED:
            return _WITHOUT_NUMBERS[reason.why]
    assert_never(reason.why)


def _no_node(reason: PendingReason) -> tuple[str, str]:
    nodes = counted(reason.nodes, "node")
    if reason.why is ReasonCode.NO_NODES_ACTIVE:
        none = f"none of {nodes} accepts work: all are cordoned or not ready" if reason.nodes else "there are no nodes"
        open_one = _open_nodes(reason) or "Add a node, uncordon one, or bring one back that is not ready."
        return none + _closed(reason), open_one
    if reason.why is ReasonCode.NO_CLAIMED_NODES:
        return _not_claimed(reason), "Claim a node: bursar node claim NAME. A node in use cannot be claimed."
    if _all_dedicated(reason):
        return (
            f"no node is open to its tenant: {nodes} dedicated to other tenants",
            "An administrator can add a node, or name the tenant in spec.tenants of one.",
        )
    return (
        f"none of {nodes} matches{_kept_out(reason)}",
        f"Change {_which(reason)}, or label, untaint or add a node so that one matches.",
    )


def _all_dedicated(reason: PendingReason) -> bool:
    return dict(reason.excluded).get("tenants") == reason.nodes


def _not_claimed(reason: PendingReason) -> str:
    user = reason.said or "its submitter"
    return f"sensitive work runs only on nodes that its user has claimed; {user} has claimed none of {reason.nodes}"


# Quota.


def _no_headroom(reason: PendingReason) -> str:
    bare = [dimension_label(dimension) for scope, dimension, *_ in reason.limits if scope.startswith(UNCOVERED)]
    if bare:
        return f"{_whose(reason.limits[0][0])} requires a quota, and none covers {', '.join(bare)}"
    parts = [
        f"{_whose(scope)} has {_amount(dimension, bound)} of {_amount(dimension, hard)} {dimension} bound, "
        f"{_amount(dimension, asked)} asked"
        if scope != ABOVE
        else f"a limit above its tenant has no headroom for {_amount(dimension, asked)} {dimension}"
        for scope, dimension, hard, bound, asked in reason.limits
    ]
    return "waiting for quota headroom" + (f": {'; '.join(parts)}" if parts else "")


def _raise_quota(reason: PendingReason) -> str:
    if any(scope.startswith(UNCOVERED) for scope, *_ in reason.limits):
        return "Ask your tenant admin for a ResourceQuota with a hard limit on it."
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
        return f"not enough capacity for all {one.needs} {one.resource} at once: {one.has} would fit now, {where}"
    if not reason.short:
        what = f" {reason.resource}" if reason.resource else ""
        return f"no node has enough{what} free"
    everywhere = [one for one in reason.short if one.nodes >= matching or one.resource == NODES]
    if everywhere:
        return "; ".join(_short(one, matching) for one in everywhere[:SHORTAGES_SHOWN_MAX])
    lacking = [f"{one.nodes} lack {_needed(one)}" for one in reason.short[:SHORTAGES_SHOWN_MAX]]
    return f"none of {counted(matching, 'matching node')} has everything free: {', '.join(lacking)}"


def _short(one: Short, matching: int) -> str:
    if one.resource == NODES:
        return f"needs {counted(one.needs, 'whole node')}; {one.has} of {counted(matching, 'matching node')} empty"
    if not one.has:
        where = "the only matching node" if matching == 1 else f"any of {matching} matching nodes"
        return f"needs {_needed(one)} on one node; 0 free on {where}"
    if one.has >= one.needs:
        where = counted(matching, "node")
        return f"needs {_needed(one)} on devices that nothing else uses; {where} matching, none has them free"
    most = _amount(one.resource, one.has)
    return f"needs {_needed(one)} on one node; the most free is {most}, on {_part(one, matching)}"


def _needed(one: Short) -> str:
    return f"{_amount(one.resource, one.needs)} {one.resource}"


def _part(one: Short, matching: int) -> str:
    return f"{max(1, one.most_nodes)} of {counted(matching, 'matching node')}"


def _more_capacity(reason: PendingReason) -> str:
    lacking = [one for one in reason.short if one.resource not in (MEMBERS, NODES) and one.has < one.needs]
    if not lacking:
        return "Wait for work to end, add a node, or ask for less."
    more = " and ".join(f"{_amount(one.resource, one.needs - one.has)} more {one.resource}" for one in lacking)
    wait = f"Wait for {more} to come free on one node, or add a node"
    if any(one.has <= 0 for one in lacking):
        return f"{wait}."
    fits = " and ".join(f"{_amount(one.resource, one.has)} {one.resource}" for one in lacking)
    return f"{wait}; {fits} would fit now."


def _more_kept_out(reason: PendingReason) -> str:
    """Nodes with free capacity may be among the excluded ones. Closed nodes are listed by name."""
    others = [(name, count) for name, count in reason.excluded if name not in (_TOGETHER, OPEN) and count]
    parts = [f"{constraint(name)} ({count})" for name, count in others[:CONSTRAINTS_SHOWN_MAX]]
    return f"; more nodes are excluded by {', '.join(parts)}" if parts else ""


def _easier_inter_pod(reason: PendingReason) -> str:
    named = [constraint(name) for name, count in reason.excluded if name in _INTER_POD and count]
    return f" Or make {' and '.join(named)} a preference." if named else ""


def _closed(reason: PendingReason) -> str:
    """The matching nodes that accept no work, by name."""
    if not reason.closed:
        return ""
    parts = [f"{name} is {state}" for name, state in reason.closed[:NODES_SHOWN_MAX]]
    more = len(reason.closed) - len(parts)
    return "; " + ", ".join([*parts, *([f"{more} more are cordoned or not ready"] if more else [])])


def _open_nodes(reason: PendingReason) -> str:
    """The step by which matching nodes accept work again."""
    cordoned = [name for name, state in reason.closed if state == "cordoned"]
    silent = [name for name, state in reason.closed if state != "cordoned"]
    steps = [f"uncordon {_some(cordoned)}"] if cordoned else []
    steps += [f"bring {_some(silent)} back"] if silent else []
    return f"An administrator can {' or '.join(steps)}. " if steps else ""


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:NODES_SHOWN_MAX])
    return f"{shown} and {len(names) - NODES_SHOWN_MAX} more" if len(names) > NODES_SHOWN_MAX else shown


def _matching(reason: PendingReason) -> int:
    """The nodes that accept work and that no rule on labels, taints or pod affinity excludes."""
    kept_out = sum(count for name, count in reason.excluded if name in _INTER_POD)
    return max([reason.matching - kept_out, *(one.nodes for one in reason.short), 0])


# Constraints.


def _not_near(reason: PendingReason) -> str:
    if reason.absent:
        return f"none of the allocations it must be near runs on a node with the label {reason.absent}"
    return f"no node with free capacity is near the allocations it must be near{_kept_out(reason, ReasonCode.AFFINITY)}"


def _bring_near(reason: PendingReason) -> str:
    if reason.absent:
        return "Start the allocations it must be near first, correct the labelSelector, or make it a preference."
    return "Free capacity near the allocations it must be near, or make the affinity a preference."


def _kept_out(reason: PendingReason, first: ReasonCode | None = None) -> str:
    excluded = [(name, count) for name, count in reason.excluded if name != _TOGETHER and count]
    if first is not None:
        excluded = [pair for pair in excluded if pair[0] == str(first)]
    if not excluded:
        return ""
    words = ", ".join(f"{constraint(name)} ({count})" for name, count in excluded[:CONSTRAINTS_SHOWN_MAX])
    return f"; excluded by {words}"


def constraint(name: str) -> str:
    """The text of a constraint: most names say themselves what they are."""
    return CONSTRAINT_TEXTS.get(name, name)


def _which(reason: PendingReason) -> str:
    named = [constraint(name) for name, count in reason.excluded if count and name not in CONSTRAINT_TEXTS]
    return ", ".join(named[:CONSTRAINTS_SHOWN_MAX]) or "the node selector, affinity or tolerations"


# Words.


def _amount(resource: str, amount: int) -> str:
    return format_amount(resource, amount)
