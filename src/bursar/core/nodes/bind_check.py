"""The check of a bind: whether the chosen nodes have the capacity, and the quota charge of the placement.

The scheduler decides on a copy of the cluster state; this check repeats it on locked rows (optimistic concurrency).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from msgspec import Struct

from bursar.core.nodes.node import (
    EXCLUSIVE,
    WHOLE,
    Devices,
    Fit,
    NodeCapacity,
    Placement,
    Shortage,
    dominant_fraction,
    fit,
    give,
    take_back,
)
from bursar.core.objects.allocation import ResourceRequest
from bursar.core.objects.charge import Charge
from bursar.core.values.quantity import format_amount
from bursar.core.values.refusal import Cause, Code, Refusal
from bursar.core.values.wording import counted


class Target(Struct, frozen=True):
    """A node that a plan chose for an allocation. The generation is that of the node when the plan was made."""

    node: str
    generation: int | None = None
    devices: Devices | None = None


class BindCheck(Struct, frozen=True):
    """The effect of a placement: the capacities of the nodes after it, what it takes from each, and the charge."""

    capacities: tuple[NodeCapacity, ...]
    fits: tuple[Fit, ...]
    charge: Charge


def place(
    capacities: Mapping[str, NodeCapacity], request: ResourceRequest, targets: Sequence[Target], charge: Charge
) -> BindCheck | Refusal:
    """Check that every target has the capacity; the result says what the placement takes from each."""
    if len(targets) != request.nodes or (len(targets) > 1 and len({one.node for one in targets}) != len(targets)):
        return Refusal(
            Code.STALE, f"the plan names {counted(len(targets), 'node')}, the allocation asks for {request.nodes}"
        )
    after: list[NodeCapacity] = []
    fits: list[Fit] = []
    nodes = 0
    for target in targets:
        capacity = capacities.get(target.node)
        if capacity is None:
            return Refusal(Code.STALE, f"node {target.node} is gone")
        if target.generation is not None and target.generation != capacity.generation:
            return Refusal(Code.STALE, f"node {target.node} has changed since the plan was made")
        if not capacity.schedulable:
            return Refusal(Code.STALE, f"node {target.node} takes no new work")
        taken = fit(capacity, request.requests, exclusive=request.exclusive, wanted=target.devices)
        if isinstance(taken, Shortage):
            return no_capacity(target.node, taken)
        nodes += WHOLE if request.exclusive else dominant_fraction(capacity, request.requests)
        after.append(give(capacity, taken, request.requests))
        fits.append(taken)
    return BindCheck(tuple(after), tuple(fits), bound_charge(charge, nodes))


def bound_charge(charge: Charge, nodes: int) -> Charge:
    """The charge of placed work: everything accepted is also bound, and its fraction of the nodes is known now."""
    known: Charge | None = charge.known.get(nodes)
    if known is None:
        accepted = {**charge.accepted, "nodes": max(nodes, charge.accepted.get("nodes", 0))}
        known = replace(charge, accepted=accepted, bound={**charge.accepted, "nodes": nodes})
        charge.known[nodes] = known
    return known


def unplace(
    capacities: Mapping[str, NodeCapacity], request: ResourceRequest, placements: Sequence[Placement]
) -> list[NodeCapacity]:
    """The capacities of the nodes after the placements are confirmed gone."""
    return [
        take_back(capacities[one.node], one.resources, one.devices, request.requests)
        for one in placements
        if one.node in capacities
    ]


def no_capacity(node: str, short: Shortage) -> Refusal:
    if short.resource == EXCLUSIVE:
        return Refusal(Code.NO_CAPACITY, f"node {node} is not empty, or an allocation holds it exclusively")
    needs, has = (format_amount(short.resource, value) for value in (short.needs, short.has))
    message = f"node {node} has {has} {short.resource} free, {needs} needed"
    cause = Cause(
        f"no_capacity_{short.resource}", message, dimension=short.resource, limit=has, requested_delta=needs, scope=node
    )
    return Refusal(Code.NO_CAPACITY, message, causes=(cause,))
