"""Small worlds to put questions to: why it waits, where it stands, what if."""

from collections.abc import Mapping
from typing import Any

from bursar.core.objects.ask import Ask, Shape, Where
from bursar.core.objects.charge import Charge
from bursar.core.quota.quota import Counter
from bursar.core.quota.tenant_tree import Namespace, Tenant, Tree
from bursar.core.scheduling.cycle.plan import SchedulingPolicy
from bursar.core.scheduling.explain.explain import explain
from bursar.core.scheduling.explain.explain_types import ExplainAnswer
from bursar.core.scheduling.state.cluster_state import ClusterState
from bursar.core.scheduling.state.placed_columns import Spot

GPU = "nvidia.com/gpu"
NOW = 1_000_000.0
POLICY = SchedulingPolicy()


def cluster_of(*nodes: int, labels: Mapping[str, str] | None = None, **options: Any) -> ClusterState:
    """Nodes n0, n1, … with so many GPUs each."""
    cluster = ClusterState()
    for index, gpus in enumerate(nodes):
        offered = {"cpu": 64_000, "memory": 256 << 30, GPU: gpus * 1000, "pods": 110_000}
        cluster.put_node(f"n{index}", offered, labels=dict(labels or {}), **options)
    return cluster


def ask(
    name: str, gpus: int = 1, *, nodes: int = 1, exclusive: bool = False, where: Where | None = None, **more: Any
) -> Ask:
    requests = tuple(sorted({"cpu": 1000, GPU: gpus * 1000}.items()))
    shape = Shape(requests, nodes, exclusive, where or Where())
    more.setdefault("submitted_at", NOW - 60)
    return Ask(name, "team", name, more.pop("tenant", "physics"), shape, **more)


def placed(
    cluster: ClusterState, one: Ask, node: str, devices: tuple[int, ...], *, ends_in: float = float("inf")
) -> None:
    row = cluster.fleet.row_of[node]
    spot = Spot(row, ((cluster.fleet.device_column_of[GPU], devices),))
    cluster.place(one, [spot], since=NOW - 10_000, ends_at=NOW + ends_in)


def told(cluster: ClusterState, uid: str) -> ExplainAnswer:
    found = explain(cluster, uid, POLICY, NOW)
    assert found is not None
    return found


def waiting(cluster: ClusterState, *asks: Ask) -> ClusterState:
    for one in asks:
        cluster.wait(one)
    return cluster


def snapshot(cluster: ClusterState) -> Any:
    """Everything that a question must leave as it was."""
    now = cluster.fleet.now
    return (
        now.free.copy().tolist(),
        [one.copy().tolist() for one in now.devices],
        now.placed.tolist(),
        dict(cluster.placed),
        {uid: (one.ending, one.ends_at) for uid, one in cluster.placed.items()},
        cluster.running.ends().tolist(),
        {uid: sorted(group.members) for uid, group in cluster.waiting.items()},
        dict(cluster.nominated),
        dict(cluster.memory.blocked),
        cluster.memory.reservation,
        cluster.memory.reserved_for,
        {tenant: dict(used) for tenant, used in cluster.used.items()},
        {row: (cell.hard, cell.bound) for row, cell in cluster.limits.cells.items()},
        dict(cluster.boosts),
        {match_key: dict(rows) for match_key, rows in cluster.topology_counts.rows.items()},
    )


def limited(cluster: ClusterState, hard: int, bound: int) -> ClusterState:
    tree = Tree(tenants={"physics": Tenant("physics")}, namespaces={"team": Namespace("team", "physics")})
    cluster.limits.load(tree, {("tenant:physics", GPU): Counter(hard=hard * 1000, bound=bound * 1000)})
    return cluster


def charged(name: str, gpus: int) -> Ask:
    return ask(name, gpus, charge=Charge(accepted={GPU: gpus * 1000}))
