"""Small worlds to put questions to: why it waits, where it stands, what if."""

from collections.abc import Mapping
from typing import Any

from bursar.core.objects.ask import Ask, Shape, Where
from bursar.core.objects.charge import Charge
from bursar.core.quota.quota import Counter
from bursar.core.quota.tenant_tree import Namespace, Tenant, Tree
from bursar.core.scheduling.cycle.plan import Policy
from bursar.core.scheduling.explain.explain import explain
from bursar.core.scheduling.explain.explain_types import Explanation
from bursar.core.scheduling.state.cluster_state import World
from bursar.core.scheduling.state.placed_columns import Spot

GPU = "nvidia.com/gpu"
NOW = 1_000_000.0
POLICY = Policy()


def world_of(*nodes: int, labels: Mapping[str, str] | None = None, **options: Any) -> World:
    """Nodes n0, n1, … with so many GPUs each."""
    world = World()
    for index, gpus in enumerate(nodes):
        offered = {"cpu": 64_000, "memory": 256 << 30, GPU: gpus * 1000, "pods": 110_000}
        world.put_node(f"n{index}", offered, labels=dict(labels or {}), **options)
    return world


def ask(
    name: str, gpus: int = 1, *, nodes: int = 1, exclusive: bool = False, where: Where | None = None, **more: Any
) -> Ask:
    requests = tuple(sorted({"cpu": 1000, GPU: gpus * 1000}.items()))
    shape = Shape(requests, nodes, exclusive, where or Where())
    more.setdefault("submitted_at", NOW - 60)
    return Ask(name, "team", name, more.pop("tenant", "physics"), shape, **more)


def placed(world: World, one: Ask, node: str, devices: tuple[int, ...], *, ends_in: float = float("inf")) -> None:
    row = world.fleet.row_of[node]
    spot = Spot(row, ((world.fleet.device_column_of[GPU], devices),))
    world.place(one, [spot], since=NOW - 10_000, ends_at=NOW + ends_in)


def told(world: World, uid: str) -> Explanation:
    found = explain(world, uid, POLICY, NOW)
    assert found is not None
    return found


def waiting(world: World, *asks: Ask) -> World:
    for one in asks:
        world.wait(one)
    return world


def snapshot(world: World) -> Any:
    """Everything that a question must leave as it was."""
    now = world.fleet.now
    return (
        now.free.copy().tolist(),
        [one.copy().tolist() for one in now.devices],
        now.placed.tolist(),
        dict(world.placed),
        {uid: (one.ending, one.ends_at) for uid, one in world.placed.items()},
        world.running.ends().tolist(),
        {uid: sorted(group.members) for uid, group in world.waiting.items()},
        dict(world.nominated),
        dict(world.blocked),
        world.reservation,
        world.reserved_for,
        {tenant: dict(used) for tenant, used in world.used.items()},
        {row: (cell.hard, cell.bound) for row, cell in world.limits.cells.items()},
        dict(world.boosts),
        {kin: dict(rows) for kin, rows in world.tallies.rows.items()},
    )


def limited(world: World, hard: int, bound: int) -> World:
    tree = Tree(tenants={"physics": Tenant("physics")}, namespaces={"team": Namespace("team", "physics")})
    world.limits.load(tree, {("tenant:physics", GPU): Counter(hard=hard * 1000, bound=bound * 1000)})
    return world


def charged(name: str, gpus: int) -> Ask:
    return ask(name, gpus, charge=Charge(accepted={GPU: gpus * 1000}))
