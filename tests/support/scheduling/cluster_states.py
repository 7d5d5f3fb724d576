"""Short words to build worlds for the scheduler and to read what a cycle did with them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from bursar.core.nodes.node import WHOLE, NodeCapacity, Shortage, choose_devices, device_list, fit, give
from bursar.core.objects.allocation import Gang, GangKey
from bursar.core.objects.ask import ANYWHERE, Ask, InterPodTerm, Operator, Requirement, Shape, Spread, Taint, Where
from bursar.core.objects.charge import Charge, Facts
from bursar.core.objects.pending_reason import PendingReason
from bursar.core.quota.quota import Counter
from bursar.core.quota.tenant_tree import Namespace, ResourceQuota, Tenant, Tree
from bursar.core.scheduling.cycle.cycle import decide
from bursar.core.scheduling.cycle.plan import Plan, SchedulingPolicy
from bursar.core.scheduling.state.cluster_state import ClusterState
from bursar.core.scheduling.state.equivalence import EquivalenceKey
from bursar.core.scheduling.state.fair_share import ShareOf
from bursar.core.scheduling.state.fleet import Need
from bursar.core.scheduling.state.placed_columns import NEVER, Spot
from bursar.core.values.selector import Op, Selector, SelectorTerm

GPU = "nvidia.com/gpu"
FPGA = "xilinx.com/fpga"
HOST = "kubernetes.io/hostname"
RACK = "rack"
ZONE = "topology.kubernetes.io/zone"
NOW = 1_000_000.0
LONG_AGO = NOW - 86_400.0


# Nodes.


@dataclass(frozen=True)
class Machine:
    name: str
    offers: Mapping[str, int]
    labels: Mapping[str, str] = field(default_factory=dict)
    taints: tuple[Taint, ...] = ()
    ready: bool = True
    cordoned: bool = False


def machine(
    name: str,
    *,
    gpus: int = 0,
    cpu: int = 0,
    memory: int = 0,
    pods: int | None = None,
    rack: str = "",
    zone: str = "",
    taints: tuple[Taint, ...] = (),
    ready: bool = True,
    cordoned: bool = False,
    offers: Mapping[str, int] | None = None,
    **labels: str,
) -> Machine:
    """A node; cpus, GPUs and pods are whole ones. Labels may be given as keywords."""
    amounts = {"cpu": cpu * WHOLE, "memory": memory, GPU: gpus * WHOLE}
    if pods is not None:
        amounts["pods"] = pods * WHOLE
    amounts = {resource: amount for resource, amount in amounts.items() if amount or resource == "pods"}
    placed = {key: value for key, value in ((RACK, rack), (ZONE, zone)) if value}
    return Machine(name, {**amounts, **(offers or {})}, {HOST: name, **placed, **labels}, taints, ready, cordoned)


def put(cluster: ClusterState, one: Machine) -> None:
    cluster.put_node(
        one.name, one.offers, labels=one.labels, taints=one.taints, ready=one.ready, cordoned=one.cordoned
    )  # fmt: skip


def cluster_of(
    *machines: Machine, tenants: Iterable[ShareOf] = (), profiles: Mapping[str, str] | None = None
) -> ClusterState:
    cluster = ClusterState()
    for one in machines:
        put(cluster, one)
    cluster.tenants.update({share.name: share for share in tenants})
    cluster.profiles.update(profiles or {})
    return cluster


# Asks.


def shape(
    *,
    gpus: float = 0,
    cpu: float = 0,
    memory: int = 0,
    nodes: int = 1,
    exclusive: bool = False,
    where: Where = ANYWHERE,
    wants: Mapping[str, int] | None = None,
) -> Shape:
    amounts = {GPU: round(gpus * WHOLE), "cpu": round(cpu * WHOLE), "memory": memory, **(wants or {})}
    requests = tuple(sorted((name, amount) for name, amount in amounts.items() if amount))
    return Shape(requests, nodes, exclusive, where)


def ask(
    name: str,
    *,
    tenant: str = "t",
    namespace: str = "n",
    at: float = NOW - 60.0,
    priority: int = 0,
    ttl: int = 0,
    preempts: bool = True,
    queue: str = "default",
    gang: Gang | None = None,
    job: str = "",
    labels: Mapping[str, str] | None = None,
    charge: Charge | None = None,
    checkpoint: int = 0,
    data_ready: float | None = None,
    owner: str = "",
    crosses: bool = False,
    **what: Any,
) -> Ask:
    """An allocation that was submitted a minute ago; `what` is what its shape takes."""
    form = shape(**what)
    return Ask(
        name, namespace, name, tenant, form, at, priority, preempts, queue, ttl, gang, job, labels or {},
        charge if charge is not None else charge_of(form), checkpoint, data_ready,
        owner=owner, cross_tenant=crosses,
    )  # fmt: skip


def charge_of(form: Shape) -> Charge:
    """The charge of such an allocation at admission."""
    amounts = {name: amount * form.nodes for name, amount in form.requests}
    if form.exclusive:
        amounts["nodes"] = form.nodes * WHOLE
    return Charge(Facts(scoped=True), {**amounts, "allocations": WHOLE, "pods": WHOLE})


def members(group: str, count: int, *, least: int = 0, timeout: int = 0, **what: Any) -> list[Ask]:
    """The members of a gang, all alike."""
    gang = Gang(group, least or count, timeout)
    return [ask(f"{group}-{number}", gang=gang, **what) for number in range(count)]


def labelled(**labels: str) -> Selector:
    return Selector(tuple(SelectorTerm(key, Op.IN, (value,)) for key, value in sorted(labels.items())))


def near(key: str, **labels: str) -> Where:
    return Where(near=(InterPodTerm(key, labelled(**labels)),))


def apart(key: str, **labels: str) -> Where:
    return Where(apart=(InterPodTerm(key, labelled(**labels)),))


def spread(key: str, skew: int = 1, *, hard: bool = True, **labels: str) -> Where:
    """Evenly over a topology; without labels: the gang, or the job."""
    return Where(spreads=(Spread(key, skew, hard, labelled(**labels) if labels else None),))


def requires(*terms: tuple[tuple[str, str, str], ...]) -> Where:
    """Any of the terms; each is a tuple of (label, operator, values divided by commas)."""
    return Where(
        required=tuple(
            tuple(
                Requirement(key, Operator(name), tuple(filter(None, values.split(",")))) for key, name, values in term
            )
            for term in terms
        )
    )


# Running.


def submit(cluster: ClusterState, *asks: Ask) -> None:
    for one in asks:
        cluster.wait(one)


def run(
    cluster: ClusterState,
    one: Ask,
    *names: str,
    since: float = LONG_AGO,
    ends_in: float = NEVER,
    devices: tuple[int, ...] | None = None,
    ending: bool = False,
) -> None:
    """Let an allocation run on these nodes, on the devices given or on those that would be chosen."""
    fleet = cluster.fleet
    spots = []
    for name in names:
        row = fleet.row_of[name]
        taken = free_devices(cluster, row, fleet.need(one.shape), devices)
        spots.append(Spot(row, taken))
    cluster.place(one, spots, since=since, ends_at=NOW + ends_in, ending=ending)


def free_devices(
    cluster: ClusterState, row: int, need: Need, wanted: tuple[int, ...] | None = None
) -> tuple[tuple[int, tuple[int, ...]], ...]:
    if need.exclusive:
        return ()
    chosen = []
    for column, amount in [(column, count * WHOLE) for column, count in need.whole] + list(need.shared):
        used = [WHOLE - int(part) for part in cluster.fleet.now.devices[column][row]]
        found = choose_devices(used, amount, wanted)
        assert found is not None, "there is no such device free"
        chosen.append((column, found))
    return tuple(chosen)


def full_of(**residents: dict[str, Any]) -> ClusterState:
    """One node with as many GPUs as there are residents, who have one each."""
    cluster = cluster_of(machine("a", gpus=len(residents)))
    for name, what in residents.items():
        since = what.pop("since", LONG_AGO)
        run(cluster, ask(name, gpus=1, **what), "a", since=since)
    return cluster


def cycle(cluster: ClusterState, now: float = NOW, **policy: Any) -> Plan:
    return decide(cluster, SchedulingPolicy(**policy), now)


def place(cluster: ClusterState, *asks: Ask, now: float = NOW, **policy: Any) -> dict[str, tuple[str, ...]]:
    """Submit these, decide once, and say what went where."""
    submit(cluster, *asks)
    return bound(cluster, cycle(cluster, now, **policy))


def bound(cluster: ClusterState, plan: Plan) -> dict[str, tuple[str, ...]]:
    """What a plan places, by name, in the order of the plan."""
    names = cluster.fleet.names
    return {
        one.uid: tuple(names[spot.row] for spot in spots) for binding in plan.bindings for one, spots in binding.members
    }


def running(cluster: ClusterState) -> dict[str, tuple[str, ...]]:
    """All nodes with free capacity now."""
    names = cluster.fleet.names
    return {uid: tuple(names[spot.row] for spot in one.spots) for uid, one in cluster.placed.items()}


def evicted(plan: Plan) -> dict[str, str]:
    """The victims of a plan, each with the rule."""
    return {victim.uid: str(victim.rule) for one in plan.preemptions for victim in one.victims}


def victims_for(cluster: ClusterState, now: float = NOW, gpus: float = 1, **what: Any) -> dict[str, str]:
    """Submit one that asks, decide once, and say who goes for it."""
    submit(cluster, ask("asker", gpus=gpus, **what))
    return evicted(cycle(cluster, now))


def end(cluster: ClusterState, *uids: str) -> None:
    for uid in uids:
        cluster.forget(uid)


def stop_victims(cluster: ClusterState, plan: Plan) -> None:
    """The victims stop and wait again."""
    for preempting in plan.preemptions:
        for victim in preempting.victims:
            cluster.wait(cluster.placed[victim.uid].ask)


def end_what_is_due(cluster: ClusterState, now: float) -> None:
    for uid in [uid for uid, one in cluster.placed.items() if one.ends_at <= now]:
        cluster.forget(uid)


# Reasons.


def why(cluster: ClusterState, plan: Plan, uid: str) -> PendingReason:
    """Why something waits: as this plan says, or as was found before."""
    group = cluster.waiting[uid]
    keys: list[EquivalenceKey | GangKey] = [group.key]
    if group.key.gang is not None:
        keys.append(group.key.gang)
    found = [plan.reasons[key] for key in keys if key in plan.reasons]
    found += [cluster.memory.blocked[key].reason for key in keys if key in cluster.memory.blocked]
    assert found, f"nobody says why {uid} waits"
    return found[0]


def reasons(cluster: ClusterState, plan: Plan) -> dict[str, PendingReason]:
    return {uid: why(cluster, plan, uid) for uid in cluster.waiting}


# Limits.


def limit(
    cluster: ClusterState,
    *tenants: Tenant,
    quotas: Iterable[ResourceQuota] = (),
    namespaces: Mapping[str, str] | None = None,
) -> None:
    """Put limits into force; by default namespace `n` is tenant `t`'s. What runs already is counted."""
    owners = namespaces or {"n": "t"}
    by_namespace: dict[str, tuple[ResourceQuota, ...]] = {}
    for quota in quotas:
        by_namespace[quota.namespace] = (*by_namespace.get(quota.namespace, ()), quota)
    tree = Tree(
        tenants={one.name: one for one in tenants},
        namespaces={name: Namespace(name, tenant) for name, tenant in owners.items()},
        quotas=by_namespace,
    )
    counters = {
        (f"tenant:{one.name}", dimension): Counter(hard) for one in tenants for dimension, hard in one.limits.items()
    }
    counters.update({(one.scope, dimension): Counter(hard) for one in quotas for dimension, hard in one.hard.items()})
    cluster.limits.load(tree, counters)
    for one in cluster.placed.values():
        parts = sum(cluster.fleet.node_part(spot.row, one.ask.shape) for spot in one.spots)
        cluster.limits.bind(one.ask, parts, 1)


