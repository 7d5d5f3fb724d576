"""Node capacity: allocatable and allocated resources, device by device.

A whole number of a device resource takes whole devices; a fraction below one shares a single device. Only increases are
checked: a node that lost a GPU may have allocated more than it has left, and its work continues.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from msgspec import Struct, field

from bursar.core.nodes.node_claim import NodeClaim
from bursar.core.objects.charge import Amounts
from bursar.core.objects.object import Key
from bursar.core.values.quantity import is_device

WHOLE = 1000  # one device, one node, in thousandths
DEVICES_MAX = 1024
SIMULATED = "bursar.io/simulated"  # the label and the taint of a simulated node

Devices = Mapping[str, tuple[int, ...]]  # resource → indices of the allocated devices


class NodeGate(Struct, frozen=True, omit_defaults=True):
    """The admission conditions of a node beside its capacity: taints, tenants, fractions of devices and isolation."""

    taints: tuple[tuple[str, str, str], ...] = ()  # (key, value, effect)
    tenants: tuple[str, ...] = ()  # reserved for these tenants and their subtrees; empty: for all
    whole_only: bool | None = None  # refuses fractions of devices; None: the setting of the system
    isolated: bool = False  # its agent runs every placement in a sandbox
    traceless: bool = False  # its agent removes all files of a placement at its end
    wipes: bool = False  # its agent has a wipe hook


class NodeCapacity(Struct, frozen=True):
    """A node with its allocatable and allocated resources, its claim and its admission conditions."""

    name: str
    generation: int
    schedulable: bool
    allocatable: Amounts
    allocated: Amounts = field(default_factory=dict)
    # resource → the allocated part of each device, in thousandths
    devices: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    uid: str = ""
    claim: NodeClaim | None = None  # if it is claimed for sensitive work
    gate: NodeGate | None = None  # None: no conditions, and no isolation
    dirty: bool = False  # work that may have left files ran here since the last wipe


class CapacityRise(Struct, frozen=True):
    """More of a resource than a node offered before, by its own word."""

    node: str
    resource: str
    before: int
    after: int


class Shortage(Struct, frozen=True):
    """The resource of which a node has too little free, with the numbers."""

    resource: str
    needs: int
    has: int


class Fit(Struct, frozen=True):
    """The resources and devices that a placement takes from a node."""

    resources: Amounts
    devices: Devices


class Placement(Struct, frozen=True):
    """One node's part of a placed allocation: the desired state for its agent, and the resources allocated for it."""

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
    lease: int = 0  # the lease that pays for it; 0: it is not prepaid

    @property
    def key(self) -> Key:
        """The allocation that is placed."""
        return Key("Allocation", self.namespace, self.name)


EXCLUSIVE = "exclusive"  # the pseudo resource of a node that is allocated as a whole


