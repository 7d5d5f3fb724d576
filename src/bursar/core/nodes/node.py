"""A node's room: what it can give, what it has given, device by device.

A whole number of a device resource takes whole devices; a fraction below one shares a single device. Capacity is
checked for increases only: a node that lost a GPU may stand above what it has left, and nothing is stopped for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct, field

from bursar.core.nodes.node_claim import NodeClaim
from bursar.core.objects.charge import Amounts

WHOLE = 1000  # one device, one node, in thousandths
DEVICES_MAX = 1024
SIMULATED = "bursar.io/simulated"  # the label and the taint of a node that only acts as if it ran something

Devices = Mapping[str, tuple[int, ...]]  # resource → indices of the devices given


class NodeGate(Struct, frozen=True, omit_defaults=True):
    """The terms of a node, whatever room it has: its taints, whom it is for, what it does not take, and how its agent
    keeps tenants apart."""

    taints: tuple[tuple[str, str, str], ...] = ()  # (key, value, effect)
    tenants: tuple[str, ...] = ()  # with those below them; none: everybody's
    whole_only: bool = False  # it takes no work that asks for a part of a device
    isolated: bool = False  # its agent runs every placement in a sandbox
    traceless: bool = False  # everything a placement writes is removed with it
    wipes: bool = False  # its agent has a wipe hook


class NodeCapacity(Struct, frozen=True):
    name: str
    generation: int
    schedulable: bool
    allocatable: Amounts
    allocated: Amounts = field(default_factory=dict)
    # resource → what of each device is given away, in thousandths
    devices: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    uid: str = ""
    claim: NodeClaim | None = None  # whose it is, where it is claimed for sensitive work
    gate: NodeGate | None = None  # None: it keeps nothing off, and isolates nothing
    soiled: bool = False  # work ran here since the last wipe that may have left something behind


class Shortage(Struct, frozen=True):
    """Why something does not fit on a node, with its numbers."""

    resource: str
    needs: int
    has: int


class Fit(Struct, frozen=True):
    """What a placement takes from a node."""

    resources: Amounts
    devices: Devices


class Placement(Struct, frozen=True):
    """What one node is wanted to run, and what it gave for it."""

    node: str
    uid: str
    namespace: str
    name: str
    tenant: str
    epoch: int
    exclusive: bool
    resources: Amounts
    devices: Devices
    wanted: bool = True
    lease: int = 0  # what pays for it; 0 where nobody does


EXCLUSIVE = "exclusive"  # the mark on a node that is given as a whole


def is_device(resource: str) -> bool:
    """Extended resources are counted device by device; cpu, memory and the like are not."""
    return "/" in resource


def device_list(allocatable: Amounts, devices: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, ...]]:
    """One entry per device that the node has; the use of those it had before is kept."""
    listed: dict[str, tuple[int, ...]] = {}
    for resource, amount in allocatable.items():
        if is_device(resource):
            used = tuple(devices.get(resource, ()))
            count = max(min(amount // WHOLE, DEVICES_MAX), _last_used(used))
            listed[resource] = (used + (0,) * count)[:count]
    for resource, before in devices.items():
        # A resource that is gone is remembered until what used it is gone as well.
        if resource not in listed and any(before):
            listed[resource] = tuple(before)
    return listed


def _last_used(used: Sequence[int]) -> int:
    return max((index + 1 for index, amount in enumerate(used) if amount), default=0)


def fit(node: NodeCapacity, requests: Amounts, *, exclusive: bool, wanted: Devices | None = None) -> Fit | Shortage:
    """What placing this would take, or the first thing that is short."""
    if EXCLUSIVE in node.allocated:
        return Shortage(EXCLUSIVE, WHOLE, 0)
    if exclusive:
        return _fit_whole(node, requests)
    # Everything placed counts as one, also where nothing limits how many there may be.
    needs = {**requests, "pods": WHOLE}
    allocatable, allocated = node.allocatable, node.allocated
    devices: dict[str, tuple[int, ...]] = {}
    for resource, amount in needs.items():
        if resource == "pods" and resource not in allocatable:
            continue
        free = allocatable.get(resource, 0) - allocated.get(resource, 0)
        if amount > free:
            return Shortage(resource, amount, max(0, free))
    for resource, amount in requests.items():
        if amount and is_device(resource):
            usable = _usable(node, resource)
            chosen = choose_devices(usable, amount, wanted.get(resource) if wanted is not None else None)
            if chosen is None:
                return Shortage(resource, amount, sum(WHOLE - used for used in usable if used < WHOLE))
            devices[resource] = chosen
    return Fit(needs, devices)


def _fit_whole(node: NodeCapacity, requests: Amounts) -> Fit | Shortage:
    if any(node.allocated.values()):
        return Shortage(EXCLUSIVE, WHOLE, 0)
    for resource, amount in requests.items():
        if amount > node.allocatable.get(resource, 0):
            return Shortage(resource, amount, node.allocatable.get(resource, 0))
    devices = {resource: tuple(range(len(_usable(node, resource)))) for resource in node.devices}
    return Fit({**node.allocatable, EXCLUSIVE: WHOLE}, devices)


def _usable(node: NodeCapacity, resource: str) -> tuple[int, ...]:
    """The devices still there: a node that lost some keeps the first ones."""
    return tuple(node.devices.get(resource, ()))[: node.allocatable.get(resource, 0) // WHOLE]


def choose_devices(used: Sequence[int], amount: int, wanted: Sequence[int] | None) -> tuple[int, ...] | None:
    """Which devices to give: those asked for if free, else whole ones from the left, a share on the fullest."""
    if amount < WHOLE:
        capacity = [index for index, taken in enumerate(used) if taken + amount <= WHOLE]
        if wanted is not None:
            return (wanted[0],) if len(wanted) == 1 and wanted[0] in capacity else None
        # The fullest device that still has room, so that whole ones stay whole.
        return (max(capacity, key=lambda index: (used[index], -index)),) if capacity else None
    count = amount // WHOLE
    if wanted is not None:
        there = range(len(used))
        free = len(set(wanted)) == len(wanted) == count and all(one in there and not used[one] for one in wanted)
        return tuple(sorted(wanted)) if free else None
    chosen = [index for index, taken in enumerate(used) if not taken][:count]
    return tuple(chosen) if len(chosen) == count else None


def give(node: NodeCapacity, taken: Fit, requests: Amounts) -> NodeCapacity:
    return _change(node, taken.resources, taken.devices, requests, 1, soiled=node.soiled or not is_traceless(node.gate))


def is_traceless(gate: NodeGate | None) -> bool:
    """Whether nothing of a placement is left on the node once it has ended."""
    return gate is not None and gate.traceless


def keeps_off(gate: NodeGate | None) -> bool:
    """Whether some work may not go to the node, by its taints, whom it is for, or what it takes."""
    return gate is not None and bool(gate.taints or gate.tenants or gate.whole_only)


def is_isolated(gate: NodeGate | None) -> bool:
    """Whether work of one tenant cannot reach another's on the node."""
    return gate is not None and gate.isolated


