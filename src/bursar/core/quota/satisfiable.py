"""Satisfiability: refuses requests that could never run on the cluster, even if it were empty.

Only the sizes of the nodes that the tenant may use count. Labels, taints, cordons, health and other work change;
machines do not. Without any such node nothing is refused: the cluster is being set up, or all nodes are dedicated to
other tenants, and an administrator can change that at any time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from bursar.core.nodes.node import DEVICES_MAX, WHOLE
from bursar.core.objects.charge import Amounts
from bursar.core.values.quantity import format_amount, is_device
from bursar.core.values.refusal import Cause, Code, Refusal
from bursar.core.values.wording import counted

PODS: Final = "pods"
CAUSES_TOLD_MAX: Final = 10  # in the message; the details have all of them
_ANY_NUMBER: Final = 1 << 60


@dataclass(frozen=True, slots=True)
class Ceiling:
    """The nodes of the cluster by size: the capacity of each kind of node, and the number of nodes of that kind."""

    kinds: tuple[tuple[Amounts, int], ...] = ()
    partial: bool = False  # other nodes exist, dedicated to other tenants

    @property
    def nodes(self) -> int:
        return sum(count for _, count in self.kinds)

    @property
    def usable(self) -> str:
        """The phrase by which messages qualify the counted nodes."""
        return " that its tenant may use" if self.partial else ""


@dataclass(frozen=True, slots=True)
class Demand:
    """The request of a gang of `members` members: each needs these resources on each of `nodes` different nodes."""

    requests: Amounts
    nodes: int = 1
    exclusive: bool = False
    members: int = 1


def ceiling_of(capacities: Iterable[Amounts], *, partial: bool = False) -> Ceiling:
    """Group nodes of equal size and count them."""
    counts = Counter(tuple(sorted(one.items())) for one in capacities)
    return Ceiling(tuple((dict(pairs), count) for pairs, count in sorted(counts.items())), partial)


def refusal(demand: Demand, ceiling: Ceiling) -> Refusal | None:
    """Refuse a demand that these nodes could never run; None if they could, or if there are no nodes yet."""
    if not ceiling.kinds:
        return None
    capacity = [(copies(kind, demand), count) for kind, count in ceiling.kinds]
    able = sum(count for each, count in capacity if each)
    if not able:
        return _too_large(demand, ceiling)
    if demand.nodes > able:
        return _too_many_nodes(demand, able, ceiling)
    if not _hold(capacity, demand.members, demand.nodes):
        return _too_many_members(demand, _members_max(capacity, demand), ceiling)
    return None


def copies(capacity: Amounts, demand: Demand) -> int:
    """How often the request fits on an empty node, by the arithmetic of `bursar.core.nodes.node.fit`."""
    needs = _needs(capacity, demand)
    most = min((_times(capacity, name, amount) for name, amount in needs.items()), default=_ANY_NUMBER)
    return min(most, 1) if demand.exclusive else most


def _needs(capacity: Amounts, demand: Demand) -> dict[str, int]:
    """The needs on one node. Work that shares a node counts as one pod, if the node limits their number."""
    needs = {name: amount for name, amount in demand.requests.items() if demand.exclusive or name != PODS}
    return {**needs, PODS: WHOLE} if PODS in capacity and not demand.exclusive else needs


NodeCounts = list[tuple[int, int]]  # (how often it fits into a node, how many such nodes)


def _hold(capacity: NodeCounts, members: int, nodes: int) -> bool:
    """Whether this many members fit. Members can be spread over the nodes in any way, so counting places suffices; but
    a member uses each node at most once."""
    return sum(min(each, members) * count for each, count in capacity) >= members * nodes


def _members_max(capacity: NodeCounts, demand: Demand) -> int:
    """The largest gang that fits, by binary search: smaller gangs always fit."""
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
    # A fraction lies on a single device.
    return devices * (WHOLE // amount) if amount < WHOLE else devices // -(-amount // WHOLE)


# Messages.


def _too_large(demand: Demand, ceiling: Ceiling) -> Refusal:
    """Refuse a demand that no node is large enough for: name what no node has, else what the nearest node lacks."""
    kinds = [kind for kind, _ in ceiling.kinds]
    names = {name for kind in kinds for name in kind}
    has: Amounts = {name: max(kind.get(name, 0) for kind in kinds) for name in names}
    whose = f"the largest node{ceiling.usable} has"
    if not _short(has, demand):
        has = min(kinds, key=lambda kind: len(_short(kind, demand)))
        whose = f"no single node{ceiling.usable} has all that is requested: the nearest one has"
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
    return _unsatisfiable(causes, _smaller([one.dimension for one in causes], has, names, ceiling))


def _smaller(short: list[str], has: Amounts, offered: set[str], ceiling: Ceiling) -> str:
    """The hint. A resource that no node offers is likely misspelt, so the hint lists the resources that exist."""
    unknown = [name for name in short if name not in offered][:CAUSES_TOLD_MAX]
    less = [name for name in short if name in offered][:CAUSES_TOLD_MAX]
    hints: list[str] = []
    if unknown:
        existing = ", ".join(sorted(offered - {PODS})[:CAUSES_TOLD_MAX])
        hints.append(f"No node{ceiling.usable} offers {' or '.join(unknown)}; nodes offer {existing}.")
    if less:
        most = " and ".join(_amount(name, has.get(name, 0)) for name in less)
        hints.append(
            f"Request at most {most} on each node, on several nodes (spec.nodes) if necessary, or add a larger node."
        )
    return " ".join(hints)


def _short(capacity: Amounts, demand: Demand) -> list[str]:
    needs = _needs(capacity, demand)
    return sorted(name for name, amount in needs.items() if not _times(capacity, name, amount))


def _too_many_nodes(demand: Demand, able: int, ceiling: Ceiling) -> Refusal:
    what = f"large enough for {_together(demand.requests)}" if demand.requests else "registered"
    message = f"{counted(demand.nodes, 'node')} requested, the cluster has {able}{ceiling.usable} {what}"
    cause = _counted("ExceedsNodes", message, "spec.nodes", able, demand.nodes)
    return _unsatisfiable((cause,), f"Request at most {counted(able, 'node')}, or less on each of them, or add nodes.")


def _too_many_members(demand: Demand, fit: int, ceiling: Ceiling) -> Refusal:
    each = f"each with {_together(demand.requests)}" if demand.requests else "each without requests"
    if demand.nodes > 1:
        each += f" on each of {demand.nodes} nodes"
    elif demand.exclusive:
        each += " on a node of its own"
    holds = (
        f"the nodes{ceiling.usable} hold {fit} when they are"
        if ceiling.partial
        else f"the cluster holds {fit} when it is"
    )
    message = f"a gang of {demand.members} requested, {each}; {holds} empty"
    cause = _counted("ExceedsCluster", message, "spec.gangScheduling.minMembers", fit, demand.members)
    return _unsatisfiable(
        (cause,), f"Request at most {counted(fit, 'member')}, or less for each of them, or add nodes."
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