def device_list(allocatable: Amounts, devices: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, ...]]:
    """The allocated part of each device of a node after its capacity changed; devices in use are kept."""
    listed: dict[str, tuple[int, ...]] = {}
    for resource, amount in allocatable.items():
        if is_device(resource):
            used = tuple(devices.get(resource, ()))
            count = max(min(amount // WHOLE, DEVICES_MAX), _last_used(used))
            listed[resource] = (used + (0,) * count)[:count]
    for resource, before in devices.items():
        # A removed resource is kept until the work that uses it has ended.
        if resource not in listed and any(before):
            listed[resource] = tuple(before)
    return listed


def _last_used(used: Sequence[int]) -> int:
    return max((index + 1 for index, amount in enumerate(used) if amount), default=0)


def fit(node: NodeCapacity, requests: Amounts, *, exclusive: bool, wanted: Devices | None = None) -> Fit | Shortage:
    """The resources that a placement would take, or the first resource that is short."""
    if EXCLUSIVE in node.allocated:
        return Shortage(EXCLUSIVE, WHOLE, 0)
    if exclusive:
        return _fit_whole(node, requests)
    # Every placement counts as one pod, also on nodes that do not limit their number.
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
    """The use of the present devices: a node that lost some keeps the first ones."""
    return tuple(node.devices.get(resource, ()))[: node.allocatable.get(resource, 0) // WHOLE]


def choose_devices(used: Sequence[int], amount: int, wanted: Sequence[int] | None) -> tuple[int, ...] | None:
    """Choose devices: the wanted ones if free, else whole ones from the first on; a fraction goes to the fullest."""
    if amount < WHOLE:
        capacity = [index for index, taken in enumerate(used) if taken + amount <= WHOLE]
        if wanted is not None:
            return (wanted[0],) if len(wanted) == 1 and wanted[0] in capacity else None
        # The fullest device with enough left (best fit), so that whole devices stay free.
        return (max(capacity, key=lambda index: (used[index], -index)),) if capacity else None
    count = amount // WHOLE
    if wanted is not None:
        there = range(len(used))
        free = len(set(wanted)) == len(wanted) == count and all(one in there and not used[one] for one in wanted)
        return tuple(sorted(wanted)) if free else None
    chosen = [index for index, taken in enumerate(used) if not taken][:count]
    return tuple(chosen) if len(chosen) == count else None


def give(node: NodeCapacity, taken: Fit, requests: Amounts) -> NodeCapacity:
    return _change(node, taken.resources, taken.devices, requests, 1, dirty=node.dirty or not is_traceless(node.gate))


def is_traceless(gate: NodeGate | None) -> bool:
    """Whether no files of a placement remain on the node after its end."""
    return gate is not None and gate.traceless


def keeps_off(gate: NodeGate | None) -> bool:
    """Whether the node refuses some work by its taints, tenants or fractions of devices."""
    return gate is not None and bool(gate.taints or gate.tenants or gate.whole_only)


def is_open_to(dedicated: Collection[str], lineage: Iterable[str]) -> bool:
    """Whether a node dedicated to these tenants takes work of a tenant with this lineage. Without tenants it takes all
    work."""
    return not dedicated or any(tenant in dedicated for tenant in lineage)


def is_isolated(gate: NodeGate | None) -> bool:
    """Whether the node isolates the work of tenants from each other."""
    return gate is not None and gate.isolated


def take_back(node: NodeCapacity, resources: Amounts, devices: Devices, requests: Amounts) -> NodeCapacity:
    """The exact reverse of `give`, except that the node stays soiled."""
    return _change(node, resources, devices, requests, -1, dirty=node.dirty)


def _change(
    node: NodeCapacity, resources: Amounts, devices: Devices, requests: Amounts, sign: int, *, dirty: bool
) -> NodeCapacity:
    allocated = dict(node.allocated)
    for resource, amount in resources.items():
        allocated[resource] = allocated.get(resource, 0) + sign * amount
        assert allocated[resource] >= 0, f"node {node.name} would release more {resource} than it allocated"
        if not allocated[resource]:
            del allocated[resource]
    use = dict(node.devices)
    for resource, indices in devices.items():
        # A fraction uses a part of one shared device; otherwise devices are used as a whole.
        each = requests[resource] if requests.get(resource, WHOLE) < WHOLE and EXCLUSIVE not in resources else WHOLE
        used = list(use[resource])
        for index in indices:
            used[index] += sign * each
            assert 0 <= used[index] <= WHOLE, f"device {index} of {node.name} out of range"
        use[resource] = tuple(used)
    offers = (node.name, node.generation, node.schedulable, node.allocatable)
    return NodeCapacity(*offers, allocated, use, node.uid, node.claim, node.gate, dirty)


def dominant_fraction(node: NodeCapacity, requests: Amounts) -> int:
    """The dominant share of the requests on this node (the largest over its resources), in thousandths, rounded up."""
    largest = 1
    for resource, amount in requests.items():
        if amount and (whole := node.allocatable.get(resource)):
            largest = max(largest, -(-amount * WHOLE // whole))
    return min(WHOLE, largest)
