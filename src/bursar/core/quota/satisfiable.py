"""What could never run, however empty the cluster: refused at the door, because waiting would not help.

Only sizes count. Labels, taints, cordons and health come and go, and so does what others use; the machines do not. A
cluster without any nodes refuses nothing: it is one that is being set up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from bursar.core.nodes.node import DEVICES_MAX, WHOLE, is_device
from bursar.core.objects.charge import Amounts
from bursar.core.values.quantity import format_amount
from bursar.core.values.refusal import Cause, Code, Refusal
from bursar.core.values.wording import counted

PODS: Final = "pods"
CAUSES_TOLD_MAX: Final = 10  # in the message; the rest stand among the details
_ANY_NUMBER: Final = 1 << 60


@dataclass(frozen=True, slots=True)
class Ceiling:
    """The machines there are: what each kind of node has when empty, and how many there are of it."""

    kinds: tuple[tuple[Amounts, int], ...] = ()

    @property
    def nodes(self) -> int:
        return sum(count for _, count in self.kinds)


@dataclass(frozen=True, slots=True)
class Demand:
    """What `members` members of a gang ask together: each of them this much on each of `nodes` different nodes."""

    requests: Amounts
    nodes: int = 1
    exclusive: bool = False
    members: int = 1


def ceiling_of(capacities: Iterable[Amounts]) -> Ceiling:
    """Equal nodes are counted, not listed; the order is that of their contents."""
    counts = Counter(tuple(sorted(one.items())) for one in capacities)
    return Ceiling(tuple((dict(pairs), count) for pairs, count in sorted(counts.items())))


def refusal(demand: Demand, ceiling: Ceiling) -> Refusal | None:
    """Why this can never run on these machines; None when it could, or when there are none yet."""
    if not ceiling.kinds:
        return None
    capacity = [(copies(kind, demand), count) for kind, count in ceiling.kinds]
    able = sum(count for each, count in capacity if each)
    if not able:
        return _too_large(demand, ceiling)
    if demand.nodes > able:
        return _too_many_nodes(demand, able)
    if not _hold(capacity, demand.members, demand.nodes):
        return _too_many_members(demand, _members_max(capacity, demand))
    return None


def copies(capacity: Amounts, demand: Demand) -> int:
    """How often what is asked of one node fits into an empty one: the arithmetic of `bursar.core.nodes.node.fit`."""
    needs = _needs(capacity, demand)
    most = min((_times(capacity, name, amount) for name, amount in needs.items()), default=_ANY_NUMBER)
    return min(most, 1) if demand.exclusive else most


def _needs(capacity: Amounts, demand: Demand) -> dict[str, int]:
    """What is asked for. Everything that shares a node counts as one pod, where the node says how many it takes."""
    needs = {name: amount for name, amount in demand.requests.items() if demand.exclusive or name != PODS}
    return {**needs, PODS: WHOLE} if PODS in capacity and not demand.exclusive else needs


Room = list[tuple[int, int]]  # (how often it fits into a node, how many such nodes)


def _hold(capacity: Room, members: int, nodes: int) -> bool:
    """Whether so many members find their nodes. They can take turns over them, so places need only be counted; but a
    node is only one node to a member, however often it would fit there."""
    return sum(min(each, members) * count for each, count in capacity) >= members * nodes


def _members_max(capacity: Room, demand: Demand) -> int:
    """The largest gang that finds its nodes; one that is smaller always does."""
    enough, too_many = 1, demand.members
    while too_many - enough > 1:
        middle = (enough + too_many) // 2
        enough, too_many = (middle, too_many) if _hold(capacity, middle, demand.nodes) else (enough, middle)
    return enough


def _times(capacity: Amounts, resource: str, amount: int) -> int:
    has = capacity.get(resource, 0)
    if not amount:
        return _ANY_NUMBER
    if not is_device(resource):
        return has // amount
    devices = min(has // WHOLE, DEVICES_MAX)
    # Shares of one device lie on that device alone.
    return devices * (WHOLE // amount) if amount < WHOLE else devices // -(-amount // WHOLE)


# The words.


def _too_large(demand: Demand, ceiling: Ceiling) -> Refusal:
    """No node is large enough. What no node has is named; else what the nearest one lacks."""
    kinds = [kind for kind, _ in ceiling.kinds]
    names = {name for kind in kinds for name in kind}
    has: Amounts = {name: max(kind.get(name, 0) for kind in kinds) for name in names}
    whose = "the largest node has"
    if not _short(has, demand):
        has = min(kinds, key=lambda kind: len(_short(kind, demand)))
        whose = "no single node has all that is requested: the nearest one has"
    needs = _needs(has, demand)
    causes = tuple(
        Cause(
            "ExceedsLargestNode",
            f"{_amount(name, needs[name])} requested, {whose} {format_amount(name, has.get(name, 0))}",
            field=f"spec.resources.requests[{name}]",
            dimension=name,
            scope="node",
            limit=format_amount(name, has.get(name, 0)),
            requested_delta=format_amount(name, needs[name]),
        )
        for name in _short(has, demand)
    )
    return _unsatisfiable(causes, _smaller([one.dimension for one in causes], has, names))


def _smaller(short: list[str], has: Amounts, offered: set[str]) -> str:
    """What would help. A name that no node offers is likely misspelt, so those that there are are told."""
    unknown = [name for name in short if name not in offered][:CAUSES_TOLD_MAX]
    less = [name for name in short if name in offered][:CAUSES_TOLD_MAX]
    hints: list[str] = []
    if unknown:
        there_is = ", ".join(sorted(offered - {PODS})[:CAUSES_TOLD_MAX])
        hints.append(f"No node offers {' or '.join(unknown)}; there is {there_is}.")
    if less:
        most = " and ".join(_amount(name, has.get(name, 0)) for name in less)
        hints.append(
            f"Ask for at most {most} on each node, over several nodes (spec.nodes) if need be, or add a larger node."
        )
    return " ".join(hints)


def _short(capacity: Amounts, demand: Demand) -> list[str]:
    needs = _needs(capacity, demand)
    return sorted(name for name, amount in needs.items() if not _times(capacity, name, amount))


def _too_many_nodes(demand: Demand, able: int) -> Refusal:
    what = f"large enough for {_together(demand.requests)}" if demand.requests else "registered"
    message = f"{counted(demand.nodes, 'node')} requested, the cluster has {able} {what}"
    cause = _counted("ExceedsNodes", message, "spec.nodes", able, demand.nodes)
    return _unsatisfiable((cause,), f"Ask for at most {counted(able, 'node')}, for less on each of them, or add nodes.")


def _too_many_members(demand: Demand, fit: int) -> Refusal:
    each = f"each with {_together(demand.requests)}" if demand.requests else "each asking for nothing"
    if demand.nodes > 1:
        each += f" on each of {demand.nodes} nodes"
    elif demand.exclusive:
        each += " on a node of its own"
    message = f"a gang of {demand.members} requested, {each}; the cluster holds {fit} when it is empty"
    cause = _counted("ExceedsCluster", message, "spec.gangScheduling.minMembers", fit, demand.members)
    return _unsatisfiable(
        (cause,), f"Ask for at most {counted(fit, 'member')}, for less for each of them, or add nodes."
    )


def _counted(reason: str, message: str, field: str, has: int, wants: int) -> Cause:
    return Cause(
        reason, message, field=field, dimension="nodes" if reason == "ExceedsNodes" else "members", scope="cluster",
        limit=str(has), requested_delta=str(wants),
    )  # fmt: skip


def _unsatisfiable(causes: tuple[Cause, ...], hint: str) -> Refusal:
    return Refusal(Code.UNSATISFIABLE, "; ".join(one.message for one in causes[:CAUSES_TOLD_MAX]), hint, causes)


def _together(requests: Amounts) -> str:
    return ", ".join(_amount(name, requests[name]) for name in sorted(requests))


def _amount(name: str, amount: int) -> str:
    return f"{name} {format_amount(name, amount)}"