# The same capacity, counted by the rules that decide commits.


def capacities_of(machines: Iterable[Machine]) -> dict[str, NodeCapacity]:
    return {
        one.name: NodeCapacity(
            one.name, 1, one.ready and not one.cordoned, one.offers, {}, device_list(one.offers, {})
        )
        for one in machines
    }  # fmt: skip


def settle(capacities: dict[str, NodeCapacity], cluster: ClusterState, one: Ask, spots: Iterable[Spot]) -> None:
    """Allocate its resources by the rules of `core.node`; fails if a plan has overfilled a node or device."""
    resources = {column: name for name, column in cluster.fleet.device_column_of.items()}
    requests = dict(one.shape.requests)
    for spot in spots:
        name = cluster.fleet.names[spot.row]
        wanted = {resources[column]: indices for column, indices in spot.devices}
        taken = fit(capacities[name], requests, exclusive=one.shape.exclusive, wanted=wanted)
        assert not isinstance(taken, Shortage), f"{one.uid} does not fit on {name}: {taken}"
        capacities[name] = give(capacities[name], taken, requests)


def recount(cluster: ClusterState, machines: Iterable[Machine]) -> dict[str, NodeCapacity]:
    """All nodes, with the resources of every placement allocated again, one by one."""
    capacities = capacities_of(machines)
    everything = sorted(cluster.placed.values(), key=lambda one: (one.ask.shape.exclusive, one.ask.uid))
    for one in everything:
        settle(capacities, cluster, one.ask, one.spots)
    return capacities