def take_back(node: NodeCapacity, resources: Amounts, devices: Devices, requests: Amounts) -> NodeCapacity:
    """The exact reverse of `give`, but for what work may have left behind."""
    return _change(node, resources, devices, requests, -1, soiled=node.soiled)


def _change(
    node: NodeCapacity, resources: Amounts, devices: Devices, requests: Amounts, sign: int, *, soiled: bool
) -> NodeCapacity:
    allocated = dict(node.allocated)
    for resource, amount in resources.items():
        allocated[resource] = allocated.get(resource, 0) + sign * amount
        assert allocated[resource] >= 0, f"node {node.name} would have given back more {resource} than it gave"
        if not allocated[resource]:
            del allocated[resource]
    use = dict(node.devices)
    for resource, indices in devices.items():
        # One shared device carries the fraction; whole ones are taken whole.
        each = requests[resource] if requests.get(resource, WHOLE) < WHOLE and EXCLUSIVE not in resources else WHOLE
        used = list(use[resource])
        for index in indices:
            used[index] += sign * each
            assert 0 <= used[index] <= WHOLE, f"device {index} of {node.name} out of range"
        use[resource] = tuple(used)
    offers = (node.name, node.generation, node.schedulable, node.allocatable)
    return NodeCapacity(*offers, allocated, use, node.uid, node.claim, node.gate, soiled)


def dominant_fraction(node: NodeCapacity, requests: Amounts) -> int:
    """The largest part of any of the node's resources that this takes, in thousandths of the node, rounded up."""
    largest = 1
    for resource, amount in requests.items():
        if amount and (whole := node.allocatable.get(resource)):
            largest = max(largest, -(-amount * WHOLE // whole))
    return min(WHOLE, largest)
