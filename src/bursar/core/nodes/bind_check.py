"""Placing an allocation on nodes, and taking it off again: room and quota decided together."""

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
    """A node chosen for an allocation. The generation is that of the node the choice was made for."""

    node: str
    generation: int | None = None
    devices: Devices | None = None


class BindCheck(Struct, frozen=True):
    """What placing takes: from each node, and from the quotas."""

    capacities: tuple[NodeCapacity, ...]
    fits: tuple[Fit, ...]
    charge: Charge


def place(
    capacities: Mapping[str, NodeCapacity], request: ResourceRequest, targets: Sequence[Target], charge: Charge
) -> BindCheck | Refusal:
    """Whether all targets have the room, and what is taken from each; nothing is changed."""
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
    """Placed work is bound for all it was accepted for; shared work learns only now what part of nodes it takes."""
    known: Charge | None = charge.known.get(nodes)
    if known is None:
        accepted = {**charge.accepted, "nodes": max(nodes, charge.accepted.get("nodes", 0))}
        known = replace(charge, accepted=accepted, bound={**charge.accepted, "nodes": nodes})
        charge.known[nodes] = known
    return known


def unplace(
    capacities: Mapping[str, NodeCapacity], request: ResourceRequest, placements: Sequence[Placement]
) -> list[NodeCapacity]:
    """The nodes after what ran there is confirmed gone."""
    return [
        take_back(capacities[one.node], one.resources, one.devices, request.requests)
        for one in placements
        if one.node in capacities
    ]


def no_capacity(node: str, short: Shortage) -> Refusal:
    if short.resource == EXCLUSIVE:
        return Refusal(Code.NO_CAPACITY, f"node {node} is not empty, or is held as a whole")
    needs, has = (format_amount(short.resource, value) for value in (short.needs, short.has))
    message = f"node {node} has {has} {short.resource} free, {needs} needed"
    cause = Cause(
        f"no_capacity_{short.resource}", message, dimension=short.resource, limit=has, requested_delta=needs, scope=node
    )
    return Refusal(Code.NO_CAPACITY, message, causes=(cause,))
